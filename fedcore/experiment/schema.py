"""The schema of an experiment: every choice that its results depend on, checked when it is read."""

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from fedcore import algorithms
from fedcore.algorithms import Algorithm, check_table, optimizers, rates
from fedcore.arguments import due_in, inside, is_real
from fedcore.errors import FedcoreError, RangeError, ShapeError, UnknownNameError
from fedcore.experiment.changes import Change
from fedcore.network.topology import NAMES, Topology
from fedcore.registries import Registry
from fedcore.representation import html_table, shown
from fedcore.simulation import data, participation
from fedcore.simulation.data import partitions
from fedcore.simulation.engines import check_method

LARGEST_STEP = 100.0
"""The largest rate that a server lets a client report, unless it is set otherwise."""
STEPS = f"(0, {LARGEST_STEP!r}]"
LONGEST_NAME = 100
"""Characters of a label in the name of a file; file systems take 255 in all."""
NO_LABELS = np.empty(0, np.int64)

Line = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x09\x0b-\x1f\x7f-\x9f]*$")]
"""A title or a label, which pictures and tables have room for: no control characters but line ends."""
Count = Annotated[int, Field(ge=1, le=10**6)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Together = Literal[True, False, "vmap"]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d{1,4})?)$")]


def problem(text: str, *place: str) -> ValidationError:
    """The error of a validator, about its value or a place in it."""
    error = InitErrorDetails(type=PydanticCustomError("problem", "{text}", {"text": text}), loc=place, input=None)
    return ValidationError.from_exception_data("experiment", [error])


def unknown_key(key: str, known: Collection[str]) -> str:
    """The text on a key that does not exist, with the nearest one that does."""
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    return "unknown key" + (f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known) or 'none'})")


class Section(BaseModel):
    """A table of the file: read-only, no unknown keys, no silent conversions (``"5"`` is no 5)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    @model_validator(mode="wrap")
    @classmethod
    def _name_nearest_keys(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(value)
        except ValidationError as error:
            raise ValidationError.from_exception_data(error.title, cls._in_words(error.errors())) from None

    @classmethod
    def _in_words(cls, errors: Iterable[Any]) -> list[InitErrorDetails]:
        return [_with_nearest(one, list(cls.model_fields)) for one in errors]


def _with_nearest(error: Any, known: Collection[str]) -> InitErrorDetails:
    kind, text, place = error["type"], error["msg"], error["loc"]
    if kind == "extra_forbidden" and len(place) == 1:
        kind, text = "problem", unknown_key(str(place[0]), known)
    return InitErrorDetails(type=PydanticCustomError(kind, "{text}", {"text": text}), loc=place, input=error["input"])


class FromRegistry(Section):
    """A table with a ``name`` whose further keys are the options of what it names.

    Name and options are checked when it is read.
    """

    registry: ClassVar[Callable[[], Registry[Any]]]
    """The classes or functions that take the options, by name."""
    FILLED_IN: ClassVar[Collection[str]] = ()
    """Parameters that are no options, because the experiment gives them."""
    KINDS: ClassVar[Mapping[str, Any]] = {}
    """Types of options in the file that differ from the parameter's."""

    name: str
    options: Mapping[str, Any] = Field(default_factory=dict)

    def maker(self) -> Callable[..., Any]:
        """The class or function that takes the options."""
        found: Callable[..., Any] = type(self).registry().find(self.name)
        return found

    def make(self) -> Any:
        """The object itself."""
        return self.maker()(**self.options)

    def _try(self) -> None:
        """Try something cheap that fails, with a ``FedcoreError``, if the options do not fit each other."""
        self.make()

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if not isinstance(data, Mapping) or isinstance(data.get("options"), Mapping):
            return data
        own = cls.model_fields.keys() - {"options"}
        options = {key: value for key, value in data.items() if key not in own}
        return {key: value for key, value in data.items() if key in own} | {"options": options}

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        _find(cls.registry(), name)
        return name

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        own = sorted(type(self).model_fields.keys() - {"options"})
        options_model(self.maker(), self.FILLED_IN, self.KINDS, own).model_validate(dict(self.options))
        try:
            self._try()
        except FedcoreError as error:
            raise problem(str(error)) from None
        return self

    @model_serializer(mode="wrap")
    def _spread_options(self, default: SerializerFunctionWrapHandler) -> dict[str, Any]:
        flat = default(self)
        return {key: value for key, value in flat.items() if key != "options"} | dict(self.options)


