"""The options of a server as values: what limits an update, where rows are stored, and how sums are computed."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from inspect import Parameter, isroutine, signature
from typing import Any, Literal, TypedDict, get_args

import numpy as np

from fedcore import algorithms, rules
from fedcore.algorithms import Algorithm, check_table, optimizers, rates
from fedcore.algorithms.averaging import WeightedMean
from fedcore.algorithms.base import NOTHING, Direction, H
from fedcore.algorithms.optimizers import Optimizer
from fedcore.algorithms.rates import Constant, Rate, as_rate, rate_at
from fedcore.arguments import absolute, real, whole
from fedcore.arrays import CPU, device_named
from fedcore.errors import CheckpointError, RangeError, UnknownNameError
from fedcore.model import Layout
from fedcore.registries import Registry
from fedcore.rules import CapExamples, CapSteps, Chain, ClipToMedian, Mean, RejectLong, Rule
from fedcore.store.commits import Durability, Medium

Accumulator = Literal["float32", "float64", "exact"]
"""The precision of a round's sums."""

BATCH, BATCH_BYTES = 8, 1 << 20
"""Updates that are folded in one pass by default: so many, or as many as fit into so many bytes."""
MOST_CLIENT_LR = 100.0
LARGEST = float(np.finfo(np.float32).max)
RATES = ("lr", "server_lr")


