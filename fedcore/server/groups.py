"""The backend of a server with partial updates: one ``State`` for each group of tensors.

A group computes like a server of its tensors, in which a client that did not send the group was absent. The main store
has all clients. A client's row in it is the set of groups of its first update, if the method counts absent clients.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from fedcore.arrays import CPU, F32, F64, BufferPool, Floats, copied, core, empty, freeze, into, view_of
from fedcore.errors import RangeError
from fedcore.kernels import ExactSum
from fedcore.model import Layout
from fedcore.options import Settings
from fedcore.rules import Chain
from fedcore.rules.private import Ledger
from fedcore.server.aggregation import Counters, Lengths, Reducer, Result, UpdateBatch
from fedcore.server.partial import cut_sum
from fedcore.server.report import Diagnosis, Document, Report, report_of
from fedcore.server.requests import Change, ModelVector, Offset, Query, SentChecksums, VectorQuery, X
from fedcore.server.state import AwaitedClients, Documents, NewClients, Newcomers, State, Upload
from fedcore.server.step import PreparedStep, Snapshot
from fedcore.server.update import Kind, Update, as_vector, in_float32, joined_float32, raises_fedcore_errors
from fedcore.server.validation import ReadUpdate, UpdateReader, Weighing
from fedcore.store import ClientStore
from fedcore.store.registry import ClientId

NOTHING: F32 = np.empty(0, np.float32)
"""The vectors of the main snapshot: the groups have the model."""

Cohorts = list[tuple[Result, UpdateBatch]]
"""The sums of each group, and the accepted updates with the group."""


@raises_fedcore_errors
def read_tensors(update: Update, layout: Layout, buffers: BufferPool, device: str = CPU) -> tuple[list[Any], bool]:
    """Return the tensors of a partial update as the layout's slices, None for a missing one, and whether they stay.

    ``buffers`` is the pool whose vectors do not change.
    """
    tensors, n = list[Any]([None] * len(layout.slices)), layout.n_parameters if update.kind == "gradient" else layout.n
    if (vector := as_vector(update.kind, update.value, n, device=device)) is not None:
        fixed = core.are_immutable([vector]) or buffers.owns(vector)
        if device == CPU or isinstance(vector, np.ndarray):
            if vector.dtype == np.float64 and update.kind != "gradient":
                layout.log_rounded(layout.unflatten(vector))
            vector = np.require(in_float32(vector), requirements="A")
        return [vector[one.start : one.stop] if one.stop <= n else None for one in layout.slices], fixed
    for name, named in layout.split(update.value).items():
        own = layout.of_groups[name].pieces(named, device=device)
        for i, tensor in zip(layout.places[name], own, strict=True):
            tensors[i] = tensor
    return tensors, core.are_immutable([tensor for tensor in tensors if tensor is not None])


def sent_groups(layout: Layout, tensors: Sequence[Any]) -> list[str]:
    """Return the groups of the tensors of ``read_tensors``."""
    return [name for name, places in layout.places.items() if tensors[places[0]] is not None]


def vector_of(layout: Layout, name: str, tensors: Sequence[Any], device: str = CPU) -> Any:
    """Return a new vector of the tensors that a group has."""
    return joined_float32([tensors[i] for i in layout.places[name] if tensors[i] is not None], device)


class GroupReader(UpdateReader):
    """Reads updates that may lack groups. A vector is a list of the layout's tensors, with None for a missing one."""

    def __init__(self, settings: Settings, state: "GroupedState") -> None:
        super().__init__(settings, state)
        self._readers = {name: UpdateReader(group.settings, group) for name, group in state.groups.items()}
        self._own_starts: dict[str, int] = {}  # of the update that is read, by group, if the method has ``own_starts``

    def read(self, update: Update, client: ClientId) -> ReadUpdate:
        """See ``UpdateReader``; also raise if the client has left a group of the update."""
        found = super().read(update, client)
        self._state.require_groups(client, self._state.sent_groups(found[0].vectors[0]))
        return found

    def plain_updates(self, **_: bool) -> None:
        """Return None: models are cut into groups one by one."""

    def _read_vector(self, update: Update) -> tuple[Any, bool]:
        return read_tensors(update, self._settings.layout, self._state.update_buffers, self._settings.device)

    def check_buffers(self, y: Any, kind: Kind, started: int) -> None:
        """See ``UpdateReader``."""
        for name in self._state.sent_groups(y):
            own = self._own_starts.get(name, started)
            self._readers[name].check_buffers(self._state.tensors_of(name, y), kind, own)

    def last_start(self, client: ClientId, y: Any) -> int:
        """See ``UpdateReader``; of the client's updates that had one of these groups."""
        return max((self._readers[name].last_start(client, y) for name in self._state.sent_groups(y)), default=-1)

    def own_start(self, client: ClientId, y: Any) -> int:
        """See ``UpdateReader``; return the earliest of the groups in the update."""
        sent, number = self._state.sent_groups(y), self._state.round_number
        own = [name for name in sent if client in self._state.groups[name].registry]
        self._own_starts = dict.fromkeys(self._readers, number)
        self._own_starts |= {name: self._readers[name].own_start(client, y) for name in own}
        return min(self._own_starts.values())

    def start_of(self, round: int) -> list[Any]:
        """Return the model of that round as it was sent, by group."""
        return [reader.start_of(self._own_starts.get(name, round)) for name, reader in self._readers.items()]