def _find(registry: Registry[Any], name: str, *place: str) -> Any:
    try:
        return registry.find(name)
    except UnknownNameError as error:  # the place in the file tells the kind
        raise problem(str(error).removeprefix(f"{registry.what}: "), *place) from error


class Options(Section):
    """The keyword options of a class or function, in the same table as other keys."""

    more_keys: ClassVar[Collection[str]] = ()
    """The other keys of the table in the file."""
    tables: ClassVar[Collection[str]] = ()
    """Options that are tables, each with its own problems."""

    @classmethod
    def _in_words(cls, errors: Iterable[Any]) -> list[InitErrorDetails]:
        known = [*cls.more_keys, *(str(field.alias) for field in cls.model_fields.values())]
        first: dict[tuple[int | str, ...], InitErrorDetails] = {}
        for one in errors:  # of a union only the first, without the names of its types
            place = one["loc"] if one["loc"][0] in cls.tables else one["loc"][:1]
            first.setdefault(place, _with_nearest(one | {"loc": place}, known))
        return list(first.values())


class _AnyOptions(Options):
    model_config = ConfigDict(extra="allow")


def options_model(
    make: Callable[..., Any],
    filled_in: Collection[str] = (),
    kinds: Mapping[str, Any] | None = None,
    more_keys: Collection[str] = (),
) -> type[Options]:
    """The model of the keyword options of a class or function, by its signature.

    Args:
        make: takes the options.
        filled_in: parameters that the caller gives and a file may not set.
        kinds: types of parameters in the file, if they differ.
        more_keys: the other keys of the table in the file.

    A parameter without an annotation takes any value. ``**more`` takes any option, and in a class's those of its bases.
    """
    parameters = _parameters(make)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    kinds = kinds or {}
    options: dict[str, Any] = {}
    for number, (name, parameter) in enumerate(parameters.items()):
        if parameter.kind in by_name and name not in filled_in:
            kind = Any if parameter.annotation is parameter.empty else parameter.annotation
            default = ... if parameter.default is parameter.empty else None
            options[f"option{number}"] = kinds.get(name, kind), Field(default, alias=name)
    model = create_model("Options", __base__=_AnyOptions if takes_any else Options, **options)
    model.more_keys, model.tables = more_keys, kinds.keys()
    return model


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(make, eval_str=True).parameters)
    for base in make.__mro__[1:-1] if inspect.isclass(make) else ():
        more = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
        if not more:
            break
        del parameters[more[0]]
        parameters = dict(inspect.signature(base, eval_str=True).parameters) | parameters
    return parameters


class NetworkOfNodes(Section):
    """Networked local SGD: every client is a node of a graph, and mixes its model with its neighbours' after a round.

    The method is ``LocalDescent``, whose options are those of the local steps. A node that takes no part in a round
    keeps its model. Accuracy and loss are those of the nodes' weighted mean.

    Attributes:
        graph: "complete", "ring", "star", "torus" or "erdos-renyi".
        rows: of a torus. Default: as square as can be.
        probability, seed: of a random graph.
        weights: of the nodes in the objective: "uniform", 1/p, or "examples", n_j / n.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Algorithm 2.
    """

    graph: Literal[NAMES]  # type: ignore[valid-type]  # mypy wants them written out
    rows: int | None = None
    probability: float | None = None
    seed: int | None = None
    weights: Literal["uniform", "examples"] = "uniform"

    def topology(self, nodes: int) -> Topology:
        """The graph of so many nodes.

        Raises:
            FedcoreError: an option is not the graph's, or out of range; or the graph is not connected.
        """
        given: dict[str, Any] = {"rows": self.rows, "probability": self.probability, "seed": self.seed}
        return Topology.named(self.graph, nodes, **{key: value for key, value in given.items() if value is not None})


