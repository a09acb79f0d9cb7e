"""The backend of a server in shards, for ``Compute(shards=...)``. Results have the same bits as without shards.

Each shard has a range of the parameters and that part of every row, on its own disk.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from fedcore.arrays import F32, BufferPool, core, empty
from fedcore.cluster import manifest as folders
from fedcore.cluster.coordinator import Coordinator, GatheredVectors
from fedcore.cluster.manifest import NAME, Manifest, Range, cut, ranges_of
from fedcore.cluster.placement import LocalThreads
from fedcore.cluster.shard import Finished, Slice, settings_of_shard
from fedcore.errors import ClusterError, FedcoreError, RangeError, RoundError, StoreError
from fedcore.files import resolve_own_links
from fedcore.model import Layout
from fedcore.options import Callback, Compute, Settings, Storage, checked_objects
from fedcore.server.broadcast import SentVectors
from fedcore.server.folder import JOURNAL, Journal
from fedcore.server.opening import require_named_rates, require_saved
from fedcore.server.report import Report, tell
from fedcore.server.requests import Change, ChangeOptions, ModelVector, Offset, Query
from fedcore.server.round import LOGGER, SECOND, Round, one_call
from fedcore.server.state import NewClients
from fedcore.server.step import Sizes
from fedcore.server.update import (
    SentSlices,
    Slices,
    Staging,
    Update,
    as_vector,
    bytes_of,
    read_counters,
    read_vector,
)
from fedcore.server.validation import never_negative, read_control
from fedcore.store.registry import ClientId, Registry
from fedcore.validation import absolute


class ShardedRound(Round):
    """An open round of a server in shards. It cuts updates into slices and sends them to the shards in batches.

    ``Slices`` are passed on to the shards. A model of named tensors is flattened first, so that its length has the same
    bits as that of a flat vector.
    """

    def __init__(
        self, backend: "ShardedBackend", *, batch_size: int, may_hold: bool, callbacks: Sequence[Callback] = ()
    ) -> None:
        number = backend.coordinator.state.round_number
        super().__init__(backend.settings, number, batch_size, may_hold=may_hold, callbacks=callbacks)
        self._backend, self._coordinator = backend, backend.coordinator
        self._ranges, self._registry = backend.ranges, backend.registry
        self._opening = self._coordinator.openings
        self._new: list[ClientId] = []
        self._held: list[tuple[Update, list[list[Any]]]] = []
        self._staging = Staging(BufferPool(backend.settings.layout.n), batch_size, backend.home)

    def start(self, newcomers: NewClients) -> None:
        """Open the round in the shards."""
        listed = self._newcomers = dict(newcomers) if isinstance(newcomers, Mapping) else list(newcomers)
        try:
            self._coordinator.call("begin_round", listed)
            self._opening = self._coordinator.openings
            self._new = list(listed)
            self._learn_clients()
            self._backend.newcomers = self._new
        except BaseException:
            self.is_open = False
            raise

    def _learn_clients(self) -> None:
        self._backend.newcomers = []
        if self._new:
            self._backend.learn_clients(self._new)
        self._registry = self._backend.registry

    @property
    def _clients(self) -> Registry:
        return self._registry

    def _counts(self) -> dict[str, int]:
        return {**super()._counts(), "shards": len(self._ranges)}

    def _require_open(self) -> None:
        super()._require_open()
        if self._coordinator.openings != self._opening:
            self._abort()
            raise ClusterError("round: a shard was lost and the round was rolled back; open it again")

    def buffer(self) -> F32:
        """See ``Round.buffer``."""
        self._require_open()
        return empty(self._settings.layout.n)

    def add_batch(self, updates: Sequence[Update]) -> list[bool]:
        """See ``Round.add_batch``."""
        return [self._add(update) for update in updates]

    @one_call
    def _add(self, update: Update) -> bool:
        began = time.perf_counter()
        self._require_open()
        client = self._check(update, self._registry)
        if self._is_second(client):
            self._rejected.append((client, SECOND))
            return False
        for name, vector in ((update.kind, update.value), ("control", update.control)):
            if isinstance(vector, Slices):
                vector.require(name, len(self._ranges))
                if self._journal is not None:
                    raise RangeError(
                        f"{name}: the journal, which the coordinator writes, needs whole vectors; send the whole "
                        "vector, or load the server with Storage(journal=False)"
                    )
        layout, slices = self._settings.layout, [list[Any]() for _ in self._ranges]

        def read() -> tuple[Any, bool, Any]:
            return *read_vector(update, layout, apart=False), read_counters(update, layout)

        def read_second() -> tuple[Any, bool, Any]:
            vector = read_control(update.control, layout.n_parameters)
            return vector, core.are_immutable([vector]), {}

        value, vector, is_fixed = self._cut(update.value, read, slices, has_buffers=update.kind != "gradient")
        second, control, has_error = None, None, value.error is not None
        if has_error:
            self._bytes += bytes_of(update.value)
        elif self._settings.algorithm.second_vector is not None:
            second, control, is_second_fixed = self._cut(update.control, read_second, slices, has_buffers=False)
            has_error, is_fixed = second.error is not None, is_fixed and is_second_fixed
        is_valid = not has_error and self._has_valid_claims(update)
        if is_valid and (reason := self._write_to_journal(client, update, vector, control)) is not None:
            self._rejected.append((client, reason))
            return False
        self._held.append((update._replace(client=client, value=value, control=second), slices))
        self._known.add(client)
        may_wait = self._may_hold or update.keep is True or is_fixed or self._coordinator.placement.copies
        if len(self._held) >= self._batch_size or not may_wait:
            self._fold_held()
        self._note_arrivals()
        self._seconds += time.perf_counter() - began
        return client in self._known

    def _has_valid_claims(self, update: Update) -> bool:
        """Whether the journal can take the update; if not, the shards reject it with the reason."""
        try:
            return self._journal is None or self._checked(update) is not None
        except FedcoreError:
            return False

    def finish(self) -> Report:
        """Take the server step and close the round.

        Raises:
            RoundError: the round is closed, or has fewer accepted clients than ``RoundPolicy.min_clients``; then it
                stays open.
            DivergedError: x would become infinite or NaN; the server is unchanged.
            ClusterError: a shard was lost. Either the round was rolled back and may be run again, or it was committed
                and its report is lost; ``Server.round_number`` shows which.
            StoreError: the disk is full, for example; the round was rolled back in all shards.
        """
        finished, report = self._finish()
        for record in finished.records:
            if LOGGER.isEnabledFor(record.levelno):
                LOGGER.handle(record)
        tell(self._callbacks, report, LOGGER)
        return report

    @one_call
    def _finish(self) -> tuple[Finished, Report]:
        began = time.perf_counter()
        self._require_open()
        self._settle()
        try:
            finished: Finished = self._coordinator.change("finish", rounds=1)
        except BaseException:
            self._abort()
            raise
        self.is_open = False
        self._empty_journal()
        self._learn_clients()
        seconds = self._seconds + time.perf_counter() - began
        rejected, accepted = (*self._rejected, *finished.rejected), finished.report.accepted
        self.report = replace(
            finished.report,
            rejected=rejected,
            seconds=seconds,
            bytes=self._bytes,
            closed=self.attendance.reason(accepted, rejected),
            missing=self.attendance.missing(accepted, rejected),
        )
        return finished, self.report

    def _settle(self) -> None:
        """Send the held updates; if a number of clients is needed, also decide on all updates."""
        self._require_enough()
        self._fold_held()
        chain = self._settings.rules
        if self.attendance.policy.min_clients or chain.robust is not None:
            try:
                rejected: list[tuple[ClientId, str]] = self._coordinator.call("settle")[0]
            except BaseException:
                self._abort()
                raise
            self._reject(rejected)
            self._require_enough()
        if chain.robust is not None and self._known:
            chain.require_enough(len(self._known))

    def _reject(self, rejected: Sequence[tuple[ClientId, str]]) -> None:
        self._rejected += rejected
        self._known.difference_update(client for client, _ in rejected)
        self._keep_in_journal(self._known)

    def _abort(self) -> None:
        if self.is_open:
            self.is_open = False
            self._held.clear()
            if self._coordinator.openings == self._opening:  # otherwise the shards have already dropped the round
                with suppress(FedcoreError):  # the next call raises it again
                    self._coordinator.call("abort")
            with suppress(FedcoreError):
                self._learn_clients()

    def _cut(
        self, given: Any, read: Callable[[], tuple[Any, bool, Any]], slices: list[list[Any]], *, has_buffers: bool
    ) -> tuple[Slice, Any, bool]:
        """Append the slices of a vector, or record its error. Return also the vector, and whether it is immutable."""
        if isinstance(given, Slices):
            _append(slices, given.parts)
            return Slice(digests=given.digests), None, True
        try:
            vector, is_fixed, counters = read()
        except FedcoreError as error:
            return Slice(error), None, True
        put = self._coordinator.placement.put
        _append(slices, [put(vector[span.start : span.stop if has_buffers else span.end]) for span in self._ranges])
        return Slice(counters=counters, is_named=not bytes_of(given)), vector, is_fixed

    def _fold_held(self, *, last: bool = False) -> None:
        """Send the held updates to the shards. A rejected client may send another update."""
        held, self._held = self._held, []
        if not held:
            return
        try:
            each = []
            for k in range(len(self._ranges)):
                updates = [
                    one._replace(value=one.value.of_shard(k), control=one.control and one.control.of_shard(k))
                    for one, _ in held
                ]
                each.append((updates, *(vector for _, slices in held for vector in slices[k])))
            rejected, sizes = zip(*self._coordinator.call("add", each=each), strict=True)
        except BaseException:
            self._abort()
            raise
        self._bytes += sum(sizes)
        self._reject(rejected[0])


def _append(slices: Sequence[list[Any]], parts: Sequence[Any]) -> None:
    for own, part in zip(slices, parts, strict=True):
        own.append(part)


class ShardedBackend:
    """The state of a ``Server`` in shards, with the methods of ``State`` that ``Server`` calls.

    A change is complete once the last shard's transaction is durable. After a crash, ``saved_backend`` rolls back the
    shards that are ahead.
    """

    holds_files = True  # shards cannot be copied

    def __init__(self, settings: Settings, manifest: Manifest, home: Path | None, coordinator: Coordinator) -> None:
        self.settings, self.manifest, self.home, self.coordinator = settings, manifest, home, coordinator
        self.newcomers: list[ClientId] = []  # of the open round
        self._registry: Registry | None = None
        self._registry_at = 0  # the coordinator's ``openings`` when the registry was read

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The range of each shard."""
        return self.manifest.ranges

    @property
    def registry(self) -> Registry:
        """The registered clients, read once from a shard."""
        if self._registry is None:
            self.read_registry()
        assert self._registry is not None
        return self._registry

    def read_registry(self) -> None:
        """Read the registered clients from a shard."""
        registry = Registry.restore(*self._first("registry"))
        self._registry, self._registry_at = registry, self.coordinator.openings

    def learn_clients(self, clients: Iterable[ClientId]) -> None:
        """Update the registry after a change that may have added or removed these clients.

        If a shard is lost, raise no error, since the change has happened. The whole registry is then read on its next
        use.
        """
        known, self._registry = self._registry, None
        if known is None or self._registry_at != self.coordinator.openings:
            return
        with suppress(FedcoreError):
            listed = list(clients)
            numbers: list[int | None] = self._first("client_numbers", listed)
            freed = {known.number(client): None for client in listed if client in known}
            known.reassign(freed | {n: client for n, client in zip(numbers, listed, strict=True) if n is not None})
            self._registry = known

    @property
    def round_number(self) -> int:
        """The number of finished rounds."""
        return self.coordinator.state.round_number

    @property
    def transactions(self) -> int:
        """The number of transactions."""
        return self.coordinator.state.transactions

    def facts(self) -> dict[str, Any]:
        """Return facts for ``repr``."""
        return {"shards": len(self.ranges), "storage": "ram" if self.home is None else str(self.home)}

    def read(self, query: Query) -> Any:
        """See ``State``; the shards' answers are joined."""
        return query.joined(self.coordinator.call("read", query))

    def apply(self, change: Change) -> None:
        """See ``State``; the shards get parts of its vectors."""
        changed, due = self.settings, self.transactions + 1
        if isinstance(change, ChangeOptions):
            changed = self.settings.changed(change.options)
            require_named_rates(changed, change.options)
        slices, digests = [], []
        for name, vector in change.vectors.items():
            slices.append(self._slices_of(name, vector, has_buffers=change.has_buffers))
            digests.append(vector.digests if isinstance(vector, Slices) else None)
        each = [([own and own[k] for own in digests], *(own[k] for own in slices)) for k in range(len(self.ranges))]
        try:
            self.coordinator.change("apply", replace(change, vectors=dict.fromkeys(change.vectors)), each=each)
        finally:
            if change.clients:
                self.learn_clients(change.clients)
            if self.transactions == due:
                self.settings = changed

    def verify(self) -> list[str]:
        """Return the damage found, by shard."""
        found = self.coordinator.call("verify")
        return [f"shard {k}: {line}" for k, lines in enumerate(found) for line in lines]

    def _first(self, name: str, *arguments: Any) -> Any:
        return self.coordinator.call(name, *arguments)[0]

    def new_round(self, kind: Any, **options: Any) -> ShardedRound:
        """Return a round that has not begun."""
        return ShardedRound(self, **options)

    def forget_newcomers(self) -> None:
        """Discard the newcomers of a dropped round; each shard discards the rest before its next change."""
        if self.newcomers:
            self.coordinator.call("abort")
            dropped, self.newcomers = self.newcomers, []
            self.learn_clients(dropped)

    abandon = forget_newcomers

    def keeps_journal(self, on: bool) -> None:
        """See ``State``."""
        self.settings = replace(self.settings, journal=on)
        self.coordinator.call("keeps_journal", on)

    def sent_vectors(self, clients: Sequence[ClientId], new: Collection[ClientId]) -> SentVectors:
        """Return the vectors of a broadcast. Workers on Ray read their slices from the shards."""
        number, fetch = self.round_number, self.coordinator.fetch
        if self.settings.algorithm.keeps_rows:
            self.coordinator.call("prefetch", [client for client in clients if client not in new])

        def offset(client: ClientId) -> list[Any]:
            if self.round_number != number:
                raise RoundError(
                    f"offset: the broadcast for round {number} is out of date, since round {self.round_number} is "
                    "next; make a new broadcast"
                )
            return fetch("read", Offset(client=None if client in new and client not in self.registry else client))

        x_prev = fetch("read", ModelVector("x_prev", rounded=True)) if self.settings.algorithm.direction.b else None
        sent = SentSlices(self.ranges, fetch("read", ModelVector("sent", rounded=True)), x_prev, offset)
        is_whole = self.settings.journal or not self.coordinator.placement.has_references
        return GatheredVectors(self.coordinator, sent, None if is_whole else sent)

    def _slices_of(self, name: str, vector: Any, *, has_buffers: bool) -> Sequence[Any]:
        """Return a vector's slices, in the form that is sent to the shards."""
        if isinstance(vector, Slices):
            vector.require(name, len(self.ranges))
            return vector.parts
        layout, put = self.settings.layout, self.coordinator.placement.put
        vector = as_vector(name, vector, layout.n if has_buffers else layout.n_parameters)
        return [put(vector[span.start : span.stop if has_buffers else span.end]) for span in self.ranges]

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
        """See ``Server.checkpoint``."""
        self.coordinator.call("checkpoint")

    def compact(self, erase: bool) -> None:
        """See ``Server.compact``."""
        self.coordinator.call("compact", erase)

    def close(self) -> None:
        """Close the shards."""
        self.coordinator.drop()


