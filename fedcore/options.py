"""The options of a server: limits of updates, storage of rows, precision of sums, and when a round may close."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from inspect import Parameter, isclass, isroutine, signature
from typing import Any, Literal, TypedDict, TypeVar, get_args

import numpy as np

from fedcore import algorithms, rules
from fedcore.algorithms import Algorithm, check_table, optimizers, rates
from fedcore.algorithms.averaging import WeightedMean
from fedcore.algorithms.base import NOTHING, Direction
from fedcore.algorithms.optimizers import Optimizer
from fedcore.algorithms.rates import Constant, Rate, as_rate, rate_at
from fedcore.arrays import CPU, F64, device_named
from fedcore.errors import CheckpointError, RangeError, UnknownNameError
from fedcore.kernels.forms import H
from fedcore.model import Layout
from fedcore.model.layout import patterns_of
from fedcore.model.policy import matches
from fedcore.rules import CapExamples, CapSteps, Chain, ClipToMedian, Mean, RejectLong, Rule
from fedcore.rules.norms import RatioRule
from fedcore.store.commits import Durability, Medium
from fedcore.validation import Registry, absolute, check_integer, check_number, listed, require_objects

Accumulator = Literal["float32", "float64", "exact"]
"""The precision of a round's sums."""

BATCH, BATCH_BYTES = 8, 1 << 22
"""The default of ``batch_size``: ``BATCH`` updates, or more if they fit into ``BATCH_BYTES``."""
SMALL = 1 << 18
"""The most bytes of a model that a round copies to hold it."""
MOST_CLIENT_LR = 100.0
ROUNDING = 1e-9
"""A number of clients is rounded up, unless it is at most this much above an integer: 1.1 x 10 is 11."""
LARGEST = float(np.finfo(np.float32).max)
RATES = ("lr", "server_lr")

T = TypeVar("T")

Callback = Callable[[Any], object]
"""A function that gets the ``Report`` of each round."""


def _integer(low: int, bits: int = 53) -> Callable[[str, Any], Any]:
    return lambda name, value: check_integer(name, value, low, 2**bits)


def _one_of(names: tuple[str, ...]) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if value not in names:
            raise UnknownNameError.of(name, value, names)
        return value

    return check


def _executor(name: str, value: Any) -> Any:
    if isclass(value) or not hasattr(value, "make"):
        raise RangeError(f"{name}={value!r}: give a placement of fedcore.cluster, such as OnRay()")
    return value


def _discount(name: str, value: Any) -> float | tuple[float, float]:
    if isinstance(value, tuple | list):  # JSON has lists
        if len(value) != 2:
            raise RangeError(f"{name}={value!r}: must be a number a, or a pair (a, b)")
        return check_number(name, value[0], "(0, inf)"), check_number(name, value[1], "[0, inf)")
    return check_number(name, value, "[0, inf)")


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_steps": _integer(1),
    "max_examples": _integer(1),
    "max_norm": lambda name, value: check_number(name, value, "(0, inf)"),
    "max_client_lr": lambda name, value: check_number(name, value, rates.IN_FLOAT32),
    "signed_buffers": patterns_of,
    "max_open": _integer(1),
    "path": lambda name, path: str(absolute(path, name)),
    "medium": _one_of(get_args(Medium)),
    "durability": _one_of(get_args(Durability)),
    "cached_rows": _integer(0),
    "resident": _integer(1),
    "folders": lambda name, paths: tuple(str(absolute(path, name)) for path in listed(name, paths)),
    "device": lambda _, device: device_named(device),
    "accumulator": _one_of(get_args(Accumulator)),
    "batch_size": _integer(1),
    "shards": _integer(1, 31),
    "executor": _executor,
    "min_clients": _integer(0),
    "min_share": lambda name, value: check_number(name, value, "[0, 1]"),
    "deadline": lambda name, value: check_number(name, value, "(0, inf)"),
    "grace": lambda name, value: check_number(name, value, "[0, inf)"),
    "max_staleness": _integer(0, 31),
    "over_selection": lambda name, value: check_number(name, value, "[1, inf)"),
    "buffer": _integer(1, 31),
    "discount": _discount,
}
"""For each option, a function that checks a value and returns its plain form."""


class Options:
    """A frozen dataclass whose fields are checked by ``CHECKS``, except None."""

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if value is not None and name in CHECKS:
                object.__setattr__(self, name, CHECKS[name](name, value))