class Objective(Section):
    """The part of clients that arrive and depart (a ``Schedule`` in the participation) in the objective sum p^k F_k.

    A client counts in p^k = n_k / n, and the test set holds its examples, from its arrival on. When it departs,
    "exclude" removes it from both, and "include" keeps its share in the weights although it sends no more updates.

    Attributes:
        departures: "include" or "exclude".
        restart: whether a rate eta_0 / t (``Staircase``) or ``InverseRound`` begins anew when the objective changes.
        test: the clients whose test examples count: those in the "objective", or those "present", which differ after a
            departure that is included.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Sec. 4.2, 4.3.
    """

    departures: Literal["include", "exclude"] = "exclude"
    restart: bool = True
    test: Literal["objective", "present"] = "objective"


class Varied(Section):
    """The key that a family of presets varies, and its value in this one; a sweep's report draws the family over it.

    The variants of a preset's file have ``varies = { p = 0.1 }``, and the rest is filled in.

    Attributes:
        family: common to the presets that are drawn together; it names the picture's file.
        title: of the picture.
        label: of the axis.
        value: here.
    """

    family: Line
    title: Line
    label: Line
    value: float = Field(allow_inf_nan=False)


class Pictures(Section):
    """The axes of an experiment's pictures: no result depends on them, so a run may go on under others.

    Attributes:
        over: the axis of the curves. Uploadings are rounds times the vectors that a client sends in one, as the MimiC
            paper counts.
        varied: the key that the experiment's family varies, or None.
    """

    over: Literal["rounds", "uploadings"] = "rounds"
    varied: Varied | None = None


class LearningRate(FromRegistry):
    """A learning rate: a number, or one of ``fedcore.algorithms.rates`` by name, with its options."""

    registry = staticmethod(lambda: rates.REGISTRY)

    @model_validator(mode="before")
    @classmethod
    def _number_is_constant(cls, value: Any) -> Any:
        if is_real(value):
            if not inside(value, STEPS):
                raise problem(f"expected {due_in(STEPS)}, got {value!r}")
            return {"name": "Constant", "options": {"value": value}}
        if not isinstance(value, Mapping | LearningRate):
            raise problem(f"expected a number or a table, got {value!r}")
        return value

    def _try(self) -> None:
        rate = self.make()
        first = rate(0, 1) if self.per_cohort else rate(0)
        if not inside(first, STEPS):
            raise problem(f"expected {due_in(STEPS)} in round 0, got {first!r}")

    @property
    def per_cohort(self) -> bool:
        """Whether it is a rule of the round and of the number of clients whose updates were used."""
        return self.maker() is rates.PerCohort


class ServerOptimizer(FromRegistry):
    """One of ``fedcore.algorithms.optimizers`` by name, with its options."""

    registry = staticmethod(lambda: optimizers.REGISTRY)

    def make(self) -> optimizers.Optimizer:
        """The optimiser itself."""
        return optimizers.named(self.name, **self.options)


class Rate(Section):
    """The clients' rate eta_t, and the server's step.

    ``server_lr``: none for plain model averaging (gamma = eta_t K, the mean over the cohort); else gamma itself.
    ``optimizer``: turns the method's direction into the step's; without it the step is along the direction.
    """

    lr: LearningRate
    server_lr: LearningRate | None = None
    optimizer: ServerOptimizer | None = None

    @field_validator("lr")
    @classmethod
    def _of_the_round_only(cls, lr: LearningRate) -> LearningRate:
        if lr.per_cohort:
            raise problem(f"{lr.name!r} depends on the cohort: use it for server_lr", "name")
        return lr


