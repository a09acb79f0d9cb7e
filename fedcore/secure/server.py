"""The server's side of a masked sum: a state machine that collects the clients' answers phase by phase."""

import logging
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arrays import BufferPool, core, set_to_zero
from fedcore.errors import ArrayError, FedcoreError, RangeError, RoundError, UnknownClientError
from fedcore.secure import messages as wire
from fedcore.secure import primitives as crypto
from fedcore.secure.client import OF_SURVIVORS, are_signed
from fedcore.secure.encoding import Encoding
from fedcore.secure.messages import KEYS, MASKED, MOST_CLIENTS, OPENED, SHARES, SIGNED, Dealt, Opening, PublicKeys
from fedcore.server import Server
from fedcore.server.report import Rejected
from fedcore.store.registry import ClientId, canonical
from fedcore.totals import Totals, TotalsForm
from fedcore.validation import Represented, check_integer, listed, rejection_reason, short_repr

LOGGER = logging.getLogger("fedcore.secure")
ALWAYS_ALL = 32
"""The greatest number of clients of which each shares with all others by default."""
COLLUDING, DROPPING = 1 / 5, 3 / 10
"""The shares of clients that may collude with the server or drop out, for the size of groups."""
MOST_HELD = 4
"""The number of messages that are added in one pass, which reads and writes the sum once."""
SECURITY, CORRECTNESS = 2.0**-40, 2.0**-20
"""The probabilities, over the choice of groups, that colluding clients open an update, or that no sum opens."""


