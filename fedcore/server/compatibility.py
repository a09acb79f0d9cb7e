"""What does not combine: a table of pairs of features, checked when a server is made, loaded or changed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from inspect import isclass
from itertools import combinations
from typing import Any

import numpy as np

from fedcore.algorithms import REGISTRY as METHODS
from fedcore.algorithms import Algorithm, optimizers
from fedcore.algorithms.rates import Constant, rate_of_steps
from fedcore.arrays import CPU
from fedcore.errors import RangeError, UnknownNameError
from fedcore.model import Layout
from fedcore.options import Compute, Settings, Storage
from fedcore.rules import REGISTRY as RULES
from fedcore.rules import Combine, Mean, MixingRule, PrivateMean, RobustRule, Rule

FOLDER, COMPUTE = Storage(medium="mmap"), Compute()


def _if(condition: Callable[[Any], bool]) -> Callable[[Settings, Storage, Compute], Any]:
    return lambda s, at, on: condition(s.algorithm) and s.algorithm


FEATURES: dict[str, Callable[[Settings, Storage, Compute], Any]] = {
    "shards": lambda s, at, on: on.is_sharded and (on.shards or True),
    "no shards": lambda s, at, on: not on.is_sharded,
    "partial updates": lambda s, at, on: bool(s.layout.groups),
    "partial updates on shards": lambda s, at, on: on.is_sharded and bool(s.layout.groups),
    "fixed groups": lambda s, at, on: bool(s.layout.groups) and s.algorithm.counts_absent and s.algorithm,
    "counters": lambda s, at, on: ", ".join(piece.name for piece in s.layout.counters),
    "float buffers": lambda s, at, on: s.layout.n > s.layout.n_parameters,
    "folders": lambda s, at, on: at.folders is not None,
    "no folder": lambda s, at, on: (at.medium or ("ram" if at.path is None else "mmap")) != "mmap",
    "keep_previous": lambda s, at, on: at.keep_previous,
    "durability": lambda s, at, on: at.durability,
    'durability="checkpoint"': lambda s, at, on: at.durability == "checkpoint",
    "weak durability": lambda s, at, on: at.durability not in (None, "round") and at.durability,
    "journal": lambda s, at, on: s.journal if at.journal is None else at.journal,
    "audit": lambda s, at, on: s.audit or at.audit,
    "resident": lambda s, at, on: at.resident,
    "cached_rows": lambda s, at, on: at.cached_rows is not None,
    'medium="cuda"': lambda s, at, on: at.medium == "cuda",
    "device": lambda s, at, on: s.device != CPU and s.device,
    "no device": lambda s, at, on: s.device == CPU,
    "exact sums": lambda s, at, on: s.is_exact,
    "float sums": lambda s, at, on: not s.is_exact,
    "buffer": lambda s, at, on: s.policy.buffer,
    "min_share": lambda s, at, on: s.policy.min_share != 1 and s.policy.min_share,
    "grace": lambda s, at, on: s.policy.grace,
    "discount": lambda s, at, on: s.policy.discount,
    "max_staleness": lambda s, at, on: s.policy.max_staleness,
    "max_norm": lambda s, at, on: s.limits.max_norm,
    "server_lr": lambda s, at, on: s.server_lr is not None,
    "optimizer": lambda s, at, on: s.optimizer,
    "whole-vector optimizer": lambda s, at, on: getattr(s.optimizer, "elementwise", False) is not True and s.optimizer,
    "rules": lambda s, at, on: next((one for one in s.rules if type(one) not in (Mean, PrivateMean)), None),
    "robust rule": lambda s, at, on: s.rules.robust,
    "robust rule in a buffer": lambda s, at, on: s.policy.buffer and s.rules.robust,
    "Mean(weights)": lambda s, at, on: s.rules.weights is not None,
    "PrivateMean": lambda s, at, on: s.rules.private is not None,
    "PrivateMean(rate)": lambda s, at, on: s.rules.private is not None and s.rules.private.rate != 1,
    "PrivateMean(quantile)": lambda s, at, on: s.rules.private is not None and s.rules.private.quantile is not None,
    "PrivateMean(seed)": lambda s, at, on: s.rules.private is not None and s.rules.private.seed is not None,
    "PrivateMean with max_norm": lambda s, at, on: s.rules.private is not None and s.limits.max_norm is not None,
    "max_client_lr with gradients": lambda s, at, on: s.limits.max_client_lr is not None and not s.averages_models,
    "rate of single steps": lambda s, at, on: rate_of_steps(s.lr, 0) is not None and not s.averages_models,
    # Methods, by what they do or need.
    "own step length": _if(lambda method: not method.takes_server_rate),
    "step length of the clients": lambda s, at, on: (
        s.server_lr is None and optimizers.rate_of(s.optimizer, 0) is None and not s.averages_models and s.algorithm
    ),
    "start of each client": _if(lambda method: method.own_starts),
    "momentum at the clients": _if(lambda method: method.rows_at_clients and method.keeps_models is not None),
    "second vector": _if(lambda method: method.second_vector is not None),
    "second vector beside models": lambda s, at, on: s.algorithm.second_vector and s.averages_models and s.algorithm,
    "no weights by examples": _if(lambda method: not method.weighs_claims),
    "own weights": _if(lambda method: method.needs_shares or method.counts_appearances or method.needs_loss),
    "more than sums": _if(lambda method: not method.only_sums_updates),
    "more than the mean": _if(lambda method: not method.only_takes_mean),
    "total": _if(lambda method: method.keeps_total),
    "fractional total": _if(lambda method: method.keeps_total and not method.total_is_whole),
    "norms of all updates": _if(lambda method: method.needs_square_of_sum),
    "unbounded sums": lambda s, at, on: (
        not ("medians" in s.rules.needs or s.limits.max_norm is not None)
        and (s.algorithm.keeps_rows or s.algorithm.keeps_total or s.algorithm.sums_changes)
        and s.algorithm
    ),
    "no start from gradients": _if(lambda method: not method.takes_warm_start),
    **dict.fromkeys(("ClientStore", "warm_start", "partial sums", "edges", "masked sums"), lambda s, at, on: False),
}
"""For each feature, whether a server uses it: False, True, or what an error shows. The caller names the last five."""


UNWRITTEN = "this is not implemented"


@dataclass(frozen=True)
class Conflict:
    """Two features that do not combine, why, and what to do."""

    a: str
    b: str
    because: str = UNWRITTEN
    instead: str = "leave it out"

    def explained(self, used: dict[str, Any]) -> str:
        """Return the error of a server; ``used`` are its features."""
        a, b = (_shown(name, used[name]) for name in (self.a, self.b))
        return f"{a}: does not combine with {b}, because {self.because}; {self.instead}"


_PATH = 'pass Storage(path=...), or when loading medium="mmap", or leave it out'
_STORE, _ELEMENTWISE = "pass storage=Storage(path=...)", "use another, or set elementwise = True on its class"
_BOUND = "put ClipToMedian() or RejectLong() before the rule, or set Limits(max_norm=)"
_UNITS = "pass a server_lr, or the rule RejectLong, which measures each by its own median"
_SUMS = "use a method such as FedAvg, FedProx or FedAvgM, or clients that keep their rows"
_ROWLESS, _GRADIENTS = "use FedAvg, FedProx or FedAvgM", "use SCAFFOLD, MIFA, or a method whose name ends in -VR"
_CHECKPOINT = "the folder keeps one earlier state, that of the last checkpoint, so an undo cannot go back one round"
_MASKED = "use Mean(), or masked sums with noise (fedcore.secure)"

_ROWS: tuple[tuple[str, ...], ...] = (
    ("folders", "no shards", "only a sharded server has several", "pass Compute(shards=...), or leave folders out"),
    ("keep_previous|durability|journal|resident|folders", "no folder", "the rows are in memory", _PATH),
    ("keep_previous", 'durability="checkpoint"', _CHECKPOINT, 'choose one of the two, or durability="round" for both'),
    ("cached_rows", 'no device|medium="cuda"', "all rows are on the device of the model already"),
    ('medium="cuda"', "no device", "the model is on the CPU", 'pass Compute(device="cuda")'),
    ("resident", "device", "windows are read into host memory", "leave resident or device out"),
    ("whole-vector optimizer", "resident|shards", "it would get parts of vectors", _ELEMENTWISE),
    ("ClientStore", "shards|partial updates", "the server makes a store for each part of the model", _STORE),
    ("keep_previous", "shards|partial updates", "each part of the model always keeps its previous transaction"),
    ("resident", "shards", "each shard has its own memory"),
    ("partial updates on shards", "PrivateMean(seed)", "a shard would need the places of its elements in the model"),
    ("device", "shards", UNWRITTEN, "use shards=1"),
    ("robust rule in a buffer", "partial updates", "a group may get fewer updates than the rule needs", "use Mean()"),
    ("server_lr", "own step length", "the method sets the length of its step"),
    ("optimizer", "momentum at the clients", "x does not move along the momentum", "use placement='server'"),
    ("max_norm", "second vector beside models", "they have different units", _UNITS),
    ("buffer", "start of each client", "a client may be in a buffer twice"),
    ("max_staleness", "start of each client", "its clients start from earlier models in any case"),
    ("Mean(weights)", "no weights by examples", "the method sets the weights", "use a method such as FedAvg"),
    ("exact sums", "fractional total", "the total is not on their grid", 'use accumulator="float64"'),
    ("robust rule", "unbounded sums", "it needs a bound with a method that also sums what all clients sent", _BOUND),
    ("robust rule", "own weights", "the weights of the clients are the method", "use FedAvg, or Mean()"),
    ("robust rule", "norms of all updates", "one client could choose the step", "use FedAvg, or Mean()"),
    ("robust rule", "exact sums", "they, and masks, which need them, keep no updates", "use float sums, or Mean()"),
    ("min_share|grace", "buffer", "a buffer closes by its number of updates"),
    ("discount", "robust rule|more than sums|total", "it only scales terms of a sum", "use FedAvg, or no discount"),
    ("PrivateMean", "more than the mean", "only the mean of the updates has noise", _ROWLESS),
    ("PrivateMean", "step length of the clients", "the length has no noise", "pass server_lr"),
    ("PrivateMean", "float buffers|counters", "they get no noise", "use layers such as GroupNorm"),
    ("buffer", "PrivateMean", "a buffer may have several updates of one client"),
    ("max_staleness", "PrivateMean", "late updates would count in rounds that did not sample them"),
    ("keep_previous", "PrivateMean", "an undo would forget the privacy that a round has spent"),
    ("weak durability", "PrivateMean", "a crash could forget the privacy that a round has spent", 'use "round"'),
    ("warm_start", "PrivateMean", "the gradients have no noise"),
    ("warm_start", "partial updates", "the groups of a client are not known before its first update"),
    ("warm_start", "no start from gradients", "the method has no row or direction for them", _GRADIENTS),
    ("more than sums", "partial sums", "the method needs rows, second vectors or shares, which masks hide", _SUMS),
    ("Mean(weights)", "partial sums", "an edge weights its updates by the method", "use Mean()"),
    ("fixed groups", "partial sums", "an edge does not know the groups that a client's first update fixed", _ROWLESS),
    ("partial updates", "masked sums", "masks hide which groups a client sends"),
    ("journal", "partial sums", "it keeps single updates", "leave it out; after a crash an edge sends its sum again"),
    ("buffer", "partial sums", "its K may end within a sum, and a sum has no late updates", "use synchronous rounds"),
    ("PrivateMean", "edges", "it clips each update, and a partial sum has none", _MASKED),
    ("rules", "masked sums", "masks hide each client's update"),
    ("rate of single steps", "masked sums", "masks hide the numbers of steps", "pass a rate of rounds as lr"),
    ("max_client_lr with gradients", "masked sums", "masks hide these rates", "leave max_client_lr out"),
    ("PrivateMean(rate)", "masked sums", "the server sees who takes part", "leave rate at 1"),
    ("PrivateMean(quantile)", "masked sums", "masks hide the number of clipped updates", "leave quantile out"),
    ("PrivateMean(seed)", "masked sums", "clients draw the noise", "leave seed out"),
    ("PrivateMean with max_norm", "masked sums", "clients clip to C", "leave max_norm out"),
    ("float sums", "partial sums", "their bits depend on the order of updates", 'pass Compute(accumulator="exact")'),
)
"""Features, others with which each does not combine, the reason (default: ``UNWRITTEN``), and what to do."""

TABLE = tuple(Conflict(*row) for row in _ROWS)
CONFLICTS = tuple(replace(row, a=a, b=b) for row in TABLE for a in row.a.split("|") for b in row.b.split("|"))
"""All pairs that do not combine."""


def _shown(name: str, value: Any) -> str:
    for option, kind in (("algorithm", Algorithm), ("aggregation", Rule)):
        if isinstance(value, kind):
            return f"{option}={value!r:.200} ({name})"
    if name == "whole-vector optimizer" and value is not True:
        return f"optimizer={value} ({name})"
    return name if value is True else f"{name}={value!r}"


def features_of(settings: Settings, storage: Storage, compute: Compute, *more: str) -> dict[str, Any]:
    """Return the features of a server, with what an error shows; ``more`` are those that no option shows."""
    found = {name: name in more or uses(settings, storage, compute) for name, uses in FEATURES.items()}
    found["partial sums"] = found["edges"] or found["masked sums"]
    return {name: value for name, value in found.items() if value}


def require_compatible(settings: Settings, storage: Storage = FOLDER, compute: Compute = COMPUTE, *more: str) -> None:
    """Raise RangeError for the first of ``CONFLICTS`` that a server has, or for a small buffer."""
    used = features_of(settings, storage, compute, *more)
    for conflict in CONFLICTS:
        if conflict.a in used and conflict.b in used:
            raise RangeError(conflict.explained(used))
    if (policy := settings.policy).buffer is not None and settings.rules.robust is not None:
        fewest = policy.buffer if policy.deadline is None else max(1, policy.min_clients)
        settings.rules.require_enough(fewest, "raise the policy's buffer and, with a deadline, its min_clients")


@dataclass(frozen=True)
class Combination:
    """Whether some features combine: true if there is no conflict. ``str`` gives the reasons."""

    features: tuple[str, ...]
    conflicts: tuple[Conflict, ...]

    def __bool__(self) -> bool:
        return not self.conflicts

    def __str__(self) -> str:
        shown = (one.explained({one.a: True, one.b: True}) for one in self.conflicts)
        return "\n".join(shown) or f"{', '.join(self.features)}: combine"


_SUMS_OF, _ON_SHARDS = {"partial sums", "exact sums"}, {"shards", "partial updates"}
_PRIVATE_ONES = [name for name in FEATURES if name.startswith("PrivateMean")]
IMPLIED = dict.fromkeys(("edges", "masked sums", "partial sums"), _SUMS_OF) | {"robust rule": {"rules"}}
IMPLIED |= {name: {"PrivateMean"} for name in _PRIVATE_ONES} | {"partial updates on shards": _ON_SHARDS}
"""Features that others have too."""
LAST: dict[str, Any] = {"Mean(weights)": Mean, "robust rule": RobustRule, **dict.fromkeys(_PRIVATE_ONES, PrivateMean)}
"""The last rules that features name."""
APART: tuple[tuple[Any, Any, str, str], ...] = (
    (PrivateMean, Rule, "PrivateMean is the only rule of its chain", "leave the other out"),
    (Combine, Combine, "each is the last rule of a chain", "choose one"),
    (Mean, MixingRule, "mixed vectors need a robust rule at the end", "use one such as Median()"),
)
"""Kinds of rules that no chain has together, why, and what to do."""


def combines(*features: str | Rule | Algorithm) -> Combination:
    """Return whether features of a server combine. ``fedcore list combinations`` prints the table.

    Args:
        features: names such as "shards"; and methods and rules: objects, or names such as "MIFA", "Krum" and
            "mine:MyRule". The result has the features that these have. With one, it has all its conflicts; without, all
            that there are.

    Raises:
        UnknownNameError: there is no feature, method or rule of that name.

    >>> from fedcore import combines
    >>> bool(combines("shards", "audit")), bool(combines("shards", "resident"))
    (True, False)
    >>> print(combines("resident", "shards"))
    resident: does not combine with shards, because each shard has its own memory; leave it out
    """
    rows = {one if isinstance(one, str) else repr(one): _kind_of(one) for one in features}
    named = set[str]().union(*(_named(name, row) for name, row in rows.items()))
    resolved = {"unbounded sums": {"max_norm", "bound"}, "step length of the clients": {"server_lr"}}
    named -= {name for name, by in resolved.items() if named & by}
    least = 2 if len(features) > 1 else len(features)
    found = [one for one in CONFLICTS if len({one.a, one.b} & named) >= least]
    for (a, A), (b, B) in combinations([(name, kind) for name, (kind, _) in rows.items() if issubclass(kind, Rule)], 2):
        found += [Conflict(a, b, *why) for one, other, *why in APART if _fit(A, B, one, other)][:1]
    return Combination(tuple(one for one in FEATURES if one in named or not features), tuple(found))


def table() -> list[list[str]]:
    """Return the table: features, those with which each does not combine, why, and what to do."""
    return [[cell.replace("|", ", ") for cell in astuple(row)] for row in TABLE]


def _fit(A: type[Rule], B: type[Rule], one: Any, other: Any) -> bool:
    """Whether two rules are different ones of two kinds. "robust rule" is any robust one."""
    if A is B or (RobustRule in (A, B) and issubclass(A, RobustRule) and issubclass(B, RobustRule)):
        return False
    return any(issubclass(a, one) and issubclass(b, other) for a, b in ((A, B), (B, A)))


def _kind_of(feature: Any) -> tuple[Any, Any]:
    """Return the class of a rule or method, and the object or None; ``str`` for other features."""
    if not isinstance(feature, str):
        kind: Any = feature if isclass(feature) else type(feature)
        if not issubclass(kind, Rule | Algorithm):
            raise UnknownNameError(f"feature={feature!r:.200}: must be a rule, a method, or the name of a feature")
        return kind, None if kind is feature else feature
    if feature in FEATURES:
        return LAST.get(feature, str), None
    if own := METHODS.get(feature) or RULES.get(feature):  # others are looked for in all installed packages
        return own, None
    if ":" not in feature and feature not in (known := [*METHODS.names(), *RULES.names()]):
        raise UnknownNameError.of("feature", feature, [*FEATURES, *known])
    with suppress(UnknownNameError):
        return METHODS.find(feature), None
    return RULES.find(feature), None


def _named(name: str, row: tuple[Any, Any]) -> set[str]:
    """Return the features of a name with its ``_kind_of``; rules that bound updates have "bound" too."""
    kind, made = row
    if name in FEATURES:
        return {name} | IMPLIED.get(name, set())
    if issubclass(kind, PrivateMean | Mean):
        own = {"PrivateMean"} if issubclass(kind, PrivateMean) else {"Mean(weights)"}
        return own if own == {"PrivateMean"} or getattr(made, "weights", None) is not None else set()
    if issubclass(kind, Rule):
        bound = {"bound"} if "medians" in kind.needs else set[str]()
        return {"rules"} | bound | ({"robust rule"} if issubclass(kind, RobustRule | MixingRule) else set())
    settings = Settings(made or kind(), Layout.of(np.zeros(1, np.float32)), Constant(1.0))
    return {one for one, value in features_of(settings, FOLDER, COMPUTE).items() if value is settings.algorithm}
