"""The server's step: from a round's sums and the current snapshot to the next snapshot."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Algorithm, Cohort, Linear, Step, optimizers
from fedcore.algorithms.base import is_whole_sum
from fedcore.algorithms.rates import rate_at
from fedcore.arrays import CPU, F32, F64, BufferPool, FileMemory, copied, device_of, empty, freeze, full, zeros
from fedcore.errors import AlgorithmError, DivergedError, RangeError, UnknownClientError
from fedcore.kernels import ExactSum
from fedcore.options import Settings
from fedcore.rules.private import Ledger
from fedcore.rules.windows import FEW, ClaimWindow
from fedcore.server.aggregation import LARGE, Counters, Reducer, Result, Squares, UpdateBatch
from fedcore.server.update import as_sent, first_not_finite, rounded_parts
from fedcore.server.validation import Buffers
from fedcore.store import ClientStore
from fedcore.store.registry import ClientId, Registry
from fedcore.validation import check_integer, name_of

Column = npt.NDArray[np.int64]
Numbers = Sequence[int] | Column
Runs = tuple[Column, ...]
Sizes = Mapping[ClientId, int]

MOST = 2**53
"""The maximum number of examples of one client; float64 holds every integer up to it."""
_REMOVED = -1
"""The value of a removed client in a later run."""
_RATIO = 8
"""The least ratio of a run's length to that of the next run."""
_UNUSED = np.iinfo(np.int64).max  # a number that no client has
COLUMNS = ("sizes", "arrived", "heard", "ended")
"""The fields of ``Population`` that are columns."""
_EMPTY = np.zeros((2, 0), np.int64)


