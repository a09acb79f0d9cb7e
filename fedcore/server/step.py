"""The server's step: from the sums of a round and the state before it to the state after it."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Algorithm, Cohort, Linear, Step
from fedcore.algorithms.base import is_whole_sum
from fedcore.algorithms.optimizers import Optimizer
from fedcore.algorithms.rates import rate_at
from fedcore.arguments import whole
from fedcore.arrays import CPU, F32, F64, Recycled, copied, device_of, empty, freeze, zeros
from fedcore.errors import AlgorithmError, DivergedError, RangeError, UnknownClientError
from fedcore.kernels import ExactSum
from fedcore.options import Settings
from fedcore.rules import FEW, ClaimWindow
from fedcore.server.aggregation import Counters, Reducer, Result, Squares, UpdateBatch, exchange_whole
from fedcore.server.update import as_sent, first_not_finite
from fedcore.server.validation import Buffers
from fedcore.store import ClientStore
from fedcore.store.client_store import rounding_keys
from fedcore.store.registry import ClientId, Registry

# The clients as the objective sees them: their shares p^k of all examples, and when they came.


Column = npt.NDArray[np.int64]
Numbers = Sequence[int] | Column
Runs = tuple[Column, ...]
Sizes = Mapping[ClientId, int]

MOST = 2**53
"""Examples of one client, up to which a float64 holds the number as it is."""
_GONE = -1
"""The value that a later run gives to a number whose client has left."""
_RATIO = 8
"""The room of a run over that of the next one, at least."""
_UNUSED = np.iinfo(np.int64).max  # a number that no client has
_EMPTY = np.zeros((2, 0), np.int64)


@dataclass(frozen=True)
class Population:
    """The registered sizes n_k, and the rounds of arrival, by the clients' numbers in the registry.

    A population never changes: a client that comes or goes makes the next one. A round changes none of them, so that a
    commit writes them no second time. A column is int64[2, m]: numbers that ascend, and what belongs to them; what is
    behind the last is unused. Columns come in runs of ever fewer numbers, of which a change writes the last ones alone.
    The last run that has a number says what belongs to it.

    Attributes:
        sizes: n_k of the clients in the objective; () where the server was told none.
        arrived: the round in which a client came that was not there from the start; () where all were.
        included: n_k of those that have departed and whose shares the objective keeps.
        total: n, the sum of the sizes in the objective.
        sized: how many clients have a size.
    """

    sizes: Runs = ()
    arrived: Runs = ()
    included: Mapping[ClientId, int] = field(default_factory=dict)
    total: int = 0
    sized: int = 0

    @classmethod
    def of(cls, client_sizes: Sizes | None, registry: Registry, *, needed: bool) -> "Population":
        """The population of a new server.

        Args:
            client_sizes: n_k by client id; None where no method asks.
            registry: the clients.
            needed: whether the method cannot do without them, once there are clients.

        Raises:
            RangeError: a size is no integer in 1..2^53, or a client's is missing.
            UnknownClientError: a size is for a client that is not registered.
        """
        if client_sizes is None:
            if needed and len(registry):
                raise RangeError("clients: the method weighs by p^k = n_k / n; give a mapping from each id to its n_k")
            return cls()
        if len(client_sizes) != len(registry):
            raise RangeError(f"clients: the store has {len(registry)} clients, and {len(client_sizes)} have a size")
        clients, sizes = _listed(registry, client_sizes)
        return cls().with_clients(registry.numbers(clients).tolist(), clients, sizes, None)

    @property
    def is_sized(self) -> bool:
        """Tell whether the clients have sizes: all of them, or none."""
        return bool(self.sizes)

    def listed(self) -> npt.NDArray[np.int64] | None:
        """The clients' sizes, the smallest first; None where they have none."""
        return np.sort(_living(_merged(self.sizes))[1]) if self.sizes else None

    def with_clients(
        self, numbers: Numbers, clients: Sequence[ClientId], sizes: Sequence[int] | None, round: int | None
    ) -> "Population":
        """The population after clients came, in that round (None: they were there from the start).

        One whose share the objective has kept comes back to it: it is no newcomer.

        Args:
            numbers: in the registry, of ``clients`` in their order.
            sizes: their n_k; None where the clients have no sizes.
        """
        after = self
        back = [client for client in clients if client in self.included] if self.included else []
        if round is not None:
            pairs = zip(numbers, clients, strict=True)
            new = [number for number, client in pairs if client not in self.included] if back else numbers
            after = replace(after, arrived=_with(self.arrived, new, [round] * len(new)))
        if sizes is None:
            return after
        total, kept = self.total + sum(sizes) - sum(self.included[client] for client in back), self.included
        if back:
            gone = set(back)
            kept = {client: size for client, size in kept.items() if client not in gone}
        sized = self.sized + len(sizes)
        return replace(after, sizes=_with(self.sizes, numbers, sizes), included=kept, total=total, sized=sized)

    def without_client(self, number: int, client: ClientId, *, from_objective: bool) -> "Population":
        """The population after a client went; the shares of the others grow if the objective forgets it."""
        size = int(_of(self.sizes, np.array([number]), 0)[0])
        after = replace(self, arrived=_without(self.arrived, number))
        if not size:
            return after
        sized = self.sized - 1
        after = replace(after, sizes=_without(self.sizes, number) if sized else (), sized=sized)
        if from_objective:
            return replace(after, total=self.total - size)
        return replace(after, included={**self.included, client: size})

    def with_sizes(self, registry: Registry, client_sizes: Mapping[ClientId, int]) -> "Population":
        """The population after some clients' numbers of examples have changed.

        Raises:
            RangeError: the clients have no sizes, or one is no integer in 1..2^53.
            UnknownClientError: one is for a client that is not registered.
        """
        clients, sizes = _listed(registry, client_sizes, "sizes")
        if not self.sizes:
            raise RangeError("sizes: the clients have no sizes; make the server with a mapping from each id to its n_k")
        numbers = registry.numbers(clients)
        total = self.total + sum(sizes) - int(_of(self.sizes, numbers, 0).sum())
        return replace(self, sizes=_with(self.sizes, numbers, sizes), total=total)

    def examples(self, registry: Registry, clients: Sequence[ClientId]) -> F64:
        """n_k, float64[k], of a population that has sizes."""
        return _of(self.sizes, registry.numbers(clients), 0).astype(np.float64)

    def shares(self, registry: Registry, clients: Sequence[ClientId]) -> F64 | None:
        """p^k = n_k / n, float64[k]; None where no sizes are known."""
        if not self.sizes:
            return None
        return self.examples(registry, clients) / self.total

    def ages(self, registry: Registry, clients: Sequence[ClientId], round: int) -> F64 | None:
        """Rounds since each client's arrival (1 in its first), float64[k]; infinite for those of the start, or None for
        all of them."""
        if not self.arrived:
            return None
        came = _of(self.arrived, registry.numbers(clients), _GONE)
        return np.where(came == _GONE, np.inf, round + 1 - came)

    def vectors(self) -> dict[str, Column]:
        """The columns by name, as a store keeps them."""
        return dict(zip(self._names(), (*self.sizes, *self.arrived), strict=True))

    def _names(self) -> list[str]:
        return [_name(of, i) for of in ("sizes", "arrived") for i in range(len(getattr(self, of)))]

    def on_disk(self, store: ClientStore) -> "Population":
        """The same population, its columns where the store has just committed them."""
        columns = {name: column for name in self._names() if (column := store.vector(name)) is not None}
        return replace(self, sizes=_runs(columns, "sizes"), arrived=_runs(columns, "arrived"))

    def to_state(self) -> dict[str, Any]:
        """The fields that are no columns, as JSON can hold them."""
        state = {"included": list(self.included.items()), "total": self.total}
        # Versions of fedcore that know one run alone, and a list here, refuse this.
        return state if max(len(self.sizes), len(self.arrived)) < 2 else state | {"sizes": len(self.sizes)}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], vectors: Mapping[str, npt.NDArray[Any]], registry: Registry
    ) -> "Population":
        """The population that ``to_state`` and ``vectors`` described."""
        included = dict(map(tuple, state.get("included", [])))  # the first folders have none
        if "arrived" in state:  # and older ones list what are columns now
            listed = (dict(map(tuple, state[name])) for name in ("sizes", "arrived"))
            sizes, arrived = (_with((), registry.numbers(list(of)), list(of.values())) for of in listed)
        else:
            sizes, arrived = _runs(vectors, "sizes"), _runs(vectors, "arrived")
        return cls(sizes, arrived, included, state["total"], _living(_merged(sizes)).shape[1])