@dataclass(frozen=True)
class Limits(Options):
    """Limits of a single update, and of the updates that arrive in pieces. What exceeds a limit is rejected.

    Args:
        max_steps: the maximum number of local steps that a client may report. Set it to the number that clients must
            do. Methods that set the number of steps (``Algorithm.most_steps``) lower this limit to it.
        max_examples: the maximum number of examples that a client may report.
        max_norm: the greatest norm of an update: |x - y| where models are averaged, else the norm of the mean gradient
            |x - y| / (eta K), and of a second vector. Float buffers have a different unit and no limit. Default: no
            limit.
        max_client_lr: the largest rate that a client may choose and report as ``Update.lr``. A client may always use
            the rate that it was sent. Default: it must.
        signed_buffers: name patterns of float buffers that may become negative. Other float buffers that start
            non-negative and non-zero, such as variances, must stay non-negative.
        max_open: how many updates of ``Round.begin`` may be open in a round at a time. A client has one of them. Each
            one beyond ``batch_size`` takes a file descriptor, or two with a second vector, and 4 n bytes of disk.
    """

    max_steps: int = 10**6
    max_examples: int = 2**53
    max_norm: float | None = None
    max_client_lr: float | None = None
    signed_buffers: tuple[str, ...] = ("*mean",)
    max_open: int = 256


@dataclass(frozen=True)
class Storage(Options):
    """Where the clients' rows are stored, and what a folder keeps of each round.

    Args:
        path: a new or empty folder that makes each finished round durable; ``Server.load`` resumes it. Default: rows
            are kept in memory.
        medium: "ram", "mmap" (files in ``path``), or "cuda" (the memory of ``Compute.device``). Default: "mmap" with a
            path, else "ram". When loading: as saved.
        codec: the format of a row: "f32", "bf16", or "int8" with a scale for every 64 elements. The narrow formats
            round stochastically; the round and the client are the seed. Default: "f32". When loading: as saved.
        durability: which rounds survive a loss of power: "round", "checkpoint" or "none"; see ``ClientStore``. With
            shards or partial updates, "checkpoint" is "round". Default: "round".
        keep_previous: whether the folder keeps the state before the last change, which ``ClientStore.undo`` or
            ``fedcore store undo PATH`` restores. Not with ``durability="checkpoint"``. Default: no. When loading: as
            saved.
        cached_rows: on a CUDA device, about how many rows of a store in host memory stay there between rounds. Default:
            as many as fit into 4 GiB.
        journal: whether each accepted update of an open round is on disk when ``Round.add`` returns. After a crash, the
            next round starts with them, with the same bits. Default: no. When loading: as the folder, or the server of
            a copy, was used last. With False, the first round drops the updates of an interrupted one.
        audit: whether each round and each change of clients or options stores a document: the digest and weight of
            each update, the rejections, the options, and the digests of x before and after; see ``Server.audit_log``.
            Default: no. When loading: as saved.
        audit_key: an Ed25519 private key, 32 bytes, that signs each document; it turns the audit on, and is not stored.
            Pass it again when loading: a server whose documents are signed cannot be loaded without it. Needs the
            package cryptography. Default: documents have no signature.
        resident: how many bytes of the model's vectors, sums, rows and updates stay in memory, for models that exceed
            it. They are then in files of ``path`` (see the memory table in the documentation), and the bits stay the
            same. The limit includes the pages of all stores of the process. The server must be on a CPU and without
            shards; an optimizer must be elementwise. Pass it again when loading. Default: no limit; vectors are in
            memory.
        folders: the folder of each shard of a sharded server. Default: ``shard-0``, ``shard-1``, ... in ``path``.
    """

    path: str | os.PathLike[str] | None = None
    medium: Medium | None = None
    codec: str | None = None
    durability: Durability | None = None
    keep_previous: bool | None = None
    cached_rows: int | None = None
    journal: bool | None = None
    audit: bool | None = None
    audit_key: bytes | None = field(default=None, repr=False)
    resident: int | None = None
    folders: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.audit_key is not None:
            if not isinstance(self.audit_key, bytes) or len(self.audit_key) != 32:
                raise RangeError("audit_key: must be the 32 bytes of an Ed25519 private key")
            if self.audit is False:
                raise RangeError("audit_key: signs the documents of an audit; pass audit=True, or leave it out")
            object.__setattr__(self, "audit", True)
        if self.medium in ("ram", "cuda") and self.path is not None:
            raise RangeError(f"medium={self.medium!r}: the medium of a folder is 'mmap'; leave medium or path out")

    def at(self, home: str | os.PathLike[str] | None) -> "Storage":
        """Return the storage of a server that is loaded from ``home``, without the path; raise RangeError for another
        path.
        """
        if self.path is None:
            return self
        if home is None or os.path.realpath(self.path) != os.path.realpath(home):
            raise RangeError(
                f"path={str(self.path)!r}: the server is loaded from {home or 'a ClientStore'} and stays there; leave "
                "path out, or write a copy with Server.save and load that"
            )
        return replace(self, path=None, medium="mmap")

    def opened(self, rows: Any) -> "Storage":
        """Return the storage with the options of its open rows, a ``ClientStore``."""
        known = replace(self, medium=self.medium or rows.medium, keep_previous=rows.keep_previous or self.keep_previous)
        if rows.medium == "mmap":
            return replace(known, durability=rows.durability)
        return replace(known, journal=self.journal or False)

    @property
    def durability_of_parts(self) -> Durability:
        """The durability of each store of a server with shards or groups, which commit one after the other.

        A kill in between rolls some back by one transaction; a store with "checkpoint" can only go to its checkpoint.
        """
        return "round" if self.durability in (None, "checkpoint") else self.durability

    @classmethod
    def of(cls, storage: "Storage | str | os.PathLike[str] | None", name: str = "storage") -> "Storage":
        """Return the storage that the argument describes; a path stands for ``Storage(path)``."""
        if isinstance(storage, Storage):
            return storage
        if isinstance(storage, str) and (storage in ("ram", "cuda") or storage.startswith("mmap:")):
            raise RangeError(f"{name}={storage!r}: pass the path of a folder, or Storage(path=..., medium=...)")
        return cls(None if storage is None else absolute(storage, name))


