"""The messages of masked sums: fixed fields after a header, which every reader checks."""

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fedcore.errors import ArrayError
from fedcore.secure.primitives import HASH, KEY, PRIME, SEALED, SHARE, SIGNATURE, U64, digest

FAMILY = b"fedcore secure "
MAGIC = FAMILY + b"2"
"""The protocol and its version. Version 1 did not bind what is summed."""
SESSION = 16
"""The bytes of a session's random name."""
MOST_CLIENTS = 1 << 20
OPEN, ROSTER, INBOX, SURVIVORS, SIGNATURES = 1, 2, 3, 4, 5
"""The server's messages, one for each phase; ``SIGNATURES`` only if clients have identities."""
KEYS, SHARES, MASKED, SIGNED, OPENED = 17, 18, 19, 20, 21
"""The clients' answers. The last is that to ``SIGNATURES`` or, without identities, to ``SURVIVORS``."""
NAMES = {
    **{OPEN: "open", ROSTER: "roster", INBOX: "inbox", SURVIVORS: "survivors", SIGNATURES: "signatures"},
    **{KEYS: "keys", SHARES: "shares", MASKED: "masked", SIGNED: "signed", OPENED: "opened"},
}
HEADER = struct.Struct(f"<{len(MAGIC)}s{SESSION}sB7x")  # 40 bytes, so that words are aligned
NUMBER = struct.Struct("<I")
ADVERTISED = struct.Struct(f"<{KEY}s{KEY}s{KEY}s{SIGNATURE}s")
MEMBER = struct.Struct(f"<I{KEY}s{KEY}s{KEY}s{SIGNATURE}s")
VOUCHED = struct.Struct(f"<I{SIGNATURE}s")
DEALT = struct.Struct(f"<I{HASH}s{HASH}s{SEALED}s")
SHOWN = struct.Struct(f"<IB{SHARE}s")
ENTRIES = {ROSTER: MEMBER, SHARES: DEALT, INBOX: DEALT, SURVIVORS: NUMBER, SIGNATURES: VOUCHED, OPENED: SHOWN}
"""The fields of a client's entry, of which the first is its index."""


class Opening(NamedTuple):
    """The body of ``OPEN``; ``number`` is the client's index."""

    number: int
    clients: int
    min_clients: int
    is_signed: bool
    encoding: Mapping[str, Any]


class PublicKeys(NamedTuple):
    """A client's two public keys, its identity, and the identity's signature of both; zeros without identities."""

    sealing: bytes
    masking: bytes
    identity: bytes = bytes(KEY)
    signature: bytes = bytes(SIGNATURE)


class Dealt(NamedTuple):
    """The two shares for one holder: their digests, and the shares encrypted for the holder."""

    seed_digest: bytes
    key_digest: bytes
    sealed: bytes


def header(kind: int, session: bytes) -> bytes:
    """Return the first bytes of a message."""
    return HEADER.pack(MAGIC, session, kind)


def read_header(message: Any, expected: Sequence[int], session: bytes | None) -> tuple[int, bytes, memoryview]:
    """Return the kind, the session and the body of a message.

    Raises:
        ArrayError: the bytes are no message, or the message is of another kind or session.
    """
    try:
        data = memoryview(message).cast("B")
    except TypeError:
        raise ArrayError(f"message: expected bytes, got {type(message).__name__}") from None
    if len(data) < HEADER.size or data[: len(FAMILY)] != FAMILY:
        raise ArrayError(f"message: these {len(data)} bytes are no message of this protocol")
    if data[: len(MAGIC)] != MAGIC:
        raise ArrayError("message: it has another version of the protocol; install the same fedcore on both sides")
    _, found, kind = HEADER.unpack(data[: HEADER.size])
    if kind not in expected:
        wanted = " or ".join(NAMES[one] for one in expected) or "no further message"
        raise ArrayError(f"message: expected {wanted}, got {NAMES.get(kind, f'kind {kind}')}")
    if session is not None and found != session:
        raise ArrayError("message: it belongs to another session")
    return kind, found, data[HEADER.size :]


def _require_size(name: str, body: memoryview, size: int) -> None:
    if len(body) != size:
        raise ArrayError(f"{name}: expected {size} bytes after the header, got {len(body)}")