def checked_sizes(clients: Sequence[ClientId], sizes: Sizes | None, *, sized: bool) -> list[int] | None:
    """The sizes of new clients, in their order; None where clients have none.

    Raises:
        RangeError: one is no integer in 1..2^53 where the others have sizes, or there are some where they have none.
        UnknownClientError: one is for another client.
    """
    given = {} if sizes is None else sizes
    new = set(clients)
    if strangers := [client for client in given if client not in new]:
        raise UnknownClientError(f"clients: {strangers[0]!r} has a size, but is not one of the new clients")
    if sized:
        return [_size(client, given.get(client)) for client in clients]
    if given:
        client, size = next(iter(given.items()))
        raise RangeError(f"clients: {client!r} has size {size!r}, but the other clients have none; give ids only")
    return None


def _listed(registry: Registry, client_sizes: Sizes, argument: str = "clients") -> tuple[list[ClientId], list[int]]:
    """The clients and their sizes, in one order."""
    named = client_sizes
    if strangers := [client for client in named if client not in registry]:
        raise UnknownClientError(f"{argument}: {strangers[0]!r} has a size, but is not registered")
    return list(named), [_size(client, size, argument) for client, size in named.items()]


def _size(client: ClientId, size: object, argument: str = "clients") -> int:
    if type(size) is int and 1 <= size <= MOST:  # which saves the name of the argument
        return size
    return whole(f"{argument}[{client!r}]", size, 1, MOST)


