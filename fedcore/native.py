"""The one door to the native module, and the switch between it and its twins in NumPy.

With FEDCORE_ISA=reference nothing native is called, nor loaded: a tree that was never compiled runs too. The names of
``core`` are those of ``fedcore/_core.pyi``, so that every call of a face is checked against it.
"""

import os
from types import ModuleType
from typing import TYPE_CHECKING

ON_REFERENCE = os.environ.get("FEDCORE_ISA") == "reference"
"""True if the package runs on the twins; settled when it is imported."""

if ON_REFERENCE and not TYPE_CHECKING:
    from fedcore import reference as core
else:
    from fedcore import _core as core


def add_twins(room: ModuleType) -> None:
    """Have ``core`` call, with FEDCORE_ISA=reference, what a room's ``reference`` defines of its names."""
    if ON_REFERENCE:
        defined = {name: twin for name, twin in vars(room).items() if getattr(twin, "__module__", "") == room.__name__}
        vars(core).update({name: twin for name, twin in defined.items() if not name.startswith("_")})


__all__ = ["ON_REFERENCE", "add_twins", "core"]
