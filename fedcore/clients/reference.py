"""The specification of the clients' native index, in plain Python.

Same names, arguments and results as in ``fedcore._core``, without its checks.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.typing import I64

U64 = npt.NDArray[np.uint64]
Id = int | str


class ClientIndex:
    """Numbers of clients: 0 .. count - 1 are their own while registered, others get the lowest free one >= count.

    Ids are exactly ints and strs; a number of -1 is none.
    """

    def __init__(self, key: bytes, count: int) -> None:
        self.count = count
        self._left: set[Id] = set()  # of the ids below count
        self._numbers: dict[Any, int] = {}  # of the others
        self._ids: list[Id | None] = []  # by number - count
        self._free: list[int] = []  # a heap; those that are taken, or >= capacity, do not count

    def __len__(self) -> int:
        return self.count - len(self._left) + len(self._numbers)

    @property
    def whole(self) -> int:
        """``count`` while none of those has left, else 0."""
        return 0 if self._left else self.count

    @property
    def capacity(self) -> int:
        """One past the highest number of those in ``listed``, and at least ``count``."""
        return self.count + len(self._ids)

    def number(self, client: object) -> int:
        """The client's number, or -1."""
        if type(client) is int and 0 <= client < self.count:
            return -1 if client in self._left else client
        return self._numbers.get(client, -1) if type(client) in (int, str) else -1

    def numbers(self, clients: Any) -> I64:
        """The same for many."""
        listed = clients.tolist() if isinstance(clients, np.ndarray) else clients
        return np.array([self.number(client) for client in listed], np.int64)

    def id_of(self, number: int) -> Id | None:
        """The client of a number, or None."""
        if number >= self.count:
            return self._ids[number - self.count] if number < self.capacity else None
        return None if number in self._left else number

    def ids(self, start: int, stop: int) -> list[Id]:
        """The clients of the numbers in [start, stop)."""
        found = map(self.id_of, range(start, min(stop, self.capacity)))
        return [client for client in found if client is not None]

    def listed(self) -> tuple[I64, list[Id]]:
        """Numbers and ids of those whose id is not below ``count``."""
        ids = self.ids(self.count, self.capacity)
        return self.numbers(ids), ids

    def left(self) -> I64:
        """The ids below ``count`` that are not registered."""
        return np.array(sorted(self._left), np.int64)

    def add(self, client: Id) -> int:
        """Register the client; its number, or -1 if it is registered already."""
        if self.number(client) >= 0:
            return -1
        if client in self._left:
            self._left.remove(client)
            return self.number(client)
        while self._free and not self._is_free(self._free[0]):
            heappop(self._free)
        number = heappop(self._free) if self._free and self._free[0] < self.capacity else self.capacity
        self._put(client, number)
        return number

    def add_all(self, clients: Any, canonical: Callable[[object], Id]) -> tuple[I64 | None, Id | None]:
        """All numbers and None; or None and the first client that is registered already, and nothing is changed."""
        added: list[Id] = []
        try:
            for client in clients.tolist() if isinstance(clients, np.ndarray) else clients:
                known = canonical(client)
                if self.add(known) < 0:
                    return None, known
                added.append(known)
            numbers = self.numbers(added)
            added.clear()
            return numbers, None
        finally:
            for client in added:
                self.remove(client)

    def add_at(self, clients: list[Id], numbers: I64) -> int:
        """Register clients under these numbers, each free and not below count; how many come before one refused.

        Refused are those that are registered already, and those of 0 .. count - 1.
        """
        for i, (client, number) in enumerate(zip(clients, numbers.tolist(), strict=True)):
            is_id = type(client) is str or (type(client) is int and 0 <= client < 2**64)
            if not is_id or self.number(client) >= 0 or client in self._left or not self._is_free(number):
                return i
            for between in range(self.capacity, number):
                heappush(self._free, between)
            self._put(client, number)
        return len(clients)

    def remove(self, client: object) -> int:
        """Forget the client; the number that it had, or -1."""
        number = self.number(client)
        if 0 <= number < self.count:
            self._left.add(number)
        elif number >= 0:
            heappush(self._free, number)
            del self._numbers[client]
            self._ids[number - self.count] = None
            while self._ids and self._ids[-1] is None:
                self._ids.pop()
        return number

    def _is_free(self, number: int) -> bool:
        return number >= self.capacity or (number >= self.count and self._ids[number - self.count] is None)

    def _put(self, client: Id, number: int) -> None:
        self._ids += [None] * (number + 1 - self.capacity)
        self._ids[number - self.count] = client
        self._numbers[client] = number


def id_words(ids: Sequence[int | str | None]) -> I64:
    """The word that stands for each stored id: an int itself, the digest of a text, 0 for None."""
    return np.array([_word(client) if isinstance(client, str) else client or 0 for client in ids], np.int64)


def _word(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
