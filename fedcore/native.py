"""The one door to the native module, and the switch between it and its twins in NumPy.

With FEDCORE_ISA=reference nothing native is called, nor loaded: a tree that was never compiled runs too. The names of
``core`` are those of ``fedcore/_core.pyi``, so that every call of a face is checked against it.
"""

import os
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

ON_REFERENCE = os.environ.get("FEDCORE_ISA") == "reference"
"""True if the package runs on the twins; settled when it is imported."""


def _require_main_interpreter() -> None:
    """Refuse a sub-interpreter, in which loading the native module would wait for ever.

    Raises:
        ImportError: this is one.
    """
    for name in ("_interpreters", "_xxsubinterpreters"):  # of Python 3.13, and before; without them nothing is known
        with suppress(ModuleNotFoundError):
            interpreters = import_module(name)
            if interpreters.get_current() != interpreters.get_main():
                raise ImportError(
                    "fedcore: expected Python's main interpreter, got a sub-interpreter, where its native code "
                    "cannot run: under mod_wsgi set WSGIApplicationGroup %{GLOBAL}"
                )
            return


if ON_REFERENCE and not TYPE_CHECKING:
    from fedcore import reference as core
else:
    _require_main_interpreter()
    from fedcore import _core as core


def add_twins(room: ModuleType) -> None:
    """Have ``core`` call, with FEDCORE_ISA=reference, what a room's ``reference`` defines of its names."""
    if ON_REFERENCE:
        defined = {name: twin for name, twin in vars(room).items() if getattr(twin, "__module__", "") == room.__name__}
        vars(core).update({name: twin for name, twin in defined.items() if not name.startswith("_")})


__all__ = ["ON_REFERENCE", "add_twins", "core"]
