"""What a server can be asked between two changes, as values; ``State.read`` answers one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from fedcore.arrays import copied, to_host, view_of, zeros
from fedcore.model import Layout
from fedcore.server.report import checked, log_of
from fedcore.server.state import SUMMED, Query, State
from fedcore.server.step import Snapshot
from fedcore.server.update import as_sent, digest_of_numbers
from fedcore.store.registry import ClientId
from fedcore.store.slots import checksums


@dataclass(frozen=True)
class VectorQuery(Query):
    """Base class of queries for a vector.

    Attributes:
        client: the client whose vector it is; None for the server's.
        has_buffers: whether the vector has float buffers after the parameters.
    """

    client: ClientId | None = field(default=None, kw_only=True)
    has_buffers: ClassVar[bool] = False
    dtype: ClassVar[type] = np.float32

    def joined(self, answers: Sequence[Any]) -> Any:
        return concatenate(answers)

    def zeros(self, layout: Layout) -> Any:
        return zeros(layout.n if self.has_buffers else layout.n_parameters, self.dtype)


@dataclass(frozen=True)
class Row(VectorQuery):
    """A copy of a client's row."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        return state.store.read(self.client)


@dataclass(frozen=True)
class Correction(VectorQuery):
    """c_i = v[t_i] - r_i, float64[n_parameters]; zero for a client without a row."""

    dtype = np.float64

    def __call__(self, state: State, now: Snapshot) -> Any:
        out = zeros(state.settings.layout.n_parameters, self.dtype, device=state.settings.device)
        if (round := state.store.round_of(self.client)) is None:
            return out
        return state.combined([(state.store.read(self.client), -1.0), (now.history.get(round), 1.0)], out)


@dataclass(frozen=True)
class Offset(VectorQuery):
    """A client's offset; see ``Broadcast.offset``. That of a newcomer has no row, and no ``client``."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        return state.offset(self.client, None)


@dataclass(frozen=True)
class ModelVector(VectorQuery):
    """A model: x, the model that clients get, or x_{t-1}. It never changes.

    Attributes:
        rounded: whether it is rounded to the model's dtypes, as clients get it.
    """

    name: Literal["x", "sent", "x_prev"] = "x"
    rounded: bool = False
    has_buffers = True

    def __call__(self, state: State, now: Snapshot) -> Any:
        vector = getattr(now, self.name)
        return view_of(as_sent(state.settings.layout, vector) if self.rounded else vector)


@dataclass(frozen=True)
class Direction(VectorQuery):
    """A copy of v."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        return copied(now.momentum)


@dataclass(frozen=True)
class Total(VectorQuery):
    """A copy of T."""

    dtype = np.float64

    def __call__(self, state: State, now: Snapshot) -> Any:
        return None if now.total is None else copied(now.total)


@dataclass(frozen=True)
class Counters(Query):
    """The integer counters and constants by name."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        return now.counters


@dataclass(frozen=True)
class ClientSizes(Query):
    """n_k of the registered clients, the smallest first; None without sizes."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        return now.population.listed()


@dataclass(frozen=True)
class NamesRemoved(Query):
    """Whether ids of removed clients are kept, since their shares stay in the objective."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        return bool(now.population.included)


@dataclass(frozen=True)
class AuditLog(Query):
    """See ``Server.audit_log``."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        texts = log_of(state.store.documents(), now.documents, now.audited)
        return [document for _, document in checked(texts, x=digest_of_numbers(now.x))]


@dataclass(frozen=True)
class SentChecksums(Query):
    """The checksums of the vectors that all clients get; those of shards together are the same."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        sent = [now.sent, now.x_prev if state.settings.algorithm.direction.b else None, state.shared_offset()]
        return [checksums(to_host(vector), SUMMED) for vector in sent if vector is not None]

    def joined(self, answers: Sequence[Any]) -> Any:
        return [np.concatenate(parts) for parts in zip(*answers, strict=True)]


def concatenate(slices: Sequence[Any]) -> Any:
    """Return the concatenated vector, read-only."""
    vector = np.concatenate([np.asarray(one) for one in slices])
    vector.flags.writeable = False
    return vector