@dataclass(frozen=True)
class Population:
    """Sizes n_k, rounds of arrival and appearances, by the clients' numbers in the registry. It is immutable.

    A change of clients makes a new population; other rounds keep it, so that commits need not write it. If the method
    has ``counts_appearances``, each round with updates makes one. A column is int64[2, m]: ascending numbers and their
    values, with unused entries at the end. A field has several columns, called runs, of falling length. A change writes
    only the last runs, and the last run with a number has its value.

    Attributes:
        sizes: n_k of the clients in the objective: of all clients, or () without sizes.
        arrived: the round in which each client joined, except initial clients; () if all clients are initial.
        included: n_k of removed clients whose shares stay in the objective.
        unnamed: the number of further ones, whose ids were erased.
        total: n, the sum of the sizes in the objective.
        sized: the number of clients with a size.
        heard: the last round that accepted an update of each client, if the method has ``counts_appearances``.
        ended: how many intervals between its appearances had ended then.
    """

    sizes: Runs = ()
    arrived: Runs = ()
    included: Mapping[ClientId, int] = field(default_factory=dict)
    total: int = 0
    sized: int = 0
    heard: Runs = ()
    ended: Runs = ()
    unnamed: int = 0

    @classmethod
    def of(cls, client_sizes: Sizes | None, registry: Registry, *, needed: bool) -> "Population":
        """Return the population of a new server; ``needed``: whether the method weights by shares."""
        if client_sizes is None:
            if needed and len(registry):
                raise RangeError("clients: the method needs sizes n_k; pass {id: n_k}, or an adapter's client_sizes")
            return cls()
        if len(client_sizes) != len(registry):
            raise RangeError(
                f"clients: the store has {len(registry)} clients, but {len(client_sizes)} sizes are given; pass one "
                "for each client"
            )
        clients, sizes = _listed(registry, client_sizes)
        return cls().with_clients(registry.numbers(clients).tolist(), clients, sizes, None)

    def listed(self) -> npt.NDArray[np.int64] | None:
        """The clients' sizes, the smallest first; None without sizes."""
        return np.sort(_present(_merged(self.sizes))[1]) if self.sizes else None

    def with_clients(
        self, numbers: Numbers, clients: Sequence[ClientId], sizes: Sequence[int] | None, round: int | None
    ) -> "Population":
        """Return the population with clients added in ``round``; None for initial clients.

        A client whose share was kept in the objective returns to it.
        """
        after = self
        back = {client for client in clients if client in self.included} if self.included else set()
        if round is not None:
            # A client that comes back keeps its round of arrival, unless its appearances count, which were forgotten.
            stays = back if not self.heard else ()
            new = [n for n, client in zip(numbers, clients, strict=True) if client not in stays] if stays else numbers
            after = replace(after, arrived=_with(self.arrived, new, [round] * len(new)))
        if sizes is None:
            return after
        total, kept = self.total + sum(sizes) - sum(self.included[client] for client in back), self.included
        if back:
            kept = {client: size for client, size in kept.items() if client not in back}
        sized = self.sized + len(sizes)
        return replace(after, sizes=_with(self.sizes, numbers, sizes), included=kept, total=total, sized=sized)

    def without_client(self, number: int, client: ClientId, *, from_objective: bool) -> "Population":
        """Return the population without a client; ``from_objective`` also removes its share."""
        size = int(_of(self.sizes, np.array([number]), 0)[0])
        columns: dict[str, Any] = {of: _without(getattr(self, of), number) for of in COLUMNS[1:]}
        after = replace(self, **columns)
        if not size:
            return after
        sized = self.sized - 1
        after = replace(after, sizes=_without(self.sizes, number) if sized else (), sized=sized)
        if from_objective:
            return replace(after, total=self.total - size)
        return replace(after, included={**self.included, client: size})

    def without_names(self) -> "Population":
        """Return the population without the ids of removed clients; their shares stay."""
        return replace(self, included={}, unnamed=self.unnamed + len(self.included))

    def with_sizes(self, registry: Registry, client_sizes: Mapping[ClientId, int]) -> "Population":
        """Return the population with changed sizes of some clients."""
        clients, sizes = _listed(registry, client_sizes, "sizes")
        if not self.sizes:
            raise RangeError(
                "sizes: the clients have no sizes; create the server with a mapping from each id to its n_k"
            )
        numbers = registry.numbers(clients)
        total = self.total + sum(sizes) - int(_of(self.sizes, numbers, 0).sum())
        return replace(self, sizes=_with(self.sizes, numbers, sizes), total=total)

    def examples(self, registry: Registry, clients: Sequence[ClientId]) -> F64:
        """Return n_k, float64[k], of a population with sizes."""
        return _of(self.sizes, registry.numbers(clients), 0).astype(np.float64)

    def shares(self, registry: Registry, clients: Sequence[ClientId]) -> F64 | None:
        """Return p^k = n_k / n, float64[k]; None without sizes."""
        return self.examples(registry, clients) / self.total if self.sizes else None

    def ages(self, registry: Registry, clients: Sequence[ClientId], round: int) -> F64 | None:
        """Return the rounds since each client joined, float64[k], or None if all are initial.

        The value is 1 in the client's first round, and infinite for initial clients.
        """
        if not self.arrived:
            return None
        came = _of(self.arrived, registry.numbers(clients), _REMOVED)
        return np.where(came == _REMOVED, np.inf, round + 1 - came)

    def intervals(self, registry: Registry, clients: Sequence[ClientId], round: int, cutoff: int) -> F64:
        """Return the mean of each client's intervals that ended before a round, float64[k]; 1 without any."""
        numbers = registry.numbers(clients)
        ended, since = self._intervals(numbers, round, cutoff)
        lengths = round - since - _of(self.arrived, numbers, 0)
        return np.where(ended > 0, lengths / np.maximum(ended, 1), 1.0)

    def _intervals(self, numbers: Column, round: int, cutoff: int) -> tuple[Column, Column]:
        """Return how many intervals of each client ended before a round, and the rounds since then, int64[k] each."""
        away = round - self.starts(numbers)
        return _of(self.ended, numbers, 0) + away // cutoff, away % cutoff

    def starts(self, numbers: Column) -> Column:
        """Return the round after each client's last appearance, or its first round, int64[k]."""
        heard = _of(self.heard, numbers, _REMOVED)
        return np.where(heard == _REMOVED, _of(self.arrived, numbers, 0), heard + 1)

    def all_starts(self, clients: int) -> set[int]:
        """Return the values of ``starts`` over all registered clients, of which there are ``clients``. Cost: O(N)."""
        heard, arrived = (_present(_merged(runs)) for runs in (self.heard, self.arrived))
        new = arrived[1, ~np.isin(arrived[0], heard[0])]
        rest = {0} if clients > heard.shape[1] + len(new) else set()
        return rest | set(np.unique(np.concatenate([heard[1] + 1, new])).tolist())

    def with_appearances(self, numbers: Column, round: int, cutoff: int) -> "Population":
        """Return the population after a round that accepted updates of these clients."""
        ended = self._intervals(numbers, round, cutoff)[0] + 1
        heard = _with(self.heard, numbers, np.full_like(numbers, round))
        return replace(self, heard=heard, ended=_with(self.ended, numbers, ended))

    def vectors(self) -> dict[str, Column]:
        """Return the columns by name, for a store."""
        columns = [column for of in COLUMNS for column in getattr(self, of)]
        return dict(zip(self._names(), columns, strict=True))

    def _names(self) -> list[str]:
        return [_name(of, i) for of in COLUMNS for i in range(len(getattr(self, of)))]

    def on_disk(self, store: ClientStore) -> "Population":
        """Return the population with the store's committed columns in place of those in memory."""
        columns = {name: column for name in self._names() if (column := store.vector(name)) is not None}
        runs: dict[str, Any] = {of: _runs(columns, of) for of in COLUMNS}
        return replace(self, **runs)

    def to_state(self) -> dict[str, Any]:
        """Return the fields that are not columns, as JSON."""
        state: dict[str, Any] = {"included": list(self.included.items()), "total": self.total}
        state |= {"unnamed": self.unnamed} if self.unnamed else {}
        # Older versions of fedcore support one run only; they expect a list here and reject this number.
        return state if max(len(self.sizes), len(self.arrived)) < 2 else state | {"sizes": len(self.sizes)}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], vectors: Mapping[str, npt.NDArray[Any]], registry: Registry
    ) -> "Population":
        """Return the population of ``to_state`` and ``vectors``."""
        included = dict(map(tuple, state.get("included", [])))  # missing in the oldest folders
        if "arrived" in state:  # older folders have lists in place of columns
            listed = (dict(map(tuple, state[name])) for name in ("sizes", "arrived"))
            sizes, arrived = (_with((), registry.numbers(list(of)), list(of.values())) for of in listed)
        else:
            sizes, arrived = _runs(vectors, "sizes"), _runs(vectors, "arrived")
        heard, ended = _runs(vectors, "heard"), _runs(vectors, "ended")
        sized, unnamed = _present(_merged(sizes)).shape[1], check_integer("unnamed", state.get("unnamed", 0), 0)
        return cls(sizes, arrived, included, state["total"], sized, heard, ended, unnamed)


