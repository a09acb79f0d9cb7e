"""Requests to a server between rounds, as values: changes, for ``State.apply``, and queries, for ``State.read``."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arrays import F32, F64, Floats, copied, device_of, empty, freeze, ieee, read_only, to_host, view_of, zeros
from fedcore.errors import ArrayError, CorruptionError, RangeError, RoundError
from fedcore.kernels import ExactSum
from fedcore.model import Layout
from fedcore.server.aggregation import Counters, combined_square, exchange_whole
from fedcore.server.report import Document, audit_errors, checked, log_of
from fedcore.server.state import SUMMED, State
from fedcore.server.step import Sizes, Snapshot, checked_sizes
from fedcore.server.update import IDS, CountedIds, as_sent, require_finite
from fedcore.store.client_store import rounding_keys
from fedcore.store.registry import ClientId, Registry, canonical
from fedcore.store.slots import checksums


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Change:
    """A change between rounds: one transaction in each part of a server. This one only counts as a transaction.

    Attributes:
        clients: the clients of which it is.
        vectors: its vectors by name, of which each part gets a part.
        has_buffers: whether these have float buffers after the parameters.
    """

    clients: Sequence[ClientId] = ()
    vectors: Mapping[str, Any] = field(default_factory=dict)
    has_buffers: ClassVar[bool] = False

    def among(self, registry: Registry) -> "Change":
        """Return the change of a group of tensors with these clients."""
        return self

    def __call__(self, state: State) -> tuple[Snapshot, Document]:
        """Return the next snapshot of a state, and the facts of the audit document.

        It stages rows and clients in the store and may replace ``settings``. ``State.changing`` undoes this after an
        error.
        """
        return state.snapshot, {}


@dataclass(frozen=True, eq=False, repr=False)
class AddClients(Change):
    """See ``Server.add_clients``."""

    sizes: Sizes | None

    def __call__(self, state: State) -> tuple[Snapshot, Document]:
        now, is_sized = state.snapshot, state.is_sized(self.sizes is not None)
        sizes, ids = checked_sizes(self.clients, self.sizes, sized=is_sized), list(map(canonical, self.clients))
        population = now.population.with_clients(state.store.add_all(ids), ids, sizes, now.round_number)
        facts = {"what": "an arrival of clients", "clients": ids, "sizes": sizes}
        return now._replace(population=population), facts


@dataclass(frozen=True, eq=False, repr=False)
class UpdateClients(Change):
    """See ``Server.update_clients``."""

    sizes: Sizes

    def among(self, registry: Registry) -> Change:
        own = {client: size for client, size in self.sizes.items() if client in registry}
        return UpdateClients(own) if own else Change()

    def __call__(self, state: State) -> tuple[Snapshot, Document]:
        population = state.snapshot.population.with_sizes(state.store.registry, self.sizes)
        facts = {"what": "a change of client sizes", "sizes": [list(pair) for pair in self.sizes.items()]}
        return state.snapshot._replace(population=population), facts


@dataclass(frozen=True, eq=False, repr=False)
class RemoveClient(Change):
    """See ``Server.remove_client``."""

    from_objective: bool

    def among(self, registry: Registry) -> Change:
        return self if self.clients[0] in registry else Change()

    def __call__(self, state: State) -> tuple[Snapshot, Document]:
        now, store, algorithm = state.snapshot, state.store, state.settings.algorithm
        client = store.registry.check(self.clients[0])
        if algorithm.rows_at_clients:
            raise RangeError(
                f"client={client!r}: it keeps its row, so the server cannot subtract the row; leave it registered"
            )
        number, round = store.registry.number(client), store.round_of(client)
        has_part = now.total is not None and round is not None
        if has_part and not algorithm.total_sums_rows:
            raise RangeError(
                f"client={client!r}: T of {algorithm} is not the sum of its rows, so the row cannot be subtracted; "
                "leave the client registered"
            )
        after = now._replace(
            population=now.population.without_client(number, client, from_objective=self.from_objective),
            starts={other: t for other, t in now.starts.items() if other != client},
            history=now.history.without([round]),
        )
        if has_part:
            changed = without_part(state, client)
            after = after._replace(total=changed.total, exact_total=changed.exact_total)
        store.forget(client)
        facts = {"what": "a departure of a client", "client": client, "from_objective": self.from_objective}
        return after, facts


def without_part(state: State, client: ClientId) -> Snapshot:
    """Return the snapshot with a new T that does not include a client; exact sums stay exact.

    If the client's row is damaged, its part is unknown, and T is recomputed from the parts of the others.
    """
    now, store, device = state.snapshot, state.store, device_of(state.snapshot.x)
    corrections = state.settings.algorithm.keeps_history

    def exact(total: ExactSum, client: ClientId, times: int) -> ExactSum:
        if store.row(client) is None:
            return total
        terms, coefficients = [total, store.read(client)], [1, -times if corrections else times]
        if corrections and (v := now.history.get(store.round_of(client))) is not None:
            terms, coefficients = [*terms, v], [*coefficients, times]
        if (combined := kernels.combine_exact(terms, coefficients)) is None:
            raise CorruptionError(f"client {client!r}: the norm of its row exceeds the range of an exact sum")
        return combined

    def plain(total: F64, client: ClientId, times: int) -> Any:
        part: Floats = Correction(client=client)(state, now) if corrections else store.read(client)
        return kernels.combine([total, part], [1.0, times], empty(len(total), np.float64, device=device))

    total: Any = now.total if now.exact_total is None else now.exact_total
    add: Any = plain if now.exact_total is None else exact
    zero: Any = partial(zeros, dtype=np.float64) if now.exact_total is None else ExactSum.zeros
    try:
        total = add(total, client, -1)
    except CorruptionError:
        total = zero(store.n, device=device)
        for other in store.registry:
            with suppress(CorruptionError):  # a sum must not include a part that cannot be read
                if other != client:
                    total = add(total, other, 1)
    if now.exact_total is None:
        return now._replace(total=total)
    return now._replace(total=kernels.read_exact(total), exact_total=total)


class ForgetRemoved(Change):
    """Keep the number of removed clients whose shares stay in the objective, in place of their ids.

    The ids of updates go too. Late updates with an id that started before are then rejected.
    """

    def __call__(self, state: State) -> tuple[Snapshot, Document]:
        now, norms = state.snapshot, state.snapshot.norms
        if IDS in norms:
            norms = {**norms, IDS: CountedIds.of(now.round_number, norms[IDS][:, :0])}
        after = now._replace(population=now.population.without_names(), norms=norms)
        return after, {"what": "an erasure of removed clients' and updates' ids"}


@dataclass(frozen=True, eq=False, repr=False)
class ChangeOptions(Change):
    """See ``Server.change``."""

    options: Mapping[str, Any]

    def __call__(self, state: State) -> tuple[Snapshot, Document]:
        changed, now, options = state.settings.changed(self.options), state.snapshot, self.options
        after = now._replace(changed={**now.changed, **changed.shown(options)})
        if "aggregation" in options:
            center = after.center if "previous" in changed.rules.needs else None
            after = after._replace(ledger=replace(after.ledger, clip=None), center=center)
        if "policy" in options and not changed.algorithm.own_starts:
            least, repeats = now.round_number - changed.policy.max_staleness, changed.policy.buffer is not None
            starts = {} if repeats else {client: t for client, t in now.starts.items() if t >= least}
            after = after._replace(past={t: x for t, x in now.past.items() if t >= least}, starts=starts)
        if "lr" in options and not changed.algorithm.own_starts:
            after = after._replace(past={})  # late clients of these rounds used the old rate
        state.settings = changed
        return after, {"what": "a change of options", "options": changed.shown(options)}


@dataclass(frozen=True, eq=False, repr=False)
class ReplaceX(Change):
    """See ``Server.replace_x``. The vector is x, float32[n], which the state keeps.

    Attributes:
        counters: new counters; the others stay.
        nonnegative: the names of buffers that are non-negative in x.
    """

    counters: Counters
    nonnegative: Collection[str]
    has_buffers = True

    def __call__(self, state: State) -> tuple[Snapshot, Document]:
        now, x, layout = state.snapshot, self.vectors["x"], state.settings.layout
        freeze(x)
        own = {piece.name: self.counters[piece.name] for piece in layout.outside if piece.name in self.counters}
        after = now.with_replacement()._replace(x=x, counters={**now.counters, **own})
        # Without a step yet, g estimates no gradient at x_prev.
        pairs = ([now.x, now.x_prev], [1, -1]), ([now.momentum], [1])
        sends_x_prev = state.settings.algorithm.direction.b
        if not (sends_x_prev and any(combined_square(state.reducer, *pair) for pair in pairs)):
            after = after._replace(x_prev=x)
        if now.ahead is not None:
            p, ahead = layout.n_parameters, copied(x)
            kernels.combine([x[:p], now.ahead[:p], now.x[:p]], [1.0, 1.0, -1.0], ahead[:p])
            require_finite(ahead, layout)
            freeze(ahead)
            after = after._replace(ahead=ahead)
        kept = tuple(name for name in state.settings.started_nonnegative if name in self.nonnegative)
        state.settings = replace(state.settings, started_nonnegative=kept)
        return after, {"what": "a replacement of x"}


class WarmStart(Change):
    """See ``Server.warm_start``. The vectors are the clients' gradients."""

    def __call__(self, state: State) -> tuple[Snapshot, Document]:
        now, store, settings, k = state.snapshot, state.store, state.settings, len(self.clients)
        algorithm, vectors = settings.algorithm, [v for v in (now.momentum, now.total) if v is not None]
        if now.round_number or any(combined_square(state.reducer, [v], [1.0]) > 0 for v in vectors):
            raise RoundError("warm_start: it is possible only once, and before the first round")
        clients, ys = list(self.clients), list(self.vectors.values())
        ys = ys if state.upload is None else state.upload.vectors(ys)
        mean: F64 = empty(settings.layout.n_parameters, np.float64, device=settings.device)
        none, minus, ones = [None] * k, -np.ones(k), np.ones(k)
        squares = kernels.accumulate(None, none, ys, minus, ones / k, out=mean)
        if (bad := np.flatnonzero(~np.isfinite(squares))).size:
            raise ArrayError(f"gradients[{clients[int(bad[0])]!r}]: a number is NaN or infinite")
        after, share = now, 1.0
        if now.total is not None:
            total: Any = copied(now.total) if now.exact_total is None else now.exact_total.copied()
            if algorithm.keeps_rows:
                new, keys = store.stage_all(clients), rounding_keys(store, "a warm start", 0, clients)
                arguments = total, none, ys, minus, ones, none, none, new
                exchange_whole(store, clients, *arguments, out=total, keys=keys, reducer=state.reducer)
            else:
                kernels.accumulate(total, none, ys, minus, ones, out=total)
            if now.exact_total is not None:
                after, total = after._replace(exact_total=total), kernels.read_exact(total)
            after, mean, share = after._replace(total=total), total, 1 / len(store.registry)
        if algorithm.direction.b:
            after = after._replace(momentum=kernels.combine([mean], [share], state.model.directions.get()))
        facts = {"what": "a warm start", "clients": clients}
        if settings.audit:
            facts["digests"] = state.reducer.digests(*ys)
        return after, facts