@dataclass(frozen=True)
class Compute(Options):
    """Where and how precisely the server computes. When loading, omitted options are as saved.

    Args:
        device: the device of the model, the sums and a round's rows: "cpu", "cuda" or "cuda:1". The bits do not depend
            on it. On a GPU, ``x`` and offsets are ``DeviceArray``s. Default: "cpu".
        accumulator: the precision of a round's sums: "float32", "float64" or "exact". Methods with a running total or
            rows (MIFA, MimiC, SCAFFOLD) use at least float64. Exact sums are integers on a grid of 2^-60: their bits do
            not depend on the order of updates, totals do not drift, and a removed client leaves no trace. The norm of
            an update must then be below 2^39 and 2^50 / N. Default: "float32".
        batch_size: how many updates a round may hold to fold them in one pass. Default: 8, or more if they fit into 4
            MiB.
        diagnostics: whether reports have ``diversity`` and ``correction_norm`` even if this must read rows.
        shards: the number of parts into which the model and the rows are cut; the bits stay the same. Default: 1. When
            loading: as saved.
        executor: where shards run, a ``fedcore.cluster.Placement``: ``OnRay()`` for Ray. Default: in threads of this
            process.

    Raises:
        DeviceError: the device or its driver is missing.
    """

    device: str | None = None
    accumulator: Accumulator | None = None
    batch_size: int | None = None
    diagnostics: bool | None = None
    shards: int | None = None
    executor: Any = field(default=None, compare=False)

    @property
    def is_sharded(self) -> bool:
        """Whether the server has shards."""
        return (self.shards or 1) > 1 or self.executor is not None


