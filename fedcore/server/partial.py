"""Partial sums of a round, and the edge servers that make them."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Algorithm, Claims
from fedcore.algorithms.base import NOTHING, H
from fedcore.algorithms.rates import rate_at
from fedcore.arguments import bounded, reason_of, shown, whole
from fedcore.arrays import F64, empty
from fedcore.errors import ArrayError, FedcoreError, RangeError, UnknownClientError
from fedcore.kernels import ExactSum, combined_square, read_exact
from fedcore.options import Settings, describe
from fedcore.representation import Represented
from fedcore.server.aggregation import COUNTED, NO_COUNT, WEIGHTED, Aggregator, Sum, UpdateBatch, longest_term
from fedcore.server.state import State
from fedcore.server.step import Snapshot
from fedcore.server.update import as_sent, reads_sent
from fedcore.server.validation import Weighing
from fedcore.store import ClientStore
from fedcore.store.registry import ClientId, canonical

# A partial sum of a round as a value: what an edge has folded of its clients' updates, on its way to the server.


MAGIC = b"fedcore partial sum 1\n"
GRID = (-10, -60)
"""Exponents of the words' units."""
COLUMNS = ("steps", "examples", "counts", "eta_steps", "weights", "squares", "has_buffers")
MOST_HEADER = 1 << 28
"""Bytes of ids, refusals and names that are read at most."""


