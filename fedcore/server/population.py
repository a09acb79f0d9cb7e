"""The clients as the objective sees them: their shares p^k of all examples, and when they came."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.clients import ClientId, Registry
from fedcore.errors import RangeError, UnknownClientError
from fedcore.store import ClientStore
from fedcore.typing import F64

Column = npt.NDArray[np.int64]
Sizes = Mapping[ClientId, int] | Sequence[int]

MOST = 2**53
"""Examples of one client, up to which a float64 holds the number as it is."""
_START = -1
_UNUSED = np.iinfo(np.int64).max  # a number that no client has


@dataclass(frozen=True)
class Population:
    """The registered sizes n_k, and the rounds of arrival, by the clients' numbers in the registry.

    A population never changes: who comes or goes makes the next one, at the cost of a copy of its columns. A round
    changes none of them, so that a commit writes them no second time. A column is int64[2, m]: numbers that ascend,
    and what belongs to them; what is behind the last is unused.

    Attributes:
        sizes: n_k of the clients in the objective; None where the server was told none.
        arrived: the round in which a client came that was not there from the start; None where all were.
        included: n_k of those that have departed and whose shares the objective keeps.
        total: n, the sum of the sizes in the objective.
    """

    sizes: Column | None = None
    arrived: Column | None = None
    included: Mapping[ClientId, int] = field(default_factory=dict)
    total: int = 0

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
        return self.sizes is not None

    def listed(self) -> npt.NDArray[np.int64] | None:
        """The clients' sizes, the smallest first; None where they have none."""
        return None if self.sizes is None else np.sort(self.sizes[1, self.sizes[0] != _UNUSED])

    def with_clients(
        self, numbers: Sequence[int], clients: Sequence[ClientId], sizes: Sequence[int] | None, round: int | None
    ) -> "Population":
        """The population after clients came, in that round (None: they were there from the start).

        One whose share the objective has kept comes back to it: it is no newcomer.

        Args:
            numbers: in the registry, of ``clients`` in their order.
            sizes: their n_k; None where the clients have no sizes.
        """
        after = self
        if round is not None:
            new = [number for number, client in zip(numbers, clients, strict=True) if client not in self.included]
            after = replace(after, arrived=_with(self.arrived, new, [round] * len(new)))
        if sizes is None:
            return after
        kept = dict(self.included)
        total = self.total + sum(sizes) - sum(kept.pop(client, 0) for client in clients)
        return replace(after, sizes=_with(self.sizes, numbers, sizes), included=kept, total=total)

    def without_client(self, number: int, client: ClientId, *, from_objective: bool) -> "Population":
        """The population after a client went; the shares of the others grow if the objective forgets it."""
        size = 0 if self.sizes is None else int(_of(self.sizes, np.array([number]), 0)[0])
        sizes, arrived = _without(self.sizes, number), _without(self.arrived, number)
        if from_objective or not size:
            return Population(sizes, arrived, self.included, self.total - size)
        return Population(sizes, arrived, {**self.included, client: size}, self.total)

    def with_sizes(self, registry: Registry, client_sizes: Mapping[ClientId, int]) -> "Population":
        """The population after some clients' numbers of examples have changed.

        Raises:
            RangeError: the clients have no sizes, or one is no integer in 1..2^53.
            UnknownClientError: one is for a client that is not registered.
        """
        clients, sizes = _listed(registry, client_sizes)
        if self.sizes is None:
            raise RangeError("client_sizes: expected clients that have sizes, got a server that was told none")
        numbers = registry.numbers(clients)
        total = self.total + sum(sizes) - int(_of(self.sizes, numbers, 0).sum())
        left = self.sizes[:, ~np.isin(self.sizes[0], numbers)]
        return replace(self, sizes=_with(left, numbers.tolist(), sizes), total=total)

    def bound(self, registry: Registry, clients: Sequence[ClientId], claims: F64) -> F64:
        """The claims of clients about their examples, none of them more than n_k where that is known; float64[k]."""
        if self.sizes is None:
            return claims
        return np.minimum(claims, _of(self.sizes, registry.numbers(clients), 0))

    def shares(self, registry: Registry, clients: Sequence[ClientId]) -> F64 | None:
        """p^k = n_k / n, float64[k]; None where no sizes are known."""
        if self.sizes is None:
            return None
        return _of(self.sizes, registry.numbers(clients), 0).astype(np.float64) / self.total

    def ages(self, registry: Registry, clients: Sequence[ClientId], round: int) -> F64 | None:
        """Rounds since each client's arrival (1 in its first), float64[k]; infinite for those of the start, or None for
        all of them."""
        if self.arrived is None:
            return None
        came = _of(self.arrived, registry.numbers(clients), _START)
        return np.where(came == _START, np.inf, round + 1 - came)

    def vectors(self) -> dict[str, Column]:
        """The columns by name, as a store keeps them."""
        columns = {"population/sizes": self.sizes, "population/arrived": self.arrived}
        return {name: column for name, column in columns.items() if column is not None}

    def on_disk(self, store: ClientStore) -> "Population":
        """The same population, its columns where the store has just committed them."""
        return replace(self, sizes=store.vector("population/sizes"), arrived=store.vector("population/arrived"))

    def to_state(self) -> dict[str, Any]:
        """The fields that are no columns, as JSON can hold them."""
        return {"included": list(self.included.items()), "total": self.total}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], vectors: Mapping[str, npt.NDArray[Any]], registry: Registry
    ) -> "Population":
        """The population that ``to_state`` and ``vectors`` described."""
        included = dict(map(tuple, state.get("included", [])))  # the first folders have none
        if "sizes" in state:  # and older ones list what are columns now
            sizes, arrived = (dict(map(tuple, state[name])) for name in ("sizes", "arrived"))
            n_k, came = (_with(None, registry.numbers(list(of)), of.values()) for of in (sizes, arrived))
            return cls(n_k, came, included, state["total"])
        return cls(vectors.get("population/sizes"), vectors.get("population/arrived"), included, state["total"])


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
    return whole(f"client_sizes[{client!r}]", size, 1, MOST)


def _of(column: Column, numbers: npt.NDArray[np.int64], absent: int) -> npt.NDArray[np.int64]:
    """The values of these numbers, or ``absent``."""
    places = np.searchsorted(column[0], numbers)  # below m, since every number is below _UNUSED, or m if none is unused
    places = np.minimum(places, column.shape[1] - 1)
    return np.where(column[0, places] == numbers, column[1, places], absent)


def _with(column: Column | None, numbers: Iterable[int], values: Iterable[int]) -> Column | None:
    """A copy with these new entries."""
    new = np.array([list(numbers), list(values)], np.int64)
    return _column(new if column is None else np.concatenate([column, new], axis=1))


def _without(column: Column | None, number: int) -> Column | None:
    """A copy without this number's entry."""
    return None if column is None else _column(column[:, column[0] != number])


def _column(entries: Column) -> Column | None:
    """Entries in their order, or None for none. Their place for more is a power of two, since a store has a file for
    each size of vector."""
    entries = entries[:, entries[0] != _UNUSED]
    k = entries.shape[1]
    column = np.full((2, 1 << max(6, (k - 1).bit_length())), _UNUSED, np.int64)
    column[:, :k] = entries[:, np.argsort(entries[0])]
    return column if k else None