@dataclass(frozen=True)
class RoundPolicy(Options):
    """When a round may close; see ``Round.may_close``. The caller still closes it, with ``finish``.

    The asked clients are those of ``open_round(expected=...)``, or of the last ``broadcast`` for the round. Times are
    in seconds of a monotonic clock. They start at ``open_round``, also for a round that continues from a journal.

    Args:
        min_clients: the minimum number of accepted clients. With fewer, ``finish`` raises a RoundError.
        min_share: the share of the asked clients that must be accepted before the round may close early, in [0, 1].
        deadline: the time after which the round may close with ``min_clients``, > 0. Default: no deadline.
        grace: the time to wait for further clients after ``min_share`` and ``min_clients`` are reached, >= 0.
        over_selection: the factor by which more clients are asked than are needed, >= 1; see ``asked``.
        max_staleness: the greatest age of an update in rounds. A late update is measured against the model from which
            its client started. The server keeps that many past models, 4 n bytes each. Default: 0, only updates of the
            open round.
        buffer: K, for asynchronous rounds (FedBuff): the round may close once K updates are accepted. Each update must
            name its start ``round``, and a client may be in a round several times unless the method allows one update.
            ``Server.push`` closes and opens these rounds. Not with ``min_share`` and ``grace``. Default: rounds are
            synchronous.
        discount: the law s(tau) for an update of age tau, which multiplies the update but not its weight: a number a
            for (1 + tau)^-a (FedBuff: 0.5), or a pair (a, b) for 1 if tau <= b, else 1 / (a (tau - b) + 1) (FedAsync's
            hinge). Default: 0, no discount.

    Raises:
        RangeError: a value is out of range, or options contradict each other.

    >>> RoundPolicy(min_clients=10, min_share=0.8, deadline=600, grace=30).asked(10)
    10
    >>> RoundPolicy(buffer=8, max_staleness=20, discount=0.5).discounts([0, 3])
    array([1. , 0.5])
    """

    min_clients: int = 0
    min_share: float = 1.0
    deadline: float | None = None
    grace: float = 0.0
    over_selection: float = 1.0
    max_staleness: int = 0
    buffer: int | None = None
    discount: float | tuple[float, float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer is not None and self.min_clients > self.buffer:
            raise RangeError(f"min_clients={self.min_clients}: must be at most buffer={self.buffer}")

    def discounts(self, ages: Any) -> F64:
        """Return s(tau), float64[k], for the ages of k updates in rounds."""
        tau = np.asarray(ages, np.float64)
        if isinstance(self.discount, tuple):
            a, b = self.discount
            return 1 / (a * np.maximum(tau - b, 0) + 1)
        return (1 + tau) ** -self.discount

    def asked(self, k: int) -> int:
        """Return the number of clients to ask if k are needed: k times ``over_selection``, rounded up.

        >>> RoundPolicy(over_selection=1.3).asked(11)
        15
        """
        return math.ceil(k * self.over_selection - ROUNDING)


def as_option(kind: type[T], name: str, value: Any) -> T:
    """Return the option that ``value``, a ``kind`` or a mapping of its fields, describes."""
    if isinstance(value, Mapping):
        return from_mapping(kind, value, name)  # type: ignore[no-any-return]
    require_objects({name: value})
    if not isinstance(value, kind):
        raise RangeError(f"{name}={value!r}: must be a {kind.__name__}")
    return value


as_policy = partial(as_option, RoundPolicy, "policy")
as_compute = partial(as_option, Compute, "compute")


def as_limits(limits: Any, algorithm: Algorithm | None = None) -> Limits:
    """Return the limits; raise RangeError if no client of the method could count."""
    found = as_option(Limits, "limits", limits)
    if algorithm is not None and found.max_steps < (fewest := algorithm.fewest_steps):
        raise RangeError(f"max_steps={found.max_steps}: must be at least {fewest}, since fewer steps do not count")
    return found


class Changes(TypedDict, total=False):
    """The options of ``Server.change``."""

    lr: float | Rate
    server_lr: float | Rate | None
    limits: Limits
    aggregation: "str | Sequence[Rule | str] | None"
    policy: RoundPolicy


CHANGEABLE = (*RATES, "limits", "aggregation", "policy")


class Openings(Changes, total=False):
    """The options of ``Server.open``."""

    optimizer: Optimizer | str | None
    compute: Compute
    callbacks: Sequence[Callback]


PLAIN_DICT = "config_type"
"""The key that tells NVFlare not to read a mapping with the key "path" or "name" as a component."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server beside its model, its method and its clients, as for ``Server.open``."""

    lr: float | Rate | None = None
    server_lr: float | Rate | None = None
    optimizer: Optimizer | str | None = None
    aggregation: "str | Sequence[Rule | str] | Chain | None" = None
    limits: Limits | None = None
    storage: Storage = Storage()
    compute: Compute = Compute()
    policy: RoundPolicy | None = None
    callbacks: Sequence[Callback] = ()

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> "ServerOptions":
        """Return the options in a mapping, such as a configuration; those in ``options`` are a ``ServerOptions``.

        ``limits``, ``storage``, ``compute`` and ``policy`` may be mappings, such as ``{"max_norm": 10.0}``. So may each
        rule of ``aggregation``, ``{"name": "RejectLong", "ratio": 30}``, and the ``optimizer``.
        """
        values = {name: value for name, value in options.items() if value is not None}
        values = vars(values.pop("options", cls())) | values
        for name, kind in (("limits", Limits), ("storage", Storage), ("compute", Compute), ("policy", RoundPolicy)):
            if isinstance(given := values.get(name), Mapping) or (given is not None and kind is not Storage):
                values[name] = from_mapping(kind, given) if isinstance(given, Mapping) else as_option(kind, name, given)
        if (given := values.get("aggregation")) is not None:
            given = [given] if isinstance(given, Mapping) else given
            listed = isinstance(given, Sequence) and not isinstance(given, str)
            values["aggregation"] = Chain.of([*map(_rule, given)] if listed else given)
        if isinstance(given := values.get("optimizer"), Mapping):
            values["optimizer"] = _with_options(optimizers.find(str(given.get("name"))), given)
        found: ServerOptions = from_mapping(cls, values | {"storage": Storage.of(values.get("storage"))}, "option")
        return found

    def keywords(self) -> Openings:
        """Return the arguments of ``Server.open`` without the storage."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "storage"}  # type: ignore[return-value]


def _rule(rule: Any) -> Rule | str:
    if not isinstance(rule, Mapping):
        return rule  # type: ignore[no-any-return]
    return _with_options(rules.REGISTRY.find(rules.spelled(str(rule.get("name")))), rule)  # type: ignore[no-any-return]


def _with_options(kind: Any, table: Mapping[str, Any]) -> Any:
    return from_mapping(kind, {name: value for name, value in table.items() if name != "name"})


def from_mapping(kind: type, options: Mapping[str, Any], argument: str = "") -> Any:
    """Return a dataclass of the options in a mapping, whose names must be fields; errors name the ``argument``."""
    options = {name: value for name, value in options.items() if name != PLAIN_DICT}
    known = [one.name for one in fields(kind)]
    if unknown := [name for name in options if name not in known]:
        raise UnknownNameError.of(argument or kind.__name__, unknown[0], known)
    return kind(**options)


@dataclass(frozen=True)
class Settings:
    """The checked options of a server."""

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
    audit: bool = False
    journal: bool = False
    policy: RoundPolicy = field(default_factory=RoundPolicy)
    started_nonnegative: tuple[str, ...] = ()
    """The names of float buffers that were non-negative and not all zero in the first model."""

    @cached_property
    def nonnegative(self) -> tuple[str, ...]:
        """The names of float buffers that updates must not make negative."""
        return tuple(name for name in self.started_nonnegative if not matches(name, self.limits.signed_buffers))

    @cached_property
    def all_limits(self) -> Limits:
        """The limits, with ``max_steps`` lowered to the number of steps that the method sets."""
        most = self.algorithm.most_steps
        return self.limits if most is None else replace(self.limits, max_steps=min(most, self.limits.max_steps))

    @cached_property
    def counts_steps(self) -> bool:
        """Whether the reported numbers of steps have an effect."""
        return not self.averages_models or self.algorithm.needs_shares

    @cached_property
    def takes_squares(self) -> bool:
        """Whether the step squares updates, in an optimizer or to compute its length."""
        return self.optimizer is not None or self.algorithm.sets_gamma

    @cached_property
    def is_exact(self) -> bool:
        """Whether sums and the running total are exact."""
        return self.accumulator == "exact"

    @cached_property
    def copies_models(self) -> bool:
        """Whether rounds copy models, as vectors, to hold them: small ones that no rule may reject later."""
        return 4 * self.layout.n <= SMALL and self.limits.max_norm is None and self.rules.is_plain

    @cached_property
    def reads_at_once(self) -> bool:
        """Whether ``core.PlainUpdates`` may read the usual updates; if not, the server needs more of them."""
        algorithm, needs_weights = self.algorithm, self.rules.weights is not None
        needs_more = algorithm.second_vector is not None or algorithm.needs_loss or algorithm.own_starts
        return not (needs_more or needs_weights or self.layout.outside or self.audit)

    @cached_property
    def sums_at_once(self) -> bool:
        """Whether a round only moves x along the weighted mean of h, and no rule can reject a finite update."""
        layout = self.layout
        return (
            self.takes_plain_mean
            and not (layout.narrow or layout.n > layout.n_parameters or self.is_exact or self.audit)
            and (self.averages_models or self.server_lr is not None)
            and self.limits.max_norm is None
        )

    @cached_property
    def takes_plain_mean(self) -> bool:
        """Whether x' = x - gamma v, and v is the mean of all accepted h_i with the weights of a ``WeightedMean``."""
        algorithm, kind = self.algorithm, type(self.algorithm)
        members = ("step", "weigh", "weighs_claims", "moves", "sums", "hides_mean")  # a subclass may override them
        return (
            issubclass(kind, WeightedMean)
            and all(getattr(kind, name) is getattr(WeightedMean, name) for name in members)
            and (algorithm.row, algorithm.adds) == (NOTHING, H)
            and algorithm.direction == replace(Direction(), mu=algorithm.direction.mu)
            and not (algorithm.keeps_total or algorithm.sums_changes or algorithm.needs_shares)
            and self.optimizer is None
            and not self.policy.max_staleness
            and self.rules.is_plain
        )

    @cached_property
    def averages_models(self) -> bool:
        """Whether h is x - y and gamma is 1, so that the step averages the clients' models."""
        return self.server_lr is None and self.algorithm.averages

    @classmethod
    def of(cls, algorithm: Algorithm, layout: Layout, options: ServerOptions) -> "Settings":
        """Return the checked settings of a new server."""
        check_table(algorithm)
        compute, storage = options.compute, options.storage
        return cls(
            algorithm=algorithm,
            layout=layout,
            lr=as_rate(options.lr, "lr"),
            server_lr=None if options.server_lr is None else as_rate(options.server_lr, "server_lr"),
            optimizer=optimizers.as_optimizer(options.optimizer),
            limits=as_limits(options.limits, algorithm),
            rules=Chain.of(options.aggregation),
            batch_size=compute.batch_size or max(BATCH, BATCH_BYTES // (4 * layout.n)),
            accumulator=compute.accumulator or "float32",
            diagnostics=bool(compute.diagnostics),
            device=compute.device or CPU,
            audit=bool(storage.audit),
            journal=bool(storage.journal),
            policy=as_policy(options.policy),
        )

    def changed(self, options: Mapping[str, Any]) -> "Settings":
        """Return the settings with changed rates, limits, rules or policy; see ``Server.change``."""
        checks: dict[str, Callable[[Any], Any]] = {what: partial(as_rate, name=what) for what in RATES}
        checks |= {"limits": partial(as_limits, algorithm=self.algorithm), "aggregation": Chain.of, "policy": as_policy}
        values: dict[str, Any] = {}
        require_objects(options)
        for name, value in options.items():
            if name not in CHANGEABLE:
                raise UnknownNameError.of("option", name, CHANGEABLE)
            is_off = name == "server_lr" and value is None
            values["rules" if name == "aggregation" else name] = None if is_off else checks[name](value)
        changed = replace(self, **values)
        if changed.averages_models != self.averages_models:
            must = "stay None, because this server averages models" if self.averages_models else "not become None"
            raise RangeError(f"server_lr: must {must}; or create a new server from tensors()")
        before, after = self.rules.private, changed.rules.private
        if (before is None) != (after is None) or (before and after and before.seed != after.seed):
            raise RangeError("aggregation: PrivateMean is in all rounds or in none, with one seed; create a new server")
        return changed

    def shown(self, names: Iterable[str]) -> dict[str, Any]:
        """Return options as a report shows them, in JSON types."""
        values: dict[str, Any] = {}
        for name in names:
            if name in ("limits", "policy"):
                values[name] = _unusual(getattr(self, name))
            elif name == "aggregation":
                values[name] = [repr(rule)[:200] for rule in self.rules]
            else:
                value = getattr(self, name)
                value = value.value if isinstance(value, Constant) else value
                values[name] = repr(value)[:200] if callable(value) else value
        return values

    @cached_property
    def repeats(self) -> bool:
        """Whether a round may have several updates of one client."""
        once = self.algorithm.updates_once or "once" in self.rules.needs
        return self.policy.buffer is not None and not once

    @cached_property
    def sorts_updates(self) -> bool:
        """Whether rounds sort their updates by the clients' ids, so that the order of arrival has no effect."""
        return self.is_exact or (self.rules.robust is not None and self.policy.buffer is None)

    def to_state(self, round: int = 0) -> dict[str, Any]:
        """Return the settings before a round as JSON, with the keys of the folder format."""
        chain = [describe("aggregation", rule) for rule in self.rules if type(rule) is not Mean]
        rates = {what: next_rate(what, getattr(self, what), round) for what in RATES}
        waiting = {name: value for name, value in _unusual(self.policy).items() if name != "max_staleness"}
        optional = {"rules": chain, "policy": waiting}
        return {
            "algorithm": describe("algorithm", self.algorithm),
            "layout": self.layout.to_state(),
            **{what: describe(what, getattr(self, what)) for what in (*RATES, "optimizer")},
            "next_rates": {"round": round} | rates,
            **{key: getattr(self, name) for key, name in KEYS.items()},
            "late_rounds": self.policy.max_staleness,
            "limits": limits_to_state(self.limits, self.rules),
            "history_rounds": self.algorithm.most_history,
            "nonnegative": list(self.started_nonnegative),
            "own_weights": self.rules.weights is not None,
        } | {key: value for key, value in optional.items() if value}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], given: Mapping[str, Any], compute: Compute | None = None
    ) -> "Settings":
        """Return the settings that this or an older version of ``to_state`` described.

        ``given`` has the caller's objects; see ``checked_objects``. A rate or rule is used only if the saved one is the
        user's code. ``compute`` replaces saved options unless they are None.
        """
        compute = compute or Compute()
        described = {what: state[what] for what in DESCRIBED}
        described["algorithm"] = _with_history(described["algorithm"], state.get("history_rounds"))
        objects: dict[str, Any] = {
            what: _saved_rate(what, state, given[what]) if what in RATES else revive(what, described[what], given[what])
            for what in DESCRIBED
        }
        check_table(objects["algorithm"])
        # The oldest folders have diagnostics under a different key, or not at all, and no audits.
        values = {"diagnostics": state.get("correction_norms", False)}
        values |= {name: state[key] for key, name in KEYS.items() if key in state}
        overrides = {name: getattr(compute, name) for name in ("batch_size", "diagnostics", "device")}
        values |= {name: value for name, value in overrides.items() if value is not None}
        limits, rules = limits_from_state(state, given.get("aggregation"))
        policy = as_policy({"max_staleness": state.get("late_rounds", 0), **state.get("policy", {})})
        settings = cls(
            **objects,
            **values,
            layout=Layout.from_state(state["layout"]),
            limits=limits,
            rules=rules,
            policy=policy,
            started_nonnegative=tuple(state.get("nonnegative", ())),
        )
        Compute(accumulator=settings.accumulator, batch_size=settings.batch_size)  # checks them
        if compute.accumulator not in (None, settings.accumulator):
            raise CheckpointError(
                f"accumulator={compute.accumulator!r}: the server was saved with {settings.accumulator!r}; leave it out"
            )
        return settings


