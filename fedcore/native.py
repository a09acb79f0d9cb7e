"""The one door to the native module, and the switch between it and its twins in NumPy.

With FEDCORE_ISA=reference nothing native is called, nor loaded: a tree that was never compiled runs too. The names of
``core`` are those of ``fedcore/_core.pyi``, so that every call of a face is checked against it.
"""

import os
from typing import TYPE_CHECKING

ON_REFERENCE = os.environ.get("FEDCORE_ISA") == "reference"
"""True if the package runs on the twins; settled when it is imported."""

if ON_REFERENCE and not TYPE_CHECKING:
    from fedcore import reference as core
else:
    from fedcore import _core as core

__all__ = ["ON_REFERENCE", "core"]
