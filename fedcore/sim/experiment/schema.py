"""The validated schema of an experiment: all settings that its results depend on."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self, TypeVar, cast

import numpy as np
import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from typing_extensions import TypedDict

from fedcore import algorithms, rules
from fedcore.algorithms import Algorithm, check_table, optimizers, rates
from fedcore.algorithms.local_rules import full_steps_of
from fedcore.errors import FedcoreError, RangeError, UnknownNameError
from fedcore.model import Layout
from fedcore.options import Limits, ServerOptions, Settings, as_policy
from fedcore.runtime import import_quietly
from fedcore.server import require_compatible
from fedcore.sim import MODELS, attacks, data, participation
from fedcore.sim.clock import Arrivals, Clock, Durations
from fedcore.sim.data import partitions
from fedcore.sim.engines import check_method
from fedcore.sim.experiment.changes import Change
from fedcore.sim.network.topology import NAMES, Topology
from fedcore.validation import Registry, Represented, absolute, describe_interval, in_interval, is_number

LARGEST_STEP = 100.0
"""The largest learning rate that a client may report by default."""
STEPS = f"(0, {LARGEST_STEP!r}]"
WINDOW = 10
"""The default of ``report.window``."""
SERVER_OPTIMIZERS = {"FedAdagrad": "Adagrad", "FedAdam": "Adam", "FedYogi": "Yogi"}
"""The optimizers of methods that are FedAvg with a server optimizer."""
NO_LABELS = np.empty(0, np.int64)

T = TypeVar("T", bound=BaseModel)
Line = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x09\x0b-\x1f\x7f-\x9f]*$")]
"""A title or label, without control characters except line ends."""
Count = Annotated[int, Field(ge=1, le=10**6)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Together = Literal[True, False, "vmap"]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d{1,4})?)$")]


def problem(text: str, *place: str) -> ValidationError:
    """Return a validator's error about its value, or about a key in it."""
    error = InitErrorDetails(type=PydanticCustomError("problem", "{text}", {"text": text}), loc=place, input=None)
    return ValidationError.from_exception_data("experiment", [error])


def moved(errors: Iterable[ErrorDetails], *place: str, known: Collection[str] | None = None) -> ValidationError:
    """Return the problems of a part of the experiment at its place; unknown keys name the nearest of ``known``."""
    details: list[InitErrorDetails] = []
    for one in errors:
        kind, text = one["type"], one["msg"]
        if kind == "extra_forbidden" and known is not None and len(one["loc"]) == 1:
            kind, text = "problem", unknown_key(str(one["loc"][0]), known)
        reworded = PydanticCustomError(kind, "{text}", {"text": text})
        details.append(InitErrorDetails(type=reworded, loc=(*place, *one["loc"]), input=one["input"]))
    return ValidationError.from_exception_data("experiment", details)


def error_of(error: ValueError) -> list[str]:
    """Return the problems that a validation found, a line for each: where, what, and the value instead."""
    if not isinstance(error, ValidationError):
        return [str(error)]
    lines = []
    for one in error.errors():
        text = one["msg"] if one["type"] in ("problem", "missing") else f"{one['msg']}, got {one['input']!r:.100}"
        lines.append(": ".join([*filter(None, [".".join(map(str, one["loc"]))]), text]))
    return list(dict.fromkeys(lines))  # several methods may have the same problem


@contextmanager
def at(*place: str) -> Iterator[None]:
    """Convert errors into problems at a place in the validated value."""
    try:
        yield
    except ValidationError as error:
        raise moved(error.errors(), *place) from None
    except FedcoreError as error:
        raise problem(str(error), *place) from None


def unknown_key(key: str, known: Collection[str]) -> str:
    """Return the message for an unknown key; it suggests the nearest known key."""
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    return "unknown key" + (f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known) or 'none'})")


STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


class Section(BaseModel):
    """A read-only table of the file, without unknown keys or silent conversions (``"5"`` is not 5)."""

    model_config = STRICT

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _name_nearest_keys(cls, value: Any, validate: Callable[[Any], Self]) -> Self:
        try:
            return validate(value)
        except ValidationError as error:
            raise moved(error.errors(), known=cls.model_fields) from None


class Key(tuple[Any, ...]):
    """The arguments of a cached function. They are compared only by ``==``, since lists and tables have no hash."""

    def __hash__(self) -> int:
        return 0


