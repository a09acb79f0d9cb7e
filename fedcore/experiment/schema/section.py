"""Sections of a configuration: tables, among them those that name a row of a registry, and their refusals."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedcore.errors import FedcoreError, UnknownNameError
from fedcore.registries import Registry

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


class FromRegistry(Section):
    """A table with a ``name`` whose further keys are the options of what it names.

    A subclass says what the names stand for (``registry``); name and options are then checked when it is read.
    """

    FILLED_IN: ClassVar[Collection[str]] = ()
    """Parameters that are no options, because the experiment gives them."""

    name: str
    options: Mapping[str, Any] = Field(default_factory=dict)

    @classmethod
    @abstractmethod
    def registry(cls) -> Registry[Any]:
        """The classes or functions that take the options, by name."""

    def maker(self) -> Callable[..., Any]:
        """The class or function that takes the options."""
        found: Callable[..., Any] = self.registry().find(self.name)
        return found

    @classmethod
    def own_keys(cls) -> Collection[str]:
        """The table's keys that are no options."""
        return cls.model_fields.keys() - {"options"}

    def _problems(self) -> Mapping[str, str]:
        """The faults in the options, by key."""
        other_keys = sorted(self.own_keys())
        return option_problems(self.maker(), self.options, filled_in=self.FILLED_IN, other_keys=other_keys)

    def _try(self) -> None:
        """Try something cheap that fails, with a ``FedcoreError``, if the options do not fit each other."""

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if not isinstance(data, Mapping) or isinstance(data.get("options"), Mapping):
            return data
        own = cls.own_keys()
        return {key: value for key, value in data.items() if key in own} | {
            "options": {key: value for key, value in data.items() if key not in own}
        }

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        try:
            cls.registry().find(name)
        except UnknownNameError as error:
            raise PydanticCustomError("name", "{said}", {"said": short(cls.registry(), error)}) from error
        return name

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if wrong := self._problems():
            raise problems(wrong)
        try:
            self._try()
        except FedcoreError as error:
            raise problems({"": str(error)}) from None
        return self

    @model_serializer(mode="wrap")
    def _spread_options(self, default: SerializerFunctionWrapHandler) -> dict[str, Any]:
        flat = default(self)
        return {key: value for key, value in flat.items() if key != "options"} | dict(self.options)


def short(registry: Registry[Any], error: UnknownNameError) -> str:
    """The text of a registry on a name, without the kind, which the place in the file tells."""
    return str(error).removeprefix(f"{registry.what}: ")


def problems(found: Mapping[str, str]) -> PydanticCustomError:
    """Several problems of one table as one pydantic error; ``loading`` lists them one by one again."""
    return PydanticCustomError("problems", "{found}", {"found": dict(found)})


def unknown_key(key: str, known: Collection[str]) -> str:
    """The text on a key that does not exist, with the nearest one that does."""
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    return "unknown key" + (f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known) or 'none'})")


def option_problems(
    make: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    filled_in: Collection[str] = (),
    other_keys: Collection[str] = (),
) -> dict[str, str]:
    """The faults in the keyword options of a class or function, by its own signature.

    Args:
        make: the class or function that will get the options.
        options: their names and values, as a file gave them.
        filled_in: parameters that the caller gives and a file may not set.
        other_keys: those of the table that holds the options, suggested for a misspelt one.

    A parameter without an annotation takes any value. ``**more`` takes any option, and in a class's those of its bases.

    Returns:
        Option to problem; empty if ``make(**options)`` names and types every option rightly.
    """
    parameters = _parameters(make)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: p for name, p in parameters.items() if p.kind in by_name and name not in filled_in}
    problems = {}
    for key, value in options.items():
        if key not in named and takes_any:
            continue
        if key not in named:
            problems[key] = unknown_key(key, [*other_keys, *named])
            continue
        if named[key].annotation is inspect.Parameter.empty:
            continue
        try:
            TypeAdapter(named[key].annotation, config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            problems[key] = said(error.errors()[0])
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in options:
            problems[key] = "missing"
    return problems


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(make, eval_str=True).parameters)
    for base in make.__mro__[1:-1] if inspect.isclass(make) else ():
        more = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
        if not more:
            break
        del parameters[more[0]]
        parameters = dict(inspect.signature(base, eval_str=True).parameters) | parameters
    return parameters


def said(error: Mapping[str, Any]) -> str:
    """One pydantic error in the words of this package: what was due and what came."""
    if error["type"] == "missing":
        return "missing"
    due: str = TOML_NAMES.get(error["type"], error["msg"])
    if error["type"] not in TOML_NAMES and not due.startswith("Input should be "):
        return due
    return f"expected {due.removeprefix('Input should be ')}, got {error['input']!r}"