@dataclass(frozen=True)
class Limits:
    """Limits of a single update, whatever the others of its round are. An update past one of them is rejected.

    Args:
        max_steps: the most local steps that a client may report; best the number that clients are asked for. Methods
            that set a client's steps themselves (``Algorithm.most_steps``) hold it to these.
        max_examples: the most examples.
        max_norm: the greatest length of what the sums take in: |x - y| where models are averaged, elsewhere of the mean
            gradient |x - y| / (eta K) and of a second vector. Float buffers, whose unit is another, have no limit.
            Default: no limit.
        max_client_lr: the largest rate that a client may choose and report as ``Update.lr``. Default: clients step at
            the rate that they were sent, and an update that reports another one is rejected.
        signed_buffers: patterns of the names of float buffers that may become negative. Other float buffers that start
            non-negative and non-zero, such as variances, must stay non-negative.

    Raises:
        RangeError: a limit is out of range.
    """

    max_steps: int = 10**6
    max_examples: int = 2**53
    max_norm: float | None = None
    max_client_lr: float | None = None
    signed_buffers: tuple[str, ...] = ("*mean",)

    def __post_init__(self) -> None:
        checked = {
            "max_steps": whole("max_steps", self.max_steps, 1, 2**53),
            "max_examples": whole("max_examples", self.max_examples, 1, 2**53),
            "max_norm": None if self.max_norm is None else real("max_norm", self.max_norm, "(0, inf)"),
            "max_client_lr": (
                None if self.max_client_lr is None else real("max_client_lr", self.max_client_lr, "(0, inf)")
            ),
            "signed_buffers": (
                (self.signed_buffers,) if isinstance(self.signed_buffers, str) else tuple(self.signed_buffers)
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Storage:
    """Where the clients' rows are stored, and what a folder keeps of each round.

    Args:
        path: a new or empty folder, in which each finished round is durable; ``Server.load`` resumes it.
            Default: rows are kept in memory.
        medium: "ram", "mmap" (files in ``path``), or "cuda" (the memory of ``Compute.device``). Default: "mmap" with a
            path, else "ram". When loading: as saved.
        codec: how a row is stored: "f32", "bf16", or "int8" with a scale for every 64 elements. A narrow row is rounded
            stochastically, by the round and the client.
        durability: when a folder is safe: "round", "checkpoint" or "none"; see ``ClientStore``.
        keep_previous: whether the folder keeps what the last round, arrival, departure or warm start replaced, so that
            ``ClientStore.undo`` or ``fedcore store undo PATH`` can restore it. Default: no. When loading: as saved.
        cached_rows: on a CUDA device, about how many rows of a store in host memory stay there between rounds.
            Default: as many as fit into 4 GiB.
        audit: whether each round stores a document: the digest and weight of each update, the rejections, the options,
            and the digests of x before and after; see ``Server.audit_log``.
        folders: of a server in shards, the folder of each shard. Default: ``shard-0``, ``shard-1``, ... in ``path``.

    Raises:
        UnknownNameError, RangeError: an argument is not one of those above.
    """

    path: str | os.PathLike[str] | None = None
    medium: Medium | None = None
    codec: str = "f32"
    durability: Durability = "round"
    keep_previous: bool | None = None
    cached_rows: int | None = None
    audit: bool = False
    folders: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", str(absolute(self.path)))
        if self.folders is not None:
            object.__setattr__(self, "folders", tuple(str(absolute(folder)) for folder in self.folders))
        if self.cached_rows is not None:
            object.__setattr__(self, "cached_rows", whole("cached_rows", self.cached_rows, 0, 2**53))
        if self.medium is not None and self.medium not in get_args(Medium):
            raise UnknownNameError.of("medium", self.medium, get_args(Medium))
        if self.path is not None and self.medium in ("ram", "cuda"):
            raise RangeError(f"medium={self.medium!r}: a folder has medium 'mmap'; leave medium or path out")
        if self.keep_previous and self.medium in ("ram", "cuda"):
            raise RangeError(f"keep_previous=True: only a folder keeps the previous state, not medium={self.medium!r}")

    @classmethod
    def of(cls, storage: "Storage | str | os.PathLike[str] | None") -> "Storage":
        """The storage of an argument: a path stands for ``Storage(path)``."""
        if isinstance(storage, Storage):
            return storage
        if isinstance(storage, str) and (storage in ("ram", "cuda") or storage.startswith("mmap:")):
            raise RangeError(f"storage={storage!r}: give the path of a folder, or Storage(path=..., medium=...)")
        return cls(storage)


@dataclass(frozen=True)
class Compute:
    """Where and how precisely the server computes. When loading, a field that is not given is as saved.

    Args:
        device: where the model, the sums and the rows of a round lie: "cpu", "cuda" or "cuda:1"; the bits are the same.
            On a GPU ``x`` and offsets are ``DeviceArray``s. Default: "cpu".
        accumulator: the precision of a round's sums: "float32", "float64" or "exact". Methods with a running total or
            rows (MIFA, MimiC, SCAFFOLD) always use float64 at least. Exact sums are integers on a grid of 2^-60: the
            same bits in any order of updates, totals without drift, and nothing remains of a removed client. An update
            must then be shorter than 2^39, and than 2^50 / N. Default: "float32".
        batch_size: updates that a round may hold to fold them in one pass. Default: 8, or as many as fit into 1 MiB.
        diagnostics: whether reports have ``diversity`` and ``correction_norm`` even where this takes a reading of rows.
        shards: the number of parts into which the model and the rows are cut, with the same bits. Default: 1.
        executor: where shards run. Default: in threads of this process; ``fedcore.cluster.OnRay()`` for Ray.

    Raises:
        UnknownNameError, RangeError: an argument is not one of those above.
        DeviceError: there is no such device, or no driver.
    """

    device: str | None = None
    accumulator: Accumulator | None = None
    batch_size: int | None = None
    diagnostics: bool | None = None
    shards: int = 1
    executor: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.device is not None:
            object.__setattr__(self, "device", device_named(self.device))
        if self.accumulator is not None and self.accumulator not in get_args(Accumulator):
            raise UnknownNameError.of("accumulator", self.accumulator, get_args(Accumulator))
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", whole("batch_size", self.batch_size, 1, 2**53))
        object.__setattr__(self, "shards", whole("shards", self.shards, 1, 2**31))
        if self.executor is not None and not hasattr(self.executor, "make"):
            raise RangeError(f"executor={self.executor!r}: give a placement of fedcore.cluster, such as OnRay()")

    @property
    def is_sharded(self) -> bool:
        """Whether the server is cut into shards."""
        return self.shards > 1 or self.executor is not None


class Changes(TypedDict, total=False):
    """The options that ``Server.change`` takes."""

    lr: float | Rate
    server_lr: float | Rate | None
    limits: Limits
    aggregation: "str | Sequence[Rule | str] | None"


CHANGEABLE = (*RATES, "limits", "aggregation")


@dataclass(frozen=True)
class Settings:
    """The checked options of a server, which stay the same over its rounds."""

    algorithm: Algorithm
    layout: Layout
    lr: Rate
    server_lr: Rate | None = None
    optimizer: Optimizer | None = None
    limits: Limits = field(default_factory=Limits)
    rules: Chain = field(default_factory=Chain)
    batch_size: int = BATCH
    accumulator: Accumulator = "float32"
    diagnostics: bool = False
    device: str = CPU
    max_staleness: int = 0
    audit: bool = False
    nonnegative: tuple[str, ...] = ()
    """The float buffers that an update may not make negative."""

    @cached_property
    def asked(self) -> Limits:
        """The limits, with ``max_steps`` at most what the method asks of a client."""
        most = self.algorithm.most_steps
        return self.limits if most is None else replace(self.limits, max_steps=min(most, self.limits.max_steps))

    @cached_property
    def counts_steps(self) -> bool:
        """Whether the numbers of steps that clients report matter."""
        return not self.averages_models or self.algorithm.needs_shares

    @cached_property
    def takes_squares(self) -> bool:
        """Whether a step squares updates: an optimiser's, or one whose length the method computes."""
        return self.optimizer is not None or self.algorithm.says_gamma

    @cached_property
    def is_exact(self) -> bool:
        """Whether sums and the running total are exact."""
        return self.accumulator == "exact"

    @cached_property
    def steps_by_mean(self) -> bool:
        """Whether a round only moves x along the weighted mean of h: the default of FedAvg.

        No update then has buffers, counters, a row or a second vector.
        """
        algorithm, layout, kind = self.algorithm, self.layout, type(self.algorithm)
        members = ("step", "weigh", "weighs_claims", "moves", "sums", "hides_mean")  # a user's method may override them
        return (
            issubclass(kind, WeightedMean)
            and all(getattr(kind, name) is getattr(WeightedMean, name) for name in members)
            and (algorithm.row, algorithm.adds) == (NOTHING, H)
            and algorithm.direction == replace(Direction(), mu=algorithm.direction.mu)
            and not (algorithm.keeps_total or algorithm.sums_changes or algorithm.needs_shares)
            and not (layout.narrow or layout.n > layout.n_parameters)
            and self.optimizer is None
            and not self.max_staleness
            and (self.averages_models or self.server_lr is not None)
        )

    @cached_property
    def averages_models(self) -> bool:
        """Whether h is x - y and gamma is 1, so that the step is the plain average of the clients' models."""
        return self.server_lr is None and self.algorithm.averages

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        layout: Layout,
        *,
        lr: float | Rate,
        server_lr: float | Rate | None,
        optimizer: Optimizer | None,
        limits: Limits,
        aggregation: "str | Sequence[Rule | str] | Chain | None",
        compute: Compute,
        max_staleness: int = 0,
        audit: bool = False,
    ) -> "Settings":
        """The settings of a new server; the arguments are ``Server``'s.

        Raises:
            UnknownNameError, RangeError: an argument is not what ``Server`` documents.
            AlgorithmError: the method's table contradicts itself.
        """
        check_table(algorithm)
        if not isinstance(limits, Limits):
            raise RangeError(f"limits={limits!r}: give a fedcore.Limits; aggregation= takes names of chains")
        settings = cls(
            algorithm=algorithm,
            layout=layout,
            lr=as_rate(lr),
            server_lr=None if server_lr is None else as_rate(server_lr),
            optimizer=optimizer,
            limits=limits,
            rules=Chain.of(aggregation),
            batch_size=compute.batch_size or max(BATCH, BATCH_BYTES // (4 * layout.n)),
            accumulator=compute.accumulator or "float32",
            diagnostics=bool(compute.diagnostics),
            device=compute.device or CPU,
            max_staleness=whole("max_staleness", max_staleness, 0, 2**31),
            audit=bool(audit),
        )
        settings._require_fitting()
        return settings

    def changed(self, options: Mapping[str, Any]) -> "Settings":
        """The settings with other rates, limits or rules: see ``Server.change``.

        Raises:
            UnknownNameError, RangeError: as ``Server.change``.
        """
        given = dict(options)
        for name in given:
            if name not in CHANGEABLE:
                raise UnknownNameError.of("option", name, CHANGEABLE)
        for name in RATES:
            if name in given and not (given[name] is None and name == "server_lr"):
                given[name] = as_rate(given[name])
        if "aggregation" in given:
            given["rules"] = Chain.of(given.pop("aggregation"))
        if "limits" in given and not isinstance(given["limits"], Limits):
            raise RangeError(f"limits={given['limits']!r}: give a fedcore.Limits")
        changed = replace(self, **given)
        if changed.averages_models != self.averages_models:
            must = "stay None, since this server averages models" if self.averages_models else "stay a rate"
            raise RangeError(f"server_lr: must {must}; make a new server from its tensors()")
        changed._require_fitting()
        return changed

    def shown(self, names: Iterable[str]) -> dict[str, Any]:
        """Some options as a report shows them, and as JSON holds them."""
        values: dict[str, Any] = {}
        for name in names:
            if name == "limits":
                values[name] = {key: value for key, value in asdict(self.limits).items() if value != _USUAL[key]}
            elif name == "aggregation":
                values[name] = [repr(rule)[:200] for rule in self.rules]
            else:
                value = getattr(self, name)
                value = value.value if isinstance(value, Constant) else value
                values[name] = repr(value)[:200] if callable(value) else value
        return values

    def _require_fitting(self) -> None:
        """Reject options that do not fit the method, the device, or float32.

        Raises:
            RangeError: one does not.
        """
        method = self.algorithm
        if self.server_lr is not None and not method.takes_server_rate:
            raise RangeError(f"server_lr: {method} has no server rate; leave it out")
        if isinstance(self.lr, Constant) and self.lr.value > LARGEST:
            raise RangeError(f"lr={self.lr.value!r}: must be in (0, {LARGEST:.3g}], the range of float32")
        if self.limits.max_norm is not None and method.second_vector is not None and self.averages_models:
            raise RangeError(
                f"max_norm={self.limits.max_norm:g}: models and second vectors have different units here; give a "
                "server_lr, or the rule RejectLong, which measures each by its own median"
            )
        if self.rules.weights is not None:
            require_weighing(method, "weights")
        if self.is_exact and self.device != CPU:
            raise RangeError(f'device={self.device!r}: exact sums need "cpu"; leave device or accumulator="exact" out')
        if self.is_exact and method.keeps_total and not method.total_is_whole:
            raise RangeError(
                f'accumulator="exact": the total of {method} has fractional coefficients; use "float32" or "float64"'
            )

    def to_state(self, round: int = 0) -> dict[str, Any]:
        """The settings as JSON, under the keys of the folder format. Code of the caller is only described.

        Args:
            round: the next one.
        """
        rates = {"lr": self.lr, "server_lr": self.server_lr}
        rules = self.rules
        listed = [describe("rule", rule) for rule in rules if not isinstance(rule, Mean)]
        return {
            "algorithm": describe("algorithm", self.algorithm),
            "layout": self.layout.to_state(),
            "lr": describe("lr", self.lr),
            "server_lr": describe("server_lr", self.server_lr),
            "optimizer": describe("optimizer", self.optimizer),
            "next_rates": {"round": round} | {what: next_rate(what, rate, round) for what, rate in rates.items()},
            **{key: getattr(self, name) for key, name in KEYS.items()},
            "limits": limits_to_state(self.limits, rules),
            "history_rounds": self.algorithm.most_history,
            "nonnegative": list(self.nonnegative),
            "own_weights": rules.weights is not None,
        } | ({"rules": listed} if listed else {})

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], given: Mapping[str, Any], compute: Compute | None = None
    ) -> "Settings":
        """The settings that ``to_state`` described, or a version of fedcore before it.

        Args:
            given: what the caller passes again: "algorithm", "lr", "server_lr" and "optimizer", each None or itself. A
                rate counts only where the saved one is the caller's own code.
            compute: where the server goes on, as far as it is given.

        Raises:
            CheckpointError: an object is needed and missing, or is not what was saved.
            AlgorithmError: the table of a given method contradicts itself.
        """
        compute = Compute() if compute is None else compute
        described = {what: state[what] for what in given}
        described["algorithm"] = _with_history(described["algorithm"], state.get("history_rounds"))
        own: dict[str, Any] = {
            what: _saved_rate(what, state, given[what]) if what in RATES else revive(what, described[what], given[what])
            for what in given
        }
        check_table(own["algorithm"])
        saved = {name: state[key] for key, name in KEYS.items() if key in state}
        # The first folders have diagnostics under another key, or not at all, and no audits.
        saved.setdefault("diagnostics", state.get("correction_norms", False))
        limits, rules = limits_from_state(state)
        settings = cls(
            **own,
            **saved
            | {
                name: value
                for name in ("batch_size", "diagnostics", "device")
                if (value := getattr(compute, name)) is not None
            },
            layout=Layout.from_state(state["layout"]),
            limits=limits,
            rules=rules,
            nonnegative=tuple(state.get("nonnegative", ())),
        )
        for name, low, bits in (("batch_size", 1, 53), ("max_staleness", 0, 31)):
            whole(name, getattr(settings, name), low, 2**bits)
        if settings.accumulator not in get_args(Accumulator):
            raise UnknownNameError.of("accumulator", settings.accumulator, get_args(Accumulator))
        if compute.accumulator not in (None, settings.accumulator):
            raise RangeError(f"accumulator={compute.accumulator!r}: the server was saved with {settings.accumulator!r}")
        settings._require_fitting()
        return settings


