"""Partial sums of a round: their message, and their validation by the server that adds them."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Claims
from fedcore.arrays import F64, empty, to_host
from fedcore.errors import ArrayError, FedcoreError, RangeError, UnknownClientError
from fedcore.kernels import ExactSum, combined_square, read_exact
from fedcore.model import Layout
from fedcore.options import Settings, describe
from fedcore.rules.windows import as_float32
from fedcore.server.aggregation import COUNTED, NO_COUNT, WEIGHTED, Counters, UpdateBatch, longest_term
from fedcore.server.requests import ModelVector, Nonnegative
from fedcore.server.state import State
from fedcore.server.update import raises_fedcore_errors
from fedcore.server.validation import SMALLEST, SentRates, Weighing, batch_of, settle_counters
from fedcore.store.registry import ClientId, canonical
from fedcore.validation import Represented, check_integer, is_integer, rejection_reason, short_repr, shorten

MAGIC = b"fedcore partial sum 2\n"
GRID = (-10, -60)
"""Exponents of the units of the high and low words."""
COLUMNS = ("steps", "examples", "counts", "eta_steps", "weights", "squares", "has_buffers")
MOST_HEADER = 1 << 28
"""The largest header of a message, in bytes."""
PARTS = (
    "the version of fedcore",
    "the method",
    "the layout",
    "averages_models (server_lr)",
    "the buffers that must stay >= 0 (signed_buffers, or buffers of the model with which the edge was made)",
    "the model x as it was sent (Broadcast.x)",
)
"""What the digests of ``PartialSum.made_under`` describe, for the reason of a rejection."""
NEAR = 1.0001
"""Tolerance of the norm of a sum: the norms of updates have a relative error of at most 1e-5."""
SPAN = 1 << 18
"""Elements per read; they are then in the cache when they are squared."""
LARGEST = float(np.finfo(np.float64).max)

Bound: TypeAlias = tuple[str, npt.NDArray[np.floating[Any]], float | F64, float | F64, bool]
"""A column's name, the column, the ends of its interval, and whether its values must be integers."""


