"""Objects that are no value but hold something: they refuse to be pickled, and say what to do in its place."""

from copy import deepcopy
from typing import Any, ClassVar, Self

from fedcore.errors import PicklingError


class Unpicklable:
    """An object that ``pickle`` refuses in a sentence; ``copy.deepcopy`` copies what is in memory.

    A pickle would be neither checked when it is read, nor of any version, and cannot hold open files.
    """

    _instead: ClassVar[str]
    """What to do in its place."""

    def _in_files(self) -> bool:
        """Tell whether it holds files open, which a copy in memory cannot share."""
        return False

    def __reduce__(self) -> Any:
        raise PicklingError(f"{type(self).__name__}: cannot be pickled: {self._instead}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._in_files():
            raise PicklingError(f"{type(self).__name__}: cannot be copied, since it holds files: {self._instead}")
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied
