"""The state of a server in shards, for ``Compute(shards=...)``. Results have the same bits as without shards.

Each shard has a range of the parameters and that part of every row, on its own disk. The round runs here: it reads,
weighs and decides on updates once. The shards fold their slices, and take the step.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from fedcore.arrays import F32, F64, Bools, BufferPool, core
from fedcore.cluster import manifest as folders
from fedcore.cluster.coordinator import Coordinator, GatheredVectors
from fedcore.cluster.manifest import NAME, Manifest, Range, cut, ranges_of
from fedcore.errors import ArrayError, ClusterError, FedcoreError, RangeError, StoreError
from fedcore.files import closed_on_error, resolve_own_links
from fedcore.kernels import ExactSum
from fedcore.model import Layout
from fedcore.options import DESCRIBED, Compute, Settings, Storage
from fedcore.rules import Chain
from fedcore.server.aggregation import Lengths, UpdateBatch
from fedcore.server.broadcast import SentVectors
from fedcore.server.folder import JOURNAL, Journal
from fedcore.server.groups import read_tensors, sent_groups, vector_of
from fedcore.server.opening import Asked, require_audit, require_named_rates, require_saved
from fedcore.server.report import Diagnostics
from fedcore.server.requests import Change, ChangeOptions, ModelVector, Offset, Shared, VectorQuery
from fedcore.server.state import AwaitedClients, NewClients, State
from fedcore.server.step import Population, PreparedStep, Snapshot
from fedcore.server.update import Kind, SentSlices, SlicedVector, Slices, Update, as_vector, read_vector
from fedcore.server.validation import ReadUpdate, UpdateReader, read_control
from fedcore.store.registry import ClientId, Registry
from fedcore.validation import absolute


class SliceReader(UpdateReader):
    """Reads updates into a ``SlicedVector`` each. ``Slices`` are passed on to the shards, which check them.

    A model of named tensors is flattened first, so that its length has the same bits as that of a flat vector.
    """

    _state: "ShardedState"

    def plain_updates(self, **_: bool) -> None:
        """Return None: vectors are cut one by one."""

    def require_form(self, update: Update) -> None:
        """See ``UpdateReader``."""
        for name, vector in ((update.kind, update.value), ("control", update.control)):
            if isinstance(vector, Slices):
                if self._settings.layout.groups:
                    raise RangeError(f"{name}: a server with partial updates takes no slices; send tensors by name")
                vector.require(name, len(self._state.ranges))

    def bytes_of(self, update: Update, batch: UpdateBatch | None) -> int:
        """See ``UpdateReader``; rejected slices count as float32."""
        n = self._settings.layout.n_parameters if update.kind == "gradient" else self._settings.layout.n
        sent = 4 * n if batch is None else batch.bytes
        return sent if isinstance(update.value, Slices) else super().bytes_of(update, batch)

    def whole(self, vector: SlicedVector | None) -> Any:
        """See ``UpdateReader``."""
        return None if vector is None else vector.whole

    def check_buffers(self, y: SlicedVector, kind: Kind, started: int) -> None:
        """See ``UpdateReader``; the last shard has the buffers."""
        if self._settings.layout.n > self._settings.layout.n_parameters:
            self._state.check("check_buffers", y, kind, started)

    def start_of(self, round: int) -> int:
        """Return the number of the round; the shards have the models."""
        return round

    def _is_immutable(self, vector: SlicedVector) -> bool:
        return vector.is_immutable

    def _read_vector(self, update: Update) -> tuple[SlicedVector, bool]:
        kind, layout = update.kind, self._settings.layout
        has_buffers = kind != "gradient"
        if isinstance(update.value, Slices):
            sliced = self._state.read_slices(kind, update.value, has_buffers=has_buffers)
            return sliced, sliced.is_immutable
        vector, is_fixed = read_vector(update, layout, apart=False)
        is_fixed |= self._state.update_buffers.owns(vector)
        sliced = self._state.slices_of(vector, has_buffers=has_buffers, is_immutable=is_fixed)
        return sliced, sliced.is_immutable

    def _read_control(self, control: Any) -> Any:
        if self._settings.algorithm.second_vector is None:
            return None
        if isinstance(control, Slices):
            return self._state.read_slices("control", control, has_buffers=False)
        vector = read_control(control, self._settings.layout.n_parameters)
        return self._state.slices_of(vector, has_buffers=False, is_immutable=core.are_immutable([vector]))


class GroupSliceReader(SliceReader):
    """Reads updates that may lack groups of tensors; see ``GroupReader``. The shards know the clients of each group."""

    def read(self, update: Update, client: ClientId) -> ReadUpdate:
        """See ``GroupReader``."""
        found = super().read(update, client)
        if self._settings.algorithm.counts_absent:
            self._of_groups("require_groups", client, found[0].vectors[0])
        return found

    def last_start(self, client: ClientId, y: SlicedVector) -> int:
        """See ``GroupReader``."""
        return int(self._of_groups("last_start", client, y))

    def own_start(self, client: ClientId, y: SlicedVector) -> int:
        """See ``GroupReader``; the shards' readers note the starts of the groups."""
        return int(self._of_groups("own_start", client, y))

    def _of_groups(self, name: str, client: ClientId, y: SlicedVector) -> Any:
        each: list[tuple[Any, ...]] = [()] * len(self._state.ranges)
        return self._state.valid("of_groups", name, client, y.groups, each=each)[0]

    def _read_vector(self, update: Update) -> tuple[SlicedVector, bool]:
        layout, kind = self._settings.layout, update.kind
        tensors, is_fixed = read_tensors(update, layout, self._state.update_buffers)
        groups = sent_groups(layout, tensors)
        parts = self._state.manifest.slices({name: vector_of(layout, name, tensors) for name in groups})
        whole = tensors if self._state.needs_whole else None
        sent = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        placement = self._state.coordinator.placement
        is_fixed |= placement.copies
        return SlicedVector([*map(placement.put, parts)], sent, kind != "gradient", is_fixed, whole, groups), is_fixed