def _name(of: str, run: int) -> str:
    return f"population/{of}/{run}" if run else f"population/{of}"


def _runs(columns: Mapping[str, npt.NDArray[Any]], of: str) -> Runs:
    """The runs of that name."""
    return tuple(columns[name] for name in takewhile(columns.__contains__, (_name(of, run) for run in count())))


def _of(runs: Runs, numbers: npt.NDArray[np.int64], absent: int) -> npt.NDArray[np.int64]:
    """The values of these numbers, or ``absent``."""
    values = np.full(len(numbers), _GONE)
    for column in runs:
        # Below m, since every number is below _UNUSED, or m if none is unused.
        places = np.minimum(np.searchsorted(column[0], numbers), column.shape[1] - 1)
        values = np.where(column[0, places] == numbers, column[1, places], values)
    return np.where(values == _GONE, absent, values)


def _with(runs: Runs, numbers: Numbers, values: Sequence[int]) -> Runs:
    """The runs with these values of these numbers.

    Cost: O(k log N) for k values on average: a run that has less than 8 times the room of the next is merged with it.
    """
    entries = np.array([numbers, values], np.int64)
    if not entries.size:
        return runs
    while runs and runs[-1].shape[1] < _RATIO * _room(entries):
        entries, runs = _merged((runs[-1], entries)), runs[:-1]
    if not runs:
        entries = _living(entries)
    return (*runs, _column(entries)) if entries.size else runs


def _without(runs: Runs, number: int) -> Runs:
    """The runs without this number's value."""
    return _with(runs, [number], [_GONE]) if _of(runs, np.array([number]), _GONE)[0] != _GONE else runs


def _merged(runs: Runs) -> Column:
    """The entries that count, in the order of their numbers."""
    entries = np.concatenate([_EMPTY, *reversed(runs)], axis=1)
    numbers, places = np.unique(entries[0], return_index=True)  # the first of each, which is the latest run's
    return entries[:, places[numbers != _UNUSED]]


def _living(entries: Column) -> Column:
    return entries[:, entries[1] != _GONE]


def _room(entries: Column) -> int:
    """The length of a column for these entries: a power of two, since a store has a file for each size of vector."""
    return int(1 << max(6, (entries.shape[1] - 1).bit_length()))


def _column(entries: Column) -> Column:
    """Entries in the order of their numbers, with room for more behind them."""
    k, column = entries.shape[1], np.full((2, _room(entries)), _UNUSED)
    column[:, :k] = entries[:, np.argsort(entries[0])]
    return column