class Method(FromRegistry):
    """One entry of the comparison: an algorithm, its options, and its name in tables and curves.

    Its ``objective``, if it has one, replaces the experiment's. With ``warm_start`` its rows and momentum start from
    the clients' gradients at the first model (``Server.warm_start``) instead of zero: means over so many minibatches
    (the papers' B), or, if it is true, over as many as a round has local steps.
    """

    registry = staticmethod(lambda: algorithms.REGISTRY)

    label: Line = ""
    objective: Objective | None = None
    warm_start: bool | Count = False

    def _try(self) -> None:
        made: Algorithm = self.make()
        check_table(made)
        check_method(made)
        if self.warm_start and not made.takes_warm_start:
            raise RangeError(
                f"warm_start: must be false, since {self.name} keeps nothing that gradients could start, got "
                f"{self.warm_start}"
            )

    @model_validator(mode="after")
    def _label(self) -> Self:
        if not self.label:
            options = [f"{key}={value}" for key, value in self.options.items()]
            if self.warm_start:
                options.append("warm start" if self.warm_start is True else f"warm start, B={self.warm_start}")
            name = self.name.rpartition(":")[2]  # a user's class has its own name, wherever it is
            object.__setattr__(self, "label", f"{name} ({', '.join(options)})" if options else name)
        return self


class Data(FromRegistry):
    """The data set, by name, and its options."""

    registry = staticmethod(lambda: data.REGISTRY)
    FILLED_IN = data.FILLED_IN

    @property
    def source(self) -> data.Source:
        """The data set's row."""
        return data.REGISTRY.find(self.name)

    def maker(self) -> Callable[..., Any]:
        """The function that loads it."""
        return self.source.load

    def _try(self) -> None:
        if self.source.generated:  # then it is cheap
            data.load(self.name, clients=1, seed=0, **self.options)


class Partition(FromRegistry):
    """The partition of the examples: the number of clients, the rule that deals the examples, and its options."""

    registry = staticmethod(lambda: partitions.REGISTRY)
    FILLED_IN = partitions.FILLED_IN

    clients: Count

    def _try(self) -> None:
        if self.name == "natural":
            return
        try:
            self.maker()(NO_LABELS, self.clients, seed=0, **self.options)
        except FedcoreError as error:
            # The numbers are checked first; the missing labels are not the file's mistake.
            if not str(error).startswith("labels:"):
                raise


class Model(FromRegistry):
    """The network, by name, and its options."""

    @staticmethod
    def registry() -> Registry[Any]:
        """The networks."""
        from fedcore.simulation import nets

        return nets.REGISTRY

    def _try(self) -> None:
        """Nothing: ``Experiment`` makes it."""


class Local(Section):
    """A client's work: minibatch SGD over ``epochs`` passes, or ``steps`` steps; see ``local.LocalOptions``."""

    batch: Count
    epochs: Count | None = None
    steps: Count | None = None
    weight_decay: float = Field(default=0.0, ge=0, le=LARGEST_STEP)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    clip: float | None = Field(default=None, gt=0, le=LARGEST_STEP)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise problem(f"give 'epochs' or 'steps', not {'neither' if self.epochs is None else 'both'}")
        return self


def _check_pattern(value: Any) -> Any:
    """Check a pattern that another one chooses among; it stays as it is."""
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise problem(f"expected a pattern's name, or a table with its name and options, got {value!r}")
    make = _find(participation.REGISTRY, table["name"], "name")
    options = {key: option for key, option in table.items() if key != "name"}
    options_model(make, Participation.FILLED_IN, Participation.KINDS, ["name"]).model_validate(options)
    return value


class Participation(FromRegistry):
    """The participation: a pattern and its options; ``first_round = "all"`` overrules it once.

    ``among`` names the pattern that it chooses among, as a table of the same kind.
    """

    registry = staticmethod(lambda: participation.REGISTRY)
    FILLED_IN = ("clients", "seed", "first_round")
    KINDS: ClassVar[Mapping[str, Any]] = {"among": Annotated[Any, BeforeValidator(_check_pattern)]}

    first_round: Literal["all"] | None = None

    def _try(self) -> None:
        """Nothing: ``Experiment`` makes it, for its clients."""