_USUAL = {each.name: each.default for each in fields(Limits)}

KEYS = {
    "fold": "batch_size",
    "accumulate": "accumulator",
    "late_rounds": "max_staleness",
    "diagnostics": "diagnostics",
    "audit": "audit",
}
"""Keys of a folder's settings, and the fields of ``Settings``."""
LIMIT_KEYS = {"steps": "max_steps", "examples": "max_examples", "norm": "max_norm"}
"""Keys of a folder's limits, and the fields of ``Limits``."""


def limits_to_state(limits: Limits, rules: Chain) -> dict[str, Any]:
    """Limits and the rules with a ratio as JSON, under the keys of the folder format."""
    long = rules.find(RejectLong)
    return {key: getattr(limits, name) for key, name in LIMIT_KEYS.items()} | {
        "lr": MOST_CLIENT_LR if limits.max_client_lr is None else limits.max_client_lr,
        "own_rates": limits.max_client_lr is not None,
        "norm_ratio": None if long is None else long.ratio,
        "examples_ratio": rules.examples_ratio,
        "steps_ratio": rules.steps_ratio,
        "clips": rules.find(ClipToMedian) is not None,
    }


def limits_from_state(state: Mapping[str, Any]) -> tuple[Limits, Chain]:
    """The limits and the chain that a folder describes; folders of before had no lengths, and capped steps."""
    saved = {"steps_ratio": 10.0, **state["limits"]}
    limits = Limits(
        max_steps=saved["steps"],
        max_examples=saved["examples"],
        max_norm=saved.get("norm"),
        max_client_lr=saved["lr"] if saved.get("own_rates") else None,
    )
    if "rules" in state:
        return limits, Chain((*(revive("rule", rule, None) for rule in state["rules"]), Mean()))
    rules: list[Rule] = []
    for kind, key in ((CapSteps, "steps_ratio"), (CapExamples, "examples_ratio"), (RejectLong, "norm_ratio")):
        if saved.get(key) is not None:
            rules.append(kind(saved[key]))
    if saved.get("clips"):
        rules.append(ClipToMedian())
    return limits, Chain((*rules, Mean()))


