"""Messages from the server: the model, and the instructions for a client's local steps."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from fedcore.algorithms import MEAN_GRADIENT, is_computed_locally
from fedcore.algorithms.local_rules import LocalRule, Sgd, read, written
from fedcore.algorithms.rates import rate_at, rate_of_steps
from fedcore.arrays import F32, freeze, into, to_host
from fedcore.errors import ArrayError, ConfigError, RangeError
from fedcore.options import Settings
from fedcore.runtime import Unpicklable
from fedcore.server.update import SentSlices
from fedcore.store.registry import ClientId, Registry, canonical
from fedcore.validation import Represented, is_integer, is_number, listed

VECTORS = ("offset", "x_prev")
"""Fields of ``Instructions`` that a message carries as vectors, if they are not None."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LocalWork(Represented):
    """The fields that ``Instructions`` and ``Broadcast`` share; see ``Instructions``."""

    round: int
    lr: float
    lr_of_step: Callable[[int], float] | None = None
    a: float = 1.0
    b: float = 0.0
    mu: float = 0.0
    second_vector: str | None = None
    local_rule: LocalRule = field(default_factory=Sgd)
    keeps_row: bool = False
    plain: bool = False
    needs_loss: bool = False

    @property
    def second(self) -> bool:
        """Whether the client must send a second vector, as ``control``."""
        return self.second_vector is not None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Instructions(LocalWork):
    """The instructions to a client: K steps y -= lr (a grad(y) + b grad(x_prev) + offset + mu (y - x)) from model x.

    Instructions are equal if all fields are. They can be pickled.

    Attributes:
        round: the server's number of the round.
        lr: eta, the rate of the steps, or of the first step if the rate changes.
        lr_of_step: the rate of step k, counted from 0, if the rate changes (``rates.InverseStep``), else None. Messages
            cannot carry it: ``numbers`` rejects it.
        a, b, mu: the coefficients above.
        second_vector: the vector to send back as ``control``, or None: "mean gradient", the mean gradient at the y's
            before any correction; "change of the row", if the client keeps its row; or the vector of a user's method.
        local_rule: the use of the minibatches: ``Sgd()`` for a step along each, ``FullGradient()`` for steps along the
            gradient over all examples, ``OneMinibatch()`` for one step along the gradient of all minibatches, or a
            user's rule. A message carries its name and, as JSON, its options.
        keeps_row: whether the client keeps its own row; the offset then lacks the row's part.
        plain: whether local momentum and clipping are forbidden, since the server derives the mean gradient from the
            model.
        needs_loss: whether the client must report the mean loss of x over its examples, as ``Update.loss``.
        offset: float32[n_parameters], or None for zero.
        x_prev: float32[n], the model of the previous round; None if ``b`` is 0.
        start: float32[n], the model from which this client starts, if the method has ``own_starts``, else None: the
            broadcast's x. Messages cannot carry it: ``numbers`` rejects it.
    """

    offset: F32 | None = None
    x_prev: F32 | None = None
    start: F32 | None = None

    def numbers(self) -> dict[str, Any]:
        """Return the fields that are not vectors, by name, as any message can carry them; "" stands for None.

        Raises:
            RangeError: the rate changes between steps, or the client has its own start.
            ConfigError: JSON cannot hold an option of the local rule.
        """
        if self.lr_of_step is not None:
            raise RangeError(
                "lr: a message has one rate for all steps of a round; use a rate that does not change within a round"
            )
        if self.start is not None:
            raise RangeError(
                "start: a message has one model for all clients; use this method in simulations or in your own loop"
            )
        numbers = {name: getattr(self, name) for name in NUMBERS if name not in BESIDE_FIELDS}
        numbers |= written(self.local_rule)
        return numbers | {"second_vector": self.second_vector or "", "vectors": " ".join(self.vectors())}

    def vectors(self) -> dict[str, F32]:
        """Return the fields that are vectors and not None, by name."""
        return {name: vector for name in VECTORS if (vector := getattr(self, name)) is not None}

    @classmethod
    def read(cls, numbers: Mapping[str, Any], vectors: Mapping[str, Any], **more: Any) -> Self:
        """Return the instructions with these ``numbers`` and ``vectors``.

        Args:
            more: further fields of a subclass.

        Raises:
            ConfigError: a field or vector is missing or unknown, as between two versions of fedcore.
            ArrayError: ``x_prev`` is missing, and ``b`` is not 0.
            UnknownNameError: this process does not know the local rule, or an option of it.
        """
        missing = [name for name in NUMBERS if name not in numbers]
        unknown = [name for name in numbers if name not in NUMBERS]
        unknown += [name for name in vectors if name not in VECTORS]
        if missing or unknown:
            raise ConfigError(
                f"instructions: missing fields {missing}, unknown fields {unknown}; "
                "install the same version of fedcore at the server and the client"
            )
        for name, value in numbers.items():
            is_valid, kind = KINDS.get(name, TEXT)
            if not is_valid(value):
                raise ConfigError(f"{name}={value!r:.100}: must be {kind}")
        if numbers["b"] and vectors.get("x_prev") is None:
            raise ArrayError(f"x_prev: missing, although b={numbers['b']} needs the model of the previous round")
        present = [name for name in VECTORS if vectors.get(name) is not None]
        if present != str(numbers["vectors"]).split():
            raise ConfigError(f"instructions: expected the vectors {str(numbers['vectors']).split()}, got {present}")
        read_fields = {name: numbers[name] for name in NUMBERS if name not in BESIDE_FIELDS}
        read_fields |= {name: vectors.get(name) for name in VECTORS}
        read_fields["local_rule"] = read(numbers["local_rule"], numbers["rule_options"])
        read_fields["second_vector"] = numbers["second_vector"] or None
        return cls(**read_fields, **more)

    def require_followed(self, *, plain: bool) -> None:
        """Raise RangeError, at the client, if ``fedcore.sim.sgd`` cannot follow these instructions.

        Args:
            plain: whether the client's steps have no local momentum and no clipping.
        """
        if self.keeps_row:
            raise RangeError("keeps_row: fedcore's local steps do not keep the client's row; write your own loop")
        if not is_computed_locally(self.second_vector):
            raise RangeError(
                f"second_vector={self.second_vector!r}: fedcore's local steps compute only {MEAN_GRADIENT!r}; "
                "write your own loop"
            )
        if self.plain and not plain:
            raise RangeError(
                "options: the server derives gradients from plain steps; use neither momentum nor clipping, or use "
                "SCAFFOLD or SCAFFOLDM with control='sent'"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Instructions):
            return NotImplemented
        pairs = [(getattr(self, one.name), getattr(other, one.name)) for one in fields(Instructions)]
        return all(
            one is not None and two is not None and np.array_equal(one, two)
            if isinstance(one, np.ndarray) or isinstance(two, np.ndarray)
            else bool(one == two)
            for one, two in pairs
        )

    __hash__ = None  # type: ignore[assignment]


