"""``fedcore store`` and ``fedcore audit``: the folder of a store, a server or a cluster, and exported audit logs."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Any, Literal, NamedTuple

from fedcore import cluster, errors
from fedcore.arrays import NARROW, copied
from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser
from fedcore.cluster.manifest import Manifest, manifest_at
from fedcore.errors import CheckpointError, CorruptionError, LockedError, MissingDependencyError, RoundError, StoreError
from fedcore.kernels import combined_square
from fedcore.model import FORMS, form_of, write_model
from fedcore.model.files import open_model
from fedcore.model.safetensors import StoredFile
from fedcore.options import Storage
from fedcore.server import Server
from fedcore.server import folder as saved
from fedcore.server.report import ROUND, TOTALS, checked, read_lines, write_lines
from fedcore.server.update import digest_of_numbers
from fedcore.store import ClientStore
from fedcore.store.files.inventory import INDEX
from fedcore.store.inspect import give_up, look, state_of
from fedcore.validation import expand_home, short_repr

HELP = """
    Inspect and maintain the folder of a client store, a server or a cluster.

    Start with: fedcore store info PATH
"""


SKEW = 60  # seconds by which a commit may be later than the clock
HELP_OF_AUDIT = """
    Check the audit log of a server or of totals, without its folder.

    Start with: fedcore audit check FILE
