"""The functions that are timed, one by one, as ``phases`` names them."""

import sys
from dataclasses import dataclass
from typing import Any

from fedcore.tracing.phases import FOLLOWING, IN_PLACE, KERNELS, MEASURED, PHASES


@dataclass(frozen=True)
class Function:
    """A function that is timed.

    Attributes:
        place: ``module:Class.name`` or ``module:name``.
        phase: its phase.
    """

    place: str
    phase: str

    @property
    def module(self) -> str:
        """The module that has it."""
        return self.place.partition(":")[0]

    @property
    def name(self) -> str:
        """Its name in its module or class."""
        return self.place.partition(":")[2].rpartition(".")[2]

    @property
    def is_method(self) -> bool:
        """Tell whether its first argument may know the round."""
        return "." in self.place.partition(":")[2]

    @property
    def follows(self) -> bool:
        """Tell whether its round is the last one of its thread."""
        return self.phase in FOLLOWING

    @property
    def is_kernel(self) -> bool:
        """Tell whether its time and bytes are those of the phase that calls it."""
        return self.phase == KERNELS

    @property
    def is_measured(self) -> bool:
        """Tell whether its arguments say how many bytes it moves."""
        return self.module == MEASURED

    @property
    def is_in_place(self) -> bool:
        """Tell whether it writes what it reads."""
        return self.place in IN_PLACE

    def owner(self) -> Any:
        """The module or class that has it; None where nobody has imported the module, or not yet to its end."""
        found = sys.modules.get(self.module)
        if found is None or getattr(found.__spec__, "_initializing", False):
            return None
        for name in self.place.partition(":")[2].split(".")[:-1]:
            found = getattr(found, name)
        return found


FUNCTIONS = tuple(Function(place, phase) for phase, places in PHASES.items() for place in places)