@dataclass(frozen=True, repr=False)
class PartialSum(Represented):
    """A round's exact sum over some clients. Partial sums can be joined in any order and grouping, with the same bits.

    The server that adds a partial sum checks its claims, norms and weights. It also checks that |sum_i w_i h_i| is at
    most sum_i w_i |h_i| plus rounding. It cannot check that each norm is the client's.

    Attributes:
        round: the round's number.
        made_under: one digest for each of ``PARTS``: what must be equal at the server that adds the sum.
        high, low: int64[n], the words of ``kernels.ExactSum``: sum_i w_i h_i, or sum_i w_i (x - y_i) over the float
            buffers.
        changes: int64[n_parameters] each, the sum of the changes of rows that clients keep; None for other methods.
        noise: z, if clients clipped their updates and added the noise of ``PrivateMean``; else 0, as in every message.
        clients: the clients whose updates are in the sum.
        steps, examples, counts, eta_steps, weights, squares, has_buffers: float64[k], the clients' claims, eta_i K_i,
            w_i, |h_i|^2, and whether they sent buffers. Examples are 0 if clients report no number.
        rejected: (client, reason) of each rejected update.
        received: the bytes that the clients sent.
        counters: (index of the client, name, bytes) of each integer counter and flag in the clients' models.
        group_squares: float64[groups, k], |h_i|^2 over each group of tensors, or -1 if the client did not send it;
            ``squares`` is their sum. None without partial updates.
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
    changes: ExactSum | None = None
    noise: float = 0.0
    counters: tuple[tuple[int, str, bytes], ...] = ()
    group_squares: F64 | None = None

    @property
    def sum(self) -> ExactSum:
        """The exact sum of both words."""
        return ExactSum(self.high, self.low)

    @property
    def _words(self) -> list[npt.NDArray[np.int64]]:
        return [self.high, self.low, *(self.changes or ())]

    def to_bytes(self) -> bytes:
        """Return the partial sum as a message: a header in JSON, and the arrays, little-endian.

        Cost: 16 n + 56 k bytes, and 16 n more with ``changes``, or 8 k for each group.
        """
        header = {
            "round": self.round,
            "made_under": self.made_under,
            "n": len(self.high),
            "changes": None if self.changes is None else len(self.changes.high),
            "clients": list(self.clients),
            "refused": [list(entry) for entry in self.rejected],
            "received": self.received,
            "counters": [(i, name, value.hex()) for i, name, value in self.counters],
        }
        groups = [] if self.group_squares is None else [*self.group_squares]
        text = json.dumps(header | ({"groups": len(groups)} if groups else {})).encode()
        columns = [column.astype("<f8").tobytes() for column in [*(getattr(self, name) for name in COLUMNS), *groups]]
        words = [words.astype("<i8", copy=False).tobytes() for words in self._words]
        return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *columns, *words])

    @classmethod
    @raises_fedcore_errors
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "PartialSum":
        """Read a message that ``to_bytes`` returned. ``Round.add_partial_sum`` checks its values.

        Args:
            data: bytes from any sender. They are not executed, and the server allocates no more than their size.

        Raises:
            ArrayError: the message is malformed.
        """
        message = memoryview(data).cast("B")
        start = len(MAGIC) + 8
        size = int.from_bytes(message[len(MAGIC) : start], "little")
        if bytes(message[: len(MAGIC)]) != MAGIC or size > min(MOST_HEADER, len(message) - start):
            raise ArrayError(f"partial: PartialSum.to_bytes did not write these {len(message)} bytes")
        try:
            header = json.loads(bytes(message[start : start + size]))
            round, n, received = (check_integer(name, header[name], 0) for name in ("round", "n", "received"))
            p = None if header.get("changes") is None else check_integer("changes", header["changes"], 0)
            groups = check_integer("groups", header.get("groups", 0), 0, n)
            if not isinstance(header["clients"], list):
                raise TypeError("clients: must be a list")
            clients, made_under = tuple(map(canonical, header["clients"])), str(header["made_under"])
            rejected = tuple((canonical(client), shorten(str(reason))) for client, reason in header["refused"])
            counters = tuple((i, name, bytes.fromhex(value)) for i, name, value in header.get("counters", ()))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArrayError(f"partial: the header is malformed: {error!r}") from None
        k, at, rows = len(clients), start + size, len(COLUMNS) + groups
        if len(message) - at != (size := 8 * rows * k + 16 * (n + (p or 0))):
            got = f"got {len(message) - at}"
            raise ArrayError(f"partial: expected {size} bytes of arrays for {k} clients and n = {n}, {got}")
        # The arrays are copied: the message may be unaligned, and its sender may still change it.
        columns = np.frombuffer(message, "<f8", rows * k, at).reshape(rows, k).astype(np.float64)
        words = np.frombuffer(message, "<i8", -1, at + columns.nbytes).astype(np.int64)
        values: dict[str, Any] = dict(zip(COLUMNS, columns, strict=False))
        values["group_squares"] = columns[len(COLUMNS) :] if groups else None
        values["changes"] = None if p is None else ExactSum(words[2 * n : 2 * n + p], words[2 * n + p :])
        more: dict[str, Any] = {"rejected": rejected, "received": received, "counters": counters}
        return cls(round, made_under, words[:n], words[n : 2 * n], clients, **values, **more)

    def _facts(self) -> dict[str, Any]:
        return {"round": self.round, "clients": len(self.clients), "rejected": len(self.rejected), "n": len(self.high)}


@raises_fedcore_errors
def read_partial_sum(sent: object) -> PartialSum:
    """Read a partial sum from a message or an object; its arrays are not checked."""
    if isinstance(sent, bytes | bytearray | memoryview):
        return PartialSum.from_bytes(sent)
    if not isinstance(sent, PartialSum):
        raise ArrayError(f"partial: expected a PartialSum or its bytes, got {type(sent).__name__}")
    if type(sent.made_under) is not str:
        raise ArrayError(f"made_under: expected a str, got {type(sent.made_under).__name__}")
    return replace(
        sent,
        round=check_integer("round", sent.round, 0),
        clients=tuple(map(canonical, sent.clients)),
        rejected=tuple((canonical(client), shorten(str(reason))) for client, reason in sent.rejected),
    )


def fingerprint(settings: Settings, state: State) -> str:
    """Return ``PartialSum.made_under`` of an open round: the digests of ``PARTS``. Cost: reads 4 n bytes."""
    method = describe("algorithm", settings.algorithm) or {}
    if "class" in method:  # the name and repr of a user's class may differ between processes
        method = {key: method[key] for key in ("class", "options")}
    facts = [GRID, method, settings.layout.to_state(), settings.averages_models, state.read(Nonnegative())]
    parts: list[Any] = [json.dumps(fact, sort_keys=True).encode() for fact in facts]
    parts.append(np.ascontiguousarray(to_host(state.read(ModelVector("sent", rounded=True)))).data)
    return " ".join(hashlib.blake2b(part, digest_size=16).hexdigest() for part in parts)


class PartialSums:
    """The partial sums of an open round: the sums to add, and the sum to return."""

    def __init__(self, settings: Settings, state: State, weighing: Weighing) -> None:
        self._settings, self._state, self._weighing = settings, state, weighing

    @cached_property
    def made_under(self) -> str:
        """The open round's ``fingerprint``."""
        return fingerprint(self._settings, self._state)

    def join(
        self,
        total: Any,
        partial: PartialSum | bytes,
        own: set[ClientId] | None,
        known: set[ClientId],
        settle: Callable[[UpdateBatch], str | None],
    ) -> tuple[UpdateBatch, list[tuple[ClientId, str]]] | str:
        """Add a partial sum to the round; return its updates and rejections, or the reason why the round rejects it.

        It may contain the clients ``own`` (default: all), but no client of the round, ``known``. ``settle`` returns why
        these updates do not fit the round, because only some have examples, or None.
        """
        try:
            sent = read_partial_sum(partial)
            if (private := self._settings.rules.private) is not None and not sent.noise >= private.noise:
                raise RangeError(f"noise={sent.noise}: a private round needs sums with the noise {private.noise:g}")
            batch = self._checked(sent)
            if again := known.intersection(batch.clients):
                raise RangeError(f"clients: the round already has an update of {min(map(repr, again))}")
            self._require_own(sent, own)
            if self._weighing.reads_examples and len(set(batch.sources.tolist())) > 1:
                raise RangeError("examples: some clients report a number and some do not; all or none must")
            if self._settings.algorithm.weighs_claims:
                self._weighing.count_known_examples(batch)
            self._weighing.weigh(batch)
            if not np.array_equal(batch.weights, sent.weights):
                is_sized = self._state.population.is_sized
                how = "and n_k; create the edge with this server's sizes" if is_sized else "alone, without sizes n_k"
                raise RangeError(f"weights: they differ from those that the method computes from the claims {how}")
            if (reason := settle(batch)) is not None:
                return reason
            of_groups = () if sent.group_squares is None else (sent.group_squares,)
            if not total.join(sent.sum, batch, sent.changes, *of_groups):
                raise RangeError("high: the round's exact sum would overflow")
        except FedcoreError as error:
            return rejection_reason(error)
        return batch, [(client, shorten(reason)) for client, reason in sent.rejected]

    def _require_own(self, partial: PartialSum, own: set[ClientId] | None) -> None:
        if own is None:
            return
        registry = self._state.registry
        # An unregistered sender may be rejected too: an edge below this one.
        rejected = [client for client, _ in partial.rejected if client in registry]
        for client in (*partial.clients, *rejected):
            if registry.check(client) not in own:
                raise RangeError(f"clients: {short_repr(client)} is not a client of this edge")

    def _checked(self, partial: PartialSum) -> UpdateBatch:
        """Check all but the weights; return the updates as a summed batch. Cost: reads 16 n bytes twice."""
        if partial.round != (number := self._state.snapshot.round_number):
            raise RangeError(f"round={partial.round}: the open round is {number}")
        self._require_form(partial)
        registry, k = self._state.registry, len(partial.clients)
        try:
            clients = [registry.check(client) for client in partial.clients]
        except UnknownClientError as error:
            raise RangeError(f"clients: {error}") from None
        if len(set(clients)) < k:
            raise RangeError("clients: a client occurs twice in the sum")
        self._require_bounds(partial, longest := longest_term(len(registry)))
        self._require_lengths(partial, longest)
        sources = np.where(partial.examples == 0, NO_COUNT, COUNTED).astype(np.int8)
        examples = np.where(sources == NO_COUNT, 1.0, partial.examples)
        return batch_of(
            clients,
            [None] * k,
            bases=[None] * k,
            scales=np.ones(k),
            claims=Claims(partial.steps, examples, partial.counts),
            eta_steps=partial.eta_steps,
            has_buffers=partial.has_buffers > 0,
            sources=sources,
            starts=np.full(k, partial.round),
            weights=partial.weights,
            squares=partial.squares,
            counters=self._counters(partial),
        )

    def _require_form(self, partial: PartialSum) -> None:
        """Raise an error if an array has another shape or dtype, or the edge another method, layout or x."""
        layout, k = self._settings.layout, len(partial.clients)
        shapes: dict[str, Any] = dict.fromkeys(("high", "low"), (np.int64, layout.n))
        shapes |= dict.fromkeys(COLUMNS, (np.float64, k))
        shapes |= {"group_squares": (np.float64, len(layout.groups), k)} if layout.groups else {}
        if partial.group_squares is not None and not layout.groups:
            raise ArrayError("group_squares: must be None without partial updates")
        if isinstance(changes := partial.changes, ExactSum) != self._settings.algorithm.sends_row_change:
            raise ArrayError("changes: must be an ExactSum if clients keep their rows and send the changes, else None")
        arrays = [(name, getattr(partial, name), *shape) for name, shape in shapes.items()]
        arrays += [("changes", words, np.int64, layout.n_parameters) for words in changes or ()]
        for name, array, dtype, *shape in arrays:
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != tuple(shape):
                got = f"{array.dtype}{list(array.shape)}" if type(array) is np.ndarray else type(array).__name__
                raise ArrayError(f"{name}: expected {np.dtype(dtype).name}{shape}, got {got}")
        theirs = partial.made_under.split(" ")
        if others := [what for what, own in zip(PARTS, self.made_under.split(" "), strict=True) if own not in theirs]:
            raise RangeError(f"made_under: the edge and this server differ in {', in '.join(others)}")

    def _require_bounds(self, partial: PartialSum, longest: float) -> None:
        """Raise RangeError if a number of a client is outside its interval."""
        for name, column, low, high, integers in self._bounds(partial, longest):
            valid = (column >= low) & (column <= high) & (not integers or column == np.floor(column))
            if not valid.all():  # a NaN is invalid too
                i = int(np.argmin(valid))
                least, most = (float(np.broadcast_to(end, len(column))[i]) for end in (low, high))
                start = {SMALLEST: "(0", -LARGEST: "(-inf"}.get(least, f"[{least:.15g}")
                end = "inf)" if most == LARGEST else f"{most:.15g}]"
                must = f"{'an integer' if integers else 'a number'} in {start}, {end}"
                at_edge = name == "weights: w |h|" and longest < longest_term(0)
                count, client = len(self._state.registry), short_repr(partial.clients[i])
                hint = f"; create the edge with EdgeAggregator(population={count})" if at_edge else ""
                raise RangeError(f"{name}={column[i]:.15g} of client {client}: must be {must}{hint}")

    def _require_lengths(self, partial: PartialSum, longest: float) -> None:
        """Raise RangeError if a sum is longer than its updates together."""
        layout, changes, squares = self._settings.layout, partial.changes, partial.group_squares
        for low in (partial.low, *(changes or ())[1:]):
            if len(low) and not 0 <= int(low.min()) <= int(low.max()) < 1 << 50:
                raise RangeError("low: the words must be in 0..2^50 - 1")
        parts = [(partial.sum, layout.n_parameters, partial.squares)]
        if squares is not None:
            sums = (cut_sum(layout, partial.sum, name) for name in layout.groups)
            parts = [*zip(sums, (own.n_parameters for own in layout.of_groups.values()), squares, strict=True)]
        # Clients do not report the norm of their buffers' change: each may be as long as the longest update.
        for words, of, own in parts:
            has = own >= 0
            _require_length("high", words.cut(slice(0, of)), np.abs(partial.weights[has]) * np.sqrt(own[has]))
            buffers = np.full(int(partial.has_buffers[has].sum()), longest)
            _require_length("high of buffers", words.cut(slice(of, None)), buffers)
        if changes is not None:
            most = longest if (max_norm := self._settings.asked.max_norm) is None else min(longest, max_norm)
            _require_length("changes", changes, np.full(len(partial.clients), most))

    @raises_fedcore_errors
    def _counters(self, partial: PartialSum) -> list[Counters]:
        """Return the counters of each client, and its flags that differ from the server's, if the server takes them."""
        layout, now, found = self._settings.layout, self._state.snapshot.counters, [Counters() for _ in partial.clients]
        shapes = {piece.name: piece.shape for piece in layout.outside}
        for i, name, value in partial.counters:
            size = math.prod(shapes[name]) * now[name].itemsize if isinstance(name, str) and name in shapes else -1
            is_own = is_integer(i, 0, len(found) - 1) and len(value) == size
            if not is_own or (now[name].dtype == np.bool_ and max(value, default=0) > 1):
                raise ArrayError(f"counters: {short_repr((i, name, value))} is not a client's counter of this model")
            counter = np.frombuffer(value, now[name].dtype.newbyteorder("<")).astype(now[name].dtype)
            with suppress(RangeError):  # the update of its client stays in the sum
                found[i] |= settle_counters(layout, {name: counter.reshape(shapes[name])}, now, "model")
        return found

    def _bounds(self, partial: PartialSum, longest: float) -> Iterator[Bound]:
        """Yield the interval of each column; later intervals depend on earlier columns."""
        settings, limits, steps = self._settings, self._settings.asked, partial.steps
        total, longest_part = [0, LARGEST], partial.squares
        if (squares := partial.group_squares) is not None:
            for own in squares:
                yield "group_squares", np.where(own == -1, 0, own), 0, LARGEST, False
            yield "group_squares: the groups", (squares >= 0).sum(axis=0).astype(np.float64), 1, len(squares), True
            whole: Any = sum(np.maximum(squares, 0))  # in the order in which a round adds them
            total, longest_part = [whole, np.minimum(whole, LARGEST)], squares.max(axis=0)
        yield "squares", partial.squares, total[0], total[1], False
        with np.errstate(over="ignore", invalid="ignore"):  # numbers that are not finite are out of bounds
            norms = np.sqrt(partial.squares)
            float32_norms, lengths = norms.astype(np.float32), np.abs(partial.weights) * np.sqrt(longest_part)
        yield "steps", steps, 1, limits.max_steps, True
        yield "examples", partial.examples, 0, limits.max_examples, False  # 0 stands for no number
        yield "counts", partial.counts, 1, 1 if settings.algorithm.updates_once else 2**31, True
        yield "has_buffers", partial.has_buffers, 0, 1, True
        least, most = SentRates(settings.lr, limits).distances(partial.round, steps)
        yield "eta_steps", partial.eta_steps, least, most, False
        yield "squares: |h|", float32_norms, 0, as_float32(limits.max_norm or math.inf), False
        yield "weights", partial.weights, -LARGEST, LARGEST, False
        yield "weights: w |h|", lengths, 0, math.nextafter(longest, 0), False

    def collect(
        self, total: Any, folded: list[UpdateBatch], rejected: tuple[tuple[ClientId, str], ...], received: int
    ) -> PartialSum:
        """Return the round's sum and claims as a value."""
        (words, changes), batch = total.words(), UpdateBatch.cohort(folded, self._settings, self._state.registry)
        if (batch.sources == WEIGHTED).any():
            raise RangeError("weight: partial sums weight updates by the method; leave Update.weight out")
        number = self._state.snapshot.round_number
        if (batch.starts != number).any():
            raise RangeError("round: a partial sum has no late updates; add them to the upper server itself")
        examples = batch.claims.examples
        is_default = (batch.sources == NO_COUNT) & (examples == self._weighing.known_at_most(batch))
        columns = {
            "steps": batch.claims.steps,
            "examples": np.where(is_default, 0.0, examples),
            "counts": batch.claims.counts,
            **{name: getattr(batch, name) for name in COLUMNS[3:]},
        }
        counters = ((i, name, one) for i, own in enumerate(batch.counters) for name, one in own.items())
        return PartialSum(
            round=number,
            made_under=self.made_under,
            high=words.high,
            low=words.low,
            clients=tuple(batch.clients),
            **{name: column.astype(np.float64) for name, column in columns.items()},  # copies
            rejected=rejected,
            received=received,
            changes=changes,
            group_squares=total.squares_of(batch.clients) if self._settings.layout.groups else None,
            counters=tuple((i, name, one.astype(one.dtype.newbyteorder("<")).tobytes()) for i, name, one in counters),
        )