"""


def add_arguments(top: Parser) -> None:
    """Add the commands."""
    add_store(top.add_command("store", help=HELP))
    group = top.add_command("audit", help=HELP_OF_AUDIT)
    group.add_commands()
    add = group.add_command("check", check).add_argument
    add("file", type=expand_home, metavar="FILE", help="JSON lines of `fedcore store audit --export`")
    add("--anchor", type=_digest, action="append", default=[], metavar="DIGEST", help="a published digest; repeatable")
    add("--signer", type=_digest, metavar="PUBLIC", help="the public key that must sign each document, in hex")
    add("--client", metavar="ID", help="list the rounds that count its updates; an error if none does")


def add_store(group: Parser) -> None:
    """Add the commands of ``fedcore store``."""
    group.add_commands()
    whole = terminal.whole_number(1)
    folders = _argument("--folders", help="folders of the shards, if not next to the manifest", nargs="+")
    key = _argument("--audit-key", metavar="FILE", help="file with the 32 bytes of the key that signs the audit log")

    def command(name: str, run: terminal.Run, about: str, *more: Callable[[Parser], object]) -> Parser:
        parser = group.add_command(name, run)
        metavar = "STATE" if about.startswith("folder of a server") else "PATH"
        for add in (_argument("path", metavar=metavar, help=about), *more):
            add(parser)
        return parser

    about, state = "folder of a store or a cluster", "folder of a server with an mmap store"
    parser = command("info", info, about, folders, terminal.add_json)
    parser.add_argument("--max-age", type=whole, metavar="SECONDS", help="exit with status 1 if no commit is as new")
    parser = command("verify", verify, about, folders, terminal.add_json)
    parser.add_argument("--round", action="store_true", help="compute the result of the open round from its journal")
    key(parser)
    parser = command("compact", compact, about, folders, terminal.add_imports)
    parser.add_argument("--erase", action="store_true", help="also erase all bytes of removed clients and old rows")
    key(parser)
    command("undo", undo, about)
    parser = command("recover", recover, about)
    parser.add_argument("--accept-loss", action="store_true", help="discard the lost commits (default: dry run)")
    written = _argument("file", metavar="FILE", help="output: .safetensors, .pt, .pth or .npz")
    command("export", export, "folder of a server", written)
    parser = command("remove-client", remove_client, state)
    parser.add_argument("client", metavar="ID", help="id of the client")
    parser.add_argument("--keep-in-objective", action="store_true", help="keep the weights of the other clients")
    parser.add_argument("--erase", action="store_true", help="erase the client's id, rows and updates from the files")
    terminal.add_imports(parser)
    key(parser)
    model = _argument("model", metavar="MODEL", help="file of a model, or folder of safetensors files")
    parser = command("replace", replace, state, model, terminal.add_imports, key)
    parser.add_argument("--key", metavar="KEY", help="key of the state_dict in a torch file, such as model")
    lines = _argument("--export", metavar="FILE", help="write the documents as JSON lines")
    command("audit", audit, "folder of a server or of totals with an audit log, or a manifest", folders, lines)
    parser = command("reshard", reshard, "manifest or folder of a cluster, or a server's folder")
    parser.add_argument("--shards", type=whole, required=True, metavar="N", help="new number of shards")
    _argument("--to", help="folder of the new cluster; PATH is kept")(parser)
    _argument("--folders", nargs="+", help="folders of the new shards (default: next to the manifest)")(parser)
    _argument("--current-folders", nargs="+", help="folders of the present shards, if not next to the manifest")(parser)


def _argument(name: str, *, metavar: str = "FOLDER", **how: Any) -> Callable[[Parser], object]:
    """Return a function that adds an argument, a path, to a parser."""
    return lambda parser: parser.add_argument(name, type=expand_home, metavar=metavar, **how)


def _audit_key(options: Options) -> bytes | None:
    """Return the key in a file; one byte more than a key is enough to refuse other files."""
    if options.audit_key is None:
        return None
    with os.fdopen(StoredFile.open(str(options.audit_key))[1], "rb") as file:
        return file.read(33)


def _server(options: Options) -> Server:
    """Load the server of a folder, with its imports."""
    terminal.load_imports(options.imports)
    try:
        return Server.load(options.path, storage=Storage(medium="mmap", audit_key=_audit_key(options)))
    except LockedError as error:
        raise LockedError(f"{error}; or call remove_client or replace_x of the running server between rounds") from None


def info(options: Options) -> None:
    """Show clients, rows, vectors, the last round and the disk space of a store.

    The command only reads, and can run while a server writes to the store. With --max-age,
    it is a probe of whether rounds finish: it exits with status 1 if the last commit is older,
    or later than the clock.
    """
    if (at := manifest_at(options.path)) is not None:
        _cluster_info(*at, options)
        return
    age = _age(options.path)
    with ClientStore.open(options.path, readonly=True) as opened:
        found, undo = opened.info(), _undo(opened)
        problems = saved.loading_problems(opened, read=False)
        hints = [] if problems else saved.loading_hints(opened)
        waiting, damage = _or_problem(saved.open_updates, options.path, opened.state)
        problems += damage
    torn = saved.incomplete_change([options.path])
    log, damage = ([], []) if torn else _or_problem(saved.read_audit, options.path)
    problems += damage
    facts: dict[str, Any] = {"open_round": waiting, "problems": problems, "to_load": hints, "age": age}
    facts |= {"audited": log[-1][0] if log else None, "incomplete": torn}
    last = None if undo is None else {"what": undo.transaction, "before": undo.before}
    rows = f"{found.rows:,} of {found.n:,} elements, {found.codec}, {terminal.bytes_text(found.row_bytes)} each"
    last_round = "none yet" if found.round is None or _is_new(opened.state) else found.round
    pairs = [("path", found.path), ("format", found.format), ("last round", last_round)]
    pairs += [("clients", f"{found.clients:,}"), ("rows", rows)]
    pairs += [("free slots", f"{found.free:,}"), ("on disk", terminal.bytes_text(found.bytes))]
    pairs += [("undo", "nothing to roll back" if undo is None else f"{undo.transaction}, back to {undo.before}")]
    pairs += [("read by", f"process {process}, {behind:,} commits behind") for process, behind in found.readers]
    shapes = {name: f"{dtype}[{', '.join(map(str, shape))}]" for name, (dtype, shape) in found.vectors.items()}
    pairs += [(f"vector {name}", shape) for name, shape in shapes.items()]
    _print_info(pairs, asdict(found) | {"undo": last} | facts, options)


def _print_info(pairs: list[tuple[str, Any]], facts: dict[str, Any], options: Options) -> None:
    """Print a store or a cluster, as JSON or as pairs; exit with ``FAILED`` if its last commit is too old."""
    age, waiting = facts["age"], facts["open_round"]
    if options.json:
        terminal.print_json(facts)
    else:
        pairs += [("last commit", f"{age:,.0f} s ago")]
        pairs += [("open round", f"{len(waiting):,} updates in the journal")] if waiting else []
        shown = {"newest audit document": facts["audited"], "to be rolled back": facts["incomplete"]}
        pairs += [(name, value) for name, value in shown.items() if value]
        pairs += [("cannot be loaded", problem) for problem in facts["problems"]]
        terminal.print_pairs([*pairs, *(("to load it", hint) for hint in facts.get("to_load", ()))])
    if options.max_age is not None and not -SKEW < age <= options.max_age:
        when = f"{age:,.0f} s old" if age > 0 else f"{-age:,.0f} s after the present time; set this machine's clock"
        print(f"--max-age {options.max_age}: the last commit is {when}", file=sys.stderr)
        sys.exit(terminal.FAILED)


def _stores(path: Path) -> list[Path]:
    """Return the folder of a store or a server, and those of a server's groups."""
    return [path, *saved.group_folders(path)]