@dataclass(frozen=True, repr=False)
class PartialSum(Represented):
    """A round's sum over some clients, exact, so that it can join others in any order and tree with the same bits.

    Whoever takes it in checks its claims, norms and weights, and that |sum_i w_i h_i| is no longer than sum_i w_i |h_i|
    and what rounding can add; not that the norms are those of the clients. One of nobody is zeros.

    Attributes:
        round: the round's number.
        made_under: what says that two servers sum the same: the grid, the method, the layout, the units of h and x as
            it was sent, as a SHA-256 in hexadecimal.
        high, low: int64[n], the words of ``kernels.ExactSum``: sum_i w_i h_i, and of x - y_i over the float buffers.
        clients: those whose updates are in it.
        steps, examples, counts, eta_steps, weights, squares, has_buffers: float64[k], their claims, the lengths
            eta_i K_i, w_i and |h_i|^2, and whether they sent buffers. Examples are 0 where clients give no number.
        rejected: (client, reason) of those whose updates are not.
        received: the bytes that the clients sent.
    """

    round: int
    made_under: str
    high: npt.NDArray[np.int64]
    low: npt.NDArray[np.int64]
    clients: tuple[ClientId, ...]
    steps: F64
    examples: F64
    counts: F64
    eta_steps: F64
    weights: F64
    squares: F64
    has_buffers: F64
    rejected: tuple[tuple[ClientId, str], ...] = ()
    received: int = 0

    @property
    def sum(self) -> ExactSum:
        """The words."""
        return ExactSum(self.high, self.low)

    def to_bytes(self) -> bytes:
        """The partial sum as a message: a header in JSON, and the arrays, little-endian.

        Cost: 16 n + 56 k bytes.
        """
        header = {
            "round": self.round,
            "made_under": self.made_under,
            "n": len(self.high),
            "clients": list(self.clients),
            "refused": [list(entry) for entry in self.rejected],
            "received": self.received,
        }
        told = json.dumps(header).encode()
        arrays = [getattr(self, name).astype("<f8").tobytes() for name in COLUMNS]
        words = [words.astype("<i8", copy=False).tobytes() for words in (self.high, self.low)]
        return b"".join([MAGIC, len(told).to_bytes(8, "little"), told, *arrays, *words])

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "PartialSum":
        """The partial sum that ``to_bytes`` wrote; whether it can be believed, ``Round.add_partial`` says.

        Args:
            data: may come from anybody: nothing of it is run, and no more is allocated than it is long.

        Raises:
            ArrayError: it is no such message.
        """
        given = memoryview(data).cast("B")
        start = len(MAGIC) + 8
        size = int.from_bytes(given[len(MAGIC) : start], "little")
        if bytes(given[: len(MAGIC)]) != MAGIC or size > min(MOST_HEADER, len(given) - start):
            raise ArrayError(f"partial: expected what PartialSum.to_bytes wrote, got {len(given)} other bytes")
        try:
            header = json.loads(bytes(given[start : start + size]))
            n, clients = header["n"], header["clients"]
            refused = tuple((_id(client), bounded(str(reason))) for client, reason in header["refused"])
            numbers = [header["round"], n, header["received"]]
            if not isinstance(clients, list) or not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError("numbers")
            ids, made_under = tuple(_id(client) for client in clients), str(header["made_under"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArrayError(f"partial: its header is not that of PartialSum.to_bytes: {error!r}") from None
        k, at = len(ids), start + size
        if len(given) - at != 8 * len(COLUMNS) * k + 16 * n:
            raise ArrayError(
                f"partial: expected {8 * len(COLUMNS) * k + 16 * n} bytes of arrays for {k} clients and n = {n}, "
                f"got {len(given) - at}"
            )
        # (Copies: a message may lie anywhere in memory, and whoever sent it may still change it.)
        columns = np.frombuffer(given, "<f8", len(COLUMNS) * k, at).reshape(len(COLUMNS), k).astype(np.float64)
        words = np.frombuffer(given, "<i8", 2 * n, at + columns.nbytes).reshape(2, n).astype(np.int64)
        told: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
        return cls(
            header["round"], made_under, words[0], words[1], ids, **told, rejected=refused, received=header["received"]
        )

    def _facts(self) -> dict[str, Any]:
        return {"round": self.round, "clients": len(self.clients), "rejected": len(self.rejected), "n": len(self.high)}


@reads_sent
def read_partial_sum(given: object) -> PartialSum:
    """A partial sum that came as a message or as an object, its arrays not looked at yet.

    Raises:
        ArrayError: it is neither, or has something else in the place of ids, names or numbers.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        return PartialSum.from_bytes(given)
    if not isinstance(given, PartialSum):
        raise ArrayError(f"partial: expected a PartialSum or its bytes, got {type(given).__name__}")
    values = {field.name: getattr(given, field.name) for field in fields(PartialSum)}
    if type(values["made_under"]) is not str:
        raise ArrayError(f"made_under: expected a str, got {type(values['made_under']).__name__}")
    refused = tuple((canonical(client), bounded(str(reason))) for client, reason in values["rejected"])
    clients = tuple(canonical(client) for client in values["clients"])
    round = whole("round", values["round"], 0)
    return PartialSum(**values | {"round": round, "clients": clients, "rejected": refused})


def require_partial_sums(settings: Settings) -> None:
    """Check that a round's sums can be had in parts.

    Raises:
        RangeError: they cannot, and why.
    """
    algorithm = settings.algorithm
    if not settings.is_exact:
        raise RangeError(
            f'partial sum: give Compute(accumulator="exact"), not "{settings.accumulator}": the bits of '
            "other sums depend on who folded what"
        )
    if not adds_alone(algorithm):
        raise RangeError(
            f"partial: expected a method that adds h alone (FedAvg, FedProx, FedAvg-M and the like), got {algorithm}, "
            "which needs rows, second vectors or shares where it folds: let its clients reply to the server itself"
        )
    if settings.layout.counters:
        names = ", ".join(piece.name for piece in settings.layout.counters)
        raise RangeError(f"model: partial sums do not support integer counters ({names}); leave them out")


def adds_alone(algorithm: Algorithm) -> bool:
    """Tell whether all that an update does is that w_i h_i is added to one sum."""
    keeps = algorithm.keeps_rows or algorithm.sums_changes or algorithm.second_vector is not None
    return algorithm.adds == H and algorithm.row == NOTHING and not (keeps or algorithm.needs_shares)


def fingerprint(settings: Settings, now: Snapshot) -> str:
    """The digest of all that two servers have in common whose sums may join: see ``PartialSum.made_under``.

    Cost: reads 4 n bytes.
    """
    method = describe("algorithm", settings.algorithm) or {}
    if "class" in method:  # one's own: another process may find it by another name, and an object may show its address
        method = {key: method[key] for key in ("class", "options")}
    facts = [GRID, method, settings.layout.to_state(), settings.averages_models, list(settings.nonnegative)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(as_sent(settings.layout, now.sent)).data)
    return digest.hexdigest()


def _id(client: Any) -> ClientId:
    if type(client) not in (int, str):
        raise ValueError("ids")
    return canonical(client)


# A partial sum as a round takes it, or why it cannot be believed.


class PartialSums:
    """The partial sums that come into a server's open round, and the one that it becomes."""

    def __init__(self, settings: Settings, state: State, weighing: Weighing) -> None:
        self._settings, self._state, self._weighing = settings, state, weighing
        self._made_under: str | None = None

    def require(self) -> None:
        """Check that the round's sums can be had in parts; errors are those of ``require_partial_sums``."""
        require_partial_sums(self._settings)

    @property
    def made_under(self) -> str:
        """The open round's ``fingerprint``."""
        if self._made_under is None:
            self._made_under = fingerprint(self._settings, self._state.snapshot)
        return self._made_under

    def join(
        self,
        aggregator: Aggregator,
        partial: PartialSum | bytes,
        own: set[ClientId] | None,
        known: set[ClientId],
        settle: Callable[[UpdateBatch], str | None],
    ) -> tuple[UpdateBatch, list[tuple[ClientId, str]]] | str:
        """Take a partial sum in; returns its replies and what it has refused, or why it is refused itself.

        Args:
            own: the clients that it may name; None for all.
            known: those that were heard already.
            settle: the reason why replies with or without examples do not fit the round's others; None if they do.
        """
        assert isinstance(aggregator, Sum)
        try:
            given = read_partial_sum(partial)
            replies = replies_of(given, self._settings, self._state.snapshot, self._state.store, self.made_under)
            if again := known.intersection(replies.clients):
                raise RangeError(f"clients: expected each once a round, got {sorted(map(repr, again))[0]} again")
            if own is not None:
                self._require_own(given, own)
            if (self._weighing.known_at_most(replies) < replies.claims.examples).any():
                raise RangeError("examples: expected at most the clients' n_k, got more")
            self._weighing.weigh(replies)
            if not np.array_equal(replies.weights, given.weights):
                raise RangeError("weights: expected those that the method gives such claims, got others")
            if (reason := settle(replies)) is not None:
                return reason
            if not aggregator.join(given.sum, replies):
                raise RangeError("high: expected what an exact sum holds beside the others, got more")
        except FedcoreError as error:
            return reason_of(error)
        return replies, [(client, bounded(reason)) for client, reason in given.rejected]

    def _require_own(self, partial: PartialSum, own: set[ClientId]) -> None:
        registry = self._state.store.registry
        refused = [client for client, _ in partial.rejected if client in registry]  # others are edges below, say
        for client in (*partial.clients, *refused):
            if registry.check(client) not in own:
                raise RangeError(f"clients: expected the edge's own alone, got {shown(client)}")

    def collect(
        self,
        aggregator: Aggregator,
        folded: list[UpdateBatch],
        refused: tuple[tuple[ClientId, str], ...],
        received: int,
    ) -> PartialSum:
        """The round's sum and claims as a value."""
        assert isinstance(aggregator, Sum)
        words, heard = aggregator.words(), UpdateBatch.joined(folded)
        heard = heard.ordered(self._state.store.registry.numbers(heard.clients))
        claims = heard.claims
        if (heard.sources == WEIGHTED).any():
            raise RangeError("weight: expected None for updates of a partial sum, got a number: weigh by examples")
        return PartialSum(
            round=self._state.snapshot.round_number,
            made_under=self.made_under,
            high=words.high,
            low=words.low,
            clients=tuple(heard.clients),
            steps=claims.steps.copy(),
            examples=np.where(heard.sources == NO_COUNT, 0.0, claims.examples),
            counts=claims.counts.copy(),
            eta_steps=heard.eta_steps.copy(),
            weights=heard.weights.copy(),
            squares=heard.squares.copy(),
            has_buffers=heard.has_buffers.astype(np.float64),
            rejected=refused,
            received=received,
        )


NEAR = 1.0001
"""How many times longer a sum may be than the clients' lengths together: those are measured to 1e-5 at worst."""
SPAN = 1 << 18
"""Elements that are read at a time, so that they are in the caches when they are squared."""


def replies_of(
    partial: PartialSum, settings: Settings, now: Snapshot, store: ClientStore, made_under: str
) -> UpdateBatch:
    """The clients of a partial sum as replies that were folded; nothing but their weights is left to be checked.

    Args:
        made_under: the round's own ``fingerprint``.

    Raises:
        FedcoreError: something of it cannot be believed.

    Cost: reads 16 n bytes twice.
    """
    n, k = settings.layout.n, len(partial.clients)
    if partial.round != now.round_number:
        raise RangeError(f"round: expected {now.round_number}, the open one, got {partial.round}")
    for name in ("high", "low"):
        _require_array(name, getattr(partial, name), n, np.int64)
    for name in COLUMNS:
        _require_array(name, getattr(partial, name), k, np.float64)
    if partial.made_under != made_under:
        raise RangeError(
            "made_under: expected a sum of this method and layout, of what this server sent, got one of others"
        )
    clients = [_registered(store, client) for client in partial.clients]
    if len(set(clients)) < k:
        raise RangeError("clients: expected each once, got one twice")
    limits, own = settings.asked, settings.limits.max_client_lr is not None
    _require_whole("steps", partial.steps, limits.max_steps)
    sources = np.where(partial.examples == 0, NO_COUNT, COUNTED).astype(np.int8)
    examples = np.where(sources == NO_COUNT, 1.0, partial.examples)
    if not ((examples > 0) & (examples <= limits.max_examples)).all():
        raise RangeError(f"examples: expected numbers in (0, {limits.max_examples}], got others")
    if len(set(sources.tolist())) > 1:
        raise RangeError("examples: expected numbers of all clients or of none, got them of some")
    _require_whole("counts", partial.counts, 1 if settings.algorithm.hears_once else 2**31)
    if not np.isin(partial.has_buffers, (0, 1)).all():
        raise RangeError("has_buffers: expected zeros and ones, got others")
    lr = limits.max_client_lr if limits.max_client_lr is not None else rate_at(settings.lr, now.round_number)
    most = partial.steps * lr
    if not ((partial.eta_steps > 0) & (partial.eta_steps <= most if own else partial.eta_steps == most)).all():
        raise RangeError(f"eta_steps: expected steps times {'at most ' if own else ''}{lr:g}, got others")
    _require_held(partial, settings, store)
    return UpdateBatch(
        clients=clients,
        vectors=[None] * k,
        bases=[None] * k,
        scales=np.zeros(k),
        claims=Claims(partial.steps, examples, partial.counts),
        eta_steps=partial.eta_steps,
        has_buffers=partial.has_buffers > 0,
        counters=[{}] * k,
        controls=[None] * k,
        sources=sources,
        starts=np.full(k, partial.round),
        digests=[None] * k,
        factors=np.ones(k),
        weights=partial.weights,
        squares=partial.squares,
    )


def _require_held(partial: PartialSum, settings: Settings, store: ClientStore) -> None:
    """Check that the words are a sum in its one form, and no longer than the clients' updates together.

    A sum is no longer than its terms together, each of them |w_i h_i| before it was rounded to the grid. So the words
    of nobody are zeros. Of buffers nobody says how far they moved, and each client's are as long as any that a sum
    takes in.
    """
    if not ((partial.squares >= 0) & (partial.squares < math.inf)).all():
        raise RangeError("squares: expected finite numbers of at least 0, got others")
    norms, limit = np.sqrt(partial.squares), settings.limits.max_norm
    if limit is not None and (norms.astype(np.float32) > np.float32(limit)).any():
        raise RangeError(f"squares: expected lengths of at most {limit:g} (max_norm), got {norms.max():g}")
    longest = longest_term(len(store.registry))
    lengths = np.abs(partial.weights) * norms
    if not (np.isfinite(partial.weights) & (lengths < longest)).all():
        so_many = longest < longest_term(0)
        hint = f"; EdgeAggregator(population={len(store.registry)}) rejects them itself" if so_many else ""
        raise RangeError(
            f"weights: expected updates that an exact sum holds, w |h| < {longest:g}, got longer ones{hint}"
        )
    if partial.low.size and (int(partial.low.min()) < 0 or int(partial.low.max()) >= 1 << 50):
        raise RangeError("low: expected words in 0..2^50 - 1, got others")
    p, of_buffers = settings.layout.n_parameters, np.full(int(partial.has_buffers.sum()), longest)
    _require_length("high", partial.sum.cut(slice(0, p)), lengths)
    _require_length("high of buffers", partial.sum.cut(slice(p, None)), of_buffers)


def _require_length(name: str, sum: ExactSum, lengths: F64) -> None:
    """Check that a sum is no longer than its terms, float64[k], together."""
    got, most = _length(sum), _longest(lengths, len(sum.high))
    if got > most:
        raise RangeError(
            f"{name}: expected a sum of at most {most:g}, as long as its {len(lengths)} updates together, got one of "
            f"{got:g}"
        )


def _longest(lengths: F64, n: int) -> float:
    """The length that a sum of n elements may have whose terms are so long.

    Each element of a term is rounded to the nearest number of the grid, of which 0 is one: so it moves by half a unit
    at most, and never by more than it is.
    """
    rounded = np.minimum(lengths, math.sqrt(n) * 2.0 ** (GRID[1] - 1))
    return math.fsum(NEAR * lengths) + math.fsum(rounded)


def _length(sum: ExactSum) -> float:
    """The length of a sum.

    Cost: reads 16 n bytes; 8 bytes of memory for each of ``SPAN`` elements.
    """
    n, square = len(sum.high), 0.0
    values = empty(min(n, SPAN), np.float64)
    for start in range(0, n, SPAN):
        here = values[: min(SPAN, n - start)]
        read_exact(sum.cut(slice(start, start + len(here))), here)
        square += combined_square([here], [1.0])
    return math.sqrt(square)


def _registered(store: ClientStore, client: ClientId) -> ClientId:
    try:
        return store.registry.check(client)
    except UnknownClientError as error:
        raise RangeError(f"clients: {error}") from None


def _require_array(name: str, array: object, length: int, dtype: type[np.generic]) -> None:
    if type(array) is not np.ndarray or array.dtype != dtype or array.shape != (length,):
        got = f"{array.dtype}{list(array.shape)}" if type(array) is np.ndarray else type(array).__name__
        raise ArrayError(f"{name}: expected {np.dtype(dtype).name}[{length}], got {got}")


def _require_whole(name: str, column: F64, most: int) -> None:
    if not ((column >= 1) & (column <= most) & (column == np.floor(column))).all():
        raise RangeError(f"{name}: expected integers in 1..{most}, got others")
