"""``fedcore store``: what is in a store's folder, whether it is sound, and how to give back what it does not need."""

import sys
from pathlib import Path

from fedcore.cli.pairs import show_pairs
from fedcore.cli.status import FAILED
from fedcore.server.invariant import folder_problems
from fedcore.store import ClientStore
from fedcore.store.info import PreviousCommit
from fedcore.store.recovery import give_up, look


def info(path: Path) -> None:
    """Show what a store holds."""
    with ClientStore.open(path, readonly=True) as opened:
        found = opened.info()
    pairs = [
        ("path", str(found.path)),
        ("format", str(found.format)),
        ("last round", "none yet" if found.round is None else str(found.round)),
        ("clients", f"{found.clients:,}"),
        ("rows", f"{found.rows:,} of {found.n:,} elements, {found.codec}, {_size(found.row_bytes)} each"),
        ("free slots", f"{found.free:,}"),
        ("on disk", _size(found.bytes)),
        ("undo", _undo(found.previous)),
    ]
    for process, behind in found.readers:
        pairs.append(("read by", f"process {process}, {behind:,} commits behind"))
    for name, (dtype, shape) in found.vectors.items():
        pairs.append((f"vector {name}", f"{dtype}[{', '.join(map(str, shape))}]"))
    show_pairs(pairs)


def verify(path: Path) -> None:
    """Compare everything with its checksums, and a server's sums with its rows."""
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


def _undo(previous: PreviousCommit | None) -> str:
    """The commit that an undo goes back to."""
    if previous is None:
        return "nothing to take back"
    return f"back to {'no round' if previous.round is None else f'round {previous.round}'}, {previous.rows:,} rows kept"


def _size(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
