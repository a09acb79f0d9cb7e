"""The manifest of a server in shards, and the folders of its shards."""

import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from fedcore.algorithms.optimizers import Optimizer
from fedcore.arguments import expanded, is_whole, whole
from fedcore.atomic_file import is_own, mode_of, require_file
from fedcore.errors import CheckpointError, FedcoreError, LockedError, RangeError, StoreError
from fedcore.model import Layout, Slice
from fedcore.server.folder import believed, server_state
from fedcore.store import ClientStore, Durability
from fedcore.store.files import disk
from fedcore.store.files.folder import remove, sweep
from fedcore.store.files.inventory import INDEX, is_disposable, is_own_folder, require_same

LOGGER = logging.getLogger("fedcore.cluster")
NAME = "cluster.json"
"""The manifest's file. It is written last, after the shards."""
INTENT = "cluster.json.intent"
"""The file beside the manifest that exists while folders of shards are written or deleted."""
BLOCK = 16_384
"""Elements of a block of the kernels. Ranges end at blocks, so that lengths and rows have the bits of one server."""

_WHAT, _VERSION = "a fedcore cluster", 1
_MOST_BYTES = 1 << 28
_FOLDER = re.compile(r"shard-(0|[1-9][0-9]{0,5})(-[0-9a-f]{8})?")


class Range(NamedTuple):
    """The elements [start, stop) of the flat vector, float buffers included; its parameters end at ``end``."""

    start: int
    stop: int
    end: int