def new_backend(
    model: Any,
    settings: Settings,
    clients: int | Iterable[ClientId] | None,
    sizes: Sizes | None,
    storage: Storage,
    compute: Compute,
) -> ShardedBackend:
    """Return the backend of a new server in shards. For arguments see ``Server``."""
    layout = settings.layout
    if clients is None:
        raise RangeError("clients: must be given, as a count or the ids")
    ranges = ranges_of(layout, compute.shards or 1)
    x, is_new = _flat(model, layout)
    settings = replace(settings, started_nonnegative=never_negative(layout, x))
    home = None if storage.path is None else Path(storage.path)
    named = None if home is None else folders.folders_of([f"shard-{k}" for k in range(len(ranges))], storage.folders)
    with nullcontext(uuid4().hex) if home is None else folders.prepared(home, storage.folders or ()) as cluster:
        manifest = Manifest(cluster, layout, ranges, named)
        if home is not None:
            folders.write_intent(home, new=manifest, old=None)  # a creation that follows a kill replaces these shards
        listed = clients if isinstance(clients, int) else list(clients)
        again = checked_objects(settings.algorithm, settings.lr, settings.server_lr, settings.optimizer)
        placement = LocalThreads() if compute.executor is None else compute.executor
        check = partial(manifest.require_current, (home or Path()) / NAME)
        infos = manifest.shards(home, storage.folders)
        backend = ShardedBackend(
            settings, manifest, home, Coordinator(placement, infos, storage.durability_of_parts, again, check)
        )
        counters = layout.read_counters(model)
        each = [
            (
                settings_of_shard(settings, cut(layout, span, counters=k == 0)),
                x[span.start : span.stop],
                counters if k == 0 else {},
            )
            for k, span in enumerate(ranges)
        ]
        try:
            backend.coordinator.make(
                listed, sizes, storage.codec or "f32", storage.durability_of_parts, is_new, each=each
            )
        except BaseException:
            if home is not None and not any(os.path.lexists(info.folder or "") for info in infos):
                (home / folders.INTENT).unlink()
            raise
        try:
            if home is not None:
                if storage.journal:  # before the manifest, so that a load finds it
                    Journal(home / JOURNAL, settings).close()
                manifest.write(home / NAME)
                (home / folders.INTENT).unlink()
            backend.read_registry()
        except BaseException:
            backend.close()
            raise
        return backend