def _with_history(description: Any, rounds: int | None) -> Any:
    """A method's description with ``history``, which older folders have as a setting of the server."""
    if isinstance(description, dict) and description.get("name") == "MimiC" and rounds is not None:
        return description | {"options": {"history": rounds, **description["options"]}}
    return description


def given_again(
    algorithm: Algorithm | None, lr: float | Rate | None, server_lr: float | Rate | None, optimizer: Optimizer | None
) -> dict[str, Any]:
    """The objects that the caller of ``Server.load`` passes again, checked before the folder is read.

    Raises:
        AlgorithmError, UnknownNameError, RangeError: one is not what ``Server`` takes.
    """
    if algorithm is not None:
        check_table(algorithm)
    return {
        "algorithm": algorithm,
        "lr": None if lr is None else as_rate(lr),
        "server_lr": None if server_lr is None else as_rate(server_lr),
        "optimizer": optimizer,
    }


def require_weighing(algorithm: Algorithm, name: str) -> None:
    """Reject weights for a method that does not weigh by examples.

    Raises:
        RangeError: it does not.
    """
    if not algorithm.weighs_claims:
        raise RangeError(f"{name}: {algorithm} does not weigh by examples; leave {name} out, or use FedAvg, say")


def _saved_rate(what: str, state: Mapping[str, Any], given: Rate | None) -> Rate | None:
    """The saved rate, or the given one where the saved one cannot be made again."""
    try:
        rate: Rate | None = revive(what, state[what], None)
    except CheckpointError:
        if given is None:
            raise
        return given
    if given is None:
        next_rates = state.get("next_rates", {})
        check_rate(what, rate, next_rates.get(what), next_rates.get("round", 0))
    return rate


