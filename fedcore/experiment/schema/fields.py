"""Fields of a configuration: the kinds of number and line that it holds, each with its range."""

from typing import Annotated, Any, Literal
from unicodedata import category

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from fedcore.arguments import due_in, inside


def within(interval: str) -> AfterValidator:
    """A number must lie in ``interval``, written as it is read: ``"(0, 1]"``."""

    def check(number: float) -> float:
        if not inside(number, interval):
            raise PydanticCustomError("range", "expected {due}, got {came}", {"due": due_in(interval), "came": number})
        return number

    return AfterValidator(check)


LONGEST_LINE = 1000
"""Characters of a title or a label, which pictures and tables have to find room for."""


def line_problem(text: str) -> str | None:
    """The fault in a title or a label, or None: files and pictures have no room or no sign for some."""
    if len(text) > LONGEST_LINE:
        return f"expected at most {LONGEST_LINE} characters, got {len(text)}"
    odd = next((sign for sign in text if category(sign) in ("Cc", "Cs") and sign != "\n"), None)
    return None if odd is None else f"expected no control characters and lone surrogates, got {odd!r}"


def _checked_line(text: str) -> str:
    if problem := line_problem(text):
        raise PydanticCustomError("line", "{problem}", {"problem": problem})
    return text


def _checked_way(way: Any) -> Any:
    if not isinstance(way, bool) and way != "vmap":
        raise PydanticCustomError("way", "expected true, false or 'vmap', got {came}", {"came": repr(way)})
    return way


Line = Annotated[str, AfterValidator(_checked_line)]
Count = Annotated[int, within("[1, 1000000]")]
Seed = Annotated[int, within("[0, 4294967295]")]
Threads = Annotated[int, within("[1, 1024]")]
Together = Annotated[bool | Literal["vmap"], BeforeValidator(_checked_way)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d{1,4})?)$")]
