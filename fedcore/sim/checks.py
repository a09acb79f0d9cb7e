"""Checks of a dataclass's fields, as annotations: ``k: Annotated[int, Whole(1)]``."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from fedcore.errors import UnknownNameError
from fedcore.validation import check_integer, check_number


@dataclass(frozen=True)
class Whole:
    """The field is an integer in low..high; ``high`` may be the name of another field."""

    low: int
    high: int | str | None = None

    def checked(self, owner: object, name: str, value: Any) -> int:
        """Return the value of a field of an object as an int, or raise RangeError."""
        high = getattr(owner, self.high) if isinstance(self.high, str) else self.high
        return check_integer(name, value, self.low, high)


@dataclass(frozen=True)
class Real:
    """The field is a number in an interval."""

    interval: str

    def checked(self, owner: object, name: str, value: Any) -> float:
        """Return the value of a field of an object as a float, or raise RangeError."""
        return check_number(name, value, self.interval)


class Checked:
    """Base class of dataclasses whose fields are checked by their annotations, also by a ``Literal``.

    A field that is None by default may be None, also beside a ``Literal``.
    """

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, one.name)
            for kind in (one.type, *get_args(one.type)):
                if get_origin(kind) is Literal and value not in (*get_args(kind), one.default):
                    raise UnknownNameError.of(one.name, value, get_args(kind))
            for check in getattr(one.type, "__metadata__", ()):
                if isinstance(check, Whole | Real) and (value is not None or one.default is not None):
                    object.__setattr__(self, one.name, check.checked(self, one.name, value))
