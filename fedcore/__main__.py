"""``python -m fedcore``: the command line."""

from fedcore.cli import main

if __name__ == "__main__":  # the processes of a run import this module under another name
    main()