BESIDE_FIELDS = ("rule_options", "vectors")
"""Entries of a message that are not fields: the local rule's options, and the names of its vectors."""
TERMS = tuple(one.name for one in fields(LocalWork))
NUMBERS = (*(name for name in TERMS if name != "lr_of_step"), *BESIDE_FIELDS)
"""The entries of every message."""
TEXT: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, str), "a str")
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("lr", "a", "b", "mu"), (lambda value: is_number(value) and math.isfinite(value), "a finite number")
    ),
    **dict.fromkeys(("keeps_row", "plain", "needs_loss"), (lambda value: isinstance(value, bool), "true or false")),
    "round": (lambda value: is_integer(value, -1), "an integer >= -1"),
}
"""The checks of the entries, and their descriptions; entries without a check must be text."""


class SentVectors(Protocol):
    """The vectors of a broadcast. A sharded server gathers each on first access."""

    @property
    def x(self) -> F32:
        """float32[n], read-only; it never changes."""

    @property
    def x_prev(self) -> F32 | None:
        """The x of the previous round, or None if clients do not need it."""

    @property
    def slices(self) -> SentSlices | None:
        """References to the shards' slices, or None."""

    @property
    def starts(self) -> Callable[[ClientId], F32] | None:
        """The function that computes a client's own start, or None."""

    def offset(self, client: ClientId, out: Any) -> Any:
        """See ``Broadcast.offset``."""

    def on_host(self) -> "SentVectors":
        """Return the same vectors in host memory."""

    def facts(self) -> dict[str, Any]:
        """Return the entries of a repr, without gathering vectors."""