class ShardSums:
    """The sums of an open round: each shard has a ``Sum`` of its slices. An update is measured as a whole."""

    def __init__(self, coordinator: Coordinator, manifest: Manifest) -> None:
        self._coordinator, self._manifest = coordinator, manifest

    def try_fold(self, batch: UpdateBatch) -> Lengths:
        """See ``Sum``."""
        sliced = [one for one in (*batch.vectors, *batch.controls) if one is not None]
        each = [tuple(one.parts[k] for one in sliced) for k in range(len(self._coordinator))]
        lengths: Lengths = self._coordinator.call("try_fold", batch.without_vectors(), each=each)[0]
        return lengths

    def accept(self, batch: UpdateBatch) -> None:
        """See ``Sum``."""
        self._coordinator.call("accept")

    def refold(self, batch: UpdateBatch, accepted: Bools, factors: F64) -> tuple[UpdateBatch, F64]:
        """See ``Sum``."""
        squares: F64 = self._coordinator.call("refold", batch.without_vectors(), accepted, factors)[0]
        batch = batch.chosen(accepted)
        batch.clip(factors[accepted])
        return batch, squares

    def join(self, words: ExactSum, batch: UpdateBatch, changes: ExactSum | None = None, *more: Any) -> bool:
        """See ``Sum``."""
        sums = [words] if changes is None else [words, changes]
        more = (changes, *more) if more else ()
        put = self._coordinator.placement.put
        cut = [map(put, self._manifest.slices(word)) for pair in sums for word in pair]
        return bool(self._coordinator.call("join", batch, more, each=[*zip(*cut, strict=True)])[0])

    def words(self) -> tuple[ExactSum, ExactSum | None]:
        """See ``Sum``."""
        words, changes = zip(*self._coordinator.call("words"), strict=True)
        return self._joined(words), None if changes[0] is None else self._joined(changes)

    def _joined(self, slices: Sequence[ExactSum]) -> ExactSum:
        return ExactSum(*map(self._coordinator.joined, zip(*slices, strict=True)))

    def squares_of(self, clients: Sequence[ClientId]) -> F64:
        """See ``GroupSums``."""
        return np.asarray(self._coordinator.call("of_groups", "squares_of", clients)[0])

    def total(self, batch: UpdateBatch, rules: Chain, *_: Any, has_noise: bool) -> bool:
        """Return ``has_noise``; the shards compute the sums in their step. For errors see ``Sum``."""
        if rules.robust is not None and len(batch):
            if not self._manifest.layout.groups:
                rules.require_enough(len(batch))
            for name in self._manifest.layout.groups:
                if count := sum(name in y.groups for y in batch.vectors):
                    rules.require_enough(count, of=f" of the group {name!r}")
        return has_noise