def cut_sum(layout: Layout, sum: Any, group: str) -> ExactSum:
    """Return a group's elements of an exact sum, as a new one."""
    words: Any = [layout.cut(of, group) for of in sum]
    return ExactSum(*words)


def _require_length(name: str, sum: ExactSum, lengths: F64) -> None:
    """Check that the norm of a sum is at most the sum of its terms' norms, float64[k], plus rounding.

    The grid rounds each element of a term to the nearest number, by at most half a unit. Since 0 is on the grid, the
    element also moves by at most its own size.

    Cost: reads 16 n bytes; 8 bytes of memory for each of ``SPAN`` elements.
    """
    n, square = len(sum.high), 0.0
    values = empty(min(n, SPAN), np.float64)
    for start in range(0, n, SPAN):
        part = values[: min(SPAN, n - start)]
        read_exact(sum.cut(slice(start, start + len(part))), part)
        square += combined_square([part], [1.0])
    rounded = np.minimum(lengths, math.sqrt(n) * 2.0 ** (GRID[1] - 1))
    length, most = math.sqrt(square), math.fsum(NEAR * lengths) + math.fsum(rounded)
    if length > most:
        raise RangeError(
            f"{name}: the norm of the sum is {length:g}; its {len(lengths)} updates allow at most {most:g}"
        )