# Directions of past rounds, each kept while a client's row refers to it; and how they are folded into those rows.


Direction = npt.NDArray[np.float32]


@dataclass(frozen=True)
class History:
    """v[t] of float32[n] by round, counted by the rows that were written in that round. A round makes a new history.

    MimiC's correction is c_i = v[t_i] - r_i, with t_i the round that wrote the row r_i. Keeping v[t] once a round
    instead of c_i once a client lets an update be folded in before its round's v is known.

    Attributes:
        directions: v[t] by t.
        references: how many rows refer to each.

    A direction leaves when no row refers to it; or when there are more than somebody wants to keep, and he *folds* it
    into its rows: r becomes r - v[t], so that the correction is -r, and the row refers to no round any more.

    Cost: 4 n bytes for each round that is kept.
    """

    directions: Mapping[int, Direction] = field(default_factory=dict)
    references: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of rounds that are kept."""
        return len(self.directions)

    def __iter__(self) -> Iterator[int]:
        """The rounds, oldest first."""
        return iter(sorted(self.directions))

    def get(self, round: int | None) -> Direction | None:
        """v[round], not to be written to; None for a round that is not kept."""
        return None if round is None else self.directions.get(round)

    def after(self, round: int, v: Direction, rows: int, before: Iterable[int | None]) -> "History":
        """The history once ``rows`` rows refer to v[round], and no longer to the rounds ``before``."""
        references = Counter(self.references)
        if rows:
            references[round] = rows
        return self._without(references, before, {**self.directions, round: v})

    def without(self, before: Iterable[int | None]) -> "History":
        """The history once a row less refers to each of these rounds."""
        return self._without(Counter(self.references), before, self.directions)

    def surplus(self, most: int) -> list[int]:
        """The rounds to fold so that at most this many are kept, except the newest, which always is.

        They are those of the fewest rows, since a fold rewrites these; of equals the oldest. Rows move on to newer
        rounds as their clients are heard, so those are the oldest rounds, and an early one that all clients still refer
        to waits until most of them have been heard again.
        """
        older = sorted(self.directions)[:-1]
        return sorted(older, key=lambda t: (self.references[t], t))[: max(0, len(self) - most)]

    def folded(self, rounds: Iterable[int]) -> "History":
        """The history once these rounds are in their rows."""
        kept = self.directions.keys() - set(rounds)
        return History({t: self.directions[t] for t in kept}, {t: self.references[t] for t in kept})

    def _without(
        self, references: Counter[int], before: Iterable[int | None], directions: Mapping[int, Direction]
    ) -> "History":
        references.subtract(t for t in before if t is not None and t in references)
        alive = {t: count for t, count in references.items() if count > 0}
        return History({t: directions[t] for t in alive}, alive)


def fold_history(
    store: ClientStore,
    history: History,
    rounds: Iterable[int],
    total: npt.NDArray[np.float64] | ExactSum,
    *,
    round: int,
    staged: Collection[ClientId],
    at_once: int,
    reducer: Reducer,
) -> None:
    """Stage r_i - v[t] as the row of every client last heard in one of the rounds, and let the total follow.

    A correction c_i = v[t] - r_i is then minus the row. What the row cannot hold of it leaves the total, which stays
    the sum of the corrections as stored: T' = T - sum of (r_i' - r_i + v[t]), r_i' the new row as it is read.

    Args:
        store: of the rows. The new ones keep their rounds, which tell how old they are.
        history: the directions.
        rounds: which of them are folded; the history still holds them.
        total: T, float64[n] or exact, written in place; worthless if the fold fails.
        round: the one that is open.
        staged: clients whose rows change in this round anyway.
        at_once: rows of one pass.
        reducer: of which the rows that lie here are slices.

    Raises:
        DivergedError: r_i - v[t] is not finite, or past what the codec holds.
        CorruptionError: a row is not what was written.

    Cost: a row read and written for each such client, and with a codec 4 n bytes more for each row of a pass.
    """
    for t in rounds:
        v = history.get(t)
        clients = [client for client in store.clients_of(t) if client not in staged]
        for start in range(0, len(clients), at_once):
            some = clients[start : start + at_once]
            k = len(some)
            old = store.rows_of(some)
            rows = old if store.codec == "f32" else [store.read(client) for client in some]
            new = store.stage_all(some, round=t)
            # One step from r to v, of length 1: h = r - v.
            arguments = total, rows, [v] * k, np.ones(k), -np.ones(k), old, [v] * k, new
            keys = rounding_keys(store, "a history that is folded", round, some)
            squares = exchange_whole(store, some, *arguments, out=total, keys=keys, reducer=reducer).here
            if not np.isfinite(squares).all():
                client = some[int(np.flatnonzero(~np.isfinite(squares))[0])]
                raise DivergedError(
                    f"client {client!r}: its correction of round {t} is past what a row of {store.codec} holds; x "
                    "stays, lower the rates or let the client depart"
                )


# The state of a server between two rounds, as one value: a round makes the next one, or leaves it alone.


Vector = npt.NDArray[Any]

ON_HOST = ("counter/", "population/", "norms/")
"""Names of vectors that lie in host memory on whatever device the others do."""
OF_MODEL = ("x", "ahead", "x_prev", "past")
"""Names, up to a slash, of vectors with an element for each of the model's, float buffers too: others of the model's
length have its parameters alone."""


class Snapshot(NamedTuple):
    """All but the rows, which are the store's. None of its arrays is changed later, except ``total`` and ``momentum``,
    whose memory the round after next uses again.

    Attributes:
        round_number: rounds finished.
        x: float32[n], the model.
        ahead: float32[n], what clients are sent in the place of x by methods that look ahead; else None.
        x_prev: float32[n], x_{t-1}; x_{-1} = x_0.
        past: x by round, of the rounds whose late replies still count.
        starts: the round in which each client's last counted reply started, by client, of those rounds.
        momentum: float32[n_parameters], v of the last round, which is g in the papers.
        total: float64[n_parameters], T; None where the method keeps none.
        exact_total: T as integers, where sums are exact: ``total`` is then what it reads as. Their memory likewise.
        moments: the optimiser's, float32[n_parameters] each.
        history: v[t] while rows refer to it, where the method keeps them.
        counters: the integer counters by name.
        population: the clients' shares and arrivals.
        norms: of the replies heard lately, where a limit asks for them, and what they claimed of examples and steps.
        gamma: the last one, for a round without clients.
        transactions: rounds finished, arrivals, departures, resizings, changes of options and warm starts.
        changed: the options that were changed since the last round, as JSON holds them.
        audited: the digest of the last round's document; None where there is none.
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
    gamma: float = 0.0
    ahead: F32 | None = None
    transactions: int = 0
    exact_total: ExactSum | None = None
    changed: Mapping[str, Any] = {}
    audited: str | None = None

    @property
    def sent(self) -> F32:
        """float32[n], the model that clients start from."""
        return self.x if self.ahead is None else self.ahead

    @classmethod
    def first(
        cls,
        x: F32,
        counters: Counters,
        n_parameters: int,
        algorithm: Algorithm,
        optimizer: Optimizer | None,
        population: Population,
        device: str = CPU,
        *,
        exact: bool = False,
    ) -> "Snapshot":
        """The snapshot of a new server; x lies on its device."""
        moments = optimizer.start(n_parameters) if optimizer is not None else ()
        return cls(
            x=x,
            x_prev=x,
            momentum=zeros(n_parameters, device=device),
            total=zeros(n_parameters, np.float64, device=device) if algorithm.keeps_total else None,
            moments=moments if device == CPU else tuple(copied(m, device=device) for m in moments),
            counters=counters,
            population=population,
            exact_total=ExactSum.zeros(n_parameters) if exact and algorithm.keeps_total else None,
        )

    def vectors(self, algorithm: Algorithm) -> dict[str, Vector]:
        """The arrays by name, except those that the method never reads."""
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
        named |= {f"moment/{i}": moment for i, moment in enumerate(self.moments)}
        named |= {f"past/{t}": x for t, x in self.past.items()}
        named |= {f"v/{t}": v for t, v in self.history.directions.items()}
        named |= self.population.vectors()
        named |= {f"counter/{name}": counter for name, counter in self.counters.items()}
        named |= {f"norms/{sum}": norms for sum, norms in self.norms.items()}
        return named

    def on_disk(self, store: ClientStore) -> "Snapshot":
        """The same snapshot after a commit to a disk: what rounds leave alone lies there now, and not in memory."""
        found = {t: store.vector(f"v/{t}") for t in self.history}
        directions = {t: v for t, v in found.items() if v is not None}
        history = replace(self.history, directions=directions)
        if device_of(self.x) != CPU:  # where rounds need them
            history = self.history
        return self._replace(history=history, population=self.population.on_disk(store))

    def numbers(self) -> dict[str, Any]:
        """The rest, as JSON holds it."""
        return {
            "round_number": self.round_number,
            "transactions": self.transactions,
            "gamma": self.gamma,
            "references": sorted(self.history.references.items()),
            "population": self.population.to_state(),
            "changed": dict(self.changed),
            "starts": list(self.starts.items()),
            "audited": self.audited,
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
        """The snapshot that ``vectors`` and ``numbers`` describe. The arrays are taken over."""

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
            gamma=float(numbers["gamma"]),
            ahead=vectors.get("ahead"),
            transactions=count_of(numbers),
            changed=dict(numbers.get("changed", {})),
            audited=numbers.get("audited"),
            starts={client: int(t) for client, t in numbers.get("starts", [])},
        )