@dataclass(frozen=True, eq=False, repr=False)
class WholeVectors:
    """Vectors in memory, not in slices. ``make`` computes an offset, and ``starts`` a client's own start."""

    x: F32
    x_prev: F32 | None
    make: Callable[[ClientId, Any], Any]
    starts: Callable[[ClientId], F32] | None = None
    slices: ClassVar[None] = None

    def offset(self, client: ClientId, out: Any) -> Any:
        """See ``SentVectors``."""
        return self.make(client, out)

    def on_host(self) -> "WholeVectors":
        """See ``SentVectors``."""
        if isinstance(self.x, np.ndarray):
            return self

        def offset(client: ClientId, out: Any) -> Any:
            return into(to_host(self.make(client, None)), out)

        own = self.starts
        starts = None if own is None else lambda client: to_host(own(client))
        x, x_prev = to_host(self.x), None if self.x_prev is None else to_host(self.x_prev)
        for vector in (x, x_prev):
            if vector is not None:
                freeze(vector)
        return WholeVectors(x, x_prev, offset, starts)

    def facts(self) -> dict[str, Any]:
        """See ``SentVectors``."""
        return {"x": self.x, "x_prev": self.x_prev}


@dataclass(frozen=True, kw_only=True, repr=False)
class Broadcast(LocalWork, Unpicklable):
    """The model from which the clients of a round start, and the instructions for their local steps.

    A client does K steps y -= lr (a grad(y) + b grad(x_prev) + offset + mu (y - x)), both gradients on one minibatch.
    The other fields are those of ``Instructions``. A client that follows ``lr_of_step`` reports the mean of its rates
    as ``Update.lr``; a client that keeps ``lr`` need not report it. If rates change, h_i and the raw_i derived from it
    are means weighted by the rates.

    Attributes:
        ids: the clients of the broadcast.
        from_row: the coefficient of a client's row in its offset.
        has_offset: whether the method has offsets; if not, all are zero and need not be sent.
        bytes: the float32 size of x, x_prev and the offsets for all of ``ids``, if the method has them.
        vectors: x, x_prev and the offsets. A sharded server gathers them on access.
    """

    _instead: ClassVar[str] = "send each client its instructions, broadcast.of(client), and x"

    ids: tuple[ClientId, ...]
    from_row: float = 0.0
    has_offset: bool
    bytes: int
    vectors: SentVectors

    def _facts(self) -> dict[str, Any]:
        names = ("second_vector", "local_rule", "keeps_row", "has_offset", "plain", "bytes")
        shown = {"ids": self.ids, "round": self.round, **self.vectors.facts(), "lr": self.lr}
        return shown | {name: getattr(self, name) for name in names}

    @property
    def x(self) -> F32:
        """The model, float32[n], read-only; it never changes.

        It is rounded to the model's dtypes. Methods that look ahead send a model ahead of the server's x. The vector is
        on the server's device, as are x_prev and the offsets.
        """
        return self.vectors.x

    @property
    def x_prev(self) -> F32 | None:
        """The x of the previous round (x_{-1} = x_0) if ``b`` is not 0, else None."""
        return self.vectors.x_prev

    @property
    def slices(self) -> SentSlices | None:
        """References to the shards' slices of the vectors, for workers that can read them; else None."""
        return self.vectors.slices

    def of(self, client: ClientId) -> Instructions:
        """Return the instructions to one client; it raises as ``offset`` does."""
        told = self._instructions(self.offset(client) if self.has_offset else None, self.x_prev)
        return replace(told, start=self.start(client)) if self.has_starts else told

    @property
    def has_starts(self) -> bool:
        """Whether each client has its own start (``Algorithm.own_starts``)."""
        return self.vectors.starts is not None

    def start(self, client: ClientId) -> F32:
        """Return the model from which a client starts, float32[n], read-only: x, unless the method has ``own_starts``.

        Raises:
            RoundError, UnknownClientError: as ``offset``, if the method has ``own_starts``.
        """
        return self.x if self.vectors.starts is None else self.vectors.starts(client)

    @property
    def common(self) -> Instructions:
        """The instructions that all clients share, without an offset."""
        return self._instructions(None, self.x_prev)

    @property
    def numbers(self) -> Instructions:
        """The instructions that all clients share, without vectors."""
        return self._instructions(None, None)

    def _instructions(self, offset: F32 | None, x_prev: F32 | None) -> Instructions:
        return Instructions(**{name: getattr(self, name) for name in TERMS}, offset=offset, x_prev=x_prev)

    def on_host(self) -> "Broadcast":
        """Return the broadcast with its vectors in host memory.

        Cost: nothing if they are already there; else copies of x and x_prev, and of each offset on access.
        """
        vectors = self.vectors.on_host()
        return self if vectors is self.vectors else replace(self, vectors=vectors)

    def whole(self) -> "Broadcast":
        """Return the broadcast without slices, so that clients send whole vectors too.

        Cost: gathers x and x_prev if they are in slices.
        """
        if self.slices is None:
            return self
        return replace(self, vectors=WholeVectors(self.x, self.x_prev, self.vectors.offset, self.vectors.starts))

    def with_offset(self, offset: Callable[[ClientId, Any], Any]) -> "Broadcast":
        """Return the broadcast in host memory, as whole vectors, with the offsets that ``offset`` computes."""
        sent = self.vectors.on_host()
        return replace(self, vectors=WholeVectors(sent.x, sent.x_prev, offset, sent.starts), has_offset=True)

    def offset(self, client: ClientId, out: Any = None) -> Any:
        """Return the constant part of a client's direction, float32[n_parameters]; zeros if the method has no offsets.

        Each call computes the offset, so that a cohort costs one vector and not S.

        Args:
            out: float32[n_parameters], written in place. Default: a new array, or a shared one that is read-only.

        Raises:
            RoundError: the round is over, and the rows for the offset have changed.
            UnknownClientError: the client is not registered.

        Cost: reads 8 n bytes, writes 4 n bytes.
        """
        return self.vectors.offset(client, out)


