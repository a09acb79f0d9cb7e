"""The command line, ``fedcore``."""

import sys
from importlib.util import find_spec

from fedcore.errors import MissingDependencyError

NEEDED = ("matplotlib", "pydantic", "rich", "scipy", "sklearn", "torch", "typer")


def main() -> None:
    """Run the command line, or say what to install for it."""
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        sys.exit(str(MissingDependencyError.of("the fedcore command", ", ".join(missing), extra="sim")))
    from fedcore.cli.app import run_app

    run_app()