class FromRegistry(Section):
    """A table with a ``name`` from a registry; its other keys are options of the named class or function."""

    registry: ClassVar[Callable[[], Registry[Any]]]
    """Returns the classes or functions that take the options, keyed by name."""
    FILLED_IN: ClassVar[Collection[str]] = ()
    """Parameters that the experiment sets and a file cannot."""
    NESTED: ClassVar[Mapping[str, Any]] = {}
    """The types of options that are tables."""

    name: str
    options: Mapping[str, Any] = Field(default_factory=dict)

    def maker(self) -> Callable[..., Any]:
        """Return the class or function that takes the options."""
        maker: Callable[..., Any] = type(self).registry().find(self.name)
        return maker

    def make(self) -> Any:
        """Return the object: the result of ``maker`` for the options."""
        return self.maker()(**self.options)

    def _try(self) -> None:
        """Raise a ``FedcoreError`` if the options contradict each other. Must be fast."""
        self.make()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        table = {"name": data} if isinstance(data, str) else data
        if not isinstance(table, Mapping):
            if isinstance(table, cls):
                return table
            raise problem(f"must be a name, or a table with a name and options, got {data!r}")
        fields = cls.model_fields.keys() - {"options"}
        own = {key: table[key] for key in fields if key in table}
        return own | {"options": {key: value for key, value in table.items() if key not in fields}}

    @pydantic.field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        _find(cls.registry(), name)
        return name

    @pydantic.model_validator(mode="after")
    def _check_options(self) -> Self:
        self._check_types()
        with at():
            self._try()
        return self

    def _check_types(self) -> None:
        """Check the keys and types of the options against the signature that takes them.

        A parameter without an annotation accepts any value. ``**more`` accepts any option; in a class it accepts the
        options of the base classes.
        """
        parameters = _parameters(self.maker())
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        kinds: dict[str, Any] = {}
        for name, one in parameters.items():
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and name not in self.FILLED_IN:
                kind = Any if one.annotation is one.empty else self.NESTED.get(name, one.annotation)
                kinds[name] = kind if one.default is one.empty else NotRequired[kind]
        table = cast(Any, TypedDict)("Options", kinds)
        table.__pydantic_config__ = {**STRICT, "extra": "allow" if takes_any else "forbid"}
        try:
            TypeAdapter(table).validate_python(dict(self.options))
        except ValidationError as error:
            first: dict[Any, Any] = {}
            for found in error.errors():  # of a union's errors only the first, without the names of the union's types
                place = found["loc"] if found["loc"][0] in self.NESTED else found["loc"][:1]
                first.setdefault(place, {**found, "loc": place})
            own = sorted(type(self).model_fields.keys() - {"options"})
            raise moved(first.values(), known=[*own, *kinds]) from None

    @pydantic.model_serializer(mode="wrap")
    def _spread_options(self, default: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        flat = default(self)
        return {key: value for key, value in flat.items() if key != "options"} | dict(self.options)


def _find(registry: Registry[Any], name: str, *place: str) -> Any:
    try:
        return registry.find(name)
    except UnknownNameError as error:  # the message gives the location in the file, which shows the kind
        raise problem(str(error).removeprefix(f"{registry.what}: "), *place) from error


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
    """Networked local SGD: each client is a node of a graph, and averages its model with its neighbours' after a round.

    The method must be ``LocalDescent``. A node that does not take part in a round keeps its model. Accuracy and loss
    refer to the weighted mean of the nodes' models.

    Attributes:
        graph: "complete", "ring", "star", "torus" or "erdos-renyi".
        rows: the number of rows of a torus. Default: as square as possible.
        probability, seed: the edge probability and the seed of a random graph.
        weights: the nodes' weights in the objective: "uniform" for 1/p, or "examples" for n_j / n.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Algorithm 2.
    """

    graph: Literal[NAMES]  # type: ignore[valid-type]  # mypy requires the strings here
    rows: int | None = None
    probability: float | None = None
    seed: int | None = None
    weights: Literal["uniform", "examples"] = "uniform"

    def topology(self, nodes: int) -> Topology:
        """Return the graph for a number of nodes; reject unsuitable options and graphs that are not connected."""
        return Topology.named(self.graph, nodes, **self.model_dump(exclude={"graph", "weights"}, exclude_none=True))


class Objective(Section):
    """How arrivals and departures of clients (a ``Schedule`` in the participation) change the objective sum p^k F_k.

    After its arrival, a client has the weight p^k = n_k / n, and its examples belong to the test set.

    Attributes:
        departures: "exclude" removes a client that departs from the objective and the test set; "include" keeps its
            weight although it sends no more updates.
        restart: whether a rate eta_0 / t (``Staircase``) or ``InverseRound`` restarts when the objective changes.
        test: the clients whose test examples count: those in the "objective", or those "present". The two differ after
            a departure with "include".

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Sec. 4.2, 4.3.
    """

    departures: Literal["include", "exclude"] = "exclude"
    restart: bool = True
    test: Literal["objective", "present"] = "objective"


class Varied(Section):
    """The key that a family of presets varies, and its value. A sweep's report plots the family over this key.

    A preset file sets ``varies = { p = 0.1 }`` in its variants; fedcore derives the other fields. ``family`` names the
    plot's file, ``label`` is the label of its x axis.
    """

    family: Line
    title: Line
    label: Line
    value: float = Field(allow_inf_nan=False)


class Pictures(Section):
    """The axes of an experiment's plots. Results do not depend on them, so a resumed run may change them.

    ``over`` is the x axis of the curves. Uploadings are rounds times the vectors that a client sends per round, as in
    the MimiC paper, and seconds are those of the virtual ``clock``. ``varied`` is the key that the experiment's family
    varies, or None.
    """

    over: Literal["rounds", "uploadings", "seconds"] = "rounds"
    varied: Varied | None = None


class ReportSettings(Section):
    """How reports judge a trial. Its rounds do not depend on it, so a resumed run may change it.

    Attributes:
        window: a trial's result is the mean over the evaluated rounds among this many rounds, up to the last evaluated
            one.
        formats: the formats of the plots in addition to PNG.
        band: the band around a curve: from the lowest to the highest seed ("range"), the standard error of the mean
            over the seeds ("se"), or the 95 % interval of that mean by Student's t ("95%").
        smooth: a curve shows at each evaluated round the mean over this many evaluated rounds, centred there.
    """

    window: Count = WINDOW
    formats: tuple[Literal["pdf", "svg"], ...] = Field(default=(), strict=False)
    band: Literal["range", "se", "95%"] = "range"
    smooth: Count = 1


class LearningRate(FromRegistry):
    """A learning rate: a number, or the name of one in ``fedcore.algorithms.rates`` with its options."""

    registry = staticmethod(lambda: rates.REGISTRY)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _number_is_constant(cls, value: Any) -> Any:
        if is_number(value):
            if not in_interval(value, STEPS):
                raise problem(f"must be {describe_interval(STEPS)}, got {value!r}")
            return {"name": "Constant", "value": value}
        if not isinstance(value, Mapping | LearningRate):
            raise problem(f"must be a number or a table, got {value!r}")
        return value

    def _try(self) -> None:
        rate = self.make()
        first = rate(0, 1) if self.per_cohort else rate(0)
        if not in_interval(first, STEPS):
            raise problem(f"must be {describe_interval(STEPS)} in round 0, got {first!r}")

    @property
    def per_cohort(self) -> bool:
        """Whether the rate depends on the number of accepted updates."""
        return self.maker() is rates.PerCohort


class ServerOptimizer(FromRegistry):
    """The name of an optimizer in ``fedcore.algorithms.optimizers``, with its options."""

    registry = staticmethod(lambda: optimizers.REGISTRY)

    def make(self) -> optimizers.Optimizer:
        """Return the optimizer."""
        return optimizers.named(self.name, **self.options)


class Rate(Section):
    """The clients' learning rate eta_t, and the server's step.

    Attributes:
        lr: eta_t.
        server_lr: gamma. Default: plain model averaging (gamma = eta_t K, the mean over the cohort).
        optimizer: computes the step from the method's direction. Default: the step is along the direction.
    """

    lr: LearningRate
    server_lr: LearningRate | None = None
    optimizer: ServerOptimizer | None = None

    @pydantic.field_validator("lr")
    @classmethod
    def _of_the_round_only(cls, lr: LearningRate) -> LearningRate:
        if lr.per_cohort:
            raise problem(f"{lr.name!r} depends on the cohort; use it for server_lr", "name")
        return lr


class UpdateLimits(Section):
    """Limits of a single update. The server rejects an update that exceeds one; see ``fedcore.Limits``.

    Attributes:
        max_norm: the greatest norm of an update.
    """

    max_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class AggregationRule(FromRegistry):
    """The name of a rule in ``fedcore.rules``, with its options, such as ``ClipToMedian`` or ``trimmed-mean``."""

    registry = staticmethod(lambda: rules.REGISTRY)

    name: Annotated[str, AfterValidator(rules.spelled)]


def _listed_rules(value: Any) -> Any:
    """Return a list of rules for one rule, or for the name of a chain."""
    if isinstance(value, str) and value in rules.NAMED:
        return [
            {"name": type(rule).__name__} | {key: own for key, own in vars(rule).items() if own is not None}
            for rule in rules.NAMED[value]
        ]
    return [value] if isinstance(value, str | Mapping) else value


def _chain(names: tuple[AggregationRule, ...] | None) -> tuple[AggregationRule, ...] | None:
    if names is not None:
        with at():
            rules.Chain.of([rule.make() for rule in names])
    return names


Aggregation = Annotated[
    tuple[AggregationRule, ...] | None, Field(strict=False), BeforeValidator(_listed_rules), AfterValidator(_chain)
]


class AttackOfClients(FromRegistry):
    """The name of an attack in ``fedcore.sim.attacks``, with its options.

    Attributes:
        clients: the number of dishonest clients: the last ones of the partition.
    """

    registry = staticmethod(lambda: attacks.REGISTRY)

    clients: Count = 1


def _with_absolute_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the paths of existing traces absolute, since a run may be resumed in a different folder."""

    def path(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _with_absolute_paths(value)
        is_file = key in ("trace", "traces") and isinstance(value, str) and Path(value).is_file()
        return str(absolute(value)) if is_file else value

    return {key: path(key, value) for key, value in options.items()}


def changed(section: T, changes: Mapping[str, Any] | None) -> T:
    """Return an experiment's ``rate``, ``local`` or ``clock`` with the keys that one algorithm changes."""
    if not changes:
        return section
    length = {"epochs", "steps"} if changes.keys() & {"epochs", "steps"} else set()
    length |= {"cohort"} if "concurrency" in changes else set()
    own = {key: value for key, value in section.model_dump(exclude_none=True).items() if key not in length}
    return type(section).model_validate(own | dict(changes))


class Method(FromRegistry):
    """An algorithm in the comparison: its name, its options, and its label in tables and plots.

    FedAdagrad, FedAdam and FedYogi stand for FedAvg with the server optimizer, and take its options.

    Attributes:
        label: in tables and plots. Default: the name with the options.
        rate, local, clock: the keys of these tables that differ for this algorithm.
        limits, aggregation, objective: override the experiment's.
        warm_start: whether rows and momentum start from the clients' gradients at the first model
            (``Server.warm_start``) instead of zero. A number is the number of minibatches per gradient (the papers' B);
            ``true`` uses the number of local steps in a round.
    """

    registry = staticmethod(lambda: algorithms.REGISTRY)

    label: Line = ""
    rate: Mapping[str, Any] | None = None
    local: Mapping[str, Any] | None = None
    clock: Annotated[Mapping[str, Any], AfterValidator(_with_absolute_paths)] | None = None
    limits: UpdateLimits | None = None
    aggregation: Aggregation = None
    objective: Objective | None = None
    warm_start: bool | Count = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_stands_for_optimizer(cls, data: Any) -> Any:
        table: Any = {"name": data} if isinstance(data, str) else data
        if not isinstance(table, Mapping) or table.get("name") not in SERVER_OPTIMIZERS:
            return data
        own = {*cls.model_fields, *inspect.signature(algorithms.FedAvg).parameters}
        options = {key: value for key, value in table.items() if key not in own}
        label = f"{table['name']} ({', '.join(f'{key}={value}' for key, value in options.items())})"
        kept = {key: value for key, value in table.items() if key in own}
        rate = table.get("rate") or {}
        if isinstance(rate, Mapping):  # the field's validator rejects other values
            rate = {"optimizer": {"name": SERVER_OPTIMIZERS[table["name"]], **options}, **rate}
        return {"label": label if options else table["name"]} | kept | {"name": "FedAvg", "rate": rate}

    def _try(self) -> None:
        made: Algorithm = self.make()
        check_table(made)
        check_method(made)
        if self.warm_start and not made.takes_warm_start:
            raise RangeError(f"warm_start={self.warm_start}: must be false, as {self.name} has no state to start")

    @pydantic.model_validator(mode="after")
    def _label(self) -> Self:
        if not self.label:
            options = [f"{key}={value}" for key, value in self.options.items()]
            if self.warm_start:
                options.append("warm start" if self.warm_start is True else f"warm start, B={self.warm_start}")
            clock = dict(self.clock or {})
            policy = clock.pop("policy", {})
            clock |= policy if isinstance(policy, Mapping) else {"policy": policy}
            for key, value in {**(self.rate or {}), **(self.local or {}), **clock}.items():
                options.append(f"{key}={value.get('name', value) if isinstance(value, Mapping) else value}")
            if self.limits is not None and self.limits.max_norm:
                options.append(f"max_norm={self.limits.max_norm}")
            options += [rule.name for rule in self.aggregation or ()]
            name = self.name.rpartition(":")[2]  # the name of a user's class, without its module
            object.__setattr__(self, "label", f"{name} ({', '.join(options)})" if options else name)
        return self


class Data(FromRegistry):
    """The data set and its options."""

    registry = staticmethod(lambda: data.REGISTRY)
    FILLED_IN = data.FILLED_IN

    @property
    def source(self) -> data.Source:
        """The data set's entry in the registry."""
        return data.REGISTRY.find(self.name)

    def maker(self) -> Callable[..., Any]:
        """Return the function that loads the data set."""
        return self.source.load

    def _try(self) -> None:
        if self.source.generated:  # then loading is cheap
            data.load(self.name, clients=1, seed=0, **self.options)


class Partition(FromRegistry):
    """The partition of the examples: the number of clients, and a rule with its options."""

    registry = staticmethod(lambda: partitions.REGISTRY)
    FILLED_IN = partitions.FILLED_IN

    clients: Count

    def _try(self) -> None:
        if self.name == "natural":
            return
        try:
            self.maker()(NO_LABELS, self.clients, seed=0, **self.options)
        except FedcoreError as error:
            # Rules check the labels last. The labels are empty here, so only that check may fail.
            if not str(error).startswith("labels:"):
                raise


class Model(FromRegistry):
    """The network and its options."""

    @staticmethod
    def registry() -> Registry[Any]:
        """Return the registry of networks."""
        import_quietly("torch")
        from fedcore.sim import nets

        return nets.REGISTRY

    @pydantic.field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        """Check a plain name without torch, whose import takes seconds."""
        if ":" not in name and "fedcore.sim.nets" not in sys.modules:
            models = dict.fromkeys(MODELS, Any)
            _find(Registry("model", models, expected="a model", fits=callable, group="fedcore.models"), name)
        return name

    def _check_types(self) -> None:
        """Do nothing: ``Experiment`` calls ``check`` last, since the options need torch."""

    def _try(self) -> None:
        """Do nothing."""

    def key(self, source: data.Source) -> Key:
        """Return what the module depends on, and the shape of its examples."""
        return Key((self.maker(), self.name, self.options, source.shape))

    def check(self, source: data.Source, name: str) -> None:
        """Raise a problem if the model does not exist, or does not fit the examples of the data set ``name``."""
        _find(self.registry(), self.name, "name")
        super()._check_types()
        scores = _scores(self.key(source))
        if scores != source.classes:
            raise problem(f"must have {source.classes} outputs, one per class of {name!r}, got {scores}")


class Local(Section):
    """A client's local work: minibatch SGD for ``epochs`` passes or ``steps`` steps; see ``sgd.LocalOptions``."""

    batch: Count
    epochs: Count | None = None
    steps: Count | None = None
    weight_decay: float = Field(default=0.0, ge=0, le=LARGEST_STEP)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    clip: float | None = Field(default=None, gt=0, le=LARGEST_STEP)

    @pydantic.model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            got = "neither" if self.epochs is None else "both"
            raise problem(f"set exactly one of 'epochs' and 'steps', got {got}")
        return self


class Pattern(FromRegistry):
    """A participation pattern and its options. The option ``among`` is the inner pattern."""

    registry = staticmethod(lambda: participation.REGISTRY)
    FILLED_IN = ("clients", "seed", "first_round")

    options: Annotated[Mapping[str, Any], AfterValidator(_with_absolute_paths)] = Field(default_factory=dict)

    def _try(self) -> None:
        """Do nothing: ``Experiment`` builds the pattern for its clients."""


Pattern.NESTED = {"among": Pattern}


class Participation(Pattern):
    """The participation: a pattern and its options. ``first_round = "all"`` overrides it in round 0.

    The option ``among`` is the inner pattern: a name, or a table with name and options.
    """

    first_round: Literal["all"] | None = None


class VirtualClock(Section):
    """The virtual clock of a trial's rounds (``fedcore.sim.clock``); records then have virtual seconds.

    Attributes:
        median, spread, jitter, trace: as for ``Durations``; a relative path of ``trace`` becomes absolute.
        cohort, policy: as for ``Clock``.
        concurrency: how many asynchronous clients are at work (``Arrivals``). ``policy`` then has ``buffer``,
            ``max_staleness`` and ``discount`` of the server's ``RoundPolicy``. Default: rounds are synchronous.
    """

    median: float = Field(default=1.0, gt=0, le=1e9)
    spread: float = Field(default=0.5, ge=0, le=10)
    jitter: float = Field(default=0.25, ge=0, le=10)
    trace: Annotated[str, AfterValidator(lambda path: str(absolute(path)))] | None = None
    cohort: Count | None = None
    concurrency: Count | None = None
    policy: Mapping[str, Any] = Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _buffer_is_complete(self) -> Self:
        keys = ("buffer", "max_staleness", "discount")
        if self.concurrency is None:
            if own := [key for key in keys if key in self.policy]:
                raise problem(f"missing; {own[0]} needs the number of clients at work", "concurrency")
            return self
        if missing := [key for key in keys[:2] if key not in self.policy]:
            raise problem("missing; asynchronous clients (concurrency) need it", "policy", missing[0])
        if other := [key for key in self.policy if key not in keys] or ["cohort"] * (self.cohort is not None):
            raise problem(f"{other[0]} does not apply to asynchronous clients (concurrency); remove it")
        with at():
            as_policy(self.policy)
        return self

    def over(self, pattern: participation.Participation) -> Clock | Arrivals:
        """Return the pattern's clients on this clock."""
        options = self.model_dump(exclude={"cohort", "concurrency", "policy"})
        durations = Durations(pattern.clients, seed=pattern.seed, **options)
        if self.concurrency is not None:
            return Arrivals(durations, self.concurrency, among=pattern)
        return Clock(durations, policy=self.policy, cohort=self.cohort, among=pattern)

    def check(self, method: Method, experiment: "Experiment") -> None:
        """Raise an error if the clients, the method or another table of the experiment do not fit this clock."""
        clients = experiment.partition.clients
        self.over(participation.Always(clients))
        if self.concurrency is None:
            return
        tables = {"objective": method.objective or experiment.objective, "attack": experiment.attack}
        if present := [key for key, table in {**tables, "network": experiment.network}.items() if table]:
            raise problem(f"asynchronous clients do not work with {present[0]}; remove one of them", "concurrency")
        made = method.make()
        if made.rows_at_clients:
            raise problem(f"{method.label}: clients keep rows, which needs synchronous rounds; use placement='server'")
        if made.needs_fresh_updates:
            raise problem(f"{method.label}: takes no late updates; leave concurrency out, or use another method")


class Evaluate(Section):
    """When the model is evaluated and stored.

    Attributes:
        every: rounds between two evaluations on the test set.
        last: the number of rounds at the end of the run that are all evaluated. Default: the last round only.
        keep: rounds between two models in the run's folder ``models``, which also receives the last one. Default: no
            models are stored.
        best: whether ``models`` also receives the best model so far, by ``metric``.
        metric: "accuracy" or "loss", on the test set.
        patience: a trial stops after this many evaluations without an improvement. Default: it runs all rounds.
        min_delta: the smallest change of the metric that counts as an improvement.
    """

    every: Count = 1
    last: Count = 1
    keep: Count | None = None
    best: bool = False
    metric: Literal["accuracy", "loss"] = "accuracy"
    patience: Count | None = None
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @pydantic.field_validator("metric", mode="before")
    @classmethod
    def _is_recorded(cls, metric: Any) -> Any:
        if metric not in ("accuracy", "loss"):
            raise problem(f"must be 'accuracy' or 'loss', got {metric!r}; for another metric write the loop of rounds")
        return metric

    def is_due(self, round: int, rounds: int) -> bool:
        """Whether a run of ``rounds`` rounds evaluates the model of this round."""
        return (round + 1) % self.every == 0 or round >= rounds - self.last

    def keeps(self, round: int, rounds: int) -> bool:
        """Whether a run of ``rounds`` rounds stores the model of this round."""
        return self.keep is not None and ((round + 1) % self.keep == 0 or round + 1 == rounds)


def _inside(name: str) -> str:
    """Require a relative path, since the name becomes a folder below the output folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or (name and not path.parts):
        raise problem(f"must be a name or a relative path, got {name!r}")
    return name


def _distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds) or not seeds:
        raise problem(f"needs at least one seed, without duplicates, got {list(seeds)}")
    return seeds


def _labelled(methods: tuple[Method, ...]) -> tuple[Method, ...]:
    labels = [method.label for method in methods]
    if len(set(labels)) < len(labels) or not labels:
        raise problem(f"needs at least one algorithm, with distinct labels, got {labels}; set label = '...'")
    return methods


class Experiment(Represented, Section):
    """A comparison of algorithms on one problem, in which the same clients are active in the same rounds.

    Attributes:
        threads: per process, for fedcore's kernels and for batched training of clients.
        together: whether clients are trained as a batch if the model allows it (``InProcess``), or "vmap" for torch's
            batching. Default: true for perceptrons; for other networks, a run measures which is faster, and stores the
            choice in its configuration.
        device: where clients are trained and models evaluated: the CPU or a GPU. Participants, examples and minibatches
            do not depend on it; results differ in rounding.
        server_device: where the server keeps its vectors: host memory or a GPU. Results do not depend on it.
        clock: a virtual clock, on which late clients do not count. Default: rounds have no duration.
        network: replaces the server; the clients are nodes that average their models with their neighbours'.
        limits, aggregation: limits of single updates, and rules that reject, cap, scale or combine updates.
        attack: what dishonest clients send. Default: all clients are honest.
        validation: the share of each client's training examples that is held out of training. Models are then evaluated
            on these examples in place of the test set. The examples depend on the seed. Default: none.
        grid: the values that a sweep tries (``experiment.config.points``); a run ignores it.
        note: a text that reports show below the table.
        changes: the differences from the preset with the same title (set by ``load_preset``).
        inherited: the values that a file has from its ``base``, by preset and key (set by ``load_preset``).
    """

    name: Annotated[Line, AfterValidator(_inside)] = ""
    title: Line
    description: str
    source: str
    rounds: Count
    seeds: Annotated[tuple[Seed, ...], Field(strict=False), AfterValidator(_distinct)]
    algorithms: Annotated[tuple[Method, ...], Field(strict=False), AfterValidator(_labelled)]
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
    clock: VirtualClock | None = None
    limits: UpdateLimits | None = None
    aggregation: Aggregation = None
    attack: AttackOfClients | None = None
    objective: Objective | None = None
    network: NetworkOfNodes | None = None
    evaluate: Evaluate = Evaluate()
    validation: float | None = Field(default=None, gt=0, lt=1)
    pictures: Pictures = Pictures()
    report: ReportSettings = ReportSettings()
    grid: Mapping[str, list[Any]] = Field(default_factory=dict)
    note: Line = ""
    changes: tuple[Change, ...] = Field(default=(), strict=False)
    inherited: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _tables_fit(self) -> Self:
        """Validate the tables together. The model is last, because only its check imports torch."""
        checks: list[Callable[[], object]] = [
            self._check_data,
            self._check_clients,
            *(partial(self._check_method, order) for order in range(len(self.algorithms))),
            self._check_network,
        ]
        found = []
        for check in checks:
            try:
                check()
            except ValidationError as error:
                found += error.errors()
        if found:
            raise moved(found)
        with at("model"):
            self.model.check(self.data.source, self.data.name)
        return self

    def _check_data(self) -> None:
        """Require data with clients for the natural partition. A user's data set is checked when it is loaded."""
        own = data.REGISTRY.own
        if self.partition.name == "natural" and self.data.name in own and not self.data.source.generated:
            generated = ", ".join(name for name, one in data.REGISTRY.items() if one.generated and name in own)
            text = f"does not assign examples to clients; use {generated}, your own data, or a different partition"
            raise problem(f"{self.data.name!r} {text}", "partition", "name")

    def _check_clients(self) -> None:
        clients, attack = self.partition.clients, self.attack
        self._pattern()
        if attack is not None and attack.clients >= clients:
            text = f"must be less than the {clients} clients of the partition, got {attack.clients}"
            raise problem(text, "attack", "clients")

    def _pattern(self) -> Any:
        with at("participation"):
            return participation.named(self.participation.name, self.partition.clients, **self.participation.options)

    def _check_method(self, order: int) -> None:
        method, place = self.algorithms[order], ("algorithms", str(order))
        with at(*place, "rate"):
            changed(self.rate, method.rate)
        with at(*place, "local"):
            local = changed(self.local, method.local)
        with at(*(timed := (*(place if method.clock else ()), "clock"))):
            if (clock := self.clock_of(method)) is not None:
                clock.check(method, self)
        made, length = method.make(), {"epochs": local.epochs, "steps": local.steps}
        with at(*place):
            least = full_steps_of(made.local_rule, 1, local.batch, **length)
            options = ServerOptions(**Trial(self, order, 0).server_options(lambda round: 1))
            settings = Settings.of(made, Layout.of(np.zeros(1, np.float32)), options)
            require_compatible(settings)
        if not settings.repeats and (settings.policy.buffer or 0) > (most := self.partition.clients):
            text = f"must be at most {most}, the clients: {method.label} takes one update of each"
            raise problem(text, *timed, "policy")
        if made.local_rule.most_steps is None and least > (made.most_steps or least):
            text = f"{method.label} takes at most {made.most_steps} local steps, but each client does at least {least}"
            raise problem(f"{text}; change its local_steps, or set local.steps={made.most_steps}", *place)
        key = next((name for name in ("momentum", "clip") if getattr(local, name)), None)
        if key and made.needs_plain_steps:
            text = f'does not work with {method.label}, whose controls need plain SGD; drop it or set control = "sent"'
            raise problem(text, *(place if key in (method.local or ()) else ()), "local", key)
        draws = [one for one in participation.nested(self._pattern()) if isinstance(one, participation.Weighted)]
        if (made.updates_once or settings.rules.private) and any(one.replacement and one.k > 1 for one in draws):
            text = f"{method.label} takes each client once a round; draw without replacement, or use another method"
            raise problem(text, "participation", "replacement")

    def _check_network(self) -> None:
        if self.network is None:
            return
        if key := next((name for name in ("keep", "best") if getattr(self.evaluate, name)), None):
            raise problem("does not work with a network, whose nodes have different models; remove it", "evaluate", key)
        owners: list[tuple[Section, Mapping[str, Any], str]] = [(self, self.rate.model_dump(exclude_none=True), "")]
        owners += [(method, method.rate or {}, f" of {method.label}") for method in self.algorithms]
        with at("network"):
            for method in self.algorithms:
                if not isinstance(method.make(), algorithms.LocalDescent):
                    raise problem(f"the method must be LocalDescent, got {method.label}")
            for owner, rate, of in owners:
                keys = [f"rate.{key}" for key in ("server_lr", "optimizer") if key in rate]
                keys += [key for key in ("objective", "limits", "aggregation", "attack") if getattr(owner, key, None)]
                if keys:
                    raise problem(f"{keys[0]}{of} needs a server; remove it")
            self.network.topology(self.partition.clients)

    def clock_of(self, method: Method) -> VirtualClock | None:
        """Return the clock of one algorithm."""
        if self.clock is None and method.clock is not None:
            raise problem("needs a table clock in the experiment, which times the other algorithms")
        return None if self.clock is None else changed(self.clock, method.clock)

    def __repr__(self) -> str:
        methods = ", ".join(method.label for method in self.algorithms)
        return f"Experiment({self.name!r}: {methods}; {self.rounds} rounds, {len(self.seeds)} seeds)"

    def _facts(self) -> dict[str, Any]:
        """Return the tables that are not empty, with only the labels of the algorithms; see ``Represented``."""
        tables = {key: value for key, value in self.tables().items() if value not in ({}, [], "")}
        return tables | {"algorithms": [method.label for method in self.algorithms]}

    def tables(self) -> dict[str, Any]:
        """Return the experiment as JSON tables, as in ``config.json``."""
        tables: dict[str, Any] = json.loads(self.model_dump_json(exclude_none=True))
        return tables


@cache
def _scores(model: Key) -> int:
    """Return the number of outputs of a model. The result is cached since ResNet-18 is slow to build."""
    from fedcore.sim import nets

    _, name, options, shape = model
    return nets.scores(name, shape, **options)


@dataclass(frozen=True)
class Trial:
    """One algorithm with one seed. ``order`` is the algorithm's position in ``experiment.algorithms``."""

    experiment: Experiment
    order: int
    seed: int

    @property
    def method(self) -> Method:
        """The algorithm and its options."""
        return self.experiment.algorithms[self.order]

    def own(self, key: Literal["limits", "aggregation", "objective"]) -> Any:
        """Return the algorithm's value of a table, or else the experiment's."""
        value = getattr(self.method, key)
        return getattr(self.experiment, key) if value is None else value

    @property
    def rate(self) -> Rate:
        """The rates of the algorithm."""
        return changed(self.experiment.rate, self.method.rate)

    @property
    def local(self) -> Local:
        """The local work of the algorithm's clients."""
        return changed(self.experiment.local, self.method.local)

    @property
    def clock(self) -> VirtualClock | None:
        """The clock of the algorithm."""
        return self.experiment.clock_of(self.method)

    def server_options(self, cohort: Callable[[int], int]) -> dict[str, Any]:
        """Return the server's options that depend on the method; ``cohort`` returns the number of clients of a round.

        A buffer has its own number.
        """
        rate, clock, limits, aggregation = self.rate, self.clock, self.own("limits"), self.own("aggregation")
        policy = as_policy({} if clock is None or clock.concurrency is None else clock.policy)
        gamma = rate.server_lr.make() if rate.server_lr else None
        if isinstance(gamma, rates.PerCohort):
            gamma = gamma.over(lambda round: policy.buffer or cohort(round))
        return {
            "lr": rate.lr.make(),
            "server_lr": gamma,
            "optimizer": rate.optimizer.make() if rate.optimizer else None,
            "aggregation": None if aggregation is None else [rule.make() for rule in aggregation],
            "limits": Limits(max_norm=limits.max_norm if limits else None),
            "policy": policy,
        }

    @property
    def name(self) -> str:
        """The trial's name in messages."""
        return f"{self.method.label}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """The file name of the record, with 100 characters of the label: file systems allow 255 in all.

        The position distinguishes labels that differ only in punctuation, or in further characters.
        """
        label = re.sub(r"[^a-z0-9]+", "-", self.method.label.lower()).strip("-")[:100]
        return f"{self.order}-{label}-seed{self.seed}.jsonl"


def trials(experiment: Experiment) -> list[Trial]:
    """Return all trials, seed by seed, so that a run that stops early has complete comparisons."""
    return [Trial(experiment, order, seed) for seed in experiment.seeds for order in range(len(experiment.algorithms))]
