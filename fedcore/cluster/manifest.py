"""The manifest of a server in shards, and the folders of its shards."""

import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from fedcore.errors import CheckpointError, FedcoreError, LockedError, RangeError, StoreError
from fedcore.files import NAMED, is_own_folder, part_of, read_bytes, require_own_file, require_same, write_text
from fedcore.model import Layout, Slice
from fedcore.server.folder import JOURNAL, checkpoint_errors, group_folders, open_part, require_groups, server_state
from fedcore.server.requests import concatenate
from fedcore.store import ClientStore, Durability
from fedcore.store.files import disk
from fedcore.store.files.folder import remove, sweep
from fedcore.store.files.inventory import INDEX, is_disposable
from fedcore.validation import check_integer, expand_home, is_integer

LOGGER = logging.getLogger("fedcore.cluster")
NAME = "cluster.json"
"""The file name of the manifest. It is written last, after the shards."""
INTENT = "cluster.json.intent"
"""The file next to the manifest that exists while folders of shards are written or deleted."""
BLOCK = 16_384
"""Elements of a block of the kernels. Ranges end at blocks, so that results have the same bits as without shards."""

_WHAT, _VERSION = "a fedcore cluster", 1
_MOST_BYTES = 1 << 28
_DRAFT = re.compile(r"\.cluster\.json(\.intent)?\.[0-9a-f]{12}")
_FOLDER = re.compile(r"shard-(0|[1-9][0-9]{0,5})(-[0-9a-f]{8})?")


class Range(NamedTuple):
    """The elements [start, stop) of the flat vector, with float buffers; its parameters end at ``end``."""

    start: int
    stop: int
    end: int


