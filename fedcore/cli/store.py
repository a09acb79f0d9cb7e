"""``fedcore store``: what is in a store's folder, whether it is sound, and how to give back, undo or recover some."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fedcore.cli.pairs import show_pairs
from fedcore.cli.status import FAILED
from fedcore.cluster.coordinator import least
from fedcore.cluster.manifest import Manifest, manifest_at
from fedcore.cluster.shard import Place
from fedcore.errors import CheckpointError, StoreError
from fedcore.server.invariant import folder_problems
from fedcore.server.transactions import last_change, transactions
from fedcore.store import ClientStore
from fedcore.store.recovery import give_up, look


def info(path: Path) -> None:
    """Show what a store holds, or a cluster's shards."""
    if (found_cluster := manifest_at(path)) is not None:
        _cluster_info(*found_cluster)
        return
    with ClientStore.open(path, readonly=True) as opened:
        found, undo = opened.info(), _undo(opened)
    pairs = [
        ("path", str(found.path)),
        ("format", str(found.format)),
        ("last round", "none yet" if found.round is None else str(found.round)),
        ("clients", f"{found.clients:,}"),
        ("rows", f"{found.rows:,} of {found.n:,} elements, {found.codec}, {_size(found.row_bytes)} each"),
        ("free slots", f"{found.free:,}"),
        ("on disk", _size(found.bytes)),
        ("undo", "nothing to take back" if undo is None else f"takes back {undo.what}: to {undo.before}"),
    ]
    for process, behind in found.readers:
        pairs.append(("read by", f"process {process}, {behind:,} commits behind"))
    for name, (dtype, shape) in found.vectors.items():
        pairs.append((f"vector {name}", f"{dtype}[{', '.join(map(str, shape))}]"))
    show_pairs(pairs)


def verify(path: Path) -> None:
    """Compare everything with its checksums, and a server's sums with its rows; of a cluster, all shards'."""
    if (found_cluster := manifest_at(path)) is not None:
        _verify_cluster(*found_cluster)
        return
    with ClientStore.open(path, readonly=True) as opened:
        problems = opened.verify() or folder_problems(opened)
        rows, vectors = len(opened), len(opened.vector_names())
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(FAILED)
    print(f"sound: {rows:,} rows and {vectors} vectors")


def compact(path: Path) -> None:
    """Give back free slots."""
    with ClientStore.open(path) as opened:
        before = opened.info().bytes
        opened.compact()
        after = opened.info().bytes
    print(f"{_size(before)} on disk before, {_size(after)} now")


def recover(path: Path, accept_loss: bool) -> None:
    """Say what is left of a store that lost commits; if the loss is accepted, let it go on from there."""
    found = look(path)
    round = "no round yet" if found.round is None else f"round {found.round}"
    print(f"commit {found.commit} ({round}) is the last that is there")
    if not found.lost:
        print("no commit was lost")
        return
    for problem in found.problems:
        print(problem)
    if found.problems:
        print(f"expected commit {found.commit} to be whole, got what is said above: use a copy of the store")
        sys.exit(FAILED)
    first, last = found.lost[0], found.lost[-1]
    lost = f"commit {first}" if first == last else f"commits {first} to {last}"
    if not accept_loss:
        print(f"{lost} would be given up, for ever; nothing is changed yet: --accept-loss does it")
        sys.exit(FAILED)
    give_up(path)
    print(f"{lost} given up: the store opens again")


def undo(path: Path) -> None:
    """Take the last transaction back."""
    with ClientStore.open(path, readonly=True) as opened:
        _required(opened)  # before an older format is raised, to keep what is not there
    with ClientStore.open(path, undoable=True) as writing:
        found = _required(writing)
        writing.undo()
    print(f"{found.what} is taken back: the store is as after {found.before}")


def _cluster_info(file: Path, manifest: Manifest) -> None:
    layout = manifest.layout
    pairs = [("manifest", str(file)), ("parameters", f"{layout.n_parameters:,} of {layout.n:,} elements")]
    for place, span in zip(manifest.places(file.parent), manifest.ranges, strict=True):
        with _shard(place) as opened:
            found, last = opened.info(), transactions(opened)
        said = f"transaction {last.last}, {found.rows:,} rows, {_size(found.bytes)} on disk"
        pairs.append((f"shard {place.shard}", f"[{span.start:,}, {span.stop:,}), {said}, {place.folder}"))
    show_pairs(pairs)


def _verify_cluster(file: Path, manifest: Manifest) -> None:
    problems, held, rows = [], [], 0
    places = manifest.places(file.parent)
    for place in places:
        with _shard(place) as opened:
            found = opened.verify() or folder_problems(opened)
            held.append(transactions(opened))
            rows = max(rows, len(opened))
        problems += [f"shard {place.shard}: {problem}" for problem in found]
    try:
        to = least(held, places)
    except CheckpointError as error:
        problems.append(str(error))
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(FAILED)
    ahead = sum(one.last > to for one in held)
    said = f"; {ahead} more than that, to be taken back when a server is opened"
    print(f"sound: {len(places)} shards at transaction {to}, {rows:,} rows{said if ahead else ''}")


def _shard(place: Place) -> ClientStore:
    """A shard's folder, to be read.

    Raises:
        CheckpointError: it is not the shard that the manifest says.
    """
    assert place.folder is not None
    opened = ClientStore.open(place.folder, readonly=True)
    try:
        place.require(opened.state)
    except BaseException:
        opened.close()
        raise
    return opened


class _Undo(NamedTuple):
    """The transaction that an undo takes back, and the one to which it goes back."""

    what: str
    before: str


def _undo(opened: ClientStore) -> _Undo | None:
    """The undo that is possible, or None."""
    found, previous = opened.info(), opened.previous
    if previous is None:
        return None
    what, before = _commit(found.commit, found.round), _commit(previous.commit, previous.round)
    with suppress(CheckpointError):  # of a store without a server
        if change := last_change(opened):
            last = transactions(opened)
            what, before = f"{change} (transaction {last.last}, {what})", f"transaction {last.before} ({before})"
    return _Undo(what, before)


def _required(opened: ClientStore) -> _Undo:
    """The undo that is possible.

    Raises:
        StoreError: there is nothing to take back.
    """
    if (found := _undo(opened)) is None:
        raise StoreError(
            f"{opened.path}: expected a last transaction that can be taken back, got none: it can where whoever wrote "
            "it had undoable=True, once, and until a compaction"
        )
    return found


def _commit(number: int, round: int | None) -> str:
    return f"commit {number}, {'before any round' if round is None else f'of round {round}'}"


def _size(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
