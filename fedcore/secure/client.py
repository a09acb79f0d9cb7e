"""The client's side of a masked sum: a state machine that answers the server's messages."""

from collections.abc import Collection, Mapping
from typing import Any, Self

from fedcore.errors import ArrayError, CheckpointError, FedcoreError, RangeError, RoundError
from fedcore.secure import messages as wire
from fedcore.secure import primitives as crypto
from fedcore.secure.encoding import Encoding
from fedcore.secure.messages import INBOX, OPEN, ROSTER, SIGNATURES, SURVIVORS, Dealt, PublicKeys
from fedcore.validation import Represented, check_integer, check_number, listed

PHASES = (OPEN, ROSTER, INBOX, SURVIVORS, SIGNATURES)
OF_KEYS, OF_SURVIVORS = b"keys", b"survivors"
"""The purposes of signatures."""
FINE = 2.0**-24
"""The coarsest grid, in a client's ``max_norm``: the precision of float32."""


class SecureClient(Represented):
    """One client's part in one masked sum. Create a new object for each round.

    The client answers each kind of message once. It never shows shares of both secrets of a client, and shows none if
    fewer than ``min_clients`` clients are in the sum.

    Args:
        min_clients: the smallest number of clients whose sum the server may learn. The server must set this number or a
            larger one for all clients of the sum.
        identity: the 32 bytes of the client's Ed25519 private key, which lasts for many rounds. The client then takes
            part only with signed keys, and shows shares only if enough clients of its group signed the same survivors.
            Default: none; the client trusts the keys that the server sends.
        peers: with ``identity``, the public keys of the clients that may be in its group; see ``identity_of``.
        noise: the least noise z of the sum (``PrivateMean``) with which the client takes part. It needs ``identity``,
            since a server could invent the other clients and their noise. Default: 0; the client adds the noise that
            the server asks for, which may be none.
        max_norm: the largest limit on norms with which the client takes part. The grid of the sum must be as fine as
            2^-24 of it, so that no usual update is rounded to zero. Default: any.

    Raises:
        ArrayError, RangeError: an argument is not valid, such as a key of another length or in hexadecimal.

    Attributes:
        encoding: the server's ``Encoding``, or the ``TotalsForm`` of totals, once the client has answered the first
            message.

    >>> import numpy as np
    >>> from fedcore import Compute, Limits, Server
    >>> from fedcore.secure import Encoding, SecureServer
    >>> limits, exact = Limits(max_norm=10, max_examples=100), Compute(accumulator="exact")
    >>> server = Server(np.zeros(2, np.float32), "FedAvg", clients=3, lr=0.1, limits=limits, compute=exact)
    >>> secure = SecureServer(range(3), Encoding.of(server, clients=3))
    >>> clients = [SecureClient() for _ in range(3)]
    >>> while secure.messages:
    ...     for i, message in secure.messages.items():
    ...         words = None
    ...         if SecureClient.needs_words(message):
    ...             words = clients[i].encoding.encode(server.x, np.float32([i, 4]), steps=5, examples=30)
    ...         accepted = secure.receive(i, clients[i].answer(message, words))
    ...     secure.close_phase()
    >>> with server.open_round() as round:
    ...     _ = round.add_partial_sum(secure.partial_sum(server), "masked sum")
    >>> server.x
    array([1., 4.], dtype=float32)
    """

    def __init__(
        self,
        *,
        min_clients: int = 2,
        identity: bytes | None = None,
        peers: Collection[bytes] = (),
        noise: float = 0.0,
        max_norm: float | None = None,
    ) -> None:
        self.encoding: Any = None
        self._min_clients = check_integer("min_clients", min_clients, 2)
        self._identity = identity
        self._peers = {crypto.public_identity("peers", key) for key in listed("peers", peers)}
        self._noise = check_number("noise", noise, "[0, inf)")
        self._max_norm = None if max_norm is None else check_number("max_norm", max_norm, "(0, inf)")
        self._own_identity = None if identity is None else crypto.identity_of(identity)
        self._survivors = b""  # the list that the client signed
        self._session: bytes | None = None
        # The digest of all on which the clients agree: the invitation, and then their signed roster.
        self._context = b""
        self._answered = 0  # how many of PHASES
        self._index = self._clients = self._threshold = 0
        self._sealing = self._masking = self._seed = b""
        self._group: dict[int, PublicKeys] = {}
        self._held: dict[int, bytes] = {}  # the shares of seed and key of each client that dealt valid shares
        self._dealers: list[int] = []  # the clients of the group with which this client's words are masked

    @staticmethod
    def needs_words(message: bytes) -> bool:
        """Whether the answer to a message contains the masked words.

        Raises:
            ArrayError: the bytes are no message of a server.
        """
        return wire.read_header(message, PHASES, None)[0] == INBOX

    @staticmethod
    def opens(message: bytes) -> bool:
        """Whether a message invites to a new sum, for which a new ``SecureClient`` is needed.

        Raises:
            ArrayError: the bytes are no message of a server.
        """
        return wire.read_header(message, PHASES, None)[0] == OPEN

    def answer(self, message: bytes, words: crypto.U64 | None = None, *, form: type = object) -> bytes:
        """Return the answer to the server's message.

        Args:
            words: uint64[encoding.words] from ``Encoding.encode``, if ``needs_words(message)``; they do not change.
            form: the kind of sum with which the client takes part: ``Encoding`` for updates of a model, ``TotalsForm``
                for totals. Default: both; ``encoding`` then says which.

        Raises:
            ArrayError: the message is malformed, or not the next one of this session, or a key is not valid.
            RangeError: the server's numbers break the rules, such as a threshold of half of the group or less.
            RoundError: too few clients are left, or the server asks for a sum of another ``form``. The client leaves
                the sum.

        Cost: of the masked words, 8 n bytes of AES for each client of the group; a few messages of 100 bytes for each
            client of the group.
        """
        phases = PHASES if self._identity is not None else PHASES[:-1]
        expected = phases[self._answered : self._answered + 1]
        kind, session, body = wire.read_header(message, expected, self._session)
        if kind == OPEN:
            answer = self._open(session, body, form)
        elif kind == ROSTER:
            answer = self._deal(session, body)
        elif kind == INBOX:
            answer = self._mask(session, body, words)
        elif kind == SURVIVORS and self._identity is not None:
            self._survivors = self._checked(body)
            signature = crypto.sign(self._identity, OF_SURVIVORS, self._context, self._survivors)
            answer = wire.header(wire.SIGNED, session) + signature
        elif kind == SURVIVORS:
            answer = self._show(session, self._checked(body))
        else:
            self._require_signatures(body)
            answer = self._show(session, self._survivors)
        self._answered += 1
        return answer

    def _open(self, session: bytes, body: memoryview, form: type) -> bytes:
        opening = wire.read_open(body)
        if not issubclass(type(encoding := Encoding.read(opening.encoding)), form):
            raise RoundError(f"encoding: the client takes part with {form.__name__}, not {type(encoding).__name__}")
        if (fewest := opening.min_clients) < self._min_clients:  # other clients would show shares for so few
            raise RoundError(f"min_clients={self._min_clients}: the server asks for a sum of {fewest} clients or more")
        if opening.is_signed != (self._identity is not None):
            has = "uses" if opening.is_signed else "does not use"
            raise RoundError(f"identity: the server {has} signatures; the client must agree")
        if encoding.noise < self._noise:
            raise RoundError(f"noise={self._noise:g}: the server asks for a sum with the noise {encoding.noise:g}")
        if self._noise and self._identity is None:
            raise RoundError(f"noise={self._noise:g}: a server could invent other clients; pass identity and peers")
        if self._identity is not None and not encoding.model:
            raise RoundError("encoding: the server announces no model; the server must use Encoding.of")
        if (most := self._max_norm) is not None:
            is_coarse = not encoding.noise and 2.0**-encoding.exponent > most * FINE
            if encoding.max_norm > most or is_coarse:
                asked = f"max_norm={encoding.max_norm:g} and the grid 2^{-encoding.exponent}"
                raise RoundError(f"max_norm={most:g}: the server asks for a sum with {asked}")
        if encoding.min_clients > fewest:
            raise RangeError(f"min_clients={encoding.min_clients}: a sum of {fewest} clients would have less noise")
        self.encoding, self._min_clients = encoding, fewest
        self._session, self._index, self._clients = session, opening.number, opening.clients
        self._context = wire.context_of(session, opening._replace(encoding=encoding.to_state()))
        self._sealing, self._masking, self._seed = crypto.new_secret(), crypto.new_secret(), crypto.new_secret()
        return wire.header(wire.KEYS, session) + wire.ADVERTISED.pack(*self._own_keys())

    def _own_keys(self) -> PublicKeys:
        keys = PublicKeys(crypto.public_key(self._sealing), crypto.public_key(self._masking))
        if self._identity is None or self._own_identity is None:
            return keys
        signature = crypto.sign(self._identity, OF_KEYS, self._context, _signed_part(keys, self._index))
        return keys._replace(identity=self._own_identity, signature=signature)

    def _deal(self, session: bytes, body: memoryview) -> bytes:
        threshold, group = wire.read_roster(body)
        if group.get(self._index) != self._own_keys() or max(group) >= self._clients:
            raise ArrayError("roster: the client's own keys are missing or differ, or an index is out of range")
        if len({key for keys in group.values() for key in keys[:2]}) < 2 * len(group):
            raise ArrayError("roster: a key occurs twice")
        if self._identity is not None:
            self._require_peers(group)
        parts, part = (3, "two thirds") if self._identity is not None else (2, "half")
        if len(group) < 2 or not (parts - 1) * len(group) < parts * threshold <= parts * len(group):
            raise RangeError(f"threshold={threshold}: must be more than {part} of {len(group)} clients, at most all")
        seeds, keys = (crypto.split(secret, group, threshold) for secret in (self._seed, self._masking))
        context = self._context if self._identity is None else crypto.digest(bytes(body), self._context)
        dealt = {}
        for index, member in group.items():
            key, path = crypto.envelope(self._sealing, member.sealing, context, self._index, index)
            sealed = crypto.seal(key, seeds[index] + keys[index], path)
            dealt[index] = Dealt(crypto.digest(seeds[index], context), crypto.digest(keys[index], context), sealed)
        self._threshold, self._group, self._context = threshold, group, context
        return wire.write(wire.SHARES, session, dealt, crypto.digest(self._seed, context))

    def _require_peers(self, group: Mapping[int, PublicKeys]) -> None:
        """Check that each other client of the group is a different peer that signed its keys for this invitation."""
        others = {index: keys for index, keys in group.items() if index != self._index}
        for index, keys in others.items():
            is_peer = keys.identity in self._peers and keys.identity != self._own_identity
            if not (is_peer and are_signed(keys, index, self._context)):
                raise ArrayError(f"roster: no known peer signed the keys of client {index} for this invitation")
        if len({keys.identity for keys in others.values()}) < len(others):
            raise ArrayError("roster: a peer occurs twice")

    def _mask(self, session: bytes, body: memoryview, words: crypto.U64 | None) -> bytes:
        dealt = wire.read_inbox(body)
        if self._index not in dealt or not dealt.keys() <= self._group.keys():
            raise ArrayError("inbox: the client's own shares are missing, or a client is not of the group")
        if len(dealt) < self._threshold:
            raise RoundError(f"inbox: {len(dealt)} clients dealt shares, but the threshold is {self._threshold}")
        masked = crypto.as_words(words, self.encoding.words).copy()
        held = {index: self._opened(index, sent) for index, sent in dealt.items()}
        others = {index: self._group[index].masking for index in dealt if index != self._index}
        own, context = self._index, self._context
        masks = [crypto.pairwise_mask(self._masking, key, context, own, index) for index, key in others.items()]
        crypto.add_masks(masked, [(crypto.self_mask(self._seed, context), False), *masks])
        self._held = {index: shares for index, shares in held.items() if shares is not None}
        self._dealers = list(dealt)
        self._sealing = self._masking = self._seed = b""  # they are of no further use
        return wire.write_masked(session, masked)

    def _opened(self, sender: int, dealt: Dealt) -> bytes | None:
        """Return the shares of seed and key that a client dealt, or None if they differ from their digests."""
        key, path = crypto.envelope(self._sealing, self._group[sender].sealing, self._context, sender, self._index)
        shares = crypto.unseal(key, dealt.sealed, path)
        if shares is None or len(shares) != 2 * crypto.SHARE:
            return None
        halves = shares[: crypto.SHARE], shares[crypto.SHARE :]
        found = [crypto.digest(share, self._context) for share in halves]
        return shares if found == [dealt.seed_digest, dealt.key_digest] else None

    def _checked(self, body: memoryview) -> bytes:
        """Return the list of survivors, if the client may show shares for it."""
        survivors = set(wire.read(SURVIVORS, body))
        if self._index not in survivors or max(survivors) >= self._clients:
            raise ArrayError("survivors: the client's own index is missing, or an index is out of range")
        if not survivors & self._group.keys() <= set(self._dealers):
            raise ArrayError("survivors: a client of the group dealt no shares")
        if self._identity is not None and not survivors <= self._group.keys():
            raise ArrayError("survivors: a client is not of the group; with identities, all clients form one group")
        if len(survivors) < self._min_clients:
            raise RoundError(f"survivors: the sum has {len(survivors)} clients, but min_clients={self._min_clients}")
        if (left := len(survivors & self._group.keys())) < self._threshold:
            raise RoundError(f"survivors: {left} clients of the group are left, but the threshold is {self._threshold}")
        return bytes(body)

    def _require_signatures(self, body: memoryview) -> None:
        """Check that ``threshold`` clients of the group signed the same roster and survivors as this client."""
        signed = sum(
            index in self._group
            and crypto.is_signed(self._group[index].identity, signature, OF_SURVIVORS, self._context, self._survivors)
            for index, (signature,) in wire.read(SIGNATURES, body).items()
        )
        if signed < self._threshold:
            raise RoundError(
                f"signatures: {signed} clients signed the same survivors, but the threshold is {self._threshold}"
            )

    def _show(self, session: bytes, listed: bytes) -> bytes:
        survivors = set(wire.read(SURVIVORS, memoryview(listed)))
        shown = {}
        for index, shares in self._held.items():
            is_seed = index in survivors
            shown[index] = is_seed, shares[: crypto.SHARE] if is_seed else shares[crypto.SHARE :]
        self._held = {}  # they are of no further use
        return wire.write(wire.OPENED, session, shown)

    # A client whose process ends between two messages keeps its state.

    def to_state(self) -> dict[str, Any]:
        """Return the client's state as plain values, for ``from_state``. It contains the client's secrets."""
        return {
            "session": None if self._session is None else self._session.hex(),
            "encoding": None if self.encoding is None else self.encoding.to_state(),
            "numbers": [self._min_clients, self._answered, self._index, self._clients, self._threshold],
            "secrets": [secret.hex() for secret in (self._sealing, self._masking, self._seed)],
            "context": self._context.hex(),
            "limits": [self._noise, self._max_norm],
            "identity": None if self._identity is None else self._identity.hex(),
            "peers": [peer.hex() for peer in self._peers],
            "survivors": self._survivors.hex(),
            "group": {str(index): [key.hex() for key in keys] for index, keys in self._group.items()},
            "held": {str(index): shares.hex() for index, shares in self._held.items()},
            "dealers": self._dealers,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the client of a state.

        Raises:
            CheckpointError: ``to_state`` did not return this state.
        """
        try:
            identity = None if state["identity"] is None else bytes.fromhex(state["identity"])
            peers = [bytes.fromhex(peer) for peer in state["peers"]]
            noise, max_norm = state["limits"]
            client = cls(identity=identity, peers=peers, noise=noise, max_norm=max_norm)
            client._resume(state)
        except (FedcoreError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"state: SecureClient.to_state did not return it: {error!r}") from None
        return client

    def _resume(self, state: Mapping[str, Any]) -> None:
        self._context = bytes.fromhex(state["context"])
        self._survivors = bytes.fromhex(state["survivors"])
        self._session = None if state["session"] is None else bytes.fromhex(state["session"])
        self.encoding = None if state["encoding"] is None else Encoding.read(state["encoding"])
        numbers = [int(number) for number in state["numbers"]]
        self._min_clients, self._answered, self._index, self._clients, self._threshold = numbers
        self._sealing, self._masking, self._seed = map(bytes.fromhex, state["secrets"])
        self._group = {int(index): PublicKeys(*map(bytes.fromhex, keys)) for index, keys in state["group"].items()}
        self._held = {int(index): bytes.fromhex(shares) for index, shares in state["held"].items()}
        self._dealers = [int(index) for index in state["dealers"]]

    def _facts(self) -> dict[str, Any]:
        return {"index": self._index, "answered": self._answered, "min_clients": self._min_clients}


def are_signed(keys: PublicKeys, index: int, context: bytes) -> bool:
    """Whether the identity of a client's keys signed them."""
    return crypto.is_signed(keys.identity, keys.signature, OF_KEYS, context, _signed_part(keys, index))


def _signed_part(keys: PublicKeys, index: int) -> bytes:
    return index.to_bytes(4, "little") + keys.sealing + keys.masking
