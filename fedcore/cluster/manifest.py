"""The manifest of a cluster: which folders are its shards, of which elements. It is written last."""

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from fedcore.arguments import expanded, is_whole
from fedcore.atomic_file import is_own, mode_of, require_file
from fedcore.cluster.ranges import BLOCK, Range
from fedcore.cluster.shard import Place, shard_in
from fedcore.errors import CheckpointError, LockedError, RangeError, StoreError
from fedcore.layout import Layout
from fedcore.server.folder_checks import believed
from fedcore.store.files import system_calls as disk

NAME = "cluster.json"
_WHAT, _VERSION = "a fedcore cluster", 1
_MOST = 1 << 28


@dataclass(frozen=True)
class Manifest:
    """See above.

    Attributes:
        cluster: its own name.
        layout: of the whole model.
        ranges: of each shard.
        folders: of each shard, on its own machine; relative ones are beside the manifest. None for memory.
        is_copy: whether ``save`` wrote it, and may put another copy in its place.
    """

    cluster: str
    layout: Layout
    ranges: tuple[Range, ...]
    folders: tuple[str, ...] | None
    is_copy: bool = False

    def places(self, beside: Path | None, named: Sequence[str | os.PathLike[str]] | None = None) -> list[Place]:
        """The shards' places.

        Args:
            beside: the folder of the manifest.
            named: the shards' folders, as the caller names them; None for those beside the manifest.

        Raises:
            RangeError: ``named`` has not one for each shard.
            StoreError: a shard lies elsewhere, and the caller does not name its folder.
        """
        has_buffers = self.layout.n > self.layout.n_parameters
        folders: Sequence[str | None] = [None] * len(self.ranges)
        if self.folders is not None and beside is not None:
            folders = self._beside(beside) if named is None else folders_of(self.folders, named)
        return [
            Place(self.cluster, k, len(self.ranges), span.start, has_buffers, folder, is_named=named is not None)
            for k, (span, folder) in enumerate(zip(self.ranges, folders, strict=True))
        ]

    def _beside(self, home: Path) -> list[str]:
        """The folders, each of which lies beside the manifest under a name that fedcore gives.

        A manifest may come from a stranger: it says nothing about what lies elsewhere.
        """
        assert self.folders is not None
        for k, folder in enumerate(self.folders):
            if shard_in(folder) != k:
                raise StoreError(
                    f"{home / NAME}: expected shards beside it, named shard-0 and so on, got {folder!r}: pass "
                    "folders=, one for each shard, if these are your folders"
                )
        return [str(home / folder) for folder in self.folders]

    def write(self, path: Path) -> None:
        """Write it durably, in the place of one that may be there.

        Raises:
            StoreError: it cannot be written.
        """
        text = json.dumps(
            {
                "what": _WHAT,
                "version": _VERSION,
                "cluster": self.cluster,
                "copy": self.is_copy,
                "layout": self.layout.to_state(),
                "shards": [
                    {"folder": folder, **span._asdict()}
                    for folder, span in zip(self.folders or (), self.ranges, strict=True)
                ],
            },
            indent=1,
        )
        with disk.explained("writing a manifest", path):
            replace_text(path, text)

    def require_still(self, path: Path) -> None:
        """Raise a StoreError unless the file names these shards still, now that nobody else has them."""
        if not self.names_the_shards_of(Manifest.read(path)):
            raise StoreError(
                f"{path}: expected the shards that it named when it was read, got others now: load it again"
            )

    def names_the_shards_of(self, other: "Manifest") -> bool:
        """Tell whether it is the same cluster, of the same ranges in the same folders."""
        return (self.cluster, self.ranges, self.folders) == (other.cluster, other.ranges, other.folders)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """The manifest of a file.

        Raises:
            StoreError: there is none.
            CheckpointError: it is something else, or of a newer version.
        """
        try:
            if path.exists() and os.lstat(require_file(path)).st_size > _MOST:
                raise CheckpointError(f"{path}: expected a manifest, got more than {_MOST} bytes")
            text = path.read_text() if path.is_file() or not path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(
                f"{path}: expected the manifest of a cluster, got none that can be read: {error}"
            ) from None
        with believed(path):
            said: Mapping[str, Any] = json.loads(text)
            if said.get("what") != _WHAT:
                raise CheckpointError(f"{path}: expected the manifest of a fedcore cluster, got something else")
            if (version := said["version"]) != _VERSION:
                raise CheckpointError(f"{path}: expected version {_VERSION}, got {version!r}: a newer one wrote it")
            layout = Layout.from_state(said["layout"])
            ranges = tuple(Range(one["start"], one["stop"], one["end"]) for one in said["shards"])
            _require_whole(layout, ranges)
            folders = tuple(str(one["folder"]) for one in said["shards"])
            return cls(str(said["cluster"]), layout, ranges, folders, said.get("copy") is True)


