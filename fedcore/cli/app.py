"""The entry point of the command line: the parser of all commands, and ``main``."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from fedcore.cli import data, doctor, listing, merge, plan, privacy, run, store
from fedcore.cli.terminal import FAILED, INTERRUPTED, MISTAKE, Parser
from fedcore.errors import FedcoreError, MissingDependencyError
from fedcore.runtime import __version__, hide_warnings_of_others


def parser() -> Parser:
    """Return the parser of the whole command line."""
    top = Parser("fedcore", description="The server side of federated learning.", allow_abbrev=False)
    top.epilog = "Start with: fedcore run quickstart"
    top.add_argument("--version", action="version", version=f"fedcore {__version__}")
    top.add_commands()
    for module in (run, listing, data, doctor, store, merge, privacy, plan):
        module.add_arguments(top)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, and exit with a status of ``terminal`` if it fails.

    Args:
        arguments: the arguments after the program's name. Default: the arguments of this process.
    """
    try:
        options = parser().parse_args(arguments)
        if missing := [package for package in options.needs if find_spec(package) is None]:
            raise MissingDependencyError.of("this command", ", ".join(missing), extra="sim")
        hide_warnings_of_others()
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # a reader such as head closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # prevents an error message of Python at exit
        sys.exit(FAILED)
    except (FedcoreError, OSError) as error:  # an OSError is a full disk, or a folder without write permission
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE if isinstance(error, FedcoreError) else FAILED)