Callback = Callable[[Any], object]
"""A function that is called with the ``Report`` of each round."""


DESCRIBED = ("algorithm", "optimizer", "lr", "server_lr")
"""Arguments of ``Server`` that a folder describes by a name and options."""
REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm": algorithms.REGISTRY,
    "optimizer": optimizers.REGISTRY,
    "lr": rates.REGISTRY,
    "server_lr": rates.REGISTRY,
    "rule": rules.REGISTRY,
}

BY_MODULE = ("algorithm", "rule")
"""What is found by ``module:Name`` again, since there is a class that it must be one of. A rate is anything that can be
called, and a folder may be anybody's: it does not say what is called with what."""


def describe(what: str, value: Any) -> dict[str, Any] | None:
    """The description of ``Server``'s argument ``what``; ``{"name": None}`` for what has no name to be found by.

    An object of a class that is not fedcore's own is described by ``module:Name`` where that can be imported and its
    options are attributes of their names that JSON can hold; and in any case by its class and such options as are. Of a
    function there is nothing but what ``repr`` says.
    """
    if value is None:
        return None
    name = REGISTRIES[what].name_of(type(value))
    if name in REGISTRIES[what].own:
        # As JSON gives it back, so that what is given can be compared with what was saved.
        options = {option: getattr(value, option) for option in signature(type(value)).parameters}
        return {"name": name, "options": {o: _plain(v) for o, v in options.items()}}
    own: dict[str, Any] = {"name": None, "was": repr(value)[:200]}
    if isroutine(value) or isinstance(value, partial):
        return own
    options, whole = _options(value)
    whole = whole and name is not None and (what in BY_MODULE or ":" not in name)
    # The module is no part of the comparison: that of a program is called otherwise in another process.
    return own | {"name": name if whole else None, "class": type(value).__qualname__, "options": options}