def require_own_file(path: Path) -> None:
    """Reject a file that is a link, or another user's.

    Raises:
        StoreError: it is.
    """
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode) or not is_own(path, found):
        raise StoreError(
            f"{path}: expected a file of this user's own, got a link or another user's: use another folder"
        )


def folders_of(names: Sequence[str], folders: Sequence[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    """The folders of shards: those that are given, or ones of these names beside the manifest.

    Raises:
        RangeError: there is not one for each.
    """
    if folders is None:
        return tuple(names)
    if len(folders) != len(names):
        raise RangeError(f"folders: expected one for each of {len(names)} shards, got {len(folders)}")
    return tuple(os.path.realpath(expanded(folder)) for folder in folders)


def prepare(home: Path) -> None:
    """Make a manifest's folder.

    Raises:
        StoreError: there is a cluster already, or it cannot be made.
    """
    if (home / NAME).exists():
        raise StoreError(f"{home / NAME}: expected none yet, got one: Server.load goes on with it")
    made_folder(home)
    with disk.explained("making a cluster", home):
        disk.sync_path(home.parent)


def made_folder(home: Path) -> None:
    """Make a manifest's folder, where none is there.

    Raises:
        StoreError: it cannot be made.
    """
    with disk.explained("making a cluster", home):
        home.mkdir(parents=True, exist_ok=True)


def older_copy(home: Path) -> Manifest | None:
    """The copy that a folder holds, in whose place another may be put; None if it holds nothing.

    Raises:
        StoreError: it holds something else.
    """
    if (found := manifest_at(home / NAME)) is None:
        if strange := [name for name in sorted(os.listdir(home)) if not name.startswith(NAME)]:
            raise StoreError(f"{home}: expected a new or empty folder, or of an older copy, got one with {strange[0]}")
        return None
    require_own_file(home / NAME)
    if not found[1].is_copy:
        raise StoreError(f"{home}: expected a new or empty folder, or of an older copy, got a server's own")
    if any(shard_in(folder) is None or folder.count("-") < 2 for folder in found[1].folders or ()):
        raise StoreError(f"{home / NAME}: expected the shards of a copy beside it, got others: save to another folder")
    return found[1]


def replace_text(path: Path, text: str) -> None:
    """Write a file durably, in the place of one that may be there, in one step. It keeps the mode of that one."""
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
def alone_in(home: Path) -> Iterator[None]:
    """Keep everybody else from writing a manifest to the folder meanwhile, where the system can lock a folder.

    Raises:
        LockedError: somebody does.
    """
    folder = os.open(home, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(
                    f"{home}: expected nobody who saves to it or cuts it anew, got somebody: wait for him"
                ) from None
        yield
    finally:
        os.close(folder)


def manifest_at(path: Path) -> tuple[Path, Manifest] | None:
    """The manifest that a path is, or that its folder has; None where there is none.

    Raises:
        CheckpointError: it is something else, or of a newer version.
    """
    file = path / NAME if path.is_dir() else path
    return (file.absolute(), Manifest.read(file)) if file.is_file() else None


def _require_whole(layout: Layout, ranges: tuple[Range, ...]) -> None:
    """Refuse ranges that are not those of the layout, one behind the other."""
    p, n = layout.n_parameters, layout.n
    numbers = [number for span in ranges for number in span]
    inner = [span.start for span in ranges[1:]]
    if (
        not ranges
        or not all(is_whole(number, 0, n) for number in numbers)
        or ranges[0].start != 0
        or any(start % BLOCK for start in inner)
        or [span.end for span in ranges] != [*inner, p]
        or [span.stop for span in ranges] != [*inner, n]
        or any(span.start >= span.end for span in ranges)
    ):
        raise ValueError(f"shards: expected ranges of {p} parameters and {n} elements, got {ranges}")