def checked_sizes(clients: Sequence[ClientId], sizes: Sizes | None, *, sized: bool) -> list[int] | None:
    """Return the sizes of new clients in order, or None without sizes.

    Raise RangeError if a size is invalid, missing or not expected, and UnknownClientError if a different client has
    one.
    """
    given = {} if sizes is None else sizes
    new = set(clients)
    if strangers := [client for client in given if client not in new]:
        raise UnknownClientError(f"clients: {strangers[0]!r} has a size, but is not one of the new clients")
    if sized:
        return [_size(client, given.get(client)) for client in clients]
    if given:
        client, size = next(iter(given.items()))
        raise RangeError(f"clients: {client!r} has size {size!r}, but the other clients have no sizes; pass ids only")
    return None


def _listed(registry: Registry, sizes: Sizes, argument: str = "clients") -> tuple[list[ClientId], list[int]]:
    """Return the registered clients and their sizes, in one order."""
    if strangers := [client for client in sizes if client not in registry]:
        raise UnknownClientError(f"{argument}: {strangers[0]!r} has a size, but is not registered")
    return list(sizes), [_size(client, size, argument) for client, size in sizes.items()]


def _size(client: ClientId, size: object, argument: str = "clients") -> int:
    if type(size) is int and 1 <= size <= MOST:  # saves the formatting of the name
        return size
    return check_integer(f"{argument}[{client!r}]", size, 1, MOST)


def _name(of: str, run: int) -> str:
    return f"population/{of}/{run}" if run else f"population/{of}"


def _runs(columns: Mapping[str, npt.NDArray[Any]], of: str) -> Runs:
    return tuple(columns[name] for name in takewhile(columns.__contains__, (_name(of, run) for run in count())))


def _of(runs: Runs, numbers: npt.NDArray[np.int64], absent: int) -> npt.NDArray[np.int64]:
    """Return the values of these numbers, and ``absent`` for others."""
    values = np.full(len(numbers), _REMOVED)
    for column in runs:
        # Numbers past the end use the last place.
        places = np.minimum(np.searchsorted(column[0], numbers), column.shape[1] - 1)
        values = np.where(column[0, places] == numbers, column[1, places], values)
    return np.where(values == _REMOVED, absent, values)


def _with(runs: Runs, numbers: Numbers, values: Numbers) -> Runs:
    """Return the runs with new values of these numbers.

    Cost: O(k log N) for k values on average: a run shorter than 8 times the next one is merged with it.
    """
    entries = np.array([numbers, values], np.int64)
    if not entries.size:
        return runs
    while runs and runs[-1].shape[1] < _RATIO * _room(entries):
        entries, runs = _merged((runs[-1], entries)), runs[:-1]
    if not runs:
        entries = _present(entries)
    return (*runs, _column(entries)) if entries.size else runs


def _without(runs: Runs, number: int) -> Runs:
    return _with(runs, [number], [_REMOVED]) if _of(runs, np.array([number]), _REMOVED)[0] != _REMOVED else runs


def _merged(runs: Runs) -> Column:
    """Return the current entries, ordered by number."""
    entries = np.concatenate([_EMPTY, *reversed(runs)], axis=1)
    numbers, places = np.unique(entries[0], return_index=True)  # the first entry of each, which is from the latest run
    return entries[:, places[numbers != _UNUSED]]


def _present(entries: Column) -> Column:
    return entries[:, entries[1] != _REMOVED]


def _room(entries: Column) -> int:
    """Return the length of a column for these entries: a power of two, as a store has a file for each vector size."""
    return int(1 << max(6, (entries.shape[1] - 1).bit_length()))


def _column(entries: Column) -> Column:
    """Return the entries ordered by number, followed by unused ones."""
    k, column = entries.shape[1], np.full((2, _room(entries)), _UNUSED)
    column[:, :k] = entries[:, np.argsort(entries[0])]
    return column


