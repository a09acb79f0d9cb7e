"""The clients as the objective sees them: their shares p^k of all examples, and when they came."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.clients import ClientId, Registry
from fedcore.errors import RangeError, UnknownClientError
from fedcore.store import ClientStore
from fedcore.typing import F64

Column = npt.NDArray[np.int64]
Numbers = Sequence[int] | Column
Runs = tuple[Column, ...]
Sizes = Mapping[ClientId, int] | Sequence[int]

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
            client_sizes: n_k by client id, or a list in the order of the ids; None where no method asks.
            registry: the clients.
            needed: whether the method cannot do without them, once there are clients.

        Raises:
            RangeError: a size is no integer in 1..2^53, or a client's is missing.
            UnknownClientError: a size is for a client that is not registered.
        """
        if client_sizes is None:
            if needed and len(registry):
                due = "n_k of every client, which the method's p^k = n_k / n needs"
                raise RangeError(f"client_sizes: expected {due}, got None")
            return cls()
        if len(client_sizes) != len(registry):
            raise RangeError(
                f"client_sizes: expected a size for each of {len(registry)} clients, got {len(client_sizes)}"
            )
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
        clients, sizes = _listed(registry, client_sizes)
        if not self.sizes:
            raise RangeError("client_sizes: expected clients that have sizes, got a server that was told none")
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


def arriving(
    clients: ClientId | Iterable[ClientId], client_sizes: int | Sizes | None
) -> tuple[list[ClientId], Sizes | None]:
    """The arguments of ``Server.arrive`` as a list of clients, not checked yet, and their sizes."""
    one = isinstance(clients, str | bytes) or not isinstance(clients, Iterable)
    listed: list[Any] = [clients] if one else list(clients)  # type: ignore[arg-type]  # ids are not looked at yet
    sizes: Any = [client_sizes] if one and isinstance(client_sizes, int | np.integer) else client_sizes
    return listed, sizes


def checked_sizes(clients: Sequence[ClientId], client_sizes: Sizes | None, *, sized: bool) -> list[int] | None:
    """The sizes of clients that arrive, in their order, or None where clients have none.

    Raises:
        RangeError: one is no integer in 1..2^53 where the others have theirs, or there are some where they have none.
        UnknownClientError: one is for somebody else.
    """
    if isinstance(client_sizes, Mapping):
        arriving = set(clients)
        if strangers := [client for client in client_sizes if client not in arriving]:
            raise UnknownClientError(f"client_sizes: expected those of the clients that arrive, got {strangers[0]!r}")
        given: Sequence[object] = [client_sizes.get(client) for client in clients]
    else:
        given = [None] * len(clients) if client_sizes is None else client_sizes
    if not isinstance(given, Sized):  # one number for many
        raise RangeError(f"client_sizes: expected a size for each of {len(clients)} clients, got {given!r}")
    if len(given) != len(clients):
        raise RangeError(f"client_sizes: expected a size for each of {len(clients)} clients, got {len(given)}")
    if sized:
        return [_size(client, size) for client, size in zip(clients, given, strict=True)]
    for client, size in zip(clients, given, strict=True):
        if size is not None:
            raise RangeError(f"client_sizes: expected None for client {client!r}, as for all others, got {size!r}")
    return None


def _listed(registry: Registry, client_sizes: Sizes) -> tuple[list[ClientId], list[int]]:
    """The clients and their sizes, in one order."""
    named = client_sizes if isinstance(client_sizes, Mapping) else dict(zip(registry, client_sizes, strict=True))
    if strangers := [client for client in named if client not in registry]:
        raise UnknownClientError(f"client_sizes: expected registered ids, got {strangers[0]!r}")
    return list(named), [_size(client, size) for client, size in named.items()]


def _size(client: ClientId, size: object) -> int:
    if type(size) is int and 1 <= size <= MOST:  # which saves the name of the argument
        return size
    return whole(f"client_sizes[{client!r}]", size, 1, MOST)


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