def count_of(numbers: Mapping[str, Any]) -> int:
    """The count of transactions in a snapshot's ``numbers``; older folders have counted their rounds alone."""
    return int(numbers.get("transactions", numbers["round_number"]))


def moved(vectors: Mapping[str, Vector], device: str) -> dict[str, Vector]:
    """A server's vectors with those of a model's length on its device, as writable as they were."""
    if device == CPU:
        return dict(vectors)
    found = {}
    for name, vector in vectors.items():
        if not name.startswith(ON_HOST):
            there = copied(vector, device=device)
            if not vector.flags.writeable:
                freeze(there)
            vector = there
        found[name] = vector
    return found


def vectors_of(store: ClientStore) -> dict[str, Vector]:
    """A server's vectors out of a store that was opened: copies, except those that rounds never change."""
    vectors = {}
    for name in store.vector_names():
        vector = store.vector(name)
        assert vector is not None
        vectors[name] = vector if name.startswith(("v/", "population/")) else copied(vector)
        vectors[name].flags.writeable = name.partition("/")[0] in ("total", "momentum")
    return vectors


# A round's step before it counts: what it would make of the server, and what it came from.


class PreparedStep(NamedTuple):
    """A step of which nothing has changed yet: before ``State.accept`` a vote, noise or a measurement fits."""

    before: Snapshot
    result: Result
    cohort: Cohort
    after: Snapshot
    """What the server knows once the step counts."""
    step: Step | None = None
    """The coefficients of v and T'; None where nobody was heard and x stays."""
    v_square: float = 0.0
    """|v|^2."""
    gamma: float = 0.0
    """The step along v; 0 where x stays."""
    awaited: int = 0
    """How many clients were never heard, for which x waits."""
    most_steps: int | None = None
    """How many steps gamma has counted of a client that claimed more; None where it counted all of everybody's."""
    rounds: Sequence[int | None] = ()
    """Of the cohort's rows before the round, where the server keeps rows; None for a client without one."""