Direction = npt.NDArray[np.float32]


@dataclass(frozen=True)
class History:
    """v[t], float32[n_parameters], by round, while rows refer to it. It is immutable.

    MimiC's correction is c_i = v[t_i] - r_i, with t_i the round that wrote the row r_i. The server stores v[t] once per
    round, not c_i per client. An update can thus be folded before v of its round is known.

    A direction is dropped when no row refers to it. If there are more than ``most``, a direction is *folded* into its
    rows: r becomes r - v[t]; the correction is then -r, and the row refers to no round.

    Attributes:
        directions: v[t] by t.
        references: the number of rows that refer to each.

    Cost: 4 n bytes for each round.
    """

    directions: Mapping[int, Direction] = field(default_factory=dict)
    references: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.directions)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.directions))

    def get(self, round: int | None) -> Direction | None:
        """Return v[round], read-only; None if it is not stored."""
        return None if round is None else self.directions.get(round)

    def after(self, round: int, v: Direction, rows: int, before: Iterable[int | None]) -> "History":
        """Return the history after a round: ``rows`` rows refer to v[round], and no longer to the rounds ``before``."""
        references = dict(self.references)
        if rows:
            references[round] = rows
        return self._without(references, before, {**self.directions, round: v})

    def without(self, before: Iterable[int | None]) -> "History":
        """Return the history with one reference less to each of these rounds."""
        return self._without(dict(self.references), before, self.directions)

    def surplus(self, most: int) -> list[int]:
        """Return the rounds to fold so that at most ``most`` are kept; the newest is never folded.

        Those with the fewest rows are folded, since a fold rewrites the rows; among equals the oldest. An early round
        with many rows is thus kept until most of its clients have newer rows.
        """
        older = sorted(self.directions)[:-1]
        return sorted(older, key=lambda t: (self.references[t], t))[: max(0, len(self) - most)]

    def folded(self, rounds: Iterable[int]) -> "History":
        """Return the history after these rounds were folded into their rows."""
        kept = self.directions.keys() - set(rounds)
        return History({t: self.directions[t] for t in kept}, {t: self.references[t] for t in kept})

    def _without(
        self, references: dict[Any, int], before: Iterable[int | None], directions: Mapping[int, Direction]
    ) -> "History":
        for t in before:
            if t in references:
                references[t] -= 1
        left = {t: count for t, count in references.items() if count > 0}
        return History({t: directions[t] for t in left}, left)


Vector = npt.NDArray[Any]

ON_HOST = ("counter/", "population/", "norms/")
"""Prefixes of the names of vectors that are always in host memory."""
OF_MODEL = ("x", "ahead", "x_prev", "past")
"""Names, up to a slash, of vectors with float buffers; other vectors of the model have only its parameters."""