class GroupSums:
    """The ``Sum`` of each group in an open round. An update is measured as a whole, and accepted or rejected whole."""

    def __init__(self, state: "GroupedState", newcomers: NewClients) -> None:
        self._state = state
        self._sums = {name: group.begin(newcomers) for name, group in state.groups.items()}
        self._weighings = {name: Weighing(group.settings, group) for name, group in state.groups.items()}
        self._folded: dict[str, list[UpdateBatch]] = {name: [] for name in state.groups}
        self._tried: list[tuple[str, UpdateBatch, Any, Any]] = []

    def try_fold(self, batch: UpdateBatch) -> Lengths:
        """See ``Sum``; return the lengths of whole updates."""
        has_controls, self._tried = self._state.settings.algorithm.second_vector is not None, []
        kept = {"parameters": True, "buffers": self._state.reducer.has_buffers, "controls": has_controls}
        columns = {of: np.zeros(len(batch)) for of, is_kept in kept.items() if is_kept}
        for name, part, at in self._parts(batch):
            lengths = self._sums[name].try_fold(part)
            for of, own in lengths._asdict().items():
                if own is not None:
                    columns.setdefault(of, np.zeros(len(batch)))[at] += own
            self._tried.append((name, part, at, lengths.parameters))
        return Lengths(**columns)

    def accept(self, batch: UpdateBatch) -> None:
        """See ``Sum``."""
        for name, part, _, squares in self._tried:
            self._sums[name].accept(part)
            self._keep(name, part, squares)

    def refold(self, batch: UpdateBatch, accepted: Any, factors: Any) -> tuple[UpdateBatch, Any]:
        """See ``Sum``."""
        squares = np.zeros(len(batch))
        for name, part, at in self._parts(batch):
            kept, own = self._sums[name].refold(part, accepted[at], factors[at])
            squares[at[accepted[at]]] += own
            self._keep(name, kept, own)
        batch.clip(factors)
        return batch.chosen(accepted), squares[accepted]

    def total(self, batch: UpdateBatch, rules: Chain, ledger: Ledger, *_: Any, **__: Any) -> Cohorts:
        """Return the sums and the accepted updates of each group; see ``Sum``. The noise is that of a whole vector."""
        of = {name: (self._folded[name], group.settings, group.registry) for name, group in self._state.groups.items()}
        cohorts = {name: UpdateBatch.cohort(*parts) for name, parts in of.items()}
        for name, cohort in cohorts.items():
            if rules.robust is not None and len(cohort):
                rules.require_enough(len(cohort), of=f" of the group {name!r}")
        totals: Cohorts = []
        for name, group in self._state.groups.items():
            cohort, now, sums = cohorts[name], group.snapshot, self._sums[name]
            result = sums.result() if rules.private else sums.total(cohort, rules, now.ledger, now.center)
            totals.append((result, cohort))
        for _, cohort in totals:  # only now: if a rule fails, the round stays open
            cohort.drop()
        if (private := rules.at(ledger).private) is None:
            return totals
        layout, named = self._state.settings.layout, dict(zip(cohorts, totals, strict=True))
        A: Any = empty(layout.n, np.float64, device=self._state.settings.device)
        layout.join({name: result.A for name, (result, _) in named.items()}, A)
        n = sum(group.reducer.count(group.settings.layout.n_parameters) for group in self._state.groups.values())
        ledger = private.add_noise(A, batch.factors, ledger, self._state.round_number, n=n)
        shared: dict[str, Any] = {"W": private.expected, "ledger": self._state.reducer.of_first(ledger)}
        return [(result._replace(A=layout.cut(A, name), **shared), part) for name, (result, part) in named.items()]

    def join(self, words: ExactSum, batch: UpdateBatch, _: Any, squares: F64) -> bool:
        """See ``Sum``; ``squares`` is ``PartialSum.group_squares``. If one group overflows, no group changes."""
        layout, of = self._state.settings.layout, [*zip(self._sums, squares, squares >= 0, strict=True)]
        parts = [(name, batch.chosen(has), own[has]) for name, own, has in of if has.any()]
        if not all(self._sums[name].try_join(cut_sum(layout, words, name)) for name, _, _ in parts):
            return False
        for name, part, own in parts:
            self._sums[name].accept(part)
            self._keep(name, part, own)
        return True

    def words(self) -> tuple[ExactSum, None]:
        """See ``Sum``."""
        layout: Any = self._state.settings.layout
        parts = zip(*(own.words()[0] for own in self._sums.values()), strict=True)
        words = (layout.join(dict(zip(self._sums, of, strict=True)), empty(layout.n, np.int64)) for of in parts)
        return ExactSum(*words), None

    def squares_of(self, clients: Sequence[ClientId]) -> F64:
        """Return ``PartialSum.group_squares`` of the folded updates."""
        at, squares = {client: i for i, client in enumerate(clients)}, np.full((len(self._sums), len(clients)), -1.0)
        for own, parts in zip(squares, self._folded.values(), strict=True):
            for part in parts:
                own[[at[client] for client in part.clients]] = part.squares
        return squares

    def _keep(self, name: str, part: UpdateBatch, squares: Any) -> None:
        if len(part):
            part.settle(squares, self._state.settings, self._state.round_number)
            self._folded[name].append(part)

    def _parts(self, batch: UpdateBatch) -> Iterator[tuple[str, UpdateBatch, Any]]:
        """Yield each group that some updates have, its part of these updates, and their indices."""
        sent, layout = [self._state.sent_groups(y) for y in batch.vectors], self._state.settings.layout
        device = self._state.settings.device
        for i, name in enumerate(self._sums):
            at = np.flatnonzero([name in groups for groups in sent])
            if len(at):
                part = batch.chosen(at)
                part.vectors = [self._state.tensors_of(name, y) for y in part.vectors]
                part.controls = [None if c is None else layout.cut(in_float32(c, device), name) for c in part.controls]
                part.bases = [None if base is None else base[i] for base in part.bases]
                if self._state.settings.algorithm.own_starts:
                    part.starts = np.array(list(map(self._state.groups[name].last_round, part.clients)))
                self._weighings[name].weigh(part)
                yield name, part, at