def _unusual(options: Options) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    return {one.name: value for one in fields(options) if (value := getattr(options, one.name)) != one.default}  # type: ignore[arg-type]


KEYS = {"fold": "batch_size", "accumulate": "accumulator"}
KEYS |= {name: name for name in ("diagnostics", "audit", "journal")}
"""Keys of a folder's settings, and the fields of ``Settings``."""
LIMIT_KEYS = {"steps": "max_steps", "examples": "max_examples", "norm": "max_norm", "open": "max_open"}
"""Keys of a folder's limits, and the fields of ``Limits``."""
NEWER = ("norm", "open")
"""Those keys that older folders lack."""
RATIO_KEYS: dict[str, type[RatioRule]] = {
    "steps_ratio": CapSteps,
    "examples_ratio": CapExamples,
    "norm_ratio": RejectLong,
}
"""Keys of a folder's limits, and the rules with a ratio."""


def limits_to_state(limits: Limits, rules: Chain) -> dict[str, Any]:
    """Return the limits and ratio rules as JSON, with the keys of the folder format."""
    ratios = {
        key: next((one.ratio for one in rules if isinstance(one, kind)), None)
        for key, kind in reversed(RATIO_KEYS.items())
    }
    return {key: getattr(limits, name) for key, name in LIMIT_KEYS.items()} | {
        "signed_buffers": list(limits.signed_buffers),
        "lr": MOST_CLIENT_LR if limits.max_client_lr is None else limits.max_client_lr,
        "own_rates": limits.max_client_lr is not None,
        **ratios,
        "clips": any(isinstance(one, ClipToMedian) for one in rules),
    }