class Snapshot(NamedTuple):
    """The state of a server without the rows.

    Arrays do not change later, except ``total`` and ``momentum``, which the round after next overwrites.

    Attributes:
        x: float32[n], the model.
        x_prev: float32[n], x_{t-1}; x_{-1} = x_0.
        momentum: float32[n_parameters], v of the last round, which is g in the papers.
        total: float64[n_parameters], T; None if the method does not keep it.
        moments: the optimizer's moments, float32[n_parameters] each.
        counters: the integer counters by name.
        population: the clients' shares and arrivals.
        norms: the norms and claims of the last accepted updates, for the rules that need them, and the ids of updates;
            see ``CountedIds``.
        past: x by round, for the rounds whose late updates are accepted.
        starts: by client, the start round of its last accepted update, for those rounds.
        history: v[t] while rows refer to it, if the method keeps them.
        round_number: the number of finished rounds.
        idle: of these, the rounds that a group of tensors did not have, since it got no update. The server's rate and
            the optimizer's count only the others; the clients' rate is that of ``round_number``.
        gamma: the last gamma, for a round without clients.
        gamma_lr: the clients' rate in its round; 0 if an older version saved the folder.
        ahead: float32[n], the model that methods that look ahead send in place of x; else None.
        transactions: the number of finished rounds, changes of clients, options and x, and warm starts.
        exact_total: T as an exact sum; ``total`` is then its float64 value.
        changed: the options that were changed since the last round, for JSON; "x": how often x was replaced.
        audited: the digest of the last audit document; None without audit.
        documents: the number of audit documents, without those of changes that were undone since.
        center: float32[n_parameters], the last result of a robust rule that needs it; else None.
        ledger: the private rounds.
    """

    x: F32
    x_prev: F32
    momentum: F32
    total: F64 | None
    moments: tuple[F32, ...]
    counters: Counters
    population: Population
    norms: Mapping[str, Vector] = {}
    past: Mapping[int, F32] = {}
    starts: Mapping[ClientId, int] = {}
    history: History = History()
    round_number: int = 0
    idle: int = 0
    gamma: float = 0.0
    gamma_lr: float = 0.0
    ahead: F32 | None = None
    transactions: int = 0
    exact_total: ExactSum | None = None
    changed: Mapping[str, Any] = {}
    audited: str | None = None
    documents: int = 0
    center: F32 | None = None
    ledger: Ledger = Ledger()

    @property
    def sent(self) -> F32:
        """The model from which clients start, float32[n]."""
        return self.x if self.ahead is None else self.ahead

    @classmethod
    def first(cls, settings: Settings, x: F32, counters: Counters, population: Population) -> "Snapshot":
        """Return the snapshot of a new server; x is on its device."""
        p, device, algorithm = settings.layout.n_parameters, settings.device, settings.algorithm
        # Of one element: an optimizer of a server whose vectors are in files works element by element.
        n = 1 if isinstance(device, FileMemory) else p
        start = optimizers.started(settings.optimizer, n) if settings.optimizer else ()
        return cls(
            x=x,
            x_prev=x,
            momentum=zeros(p, device=device),
            total=zeros(p, np.float64, device=device) if algorithm.keeps_total else None,
            moments=tuple(_on_device(moment, p, device) for moment in start),
            counters=counters,
            population=population,
            exact_total=ExactSum.zeros(p, device=device) if settings.is_exact and algorithm.keeps_total else None,
        )

    def shared(self) -> "Snapshot":
        """Return the snapshot without the vectors of the model; ``past`` keeps its rounds."""
        nothing: F32 = np.empty(0, np.float32)
        own: dict[str, Any] = dict.fromkeys(("x", "x_prev", "momentum"), nothing)
        own |= dict.fromkeys(("total", "exact_total", "ahead", "center")) | {"moments": (), "history": History()}
        return self._replace(past=dict.fromkeys(self.past, nothing), idle=0, **own)

    def with_replacement(self) -> "Snapshot":
        """Return the snapshot with one more replacement of x in ``changed``."""
        return self._replace(changed={**self.changed, "x": self.changed.get("x", 0) + 1})

    def vectors(self, algorithm: Algorithm) -> dict[str, Vector]:
        """Return the arrays by name, without those that the method never reads."""
        named: dict[str, Vector] = {"x": self.x}
        if self.ahead is not None:
            named["ahead"] = self.ahead
        if algorithm.direction.b:
            named["x_prev"] = self.x_prev
        if algorithm.keeps_momentum or algorithm.rows_at_clients:
            named["momentum"] = self.momentum
        if self.exact_total is not None:
            named |= {f"total/{word}": words for word, words in self.exact_total._asdict().items()}
        elif self.total is not None:
            named["total"] = self.total
        if self.center is not None:
            named["center"] = self.center
        named |= {f"moment/{i}": moment for i, moment in enumerate(self.moments)}
        named |= {f"past/{t}": x for t, x in self.past.items()}
        named |= {f"v/{t}": v for t, v in self.history.directions.items()}
        named |= self.population.vectors()
        named |= {f"counter/{name}": counter for name, counter in self.counters.items()}
        named |= {f"norms/{sum}": norms for sum, norms in self.norms.items()}
        return named

    def on_disk(self, store: ClientStore) -> "Snapshot":
        """Return the snapshot with the store's committed arrays in place of those in memory."""
        population = self.population.on_disk(store)
        if device_of(self.x) != CPU:  # rounds need the history on the device
            return self._replace(population=population)
        committed = {t: store.vector(f"v/{t}") for t in self.history}
        directions = {t: v for t, v in committed.items() if v is not None}
        past = {t: x if (kept := store.vector(f"past/{t}")) is None else kept for t, x in self.past.items()}
        history = replace(self.history, directions=directions)
        return self._replace(history=history, population=population, past=past)

    def numbers(self) -> dict[str, Any]:
        """Return the other fields, for JSON."""
        return {
            "round_number": self.round_number,
            "transactions": self.transactions,
            "gamma": self.gamma,
            "gamma_lr": self.gamma_lr,
            "references": sorted(self.history.references.items()),
            "population": self.population.to_state(),
            "changed": dict(self.changed),
            "starts": list(self.starts.items()),
            "audited": self.audited,
            "documents": self.documents,
            **({"privacy": self.ledger.to_state()} if self.ledger.entries else {}),
            **({"idle": self.idle} if self.idle else {}),
        }

    @classmethod
    def of(
        cls,
        vectors: Mapping[str, Vector],
        numbers: Mapping[str, Any],
        n_parameters: int,
        registry: Registry,
        device: str = CPU,
    ) -> "Snapshot":
        """Return the snapshot of ``vectors`` and ``numbers``, without copying the arrays."""

        def under(folder: str) -> dict[str, Vector]:
            return {name.removeprefix(folder): v for name, v in vectors.items() if name.startswith(folder)}

        references = {int(t): int(count) for t, count in numbers["references"]}
        moments, words = under("moment/"), under("total/")
        exact_total = ExactSum(**words) if words else None
        return cls(
            x=vectors["x"],
            x_prev=vectors.get("x_prev", vectors["x"]),
            momentum=vectors["momentum"] if "momentum" in vectors else zeros(n_parameters, device=device),
            total=vectors.get("total") if exact_total is None else kernels.read_exact(exact_total),
            exact_total=exact_total,
            moments=tuple(moments[str(i)] for i in range(len(moments))),
            counters=under("counter/"),
            population=Population.from_state(numbers["population"], vectors, registry),
            norms=under("norms/"),
            past={int(t): x for t, x in under("past/").items()},
            history=History({int(t): v for t, v in under("v/").items()}, references),
            round_number=int(numbers["round_number"]),
            idle=numbers.get("idle", 0),
            gamma=float(numbers["gamma"]),
            gamma_lr=float(numbers.get("gamma_lr", 0)),
            ahead=vectors.get("ahead"),
            center=vectors.get("center"),
            transactions=count_of(numbers),
            changed=dict(numbers.get("changed", {})),
            audited=numbers.get("audited"),
            documents=documents_of(numbers),
            ledger=Ledger.from_state(numbers.get("privacy")),
            starts={client: int(t) for client, t in numbers.get("starts", [])},
        )


