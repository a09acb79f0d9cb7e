"""The kinds of number that a configuration holds, each with its range, and how options are checked."""

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any
from unicodedata import category

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

TOML_NAMES = {
    "tuple_type": "a list",
    "list_type": "a list",
    "sequence_str": "a list",
    "is_instance_of": "a list",  # of a Sequence, the one kind of option that is checked so
    "model_type": "a table",
    "dict_type": "a table",
}
"""Pydantic's kinds of error whose own words name Python's types."""


class Section(BaseModel):
    """A table of the file: read-only, no unknown keys, no silent conversions (``"5"`` is no 5)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def within(interval: str) -> AfterValidator:
    """A number must lie in ``interval``, written as it is read: ``"(0, 1]"``."""
    low, high = (float(end) for end in interval[1:-1].split(","))

    def check(number: float) -> float:
        above = number >= low if interval[0] == "[" else number > low
        below = number <= high if interval[-1] == "]" else number < high
        if not (above and below):  # also refuses NaN, which compares as false
            raise PydanticCustomError(
                "range", "expected a number in {due}, got {came}", {"due": interval, "came": number}
            )
        return number

    return AfterValidator(check)


LONGEST_LINE = 1000
"""Characters of a title or a label, which pictures and tables have to find room for."""


def line_problem(text: str) -> str | None:
    """What is wrong with a title or a label, or None: files and pictures have no room or no sign for some."""
    if len(text) > LONGEST_LINE:
        return f"expected at most {LONGEST_LINE} characters, got {len(text)}"
    odd = next((sign for sign in text if category(sign) in ("Cc", "Cs") and sign != "\n"), None)
    return None if odd is None else f"expected no control characters and lone surrogates, got {odd!r}"


def _checked_line(text: str) -> str:
    if problem := line_problem(text):
        raise PydanticCustomError("line", "{problem}", {"problem": problem})
    return text


Line = Annotated[str, AfterValidator(_checked_line)]
Count = Annotated[int, within("[1, 1000000]")]
Seed = Annotated[int, within("[0, 4294967295]")]
Threads = Annotated[int, within("[1, 1024]")]


def unknown_key(key: str, known: Collection[str]) -> str:
    """What is said of a key that does not exist, with the nearest one that does."""
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    return "unknown key" + (f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known) or 'none'})")


def option_problems(
    make: Callable[..., Any], options: Mapping[str, Any], *, given: Collection[str] = (), beside: Collection[str] = ()
) -> dict[str, str]:
    """What is wrong with the keyword options of a class or function, by its own signature.

    Args:
        make: the class or function that will get the options.
        options: their names and values, as a file gave them.
        given: parameters that the caller fills in and a file may not set.
        beside: the other keys of the table that holds the options, for what is said of a misspelt one.

    Returns:
        Option to problem; empty if ``make(**options)`` names and types every option rightly.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(make, eval_str=True).parameters.items()
        if name not in given
    }
    problems = {}
    for key, value in options.items():
        if key not in parameters:
            problems[key] = unknown_key(key, [*beside, *parameters])
            continue
        try:
            TypeAdapter(parameters[key].annotation, config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            problems[key] = said(error.errors()[0])
    for key, parameter in parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and key not in options:
            problems[key] = "missing"
    return problems


def said(error: Mapping[str, Any]) -> str:
    """One pydantic error in the words of this package: what was due and what came."""
    if error["type"] == "missing":
        return "missing"
    due: str = TOML_NAMES.get(error["type"], error["msg"])
    if error["type"] not in TOML_NAMES and not due.startswith("Input should be "):
        return due
    return f"expected {due.removeprefix('Input should be ')}, got {error['input']!r}"
