"""The broadcast from which the clients of a round start."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from fedcore.algorithms import Direction
from fedcore.algorithms.rates import rate_at, rate_of_steps
from fedcore.arrays import F32, copy_into, freeze, to_host
from fedcore.options import Settings
from fedcore.pickling import Unpicklable
from fedcore.representation import Represented
from fedcore.server.instructions import Instructions
from fedcore.server.update import SentSlices
from fedcore.simulation.local_rules import LocalRule
from fedcore.store.registry import ClientId, Registry, canonical

# The vectors of a broadcast, wherever they lie.


class SentVectors(Protocol):
    """The vectors from which clients start. What is not here is brought when it is asked for, and kept."""

    @property
    def x(self) -> F32:
        """float32[n], read-only, and never changed later."""
        ...

    @property
    def x_prev(self) -> F32 | None:
        """The x of the round before, or None where no client needs it."""
        ...

    @property
    def slices(self) -> SentSlices | None:
        """References to their slices; None where there are none."""
        ...

    def offset(self, client: ClientId, out: Any) -> Any:
        """See ``Broadcast.offset``."""
        ...

    def on_host(self) -> "SentVectors":
        """The same in host memory."""
        ...

    def facts(self) -> dict[str, Any]:
        """The facts to show, for which nothing is brought."""
        ...


@dataclass(frozen=True)
class WholeVectors:
    """Vectors of one piece, which are there.

    Attributes:
        x, x_prev: as above.
        make: an offset, as ``offset`` does.
    """

    x: F32
    x_prev: F32 | None
    make: Callable[[ClientId, Any], Any]

    @property
    def slices(self) -> None:
        """None: they are of one piece."""
        return

    def offset(self, client: ClientId, out: Any) -> Any:
        """See ``SentVectors``."""
        return self.make(client, out)

    def on_host(self) -> "WholeVectors":
        """See ``SentVectors``."""
        if isinstance(self.x, np.ndarray):
            return self

        def offset(client: ClientId, out: Any) -> Any:
            here = to_host(self.make(client, None))
            if out is None:
                return here
            copy_into(out, here)
            return out

        x, x_prev = to_host(self.x), None if self.x_prev is None else to_host(self.x_prev)
        for vector in (x, x_prev):
            if vector is not None:
                freeze(vector)
        return WholeVectors(x, x_prev, offset)

    def facts(self) -> dict[str, Any]:
        """See ``SentVectors``."""
        return {"x": self.x, "x_prev": self.x_prev}


# The broadcast from which the clients of a round start.


@dataclass(frozen=True, repr=False)
class Broadcast(Represented, Unpicklable):
    """The model from which the clients of a round start, and the direction of their steps.

    A client does K steps y -= lr (a grad(y) + b grad(x_prev) + offset + mu (y - x)), both gradients on one minibatch.

    Attributes:
        ids: the clients it is for.
        round: the round's number.
        lr: eta, the rate of the local steps; of the first one, where they differ.
        lr_of_step: the rate of step k, counted from 0, where they differ within a round (``rates.InverseStep``), else
            None. A client that follows it says the mean of its rates as ``Update.lr``; one that stays at ``lr`` says
            nothing. Its h_i, and a raw_i that follows from it, are then means weighted by the rates.
        a, b, mu: the coefficients above.
        second_vector: what a client must send back as ``control``, or None: "mean gradient", that of its gradients at y
            alone, before any correction; "change of the row", its difference from the row, where clients keep their
            rows; or what a method of one's own says.
        local_rule: what the clients make of their minibatches (``fedcore.simulation.local_rules``).
        keeps_row: whether each client keeps its own row; an offset is then short of the row's part.
        has_offset: whether the method has offsets; else all are zero, and need not be sent.
        plain: whether the steps must be plain, without local momentum or clipping, because the server derives a
            client's mean gradient from its y.
        bytes: what it weighs for all of ``ids``: x, x_prev and the offset, as far as there are any, in float32.
        vectors: x, x_prev and the offsets: those of a server in shards are put together when they are asked for.
    """

    _instead: ClassVar[str] = "send each client its own order, broadcast.of(client), and x"

    ids: tuple[ClientId, ...]
    round: int
    lr: float
    lr_of_step: Callable[[int], float] | None = field(repr=False)
    direction: Direction = field(repr=False)
    second_vector: str | None
    local_rule: LocalRule
    keeps_row: bool
    has_offset: bool
    plain: bool
    bytes: int
    vectors: SentVectors = field(repr=False)

    def _facts(self) -> dict[str, Any]:
        facts = dict(super()._facts())
        return {name: facts.pop(name) for name in ("ids", "round")} | self.vectors.facts() | facts

    @property
    def x(self) -> F32:
        """The model, float32[n], read-only, and never changed later.

        It is as it is sent, rounded to the model's dtypes, and ahead of the server's x where the method looks ahead. It
        lies on the server's device, as x_prev and offsets do.
        """
        return self.vectors.x

    @property
    def x_prev(self) -> F32 | None:
        """The x of the round before (x_{-1} = x_0), where ``b`` is not 0; else None."""
        return self.vectors.x_prev

    @property
    def slices(self) -> SentSlices | None:
        """References to the shards' slices of the vectors, for workers that read them; None where there are none."""
        return self.vectors.slices

    @property
    def a(self) -> float:
        """The coefficient of grad(y)."""
        return self.direction.a

    @property
    def b(self) -> float:
        """The coefficient of grad(x_prev)."""
        return self.direction.b

    @property
    def mu(self) -> float:
        """The coefficient of y - x."""
        return self.direction.mu

    @property
    def second(self) -> bool:
        """Tell whether a client must send a second vector."""
        return self.second_vector is not None

    def of(self, client: ClientId) -> Instructions:
        """The order to one of the clients.

        Raises:
            RoundError, UnknownClientError: as ``offset``.
        """
        return self._order(self.offset(client) if self.has_offset else None, self.x_prev)

    @property
    def common(self) -> Instructions:
        """The order to all of the clients alike: without an offset, which may be each one's own."""
        return self._order(None, self.x_prev)

    @property
    def numbers(self) -> Instructions:
        """The order to all of the clients alike, without any vector."""
        return self._order(None, None)

    def _order(self, offset: F32 | None, x_prev: F32 | None) -> Instructions:
        return Instructions(
            round=self.round,
            lr=self.lr,
            lr_of_step=self.lr_of_step,
            a=self.a,
            b=self.b,
            mu=self.mu,
            second_vector=self.second_vector,
            local_rule=self.local_rule,
            keeps_row=self.keeps_row,
            plain=self.plain,
            offset=offset,
            x_prev=x_prev,
        )

    def on_host(self) -> "Broadcast":
        """The same broadcast with its vectors in host memory, for clients that train there, or far away.

        Cost: nothing where they are; else copies of x and x_prev, and of each offset that is asked for.
        """
        here = self.vectors.on_host()
        return self if here is self.vectors else replace(self, vectors=here)

    def whole(self) -> "Broadcast":
        """The same broadcast without slices, so that clients send whole vectors too.

        Cost: where there are slices, x and x_prev are put together.
        """
        return self if self.slices is None else self._with(self.vectors.offset)

    def with_offset(self, offset: Callable[[ClientId, Any], Any]) -> "Broadcast":
        """The same broadcast in host memory, with other offsets: whole vectors, as ``offset`` makes them."""
        return replace(self.on_host()._with(offset), has_offset=True)

    def _with(self, offset: Callable[[ClientId, Any], Any]) -> "Broadcast":
        return replace(self, vectors=WholeVectors(self.x, self.x_prev, offset))

    def offset(self, client: ClientId, out: Any = None) -> Any:
        """The part of a client's direction that stays the same over its steps, float32[n_parameters].

        Zeros where the method has none (``has_offset``), so that the formula above always holds. It is made when asked
        for, so that a cohort costs one vector and not S.

        Args:
            out: float32[n_parameters], written in place; else a new array, or one that is shared and read-only.

        Raises:
            RoundError: the round is over; the rows that the offset comes from have changed.
            UnknownClientError: the client is not registered.

        Cost: reads 8 n bytes, writes 4 n bytes.
        """
        return self.vectors.offset(client, out)