def addressed_clients(
    registry: Registry, ids: Iterable[ClientId], newcomers: Iterable[ClientId]
) -> tuple[tuple[ClientId, ...], set[ClientId]]:
    """Return the clients of a broadcast, and those of ``newcomers`` that are not registered."""
    new = {client for client in map(canonical, listed("newcomers", newcomers)) if client not in registry}
    clients = tuple(ids.tolist() if isinstance(ids, np.ndarray) else listed("ids", ids))
    if registry.index.numbers(clients).min(initial=0) < 0:  # newcomers, unknown ids, or ids of a different type
        clients = tuple(client if client in new else registry.check(client) for client in clients)
    return clients, new


def broadcast_of(settings: Settings, round: int, clients: tuple[ClientId, ...], vectors: SentVectors) -> Broadcast:
    """Return the broadcast of a round with these vectors."""
    algorithm, layout, direction = settings.algorithm, settings.layout, settings.algorithm.direction
    elements = (1 + bool(direction.b)) * layout.n + algorithm.sends_offset * layout.n_parameters
    return Broadcast(
        ids=clients,
        round=round,
        lr=rate_at(settings.lr, round),
        lr_of_step=rate_of_steps(settings.lr, round),
        **{name: getattr(direction, name) for name in ("a", "b", "mu", "from_row")},
        second_vector=algorithm.second_vector,
        local_rule=algorithm.local_rule,
        keeps_row=algorithm.rows_at_clients,
        has_offset=algorithm.sends_offset,
        plain=algorithm.needs_plain_steps,
        needs_loss=algorithm.needs_loss,
        bytes=4 * elements * len(clients),
        vectors=vectors,
    )
