"""Which clients there are."""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from fedcore.errors import RangeError, UnknownClientError

ClientId: TypeAlias = int | str


class Registry:
    """The registered clients, and their ids in one form: any int in 0..2**64 - 1, or str.

    A count registers the ids 0..count - 1 and keeps no list of them.
    """

    def __init__(self, clients: int | Iterable[ClientId]) -> None:
        self._ids: range | dict[ClientId, None]
        if isinstance(clients, int | np.integer) and not isinstance(clients, bool):
            if clients < 1:
                raise RangeError(f"clients: expected a count >= 1, got {clients}")
            self._ids = range(int(clients))
        elif not isinstance(clients, Iterable):
            raise RangeError(f"clients: expected a count or the ids, got {clients!r}")
        else:
            ids = [canonical(client) for client in clients]
            self._ids = dict.fromkeys(ids)
            if not ids or len(self._ids) != len(ids):
                raise RangeError(f"clients: expected at least one id and each once, got {len(ids)} ids")

    def __len__(self) -> int:
        return len(self._ids)

    def check(self, client: object) -> ClientId:
        """The id in its one form.

        Raises:
            UnknownClientError: no such client is registered.
        """
        known = client if type(client) is int else canonical(client)
        if known not in self._ids:
            which = f"0..{len(self._ids) - 1}" if isinstance(self._ids, range) else f"{len(self._ids)} listed ids"
            raise UnknownClientError(f"client: expected a registered id ({which}), got {client!r}")
        return known


def canonical(client: object) -> ClientId:
    """A client id as a plain int or str.

    Raises:
        UnknownClientError: it is neither an int in 0..2**64 - 1 nor a str.
    """
    if isinstance(client, str):
        return str(client)
    if isinstance(client, int | np.integer) and not isinstance(client, bool) and 0 <= client < 2**64:
        return int(client)
    raise UnknownClientError(f"client: expected an int in 0..2**64 - 1 or a str, got {client!r}")
