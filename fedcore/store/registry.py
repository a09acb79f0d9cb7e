"""The registry of clients: which there are, and each one's number."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.arguments import is_whole, shown, whole
from fedcore.errors import RangeError, ShapeError, UnknownClientError
from fedcore.native import core
from fedcore.representation import Represented, first

__all__ = ["ClientId", "Registry"]

ClientId: TypeAlias = int | str
"""The id of a client: an int in 0..2**64 - 1, or a str."""
Numbers = npt.NDArray[np.int64]

MOST = 2**62  # clients that a count may register: with those that are listed, numbers stay below 2^63
_AT_ONCE = 4096  # ids that an iteration takes from the index in one call

# Ids may come from clients, who must not know which of them collide. Nothing that can be seen depends on the key.
_KEY = os.urandom(16)


class Registry(Represented):
    """The registered clients: their ids, and for each a number that stays until it leaves.

    An id is any int in 0 .. 2**64 - 1 or a str that UTF-8 can hold (no lone surrogates, as undecodable names of files
    have); 7 and "7" are two clients. NumPy's integers count as ints. The numbers are dense, so that what belongs to the
    clients can lie in arrays: a count registers the ids 0 .. count - 1, each its own number, and keeps no list of them;
    every other id gets the lowest free number >= count, and 0, 1, 2, ... in turn where the registry begins with a list.
    A client that leaves gives its number back, one of 0 .. count - 1 for its own return alone.

    Args:
        clients: a count, 0 .. 2**62, or the ids, each once: an integer array, or any iterable.

    Raises:
        RangeError: ``clients`` is neither, the count is out of range, or an id comes twice.
        UnknownClientError: an id is neither an int in 0 .. 2**64 - 1 nor a str that UTF-8 can hold.
        ShapeError: an array is not a vector.

    Determinism: numbers depend on the ids and their order alone. After departures they depend on which numbers are
        free, not on how that came about: ``restore(*explicit())`` goes on as the original does.
    Cost: nothing for a counted client; 20 to 25 bytes for an id, a str's UTF-8 and 4 more; 20 to 25 bytes for a counted
        client that has left. Threads may share one.

    >>> registry = Registry(3)
    >>> registry.add("visitor"), registry.number("visitor"), registry.number(2)
    (3, 3, 2)
    >>> registry.remove(1), list(registry)
    (1, [0, 2, 'visitor'])
    """

    def __init__(self, clients: int | Iterable[ClientId] = 0) -> None:
        listed: Iterable[ClientId] = ()
        count = 0
        if is_whole(clients):
            count = whole("clients", clients, 0, MOST)
        elif isinstance(clients, Iterable) and not isinstance(clients, str | bytes):
            listed = clients
        else:
            raise RangeError(f"clients: expected a count or the ids, got {shown(clients)}")
        self._index = core.ClientIndex(_KEY, count)
        # The number of a client that is exactly an int or a str, else -1; looked up here once, not in each call.
        self._find: Callable[[object], int] = self._index.number
        # The ids below it are registered, each its own number: nobody need look them up. It falls to 0 before the first
        # of them leaves, and rises no more: who sets it again by what the index said may be late.
        self._whole = count
        self.add_all(listed)

    @classmethod
    def restore(cls, count: int, listed: Iterable[tuple[int, ClientId | None]]) -> "Registry":
        """The registry of which ``explicit`` told this, with equal numbers.

        Args:
            count: the ids 0 .. count - 1 are their own numbers.
            listed: (number, id) of every other client, in any order; (number, None) for each of 0 .. count - 1 that is
                not registered. One that left and came back may stand there with its own number.

        Raises:
            RangeError, UnknownClientError: it contradicts itself.
        """
        pairs = list(listed)
        for number, _ in pairs:
            whole("listed", number, 0, 2**63 - 1)
        numbers = np.array([number for number, _ in pairs], np.int64)
        return cls.of_columns(count, numbers, [client for _, client in pairs])

    @classmethod
    def of_columns(cls, count: int, numbers: Numbers, ids: Sequence[ClientId | None]) -> "Registry":
        """``restore`` from the numbers and the ids of the entries.

        Raises:
            RangeError, UnknownClientError: they contradict each other.
        """
        registry = cls(count)
        if numbers.min(initial=0) < 0:
            raise RangeError(f"listed: expected numbers of 0 or more, got {numbers.min()}")
        if (np.diff(numbers) <= 0).any():
            order = np.argsort(numbers)
            numbers, ids = numbers[order], [ids[i] for i in order.tolist()]
        if (twice := numbers[1:][np.diff(numbers) == 0]).size:
            raise RangeError(f"listed: expected each number once, got {twice[0]} again")
        counted = int(np.searchsorted(numbers, count))
        for number, client in zip(numbers[:counted].tolist(), ids, strict=False):
            if client is None:
                registry.remove(number)
            elif client != number:
                raise RangeError(f"listed: expected number {number} for client {number} alone, got {shown(client)}")
        registry._add_at(numbers[counted:], ids[counted:] if counted else ids)
        return registry

    def explicit(self) -> tuple[int, list[tuple[int, ClientId | None]]]:
        """The content of an equal registry, as a store keeps it: the arguments of ``restore``, ascending."""
        count, numbers, ids = self.columns()
        return count, list(zip(numbers.tolist(), ids, strict=True))

    def columns(self) -> tuple[int, Numbers, Sequence[ClientId | None]]:
        """The count, and the numbers and the ids of the entries of ``explicit``: the arguments of ``of_columns``."""
        left, (numbers, ids) = self._index.left(), self._index.listed()
        return self._index.count, np.concatenate([left, numbers]), [*([None] * len(left)), *ids]

    @property
    def index(self) -> "core.ClientIndex":
        """The native index, which readers of whole cohorts look clients up in; it changes with the registry alone."""
        return self._index

    @property
    def capacity(self) -> int:
        """Every number is below it: it is one past the highest in use, and at least the count."""
        capacity: int = self._index.capacity
        return capacity

    def _facts(self) -> dict[str, Any]:
        return {"count": len(self), "first": first(self)}

    def __len__(self) -> int:
        """The number of registered clients."""
        return len(self._index)

    def __contains__(self, client: object) -> bool:
        """Tell whether the client is registered; False for what cannot be an id."""
        try:
            return self._find(canonical(client)) >= 0
        except UnknownClientError:
            return False

    def __iter__(self) -> Iterator[ClientId]:
        """The ids in the order of their numbers; of those that come or leave meanwhile some may be missed."""
        start = 0
        while start < self.capacity:
            yield from self._index.ids(start, start + _AT_ONCE)
            start += _AT_ONCE

    def __eq__(self, other: object) -> bool:
        """Tell whether the same clients have the same numbers, and numbers to come are equal as well."""
        if not isinstance(other, Registry):
            return NotImplemented
        return self.explicit() == other.explicit()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are restored registries, hashed under their own process's key."""
        return Registry.restore, self.explicit()

    def check(self, client: object) -> ClientId:
        """The id in its one form, a plain int or str.

        Raises:
            UnknownClientError: no such client is registered.
        """
        if type(client) is int and 0 <= client < self._whole:
            return client
        if self._find(client) >= 0:
            return client  # type: ignore[return-value]  # found as it is, so an int or a str
        known = canonical(client)
        if self._find(known) < 0:
            raise self._unknown(client)
        return known

    def number(self, client: object) -> int:
        """The client's number, 0 <= number < capacity; the same until the client is removed.

        Raises:
            UnknownClientError: no such client is registered.

        Cost: 60 ns for a counted client while none of those has left, 200 ns for another, or what its two or three
            cache misses take.
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
        """The numbers of many clients, int64[k] in their order; an integer array is the fastest, then a list.

        Raises:
            UnknownClientError: one of them is not registered.
            ShapeError: an array is not a vector.
        """
        listed = _listed(clients)
        if not isinstance(listed, list | tuple | np.ndarray):
            listed = list(listed)
        found: Numbers = self._index.numbers(listed)
        if np.minimum.reduce(found, initial=0) < 0:  # ids in another form, or of nobody
            for i in np.flatnonzero(found < 0):
                found[i] = self.number(listed[i])
        return found

    def id_of(self, number: int) -> ClientId:
        """The id of the client with that number.

        Raises:
            RangeError: it is no registered client's number.
        """
        if is_whole(number, 0, self.capacity - 1):
            client: ClientId | None = self._index.id_of(int(number))
            if client is not None:
                return client
        raise RangeError(f"number: expected one of a registered client, below {self.capacity}, got {shown(number)}")

    def add(self, client: object) -> int:
        """Register a client that arrives, and return its number.

        Raises:
            UnknownClientError: it is neither an int in 0 .. 2**64 - 1 nor a str that UTF-8 can hold.
            RangeError: it is registered already.
        """
        number: int = self._index.add(canonical(client))
        if number < 0:
            raise RangeError(f"client: expected a new id, got {shown(client)}, which is registered already")
        return number

    def add_all(self, clients: Iterable[ClientId] | npt.NDArray[Any]) -> Numbers:
        """Register many clients, each once, and return their numbers, int64[k]; or, if one is refused, none of them.

        Raises:
            UnknownClientError, RangeError: as ``add``.
            ShapeError: an array is not a vector.
        """
        numbers, twice = self._index.add_all(_listed(clients), canonical)
        if numbers is None:
            got = f"{shown(twice)}, which is registered already"
            raise RangeError(f"clients: expected new ids, each once, got {got}")
        return numbers

    def remove(self, client: object) -> int:
        """Forget a client that leaves, and return the number that it had, which is free now.

        Raises:
            UnknownClientError: no such client is registered.
        """
        known = canonical(client)
        if isinstance(known, int) and known < self._whole:
            self._whole = 0
        number: int = self._index.remove(known)
        if number < 0:
            raise self._unknown(client)
        return number

    def put_back(self, number: int, client: ClientId) -> None:
        """Undo ``remove``, which returned this number; nothing if the client is registered again.

        Raises:
            RangeError: somebody else has the number.
        """
        if client not in self:
            self._place({number: client})

    def holders(self, numbers: Iterable[int]) -> dict[int, ClientId | None]:
        """The id of each number's client; None for a number that nobody has."""
        return {number: self._index.id_of(number) for number in numbers}

    def reassign(self, holders: Mapping[int, ClientId | None]) -> None:
        """Give these numbers to these clients; None frees a number. After an error, who has them is not defined.

        Raises:
            RangeError, UnknownClientError: a client has another number already, or is no id.
        """
        for client in self.holders(holders).values():
            if client is not None:
                self.remove(client)
        self._place({number: client for number, client in holders.items() if client is not None})

    def _place(self, clients: Mapping[int, ClientId]) -> None:
        """Register clients under these numbers, which are free."""
        count = self._index.count
        for number in [number for number in clients if number < count]:
            if clients[number] != number or self._index.add(number) != number:
                raise RangeError(f"number: expected {number} for its own client, got {shown(clients[number])}")
        numbers = [number for number in clients if number >= count]
        self._add_at(np.array(numbers, np.int64), [clients[number] for number in numbers])

    def _add_at(self, numbers: Numbers, clients: Sequence[object]) -> None:
        """Register clients under these numbers, each free and not below the count, or (after an error) some of them."""
        ids: Any = clients if set(map(type, clients)) <= {int, str} else list(map(canonical, clients))
        placed = self._index.add_at(ids, numbers)
        if placed < len(ids):
            canonical(ids[placed])  # which refuses what is no id
            got = f"{numbers[placed]} for {shown(ids[placed])}"
            due = f"each client once, those below {self._index.count} in their place"
            raise RangeError(f"listed: expected {due}, got {got}")

    def _unknown(self, client: object) -> UnknownClientError:
        whole = self._index.whole
        due = f"0..{whole - 1}" if whole == self.capacity and whole > 0 else f"{len(self)} are registered"
        other: Any = int(client) if isinstance(client, str) and client.isdecimal() else str(client)
        hint = f": {other!r} is registered, but not {shown(client)}, which is of another type" if other in self else ""
        return UnknownClientError(f"client: expected a registered id ({due}), got {shown(client)}{hint}")


