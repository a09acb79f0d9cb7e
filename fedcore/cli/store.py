"""``fedcore store``: what is in a store's folder and whether it is sound; models out of it, and what changes it."""

import re
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from fedcore.cli import cluster_store
from fedcore.cli.imports import load_all
from fedcore.cli.pairs import bytes_of, show_json, show_pairs
from fedcore.cli.status import FAILED
from fedcore.cluster.manifest import manifest_at
from fedcore.errors import CheckpointError, MissingDependencyError, StoreError
from fedcore.libraries import NARROW
from fedcore.model_files import FORMS, form_of, write_model
from fedcore.server import Server
from fedcore.server.invariant import folder_problems, loading_hints, loading_problems
from fedcore.server.saved_model import read_model
from fedcore.server.transactions import last_change, transactions
from fedcore.store import ClientStore
from fedcore.store.recovery import give_up, look


def info(path: Path, as_json: bool, folders: list[Path] | None = None) -> None:
    """Show what a store holds, or a cluster's shards."""
    if (found_cluster := manifest_at(path)) is not None:
        cluster_store.info(*found_cluster, as_json, folders)
        return
    with ClientStore.open(path, readonly=True) as opened:
        found, undo = opened.info(), _undo(opened)
        problems = loading_problems(opened, read=False)
        hints = [] if problems else loading_hints(opened)
    if as_json:
        undone = None if undo is None else undo._asdict()
        show_json(asdict(found) | {"undo": undone, "problems": problems, "to_load": hints})
        return
    pairs = [
        ("path", str(found.path)),
        ("format", str(found.format)),
        ("last round", "none yet" if found.round is None else str(found.round)),
        ("clients", f"{found.clients:,}"),
        ("rows", f"{found.rows:,} of {found.n:,} elements, {found.codec}, {bytes_of(found.row_bytes)} each"),
        ("free slots", f"{found.free:,}"),
        ("on disk", bytes_of(found.bytes)),
        ("undo", "nothing to take back" if undo is None else f"takes back {undo.what}: to {undo.before}"),
    ]
    for process, behind in found.readers:
        pairs.append(("read by", f"process {process}, {behind:,} commits behind"))
    pairs += [("cannot be loaded", problem) for problem in problems]
    pairs += [("to load it", hint) for hint in hints]
    for name, (dtype, shape) in found.vectors.items():
        pairs.append((f"vector {name}", f"{dtype}[{', '.join(map(str, shape))}]"))
    show_pairs(pairs)


def verify(path: Path, as_json: bool, folders: list[Path] | None = None) -> None:
    """Compare everything with its checksums, and a server's sums with its rows; of a cluster, all shards'."""
    if (found_cluster := manifest_at(path)) is not None:
        cluster_store.verify(*found_cluster, as_json, folders)
        return
    with ClientStore.open(path, readonly=True) as opened:
        problems = opened.verify() or folder_problems(opened)
        rows, vectors = len(opened), len(opened.vector_names())
        hints = [] if problems else loading_hints(opened)
    if as_json:
        sound = {"sound": not problems, "problems": problems, "to_load": hints}
        show_json(sound | {"rows": rows, "vectors": vectors})
    else:
        for problem in problems:
            print(problem)
    if problems:
        sys.exit(FAILED)
    if not as_json:
        print(f"sound: {rows:,} rows and {vectors} vectors")
        for hint in hints:
            print(f"to load it, {hint}")


def compact(path: Path) -> None:
    """Give back free slots."""
    with ClientStore.open(path) as opened:
        before = opened.info().bytes
        opened.compact()
        after = opened.info().bytes
    print(f"{bytes_of(before)} on disk before, {bytes_of(after)} now")


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


def export(path: Path, file: Path) -> None:
    """Write the model of a server's folder into a file."""
    form = form_of(file)
    model = read_model(path)
    narrow = sorted({piece.dtype for piece in model.layout.slices if piece.dtype in NARROW})
    if "numpy" not in FORMS[form] or (form == ".safetensors" and narrow):
        if find_spec("torch") is None:
            what = f"{file.name} of {narrow[0]}" if narrow else file.name
            raise MissingDependencyError.of(what, "torch", extra="torch", instead="write .npz")
        tensors = model.tensors("torch")
    else:
        tensors = model.tensors("numpy")
    write_model(tensors, file)
    size = f"{len(tensors)} tensors, {bytes_of(file.stat().st_size)}"
    print(f"wrote {file}: the model after {model.round_number} rounds, {size}")


def depart(path: Path, client: str, include: bool, imports: list[str]) -> None:
    """Have a client of a server's folder depart."""
    load_all(imports)
    with Server.load(path, medium="mmap") as server:
        number = int(client) if re.fullmatch(r"[0-9]{1,20}", client) else None
        gone = number if number is not None and number in server.clients else client
        server.depart(gone, from_objective=not include)
        left = len(server.clients)
    print(f"{gone!r} departed after round {server.round_number}: {left:,} clients are left")


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
