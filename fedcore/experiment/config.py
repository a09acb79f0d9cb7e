"""What an experiment is: every choice that its figures depend on, checked when it is read."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedcore import algorithms, data, participation
from fedcore.algorithms import Algorithm
from fedcore.errors import FedcoreError, UnknownNameError
from fedcore.experiment.fields import Count, Decay, Seed, StepSize, Threads, option_problems

FILLED_IN = ("clients", "seed", "first_round")
"""Parameters of a participation pattern that are no options of its own: the experiment gives them."""


class Section(BaseModel):
    """A table of the file: read-only, no unknown keys, no silent conversions (``"5"`` is no 5)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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


class Method(Named):
    """One entry of the comparison: an algorithm, its options, and the name it has in tables and curves."""

    label: str = ""

    def make(self) -> Algorithm:
        """The algorithm itself."""
        return algorithms.REGISTRY[self.name](**self.options)

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        return known("algorithm", name, algorithms.REGISTRY)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if wrong := option_problems(algorithms.REGISTRY[self.name], self.options, beside=("name", "label")):
            raise problems(wrong)
        try:
            self.make()
        except FedcoreError as error:
            raise problems({"": str(error)}) from None
        if not self.label:
            options = ", ".join(f"{key}={value}" for key, value in self.options.items())
            object.__setattr__(self, "label", f"{self.name} ({options})" if options else self.name)
        return self


class Data(Section):
    """The data set, by name."""

    name: str

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        return known("data", name, data.REGISTRY)


class Partition(Section):
    """How the examples are dealt to the clients: sorted by label, cut into shards, dealt at random."""

    clients: Count
    shards_per_client: Count
    distinct_classes: bool = False


class Model(Section):
    """The network, by name."""

    name: str

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        from fedcore.local import (
            nets,
        )  # here, because it imports torch, and not every reader of this file has it

        return known("model", name, nets.REGISTRY)


class Local(Section):
    """One client's work in a round: minibatch SGD over ``epochs`` passes, or ``steps`` steps."""

    batch: Count
    epochs: Count | None = None
    steps: Count | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            came = "neither" if self.epochs is None else "both"
            raise problems({"": f"expected exactly one of 'epochs' and 'steps', got {came}"})
        return self


class Schedule(Section):
    """``initial * decay**round``."""

    initial: StepSize
    decay: Decay = 1.0


class Rate(Section):
    """The clients' rate eta_t = lr * decay**round, and the server's rate gamma.

    ``server_lr``: none for plain model averaging (gamma = eta_t K, the mean over the cohort); a number or a
    schedule of its own is gamma itself.
    """

    lr: StepSize
    decay: Decay = 1.0
    server_lr: Schedule | None = None

    @field_validator("server_lr", mode="before")
    @classmethod
    def _number_is_constant(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"initial": value}
        if not isinstance(value, Mapping | Schedule | None):
            raise problems({"": f"expected a number or a table, got {value!r}"})
        return value


class Participation(Named):
    """Who is active in a round: a pattern and its options; ``first_round = "all"`` overrules it once."""

    first_round: Literal["all"] | None = None

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        return known("participation", name, participation.REGISTRY)

    @model_validator(mode="after")
    def _check(self) -> Self:
        make = participation.REGISTRY[self.name]
        if wrong := option_problems(make, self.options, given=FILLED_IN, beside=("name", "first_round")):
            raise problems(wrong)
        return self


class Evaluate(Section):
    """Accuracy and loss on the test set are taken every ``every`` rounds, and after the last one."""

    every: Count = 1


class Experiment(Section):
    """A comparison of algorithms on one problem, with the same clients active in the same rounds."""

    name: str = ""
    title: str
    description: str
    source: str
    rounds: Count
    seeds: tuple[Seed, ...] = Field(strict=False)
    algorithms: tuple[Method, ...] = Field(strict=False)
    threads: Threads = 1
    data: Data
    partition: Partition
    model: Model
    local: Local
    rate: Rate
    participation: Participation
    evaluate: Evaluate = Evaluate()

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or not seeds:
            raise problems({"": f"expected at least one seed, each once, got {list(seeds)}"})
        return seeds

    @field_validator("algorithms")
    @classmethod
    def _labels_differ(cls, methods: tuple[Method, ...]) -> tuple[Method, ...]:
        labels = [method.label for method in methods]
        if len(set(labels)) < len(labels) or not labels:
            raise problems({"": f"expected at least one, each label once, got {labels} (label = '...' sets it)"})
        return methods

    @field_validator("participation")
    @classmethod
    def _pattern_fits(cls, pattern: Participation, info: ValidationInfo) -> Participation:
        if "partition" in info.data:  # else it has problems of its own, which are reported
            try:
                participation.named(pattern.name, info.data["partition"].clients, **pattern.options)
            except FedcoreError as error:
                raise problems({"": str(error)}) from None
        return pattern


def known(what: str, name: str, registry: Collection[str]) -> str:
    """``name``, if it is in the registry."""
    if name not in registry:
        said = str(UnknownNameError.of(what, name, registry)).removeprefix(f"{what}: ")
        raise PydanticCustomError("name", "{said}", {"said": said})
    return name


def problems(found: Mapping[str, str]) -> PydanticCustomError:
    """Several problems of one table as one pydantic error; ``loading`` lists them one by one again."""
    return PydanticCustomError("problems", "{found}", {"found": dict(found)})