def limits_from_state(state: Mapping[str, Any], given: Chain | None = None) -> tuple[Limits, Chain]:
    """Return the limits and the chain of a folder; older folders lack norms and cap steps.

    The rules of a given chain replace saved rules of the same classes that cannot be found by name.
    """
    saved = {"steps_ratio": 10.0, **state["limits"]}
    limits = Limits(
        **{name: saved[key] for key, name in LIMIT_KEYS.items() if key not in NEWER or key in saved},
        max_client_lr=min(saved["lr"], LARGEST) if saved.get("own_rates") else None,
    )
    signed = saved.get("signed_buffers")
    if signed is None and any(matches(name, limits.signed_buffers) for name in state.get("nonnegative", ())):
        signed = ()  # an older folder lists only the buffers that its patterns, which are not the default, leave
    limits = limits if signed is None else replace(limits, signed_buffers=signed)
    if "rules" in state:
        return limits, Chain.of([_saved_rule(rule, given) for rule in state["rules"]])
    rules: list[Rule] = [kind(saved[key]) for key, kind in RATIO_KEYS.items() if saved.get(key) is not None]
    return limits, Chain((*rules, *([ClipToMedian()] if saved.get("clips") else []), Mean()))


def _with_history(description: Any, rounds: int | None) -> Any:
    """Add ``history`` to MimiC's description; older folders have it as a setting of the server."""
    if isinstance(description, dict) and description.get("name") == "MimiC" and rounds is not None:
        return description | {"options": {"history": rounds, **description["options"]}}
    return description


