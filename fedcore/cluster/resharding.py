"""Change the number of shards of a saved server, with bit-identical results."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from fedcore.algorithms import FedAvg
from fedcore.algorithms.rates import Constant
from fedcore.cluster import manifest as own
from fedcore.cluster.coordinator import shared_settings
from fedcore.cluster.manifest import NAME, Manifest, Range, ShardInfo, clean_up, cut, pieces_of, ranges_of
from fedcore.errors import CheckpointError, FedcoreError, RangeError, StoreError
from fedcore.model import Layout
from fedcore.options import Compute, Settings, Storage, describe, limits_from_state, revive
from fedcore.server.compatibility import require_compatible
from fedcore.server.folder import (
    JOURNAL,
    agree,
    checkpoint_errors,
    documents_in,
    journal_of,
    open_part,
    opened_stores,
    require_groups,
    server_state,
)
from fedcore.server.step import OF_MODEL
from fedcore.server.update import digest_of_text
from fedcore.server.validation import never_negative
from fedcore.store import ClientStore
from fedcore.store.client_store import Piece, joined, require_alike
from fedcore.store.files import disk
from fedcore.store.files.inventory import GROUPS
from fedcore.validation import absolute

_SHARED = ("counter", "population", "norms")
"""Kinds of vectors that are not cut. All shards have the same vector, or only the first has it (counters)."""

Progress = Callable[[int, int], object]


def reshard(
    path: str | os.PathLike[str],
    shards: int,
    *,
    to: str | os.PathLike[str] | None = None,
    folders: Sequence[str | os.PathLike[str]] | None = None,
    current_folders: Sequence[str | os.PathLike[str]] | None = None,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Change the number of shards of a saved server, or cut an unsharded server into shards.

    Later rounds have the same bits, and the journal keeps the updates of an open round. This process must be able to
    read and write all folders, and no server may use them.

    Args:
        path: a manifest or its folder; or the folder of an unsharded server, which then needs ``to``.
        shards: the new number of shards, at most one for each 16,384 parameters.
        to: a new folder for the manifest and the shards; the old ones stay. Default: the new shards replace the old
            ones.
        folders: new or empty folders for the new shards, for example one on each disk. Default: next to the manifest.
        current_folders: the folders of the present shards. Default: next to the manifest.
        progress: a function that is called with the number of written rows and their total.

    Returns:
        The path of the manifest.

    Raises:
        RangeError: an argument is invalid, or the server has an option that shards do not support.
        StoreError: the path has no server, a folder is in use, or a disk is full. Nothing has changed.
        CheckpointError, CorruptionError: the folders do not belong together, or are damaged. Nothing has changed.
        LockedError: a server uses the shards, or another call saves or reshards there.

    A killed call leaves either the old or the new shards complete. Call it again to delete the others, which
    ``cluster.json.intent`` next to the manifest lists.

    Cost: reads and writes every row once. Old and new shards need disk space at the same time.

    >>> import tempfile
    >>> from fedcore import Compute, Server
    >>> run, model = tempfile.mkdtemp(), np.zeros(70_000, np.float32)
    >>> Server(model, "MIFA", clients=2, lr=0.1, storage=run, compute=Compute(shards=2)).close()
    >>> manifest = reshard(run, 3)
    >>> with Server.load(manifest) as server:
    ...     manifest.name, len(server.clients)
    ('cluster.json', 2)
    """
    path, to = absolute(path), None if to is None else absolute(to, "to")
    found = own.manifest_at(path)
    if found is None and to is None:
        raise RangeError(
            f"to: {path} has an unsharded server; give a new folder for the shards"
            if path.is_dir()
            else f"path={str(path)!r}: not a manifest or a server's folder"
        )
    with ExitStack() as opened:
        old = _open_shards(*found, current_folders, opened) if found else _open_server(path, opened)
        ranges = ranges_of(old.layout, shards)
        names = own.folders_of([f"shard-{k}-{uuid4().hex[:8]}" for k in range(shards)], folders)
        is_copy = found is not None and to is None and found[1].is_copy
        manifest = Manifest(uuid4().hex, old.layout, ranges, names, is_copy)
        home = Path(os.path.realpath(found[0].parent if found and to is None else to or ""))
        journal = None if to is None else journal_of(found[0].parent if found else path)
        infos = manifest.shards(home, folders)
        named = frozenset(os.path.realpath(folder) for folder in (*(folders or ()), *(current_folders or ())))
        held = own.locked(home) if to is None else own.prepared(home, named)
        with held, disk.explained("resharding", home):
            clean_up(home, own.delete_shards, named=named)
            for info in infos:
                folder = Path(info.folder or "")
                if folder.exists() and (not folder.is_dir() or os.listdir(folder)):
                    raise StoreError(f"{folder}: is a file, or not empty; give a new or empty folder")
            own.write_intent(home, new=manifest, old=found[1] if found and to is None else None)
            try:
                old.write(infos, ranges, progress)
                if journal is not None:
                    with open_part(journal, readonly=True) as kept:
                        kept.save(home / JOURNAL)
                manifest.write(home / NAME)
            except BaseException:
                opened.close()
                if to is None:  # else prepared() deletes them
                    with suppress(FedcoreError):  # the manifest may be written, but not durable
                        clean_up(home, own.delete_shards, deletes_old=False, named=named)
                raise
            opened.close()
            clean_up(home, own.delete_shards, named=named)
    return home / NAME


