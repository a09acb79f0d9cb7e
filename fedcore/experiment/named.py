"""Tables of the configuration that name something of a registry, and how they refuse it."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from fedcore.errors import UnknownNameError
from fedcore.experiment.fields import Section


class Named(Section):
    """A table with a ``name`` whose further keys are the options of what it names."""

    name: str
    options: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if not isinstance(data, Mapping) or isinstance(data.get("options"), Mapping):
            return data
        own = cls.model_fields.keys() - {"options"}
        return {key: value for key, value in data.items() if key in own} | {
            "options": {key: value for key, value in data.items() if key not in own}
        }

    @model_serializer(mode="wrap")
    def _spread_options(self, default: SerializerFunctionWrapHandler) -> dict[str, Any]:
        flat = default(self)
        return {key: value for key, value in flat.items() if key != "options"} | dict(self.options)


def known(what: str, name: str, registry: Collection[str]) -> str:
    """``name``, if it is in the registry."""
    if name not in registry:
        said = str(UnknownNameError.of(what, name, registry)).removeprefix(f"{what}: ")
        raise PydanticCustomError("name", "{said}", {"said": said})
    return name


def problems(found: Mapping[str, str]) -> PydanticCustomError:
    """Several problems of one table as one pydantic error; ``loading`` lists them one by one again."""
    return PydanticCustomError("problems", "{found}", {"found": dict(found)})