def _open(folder: Path, named: Path, **how: Any) -> ClientStore:
    """Open the store in the folder that the caller has named, or in a part of it."""
    return ClientStore.open(folder, **how) if folder == named else saved.open_part(folder, **how)


def _or_problem(read: Callable[..., list[Any]], *arguments: Any) -> tuple[list[Any], list[str]]:
    """Return what a function reads from a folder, and the problem if it cannot."""
    try:
        return read(*arguments), []
    except CheckpointError as error:
        return [], [str(error)]


def _is_new(state: Any) -> bool:
    """Whether the state is that of a server before its first round."""
    numbers = state.get("numbers") if isinstance(state, dict) else None
    return isinstance(numbers, dict) and numbers.get("round_number") == 0


def _age(folder: Path) -> float:
    """Return the seconds since the last commit, which writes to the index or its log. Readers create an empty log."""
    files = [path.stat() for path in (folder / INDEX, folder / f"{INDEX}-wal") if path.is_file()]
    return time() - max((found.st_mtime for found in files if found.st_size), default=0.0)


def verify(options: Options) -> None:
    """Check all data of a store against its checksums, and sums against rows.

    If rows are damaged, it lists their clients and the exit status is 1. The command only
    reads, and can run while a server writes to the store.

    With --round it also computes the round that a restarted server would continue: the
    updates in the journal that count, and the new model. It loads the server with all rows
    into memory.
    """
    if (at := manifest_at(options.path)) is not None:
        if options.round:
            raise StoreError("--round: not supported with shards; leave it out")
        _verify_cluster(*at, options)
        return
    problems, rows, vectors, hints = [], 0, 0, list[str]()
    for folder in _stores(options.path):
        with _open(folder, options.path, readonly=True) as opened:
            problems += (opened.verify() or saved.folder_problems(opened)) + saved.journal_problems(folder)
            rows, vectors = rows + len(opened), vectors + len(opened.vector_names())
            hints = [] if problems else hints or saved.loading_hints(opened)
    torn = saved.incomplete_change([options.path])
    problems += [] if problems or torn else _or_problem(saved.read_audit, options.path)[1]
    facts: dict[str, Any] = {"to_load": hints, "rows": rows, "vectors": vectors, "incomplete": torn}
    lines = [f"sound: {rows:,} rows and {vectors} vectors", *(f"to load it, {hint}" for hint in hints)]
    lines += [torn] if torn else []
    if options.round and not problems:
        facts["open_round"], more = _replayed(options.path, _audit_key(options))
        lines += more
    _print_verdict(problems, facts, lines, options)


def _replayed(path: Path, key: bytes | None) -> tuple[dict[str, Any], list[str]]:
    """Finish the open round of a server's folder in memory; return facts and lines to print."""
    if (at := saved.journal_of(path)) is None:
        raise StoreError(f"{path}: has no journal; a server with Storage(journal=True) writes one")
    with Server.load(path, storage=Storage(medium="ram", audit_key=key)) as server:
        with closing(saved.Journal(at, server.settings, readonly=True)) as journal:
            x, number, missing = copied(server.x), server.round_number, None
            journal.begin(number, server.sent_checksums())
            round = server.open_round(newcomers=journal.newcomers(number, [], server.clients))
            round.replay(journal)
            try:
                round.finish()
            except RoundError as error:  # too few clients
                missing = str(error)
        step = math.sqrt(combined_square([server.x, x], [1.0, -1.0]))
        facts = {"round": number, "accepted": sorted(round.clients, key=str), "rejected": round.rejected}
        result = {"step": step, "digest": digest_of_numbers(server.x)}
        private = server.settings.rules.private is not None  # the noise would be new, and no ledger would count it
        facts |= (dict.fromkeys(result) if private else result) | {"missing": missing}
    lines = [f"round {number}: {len(round.clients):,} updates in the journal count"]
    lines += [f"round {number} rejects {client!r}: {reason}" for client, reason in round.rejected]
    shown = f"|x' - x| = {step:.4g}, digest of x' {facts['digest']}"
    shown = "x' is not shown, because its noise is drawn when the round ends" if private else shown
    return facts, [*lines, f"round {number}: {missing or shown}"]