def _plain(value: Any) -> Any:
    """An option as JSON gives it back."""
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def revive(what: str, description: Mapping[str, Any] | None, given: Any) -> Any:
    """The object that was described, or the one given in its place.

    Raises:
        CheckpointError: it cannot be found by name, or its module is not imported, and nothing is given; or something
            else is given than was saved.
        LookupError, TypeError, ValueError: it is the description of nothing.
    """
    if description is None:
        if given is not None:
            raise CheckpointError(f"{what}: expected nothing, since the server was saved without one, got {given!r}")
        return None
    name, registry = description["name"], REGISTRIES[what]
    if name is not None and ":" in name and what not in BY_MODULE:
        name = None
    if name is None and given is None:
        raise CheckpointError(f"{what}: it was made of the caller's own code ({description['was']}): give it again")
    if name is None or "class" in description:
        if given is not None:
            _compare_own(what, description, describe(what, given) or {})
            return given
        try:
            return registry.find(name, imports=False)(**description["options"])
        except UnknownNameError as error:
            raise CheckpointError(f"{error} ({what}=)") from None
    make = registry[name]
    options = {o: v for o, v in getattr(make, "before", {}).items() if o in signature(make).parameters}
    options |= description["options"]
    for option, parameter in signature(make).parameters.items():
        if isinstance(parameter.default, bool) and option in options and type(options[option]) is not bool:
            raise RangeError(f"{what}: expected {option} to be true or false, got {options[option]!r}")
    revived = make(**options)
    if given is not None and describe(what, given) != describe(what, revived):
        raise CheckpointError(f"{what}: expected {description}, as it was saved, or nothing, got {given!r}")
    return revived