def asked_of(
    registry: Registry, ids: Iterable[ClientId], newcomers: Iterable[ClientId]
) -> tuple[tuple[ClientId, ...], set[ClientId]]:
    """The clients of a broadcast, and the newcomers among all that were named.

    Raises:
        UnknownClientError: one of them is not registered, and no newcomer.
    """
    new = {client for client in map(canonical, newcomers) if client not in registry}
    asked = tuple(ids.tolist() if isinstance(ids, np.ndarray) else ids)
    if registry.index.numbers(asked).min(initial=0) < 0:  # ids in another form, of newcomers, or of nobody
        asked = tuple(client if client in new else registry.check(client) for client in asked)
    return asked, new


def broadcast_of(
    settings: Settings,
    round: int,
    clients: tuple[ClientId, ...],
    vectors: SentVectors,
) -> Broadcast:
    """The broadcast of a round, of the vectors that are sent in it."""
    algorithm, layout = settings.algorithm, settings.layout
    sent = (1 + bool(algorithm.direction.b)) * layout.n + algorithm.sends_offset * layout.n_parameters
    return Broadcast(
        clients,
        round,
        rate_at(settings.lr, round),
        rate_of_steps(settings.lr, round),
        algorithm.direction,
        algorithm.second_vector,
        algorithm.local_rule,
        algorithm.rows_at_clients,
        algorithm.sends_offset,
        algorithm.needs_plain_steps,
        4 * sent * len(clients),
        vectors,
    )
