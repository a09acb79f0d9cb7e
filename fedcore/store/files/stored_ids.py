"""Client ids as the index keeps them: SQLite's integers are signed."""

from typing import TypeAlias

from fedcore.clients.registry import ClientId

StoredId: TypeAlias = int | str | None
"""An int as a signed one of 64 bits, a str, or None for a number of a count whose client has left."""

_SIGN = 1 << 63


def stored(client: ClientId | None) -> StoredId:
    """An int in 0..2^64-1 as the signed one of the same 64 bits; anything else as it is."""
    return client - 2 * _SIGN if isinstance(client, int) and client >= _SIGN else client


def restored(client: StoredId) -> ClientId | None:
    """The id that ``stored`` was given."""
    return client + 2 * _SIGN if isinstance(client, int) and client < 0 else client