@dataclass(frozen=True, repr=False)
class Query:
    """A question about a server's state: a function of it, as a value that can be sent and compared."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        """Return the answer of a state whose snapshot is ``now``."""
        raise NotImplementedError

    def joined(self, answers: Sequence[Any]) -> Any:
        """Return the answer of a server in shards, from those of the shards."""
        return answers[0]


@dataclass(frozen=True, repr=False)
class VectorQuery(Query):
    """Base class of queries for a vector.

    Attributes:
        client: the client whose vector it is; None for the server's.
        has_buffers: whether the vector has float buffers after the parameters.
    """

    client: ClientId | None = field(default=None, kw_only=True)
    has_buffers: ClassVar[bool] = False
    dtype: ClassVar[type] = np.float32

    def zeros(self, layout: Layout, device: str) -> Any:
        return zeros(layout.n if self.has_buffers else layout.n_parameters, self.dtype, device=device)


class Row(VectorQuery):
    """A copy of a client's row."""

    def __call__(self, state: State, now: Snapshot) -> F32:
        return state.store.read(self.client)


class Correction(VectorQuery):
    """c_i = v[t_i] - r_i, float64[n_parameters]; zero for a client without a row."""

    dtype = np.float64

    @ieee
    def __call__(self, state: State, now: Snapshot) -> Any:
        out = zeros(state.settings.layout.n_parameters, self.dtype, device=state.settings.device)
        if (round := state.store.round_of(self.client)) is None:
            return out
        return state.combined([(state.store.read(self.client), -1.0), (now.history.get(round), 1.0)], out)