class SecureServer(Represented):
    """One masked sum: the server learns the sum of its clients' words modulo 2^64, and no single client's words.

    It is a state machine without a transport. In each phase, send ``messages``, pass the answers to
    ``receive``, and call ``close_phase``. A client that does not answer in a phase drops out.

    Args:
        clients: the ids of the invited clients.
        encoding: the form of the words, which clients receive with the first message: an ``Encoding`` of a server, or
            ``Totals.encoding()``.
        min_clients: the smallest number of clients in the sum. Clients that ask for more leave the sum.
        group: the number of clients, itself included, among which each client splits its secrets and with which it
            agrees on masks. Default: all up to 32 clients; above, the smallest number for 1/5 of colluding and 3/10 of
            dropping clients, if it is below the number of clients.
        identities: each client's public key, by id, if the clients have identities. A fifth phase then collects their
            signatures of the survivors, and all clients form one group. Default: none; see ``SecureClient``.

    Attributes:
        messages: the open phase's message for each client; empty at the end.
        total: int64[encoding.words], the sum, after the last phase; else None.
        survivors: the clients in the sum, once the third phase is closed.

    Raises:
        RangeError: fewer clients than ``min_clients``, or more than 2^20, or a group that is out of range.
        ArrayError: ``encoding`` is of another kind, or a client has no valid public key in ``identities``.

    Reference: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, the
        protocol against an honest-but-curious server and, with identities, that against an active one; groups of Bell
        et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020.
    Cost: 8 n bytes for the sum, which the process keeps for its next sum, and up to four masked messages of 8 n bytes.
        Unmasking costs 8 n bytes of AES for each
        survivor, and for each pair of a client that dropped out in the third phase and a survivor in its group.
    """

    def __init__(
        self,
        clients: Iterable[ClientId],
        encoding: Encoding | TotalsForm,
        *,
        min_clients: int = 2,
        group: int | None = None,
        identities: Mapping[Any, bytes] | None = None,
    ) -> None:
        self._ids = [canonical(client) for client in listed("clients", clients)]
        self._indices = {client: index for index, client in enumerate(self._ids)}
        count = len(self._ids)
        if len(self._indices) < count or not 2 <= count <= MOST_CLIENTS:
            raise RangeError(f"clients: must be 2 to {MOST_CLIENTS} different ids, got {count}")
        self._min_clients = check_integer("min_clients", min_clients, 2, count)
        if not isinstance(encoding, Encoding | TotalsForm):
            raise ArrayError(f"encoding: expected Encoding.of(server) or totals.encoding(), got {encoding!r:.200}")
        if count > encoding.clients:
            raise RangeError(f"clients: {count} ids, but the encoding is for {encoding.clients}; pass as many to it")
        if self._min_clients < encoding.min_clients:
            raise RangeError(f"min_clients={min_clients}: must be {encoding.min_clients} or more, as the noise assumes")
        self._group_size = None if group is None else check_integer("group", group, 2, count)
        if identities is not None and group not in (None, count):
            raise RangeError(f"group={group}: with identities, all clients form one group; leave group out")
        self._identities = dict[ClientId, bytes]()
        known = identities if isinstance(identities, Mapping) else {}
        for client in self._ids if identities is not None else ():
            self._identities[client] = crypto.public_identity(f"identities[{client!r}]", known.get(client))
        self._phases = (KEYS, SHARES, MASKED, OPENED) if identities is None else (KEYS, SHARES, MASKED, SIGNED, OPENED)
        self.total: npt.NDArray[np.int64] | None = None
        self.survivors: tuple[ClientId, ...] = ()
        self.encoding, self._phase = encoding, 0
        self._session = secrets.token_bytes(wire.SESSION)
        opening = Opening(0, count, self._min_clients, identities is not None, encoding.to_state())
        self._context = wire.context_of(self._session, opening)  # later with the roster; see ``SecureClient``
        self._rejected = Rejected()
        self._faulty: set[int] = set()
        self._probe = crypto.new_secret()  # the key with which advertised keys are tried
        self._threshold = 0
        self._keys: dict[int, PublicKeys] = {}
        self._known: set[bytes] = set()  # all advertised keys
        self._groups: dict[int, list[int]] = {}
        self._dealt: dict[int, tuple[bytes, dict[int, Dealt]]] = {}  # the seed's digest and the shares
        self._sum: crypto.U64 = np.empty(0, np.uint64)  # allocated for the first masked words
        self._held: list[crypto.U64] = []  # masked words that are not in the sum yet
        self._summed: set[int] = set()
        self._survivors, self._signatures = b"", dict[int, bytes]()
        self._shown: dict[int, dict[int, tuple[bool, bytes]]] = {}  # by holder
        self.messages: dict[ClientId, bytes] = {}
        self._send({i: wire.write_open(self._session, opening._replace(number=i)) for i in range(count)})

    @property
    def phase(self) -> str:
        """The answers that the open phase collects: "keys", "shares", "masked", "signed" or "opened"; else "closed"."""
        return "closed" if self._kind is None else wire.NAMES[self._kind]

    @property
    def _kind(self) -> int | None:
        return self._phases[self._phase] if self._phase < len(self._phases) else None

    @property
    def rejected(self) -> tuple[tuple[ClientId, str], ...]:
        """(client, reason) of rejected messages: the first one of each client, and up to 1,000 others."""
        return tuple(self._rejected)

    @property
    def named(self) -> tuple[ClientId, ...]:
        """The clients that broke the protocol, for the next sum to leave out.

        They sent a malformed answer and did not correct it, or dealt shares of a wrong secret or shares that most
        holders could not open. A share that is missing does not tell which of two clients is at fault.
        """
        return tuple(self._ids[index] for index in sorted(self._faulty))

    @property
    def waiting_for(self) -> tuple[ClientId, ...]:
        """The clients whose answers of the open phase are missing."""
        answered = self._answered
        return tuple(client for client in self.messages if self._indices[client] not in answered)

    def receive(self, client: ClientId, message: Any) -> bool:
        """Read a client's answer.

        A malformed answer is rejected and listed; the client may send another until the phase is closed. The server
        cannot see whether masked words are wrong.

        Args:
            client: the sender, which the transport has authenticated.
            message: the bytes.

        Returns:
            Whether the answer is accepted.

        Raises:
            UnknownClientError: the client was not invited.

        Cost: for masked words, reads 8 n bytes; four messages of ``bytes`` are added to the sum in one pass.
        """
        index = self._indices.get(canonical(client))
        if index is None:
            raise UnknownClientError(f"client={short_repr(client)}: it was not invited to this sum")
        is_read = False
        try:
            if self._ids[index] not in self.messages:
                raise RoundError(f"message: the client is not part of the phase {self.phase!r}")
            _, _, body = wire.read_header(message, self._phases[self._phase : self._phase + 1], self._session)
            if index in self._answered:
                raise RoundError("message: only the first answer of a phase counts")
            readers = {KEYS: self._read_keys, SHARES: self._read_shares, MASKED: self._read_masked}
            readers |= {SIGNED: self._read_signed, OPENED: self._read_opened}
            is_read = True
            readers[self._phases[self._phase]](index, body)
            self._faulty.discard(index)
        except FedcoreError as error:
            if is_read:
                self._faulty.add(index)
            self._rejected.append((self._ids[index], rejection_reason(error)))
            return False
        return True

    def close_phase(self) -> None:
        """End the phase without the clients that did not answer; the next messages are in ``messages``.

        Raises:
            RoundError: no phase is open, or too few clients are left. The sum is then closed, and nothing opens.

        Cost: see the class; the last phase removes the masks.
        """
        kind = self._kind
        if kind is None:
            raise RoundError("close_phase: the sum is closed; create a new SecureServer for the next round")
        closes = {KEYS: self._send_rosters, SHARES: self._send_inboxes, MASKED: self._send_survivors}
        closes |= {SIGNED: self._send_signatures, OPENED: self._open_sum}
        self.messages = {}
        try:
            closes[kind]()
        except BaseException:
            self._phase, self.messages = len(self._phases), {}
            raise
        self._phase += 1

    def partial_sum(self, server: Any) -> Any:
        """Return the total for ``add_partial_sum`` of an open round of the server, or totals, that made the encoding.

        In a ``PartialSum`` each client is listed with an equal part of the examples and steps, and with the norm of the
        mean update. The server knows no others. Totals get a ``PartialTotals``.

        Raises:
            RoundError: the sum is not open.
            ArrayError: ``server`` is of another kind than the encoding's.
            RangeError: the total cannot be a sum of valid updates: a client sent wrong words, and the protocol hides
                which one.
        """
        if not issubclass(type(server), Totals if isinstance(self.encoding, TotalsForm) else Server):
            raise ArrayError(f"server: expected the Server or the Totals that made the encoding, got {type(server)}")
        if self.total is None:
            raise RoundError("partial_sum: the sum is not open; close all phases first")
        return self.encoding.partial_sum(server, self.total, self.survivors, self.rejected)

    def _send(self, messages: Mapping[int, bytes]) -> None:
        self.messages = {self._ids[index]: message for index, message in messages.items()}

    @property
    def _answered(self) -> Any:
        """The clients with an answer in the open phase."""
        answered: dict[int, Any] = {KEYS: self._keys, SHARES: self._dealt, MASKED: self._summed}
        answered |= {SIGNED: self._signatures, OPENED: self._shown}
        return () if self._kind is None else answered[self._kind]

    def _require_enough(self, what: str, count: int, needed: int | None = None) -> None:
        needed = self._min_clients if needed is None else needed
        if count < needed:
            raise RoundError(f"{what}: {count} clients are left, but the sum needs {needed}; open a new sum")

    # Phase 1: keys.

    def _read_keys(self, index: int, body: memoryview) -> None:
        keys = wire.read_keys(body)
        for key in keys[:2]:
            crypto.agree(self._probe, key, self._context, b"probe")  # raises for a key of low order
        if self._known & set(keys[:2]) or keys.sealing == keys.masking:
            raise ArrayError("keys: a key occurs twice")
        own = self._identities.get(self._ids[index])
        if own is not None and not (own == keys.identity and are_signed(keys, index, self._context)):
            raise ArrayError("keys: the client's identity did not sign them")
        self._known.update(keys[:2])
        self._keys[index] = keys

    def _send_rosters(self) -> None:
        members = list(self._keys)
        self._require_enough("keys", len(members))
        size = len(members) if self._identities else self._group_size or least_group(len(members))
        self._groups = choose_groups(members, size)
        size = len(self._groups[members[0]])
        self._threshold = 2 * size // 3 + 1 if size == len(members) else size // 2 + 1
        self._send({i: self._roster(i) for i in members})
        if self._identities:  # all have the same roster
            self._context = crypto.digest(self._roster(members[0])[wire.HEADER.size :], self._context)

    def _roster(self, index: int) -> bytes:
        group = {other: self._keys[other] for other in self._groups[index]}
        return wire.write(wire.ROSTER, self._session, group, wire.NUMBER.pack(self._threshold))

    # Phase 2: shares.

    def _read_shares(self, index: int, body: memoryview) -> None:
        seed_digest, dealt = wire.read_shares(body)
        if dealt.keys() != set(self._groups[index]):
            raise ArrayError("shares: must be for exactly the clients of the group")
        self._dealt[index] = seed_digest, dealt

    def _send_inboxes(self) -> None:
        self._require_enough("shares", len(self._dealt))
        self._require_groups("shares", self._dealt, self._dealt)
        self._send({i: self._inbox(i) for i in self._dealt})

    def _inbox(self, index: int) -> bytes:
        dealers = [other for other in self._groups[index] if other in self._dealt]
        dealt = {other: self._dealt[other][1][index] for other in dealers}
        return wire.write(wire.INBOX, self._session, dealt)

    def _require_groups(self, what: str, owners: Iterable[int], holders: Any) -> None:
        """Check that enough holders are left in the group of each owner of secrets."""
        fewest = min(sum(holder in holders for holder in self._groups[owner]) for owner in owners)
        self._require_enough(what, fewest, self._threshold)

    # Phase 3: masked words.

    def _read_masked(self, index: int, body: memoryview) -> None:
        words = wire.read_masked(body, self.encoding.words)
        if len(self._held) + 1 == MOST_HELD or not isinstance(body.obj, bytes):  # only bytes cannot change later
            self._add_held(words)
        else:
            self._held.append(words)
        self._summed.add(index)

    def _add_held(self, *more: crypto.U64) -> None:
        if not len(self._sum):
            self._sum = _memory(self.encoding.words).get().view(np.uint64)
            set_to_zero(self._sum)
        core.add_words(self._sum.view(np.int64), [words.view(np.int64) for words in (*self._held, *more)])
        self._held = []

    def _send_survivors(self) -> None:
        self._require_enough("masked", len(self._summed))
        self._add_held()
        self._require_groups("masked", self._dealt, self._summed)
        self._survivors = wire.write(wire.SURVIVORS, self._session, dict.fromkeys(self._summed, ()))
        self._send(dict.fromkeys(self._summed, self._survivors))
        self.survivors = tuple(self._ids[index] for index in sorted(self._summed))

    # With identities: signatures.

    def _read_signed(self, index: int, body: memoryview) -> None:
        signature, survivors = bytes(body), self._survivors[wire.HEADER.size :]
        if not crypto.is_signed(self._keys[index].identity, signature, OF_SURVIVORS, self._context, survivors):
            raise ArrayError("signed: not the client's signature of the survivors")
        self._signatures[index] = signature

    def _send_signatures(self) -> None:
        self._require_groups("signed", self._dealt, self._signatures)
        signatures = {index: (signature,) for index, signature in self._signatures.items()}
        self._send(dict.fromkeys(signatures, wire.write(wire.SIGNATURES, self._session, signatures)))

    # The last phase: opening.

    def _read_opened(self, index: int, body: memoryview) -> None:
        shown = wire.read_opened(body)
        for owner, (is_seed, share) in shown.items():
            if owner not in self._dealt or index not in self._dealt[owner][1]:
                raise ArrayError(f"opened: the client holds no share of client {owner}")
            if is_seed != (owner in self._summed):
                raise ArrayError(f"opened: the share of client {owner} is of the wrong secret")
            dealt = self._dealt[owner][1][index]
            if crypto.digest(share, self._context) != (dealt.seed_digest if is_seed else dealt.key_digest):
                raise ArrayError(f"opened: the share of client {owner} is not the one that it dealt")
        self._shown[index] = shown

    def _open_sum(self) -> None:
        weights: dict[tuple[int, ...], list[int]] = {}
        found, reasons = {}, []
        for owner in sorted(self._dealt):
            try:
                found[owner] = self._secret(owner, weights)
            except RoundError as error:
                reasons.append(f"{error}")
        if reasons:
            self._name_dealers()
            raise RoundError(f"opened: {'; '.join(reasons[:3])}; open a new sum")
        masks = []
        for owner, secret in found.items():
            if owner in self._summed:
                masks.append((crypto.self_mask(secret, self._context), True))
                continue
            for other in self._summed.intersection(self._groups[owner]):  # the survivor added the mask
                masks.append(crypto.pairwise_mask(secret, self._keys[other].masking, self._context, owner, other))
        total, self._sum = self._sum, self._sum[:0]
        crypto.add_masks(total, masks)
        self.total = total.view(np.int64)

    def _secret(self, owner: int, weights: dict[tuple[int, ...], list[int]]) -> bytes:
        """Return a survivor's seed, or the private key of a client that dropped out, from ``threshold`` shares."""
        shown = self._shown
        holders = tuple(holder for holder in self._groups[owner] if owner in shown.get(holder, ()))[: self._threshold]
        if len(holders) < self._threshold:
            raise RoundError(
                f"{len(holders)} clients showed a share of client {self._ids[owner]!r}, but the sum needs "
                f"{self._threshold}"
            )
        if holders not in weights:
            weights[holders] = crypto.lagrange(holders)
        secret = crypto.join({holder: shown[holder][owner][1] for holder in holders}, weights[holders])
        is_seed = owner in self._summed
        if secret is None or not (
            crypto.digest(secret, self._context) == self._dealt[owner][0]
            if is_seed
            else crypto.public_key(secret) == self._keys[owner].masking
        ):
            self._faulty.add(owner)
            raise RoundError(f"client {self._ids[owner]!r} dealt shares of a wrong secret")
        return secret

    def _name_dealers(self) -> None:
        """Name the clients whose shares most holders lack."""
        for owner in self._dealt:
            holders = [one for one in self._groups[owner] if one in self._shown and one != owner]
            if 2 * sum(owner not in self._shown[one] for one in holders) > len(holders) > 1:
                self._faulty.add(owner)

    def _facts(self) -> dict[str, Any]:
        return {"phase": self.phase, "clients": len(self._ids), "rejected": len(self._rejected)}