def ranges_of(layout: Layout, shards: int) -> tuple[Range, ...]:
    """Ranges of about as many parameters each; the last has all float buffers too.

    Raises:
        RangeError: there are more shards than blocks of 16,384 parameters, or none.
    """
    p, blocks = layout.n_parameters, -(-layout.n_parameters // BLOCK)
    most = max(1, blocks)
    if whole("shards", shards, 1) > most:
        raise RangeError(f"shards={shards}: must be at most {most}, one for each {BLOCK:,} of {p:,} parameters")
    starts = [BLOCK * (blocks * k // shards) for k in range(shards)]
    ends = [*starts[1:], p]
    stops = [*starts[1:], layout.n]
    return tuple(map(Range, starts, stops, ends))


def cut(layout: Layout, span: Range, *, counters: bool) -> Layout:
    """The layout of a range: the parts of tensors within it, flat.

    Args:
        counters: whether the shard keeps the counters and constants.
    """
    pieces = []
    for piece in layout.slices:
        start, stop = max(piece.start, span.start), min(piece.stop, span.stop)
        if start < stop:
            pieces.append(Slice(piece.name, piece.kind, (stop - start,), piece.dtype))
    kept = [replace(piece) for piece in layout.outside] if counters else []
    return Layout([*pieces, *kept], library="numpy")


def require_elementwise(optimizer: Optimizer | None) -> None:
    """Reject an optimizer that may need a whole vector.

    Raises:
        RangeError: its class does not have ``elementwise = True``.
    """
    if optimizer is not None and getattr(optimizer, "elementwise", False) is not True:
        raise RangeError(
            f"optimizer={optimizer}: shards need a step that is taken element by element; if this class has one, set "
            "elementwise = True"
        )


@dataclass(frozen=True)
class ShardInfo:
    """The description of a shard.

    Attributes:
        cluster: the cluster's own name, which differs from that of any other.
        shard, shards: its number, from 0, and how many there are.
        first: the place of its first parameter.
        has_buffers: whether the model has float buffers, which are the last shard's.
        folder: of its part of the store, on its own machine; None in memory.
        is_named: whether the caller has named the folder, and not the manifest.
    """

    cluster: str
    shard: int
    shards: int
    first: int
    has_buffers: bool
    folder: str | None
    is_named: bool = False

    def to_state(self) -> dict[str, Any]:
        """The description that its folder keeps."""
        return {"cluster": self.cluster, "shard": self.shard, "shards": self.shards, "first": self.first}

    def require(self, state: Any) -> dict[str, Any]:
        """Return the state of its folder, if it is this shard's.

        Raises:
            CheckpointError: it is another shard's.
        """
        folder = self.folder or "store"
        with believed(folder):
            saved = server_state(folder, state, shard=True)
            if saved["place"] != self.to_state():
                raise CheckpointError(f"{folder}: the manifest says {self.to_state()}, the folder {saved['place']}")
        return saved

    def open(self, *, readonly: bool = False, durability: Durability = "round") -> ClientStore:
        """Open its folder.

        Raises:
            StoreError: the manifest names a link, or a folder of another user.
            CheckpointError: it is another shard's.
        """
        assert self.folder is not None
        found = self.require_inside()
        rows = ClientStore.open(self.folder, readonly=readonly, durability=durability, undoable=not readonly)
        try:
            require_same(Path(self.folder), found, os.lstat(self.folder))
            self.require(rows.state)
        except BaseException:
            rows.close()
            raise
        return rows

    def require_inside(self) -> os.stat_result | None:
        """Reject a folder beside the manifest that is a link, or another user's; None if the caller has named it.

        Raises:
            StoreError: it is one.
        """
        if self.folder is None or self.is_named or not os.path.lexists(self.folder):
            return None
        found, home = os.lstat(self.folder), os.stat(os.path.dirname(self.folder))
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), home.st_uid):
            raise StoreError(f"{self.folder}: it is a link, or another user's folder; pass folders= if it is yours")
        return found


def shard_in(folder: str) -> int | None:
    """The number of a shard in the name that fedcore gives its folder; None for any other name or path."""
    found = _FOLDER.fullmatch(folder)
    return None if found is None else int(found[1])


@dataclass(frozen=True)
class Manifest:
    """The shards of a server: their ranges and folders.

    Attributes:
        cluster: its own name.
        layout: of the whole model.
        ranges: of each shard.
        folders: of each shard, on its own machine; relative ones are beside the manifest. None in memory.
        is_copy: whether ``save`` wrote it, and may replace it with another copy.
    """

    cluster: str
    layout: Layout
    ranges: tuple[Range, ...]
    folders: tuple[str, ...] | None
    is_copy: bool = False

    def shards(self, home: Path | None, named: Sequence[str | os.PathLike[str]] | None = None) -> list[ShardInfo]:
        """The descriptions of the shards.

        Args:
            home: the folder of the manifest.
            named: the shards' folders from the caller. Default: those beside the manifest.

        Raises:
            RangeError: ``named`` has not one for each shard.
            StoreError: a shard lies elsewhere, and the caller does not name its folder.
        """
        has_buffers = self.layout.n > self.layout.n_parameters
        folders: Sequence[str | None] = [None] * len(self.ranges)
        if self.folders is not None and home is not None:
            folders = self._beside(home) if named is None else folders_of(self.folders, named)
        return [
            ShardInfo(self.cluster, k, len(self.ranges), span.start, has_buffers, folder, is_named=named is not None)
            for k, (span, folder) in enumerate(zip(self.ranges, folders, strict=True))
        ]

    def _beside(self, home: Path) -> list[str]:
        """The folders, if each lies beside the manifest under a name that fedcore gives.

        A manifest may come from anybody, so that it cannot name folders elsewhere.
        """
        assert self.folders is not None
        for k, folder in enumerate(self.folders):
            if shard_in(folder) != k:
                raise StoreError(
                    f"{home / NAME}: it names the folder {folder!r}, which is not shard-{k} beside it; pass folders=, "
                    "one for each shard, if these are your folders"
                )
        return [str(home / folder) for folder in self.folders]

    def write(self, path: Path) -> None:
        """Write it durably, in place of an older one.

        Raises:
            StoreError: it cannot be written.
        """
        folders = self.folders or ()
        state = {
            "what": _WHAT,
            "version": _VERSION,
            "cluster": self.cluster,
            "copy": self.is_copy,
            "layout": self.layout.to_state(),
            "shards": [{"folder": one, **span._asdict()} for one, span in zip(folders, self.ranges, strict=True)],
        }
        with disk.explained("writing a manifest", path):
            replace_text(path, json.dumps(state, indent=1))

    def require_current(self, path: Path) -> None:
        """Raise a StoreError unless the file still names these shards, whose folders are locked by now."""
        if not self.has_shards_of(Manifest.read(path)):
            raise StoreError(f"{path}: it names other shards than when it was read; load it again")

    def has_shards_of(self, other: "Manifest") -> bool:
        """Whether both are of one cluster with the same ranges in the same folders."""
        return (self.cluster, self.ranges, self.folders) == (other.cluster, other.ranges, other.folders)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read the manifest of a file.

        Raises:
            StoreError: there is none.
            CheckpointError: it is something else, or of a newer version.
        """
        try:
            if path.exists() and os.lstat(require_file(path)).st_size > _MOST_BYTES:
                raise CheckpointError(f"{path}: a manifest has at most {_MOST_BYTES} bytes, and this file more")
            text = path.read_text() if path.is_file() or not path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: there is no manifest of a server in shards that can be read: {error}") from None
        with believed(path):
            state: Mapping[str, Any] = json.loads(text)
            if state.get("what") != _WHAT:
                raise CheckpointError(f"{path}: it is not the manifest of a server in shards")
            if (version := state["version"]) != _VERSION:
                raise CheckpointError(f"{path}: version {version!r} is of a newer fedcore; this one reads {_VERSION}")
            layout = Layout.from_state(state["layout"])
            ranges = tuple(Range(one["start"], one["stop"], one["end"]) for one in state["shards"])
            _require_partition(layout, ranges)
            folders = tuple(str(one["folder"]) for one in state["shards"])
            return cls(str(state["cluster"]), layout, ranges, folders, state.get("copy") is True)


def _require_partition(layout: Layout, ranges: tuple[Range, ...]) -> None:
    """Reject ranges that do not partition the layout in order."""
    starts, stops, ends = ([span[i] for span in ranges] for i in range(3))
    if (
        not ranges
        or not all(is_whole(number, 0, layout.n) for span in ranges for number in span)
        or starts[0] != 0
        or any(start % BLOCK for start in starts)
        or ends != [*starts[1:], layout.n_parameters]
        or stops != [*starts[1:], layout.n]
        or any(span.start >= span.end for span in ranges)
    ):
        raise ValueError(f"shards: {ranges} do not cover {layout.n_parameters} parameters and {layout.n} elements")


def require_own_file(path: Path) -> None:
    """Reject a file that is a link, or another user's.

    Raises:
        StoreError: it is.
    """
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode) or not is_own(path, found):
        raise StoreError(f"{path}: it is a link, or another user's file; use another folder")


def folders_of(names: Sequence[str], folders: Sequence[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    """The given folders of shards, or those of these names beside the manifest.

    Raises:
        RangeError: there is not one for each.
    """
    if folders is None:
        return tuple(names)
    if len(folders) != len(names):
        raise RangeError(f"folders: give one for each of {len(names)} shards, not {len(folders)}")
    return tuple(os.path.realpath(expanded(folder)) for folder in folders)


def prepare(home: Path) -> None:
    """Make a manifest's folder for a new server.

    Raises:
        StoreError: there is a manifest already, or the folder cannot be made.
    """
    if (home / NAME).exists():
        raise StoreError(f"{home / NAME}: there is a server in shards already; Server.load resumes it")
    make_folder(home)
    with disk.explained("making a cluster", home):
        disk.sync_path(home.parent)


def make_folder(home: Path) -> None:
    """Make a manifest's folder, unless it exists.

    Raises:
        StoreError: it cannot be made.
    """
    with disk.explained("making a cluster", home):
        home.mkdir(parents=True, exist_ok=True)


def older_copy(home: Path) -> Manifest | None:
    """The copy in a folder that another one may replace; None in an empty folder.

    Raises:
        StoreError: the folder has something else.
    """
    if (found := manifest_at(home / NAME)) is None:
        if others := [name for name in sorted(os.listdir(home)) if not name.startswith(NAME)]:
            raise StoreError(f"{home}: it has {others[0]}; save to a new or empty folder, or over an older copy")
        return None
    require_own_file(home / NAME)
    if not found[1].is_copy:
        raise StoreError(f"{home}: it is a server's own folder; save to a new or empty folder, or over an older copy")
    if any(shard_in(folder) is None or folder.count("-") < 2 for folder in found[1].folders or ()):
        raise StoreError(f"{home / NAME}: its shards are not those of a copy; save to another folder")
    return found[1]


def replace_text(path: Path, text: str) -> None:
    """Write a file durably in one step, in place of an older one, whose mode it gets."""
    draft, mode = path.with_name(f"{path.name}.draft-{uuid4().hex[:12]}"), mode_of(path)
    try:
        with open(draft, "x") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            disk.sync(file.fileno())
        disk.rename(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    disk.sync_path(path.parent)


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Lock a folder against other writers of manifests, if the file system can lock folders.

    Raises:
        LockedError: another one has the lock.
    """
    folder = os.open(home, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(f"{home}: another process or thread saves or reshards there; wait for it") from None
        yield
    finally:
        os.close(folder)


def manifest_at(path: Path) -> tuple[Path, Manifest] | None:
    """The manifest of a path, which is its file or its folder; None if there is none.

    Raises:
        CheckpointError: it is something else, or of a newer version.
    """
    file = path / NAME if path.is_dir() else path
    return (file.absolute(), Manifest.read(file)) if file.is_file() else None


Delete = Callable[[str, Sequence[str]], bool]
"""Deletes the shards of a cluster, by its name, from folders that have them; returns whether all are deleted."""


def write_intent(home: Path, *, new: Manifest, old: Manifest | None) -> None:
    """Write the intent of a save or a reshard, durably.

    Args:
        home: the folder of the manifest, which is locked.
        new: the manifest whose shards will be written.
        old: the manifest whose shards will then be deleted.
    """
    state = {"made": _intent_of(home, new), "going": None if old is None else _intent_of(home, old)}
    replace_text(home / INTENT, json.dumps(state))


def clean_up(home: Path, delete: Delete, *, deletes_old: bool = True, named: Collection[str] = ()) -> None:
    """Delete the shards that a finished or killed save or reshard has left.

    If its new manifest is there, these are the old shards; otherwise the new ones. Other users may write to the folder,
    so that the intent only counts if it is this user's, and only for shards beside it under names that fedcore gives,
    or for folders that the caller names now. ``delete`` checks each of them.

    Args:
        home: as for ``write_intent``.
        deletes_old: False leaves old shards for the next call.
        named: folders elsewhere that the caller has named.

    Raises:
        StoreError: the intent is another user's, or a link.
        CheckpointError: the intent is damaged.
    """
    if not os.path.lexists(home / INTENT):
        return
    require_own_file(home / INTENT)
    present = manifest_at(home / NAME)
    try:
        with believed(home / INTENT):
            state = json.loads((home / INTENT).read_text())
            new, old = state["made"], state["going"]
            is_done = present is not None and _intent_of(home, present[1]) == new
            unused = old if is_done else new
            cluster = None if unused is None else str(unused["cluster"])
            folders = [] if unused is None else [str(folder) for folder in unused["folders"]]
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; delete {home / INTENT}: it only lists shards that a killed save or reshard left; they stay"
        ) from error
    if is_done and not deletes_old:
        return
    inside = [str(home / folder) for folder in folders if shard_in(folder) is not None]
    outside = [folder for folder in folders if shard_in(folder) is None]
    if left := [folder for folder in outside if folder not in named]:
        LOGGER.warning("%s: shards in other folders are not deleted; delete them by hand: %s", home / INTENT, left)
    if cluster is None or delete(cluster, [*inside, *(folder for folder in outside if folder in named)]):
        (home / INTENT).unlink()  # otherwise the next call tries again


def _intent_of(home: Path, manifest: Manifest) -> dict[str, Any]:
    """The shards of a manifest. Those beside it are listed by name, so that the folder may be moved."""
    paths = [Path(os.path.abspath(home / folder)) for folder in manifest.folders or ()]
    folders = [path.name if path.parent == home and shard_in(path.name) is not None else str(path) for path in paths]
    return {"cluster": manifest.cluster, "folders": folders}


def delete_shard(cluster: str, folder: str, shard: int | None) -> bool:
    """Delete a cluster's shard and the drafts of it.

    Only a folder of this user is deleted, and only with a proof inside: a store whose state names this cluster and
    shard, or a lock file that marks the folder as a draft or as the rest of a deleted store.

    Args:
        shard: its number, from the folder's name; None for a folder that the caller has named.

    Returns:
        Whether it is deleted, or is not that shard; False if another process uses it.
    """
    path = Path(folder)
    try:
        sweep(path)
        if os.path.lexists(path):
            found = os.lstat(path)
            if is_own_folder(path) and _is_of(cluster, shard, path):
                remove(path, found)
    except FedcoreError:
        return not os.path.lexists(path)
    return True


def _is_of(cluster: str, shard: int | None, path: Path) -> bool:
    if not (path / INDEX).exists():
        return is_disposable(path)
    with ClientStore.open(path, readonly=True) as rows, believed(path):
        state: Any = rows.state
        place = (state or {}).get("place") or {}
        return place.get("cluster") == cluster and shard in (None, place["shard"])