# gamma, how far the server's step goes.


_NONE: F64 = np.empty(0)


def counted_steps(
    settings: Settings, now: Snapshot, heard: UpdateBatch, lately: ClaimWindow
) -> tuple[F64, F64, int | None]:
    """The cohort's K_i, eta_i K_i, and the steps that the longest claims were counted with; None where all count.

    With ``CapSteps`` no K_i counts for more than so many times a median: that of the last 1,000 replies, or that
    of the cohort's draws where it is larger and they are 8 or more, or the first of all. So one draw of S adds at most
    ratio / S of a usual step to a mean of them, however many it claims. Where gamma does not depend on them, all count
    as they are.

    Args:
        lately: the K that counted lately, to which the cohort's are added.
    """
    steps, counts, eta_steps = heard.claims.steps, heard.claims.counts, heard.eta_steps
    ratio = settings.rules.steps_ratio
    if ratio is None or claimless_gamma(settings, now) is not None or not len(heard):
        return steps, eta_steps, None
    if lately.agree(steps):
        lately.add(steps)
        return steps, eta_steps, None
    most = lately.most(_NONE) if len(lately) else 0.0
    if counts.sum() >= FEW or not len(lately):
        most = max(most, ratio * _median(steps, counts))
    counted = np.minimum(steps, most)
    lately.add(counted)
    if (counted == steps).all():
        return steps, eta_steps, None
    return counted, np.where(steps > most, eta_steps / steps * most, eta_steps), int(most)