def _on_device(moment: F32, p: int, device: str) -> F32:
    """Return a first moment of p elements on a device."""
    if isinstance(device, FileMemory):
        return full(p, moment[0], device=device)
    return moment if device == CPU else copied(moment, device=device)


def count_of(numbers: Mapping[str, Any]) -> int:
    """Return the number of transactions in a snapshot's ``numbers``; older folders count only rounds."""
    return int(numbers.get("transactions", numbers["round_number"]))


def documents_of(numbers: Mapping[str, Any]) -> int:
    """Return the number of audit documents in a snapshot's ``numbers``; older folders have one for each round."""
    return int(numbers.get("documents", numbers["round_number"] if numbers.get("audited") else 0))


def moved(vectors: Mapping[str, Vector], device: str) -> dict[str, Vector]:
    """Return a server's vectors, with the model's on the device and as writable as before."""
    if device == CPU:
        return dict(vectors)
    on_device = {}
    for name, vector in vectors.items():
        on_device[name] = vector if name.startswith(ON_HOST) else copied(vector, device=device)
        if on_device[name] is not vector and not vector.flags.writeable:
            freeze(on_device[name])
    return on_device


def vectors_of(store: ClientStore, device: str = CPU) -> dict[str, Vector]:
    """Return a server's vectors from an open store, copied to host memory or files unless rounds never change them."""
    vectors = {}
    for name in store.vector_names():
        vector = store.vector(name)
        assert vector is not None
        vectors[name] = vector if name.startswith(("v/", "population/")) else copied(vector, device=device)
        vectors[name].flags.writeable = name.partition("/")[0] in ("total", "momentum")
    return vectors


class PreparedStep(NamedTuple):
    """A step that ``State.accept`` can commit."""

    before: Snapshot
    result: Result
    cohort: Cohort
    after: Snapshot
    step: Step | None = None
    """The coefficients of v and T'; None if the round has no updates and x is unchanged."""
    v_square: float = 0.0
    """|v|^2."""
    gamma: float = 0.0
    """The length of the step along v; 0 if x is unchanged."""
    waiting_for: int = 0
    """The number of clients without an update for which x waits."""
    most_steps: int | None = None
    """The cap of step counts in gamma; None if no count exceeded it."""
    rounds: Sequence[int | None] = ()
    """The rounds of the cohort's rows before this round, if the server keeps rows; None for a client without a row."""
    groups: Mapping[str, Any] | None = None
    """The ``Report`` of each group of a server with partial updates."""


_NONE: F64 = np.empty(0)


def counted_steps(
    settings: Settings, now: Snapshot, batch: UpdateBatch, window: ClaimWindow
) -> tuple[F64, F64, int | None]:
    """Return the cohort's K_i and eta_i K_i for gamma, and the cap of step counts, or None if no count exceeds it.

    ``CapSteps`` caps step counts at a multiple of the median of the last 1,000 accepted updates. The cohort's median
    over draws replaces it if it is larger and there are 8 draws, or if there are no earlier updates. One of S draws
    thus adds at most ratio / S of a usual step to a mean. Without ``CapSteps``, and if gamma does not depend on step
    counts, they are unchanged. ``window`` gets the counts as reported; by capped ones, the cap could only fall.
    """
    steps, counts, eta_steps = batch.claims.steps, batch.claims.counts, batch.eta_steps
    if (ratio := window.ratio) is None:
        return steps, eta_steps, None
    is_claimless = claimless_gamma(settings, now) is not None
    if is_claimless and settings.averages_models and settings.algorithm.direction.from_row:
        window.add(steps)  # for ``usual_distance``
    if is_claimless or not len(batch):
        return steps, eta_steps, None
    if window.agree(steps):
        window.add(steps)
        return steps, eta_steps, None
    most = window.most(_NONE) if len(window) else 0.0
    if counts.sum() >= FEW or not len(window):
        most = max(most, ratio * _median(steps, counts))
    counted = np.minimum(steps, most)
    window.add(steps)
    if (counted == steps).all():
        return steps, eta_steps, None
    return counted, np.where(steps > most, eta_steps / steps * most, eta_steps), int(most)