@lru_cache(maxsize=1)
def _memory(words: int) -> BufferPool:
    """Return the memory of sums of so many words: new pages cost as much as adding 20 messages."""
    return BufferPool(2 * words)


# The groups of Bell et al.: a random circle of clients, each grouped with its nearest on both sides.


def choose_groups(members: Sequence[int], size: int) -> dict[int, list[int]]:
    """Return each client's group of ``size`` clients with itself: all, or the nearest on a random circle.

    Membership is mutual. An even size that is not the number of clients is raised by one.
    """
    reach, count = size // 2, len(members)
    if 2 * reach + 1 >= count:
        return dict.fromkeys(members, sorted(members))
    circle, steps = list(members), range(-reach, reach + 1)
    secrets.SystemRandom().shuffle(circle)
    return {client: sorted(circle[(at + step) % count] for step in steps) for at, client in enumerate(circle)}


def least_group(count: int) -> int:
    """Return the smallest size of groups with which a sum of so many clients is secure and opens.

    For ``COLLUDING`` and ``DROPPING`` shares of the clients: with probability 1 - ``SECURITY``, no group has
    ``threshold`` colluding clients, and the others stay connected; with 1 - ``CORRECTNESS``, each group keeps
    ``threshold`` clients. Thresholds are just above half of the group.
    """
    colluding, dropping = math.ceil(COLLUDING * count), math.ceil(DROPPING * count)
    for size in range(3, count, 2) if count > ALWAYS_ALL else ():
        others, threshold = size - 1, size // 2 + 1
        opened = count * _tail(count - 1, colluding, others, threshold)
        apart = count**2 / 2 * _tail(count - 1, min(colluding + dropping, count - 1), others, others)
        stuck = count * _tail(count - 1, dropping, others, others - threshold + 1)
        if opened + apart <= SECURITY and stuck <= CORRECTNESS:
            return size
    return count


def _tail(count: int, marked: int, drawn: int, least: int) -> float:
    """Return the probability that at least ``least`` of ``drawn`` elements of ``count`` are among the marked ones."""

    def ways(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    low, high = max(least, drawn - (count - marked)), min(drawn, marked)
    all_ways = ways(count, drawn)
    return math.fsum(
        math.exp(ways(marked, k) + ways(count - marked, drawn - k) - all_ways) for k in range(low, high + 1)
    )