def step_length(settings: Settings, now: Snapshot, cohort: Cohort, said: float | None) -> float:
    """The server's rate; or what the method says; or the optimizer's rate; or 1 where models are averaged; or the mean
    of eta_i K_i over the draws of the cohort, in a round without any the last one.

    Args:
        said: gamma, as the method's step says it.
    """
    if said is not None and settings.server_lr is None:
        return float(said)
    if (gamma := claimless_gamma(settings, now)) is not None:
        return gamma
    if not cohort.S:
        return now.gamma
    counts = cohort.claims.counts
    return float((cohort.eta_steps * counts).sum() / counts.sum())


def claimless_gamma(settings: Settings, now: Snapshot) -> float | None:
    """gamma where no claim changes it: the server's rate, or the optimizer's, or 1 where models are averaged."""
    if settings.server_lr is not None:
        return rate_at(settings.server_lr, now.round_number)
    rate = getattr(settings.optimizer, "rate", None)
    if rate is not None and (gamma := rate(now.round_number)) is not None:
        return float(gamma)
    return 1.0 if settings.averages_models else None


def _median(values: F64, counts: F64) -> float:
    """The median of values that count so many times each, of an even number the lower of the two in the middle."""
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])


def farthest_gamma(settings: Settings, now: Snapshot) -> float:
    """The most that ``step_length`` can say in this round, whatever clients claim, unless the method says gamma."""
    if (gamma := claimless_gamma(settings, now)) is not None:
        return gamma
    lr, limits = rate_at(settings.lr, now.round_number), settings.asked
    return max(limits.max_client_lr or lr, now.gamma) * limits.max_steps


# The model's step at the end of a round: x', v, T' and the moments, out of the round's sums.