def compact(options: Options) -> None:
    """Free unused disk space: move rows into free slots, and shorten the files.

    No server may write to the store meanwhile. The command is one transaction of each store
    in the folder: an interrupt leaves a store unchanged, or compacted.

    With --erase the files no longer contain the ids and rows of removed clients, and
    earlier rows and vectors.
    """
    terminal.load_imports(options.imports)
    at = manifest_at(options.path)
    infos = [] if at is None else at[1].shards(at[0].parent, options.folders)
    for shard in infos:
        shard.require_inside()
    shards = [Path(shard.folder or "") for shard in infos]
    journals = [*filter(None, [saved.journal_of(options.path if at is None else at[0].parent)])]
    stores = [*(one for folder in shards or [options.path] for one in _stores(folder)), *journals]
    before = sum(map(_bytes, stores))
    torn = not shards and saved.incomplete_change([options.path])  # loading rolls it back, which needs old rows
    if shards or torn or (options.erase and _is_server(options.path)):  # its state may have ids of removed clients
        storage = Storage(medium="mmap", folders=options.folders, audit_key=_audit_key(options))
        with Server.load(options.path, storage=storage) as server:
            server.compact(erase=options.erase)
    for folder in journals if shards else stores:
        with _open(folder, options.path) as opened:
            opened.compact(erase=options.erase)
    after = sum(map(_bytes, stores))
    print(f"{terminal.bytes_text(before)} on disk before, {terminal.bytes_text(after)} now")


def _is_server(folder: Path) -> bool:
    return isinstance(state := state_of(folder), dict) and state.get("what") == saved.SERVER


def _bytes(folder: Path) -> int:
    with ClientStore.open(folder, readonly=True) as opened:
        return opened.info().bytes


def undo(options: Options) -> None:
    """Roll back the last transaction, if the folder keeps the state before it.

    A server's transaction is a round, arrival, departure or warm start. The model, the
    sums, the rows and the clients are restored, and Server.load continues from there. With
    durability="checkpoint", all changes since a checkpoint are one transaction.
    `fedcore store info PATH` shows the transaction and changes nothing.

    Only one transaction can be rolled back. No server may write to the store meanwhile;
    open readers keep their state. After an interrupt, the rollback is done or not begun.

    Example:
      fedcore store undo PATH
    """
    _require_unsharded("undo", options.path, "they keep their last change only to agree after a crash")
    folders = _stores(options.path)
    for folder in folders:
        with _open(folder, options.path, readonly=True) as opened:
            _required(opened)  # check before opening for writing, which converts an older format
    with ExitStack() as stack:
        stores = [stack.enter_context(_open(folder, options.path, keep_previous=True)) for folder in folders]
        found = _required(stores[0])
        if len(stores) > 1 and len({saved.transactions(store) for store in stores}) > 1:
            raise StoreError(f"{options.path}: the last change is incomplete; load the server once to roll it back")
        for store in stores:  # after an interrupt, the next load rolls back the others
            store.undo()
    print(f"rolled back {found.transaction}; the store is at {found.before}")


def recover(options: Options) -> None:
    """Reopen a store that lost commits, at its last complete commit.

    Without --accept-loss the command only reads. It shows the last complete commit and
    the lost commits, and checks all data. If a lost commit overwrote a row of the last
    complete commit, the row is damaged; restore the store from a copy.

    Example:
      fedcore store recover PATH --accept-loss
    """
    _require_unsharded("recover", options.path, "run it on the folder of each shard")
    found = look(options.path)
    round = "no round yet" if found.round is None else f"round {found.round}"
    print(f"the last complete commit is {found.commit} ({round})")
    if not found.lost:
        print("no commit was lost")
        return
    if found.problems:
        advice = f"commit {found.commit} is damaged (see above); restore the store from a copy"
        print(*found.problems, advice, sep="\n")
        sys.exit(terminal.FAILED)
    first, last = found.lost[0], found.lost[-1]
    lost = f"commit {first}" if first == last else f"commits {first} to {last}"
    if not options.accept_loss:
        print(f"{lost} would be lost; nothing was changed; pass --accept-loss to accept this")
        sys.exit(terminal.FAILED)
    give_up(options.path)
    print(f"{lost} discarded; the store can be opened again")