class Offset(VectorQuery):
    """A client's offset; see ``Broadcast.offset``. That of a newcomer has no row, and no ``client``."""

    def __call__(self, state: State, now: Snapshot) -> Any:
        return state.offset(self.client, None)


@dataclass(frozen=True, repr=False)
class ModelVector(VectorQuery):
    """A model: x, the model that clients get, or x_{t-1}. It never changes.

    Attributes:
        rounded: whether it is rounded to the model's dtypes, as clients get it.
    """

    name: Literal["x", "sent", "x_prev"] = "x"
    rounded: bool = False
    has_buffers = True

    def __call__(self, state: State, now: Snapshot) -> F32:
        vector: F32 = getattr(now, self.name)
        return view_of(as_sent(state.settings.layout, vector) if self.rounded else vector)


X = ModelVector("x")


class Direction(VectorQuery):
    """A copy of v."""

    def __call__(self, state: State, now: Snapshot) -> F32:
        return copied(now.momentum)


class Total(VectorQuery):
    """A copy of T."""

    dtype = np.float64

    def __call__(self, state: State, now: Snapshot) -> F64 | None:
        return None if now.total is None else copied(now.total)


class Shared(Query):
    """The snapshot without the vectors of the model: what all shards of a server share."""

    def __call__(self, state: State, now: Snapshot) -> Snapshot:
        return now.shared()