def write(kind: int, session: bytes, entries: Mapping[int, Sequence[Any]], first: bytes = b"") -> bytes:
    """Return a message with an entry for each client.

    ``ROSTER`` has the keys of a client's group, itself included, after the threshold; ``SHARES`` a client's shares for
    its group, after the digest of its seed; ``INBOX`` a group's shares for a client; ``SURVIVORS`` the clients whose
    masked words arrived; ``SIGNATURES`` those of a client's group; and ``OPENED`` a holder's shares: (whether the
    client survived, so that the share is of its seed, the share).

    Args:
        entries: the fields of the entries by the clients' indices.
        first: the bytes before the entries.
    """
    return (
        header(kind, session)
        + first
        + b"".join(ENTRIES[kind].pack(index, *entries[index]) for index in sorted(entries))
    )


def read(kind: int, body: memoryview) -> dict[int, tuple[Any, ...]]:
    """Return the entries that fill a body by the clients' indices, which ascend."""
    fields, name = ENTRIES[kind], NAMES[kind]
    if len(body) % fields.size:
        raise ArrayError(f"{name}: {len(body)} bytes are no multiple of {fields.size}")
    entries = list(fields.iter_unpack(body))
    if any(after[0] <= before[0] for before, after in pairwise(entries)):
        raise ArrayError(f"{name}: the clients' indices must ascend")
    return {index: tuple(entry) for index, *entry in entries}


def write_open(session: bytes, opening: Opening) -> bytes:
    """Return the message that invites a client."""
    return header(OPEN, session) + json.dumps(opening._asdict()).encode()


def context_of(session: bytes, opening: Opening) -> bytes:
    """Return the digest of a whole invitation, except the client's index, which binds everything that follows."""
    return digest(json.dumps(opening._replace(number=0)._asdict(), sort_keys=True).encode(), session)


def read_open(body: memoryview) -> Opening:
    """Return the checked fields of an invitation, except those of the encoding."""
    try:
        opening = Opening(**json.loads(bytes(body)))
    except (ValueError, TypeError, RecursionError):
        raise ArrayError("open: the fields are malformed") from None
    numbers = opening.number, opening.clients, opening.min_clients
    types = [type(number) for number in numbers] + [type(opening.is_signed), type(opening.encoding)]
    if types != [int, int, int, bool, dict]:
        raise ArrayError("open: the fields have wrong types")
    if not (0 <= opening.number < opening.clients <= MOST_CLIENTS and 2 <= opening.min_clients <= opening.clients):
        raise ArrayError("open: number or min_clients is out of range")
    return opening


def read_keys(body: memoryview) -> PublicKeys:
    """Return advertised keys; whether a key is valid shows when it is used."""
    _require_size("keys", body, ADVERTISED.size)
    return PublicKeys(*ADVERTISED.unpack(body))


def read_roster(body: memoryview) -> tuple[int, dict[int, PublicKeys]]:
    """Return the threshold and the group's keys by index."""
    if len(body) < NUMBER.size:
        raise ArrayError("roster: the threshold is missing")
    (threshold,) = NUMBER.unpack(body[: NUMBER.size])
    return threshold, {index: PublicKeys(*keys) for index, keys in read(ROSTER, body[NUMBER.size :]).items()}


def read_shares(body: memoryview) -> tuple[bytes, dict[int, Dealt]]:
    """Return the digest of a client's seed, and what it dealt to each holder."""
    if len(body) < HASH:
        raise ArrayError("shares: the digest is missing")
    return bytes(body[:HASH]), read_inbox(body[HASH:])


def read_inbox(body: memoryview) -> dict[int, Dealt]:
    """Return what each client dealt."""
    return {index: Dealt(*dealt) for index, dealt in read(SHARES, body).items()}


def write_masked(session: bytes, words: U64) -> bytes:
    """Return a client's masked words. Cost: 8 n bytes."""
    return b"".join([header(MASKED, session), words.data.cast("B")])


def read_masked(body: memoryview, n: int) -> U64:
    """Return the words, uint64[n], as a view of the message, or as a copy if they are not aligned in it."""
    _require_size("masked", body, 8 * n)
    return np.require(np.frombuffer(body, "<u8", n), requirements="A")


def read_opened(body: memoryview) -> dict[int, tuple[bool, bytes]]:
    """Return the shares by client."""
    entries = read(OPENED, body)
    for is_seed, share in entries.values():
        if is_seed > 1 or int.from_bytes(share, "little") >= PRIME:
            raise ArrayError("opened: a share is out of range")
    return {index: (bool(is_seed), share) for index, (is_seed, share) in entries.items()}