@dataclass(frozen=True)
class _Shards:
    """The present shards; or their stores of one group of tensors, or of what the groups share.

    Attributes:
        layout: the layout of the whole model, or of the group.
        ranges, rows: the range and the store of each shard; one store, of all its elements, for what groups share.
        nonnegative: the float buffers that started non-negative.
        documents: the audit documents.
        groups: the stores of each group.
    """

    layout: Layout
    ranges: Sequence[Range]
    rows: Sequence[ClientStore]
    nonnegative: Collection[str]
    documents: Sequence[str]
    groups: Mapping[str, "_Shards"] = field(default_factory=dict)

    def write(self, infos: Sequence[ShardInfo], ranges: Sequence[Range], progress: Progress) -> None:
        """Write the new shards."""
        done, total = 0, len(infos) * sum(len(one.rows[0]) for one in (self, *self.groups.values()))

        def row_done() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        progress(0, total)
        for info, span in zip(infos, ranges, strict=True):
            assert info.folder is not None
            layout = cut(self.layout, span, counters=info.shard == 0)
            self.write_part(Path(info.folder), info, self.ranges[0] if self.groups else span, layout, row_done)

    def write_part(
        self, path: Path, info: ShardInfo, span: Range, layout: Layout, row_done: Callable[[], object]
    ) -> None:
        """Write a range to a store of a new shard, which has this layout, and the groups into its folder."""
        pieces = [
            Piece(rows, max(span.start, old.start) - old.start, min(span.end, old.end) - old.start)
            for rows, old in zip(self.rows, self.ranges, strict=True)
            if max(span.start, old.start) < min(span.end, old.end)
        ] or [Piece(self.rows[0], 0, 0)]
        names = [one for one in self.rows[0].vector_names() if info.shard == 0 or not one.startswith("counter/")]
        vectors = {name: self._vector(name, span) for name in names}
        documents = list(enumerate(self.documents))
        with joined(path, pieces, vectors, self._state(info, layout), documents, row_done) as folder:
            for i, (name, group) in enumerate(self.groups.items()):
                group.write_part(folder / GROUPS / str(i), info, info.groups[name], layout.of_groups[name], row_done)

    def _vector(self, name: str, span: Range) -> Any:
        """Return a range of a vector, from the shards' slices. Return a shared vector whole."""
        kind, slices = name.partition("/")[0], []
        for rows, old in zip(self.rows, self.ranges, strict=True):
            vector = rows.vector(name)
            assert vector is not None
            if kind in _SHARED:
                return vector
            stop = min(old.stop, span.stop) if kind in OF_MODEL else min(old.end, span.end)
            slices.append(vector[max(span.start, old.start) - old.start : max(0, stop - old.start)])
        joined = np.concatenate(slices)
        return joined if len(joined) else np.zeros(1, joined.dtype)  # of a group of which the shard has nothing

    def _state(self, info: ShardInfo, layout: Layout) -> dict[str, Any]:
        """Return the state of a new shard's store: that of an old shard, with a new place and layout."""
        state: dict[str, Any] = self.rows[0].state
        own = {"layout": layout.to_state(), "nonnegative": [name for name in layout.names if name in self.nonnegative]}
        changed = {"medium": "mmap", "device": "cpu", "undoable": True, "place": info.to_state()}
        if self.documents:  # perhaps with that of an undo
            last = {"documents": len(self.documents), "audited": digest_of_text(self.documents[-1])}
            changed["numbers"] = state["numbers"] | last
        return state | changed | {"settings": state["settings"] | own}


def _open_shards(
    file: Path, manifest: Manifest, folders: Sequence[str | os.PathLike[str]] | None, opened: ExitStack
) -> _Shards:
    """Open the shards of a manifest, locked and at one transaction."""
    infos = manifest.shards(file.parent, folders)
    stores = [[opened.enter_context(one) for one in info.open_all()] for info in infos]
    manifest.require_current(file)
    agree([one for own in stores for one in own])
    for alike in zip(*stores, strict=True):
        with checkpoint_errors(file):
            facts = [(rows.state["numbers"], shared_settings(rows.state["settings"])) for rows in alike]
            if any(one != facts[0] for one in facts):
                raise CheckpointError(f"{file}: the states of its shards differ; they do not belong to one server")
        require_alike(alike)
    with checkpoint_errors(file):
        return _of_stores(manifest.layout, manifest.ranges, stores, documents_in(stores[0][0], of_shard=True))


def _of_stores(
    layout: Layout, ranges: Sequence[Range], stores: Sequence[Sequence[ClientStore]], documents: Sequence[str]
) -> _Shards:
    """Return the present shards from the stores of each."""
    mains, *others = (list(of) for of in zip(*stores, strict=True))

    def kept(of: Sequence[ClientStore]) -> set[str]:
        return {name for rows in of for name in rows.state["settings"]["nonnegative"]}

    if not layout.groups:
        return _Shards(layout, ranges, mains, kept(mains), documents)
    pieces, groups = [pieces_of(layout, span) for span in ranges], dict[str, _Shards]()
    for (name, part), of in zip(layout.of_groups.items(), others, strict=True):
        groups[name] = _Shards(part, [one[name] for one in pieces], of, kept(of), [])
    n = mains[0].n
    return _Shards(layout, [Range(0, n, n)], mains[:1], (), documents, groups)


def _open_server(folder: Path, opened: ExitStack) -> _Shards:
    """Open the folder of an unsharded server at its last finished round."""
    stores = opened.enter_context(opened_stores(folder))
    with checkpoint_errors(folder):
        settings = server_state(folder, stores[0].state)["settings"]
        layout, known = Layout.from_state(settings["layout"]), _known(settings)
    own = ["Mean(weights)"] if settings.get("own_weights") else []
    require_compatible(known, Storage(medium="mmap"), Compute(shards=2), *own)
    with checkpoint_errors(folder):
        require_groups(folder, stores[0].state, [rows.state for rows in stores[1:]])
        documents = documents_in(stores[0])
        whole = Range(0, layout.n, layout.n_parameters)
        if not layout.groups and "nonnegative" not in settings:
            x = stores[0].vector("x")
            assert x is not None
            return _Shards(layout, [whole], stores, never_negative(layout, x), documents)
        return _of_stores(layout, [whole], [stores], documents)


def _known(saved: dict[str, Any]) -> Settings:
    """Return the settings of a folder, without the caller's own code, which ``Server.load`` checks."""
    for what, instead in (("algorithm", describe("algorithm", FedAvg())), ("optimizer", None)):
        with suppress(CheckpointError):
            revive(what, saved[what], None)
            continue
        saved = saved | {what: instead}
    try:
        limits_from_state(saved)
    except CheckpointError:
        saved = saved | {"rules": []}
    rate = Constant(1.0)  # in place of the caller's own
    return Settings.from_state(saved, {"algorithm": None, "optimizer": None, "lr": rate, "server_lr": rate})