class CountersQuery(Query):
    """The integer counters and constants by name."""

    def __call__(self, state: State, now: Snapshot) -> Counters:
        return {name: read_only(counter) for name, counter in now.counters.items()}


class Nonnegative(Query):
    """The names of the float buffers that must not become negative."""

    def __call__(self, state: State, now: Snapshot) -> list[str]:
        return [name for own in state.states for name in own.settings.nonnegative]

    def joined(self, answers: Sequence[Any]) -> Any:
        return [name for names in answers for name in names]


class ClientSizes(Query):
    """n_k of the registered clients, the smallest first; None without sizes."""

    def __call__(self, state: State, now: Snapshot) -> npt.NDArray[np.int64] | None:
        return now.population.listed()


class NamesRemoved(Query):
    """Whether ids of removed clients are kept, since their shares stay in the objective, or ids of updates."""

    def __call__(self, state: State, now: Snapshot) -> bool:
        return bool(now.population.included) or (IDS in now.norms and bool(now.norms[IDS][1:].any()))


class AuditLog(Query):
    """See ``Server.audit_log``."""

    def __call__(self, state: State, now: Snapshot) -> list[Document]:
        with audit_errors(state.store.path or "store"):
            texts = log_of(state.documents(), now.documents, now.audited)
            return [document for _, document in checked(texts, x=state.reducer.digests(state.read(X))[0])]


class SentChecksums(Query):
    """The checksums of the vectors that all clients get; those of shards together are the same."""

    def __call__(self, state: State, now: Snapshot) -> list[npt.NDArray[Any]]:
        sent = [now.sent, now.x_prev if state.settings.algorithm.direction.b else None, state.shared_offset()]
        return [checksums(to_host(vector), SUMMED) for vector in sent if vector is not None]

    def joined(self, answers: Sequence[Any]) -> Any:
        return [np.concatenate(parts) for parts in zip(*answers, strict=True)]


def concatenate(slices: Sequence[Any]) -> Any:
    """Return the concatenated vector, read-only."""
    vector = np.concatenate([np.asarray(one) for one in slices])
    vector.flags.writeable = False
    return vector
