"""Change the number of shards of a server's folders, with the same bits."""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from fedcore.arguments import absolute
from fedcore.cluster.coordinator import common_transaction, shared_settings
from fedcore.cluster.manifest import (
    NAME,
    Manifest,
    Range,
    ShardInfo,
    clean_up,
    cut,
    delete_shard,
    folders_of,
    locked,
    manifest_at,
    prepare,
    ranges_of,
    require_elementwise,
    shard_in,
    write_intent,
)
from fedcore.errors import CheckpointError, FedcoreError, RangeError, StoreError
from fedcore.model import Layout
from fedcore.options import Limits, revive
from fedcore.server.folder import believed, go_back, server_state, transactions
from fedcore.server.step import OF_MODEL
from fedcore.server.validation import never_negative
from fedcore.store import ClientStore
from fedcore.store.client_store import Piece, join, require_alike
from fedcore.store.files import disk

_SHARED = ("counter", "population", "norms")
"""Kinds of vectors that are not cut: all shards have the same, or the first has the counters."""

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
    """Change the number of shards of a server, or cut the folder of a server of one piece into shards.

    Later rounds have the same bits. This process must be able to read and write all folders, and no server may use
    them.

    Args:
        path: a manifest or its folder; or the folder of a server of one piece, which then needs ``to``.
        shards: the new number, at most one for each 16,384 parameters.
        to: a new folder for the manifest and the shards; those at ``path`` stay. Default: the new shards replace the
            old ones, which are deleted after the new manifest is written.
        folders: new or empty folders for the new shards, for example one on each disk. Default: beside the manifest.
        current_folders: the present shards' folders. Default: beside the manifest.
        progress: called with the number of written rows and their total.

    Returns:
        The manifest.

    Raises:
        RangeError: an argument is wrong, or the server's optimizer does not step element by element.
        StoreError: no server is there, a folder is in use, or a disk is full. Nothing has changed.
        CheckpointError, CorruptionError: the folders do not belong together, or are damaged. Nothing has changed.
        LockedError: a server uses the shards, or another call saves or reshards there.

    If it is killed, it leaves the old or the new shards complete. Call it again: it deletes the others, which
    ``cluster.json.intent`` beside the manifest lists.

    Cost: reads and writes every row once; old and new shards need disk space together.

    >>> import tempfile
    >>> from fedcore import Compute, Server
    >>> run, model = tempfile.mkdtemp(), np.zeros(70_000, np.float32)
    >>> Server(model, "MIFA", clients=2, lr=0.1, storage=run, compute=Compute(shards=2)).close()
    >>> manifest = reshard(run, 3)
    >>> with Server.load(manifest) as server:
    ...     manifest.name, len(server.clients)
    ('cluster.json', 2)
    """
    path, to = absolute(path), None if to is None else absolute(to)
    found = manifest_at(path)
    if found is None and to is None:
        raise RangeError(
            f"to: {path} has a server of one piece; give a new folder for the shards"
            if path.is_dir()
            else f"path={str(path)!r}: neither a manifest nor a server's folder is there"
        )
    with ExitStack() as opened:
        old = _open_shards(*found, current_folders, opened) if found else _open_server(path, opened)
        ranges = ranges_of(old.layout, shards)
        names = folders_of([f"shard-{k}-{uuid4().hex[:8]}" for k in range(shards)], folders)
        is_copy = found is not None and to is None and found[1].is_copy
        manifest = Manifest(uuid4().hex, old.layout, ranges, names, is_copy)
        home = Path(os.path.realpath(found[0].parent if found and to is None else to or ""))
        if to is not None:
            prepare(home)
        infos = manifest.shards(home, folders)
        named = frozenset(os.path.realpath(folder) for folder in (*(folders or ()), *(current_folders or ())))
        with locked(home), disk.explained("cutting a cluster", home):
            clean_up(home, _delete, named=named)
            _require_free(infos)
            write_intent(home, new=manifest, old=found[1] if found and to is None else None)
            try:
                old.write(infos, ranges, progress)
                manifest.write(home / NAME)
            except BaseException:
                opened.close()
                with suppress(FedcoreError):
                    clean_up(
                        home, _delete, deletes_old=False, named=named
                    )  # the manifest may be written, but not durable
                raise
            opened.close()
            clean_up(home, _delete, named=named)
    return home / NAME


def _delete(cluster: str, folders: Sequence[str]) -> bool:
    """Delete shards. A process that waited for a lock then finds another manifest, and releases it."""
    deleted = [delete_shard(cluster, folder, shard_in(os.path.basename(folder))) for folder in folders]
    return all(deleted)