def export(options: Options) -> None:
    """Write the model of a server's folder into a file for other programs.

    The file contains the model after the last finished round, and is replaced atomically.
    Its suffix selects the format: .safetensors, .pt (a state_dict, needs torch) or .npz
    (NumPy). The command only reads the folder, and can run while a server writes to it.

    Examples:
      fedcore store export state model.safetensors
      fedcore store export runs/mine/checkpoints/0-mimic-seed0 model.pt

    The second example is an interrupted trial. A complete trial has models if its run
    was started with --set evaluate.keep=N.
    """
    _require_unsharded("export", options.path, "load it, and use write_model(server.tensors(), file)")
    file: Path = options.file
    form = form_of(file)
    model = saved.read_model(options.path)
    narrow = sorted({piece.dtype for piece in model.layout.slices if piece.dtype in NARROW})
    is_in_torch = "numpy" not in FORMS[form] or (form == ".safetensors" and narrow)
    library: Literal["torch", "numpy"] = "torch" if is_in_torch else "numpy"
    if library == "torch" and find_spec("torch") is None:
        purpose = f"{file.name} of {narrow[0]}" if narrow else file.name
        raise MissingDependencyError.of(purpose, "torch", extra="torch", instead="write .npz")
    tensors = model.tensors(library)
    write_model(tensors, file)
    size = f"{len(tensors)} tensors, {terminal.bytes_text(file.stat().st_size)}"
    print(f"wrote {file}: the model after {model.round_number} rounds, {size}")


def audit(options: Options) -> None:
    """Show the audit log in a folder of a server or of totals, or export it.

    The command checks the documents first. It prints the digest of the newest one. If you
    publish it after each round, `fedcore audit check FILE --anchor DIGEST` shows anyone with
    the exported file that no document up to it was changed. The command only reads, and can
    run while a server writes to the folder.

    Examples:
      fedcore store audit state
      fedcore store audit state --export log.jsonl
    """
    at = manifest_at(options.path)
    of_shards = () if at is None else (at[1].shards(at[0].parent, options.folders), at[1].joined)
    if not (log := saved.read_audit(options.path, *of_shards)):
        raise StoreError(f"{options.path}: has no documents; Storage(audit=True) and Totals(path=) write them")
    if options.export is not None:
        write_lines(options.export, [document for _, document in log])
        print(f"wrote {options.export}: {len(log):,} documents")
    else:
        for number, (digest, document) in enumerate(log):
            counts = [(name, document.get(name)) for name in ("updates", "rejected")]
            more = "".join(f", {len(listed)} {name}" for name, listed in counts if isinstance(listed, list))
            print(f"{number:6}  {digest[:16]}  round {document['round']}: {short_repr(document['what'])[1:-1]}{more}")
    print(f"newest document: {log[-1][0]}")


def _require_unsharded(command: str, path: Path, instead: str) -> None:
    if manifest_at(path) is not None:
        raise StoreError(f"{path}: {command}: not supported with shards: {instead}")


def remove_client(options: Options) -> None:
    """Remove a client from a saved server and subtract its row from all sums.

    No server may write to the folder meanwhile; use Server.remove_client for a running
    server. If the folder keeps the state before the last transaction, `fedcore store undo`
    restores the client.

    With --erase the files no longer contain the client's rows, its updates in the journal
    and its id, except in an audit log (Storage(audit=True)). Then nothing can be undone.
    The model keeps what it learned from the client.

    Example:
      fedcore store remove-client state 6718209338712947
    """
    with _server(options) as server:
        client = _client(options.client, server.clients)
        server.remove_client(client, from_objective=not options.keep_in_objective, erase=options.erase)
        left, audited = len(server.clients), server.settings.audit
    print(f"{client!r} removed after round {server.round_number}; {left:,} clients remain")
    if options.erase:
        print("erased: its rows, its updates in the journal, and its id" + " outside the audit log" * audited)
        print("kept: the model, with what it learned from the client" + ", and the audit log, with its id" * audited)
    else:
        print("its bytes stay in unused space of the files; `fedcore store compact --erase` erases them")