def saved_backend(
    file: Path, given: Mapping[str, Any], storage: Storage, compute: Compute
) -> tuple[ShardedBackend, dict[str, Any]]:
    """Return the backend of a manifest at its last finished round, and the saved settings.

    ``given`` are the objects that the caller passes again; see ``checked_objects``. For errors see ``Server.load``.
    Raise a LockedError if another process uses a shard for 10 seconds.
    """
    if storage.medium == "ram":
        raise RangeError(
            "medium='ram': not supported with shards, which always continue in their folders; leave it out"
        )
    manifest = Manifest.read(file)
    if compute.shards not in (None, len(manifest.ranges)):
        raise RangeError(
            f"shards={compute.shards}: the server has {len(manifest.ranges)} shards; leave it out, or change the "
            "number with fedcore.cluster.reshard"
        )
    infos = manifest.shards(file.parent, storage.folders)
    placement = LocalThreads() if compute.executor is None else compute.executor
    check = partial(manifest.require_current, file)
    coordinator = Coordinator(placement, infos, storage.durability_of_parts, given, check)
    coordinator.open()
    try:
        assert coordinator.settings is not None
        require_saved("codec", coordinator.settings["codec"], storage.codec)
        saved = coordinator.settings | {"layout": manifest.layout.to_state()}
        settings = Settings.from_state(saved, given, compute)
        require_saved("diagnostics", saved.get("diagnostics"), compute.diagnostics)
        backend = ShardedBackend(settings, manifest, file.parent, coordinator)
        backend.read_registry()
    except BaseException:
        coordinator.drop()
        raise
    return backend, saved


def _flat(model: Any, layout: Layout) -> tuple[F32, bool]:
    """Return the first model as one vector, and whether its memory is new."""
    if isinstance(model, np.ndarray) and model.dtype == np.float32 and model.ndim == 1 and model.flags.c_contiguous:
        return model, False
    return layout.flatten(model), True