class ModelStep:
    """The arithmetic of a round's end: vectors of the next snapshot from those of now, element by element.

    It knows nothing of clients or rows, so that it may as well be done where the vectors, or a slice of them, lie.

    Attributes:
        vectors: the memory of x.
        directions: the memory of v where rounds to come still refer to it.
        spare_v, spare_total, spare_exact: float32[n_parameters], float64[n_parameters] (None where the method keeps no
            total) and n_parameters exact elements (None where it keeps no exact one), which the next step writes: who
            believes it gives those of before back.

    Cost: 4 n to 16 n bytes, allocated once and used again every round.
    """

    def __init__(self, settings: Settings, buffers: Buffers, reducer: Reducer) -> None:
        n, p, device = settings.layout.n, settings.layout.n_parameters, settings.device
        self._settings, self._buffers, self._reducer = settings, buffers, reducer
        self.vectors, self._moments = Recycled(n, device=device), Recycled(p, most=2, device=device)
        self.directions = Recycled(p, device=device)
        self.spare_v: F32 = empty(p, device=device)
        self.spare_total: F64 | None = empty(p, np.float64, device=device) if settings.algorithm.keeps_total else None
        self.spare_exact = ExactSum.empty(p) if settings.is_exact and settings.algorithm.keeps_total else None
        self._buffer_v: F32 = empty(n - p, device=device)

    def take(
        self, now: Snapshot, result: Result, step: Step, gamma: float, heard: UpdateBatch
    ) -> tuple[dict[str, Any], float]:
        """Take the step; nothing of now changes.

        Args:
            gamma: 0 where x stays.
            heard: the cohort, for the message.

        Returns:
            The fields of the next snapshot that are new, and |v|^2.

        Raises:
            DivergedError: x would become infinite or NaN.
        """
        p, optimizer = self._settings.layout.n_parameters, self._settings.optimizer
        x = self.vectors.take()  # never in place: a client may still train on the x of this round
        room = self._reducer.room(p, 2)
        squares = kernels.server_step(
            result.A,
            now.total,
            now.x[:p],
            v_of=step.v,
            total_of=step.T,
            gamma=gamma,
            momentum=now.momentum if step.v.g or step.T.g else None,
            control=result.B,
            v=self.spare_v,
            total_out=self.spare_total,
            x_out=x[:p],
            partials=room,
        )
        x_square = squares[1]
        if self.spare_exact is not None:
            self._follow(now, result, step.T, self.spare_exact)
        moments = now.moments
        if optimizer is not None and gamma:
            moments = tuple(self._moments.take() for _ in now.moments)
            x_square = optimizer.turn(
                self.spare_v, now.moments, now.x[:p], gamma=gamma, moments_out=moments, x_out=x[:p]
            )
        if p < len(x):
            x_square += self._average_buffers(now, x, result)
            self._buffers.clip(x)
        ahead = now.ahead
        if gamma:
            ahead = self._ahead(now, x, step.lookahead) if step.lookahead else None
        if ahead is not None:
            x_square += kernels.squared_norms([ahead])[0]
        v_square = float(self._reducer.add(Squares(np.array(squares), room))[0][0])
        past = self._past_dtype(x if ahead is None else ahead) if gamma else None
        if not self._reducer.agree(math.isfinite(x_square) and past is None):
            raise DivergedError(
                f"round {now.round_number}: the step gamma = {gamma:g} along v, |v| = {v_square**0.5:g}, would make "
                f"{past or 'x'} infinite or NaN; x stays, lower the rates{heard.longest()}"
            )
        freeze(x)
        made: dict[str, Any] = {"x": x if gamma else now.x, "ahead": ahead, "moments": moments}
        kept = {"momentum": self.spare_v, "total": self.spare_total, "exact_total": self.spare_exact}
        return made | kept, v_square

    def _past_dtype(self, x: F32) -> str | None:
        """The name of a tensor that clients could not be sent, for a number would become infinite in its dtype."""
        sent = as_sent(self._settings.layout, x)
        return None if sent is x or kernels.all_finite([sent])[0] else first_not_finite(sent, self._settings.layout)

    def _follow(self, now: Snapshot, result: Result, form: Linear, to: ExactSum) -> None:
        """T' as integers, and what it reads as.

        Raises:
            DivergedError: it would leave an exact sum's range.
            AlgorithmError: the method's coefficients are not whole.
        """
        if not is_whole_sum(form):
            raise AlgorithmError(
                f"{self._settings.algorithm}: expected a total with whole coefficients, got {form}: leave out "
                'accumulator="exact"'
            )
        assert result.exact is not None
        A, B = result.exact
        given = [(now.exact_total, form.T), (A, form.A), (B, form.B), (self.spare_v, form.v)]
        terms = [(term, int(c)) for term, c in given if term is not None and c]
        if kernels.combine_exact([term for term, _ in terms], [c for _, c in terms], to) is None:
            raise DivergedError(
                f"round {now.round_number}: T would leave the range of exact sums, 2^52; lower the rates"
            )
        kernels.read_exact(to, self.spare_total)

    def _ahead(self, now: Snapshot, x: F32, lookahead: float) -> F32:
        """x' + lookahead (x' - x) of the parameters, and the buffers of x'."""
        p, ahead = self._settings.layout.n_parameters, copied(x)
        kernels.combine([x[:p], now.x[:p]], [1 + lookahead, -lookahead], ahead[:p])
        freeze(ahead)
        return ahead

    def _average_buffers(self, now: Snapshot, x: F32, result: Result) -> float:
        """The cohort's mean of the float buffers into the tail of x; returns its squared norm."""
        p = self._settings.layout.n_parameters
        _, square = kernels.server_step(
            result.buffers,
            None,
            now.x[p:],
            v_of=Linear(A=1 / result.buffer_weight if result.buffer_weight > 0 else 0.0),
            gamma=1.0,
            v=self._buffer_v,
            total_out=None,
            x_out=x[p:],
        )
        return square