def canonical(client: object) -> ClientId:
    """A client id as a plain int or str.

    Raises:
        UnknownClientError: it is neither an int in 0..2**64 - 1 nor a str that UTF-8 can hold.
    """
    if type(client) is str and client.isascii():  # as most are
        return client
    if isinstance(client, str):
        text = str.__str__(client)  # the text itself, whatever its class shows instead
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                got = f"{shown(client)}, whose lone surrogates UTF-8 cannot hold"
                raise UnknownClientError(f"client: expected an int in 0..2**64 - 1 or a str, got {got}") from None
        return text
    if is_whole(client):
        known = index(client)
        if 0 <= known < 2**64:
            return known
    raise UnknownClientError(f"client: expected an int in 0..2**64 - 1 or a str, got {shown(client)}")


def _listed(clients: Iterable[ClientId] | npt.NDArray[Any]) -> Any:
    """uint64[k] of an array of integers; of another array a list; else ``clients`` itself."""
    if not isinstance(clients, np.ndarray):
        return clients
    if clients.ndim != 1:
        raise ShapeError(f"clients: expected a vector of ids, got {clients.dtype}{list(clients.shape)}")
    if clients.dtype.kind not in "iu":
        return list(clients)
    if clients.dtype.kind == "i" and clients.size and clients.min() < 0:
        canonical(clients.min())  # which refuses it
    return np.ascontiguousarray(clients, np.uint64)
