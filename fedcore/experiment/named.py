"""Tables of the configuration that name something of a registry, and how they refuse it."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from fedcore.errors import FedcoreError, UnknownNameError
from fedcore.experiment.fields import Section, option_problems


class Named(Section):
    """A table with a ``name`` whose further keys are the options of what it names.

    A subclass says by what names there is what (``registry``); name and options are then checked when it is read.
    """

    KIND: ClassVar[str]
    """What is named, in a word, for what is said of an unknown name."""
    FILLED_IN: ClassVar[Collection[str]] = ()
    """Parameters that are no options, because the experiment gives them."""

    name: str
    options: Mapping[str, Any] = Field(default_factory=dict)

    @classmethod
    @abstractmethod
    def registry(cls) -> Mapping[str, Callable[..., Any]]:
        """What is called with the options, by name."""

    @classmethod
    def own_keys(cls) -> Collection[str]:
        """The table's keys that are no options."""
        return cls.model_fields.keys() - {"options"}

    def _problems(self) -> Mapping[str, str]:
        """What is wrong with the options, by key."""
        made_by, beside = self.registry()[self.name], sorted(self.own_keys())
        return option_problems(made_by, self.options, given=self.FILLED_IN, beside=beside)

    def _try(self) -> None:
        """Whatever cheap thing fails, with a ``FedcoreError``, if the options do not fit each other."""

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
        if name not in cls.registry():
            said = str(UnknownNameError.of(cls.KIND, name, cls.registry())).removeprefix(f"{cls.KIND}: ")
            raise PydanticCustomError("name", "{said}", {"said": said})
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


def problems(found: Mapping[str, str]) -> PydanticCustomError:
    """Several problems of one table as one pydantic error; ``loading`` lists them one by one again."""
    return PydanticCustomError("problems", "{found}", {"found": dict(found)})