class Evaluate(Section):
    """Accuracy and loss on the test set are taken every ``every`` rounds, and after the last one.

    With ``keep`` the model is written every so many rounds, and after the last, into the run's ``models``.
    """

    every: Count = 1
    keep: Count | None = None

    def keeps(self, round: int, rounds: int) -> bool:
        """Whether the model of a round, of so many, is written."""
        return self.keep is not None and ((round + 1) % self.keep == 0 or round + 1 == rounds)


class Experiment(Section):
    """A comparison of algorithms on one problem, with the same clients active in the same rounds.

    ``grid`` is what a sweep tries (``experiment.presets.points``); a run has the values of the other keys.
    ``threads`` are those of each process, for fedcore's kernels and for clients that are trained together. ``together``
    is whether they are, if the model can be (``InProcess``), or "vmap" if torch batches them; without
    it the perceptrons are, and for other networks a run measures which is faster and writes it into its configuration.
    ``device`` is where clients are trained and models evaluated, the CPU or a GPU: participants, examples and
    minibatches are the same on each, and results differ in rounding. ``server_device`` is where the server's
    vectors lie, in host memory or a GPU's: all results are the same there.
    With ``network`` there is no server: the clients are nodes that mix their models with their neighbours'.
    ``changes`` are its differences from the preset whose title it bears (``load_preset`` fills it in).
    """

    name: Line = ""
    title: Line
    description: str
    source: str
    rounds: Count
    seeds: tuple[Seed, ...] = Field(strict=False)
    algorithms: tuple[Method, ...] = Field(strict=False)
    threads: Threads = 1
    together: Together | None = None
    device: Device | None = None
    server_device: Device | None = None
    data: Data
    partition: Partition
    model: Model
    local: Local
    rate: Rate
    participation: Participation
    objective: Objective | None = None
    network: NetworkOfNodes | None = None
    evaluate: Evaluate = Evaluate()
    pictures: Pictures = Pictures()
    grid: Mapping[str, list[Any]] = Field(default_factory=dict)
    changes: tuple[Change, ...] = Field(default=(), strict=False)

    def __repr__(self) -> str:
        methods = ", ".join(method.label for method in self.algorithms)
        return f"Experiment({self.name!r}: {methods}; {self.rounds} rounds, {len(self.seeds)} seeds)"

    def _repr_html_(self) -> str:
        """A table for notebooks: a row for each key, the methods by their labels."""
        rows = {key: value for key, value in self.tables().items() if value not in ({}, [], "")}
        rows["algorithms"] = [method.label for method in self.algorithms]
        return html_table(f"Experiment {self.name}", ((key, shown(value)) for key, value in rows.items()))

    def tables(self) -> dict[str, Any]:
        """The experiment as ``config.json`` has it."""
        tables: dict[str, Any] = json.loads(self.model_dump_json(exclude_none=True))
        return tables

    @field_validator("name")
    @classmethod
    def _name_stays_inside(cls, name: str) -> str:
        """A run's folder has this name, within the folder that was given."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or (name and not path.parts):
            raise problem(f"must be a name, or a path below the folder of the run, got {name!r}")
        return name

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or not seeds:
            raise problem(f"must be at least one seed, each once, got {list(seeds)}")
        return seeds

    @field_validator("algorithms")
    @classmethod
    def _labels_differ(cls, methods: tuple[Method, ...]) -> tuple[Method, ...]:
        labels = [method.label for method in methods]
        if len(set(labels)) < len(labels) or not labels:
            raise problem(f"must be at least one, each label once, got {labels} (label = '...' sets it)")
        return methods

    @field_validator("local")
    @classmethod
    def _steps_are_plain(cls, local: Local, info: ValidationInfo) -> Local:
        key = "momentum" if local.momentum else None if local.clip is None else "clip"
        for method in info.data.get("algorithms", ()) if key else ():
            if method.make().needs_plain_steps:
                raise problem(
                    f"must be left out beside {method.label}: its controls follow from y only if the steps are plain; "
                    'control = "sent" lets clients send them',
                    str(key),
                )
        return local

    @field_validator("partition")
    @classmethod
    def _data_has_clients(cls, partition: Partition, info: ValidationInfo) -> Partition:
        """A user's data set is asked when it is loaded."""
        named, own = info.data.get("data"), data.REGISTRY.own
        if partition.name == "natural" and named and named.name in own and not named.source.generated:
            generated = ", ".join(name for name, one in data.REGISTRY.items() if one.generated and name in own)
            raise problem(
                f"{named.name!r} has no client for each example, as have {generated}, and your own data with clients",
                "name",
            )
        return partition

    @field_validator("model")
    @classmethod
    def _model_fits(cls, model: Model, info: ValidationInfo) -> Model:
        if "data" not in info.data:
            return model
        name, source = info.data["data"].name, info.data["data"].source
        try:
            scores = _scores(model.model_dump_json(), source.shape)
        except ShapeError as error:
            raise problem(f"{error}, the examples of {name!r}") from None
        except FedcoreError as error:
            raise problem(str(error)) from None
        if scores != source.classes:
            raise problem(f"it has {scores} scores, must have {source.classes}, one for each class of {name!r}")
        return model

    @field_validator("participation")
    @classmethod
    def _pattern_fits(cls, pattern: Participation, info: ValidationInfo) -> Participation:
        if "partition" in info.data:  # else its own problems are reported
            try:
                participation.named(pattern.name, info.data["partition"].clients, **pattern.options)
            except FedcoreError as error:
                raise problem(str(error)) from None
        return pattern

    @field_validator("evaluate")
    @classmethod
    def _there_is_a_model(cls, evaluate: Evaluate, info: ValidationInfo) -> Evaluate:
        if evaluate.keep is not None and info.data.get("network") is not None:
            raise problem("must be left out, since nodes have a model each", "keep")
        return evaluate

    @field_validator("network")
    @classmethod
    def _network_fits(cls, network: NetworkOfNodes | None, info: ValidationInfo) -> NetworkOfNodes | None:
        if network is None or not {"algorithms", "partition", "rate"} <= info.data.keys():
            return network
        rate: Rate = info.data["rate"]
        serving = [rate.server_lr and "rate.server_lr", rate.optimizer and "rate.optimizer"]
        serving += [info.data.get("objective") and "objective"]
        for method in info.data["algorithms"]:
            if not isinstance(method.make(), algorithms.LocalDescent):
                raise problem(f"its method must be LocalDescent, got {method.label}")
            serving += [method.objective and f"the objective of {method.label}"]
        if there := [key for key in serving if key]:
            raise problem(f"leave out {there[0]}, which is a server's")
        try:
            network.topology(info.data["partition"].clients)
        except FedcoreError as error:
            raise problem(str(error)) from None
        return network


@cache
def _scores(model: str, shape: tuple[int, ...]) -> int:
    """The scores that a model, as JSON, gives for an example; ResNet-18 is slow to make, and many presets have it."""
    from fedcore.simulation import nets

    options = json.loads(model)
    return nets.scores(options.pop("name"), shape, **options)


@dataclass(frozen=True)
class Trial:
    """One algorithm (its place in ``experiment.algorithms``) with one seed."""

    experiment: Experiment
    order: int
    seed: int

    @property
    def method(self) -> Method:
        """The algorithm and its options."""
        return self.experiment.algorithms[self.order]

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.method.label}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """The name of its record; the number keeps labels apart that differ only in punctuation."""
        label = re.sub(r"[^a-z0-9]+", "-", self.method.label.lower()).strip("-")[:LONGEST_NAME]
        return f"{self.order}-{label}-seed{self.seed}.jsonl"


def trials(experiment: Experiment) -> list[Trial]:
    """All trials, seed by seed, so that a run that is stopped early has whole comparisons to show."""
    return [Trial(experiment, order, seed) for seed in experiment.seeds for order in range(len(experiment.algorithms))]