def checked_objects(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects among the arguments of ``Server.load``, checked before the folder is read."""
    algorithm = given["algorithm"]
    algorithm = algorithms.named(algorithm) if isinstance(algorithm, str) else algorithm
    if algorithm is not None:
        check_table(algorithm)
    checked: dict[str, Any] = {what: None if given[what] is None else as_rate(given[what], what) for what in RATES}
    checked["optimizer"] = optimizers.as_optimizer(given["optimizer"])
    chain = None if given["aggregation"] is None else Chain.of(given["aggregation"])
    return {"algorithm": algorithm, **checked, "aggregation": chain}


def _saved_rate(what: str, state: Mapping[str, Any], given: Rate | None) -> Rate | None:
    """Return the saved rate, or the given one if the saved rate is the user's code."""
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


def _saved_rule(saved: Mapping[str, Any], given: Chain | None) -> Any:
    """Return the saved rule, or the given one of its class if the saved rule cannot be found."""
    try:
        return revive("aggregation", saved, None)
    except CheckpointError:
        own = [rule for rule in given or () if type(rule).__qualname__ == saved.get("class")]
        return revive("aggregation", saved, own[0] if own else None)


# Descriptions of objects in a folder: their names and options.


DESCRIBED = ("algorithm", "optimizer", "lr", "server_lr")
"""Arguments of ``Server`` that a folder describes by a name and options."""
REGISTRIES: dict[str, Registry[Any]] = dict.fromkeys(RATES, rates.REGISTRY)
REGISTRIES |= {"algorithm": algorithms.REGISTRY, "optimizer": optimizers.REGISTRY, "aggregation": rules.REGISTRY}

BY_MODULE = ("algorithm", "aggregation")
"""Objects that may be found by ``module:Name``, since their class is checked. A rate can be any callable, and a folder
may come from anyone, so a folder must not choose the function to call."""


def describe(what: str, value: Any) -> dict[str, Any] | None:
    """Return the description of ``Server``'s argument ``what``: a name and options.

    For a user's class the options are the attributes that fit into JSON. The name is ``module:Name`` if it can be
    imported and all options are known, else None. A function is described by its repr.
    """
    if value is None:
        return None
    name = REGISTRIES[what].name_of(type(value))
    if name in REGISTRIES[what].own:
        # In JSON types, so that a given object can be compared with the saved one.
        options = {option: getattr(value, option) for option in signature(type(value)).parameters}
        return {"name": name, "options": {o: _plain(v) for o, v in options.items()}}
    described: dict[str, Any] = {"name": None, "was": repr(value)[:200]}
    if isroutine(value) or isinstance(value, partial):
        return described
    options, complete = _options(value)
    if isinstance(value, Mean) and value.weights is not None:  # which a folder does not store
        options, complete = {option: own for option, own in options.items() if option != "weights"}, False
    findable = complete and name is not None and (what in BY_MODULE or ":" not in name)
    # The module is not compared: the main module has a different name in another process.
    return described | {"name": name if findable else None, "class": type(value).__qualname__, "options": options}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def _options(value: Any) -> tuple[dict[str, Any], bool]:
    """Return the options of an object that are attributes and fit into JSON, and whether they are all."""
    try:
        parameters = signature(type(value)).parameters.values()
    except (TypeError, ValueError):  # a class without a signature
        return {}, False
    options = {}
    for parameter in parameters:
        with suppress(AttributeError, TypeError, ValueError):
            options[parameter.name] = json.loads(json.dumps(getattr(value, parameter.name), default=_plain))
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return options, all(parameter.name in options and parameter.kind in by_name for parameter in parameters)


def revive(what: str, description: Mapping[str, Any] | None, given: Any) -> Any:
    """Return the described object, or the given one in its place.

    Raise CheckpointError if no object is given and the class is unknown, or if the objects differ. Raise LookupError,
    TypeError or ValueError if the description is malformed.
    """
    if description is None:
        if given is not None:
            raise CheckpointError(f"{what}={given!r}: the server was saved without {what}; leave it out")
        return None
    name, registry = description["name"], REGISTRIES[what]
    if name is not None and ":" in name and what not in BY_MODULE:
        name = None
    if name is None and given is None:
        raise CheckpointError(f"{what}: the server was saved with user code ({description['was']}); pass it again")
    if name is None or "class" in description:
        if given is not None:
            _compare_own(what, description, describe(what, given) or {})
            return given
        try:
            return registry.find(name, imports=False)(**description["options"])
        except UnknownNameError as error:
            raise CheckpointError(f"{error} ({what}=)") from None
    make = registry[name]
    parameters = signature(make).parameters
    options = {o: v for o, v in getattr(make, "before", {}).items() if o in parameters} | description["options"]
    for option, parameter in parameters.items():
        if isinstance(parameter.default, bool) and option in options and type(options[option]) is not bool:
            raise RangeError(f"{what}: {option}={options[option]!r}: must be true or false")
    revived = make(**options)
    if given is not None and describe(what, given) != describe(what, revived):
        raise CheckpointError(f"{what}={given!r}: the server was saved with {revived!r}; pass that again")
    return revived


def _compare_own(what: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the class or an option differs from the saved one; functions are not compared."""
    if "class" not in saved:  # a function, or an older folder
        return
    class_given = given.get("class") or given["name"] or "a function"
    if class_given != saved["class"]:
        raise CheckpointError(f"{what}: the server was saved with {saved['class']}, not {class_given}")
    for option, value in saved["options"].items():
        if option in given["options"] and given["options"][option] != value:
            raise CheckpointError(
                f"{what}: the server was saved with {option}={value!r} of {saved['class']}, not "
                f"{given['options'][option]!r}"
            )


def next_rate(what: str, rate: Any, round: int) -> float | None:
    """Return the next value of a user's rate, which identifies the rate; None for fedcore's rates."""
    if rate is None or REGISTRIES[what].name_of(type(rate)) in REGISTRIES[what].own:
        return None
    try:
        value = float(rate(round))
    except Exception:  # the rate may have no further values
        return None
    return value if math.isfinite(value) else None


def check_rate(what: str, rate: Any, saved: float | None, round: int) -> None:
    """Raise CheckpointError if a rate differs from the saved result of ``next_rate``, unless that is None."""
    if saved is None or rate is None:
        return
    value = rate_at(rate, round)
    if value != saved:
        raise CheckpointError(f"{what}: it is {value:g} in round {round}, but the saved rate is {saved:g}")


def is_same_rate(what: str, description: Mapping[str, Any] | None, given: Any, saved: float | None, round: int) -> bool:
    """Whether a given rate is the saved one, as far as they can be compared; see ``check_rate``."""
    is_own = description is not None and description["name"] in REGISTRIES[what].own
    if not is_own and (describe(what, given) or {})["name"] in REGISTRIES[what].own:
        return False  # a rate of fedcore replaces the user's rate, or a missing one
    try:
        revive(what, description, given)
        check_rate(what, given, saved, round)
    except CheckpointError:
        return False
    return True
