"""The registry of clients: their ids and their numbers."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.arrays import core
from fedcore.errors import RangeError, ShapeError, UnknownClientError
from fedcore.validation import Represented, check_integer, first_members, is_integer, short_repr

__all__ = ["ClientId", "Clients", "Registry"]

ClientId: TypeAlias = int | str
"""The id of a client: an int in 0..2**64 - 1, or a str."""
Numbers = npt.NDArray[np.int64]

MOST = 2**62  # the maximum client count: with listed clients, numbers stay below 2^63
_BATCH = 4096  # ids that an iteration reads from the index in one call

# A random key: clients may choose their ids, and must not know which ids collide. No result depends on the key.
_KEY = os.urandom(16)


class Clients(Represented):
    """A read-only view of the registered clients; later changes of the registry are visible.

    Methods raise an UnknownClientError for a client that is not registered.
    """

    def __init__(self, index: "core.ClientIndex") -> None:
        self._index = index
        # Returns the number of a client that is exactly an int or a str, else -1. Stored here to save the lookup.
        self._find: Callable[[object], int] = index.number
        self._whole = 0  # see Registry

    @property
    def index(self) -> "core.ClientIndex":
        """The native index for lookups of whole cohorts. Only the registry changes it."""
        return self._index

    @property
    def capacity(self) -> int:
        """An upper bound of all numbers: one more than the highest number in use, and at least the count."""
        return self._index.capacity

    def _facts(self) -> dict[str, Any]:
        return {"count": len(self), "first": first_members(self)}

    def __len__(self) -> int:
        """The number of registered clients."""
        return len(self._index)

    def __contains__(self, client: object) -> bool:
        """Whether the client is registered; False for an object that cannot be an id."""
        try:
            return self._find(canonical(client)) >= 0
        except UnknownClientError:
            return False

    def __iter__(self) -> Iterator[ClientId]:
        """Iterate over the ids by their numbers. Clients that are added or removed meanwhile may be missed."""
        start = 0
        while start < self.capacity:
            yield from self._index.ids(start, start + _BATCH)
            start += _BATCH

    def __eq__(self, other: object) -> bool:
        """Whether both have the same clients and numbers, and will give new clients equal numbers."""
        if not isinstance(other, Clients):
            return NotImplemented
        return self.explicit() == other.explicit()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the content. A copy is a new registry, hashed with the key of its own process."""
        return Registry.restore, self.explicit()

    def explicit(self) -> tuple[int, list[tuple[int, ClientId | None]]]:
        """Return the content as a store keeps it, in ascending order: the arguments of ``Registry.restore``."""
        count, numbers, ids = self.columns()
        return count, list(zip(numbers.tolist(), ids, strict=True))

    def columns(self) -> tuple[int, Numbers, Sequence[ClientId | None]]:
        """Return the count, the numbers and the ids of ``explicit``: the arguments of ``Registry.of_columns``."""
        left, (numbers, ids) = self._index.left(), self._index.listed()
        return self._index.count, np.concatenate([left, numbers]), [*([None] * len(left)), *ids]

    def check(self, client: object) -> ClientId:
        """Return the client's id as a plain int or str."""
        if type(client) is int and 0 <= client < self._whole:
            return client
        if self._find(client) >= 0:
            return client  # type: ignore[return-value]  # an int or a str, since it was found
        known = canonical(client)
        if self._find(known) < 0:
            raise self._unknown(client)
        return known

    def number(self, client: object) -> int:
        """Return the client's number, 0 <= number < capacity. It stays the same until the client is removed.

        Cost: 60 ns for a client below the count if no such client was ever removed; otherwise 200 ns, or two or three
            cache misses.
        """
        if type(client) is int and 0 <= client < self._whole:
            return client
        number = self._find(client)
        if number < 0:
            number = self._find(canonical(client))
        if number < 0:
            raise self._unknown(client)
        return number

    def numbers(self, clients: Iterable[ClientId] | npt.NDArray[Any]) -> Numbers:
        """Return the numbers of several clients, int64[k], in the given order. Integer arrays are fastest."""
        listed = _listed(clients)
        if not isinstance(listed, list | tuple | np.ndarray):
            listed = list(listed)
        found: Numbers = self._index.numbers(listed)
        if np.minimum.reduce(found, initial=0) < 0:  # ids in another form, or unknown
            for i in np.flatnonzero(found < 0):
                found[i] = self.number(listed[i])
        return found

    def id_of(self, number: int) -> ClientId:
        """Return the id of the client with this number. Raise a RangeError if no client has it."""
        if is_integer(number, 0, self.capacity - 1):
            client: ClientId | None = self._index.id_of(int(number))
            if client is not None:
                return client
        raise RangeError(
            f"number={short_repr(number)}: no registered client has this number; numbers are below {self.capacity}"
        )

    def _unknown(self, client: object) -> UnknownClientError:
        whole = self._index.whole
        due = f"the ids are 0..{whole - 1}" if whole == self.capacity and whole > 0 else f"{len(self)} clients are"
        # Python reads no numbers of 5,000 digits; an id has at most 20.
        other: Any = (
            int(client) if isinstance(client, str) and len(client) <= 20 and client.isdecimal() else str(client)
        )
        hint = f"; {other!r} is registered, but an int and a str are different ids" if other in self else ""
        return UnknownClientError(f"client={short_repr(client)}: not registered ({due}){hint}")