class ShardedState(State):
    """What the shards share: clients, counters, norms, round numbers. The shards have the vectors and the rows.

    A change is complete once the last shard's transaction is durable. After a crash, ``saved_state`` rolls back the
    shards that are ahead.
    """

    reader: type[UpdateReader] = SliceReader
    defers_signals = False
    holds_files = True  # shards cannot be copied

    def __init__(self, settings: Settings, manifest: Manifest, home: Path | None, coordinator: Coordinator) -> None:
        self.settings, self.manifest, self.home, self.coordinator = settings, manifest, home, coordinator
        self.reader = GroupSliceReader if settings.layout.groups else SliceReader
        self.compute, self.upload = Compute(shards=len(manifest.ranges)), None
        self.update_buffers = BufferPool(settings.layout.n, most=settings.batch_size)
        self.waiting = AwaitedClients()
        self._joining: list[ClientId] = []  # the newcomers of the open round
        self._joined: Population | None = None
        self._round_of: int | None = None  # the coordinator's ``openings`` when the round was opened in the shards
        self._marked: tuple[Any, Snapshot] | None = None  # with the mark of the shards' state
        self._registry: Registry | None = None
        self._registry_at = 0  # the coordinator's ``openings`` when the registry was read

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The range of each shard."""
        return self.manifest.ranges

    @property
    def snapshot(self) -> Snapshot:
        """The state without vectors of the model, read once from a shard after each change."""
        mark = self.coordinator.openings, self.coordinator.state
        if self._marked is None or self._marked[0] != mark:
            self._marked = mark, self._first("read", Shared())
        return self._marked[1]

    @snapshot.setter
    def snapshot(self, snapshot: Snapshot) -> None:
        """Replace it in this process until the next change, for an edge's norms."""
        self._marked = (self.coordinator.openings, self.coordinator.state), snapshot

    @property
    def registry(self) -> Registry:
        """The registered clients, read once from a shard."""
        if (registry := self._registry) is None:
            registry = self._registry = Registry.restore(*self._first("registry"))
            self._registry_at = self.coordinator.openings
        return registry

    def learn_clients(self, clients: Sequence[ClientId]) -> None:
        """Update the registry after a change that may have added or removed these clients.

        If a shard is lost, raise no error, since the change has happened. The whole registry is then read on its next
        use.
        """
        if not clients:
            return
        known, self._registry = self._registry, None
        if known is None or self._registry_at != self.coordinator.openings:
            return
        with suppress(FedcoreError):
            numbers: list[int | None] = self._first("client_numbers", clients)
            freed = {known.number(client): None for client in clients if client in known}
            known.reassign(freed | {n: client for n, client in zip(numbers, clients, strict=True) if n is not None})
            self._registry = known

    @property
    def population(self) -> Population:
        """See ``State``."""
        return self._joined or self.snapshot.population

    @property
    def round_number(self) -> int:
        """See ``State``."""
        return self.coordinator.state.round_number

    @property
    def transactions(self) -> int:
        """See ``State``."""
        return self.coordinator.state.transactions

    @property
    def folder(self) -> Path | None:
        """See ``State``."""
        return self.home

    def facts(self) -> dict[str, Any]:
        """See ``State``."""
        return {"shards": len(self.ranges), "storage": "ram" if self.home is None else str(self.home)}

    # Updates in slices.

    @property
    def needs_whole(self) -> bool:
        """Whether this process needs whole updates: it writes the journal, and computes the audit's digests."""
        return self.settings.journal or self.settings.audit

    def slices_of(self, vector: Any, *, has_buffers: bool, is_immutable: bool) -> SlicedVector:
        """Cut a vector into the slices that are sent to the shards."""
        placement = self.coordinator.placement
        stop = None if has_buffers else self.settings.layout.n_parameters
        parts = [*map(placement.put, self.manifest.slices(vector[:stop]))]
        whole = vector if self.needs_whole else None
        return SlicedVector(parts, vector.nbytes, has_buffers, placement.copies or is_immutable, whole)

    def read_slices(self, name: str, sent: Slices, *, has_buffers: bool) -> SlicedVector:
        """Check the slices of a client; raise ArrayError if one is invalid."""
        digests: Sequence[str | None] = sent.digests or [None] * len(self.ranges)
        each = [*zip(digests, sent.parts, strict=True)]
        found = self.valid("check_slice", name, has_buffers, self.needs_whole, each=each)
        is_immutable = self.coordinator.placement.copies or core.are_immutable(list(sent.parts))
        whole = np.concatenate([part for _, part in found]) if self.needs_whole else None
        return SlicedVector(sent.parts, sum(nbytes for nbytes, _ in found), has_buffers, is_immutable, whole)

    def check(self, what: str, y: SlicedVector, *arguments: Any) -> None:
        """Raise ArrayError if a shard's check of its slice fails."""
        self.valid(what, *arguments, each=[(part,) for part in y.parts])

    def valid(self, name: str, *shared: Any, each: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the results of a check; each shard returns an error as text, or a result."""
        results = self.coordinator.call("valid", name, *shared, each=each)
        for result in reversed(results):  # the last shard has the buffers
            if isinstance(result, str):
                raise ArrayError(result)
        return results

    def first_not_finite(self, y: Any) -> str | None:
        """See ``State``."""
        found = self.coordinator.call("first_not_finite", y.has_buffers, each=[(part,) for part in y.parts])
        return next(filter(None, found), None)

    # A round.

    def begin(self, newcomers: NewClients) -> Any:
        """See ``State``."""
        self.abandon()
        self._joining = list(newcomers)
        try:
            given = dict(newcomers) if isinstance(newcomers, Mapping) else self._joining
            self._joined = self._first("begin_round", given)
            self._round_of = self.coordinator.openings
            self.learn_clients(self._joining)
        except BaseException:
            self._round_of = self.coordinator.openings  # the shards may have begun
            self.abandon()
            raise
        return ShardSums(self.coordinator, self.manifest)

    def require_open_round(self) -> None:
        """Raise ClusterError if a shard was lost since the round was opened."""
        if self._round_of != self.coordinator.openings:
            raise ClusterError("round: a shard was lost and the round was rolled back; open it again")

    def take_step(
        self, opened: Any, result: Any, batch: UpdateBatch, norms: Mapping[str, Any], rejected: Sequence[Any]
    ) -> tuple[PreparedStep, Diagnostics]:
        """See ``State``. Each shard takes the step of its range."""
        before, opening = self.snapshot, self.coordinator.openings
        prepared, found = self.coordinator.change("finish", norms, rejected, result, rounds=1)
        opened.is_open = False
        if opening == self.coordinator.openings:  # otherwise the result may not be of the first shard
            self._marked = (opening, self.coordinator.state), prepared.after
        self._end_round()
        return prepared._replace(before=before), found

    def buffers_square(self) -> float:
        """See ``State``."""
        return float(self._first("buffers_square"))

    def without_row(self, most: int) -> list[ClientId]:
        """See ``State``; empty if a shard was just lost, since this is for a line of the log."""
        with suppress(FedcoreError):
            return list(self._first("without_row", most))
        return []

    def abandon(self) -> None:
        """See ``State``."""
        if self._round_of == self.coordinator.openings:  # otherwise the shards have dropped the round already
            with suppress(FedcoreError):  # the next call raises it again
                self.coordinator.call("abort")
        self._end_round()

    forget_newcomers = abandon

    def _end_round(self) -> None:
        self._round_of = self._joined = None
        self.learn_clients(self._joining)
        self._joining = []

    # Changes and queries between rounds.

    def read(self, query: Any) -> Any:
        """See ``State``; the shards' answers are joined."""
        answers = self.coordinator.call("read", query)
        return self.coordinator.joined(answers) if isinstance(query, VectorQuery) else query.joined(answers)

    def apply(self, change: Change) -> None:
        """See ``State``; the shards get parts of its vectors."""
        changed, due = self.settings, self.transactions + 1
        if isinstance(change, ChangeOptions):
            changed = self.settings.changed(change.options)
            require_named_rates(changed, change.options)
        parts, digests = [], []
        for name, vector in change.vectors.items():
            parts.append(self._parts_of(name, vector, has_buffers=change.has_buffers))
            digests.append(vector.digests if isinstance(vector, Slices) else None)
        each = [([own and own[k] for own in digests], *(own[k] for own in parts)) for k in range(len(self.ranges))]
        try:
            self.coordinator.change("apply", replace(change, vectors=dict.fromkeys(change.vectors)), each=each)
        finally:
            self.learn_clients(change.clients)
            if self.transactions == due:
                self.settings = changed
                self.coordinator.given = {**self.coordinator.given, "aggregation": changed.rules}

    def _parts_of(self, name: str, vector: Any, *, has_buffers: bool) -> Sequence[Any]:
        """Return the slices of a vector, in the form that is sent to the shards."""
        if isinstance(vector, Slices):
            vector.require(name, len(self.ranges))
            return vector.parts
        layout = self.settings.layout
        vector = as_vector(name, vector, layout.n if has_buffers else layout.n_parameters)
        return self.slices_of(vector, has_buffers=has_buffers, is_immutable=False).parts

    def verify(self) -> list[str]:
        """Return the damage found, by shard."""
        found = self.coordinator.call("verify")
        return [f"shard {k}: {line}" for k, lines in enumerate(found) for line in lines]

    def _first(self, name: str, *arguments: Any) -> Any:
        return self.coordinator.call(name, *arguments)[0]

    def keeps_journal(self, on: bool) -> None:
        """See ``State``."""
        super().keeps_journal(on)
        self.coordinator.call("keeps_journal", on)

    def prefetch(self, clients: Collection[ClientId]) -> None:
        """See ``State``."""
        if clients:
            self.coordinator.call("prefetch", clients)

    def sent_vectors(self, clients: Sequence[ClientId], new: Collection[ClientId]) -> SentVectors:
        """Return the vectors of a broadcast. Workers on Ray read their slices from the shards."""
        number, fetch = self.round_number, self.coordinator.fetch
        if self.settings.algorithm.keeps_rows:
            self.prefetch([client for client in clients if client not in new])

        def is_new(what: str, client: ClientId) -> bool:
            self.require_round(what, number)
            return client in new and client not in self.registry

        def offset(client: ClientId) -> list[Any]:
            return fetch("read", Offset(client=None if is_new("offset", client) else client))

        def start(client: ClientId) -> Any:
            if is_new("start", client):
                model = self.read(ModelVector("sent", rounded=True))
            else:
                model = self.coordinator.joined(self.coordinator.call("start_for", self.registry.check(client)))
            self.require_round("start", number)  # it may have finished meanwhile
            return model

        x_prev = fetch("read", ModelVector("x_prev", rounded=True)) if self.settings.algorithm.direction.b else None
        sent = SentSlices(self.ranges, fetch("read", ModelVector("sent", rounded=True)), x_prev, offset)
        has_slices = self.coordinator.placement.has_references and not self.settings.layout.groups
        starts = start if self.settings.algorithm.own_starts else None
        return GatheredVectors(self.coordinator, sent, sent if has_slices else None, starts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a copy of each shard on its own machine, and the manifest last.

        A killed save leaves the older copy intact. The next save deletes the unfinished files, which
        ``cluster.json.intent`` lists.
        """
        home = absolute(path)
        place = resolve_own_links(home)
        if self.home is not None and place == Path(os.path.realpath(self.home)):
            raise StoreError(f"{home}: is the server's own folder; save to a different folder")
        folders.make_folder(home)
        with folders.locked(home):
            folders.clean_up(home, self._delete)
            before = folders.older_copy(home)
            if before is not None:
                self.coordinator.call("require_unused", [info.folder for info in before.shards(home)])
            mark = uuid4().hex[:8]
            names = tuple(f"shard-{k}-{mark}" for k in range(len(self.ranges)))
            copy = replace(self.manifest, folders=names, is_copy=True)
            folders.write_intent(home, new=copy, old=before)
            try:
                self.coordinator.call("save", each=[(info.folder,) for info in copy.shards(home)])
                copy.write(home / NAME)
            except FedcoreError:
                with suppress(FedcoreError):  # the next save tries again
                    folders.clean_up(home, self._delete, deletes_old=False)
                raise
            folders.clean_up(home, self._delete)

    def _delete(self, cluster: str, paths: Sequence[str]) -> bool:
        """Delete parts of a copy, each by the shard that wrote it; return whether all are deleted."""
        return all(self.coordinator.call("delete_copy", cluster, list(paths)))

    def checkpoint(self) -> None:
        """See ``State``."""
        self.coordinator.call("checkpoint")

    def compact(self, erase: bool) -> None:
        """See ``State``."""
        self.abandon()
        self._marked = None  # its columns are in the files
        self.coordinator.call("compact", erase)

    def close(self) -> None:
        """Close the shards."""
        self.coordinator.drop()


def new_state(model: Any, settings: Settings, clients: Asked, storage: Storage, compute: Compute) -> ShardedState:
    """Return the state of a new server in shards. For arguments see ``Server``."""
    layout, ranges = settings.layout, ranges_of(settings.layout, compute.shards or 1)
    x, is_new = _flat(model, layout)
    home = None if storage.path is None else Path(storage.path)
    named = None if home is None else folders.folders_of([f"shard-{k}" for k in range(len(ranges))], storage.folders)
    with nullcontext(uuid4().hex) if home is None else folders.prepared(home, storage.folders or ()) as cluster:
        manifest = Manifest(cluster, layout, ranges, named)
        if home is not None:
            folders.write_intent(home, new=manifest, old=None)  # a creation that follows a kill replaces these shards
        again = {what: getattr(settings, what) for what in DESCRIBED}
        again |= {"aggregation": settings.rules, "audit_key": (key := storage.audit_key)}
        check = partial(manifest.require_current, (home or Path()) / NAME)
        infos = manifest.shards(home, storage.folders)
        coordinator = Coordinator(compute.executor, infos, storage.durability_of_parts, again, check, manifest.joined)
        state = ShardedState(settings, manifest, home, coordinator)
        counters = layout.read_counters(model)
        own = [replace(settings, layout=cut(layout, span, counters=k == 0)) for k, span in enumerate(ranges)]
        of_first = [counters, *[{}] * (len(ranges) - 1)]
        each = [*zip(own, manifest.slices(x), of_first, strict=True)]
        place = Storage(codec=storage.codec or "f32", durability=storage.durability_of_parts, audit_key=key)
        state.coordinator.make(clients, place, is_new, each=each)
        with closed_on_error(state):
            try:
                _ = state.registry  # read now
                if home is not None:
                    if storage.journal:  # before the manifest, so that a load finds it
                        Journal(home / JOURNAL, settings).close()
                    manifest.write(home / NAME)
                    folders.clean_up(home, folders.delete_shards)
            except BaseException:
                if home is not None and not os.path.lexists(home / NAME):
                    with suppress(Exception):  # prepared() deletes those on this machine
                        coordinator.call("unmake")
                raise
        return state


def saved_state(
    file: Path, given: Mapping[str, Any], storage: Storage, compute: Compute
) -> tuple[ShardedState, dict[str, Any]]:
    """Return the state of a manifest at its last finished round, and the saved settings.

    ``given`` has the objects that the caller passes again; see ``checked_objects``. For errors see ``Server.load``.
    Raise a LockedError if another process uses a shard for 10 seconds.
    """
    if storage.medium not in (None, "mmap"):
        raise RangeError(f"medium={storage.medium!r}: shards always continue in their folders; leave it out")
    manifest = Manifest.read(file)
    if compute.shards not in (None, len(manifest.ranges)):
        raise RangeError(
            f"shards={compute.shards}: the server has {len(manifest.ranges)} shards; leave it out, or change the "
            "number with fedcore.cluster.reshard"
        )
    infos = manifest.shards(file.parent, storage.folders)
    check = partial(manifest.require_current, file)
    given = {**given, "audit_key": storage.audit_key}
    coordinator = Coordinator(compute.executor, infos, storage.durability_of_parts, given, check, manifest.joined)
    coordinator.open()
    try:
        assert coordinator.settings is not None
        require_saved("codec", coordinator.settings["codec"], storage.codec)
        require_audit(coordinator.settings, storage)
        saved = coordinator.settings | {"layout": manifest.layout.to_state()}
        settings = Settings.from_state(saved, given, compute)
        require_saved("diagnostics", saved.get("diagnostics"), compute.diagnostics)
        state = ShardedState(settings, manifest, file.parent, coordinator)
        _ = state.registry
        if os.path.lexists(file.parent / folders.INTENT):
            with suppress(FedcoreError, OSError), folders.locked(file.parent):  # of a call that was killed at its end
                folders.clean_up(file.parent, folders.delete_shards)
    except BaseException:
        coordinator.drop()
        raise
    return state, saved


def _flat(model: Any, layout: Layout) -> tuple[F32, bool]:
    """Return the first model as one vector, and whether its memory is new."""
    if isinstance(model, np.ndarray) and model.dtype == np.float32 and model.ndim == 1 and model.flags.c_contiguous:
        return model, False
    return layout.flatten(model), True