def _client(text: str, known: Any) -> int | str:
    """Return the id of a command line: the text, or the integer with these digits if no client has the text."""
    is_integer = re.fullmatch("0|[1-9][0-9]{0,19}", text) is not None
    if is_integer and text in known and int(text) in known:
        way = f"in Python, call remove_client({text}) or remove_client({text!r}) of Server.load(STATE)"
        raise errors.RangeError(f"ID {text}: clients {text} (an integer) and {text!r} (a text) are registered; {way}")
    return int(text) if is_integer and text not in known else text


def replace(options: Options) -> None:
    """Replace the model of a saved server by a model with the same tensors.

    No server may write to the folder meanwhile; use Server.replace_x for a running server.
    Rows, momentum and the round number stay. If the folder keeps the state before the last
    transaction, `fedcore store undo` restores the old model.

    Example:
      fedcore store export state model.safetensors
      fedcore store replace state pruned.safetensors
    """
    with _server(options) as server:
        server.replace_x(open_model(options.model, key=options.key))
    print(f"model replaced after round {server.round_number}")


def reshard(options: Options) -> None:
    """Change the number of shards of a cluster, or shard a server's folder.

    Later rounds are bit-identical, since no row is rounded. All folders must be on this
    machine, and no server may use them. The disk must hold the old and the new shards. If
    the command is killed, the old or the new cluster is complete; run the command again.

    Examples:
      fedcore store reshard run/cluster.json --shards 4
      fedcore store reshard run --shards 2 --folders /disk0/run /disk1/run
      fedcore store reshard state --shards 2 --to run      (state: folder of a server)
    """
    places = {"to": options.to, "folders": options.folders, "current_folders": options.current_folders}
    with terminal.progress("rows written") as show:
        file = cluster.reshard(options.path, options.shards, progress=show, **places)
    print(f"{options.shards} shards: {file}")


def _cluster_info(file: Path, manifest: Manifest, options: Options) -> None:
    layout, facts, state = manifest.layout, [], None
    shards = manifest.shards(file.parent, options.folders)
    age = max((_age(Path(shard.folder or "")) for shard in shards), key=lambda age: (age <= -SKEW, age))
    pairs = [("manifest", str(file)), ("parameters", f"{layout.n_parameters:,} of {layout.n:,} elements")]
    for shard, span in zip(shards, manifest.ranges, strict=True):
        with ExitStack() as opened:
            stores = [opened.enter_context(store) for store in shard.open_all(readonly=True)]
            infos, last, state = [store.info() for store in stores], saved.transactions(stores[0]), stores[0].state
        found = asdict(infos[0]) | {name: sum(getattr(info, name) for info in infos) for name in ("rows", "bytes")}
        facts.append(found | {"transactions": last._asdict(), "range": span._asdict()})
        held = f"transaction {last.last}, {found['rows']:,} rows, {terminal.bytes_text(found['bytes'])} on disk"
        pairs.append((f"shard {shard.shard}", f"[{span.start:,}, {span.stop:,}), {held}, {shard.folder}"))
    waiting, problems = _or_problem(saved.open_updates, file.parent, state)
    whole = {"manifest": file, "parameters": layout.n_parameters, "elements": layout.n, "open_round": waiting}
    whole |= {"problems": problems, "age": age, "audited": None if state is None else state["numbers"].get("audited")}
    whole["incomplete"] = saved.incomplete_change([Path(shard.folder or "") for shard in shards])
    _print_info(pairs, whole | {"shards": facts}, options)


