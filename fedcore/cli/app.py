"""The command line from end to end: one command is found and done, and its errors become words and a status."""

import os
import sys
from collections.abc import Sequence

from fedcore.cli.commands import commands
from fedcore.cli.status import FAILED, INTERRUPTED, MISTAKE
from fedcore.errors import FedcoreError


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what a command line says.

    Args:
        arguments: without the program's name; None for those of this process.

    Raises:
        SystemExit: with one of ``status``, where it did not go well.
    """
    try:
        options = vars(commands().parse_args(arguments))
        options.pop("do")(**options)
        sys.stdout.flush()
    except FedcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # who reads, head for instance, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains as it ends
        sys.exit(FAILED)
    except OSError as error:  # a disk that is full, a folder that nobody may write to
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)