class GroupedState(State):
    """The states of the groups, which change together; ``store`` and ``snapshot`` have only what they share.

    A change is one transaction in the main store and in the store of each group. It is complete once the last store has
    committed it. After a crash, ``saved_state`` rolls back the stores that are ahead.
    """

    reader = GroupReader

    def __init__(
        self, settings: Settings, now: Snapshot, store: ClientStore, groups: dict[str, State], reducer: Reducer | None
    ) -> None:
        layout = settings.layout
        self.settings, self.snapshot, self.store, self.groups = settings, now, store, groups
        self.holds_files = store.medium == "mmap"
        self.reducer, device = reducer or Reducer(has_buffers=layout.n > layout.n_parameters), settings.device
        self.upload = None if device == CPU else Upload(device, {layout.n, layout.n_parameters}, settings.batch_size)
        for group in groups.values():
            group.upload = None  # updates are brought whole
        self.newcomers = Newcomers(store, weighs_shares=settings.algorithm.needs_shares)
        self.update_buffers = BufferPool(layout.n, most=settings.batch_size, device=settings.device)
        self.waiting = AwaitedClients()
        self._steps: list[PreparedStep] = []
        self._new_sets: dict[ClientId, F32] = {}
        self._refresh()

    # The groups of an update.

    def sent_groups(self, y: Any) -> list[str]:
        """Return the groups of an update's vector."""
        return sent_groups(self.settings.layout, y)

    def tensors_of(self, name: str, y: Any) -> Any:
        """Return a group's vector, as a round of the group reads it."""
        layout, group = self.settings.layout, self.groups[name]
        if group.settings.copies_models or (group.settings.algorithm.keeps_rows and group.store.codec != "f32"):
            return vector_of(layout, name, y, group.settings.device)
        return [y[i] for i in layout.places[name]]

    def require_groups(self, client: ClientId, sent: list[str]) -> None:
        """Raise RangeError if an update has a group that the client has left; see ``accept``."""
        if others := [name for name in sent if client not in self.groups[name].registry]:
            first = [name for name, has in zip(self.groups, self.store.read(client), strict=True) if has]
            raise RangeError(
                f"update: has the group {others[0]}, but the client's first update had only {', '.join(first)}; send "
                "these or fewer, or remove the client and add it again"
            )

    # A round.

    def begin(self, newcomers: NewClients) -> Any:
        """See ``State``."""
        self.abandon()
        self._admit(newcomers)
        return GroupSums(self, newcomers)

    def start_from(self, x: F32, round: int) -> None:
        """See ``State``."""
        for name, group in self.groups.items():
            part = self.settings.layout.cut(x, name)
            freeze(part)
            group.start_from(part, round)
        self.snapshot = self.snapshot._replace(round_number=round)
        self._refresh()

    def buffers_square(self) -> float:
        """See ``State``."""
        return sum(group.buffers_square() for group in self.groups.values())

    def shared_offset(self) -> None:
        """Return None: each group has its own offset."""

    def prepare(self, result: Any, batch: UpdateBatch, norms: Mapping[str, Floats]) -> PreparedStep:
        """Return the step of all groups; see ``State``."""
        now, number, self._steps = self.snapshot, self.round_number, []
        fixed = self.settings.algorithm.counts_absent and not self.settings.rules.private
        reports: dict[str, Report] = {}
        sets: dict[ClientId, F32] = {}
        cohorts: Cohorts = result
        for i, ((name, group), (sums, cohort)) in enumerate(zip(self.groups.items(), cohorts, strict=True)):
            group.newcomers.accepted = None if fixed else batch.clients
            step = group.prepare(sums, cohort, {})
            # Noise is a step, so that no one sees whether clients took part.
            if not (fixed or len(cohort) or sums.ledger):
                step = step._replace(after=step.after._replace(idle=step.after.idle + 1))
            offset = group.shared_offset()
            found = Diagnosis(group.settings, group.store, step, cohort, offset, group.reducer).measure()
            reports[name] = report_of(group.settings, step, cohort, found)
            self._steps.append(step)
            for client in cohort.clients if fixed else ():
                sets.setdefault(client, np.zeros(len(self.groups), np.float32))[i] = 1
        self._new_sets = {client: own for client, own in sets.items() if self.store.round_of(client) is None}
        for client, own in self._new_sets.items():
            row: Any = self.store.stage(client)
            row[:] = own
        population = self.newcomers.settle(batch.clients, now)
        after = now._replace(round_number=number + 1, norms=norms, population=population, changed={}, starts={})
        after = after._replace(transactions=now.transactions + 1, ledger=step.after.ledger)
        return PreparedStep(
            *(now, None, None, after),  # type: ignore[arg-type]  # the groups have the sums and the cohorts
            gamma=max(step.gamma for step in self._steps),
            waiting_for=max(step.waiting_for for step in self._steps),
            most_steps=next((step.most_steps for step in self._steps if step.most_steps is not None), None),
            groups=reports,
        )

    def accept(self, after: Snapshot, facts: Document | None = None) -> None:
        """See ``State``. A client leaves the groups that its first accepted update lacks, if the method counts it."""
        afters = list[Snapshot]()
        with self.changing():
            for i, (group, step) in enumerate(zip(self.groups.values(), self._steps, strict=True)):
                population = step.after.population
                for client in [one for one, own in self._new_sets.items() if not own[i] and one in group.registry]:
                    population = population.without_client(group.registry.number(client), client, from_objective=True)
                    group.store.forget(client)
                afters.append(step.after._replace(population=population))
            for state, own in zip(self.states, [*afters, after], strict=True):
                state.become(own, state.round_number, facts if state is self else None)
        self.forget_newcomers()

    def abandon(self) -> None:
        """See ``State``."""
        self._steps, self._new_sets = [], {}
        self.newcomers.forget()
        self.store.discard()
        for group in self.groups.values():
            group.abandon()

    # Changes: one transaction in each store.

    @property
    def states(self) -> list[State]:
        """See ``State``. The last one has the audit document of a change, with the x of the others after it."""
        return [*self.groups.values(), self]

    def cut(self, change: Change) -> list[Change]:
        """See ``State``. The model of a change has no part in the main store."""
        cut, parts = self.settings.layout.cut, list[Change]()
        for name, group in self.groups.items():
            vectors = {of: cut(vector, name) for of, vector in change.vectors.items()} if change.has_buffers else {}
            parts.append(replace(change.among(group.registry), vectors=vectors))
        return [*parts, replace(change, vectors=dict.fromkeys(change.vectors, NOTHING))]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """See ``State``. If a change fails after the first commit, close the stores."""
        first, before = self.states[0].store, [state.snapshot for state in self.states]
        commits = first.commits
        with ExitStack() as stack:
            stack.enter_context(super().changing())
            for group in self.groups.values():
                stack.enter_context(group.changing())
            try:
                yield
            except BaseException as error:
                if first.commits != commits:
                    error.add_note("only some groups were changed; close the server and load it again")
                    for state, snapshot in zip(self.states, before, strict=True):
                        state.snapshot = snapshot
                        state.store.rollback()
                    self.close()
                raise
            self._refresh()

    def become(self, after: Snapshot, round: int, facts: Document | None) -> None:
        """See ``State``."""
        after, documents = self._documented(after, facts)
        self.keep(after, round, documents)
        self.snapshot = after
        self.refer_to_disk()

    def keep(self, after: Snapshot, round: int, documents: Documents = ()) -> None:
        """See ``State``."""
        if self.store.medium == "mmap":
            super().keep(after, round, documents)
        else:
            self.store.commit(round, documents=documents)

    def _digests(self, after: Snapshot) -> tuple[str, str]:
        """See ``State``; the groups have changed already, but readers still see them as before."""
        later = self._gathered(X, {name: group.snapshot for name, group in self.groups.items()})
        return tuple(self.reducer.digests(self.read(X), later))  # type: ignore[return-value]  # of two

    def _vectors(self, snapshot: Snapshot) -> dict[str, Any]:
        return snapshot.population.vectors() | {f"norms/{name}": norms for name, norms in snapshot.norms.items()}

    def _refresh(self) -> None:
        """Show the groups' snapshots to readers, without vectors that were gathered before."""
        counters: Counters = {}
        for group in self.groups.values():
            counters |= group.snapshot.counters
            past = dict.fromkeys(group.snapshot.past, NOTHING)
        shown: dict[Query, F32] = {}
        # One statement: a reader in another thread must not mix two rounds.
        self._shown = {name: group.snapshot for name, group in self.groups.items()}, shown
        self.snapshot = self.snapshot._replace(counters=counters, past=past)

    # The vectors of the whole model.

    def facts(self) -> dict[str, Any]:
        """See ``State``."""
        return {**super().facts(), "rows": None, "groups": tuple(self.groups)}

    def read(self, query: Any) -> Any:
        """See ``State``. A client's vectors are zero for the groups that it does not send."""
        if isinstance(query, SentChecksums):
            present = [group for group in self.groups.values() if group.reducer.is_present]
            return query.joined([query(group, group.snapshot) for group in present])
        if not isinstance(query, VectorQuery):
            return super().read(query)
        self.store.require_files()
        snapshots, gathered = self._shown
        if query in gathered:
            return view_of(gathered[query])
        whole = self._gathered(query, snapshots)
        if isinstance(query, ModelVector):
            freeze(whole)
            gathered[query] = whole
        return view_of(whole)

    def _gathered(self, query: VectorQuery, snapshots: Mapping[str, Snapshot]) -> Any:
        layout, client = self.settings.layout, query.client
        having = {name: one for name, one in self.groups.items() if client is None or client in one.registry}
        parts = {name: query(group, snapshots[name]) for name, group in having.items()}
        return layout.join(parts, query.zeros(layout, self.settings.device))

    def sent_model(self, name: Literal["sent", "x_prev"]) -> F32:
        """See ``State``."""
        model: F32 = self.read(ModelVector(name, rounded=bool(self.settings.layout.narrow)))
        return model

    def start_for(self, client: ClientId) -> F32:
        """See ``State``; the present model for the groups that the client does not send."""
        parts = {name: one.start_for(client) for name, one in self.groups.items() if client in one.registry}
        return self.settings.layout.join(parts, copied(self.sent_model("sent")))

    def offset(self, client: ClientId | None, out: Any) -> Any:
        """See ``State``; zero for the groups that a client does not send."""
        return into(self.read(Offset(client=None if client is None else self.registry.check(client))), out)

    # The stores.

    def compact(self, erase: bool) -> None:
        """See ``Server.compact``."""
        try:
            super().compact(erase)
        finally:
            self._refresh()

    def verify(self) -> list[str]:
        """Return the damage found, by group."""
        found = [f"group {name!r}: {line}" for name, group in self.groups.items() for line in group.verify()]
        return [*self.store.verify(), *found]


class Context(NamedTuple):
    """What a state gets from its shard: the class for groups, and the reducers by group; None for what these share."""

    kind: type[GroupedState] = GroupedState
    reducers: Mapping[str | None, Reducer] = MappingProxyType({})


NO_SHARD = Context()