def _require_free(infos: Sequence[ShardInfo]) -> None:
    """Raise a StoreError unless the new shards' folders are new or empty."""
    for info in infos:
        assert info.folder is not None
        if os.path.exists(info.folder) and (not os.path.isdir(info.folder) or os.listdir(info.folder)):
            raise StoreError(f"{info.folder}: it is in use; give a new or empty folder")


@dataclass(frozen=True)
class _Shards:
    """The present shards.

    Attributes:
        layout: of the whole model.
        ranges, rows: of each.
        nonnegative: the float buffers that an update may not make negative.
    """

    layout: Layout
    ranges: Sequence[Range]
    rows: Sequence[ClientStore]
    nonnegative: Collection[str]

    def write(self, infos: Sequence[ShardInfo], ranges: Sequence[Range], progress: Progress) -> None:
        """Write the new shards."""
        done, total = 0, len(self.rows[0]) * len(infos)

        def row_done() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        progress(0, total)
        for info, span in zip(infos, ranges, strict=True):
            assert info.folder is not None
            pieces = [
                Piece(rows, max(span.start, old.start) - old.start, min(span.end, old.end) - old.start)
                for rows, old in zip(self.rows, self.ranges, strict=True)
                if max(span.start, old.start) < min(span.end, old.end)
            ]
            names = self.rows[0].vector_names()
            vectors = {
                name: self._vector(name, span) for name in names if info.shard == 0 or not name.startswith("counter/")
            }
            join(Path(info.folder), pieces, vectors, self._state(info, span), row_done)

    def _vector(self, name: str, span: Range) -> Any:
        """A range of a vector, of which the shards have slices, or the whole of a shared one."""
        kind, slices = name.partition("/")[0], []
        for rows, old in zip(self.rows, self.ranges, strict=True):
            vector = rows.vector(name)
            assert vector is not None
            if kind in _SHARED:
                return vector
            stop = min(old.stop, span.stop) if kind in OF_MODEL else min(old.end, span.end)
            slices.append(vector[max(span.start, old.start) - old.start : max(0, stop - old.start)])
        return np.concatenate(slices)

    def _state(self, info: ShardInfo, span: Range) -> dict[str, Any]:
        """The state of a new shard's folder: that of an old one, except the place and the layout."""
        state: dict[str, Any] = self.rows[0].state
        layout = cut(self.layout, span, counters=info.shard == 0)
        own = {"layout": layout.to_state(), "nonnegative": [name for name in layout.names if name in self.nonnegative]}
        changed = {"medium": "mmap", "device": "cpu", "undoable": True, "place": info.to_state()}
        return state | changed | {"settings": state["settings"] | own}


def _open_shards(
    file: Path, manifest: Manifest, folders: Sequence[str | os.PathLike[str]] | None, opened: ExitStack
) -> _Shards:
    """The shards of a manifest, locked and at one transaction."""
    infos = manifest.shards(file.parent, folders)
    stores = [opened.enter_context(info.open()) for info in infos]
    manifest.require_current(file)
    to = common_transaction([transactions(rows) for rows in stores], infos)
    for rows in stores:
        go_back(rows, to)
    with believed(file):
        facts = [(rows.state["numbers"], shared_settings(rows.state["settings"])) for rows in stores]
        if any(one != facts[0] for one in facts):
            raise CheckpointError(f"{file}: the states of its shards differ; they do not belong to one server")
        nonnegative = {name for rows in stores for name in rows.state["settings"]["nonnegative"]}
    require_alike(stores)
    return _Shards(manifest.layout, manifest.ranges, stores, nonnegative)


def _open_server(folder: Path, opened: ExitStack) -> _Shards:
    """The folder of a server of one piece, as its last finished round left it."""
    rows = opened.enter_context(ClientStore.open(folder, readonly=True))
    with believed(folder):
        settings = server_state(folder, rows.state)["settings"]
        layout, optimizer = Layout.from_state(settings["layout"]), None
        with suppress(CheckpointError):  # the caller's own code, which Server.load checks
            optimizer = revive("optimizer", settings["optimizer"], None)
        x = rows.vector("x")
        assert x is not None
        nonnegative = settings.get("nonnegative", never_negative(layout, x, Limits().signed_buffers))
    require_elementwise(optimizer)
    return _Shards(layout, [Range(0, layout.n, layout.n_parameters)], [rows], nonnegative)