def step_length(settings: Settings, now: Snapshot, cohort: Cohort, gamma_of_step: float | None) -> float:
    """Return gamma; for a round without draws the last gamma, times the change of the clients' rate since.

    The order of precedence: the server's rate, the optimizer's rate, the method's gamma, 1 for averaged models, the
    mean of eta_i K_i over draws.
    """
    for gamma in (set_gamma(settings, now), gamma_of_step, 1.0 if settings.averages_models else None):
        if gamma is not None:
            return float(gamma)
    if not cohort.S:
        return now.gamma * (rate_at(settings.lr, now.round_number) / now.gamma_lr if now.gamma_lr else 1.0)
    counts = cohort.claims.counts
    return float((cohort.eta_steps * counts).sum() / counts.sum())


def set_gamma(settings: Settings, now: Snapshot) -> float | None:
    """Return the server's rate, or else the optimizer's; None without both."""
    if settings.server_lr is not None:
        return rate_at(settings.server_lr, now.round_number - now.idle)
    return optimizers.rate_of(settings.optimizer, now.round_number - now.idle)


def claimless_gamma(settings: Settings, now: Snapshot) -> float | None:
    """Return gamma if it does not depend on updates: ``set_gamma``, or 1 for averaged models."""
    gamma = set_gamma(settings, now)
    return 1.0 if gamma is None and settings.averages_models else gamma


def usual_distance(settings: Settings, now: Snapshot) -> float:
    """Return eta K with the median of the reported steps of earlier rounds; 0 without ``CapSteps``.

    A client's own steps are no measure of its offset: it could report any number.
    """
    window = settings.rules.window("steps", now.norms) if "steps" in settings.rules.needs else ()
    return rate_at(settings.lr, now.round_number) * window.most(_NONE, 1.0) if window else 0.0


def _median(values: F64, counts: F64) -> float:
    """Return the lower median of values that are repeated ``counts`` times."""
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])


def farthest_gamma(settings: Settings, now: Snapshot) -> float:
    """Return the largest possible ``step_length`` of this round, unless the method's step sets gamma."""
    if (gamma := claimless_gamma(settings, now)) is not None:
        return gamma
    lr, limits = rate_at(settings.lr, now.round_number), settings.all_limits
    return max(limits.max_client_lr or lr, lr, now.gamma) * limits.max_steps