class Registry(Clients):
    """The registered clients: each has an id, and a number that stays the same until the client is removed.

    An id is an int in 0 .. 2**64 - 1 or a str that UTF-8 can encode. 7 and "7" are different ids; NumPy integers count
    as ints. Numbers are dense, so that data of clients can be stored in arrays:

    - A count registers the ids 0 .. count - 1. Each id is its own number, and no list of them is kept.
    - Every other id gets the lowest free number >= count.
    - Removing a client frees its number. A number below the count stays reserved for its own client.

    Args:
        clients: a count, 0 .. 2**62, or the ids, each once, as an integer array or another iterable.

    Determinism: numbers depend only on the ids and their order. After removals they depend on the free numbers, not on
        the order of the removals: ``restore(*explicit())`` continues like the original.
    Cost: no memory for a count. 20 to 25 bytes for each other id and for each removed client of the count; for a str
        also its UTF-8 bytes and 4. Threads may share a registry.

    >>> registry = Registry(3)
    >>> registry.add("visitor"), registry.number("visitor"), registry.number(2)
    (3, 3, 2)
    >>> registry.remove(1), list(registry)
    (1, [0, 2, 'visitor'])
    """

    def __init__(self, clients: int | Iterable[ClientId] = 0) -> None:
        listed: Iterable[ClientId] = ()
        count = 0
        if is_integer(clients):
            count = check_integer("clients", clients, 0, MOST)
        elif isinstance(clients, Iterable) and not isinstance(clients, str | bytes):
            listed = clients
        else:
            raise RangeError(f"clients={short_repr(clients)}: must be a count or the ids")
        super().__init__(core.ClientIndex(_KEY, count))
        # Ids below this bound are their own numbers and need no lookup. It falls to 0 before the first of them is
        # removed and never rises, since a value that another thread read from the index may be out of date.
        self._whole = count
        self.add_all(listed)

    @classmethod
    def restore(cls, count: int, listed: Iterable[tuple[int, ClientId | None]]) -> "Registry":
        """Return a registry with this content and the same numbers; see ``explicit``.

        Args:
            count: the number of clients whose ids 0 .. count - 1 are their own numbers.
            listed: (number, id) of every other client, in any order, and (number, None) for each of 0 .. count - 1 that
                is not registered. A client of the count may be listed with its own number.
        """
        pairs = list(listed)
        for number, _ in pairs:
            check_integer("listed", number, 0, 2**63 - 1)
        numbers = np.array([number for number, _ in pairs], np.int64)
        return cls.of_columns(count, numbers, [client for _, client in pairs])

    @classmethod
    def of_columns(cls, count: int, numbers: Numbers, ids: Sequence[ClientId | None]) -> "Registry":
        """Return the registry of ``restore`` from arrays of the numbers and the ids."""
        registry = cls(count)
        if numbers.min(initial=0) < 0:
            raise RangeError(f"listed: number {numbers.min()} is negative")
        if (np.diff(numbers) <= 0).any():
            order = np.argsort(numbers)
            numbers, ids = numbers[order], [ids[i] for i in order.tolist()]
        if (twice := numbers[1:][np.diff(numbers) == 0]).size:
            raise RangeError(f"listed: number {twice[0]} appears twice")
        counted = int(np.searchsorted(numbers, count))
        for number, client in zip(numbers[:counted].tolist(), ids, strict=False):
            if client is None:
                registry.remove(number)
            elif client != number:
                raise RangeError(f"listed: number {number} is reserved for client {number}, not {short_repr(client)}")
        registry.add_at(numbers[counted:], ids[counted:] if counted else ids)
        return registry

    def add(self, client: object) -> int:
        """Register a client, and return its number. Raise a RangeError if it is already registered."""
        number: int = self._index.add(canonical(client))
        if number < 0:
            raise RangeError(f"client={short_repr(client)}: already registered")
        return number

    def add_all(self, clients: Iterable[ClientId] | npt.NDArray[Any]) -> Numbers:
        """Register clients, and return their numbers, int64[k]. An error registers none of them."""
        numbers, twice = self._index.add_all(_listed(clients), canonical)
        if numbers is None:
            raise RangeError(f"clients: {short_repr(twice)} is already registered, or listed twice")
        return numbers

    def remove(self, client: object) -> int:
        """Remove a client, and return its former number, which is free now."""
        known = canonical(client)
        if isinstance(known, int) and known < self._whole:
            self._whole = 0
        number: int = self._index.remove(known)
        if number < 0:
            raise self._unknown(client)
        return number

    def put_back(self, number: int, client: ClientId) -> None:
        """Undo a ``remove`` that returned this number. Do nothing if the client is registered again."""
        if client not in self:
            self._place({number: client})

    def holders(self, numbers: Iterable[int]) -> dict[int, ClientId | None]:
        """Return the id of the client with each number; None for a free number."""
        return {number: self._index.id_of(number) for number in numbers}

    def reassign(self, holders: Mapping[int, ClientId | None]) -> None:
        """Assign these numbers to these clients; None frees a number. After an error the assignments are undefined."""
        for client in self.holders(holders).values():
            if client is not None:
                self.remove(client)
        self._place({number: client for number, client in holders.items() if client is not None})

    def _place(self, clients: Mapping[int, ClientId]) -> None:
        count = self._index.count
        for number in [number for number in clients if number < count]:
            if clients[number] != number or self._index.add(number) != number:
                raise RangeError(f"number={number}: reserved for client {number}, not {short_repr(clients[number])}")
        numbers = [number for number in clients if number >= count]
        self.add_at(np.array(numbers, np.int64), [clients[number] for number in numbers])

    def add_at(self, numbers: Numbers, clients: Sequence[object]) -> None:
        """Register clients with these numbers, each free and at least the count. An error may leave some registered."""
        ids: Any = clients if set(map(type, clients)) <= {int, str} else list(map(canonical, clients))
        placed = self._index.add_at(ids, numbers)
        if placed < len(ids):
            canonical(ids[placed])  # raises an error if it is not an id
            raise RangeError(
                f"listed: client {short_repr(ids[placed])} with number {numbers[placed]} is listed twice, or is an id "
                f"below the count {self._index.count}, which must be its own number"
            )


def canonical(client: object) -> ClientId:
    """Return a client id as a plain int or str."""
    if type(client) is str and client.isascii():  # the usual case
        return client
    if isinstance(client, str):
        text = str.__str__(client)  # a subclass may show something else
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UnknownClientError(f"client={short_repr(client)}: UTF-8 cannot encode it") from None
        return text
    if is_integer(client):
        known = index(client)
        if 0 <= known < 2**64:
            return known
    raise UnknownClientError(f"client={short_repr(client)}: must be an int in 0..2**64 - 1 or a str")


def _listed(clients: Iterable[ClientId] | npt.NDArray[Any]) -> Any:
    """Return uint64[k] for an integer array, a list for other arrays, and any other argument unchanged."""
    if not isinstance(clients, np.ndarray):
        return clients
    if clients.ndim != 1:
        raise ShapeError(f"clients: must be a vector of ids, not {clients.dtype}{list(clients.shape)}")
    if clients.dtype.kind not in "iu":
        return list(clients)
    if clients.dtype.kind == "i" and clients.size and clients.min() < 0:
        canonical(clients.min())  # raises an error
    return np.ascontiguousarray(clients, np.uint64)