def next_rate(what: str, rate: Any, round: int) -> float | None:
    """The value of a rate of the caller's own code in the round to come, by which it is known again; else None."""
    if rate is None or REGISTRIES[what].name_of(type(rate)) in REGISTRIES[what].own:
        return None
    try:
        value = float(rate(round))
    except Exception:  # it may have come to its end
        return None
    return value if math.isfinite(value) else None


def check_rate(what: str, rate: Any, saved: float | None, round: int) -> None:
    """Refuse a rate that is another one in the round to come than the rate that was saved.

    Args:
        saved: what ``next_rate`` said; None says nothing.

    Raises:
        CheckpointError: it is.
    """
    if saved is None or rate is None:
        return
    given = rate_at(rate, round)
    if given != saved:
        raise CheckpointError(f"{what}: expected {saved:g} in round {round}, as it was saved, got {given:g}")


def is_same_rate(what: str, description: Mapping[str, Any] | None, given: Any, saved: float | None, round: int) -> bool:
    """Tell whether a rate that is given is the one that was saved, as far as that can be told.

    Args:
        saved, round: as for ``check_rate``.
    """
    is_own = description is not None and description["name"] in REGISTRIES[what].own
    if not is_own and (describe(what, given) or {})["name"] in REGISTRIES[what].own:
        return False  # a rate of fedcore's, in the place of code of the caller's own, or of none
    try:
        revive(what, description, given)
        check_rate(what, given, saved, round)
    except CheckpointError:
        return False
    return True


def _compare_own(what: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse another class, or other options of it, than was saved; a function tells neither."""
    if "class" not in saved:  # a function, or a folder of before this was looked at
        return
    class_given = given.get("class") or given["name"] or "a function"
    if class_given != saved["class"]:
        raise CheckpointError(f"{what}: expected {saved['class']}, as it was saved, got {class_given}")
    for option, value in saved["options"].items():
        if option in given["options"] and given["options"][option] != value:
            raise CheckpointError(
                f"{what}: expected {option}={value!r} of {saved['class']}, as it was saved, got "
                f"{given['options'][option]!r}"
            )


def _options(value: Any) -> tuple[dict[str, Any], bool]:
    """An object's options, by the names of its class's arguments, that are attributes JSON can hold; and if all are."""
    try:
        parameters = signature(type(value)).parameters.values()
    except (TypeError, ValueError):  # a class that tells no arguments
        return {}, False
    options = {}
    for parameter in parameters:
        with suppress(AttributeError, TypeError, ValueError):
            # As JSON gives it back.
            options[parameter.name] = json.loads(json.dumps(getattr(value, parameter.name), default=_number))
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return options, all(parameter.name in options and parameter.kind in by_name for parameter in parameters)


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError
