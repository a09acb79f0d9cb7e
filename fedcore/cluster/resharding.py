"""Another number of shards: a cluster's folders, or one server's, cut anew, without a number that changes."""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from fedcore.algorithms.descriptions import revive
from fedcore.arguments import absolute
from fedcore.cluster.coordinator import common, least
from fedcore.cluster.deleting import delete_shard
from fedcore.cluster.intent import declare, finish
from fedcore.cluster.manifest import (
    NAME,
    Manifest,
    alone_in,
    folders_of,
    manifest_at,
    prepare,
)
from fedcore.cluster.ranges import Range, cut, ranges_of, require_elementwise
from fedcore.cluster.shard import Place, shard_in
from fedcore.errors import CheckpointError, FedcoreError, RangeError, StoreError
from fedcore.layout import Layout
from fedcore.server.buffers import SIGNED, never_negative
from fedcore.server.folder_checks import believed, server_state
from fedcore.server.snapshot import OF_MODEL
from fedcore.server.transactions import go_back, transactions
from fedcore.store import ClientStore
from fedcore.store.files import system_calls as disk
from fedcore.store.joining import Piece, join, require_alike

_SHARED = ("counter", "population", "norms")
"""Kinds of vectors that are no slices: of all shards alike, and the counters, which are the first's."""

Progress = Callable[[int, int], object]


def reshard(
    path: str | os.PathLike[str],
    shards: int,
    *,
    to: str | os.PathLike[str] | None = None,
    folders: Sequence[str | os.PathLike[str]] | None = None,
    current_folders: Sequence[str | os.PathLike[str]] | None = None,
    progress: Progress = lambda done, due: None,
) -> Path:
    """Cut a cluster anew, or the folder of one ``fedcore.Server``, into another number of shards.

    Rounds go on with the bits that they would have had. All folders must lie where this process can read and write
    them, and no server may have them.

    Args:
        path: a cluster's manifest or its folder; or the folder of a ``fedcore.Server``, which then needs ``to``.
        shards: how many: at most one for 16,384 parameters.
        to: a folder for the new manifest and shards; what is at ``path`` stays as it is. None puts the new shards in
            the place of the old ones, which are deleted once the new manifest is there.
        folders: the new shards' folders where they lie elsewhere, on a disk each: new, or empty.
        current_folders: the present shards' folders where they do not lie beside the manifest.
        progress: called with the rows that are written, and those there will be.

    Returns:
        the manifest.

    Raises:
        RangeError: an argument is refused; or the server does what a cluster cannot.
        StoreError: there is nothing to cut; a folder is in use; a disk is full: it is as it was.
        CheckpointError, CorruptionError: the folders are not one server's, or are damaged: it is as it was.
        LockedError: a server has the cluster, or somebody saves to the folder.

    Killed, it leaves the old shards or the new ones, whole, and may be done again, which deletes what was left over:
    ``cluster.json.intent``, beside the manifest, says what that is.

    Cost: reads and writes every row once; old and new shards are on the disks together.

    >>> import tempfile; from fedcore import cluster
    >>> run = tempfile.mkdtemp()
    >>> cluster.Server("MIFA", np.zeros(70_000, np.float32), 2, lr=0.1, shards=2, path=run).close()
    >>> with cluster.Server.load(reshard(run, 3)) as server:
    ...     len(server.ranges)
    3
    """
    path, to = absolute(path), None if to is None else absolute(to)
    found = manifest_at(path)
    if found is None and to is None:
        raise RangeError(
            f"to: expected a folder for the cluster that is made of one server's, {path}, got None"
            if path.is_dir()
            else f"path: expected a cluster's manifest or a server's folder, got {path}, where there is neither"
        )
    with ExitStack() as opened:
        old = _cluster(*found, current_folders, opened) if found else _server(path, opened)
        ranges = ranges_of(old.layout, shards)
        names = folders_of([f"shard-{k}-{uuid4().hex[:8]}" for k in range(shards)], folders)
        is_copy = found is not None and to is None and found[1].is_copy
        manifest = Manifest(uuid4().hex, old.layout, ranges, names, is_copy)
        home = Path(os.path.realpath(found[0].parent if found and to is None else to or ""))
        if to is not None:
            prepare(home)
        places = manifest.places(home, folders)
        named = frozenset(os.path.realpath(folder) for folder in (*(folders or ()), *(current_folders or ())))
        with alone_in(home), disk.explained("cutting a cluster", home):
            finish(home, _delete, named=named)
            _require_free(places)
            declare(home, made=manifest, going=found[1] if found and to is None else None)
            try:
                old.write(places, ranges, progress)
                manifest.write(home / NAME)
            except BaseException:
                opened.close()
                with suppress(FedcoreError):
                    finish(home, _delete, goes=False, named=named)  # the manifest may be there, and not yet safe
                raise
            opened.close()
            finish(home, _delete, named=named)
    return home / NAME


def _delete(cluster: str, folders: Sequence[str]) -> bool:
    """Delete shards, which all lie here. Who waited for one's lock finds another manifest, and lets it go."""
    gone = [delete_shard(cluster, folder, shard_in(os.path.basename(folder))) for folder in folders]
    return all(gone)


def _require_free(places: Sequence[Place]) -> None:
    """Raise a StoreError unless the new shards' folders are new or empty."""
    for place in places:
        assert place.folder is not None
        if os.path.exists(place.folder) and (not os.path.isdir(place.folder) or os.listdir(place.folder)):
            raise StoreError(f"{place.folder}: expected a new or empty folder, got one in use")


@dataclass(frozen=True)
class _Shards:
    """The shards that there are.

    Attributes:
        layout: of the whole model.
        ranges, rows: of each.
        nonnegative: the float buffers that a reply may not make negative.
    """

    layout: Layout
    ranges: Sequence[Range]
    rows: Sequence[ClientStore]
    nonnegative: Collection[str]

    def write(self, places: Sequence[Place], ranges: Sequence[Range], progress: Progress) -> None:
        """Write the new shards."""
        done, due = 0, len(self.rows[0]) * len(places)

        def row_done() -> None:
            nonlocal done
            done += 1
            progress(done, due)

        progress(0, due)
        for place, span in zip(places, ranges, strict=True):
            assert place.folder is not None
            pieces = [
                Piece(rows, max(span.start, old.start) - old.start, min(span.end, old.end) - old.start)
                for rows, old in zip(self.rows, self.ranges, strict=True)
                if max(span.start, old.start) < min(span.end, old.end)
            ]
            names = self.rows[0].vector_names()
            vectors = {
                name: self._vector(name, span) for name in names if place.shard == 0 or not name.startswith("counter/")
            }
            join(Path(place.folder), pieces, vectors, self._state(place, span), row_done)

    def _vector(self, name: str, span: Range) -> Any:
        """A range of a vector that the shards have slices of; or one that all of them have."""
        kind, slices = name.partition("/")[0], []
        for rows, old in zip(self.rows, self.ranges, strict=True):
            vector = rows.vector(name)
            assert vector is not None
            if kind in _SHARED:
                return vector
            stop = min(old.stop, span.stop) if kind in OF_MODEL else min(old.end, span.end)
            slices.append(vector[max(span.start, old.start) - old.start : max(0, stop - old.start)])
        return np.concatenate(slices)

    def _state(self, place: Place, span: Range) -> dict[str, Any]:
        """The words of a new shard's folder: those of the old ones, except the place and the layout."""
        said: dict[str, Any] = self.rows[0].state
        layout = cut(self.layout, span, counters=place.shard == 0)
        own = {"layout": layout.to_state(), "nonnegative": [name for name in layout.names if name in self.nonnegative]}
        there = {"medium": "mmap", "device": "cpu", "undoable": True, "place": place.told()}
        return said | there | {"settings": said["settings"] | own}


def _cluster(
    file: Path, manifest: Manifest, folders: Sequence[str | os.PathLike[str]] | None, opened: ExitStack
) -> _Shards:
    """A cluster's shards, locked and at one transaction."""
    places = manifest.places(file.parent, folders)
    stores = [opened.enter_context(place.open()) for place in places]
    manifest.require_still(file)
    to = least([transactions(rows) for rows in stores], places)
    for rows in stores:
        go_back(rows, to)
    with believed(file):
        facts = [(rows.state["numbers"], common(rows.state["settings"])) for rows in stores]
        if any(one != facts[0] for one in facts):
            raise CheckpointError(f"{file}: expected shards of one server, got ones whose states differ")
        nonnegative = {name for rows in stores for name in rows.state["settings"]["nonnegative"]}
    require_alike(stores)
    return _Shards(manifest.layout, manifest.ranges, stores, nonnegative)


def _server(folder: Path, opened: ExitStack) -> _Shards:
    """The folder of a server that has no shards, as its last finished round left it."""
    rows = opened.enter_context(ClientStore.open(folder, readonly=True))
    with believed(folder):
        settings = server_state(folder, rows.state)["settings"]
        layout, optimizer = Layout.from_state(settings["layout"]), None
        with suppress(CheckpointError):  # one of the caller's own code, for which Server.load asks
            optimizer = revive("optimizer", settings["optimizer"], None)
        x = rows.vector("x")
        assert x is not None
        nonnegative = settings.get("nonnegative", never_negative(layout, x, SIGNED))
    require_elementwise(optimizer)
    return _Shards(layout, [Range(0, layout.n, layout.n_parameters)], [rows], nonnegative)