def _verify_cluster(file: Path, manifest: Manifest, options: Options) -> None:
    """Check each shard's checksums and sums, and that the shards agree on a transaction."""
    problems, to, shards = list[str](), None, manifest.shards(file.parent, options.folders)
    with ExitStack() as opened:
        parts = [[opened.enter_context(store) for store in shard.open_all(readonly=True)] for shard in shards]
        stores = [store for part in parts for store in part]
        held, folders = saved.together(stores), [store.path for store in stores]
        last = [min(saved.transactions(store).last for store in part) for part in parts]
        rows = max(sum(map(len, part)) for part in parts)
        for shard, part in zip(shards, parts, strict=True):
            found = [line for store in part for line in store.verify() or saved.folder_problems(store)]
            problems += [f"shard {shard.shard}: {problem}" for problem in found]
    problems += saved.journal_problems(file.parent)
    try:
        to = saved.common_transaction(held, folders)
    except CheckpointError as error:
        problems.append(str(error))
    ahead = sum(one.last != to for one in held)
    problems += [] if problems or ahead else _or_problem(saved.read_audit, file, shards, manifest.joined)[1]
    rest = f"; {ahead} ahead of it, to be rolled back when a server opens them" if ahead else ""
    facts = {"rows": rows, "transaction": to, "shards": last}
    _print_verdict(problems, facts, [f"sound: {len(shards)} shards at transaction {to}, {rows:,} rows{rest}"], options)


def _print_verdict(problems: list[str], facts: dict[str, Any], lines: list[str], options: Options) -> None:
    """Print the problems and exit with ``FAILED``, or print the lines if the store is intact."""
    if options.json:
        terminal.print_json({"sound": not problems, "problems": problems, **facts})
    else:
        print("\n".join(problems or lines))
    if problems:
        sys.exit(terminal.FAILED)


class _Undo(NamedTuple):
    """The transaction that an undo rolls back, and the previous transaction."""

    transaction: str
    before: str


def _undo(opened: ClientStore) -> _Undo | None:
    found, previous = opened.info(), opened.previous
    if previous is None:
        return None
    commit, before = _commit(found.commit, found.round), _commit(previous.commit, previous.round)
    with suppress(CheckpointError):  # a store without a server
        if saved.forgets_privacy(opened):
            return None
        if change := saved.last_change(opened):
            last = saved.transactions(opened)
            commit, before = f"{change} (transaction {last.last}, {commit})", f"transaction {last.before} ({before})"
    return _Undo(commit, before)


def _required(opened: ClientStore) -> _Undo:
    """Return the undo that the store allows, or raise StoreError."""
    if (found := _undo(opened)) is None:
        until = "Storage(keep_previous=True) or ClientStore(keep_previous=True), until an undo or a compact"
        reason = f"no transaction to roll back; a folder keeps the last transaction with {until}"
        raise StoreError(f"{opened.path}: {reason}; a private round has no undo")
    return found


def _commit(number: int, round: int | None) -> str:
    return f"commit {number}, {'before any round' if round is None else f'of round {round}'}"


# ``fedcore audit``: an exported audit log, without the folder.


def check(options: Options) -> None:
    """Check that a log is complete and unchanged up to its anchors.

    Without an anchor or a signer, the check only shows that the documents fit together:
    the operator of the server can write others that do.

    Example:
      fedcore audit check log.jsonl --anchor 5f0c... --client 7
    """
    anchors, clients, rounds, number, digest = set(options.anchor), set[str](), 0, -1, "none"
    for number, (digest, document) in enumerate(checked(read_lines(str(options.file)), signer=options.signer)):
        if digest in anchors:
            anchors.discard(digest)
            print(f"anchor {digest}: document {number}, round {document['round']}")
        if document["what"] not in (ROUND, TOTALS):
            continue
        rounds += 1
        updates = document.get("updates")
        for update in updates if isinstance(updates, list) and options.client is not None else ():
            clients |= {str(update.get("client"))} if isinstance(update, dict) else set()
            if isinstance(update, dict) and str(update.get("client")) == options.client:
                client, weight, own = (short_repr(update.get(name)) for name in ("client", "weight", "digest"))
                print(f"round {document['round']}: client {client}: weight {weight}, digest {own}")
    if number < 0:
        raise CorruptionError(f"{options.file}: has no documents")
    if anchors:
        listed = ", ".join(sorted(anchors))
        raise CorruptionError(f"--anchor {listed}: no document has this digest; documents were changed, or are missing")
    print(f"sound: {number + 1:,} documents of {rounds:,} rounds; the last one is {digest}")
    if options.client is not None and options.client not in clients:
        raise errors.UnknownNameError.of("--client, which no round of this log counts", options.client, clients)


def _digest(text: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be 64 hexadecimal digits")
    return text.lower()
