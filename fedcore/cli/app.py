"""The command line: the table of commands, and the call of one of them."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from fedcore.cli import data, doctor, listing, report, run, store
from fedcore.cli.terminal import FAILED, INTERRUPTED, MISTAKE, Parser
from fedcore.errors import FedcoreError, MissingDependencyError
from fedcore.runtime import __version__, hide_warnings_of_others


def parser() -> Parser:
    """Return the parser of the whole command line."""
    top = Parser("fedcore", description="The server side of federated learning.", allow_abbrev=False)
    top.epilog = "Start with: fedcore run quickstart"
    top.add_argument("--version", action="version", version=f"fedcore {__version__}")
    top.add_commands()
    for module in (run, report, listing, data, doctor, store):
        module.add_arguments(top)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        arguments: without the program's name. Default: those of this process.

    Raises:
        SystemExit: with a status of ``terminal`` where the command failed.
    """
    try:
        options = parser().parse_args(arguments)
        if missing := [package for package in options.needs if find_spec(package) is None]:
            raise MissingDependencyError.of("this command", ", ".join(missing), extra="sim")
        hide_warnings_of_others()
        options.run(options)
        sys.stdout.flush()
    except FedcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader, for example head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        sys.exit(FAILED)
    except OSError as error:  # a full disk, a folder without permission to write
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)
