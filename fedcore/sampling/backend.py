"""The implementation that the faces of this room call."""

from typing import TYPE_CHECKING

from fedcore.native import ON_REFERENCE
from fedcore.native import core as implementation
from fedcore.sampling import reference

if ON_REFERENCE and not TYPE_CHECKING:
    implementation = reference

__all__ = ["implementation"]
