"""The modules that do a command's work: imported when it is asked for, since those of experiments take a second."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fedcore.errors import MissingDependencyError
from fedcore.runtime import hide_warnings_of_others

SIMULATOR = ("matplotlib", "pydantic", "rich", "scipy", "sklearn", "torch")
"""What the commands need that run experiments or show them; the others need NumPy alone."""


def work(place: str, *, simulates: bool, **options: Any) -> None:
    """Call a function of this room.

    Args:
        place: ``"run.run"`` is the function ``run`` of ``fedcore.cli.run``.
        simulates: whether it needs the simulator.
        options: what it is given.

    Raises:
        MissingDependencyError: it needs packages that are not installed.
        SystemExit: something failed, and it has said what.
    """
    missing = [package for package in SIMULATOR if find_spec(package) is None] if simulates else []
    if missing:
        raise MissingDependencyError.of("this command", ", ".join(missing), extra="sim")
    hide_warnings_of_others()
    module, _, function = place.partition(".")
    getattr(import_module(f"fedcore.cli.{module}"), function)(**options)