def ranges_of(layout: Layout, shards: int) -> tuple[Range, ...]:
    """Return ranges with about equal numbers of parameters; the last range also has all float buffers.

    With groups of tensors, the elements are counted in the order of the groups; see ``pieces_of``.
    """
    starts = _block_starts(layout)
    blocks, p = len(starts), layout.n_parameters
    most = max(1, blocks)
    if check_integer("shards", shards, 1) > most:
        of = " of a group" if layout.groups else ""
        raise RangeError(f"shards={shards}: must be at most {most}, one for each {BLOCK:,} of {p:,} parameters{of}")
    at = [starts[blocks * k // shards] for k in range(shards)]
    return tuple(map(Range, at, [*at[1:], layout.n], [*at[1:], p]))


def _block_starts(layout: Layout) -> list[int]:
    """Return where a range may start: at the blocks of each group's own vector, whose norms are sums over blocks."""
    starts, first = list[int](), 0
    for own in layout.of_groups.values() if layout.groups else [layout]:
        starts += range(first, first + own.n_parameters, BLOCK)
        first += own.n_parameters
    return starts


def pieces_of(layout: Layout, span: Range) -> dict[str, Range]:
    """Return the range of each group's own vector in a shard. The shard with the end of a group has its buffers."""
    pieces, first = dict[str, Range](), 0
    for group, own in layout.of_groups.items():
        p = own.n_parameters
        start, end = (min(max(at - first, 0), p) for at in (span.start, span.end))
        pieces[group] = Range(start, own.n if end == p else end, end) if start < end else Range(0, 0, 0)
        first += p
    return pieces


ABSENT = "\0"
"""The start of the name of a parameter that stays zero, for a group of which a shard has nothing: all shards take part
in each group's sums."""


def cut(layout: Layout, span: Range, *, counters: bool) -> Layout:
    """Return the layout of a range: the flat parts of tensors within it, and the counters and constants if asked."""
    pieces, groups = list[Slice](), dict[str, list[str]]()
    for group, own in pieces_of(layout, span).items():
        part = cut(layout.of_groups[group], own, counters=counters)
        here = [*part.slices, *part.outside]
        if own.start == own.end:
            here.insert(0, Slice(f"{ABSENT}{group}", "parameter", (1,), "float32"))
        pieces += here
        groups[group] = [piece.name for piece in here]
    if layout.groups:
        return Layout(pieces, library="numpy", groups=groups)
    for piece in layout.slices:
        start, stop = max(piece.start, span.start), min(piece.stop, span.stop)
        if start < stop:
            pieces.append(Slice(piece.name, piece.kind, (stop - start,), piece.dtype))
    kept = [replace(piece) for piece in layout.outside] if counters else []
    return Layout([*pieces, *kept], library="numpy")


@dataclass(frozen=True)
class ShardInfo:
    """The description of a shard.

    Attributes:
        cluster: the unique name of the cluster.
        shard, shards: its number, from 0, and the number of shards.
        first: the position of its first parameter.
        has_buffers: whether the model has float buffers, which the last shard holds.
        folder: the folder of its store, on its own machine; None in memory.
        is_named: whether the caller, not the manifest, has named the folder.
        groups: for each group of tensors, the range of its vector in this shard.
    """

    cluster: str
    shard: int
    shards: int
    first: int
    has_buffers: bool
    folder: str | None
    is_named: bool = False
    groups: Mapping[str, Range] = field(default_factory=dict)

    @property
    def present(self) -> list[str]:
        """The groups of which it has elements."""
        return [group for group, piece in self.groups.items() if piece.end]

    def to_state(self) -> dict[str, Any]:
        """Return the description that its folder keeps."""
        return {"cluster": self.cluster, "shard": self.shard, "shards": self.shards, "first": self.first}

    def require(self, state: Any) -> dict[str, Any]:
        """Return the state of its folder. Raise a CheckpointError if it belongs to a different shard."""
        folder = self.folder or "store"
        with checkpoint_errors(folder):
            saved = server_state(folder, state, shard=True)
            if saved["place"] != self.to_state():
                raise CheckpointError(
                    f"{folder}: the folder is of {saved['place']}, but the manifest expects {self.to_state()}"
                )
        return saved

    def open_all(self, *, readonly: bool = False, durability: Durability = "round") -> list[ClientStore]:
        """Open its folder, and those of its groups."""
        home, found = Path(self.folder or ""), self.require_inside()
        options: dict[str, Any] = {"readonly": readonly, "durability": durability, "keep_previous": not readonly}
        with ExitStack() as opened:
            stores = [opened.enter_context(ClientStore.open(home, **options))]
            require_same(home, found, os.lstat(home))
            self.require(stores[0].state)
            for folder in group_folders(home):
                stores.append(opened.enter_context(open_part(folder, **options)))
            state, *groups = [self.require(store.state) for store in stores]
            with checkpoint_errors(home):
                require_groups(home, state, groups)
            opened.pop_all()
        return stores

    def x_in(self, stores: Sequence[ClientStore]) -> Any:
        """Return the slice of x in the stores of its folder; with groups, that of each."""
        vectors = dict(zip(self.groups, (rows.vector("x") for rows in stores[1:]), strict=True))
        return {group: vectors[group] for group in self.present} if self.groups else stores[0].vector("x")

    def require_inside(self) -> os.stat_result | None:
        """Return the folder's status; see ``files.part_of``. Return None if the caller named it."""
        if self.folder is None or self.is_named:
            return None
        return part_of(Path(self.folder), "if it is yours, pass folders=")


def shard_in(folder: str) -> int | None:
    """Return the shard number in a folder name that fedcore assigned; None for other names and paths."""
    found = _FOLDER.fullmatch(folder)
    return None if found is None else int(found[1])


@dataclass(frozen=True)
class Manifest:
    """The shards of a server: their ranges and folders.

    Attributes:
        cluster: the unique name of the cluster.
        folders: the folder of each shard, on its own machine; relative folders are next to the manifest. None in
            memory.
        is_copy: whether ``save`` wrote it; a later save may replace it.
    """

    cluster: str
    layout: Layout
    ranges: tuple[Range, ...]
    folders: tuple[str, ...] | None
    is_copy: bool = False

    def shards(self, home: Path | None, named: Sequence[str | os.PathLike[str]] | None = None) -> list[ShardInfo]:
        """Return the descriptions of the shards of a manifest in ``home``; ``named`` are folders from the caller."""
        has_buffers = self.layout.n > self.layout.n_parameters
        folders: Sequence[str | None] = [None] * len(self.ranges)
        if self.folders is not None and home is not None:
            folders = self._beside(home) if named is None else folders_of(self.folders, named)
        pieces, is_named = [pieces_of(self.layout, span) for span in self.ranges], named is not None
        return [
            ShardInfo(self.cluster, k, len(self.ranges), span.start, has_buffers, folder, is_named, pieces[k])
            for k, (span, folder) in enumerate(zip(self.ranges, folders, strict=True))
        ]

    def _beside(self, home: Path) -> list[str]:
        """Return the folders. Reject any that is not next to the manifest, which may come from another user."""
        assert self.folders is not None
        for k, folder in enumerate(self.folders):
            if shard_in(folder) != k:
                raise StoreError(
                    f"{home / NAME}: the folder {folder!r} is not shard-{k} next to the manifest; if it is yours, pass "
                    "folders= with one folder for each shard"
                )
        return [str(home / folder) for folder in self.folders]

    def slices(self, vector: Any) -> list[Any]:
        """Cut a vector, with or without float buffers, or the vectors of groups by name, into those of the shards."""
        is_whole = not isinstance(vector, Mapping)
        if is_whole and not self.layout.groups:
            return [vector[one.start : one.stop if len(vector) == self.layout.n else one.end] for one in self.ranges]
        parts = {group: self.layout.cut(vector, group) for group in self.layout.groups} if is_whole else vector
        pieces = [pieces_of(self.layout, span) for span in self.ranges]
        return [{group: part[own[group].start : own[group].stop] for group, part in parts.items()} for own in pieces]

    def joined(self, slices: Sequence[Any]) -> Any:
        """Return the vector of these slices, read-only."""
        if self.layout.groups:
            parts = {group: concatenate([one[group] for one in slices if group in one]) for group in self.layout.groups}
            slices = [self.layout.join(parts, np.empty(sum(map(len, parts.values())), parts[next(iter(parts))].dtype))]
        return concatenate(slices)

    def write(self, path: Path) -> None:
        """Write the manifest durably, and replace an older one."""
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
            write_text(path, json.dumps(state, indent=1))

    def require_current(self, path: Path) -> None:
        """Raise a StoreError unless the file still names these shards. Call it once their folders are locked."""
        now = Manifest.read(path)
        if (self.cluster, self.ranges, self.folders) != (now.cluster, now.ranges, now.folders):
            raise StoreError(f"{path}: the manifest was replaced while it was loaded; load it again")

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read the manifest in a file."""
        try:
            text = read_bytes(path, _MOST_BYTES).decode() if not path.is_dir() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: cannot read the manifest: {error}") from None
        with checkpoint_errors(path):
            state: Any = None
            with suppress(ValueError, RecursionError):
                state = json.loads(text)
            if not isinstance(state, dict) or state.get("what") != _WHAT:
                raise CheckpointError(f"{path}: not the manifest of a server in shards")
            if (version := state["version"]) != _VERSION:
                raise CheckpointError(f"{path}: format version {version!r} is unknown; this fedcore reads {_VERSION}")
            layout = Layout.from_state(state["layout"])
            ranges = tuple(Range(one["start"], one["stop"], one["end"]) for one in state["shards"])
            _require_partition(layout, ranges)
            folders = tuple(str(one["folder"]) for one in state["shards"])
            return cls(str(state["cluster"]), layout, ranges, folders, state.get("copy") is True)


def _require_partition(layout: Layout, ranges: tuple[Range, ...]) -> None:
    """Raise a ValueError unless the ranges partition the layout in order."""
    starts, stops, ends = ([span[i] for span in ranges] for i in range(3))
    if (
        not ranges
        or not all(is_integer(number, 0, layout.n) for span in ranges for number in span)
        or starts[0] != 0
        or not set(starts) <= set(_block_starts(layout))
        or ends != [*starts[1:], layout.n_parameters]
        or stops != [*starts[1:], layout.n]
        or any(span.start >= span.end for span in ranges)
    ):
        raise ValueError(f"shards: {ranges} do not match {layout.n_parameters} parameters and {layout.n} elements")


def folders_of(names: Sequence[str], folders: Sequence[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    """Return the given folders of shards. Default: folders with these names next to the manifest."""
    if folders is None:
        return tuple(names)
    if len(folders) != len(names):
        raise RangeError(f"folders: give one for each of {len(names)} shards, not {len(folders)}")
    return tuple(os.path.realpath(expand_home(folder, "folders")) for folder in folders)


@contextmanager
def prepared(home: Path, named: Collection[str | os.PathLike[str]] = ()) -> Iterator[str]:
    """Create and lock a manifest's folder for new shards, and delete what a killed creation or reshard left in it.

    Yield the cluster's id: that of the killed creation, whose other shards the new ones replace, or a new one.
    ``named`` are folders in other places from the caller.
    """
    make_folder(home)
    with locked(home):
        if os.path.lexists(home / NAME):
            raise StoreError(f"{home / NAME}: a server in shards already exists here; resume it with Server.load")
        cluster, is_left = uuid4().hex, os.path.lexists(home / INTENT)
        with disk.explained("creating a cluster", home):
            disk.sync_path(home.parent.resolve())
            for other in (INDEX,) if is_left else (INDEX, JOURNAL):
                if os.path.lexists(home / other):
                    raise StoreError(f"{home}: the folder has another server ({other}); give a new or empty folder")
            if is_left:
                require_own_file(home / INTENT)
                with suppress(LookupError, TypeError, ValueError):
                    cluster = str(json.loads(read_bytes(home / INTENT, _MOST_BYTES))["made"]["cluster"])
                _clear(home, named)
        try:
            yield cluster
        except BaseException:
            with suppress(FedcoreError, OSError):  # the next call tries again
                _clear(home, named)
            raise


def _clear(home: Path, named: Collection[str | os.PathLike[str]]) -> None:
    """Delete the shards and the journal of a creation or reshard that ended before its manifest was written."""

    def delete(cluster: str, folders: Sequence[str]) -> bool:
        remove(home / JOURNAL)
        return delete_shards(cluster, folders)

    if os.path.lexists(home / INTENT) and not os.path.lexists(home / NAME):
        clean_up(home, delete, named=[os.path.realpath(expand_home(folder)) for folder in named])


def make_folder(home: Path) -> None:
    """Create a manifest's folder, unless it exists."""
    with disk.explained("creating a cluster", home):
        home.mkdir(parents=True, exist_ok=True)


def older_copy(home: Path) -> Manifest | None:
    """Return the older copy in a folder, which a save may replace; None for an empty folder."""
    if (found := manifest_at(home / NAME)) is None:
        if others := [name for name in sorted(os.listdir(home)) if not name.startswith(NAME)]:
            raise StoreError(
                f"{home}: the folder has other content ({others[0]}); save to a new or empty folder, or to an older "
                "copy"
            )
        return None
    require_own_file(home / NAME)
    if not found[1].is_copy:
        raise StoreError(f"{home}: is a server's own folder; save to a new or empty folder, or to an older copy")
    if any(shard_in(folder) is None or folder.count("-") < 2 for folder in found[1].folders or ()):
        raise StoreError(f"{home / NAME}: not a copy that save() wrote; save to a different folder")
    return found[1]


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Lock a folder against other writers of manifests, if the file system can lock folders."""
    folder = os.open(home, NAMED)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(f"{home}: in use by another save or reshard; wait until it has ended") from None
        for draft in filter(_DRAFT.fullmatch, os.listdir(folder)):  # of a killed call
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
        yield
    finally:
        os.close(folder)


def manifest_at(path: Path) -> tuple[Path, Manifest] | None:
    """Return the manifest of a path, which is its file or folder; None if it does not exist."""
    file = path / NAME if path.is_dir() else path
    return (file.absolute(), Manifest.read(file)) if file.is_file() else None


Delete = Callable[[str, Sequence[str]], bool]
"""A function that deletes the named cluster's shards in these folders, and returns whether all are deleted."""


def write_intent(home: Path, *, new: Manifest, old: Manifest | None) -> None:
    """Write durably which shards a save or a reshard will write, and which it will then delete. ``home`` is locked."""
    state = {"made": _intent_of(home, new), "going": None if old is None else _intent_of(home, old)}
    write_text(home / INTENT, json.dumps(state))


def clean_up(home: Path, delete: Delete, *, deletes_old: bool = True, named: Collection[str] = ()) -> None:
    """Delete the shards that a finished or killed save or reshard has left.

    These are the old shards if the new manifest was written, otherwise the new ones. If there was a manifest and it is
    missing, that is unknown: raise a StoreError, and delete nothing. Other users may write to the folder. So only this
    user's intent counts, and only for two kinds of folders: those with fedcore's names next to the manifest, and those
    that the caller has named now. ``delete`` checks each folder.

    deletes_old=False leaves old shards for the next call. ``named`` are folders in other places from the caller.
    """
    if not os.path.lexists(home / INTENT):
        return
    require_own_file(home / INTENT)
    present = manifest_at(home / NAME)
    try:
        with checkpoint_errors(home / INTENT):
            state = json.loads(read_bytes(home / INTENT, _MOST_BYTES))
            new, old = state["made"], state["going"]
            is_done = present is not None and _intent_of(home, present[1]) == new
            unused = (old if is_done else new) or {"cluster": None, "folders": []}
            cluster, folders = unused["cluster"], [str(folder) for folder in unused["folders"]]
    except CheckpointError as error:
        raise CheckpointError(f"{error}; delete {home / INTENT}, a list of shards that a killed call left") from error
    if present is None and old is not None:  # only a manifest tells which shards are complete
        raise StoreError(f"{home / NAME}: missing, but a save or reshard replaced it or was killed before; put it back")
    if is_done and not deletes_old:
        return
    inside = [str(home / folder) for folder in folders if shard_in(folder) is not None]
    outside = [folder for folder in folders if shard_in(folder) is None]
    if left := [folder for folder in outside if folder not in named]:
        LOGGER.warning("%s: shards in other folders were not deleted; delete them by hand: %s", home / INTENT, left)
    if cluster is None or delete(str(cluster), [*inside, *(folder for folder in outside if folder in named)]):
        (home / INTENT).unlink()  # otherwise the next call tries again
        disk.sync_path(home)


def _intent_of(home: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the shards of a manifest. Shards next to it are listed by name, so that the folder may be moved."""
    paths = [Path(os.path.abspath(home / folder)) for folder in manifest.folders or ()]
    folders = [path.name if path.parent == home and shard_in(path.name) is not None else str(path) for path in paths]
    return {"cluster": manifest.cluster, "folders": folders}


def delete_shards(cluster: str, folders: Sequence[str]) -> bool:
    """Delete a cluster's shards on this machine; see ``Delete``.

    A process that waited for a lock then finds a different manifest and releases the lock.
    """
    deleted = [delete_shard(cluster, folder, shard_in(os.path.basename(folder))) for folder in folders]
    return all(deleted)


def delete_shard(cluster: str, folder: str, shard: int | None) -> bool:
    """Delete a cluster's shard and its drafts; return False only if another process uses it.

    Only a folder of this user is deleted, and only if its content proves what it is: a store whose state names this
    cluster and shard, or a lock file that marks a draft or the rest of a deleted store. ``shard`` is None for a folder
    that the caller has named.
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
    with ClientStore.open(path, readonly=True) as rows, checkpoint_errors(path):
        state: Any = rows.state
        place = (state or {}).get("place") or {}
        return place.get("cluster") == cluster and shard in (None, place["shard"])