class ModelStep:
    """Computes the vectors of the next snapshot from the sums and the current vectors, element by element.

    It uses no clients and no rows, so that a shard can run it on slices.

    Attributes:
        buffers: the float buffers that must not become negative.
        vectors: the pool for x, and for v of a large model.
        new_x: returns memory for x; small memory is faster from the system than from the pool.
        directions: the pool for v, if rows refer to it later.
        spare_v, spare_total, spare_exact: the outputs of the next step: float32[n_parameters], float64[n_parameters],
            and an exact sum; None if the method does not keep it. A commit replaces them by the previous snapshot's
            vectors. For a large model, spare_v is None until the step.

    Cost: 4 n to 16 n bytes, allocated once.
    """

    def __init__(self, settings: Settings, buffers: Buffers, reducer: Reducer, vectors: BufferPool) -> None:
        n, p, device = settings.layout.n, settings.layout.n_parameters, settings.device
        self._settings, self.buffers, self._reducer = settings, buffers, reducer
        self.vectors, self._moments = vectors, BufferPool(p, most=2, device=device)
        pooled = n > 1 << 14 or vectors.is_in_files or device != CPU
        self.new_x: Any = vectors.get if pooled else partial(np.empty, n, np.float32)
        self.directions = BufferPool(p, device=device)
        self.is_large = n >= LARGE and not settings.algorithm.keeps_history
        self.spare_v: F32 | None = None if self.is_large else empty(p, device=device)
        self.spare_total: F64 | None = empty(p, np.float64, device=device) if settings.algorithm.keeps_total else None
        has_exact_total = settings.is_exact and settings.algorithm.keeps_total
        self.spare_exact = ExactSum.empty(p, device=device) if has_exact_total else None
        self._buffer_v: F32 = empty(n - p, device=device)

    def v(self) -> F32:
        """Return the vector for v of the next step, float32[n_parameters]."""
        if self.spare_v is None:
            self.spare_v = self.vectors.get()[: self._settings.layout.n_parameters]
        return self.spare_v

    def take(
        self, now: Snapshot, result: Result, step: Step, gamma: float, batch: UpdateBatch
    ) -> tuple[dict[str, Any], float]:
        """Return the new fields of the next snapshot, and |v|^2; ``now`` is unchanged. ``gamma``: 0 if x stays
        unchanged.

        Raise DivergedError if x would become infinite or NaN; its message names the longest update of ``batch``.
        """
        p, optimizer = self._settings.layout.n_parameters, self._settings.optimizer
        x = self.new_x()  # a new array: clients may still train on the old x
        room = self._reducer.room(p, 2)
        total_of, changes = step.T, result.B
        if result.plain is not None and step.T.A:
            if step.T.B or step.v.B:
                raise AlgorithmError(f"{self._settings.algorithm}: T' needs A and B, so v cannot have a robust rule")
            total_of, changes = step.T._replace(A=0.0, B=step.T.A), result.plain
        squares = kernels.server_step(
            result.A,
            now.total,
            now.x[:p],
            v_of=step.v._replace(A=step.v.A * result.times),
            total_of=total_of,
            gamma=gamma,
            momentum=now.momentum if step.v.g or step.T.g else None,
            control=changes,
            v=self.v(),
            total_out=self.spare_total,
            x_out=x[:p],
            partials=room,
        )
        x_square = squares[1]
        if self.spare_exact is not None:
            self._follow(now, result, step.T, self.spare_exact)
        moments = now.moments
        if optimizer is not None and gamma:
            moments = tuple(self._moments.get() for _ in now.moments)
            v, outs = self.v(), (x[:p], *moments)
            x_square = optimizers.turn(optimizer, v, now.moments, now.x[:p], gamma=gamma, outs=outs)
        if p < len(x):
            x_square += self._average_buffers(now, x, result)
            self.buffers.clip(x)
        ahead = now.ahead
        if gamma:
            ahead = self._ahead(now, x, step.lookahead) if step.lookahead else None
        if ahead is not None:
            x_square += kernels.squared_norms([ahead])[0]
        v_square = float(self._reducer.add(Squares(np.array(squares), room))[0][0])
        past = self._past_dtype(x if ahead is None else ahead) if gamma else None
        if not self._reducer.agree(math.isfinite(x_square) and past is None):
            past, by, longest = past or "x", "", "" if self._settings.rules.private else batch.longest()
            if optimizer is not None and type(optimizer) not in optimizers.OWN:
                past, by = f"{past} or a moment", f"{name_of(optimizer)}: "
            raise DivergedError(
                f"round {now.round_number}: {by}the step gamma = {gamma:g} along v, |v| = {v_square**0.5:g}, would "
                f"make {past} infinite or NaN, so x is unchanged; lower the rates{longest}"
            )
        freeze(x)
        made: dict[str, Any] = {"x": x if gamma else now.x, "ahead": ahead, "moments": moments}
        kept = {"momentum": self.spare_v, "total": self.spare_total, "exact_total": self.spare_exact}
        return made | kept, v_square

    def _past_dtype(self, x: F32) -> str | None:
        """Return the name of a tensor with a number beyond the range of its dtype, or None."""
        if all(kernels.all_finite([part])[0] for part in rounded_parts(self._settings.layout, x)):
            return None
        return first_not_finite(as_sent(self._settings.layout, x), self._settings.layout)

    def _follow(self, now: Snapshot, result: Result, form: Linear, to: ExactSum) -> None:
        """Write T' as an exact sum, and its float64 value."""
        if not is_whole_sum(form):
            raise AlgorithmError(
                f"{self._settings.algorithm}: coefficients of T must be integers for exact sums, got {form}; leave "
                'accumulator="exact" out'
            )
        assert result.exact is not None
        A, B = result.exact
        given = [(now.exact_total, form.T), (A, form.A), (B, form.B), (self.v(), form.v)]
        terms = [(term, int(c)) for term, c in given if term is not None and c]
        if kernels.combine_exact([term for term, _ in terms], [c for _, c in terms], to) is None:
            raise DivergedError(
                f"round {now.round_number}: T would exceed the range of an exact sum, 2^52; lower the rates"
            )
        kernels.read_exact(to, self.spare_total)

    def _ahead(self, now: Snapshot, x: F32, lookahead: float) -> F32:
        """Return x' + lookahead (x' - x) of the parameters, and the buffers of x'."""
        p, ahead = self._settings.layout.n_parameters, copied(x)
        kernels.combine([x[:p], now.x[:p]], [1 + lookahead, -lookahead], ahead[:p])
        freeze(ahead)
        return ahead

    def _average_buffers(self, now: Snapshot, x: F32, result: Result) -> float:
        """Write the cohort's mean of the float buffers into the end of x; return its squared norm."""
        p = self._settings.layout.n_parameters
        return kernels.server_step(
            result.buffers,
            None,
            now.x[p:],
            v_of=Linear(A=1 / result.buffer_weight if result.buffer_weight > 0 else 0.0),
            gamma=1.0,
            v=self._buffer_v,
            total_out=None,
            x_out=x[p:],
        )[1]
