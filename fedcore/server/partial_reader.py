"""A partial sum as a round takes it, or why it cannot be believed."""

import math
from collections.abc import Callable

import numpy as np

from fedcore.aggregation import COUNTED, NO_COUNT, WEIGHTED, Aggregator, Replies, Sum, longest_term
from fedcore.algorithms import Claims
from fedcore.arguments import bounded, reason_of, shown
from fedcore.clients import ClientId
from fedcore.errors import ArrayError, FedcoreError, RangeError, UnknownClientError
from fedcore.kernels import ExactSum, combined_square, read_exact
from fedcore.memory import empty
from fedcore.rates import rate_at
from fedcore.server.partial import COLUMNS, GRID, Partial, fingerprint, read_partial, require_partial_sums
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.server.state import State
from fedcore.server.weighing import Weighing
from fedcore.store import ClientStore
from fedcore.typing import F64


class Partials:
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
        partial: Partial | bytes,
        own: set[ClientId] | None,
        known: set[ClientId],
        settle: Callable[[Replies], str | None],
    ) -> tuple[Replies, list[tuple[ClientId, str]]] | str:
        """Take a partial sum in; returns its replies and what it has refused, or why it is refused itself.

        Args:
            own: the clients that it may name; None for all.
            known: those that were heard already.
            settle: the reason why replies with or without examples do not fit the round's others; None if they do.
        """
        assert isinstance(aggregator, Sum)
        try:
            given = read_partial(partial)
            replies = replies_of(given, self._settings, self._state.snapshot, self._state.store, self.made_under)
            if again := known.intersection(replies.clients):
                raise RangeError(f"clients: expected each once a round, got {sorted(map(repr, again))[0]} again")
            if own is not None:
                self._require_own(given, own)
            if (self._weighing.known_at_most(replies) < replies.claims.examples).any():
                raise RangeError("examples: expected at most those of client_sizes, got more")
            self._weighing.weigh(replies)
            if not np.array_equal(replies.weights, given.weights):
                raise RangeError("weights: expected those that the method gives such claims, got others")
            if (reason := settle(replies)) is not None:
                return reason
            if not aggregator.join(given.sum, replies):
                raise RangeError("high: expected what an exact sum holds beside the others, got more")
        except FedcoreError as error:
            return reason_of(error)
        return replies, [(client, bounded(reason)) for client, reason in given.refused]

    def _require_own(self, partial: Partial, own: set[ClientId]) -> None:
        registry = self._state.store.registry
        refused = [client for client, _ in partial.refused if client in registry]  # others are edges below, say
        for client in (*partial.clients, *refused):
            if registry.check(client) not in own:
                raise RangeError(f"clients: expected the edge's own alone, got {shown(client)}")

    def collect(
        self, aggregator: Aggregator, folded: list[Replies], refused: tuple[tuple[ClientId, str], ...], received: int
    ) -> Partial:
        """The round's sum and claims as a value."""
        assert isinstance(aggregator, Sum)
        words, heard = aggregator.words(), Replies.joined(folded)
        heard = heard.ordered(self._state.store.registry.numbers(heard.clients))
        claims = heard.claims
        if (heard.sources == WEIGHTED).any():
            raise RangeError("weight: expected None for updates of a partial sum, got a number: weigh by examples")
        return Partial(
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
            refused=refused,
            received=received,
        )


NEAR = 1.0001
"""How many times longer a sum may be than the clients' lengths together: those are measured to 1e-5 at worst."""
SPAN = 1 << 18
"""Elements that are read at a time, so that they are in the caches when they are squared."""


def replies_of(partial: Partial, settings: Settings, now: Snapshot, store: ClientStore, made_under: str) -> Replies:
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
    limits, own = settings.asked, settings.limits.own_rates
    _require_whole("steps", partial.steps, limits.steps)
    sources = np.where(partial.examples == 0, NO_COUNT, COUNTED).astype(np.int8)
    examples = np.where(sources == NO_COUNT, 1.0, partial.examples)
    if not ((examples > 0) & (examples <= limits.examples)).all():
        raise RangeError(f"examples: expected numbers in (0, {limits.examples}], got others")
    if len(set(sources.tolist())) > 1:
        raise RangeError("examples: expected numbers of all clients or of none, got them of some")
    _require_whole("counts", partial.counts, 1 if settings.algorithm.hears_once else 2**31)
    if not np.isin(partial.has_buffers, (0, 1)).all():
        raise RangeError("has_buffers: expected zeros and ones, got others")
    lr = limits.lr if own else rate_at(settings.lr, now.round_number)
    most = partial.steps * lr
    if not ((partial.eta_steps > 0) & (partial.eta_steps <= most if own else partial.eta_steps == most)).all():
        raise RangeError(f"eta_steps: expected steps times {'at most ' if own else ''}{lr:g}, got others")
    _require_held(partial, settings, store)
    return Replies(
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


def _require_held(partial: Partial, settings: Settings, store: ClientStore) -> None:
    """Check that the words are a sum in its one form, and no longer than the clients' updates together.

    A sum is no longer than its terms together, each of them |w_i h_i| before it was rounded to the grid. So the words
    of nobody are zeros. Of buffers nobody says how far they moved, and each client's are as long as any that a sum
    takes in.
    """
    if not ((partial.squares >= 0) & (partial.squares < math.inf)).all():
        raise RangeError("squares: expected finite numbers of at least 0, got others")
    norms, limit = np.sqrt(partial.squares), settings.limits.norm
    if limit is not None and (norms.astype(np.float32) > np.float32(limit)).any():
        raise RangeError(f"squares: expected lengths of at most {limit:g} (max_norm), got {norms.max():g}")
    longest = longest_term(len(store.registry))
    lengths = np.abs(partial.weights) * norms
    if not (np.isfinite(partial.weights) & (lengths < longest)).all():
        so_many = longest < longest_term(0)
        hint = f": an Edge told population={len(store.registry)} refuses them by themselves" if so_many else ""
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
