"""The folder of a server: its validation, its transactions, its model, and the journal of its open round."""

import json
import math
import os
import re
import time
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import REGISTRY
from fedcore.algorithms.rates import rate_at
from fedcore.arrays import CPU, F32, F64, NARROW, Library, copied, device_named, ieee, spans
from fedcore.errors import CheckpointError, CorruptionError, DeviceError, FedcoreError, StoreError
from fedcore.files import closed_on_error, part_of, require_same
from fedcore.kernels import ExactSum
from fedcore.model import Layout
from fedcore.options import BY_MODULE, DESCRIBED, LARGEST, RATES, Settings, revive
from fedcore.rules.private import Ledger
from fedcore.rules.windows import WINDOW
from fedcore.server.report import TOTALS, Document, audit_errors, checked, log_of
from fedcore.server.state import NewClients
from fedcore.server.step import Snapshot, count_of, documents_of
from fedcore.server.update import IDS, Update, bytes_sent, digest_of_numbers, in_float32, read_counters
from fedcore.store import ClientStore
from fedcore.store.commits import Medium
from fedcore.store.files.inventory import GROUPS, UPDATES
from fedcore.store.inspect import state_of
from fedcore.store.reader import CommittedRows
from fedcore.store.registry import ClientId, canonical
from fedcore.validation import absolute, check_integer, describe_integers, is_integer, rejection_reason, short_repr

# Validation of a folder before a server is loaded from it.


JOURNAL = UPDATES
"""The journal's folder in that of a server."""
SERVER = "a fedcore server"
"""The ``what`` of a server's state in a store."""
_WIDEST = 2**53
_GROUP = re.compile("0|[1-9][0-9]{0,8}")


@contextmanager
def checkpoint_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise CheckpointError, with the folder's path, for any error from malformed values in a folder."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path}: state is damaged; load a backup ({type(error).__name__}: {error})") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: the server does not fit into memory: {str(error) or 'no details'}") from error


def server_state(path: str | os.PathLike[str], state: Any, *, shard: bool | None = False) -> dict[str, Any]:
    """Return a store's state; raise CheckpointError if it is not a server's, or, by ``shard``, not a shard's."""
    if not isinstance(state, dict) or state.get("what") != SERVER:
        hint = "; create the server in it with Server(...), or load it again later" if state is None else ""
        is_totals = isinstance(state, dict) and state.get("what") == TOTALS
        found = "Totals, not a Server; open it with Totals(path=)" if is_totals else "a ClientStore without a Server"
        raise CheckpointError(f"{path}: the folder has {found}{hint}")
    if shard is not None and shard != ("place" in state):
        found = "a whole server, not a shard" if shard else "a shard; load the folder that has cluster.json"
        raise CheckpointError(f"{path}: the folder has {found}")
    if state["medium"] not in get_args(Medium):
        raise CheckpointError(f"{path}: medium={state['medium']!r}: must be one of {get_args(Medium)}")
    return state


def require_plausible(
    settings: Settings, state: Mapping[str, Any], vectors: Mapping[str, npt.NDArray[Any]], store: CommittedRows
) -> None:
    """Raise ValueError or TypeError if settings, numbers, vectors and rows contradict each other."""

    def require(valid: object, problem: str) -> None:
        if not valid:
            raise ValueError(problem)

    numbers, n, p = state["numbers"], settings.layout.n, settings.layout.n_parameters
    require(store.n == p, f"rows have {store.n} elements, but the model has {p} parameters")
    clients, count = state.get("clients", len(store.registry)), len(store.registry)  # the oldest folders have no count
    require(clients == count, f"clients={clients!r}: the index has {count} clients")
    round, latest = numbers["round_number"], [at for at in (store.round, store.latest) if at is not None]
    last = max(latest, default=0)
    require(
        is_integer(round, 0, _WIDEST) and last <= round,
        f"round={round!r}: must be {describe_integers(last, _WIDEST)}; the last commit or row is of round {last}",
    )
    most, saved = 2 * _WIDEST, numbers.get
    ranges = ("idle", saved("idle", 0), 0, round), ("transactions", saved("transactions", round), round, most)
    for name, value, *ends in (*ranges, ("documents", documents_of(numbers), 0, most)):
        require(is_integer(value, *ends), f"{name}={value!r}: must be {describe_integers(*ends)} after {round} rounds")
    undoable = state.get("undoable", False)
    require(isinstance(undoable, bool), f"undoable={undoable!r}: must be true or false")
    rate = 0.0
    with suppress(Exception):  # a user's rate may have no further values
        rate = rate_at(settings.lr, round)
    ledger = Ledger.from_state(numbers.get("privacy"))
    spent = 0 if settings.rules.private is None else round
    require(ledger.rounds == spent, f"privacy: the ledger has {ledger.rounds} rounds; expected {spent}")
    gamma = numbers["gamma"]
    is_valid = math.isfinite(gamma) and 0 <= saved("gamma_lr", 0) <= LARGEST and rate <= LARGEST
    require(is_valid, f"gamma={gamma!r} or lr={rate!r} is outside the range of float32")
    known = re.compile("(x|x_prev|ahead|momentum|center|total)$|(past|moment|v|total|population|norms|counter)/")
    if unknown := [name for name in vectors if not known.match(name)]:
        raise CheckpointError(
            f"{store.path or 'store'}: a server has no vectors {short_repr(unknown)}; if a class derived from "
            "ClientStore wrote the folder, pass the open store: Server.load(YourStore.open(path))"
        )
    _require_vectors(vectors, n, p)
    outside = {piece.name: piece for piece in settings.layout.outside}
    counters, kept = (
        {name.removeprefix(prefix): vector for name, vector in vectors.items() if name.startswith(prefix)}
        for prefix in ("counter/", "v/")
    )
    require(counters.keys() == outside.keys(), f"counters: expected {sorted(outside)}, got {sorted(counters)}")
    for name, piece in outside.items():
        dtype, counter = np.dtype("float32" if piece.dtype in NARROW else piece.dtype), counters[name]
        fits = counter.dtype == dtype and counter.size == math.prod(piece.shape)
        require(fits, f"counter/{name}: expected {dtype}{list(piece.shape)}, got {counter.dtype}")
    for client, start in numbers.get("starts", []):
        valid = is_integer(start, 0, _WIDEST) and isinstance(client, int | str)
        require(valid, f"starts: ({client!r}, {start!r}) is not a pair of a client and a round")
    words = {"total/high", "total/low"} if settings.is_exact else {"total"}
    totals = {name for name in vectors if name.partition("/")[0] == "total"}
    expected = words if settings.algorithm.keeps_total else set()
    require(totals == expected, f"total: expected the vectors {sorted(expected)}, got {sorted(totals)}")
    references = numbers["references"]
    require(
        kept.keys() == {str(t) for t, _ in references} and all(count >= 1 for _, count in references),
        f"references={references!r}: must match the directions {sorted(kept)}",
    )


def _require_vectors(vectors: Mapping[str, npt.NDArray[Any]], n: int, p: int) -> None:
    """Check the dtype, the shape and the range of each vector by its name, or by the name before its slash."""
    forms: dict[str, tuple[type, int]] = {
        **dict.fromkeys(("x", "x_prev", "ahead", "past/"), (np.float32, n)),
        **dict.fromkeys(("momentum", "moment/", "v/", "center"), (np.float32, p)),
        "total": (np.float64, p),
        "total/": (np.int64, p),
    }
    words = {"low": (0, 2**50 - 1), "high": (1 - 2**62, 2**62 - 1)}
    for name, vector in vectors.items():
        kind, _, entry = name.partition("/")
        key, valid, form = f"{kind}/" if entry else kind, True, ""
        if key in forms:
            dtype, length = forms[key]
            valid, form = vector.dtype == dtype and vector.shape == (length,), f"{np.dtype(dtype)}[{length}]"
        if key == "total/" and valid:
            low, high = words.get(entry, (1, 0))
            parts = (vector[span] for span in spans(len(vector), 2 * vector.itemsize))
            valid, form = all(((part >= low) & (part <= high)).all() for part in parts), "words of an exact sum"
        elif kind == "population":
            valid, form = vector.dtype == np.int64 and vector.shape[:-1] == (2,), "int64[2, m]"
        elif name == f"norms/{IDS}":
            valid, form = vector.dtype == np.int64 and vector.shape[:-1] == (3,) and vector.size > 0, "int64[3, m]"
        elif kind == "norms":
            valid = _is_window(vector, np.float64 if entry in ("steps", "examples") else np.float32)
            form = f"float[{WINDOW}] > 0, with NaN after the last"
        if not valid:
            raise ValueError(f"{name}: expected {form}, got {vector.dtype}{list(vector.shape)}")


def _is_window(vector: npt.NDArray[Any], dtype: type) -> bool:
    """Whether a vector can be a result of ``NormWindow.packed`` or ``ClaimWindow.packed``."""
    if vector.dtype != dtype or vector.shape != (WINDOW,):
        return False
    count = WINDOW - int(np.isnan(vector).sum())
    least = vector[:count] >= 0 if dtype is np.float64 else vector[:count] > 0  # older versions kept weights of zero
    return bool(least.all() and np.isfinite(vector[:count]).all())


# The transactions of a server's folder.


class Transactions(NamedTuple):
    """The numbers of two transactions of a server.

    Transaction 0 created the server. Each round, change of clients, options or x, and warm start is a further one;
    a transaction that was undone does not count.

    Attributes:
        last: the last transaction in the folder.
        before: the transaction that an undo restores; None if the folder does not keep it, or the server did not exist.
    """

    last: int
    before: int | None


def transactions(rows: CommittedRows) -> Transactions:
    """Return the transactions of a server from its open store.

    With durability="checkpoint" an undo restores a checkpoint, perhaps several transactions earlier.

    Raises:
        CheckpointError: the store has no server.
    """
    kept, path = rows.previous, rows.path or "store"
    with checkpoint_errors(path):
        # Before its first commit, a new server's store is empty.
        states = [rows.state] if kept is None or kept.state is None else [rows.state, kept.state]
        last, *before = (count_of(server_state(path, state, shard=None)["numbers"]) for state in states)
        return Transactions(last, before[0] if before else None)


def transactions_of(stores: Sequence[CommittedRows]) -> Transactions:
    """Return the transactions that all stores of one folder can have, of which some may be ahead of the others."""
    held = list(map(transactions, stores))
    to = common_transaction(held, [store.path for store in stores])
    return held[0] if len(set(held)) == 1 else Transactions(to, None)


def last_change(rows: CommittedRows) -> str | None:
    """Describe the change that an undo of a server's folder reverts; None if the folder does not keep the state before.

    Raises:
        CheckpointError: the store has no server.
    """
    kept, path, before = rows.previous, rows.path or "store", transactions(rows).before
    if before is None or kept is None:
        return None
    with checkpoint_errors(path):
        was, now = kept.state["numbers"], rows.state["numbers"]
        first, end = int(was["round_number"]), int(now["round_number"])
        arrived = int(rows.state["clients"]) - int(kept.state["clients"])
        parts = [] if end == first else [f"round {first}"]
        if arrived:
            clients = "1 client" if abs(arrived) == 1 else f"{abs(arrived):,} clients"
            parts.append(f"the {'arrival' if arrived > 0 else 'departure'} of {clients}")
        old, new = was.get("changed", {}), now.get("changed", {})
        if options := [name for name, value in new.items() if name not in old or old[name] != value]:
            parts.append(f"a change of {', '.join(options)}")
        is_of_clients = first or was["population"]["total"] != now["population"]["total"]
    if parts:
        return " and ".join(parts)
    return "a change of client_sizes" if is_of_clients else "a warm start"


def forgets_privacy(rows: CommittedRows) -> bool:
    """Whether an undo of a server's folder would forget the privacy that a round has spent."""
    if transactions(rows).before is None or (kept := rows.previous) is None:
        return False
    return bool(kept.state["numbers"].get("privacy") != rows.state["numbers"].get("privacy"))


def go_back(rows: ClientStore, to: int) -> bool:
    """Make ``to`` the last transaction of a store, by an undo if that restores it.

    After a crash this makes the stores of one sharded server agree: open (and so lock) each store, compare their
    ``transactions``, and call this with the least. A second call has no effect.

    Args:
        rows: opened with ``keep_previous=True``; ``Server.load`` then accepts it.

    Returns:
        Whether a transaction was undone.

    Raises:
        CheckpointError: ``to`` is neither the last transaction nor the transaction that an undo restores.

    Cost: none, or that of an undo.
    """
    now = transactions(rows)
    if now.last == to:
        return False
    if now.before != to:
        before = "does not keep the one before" if now.before is None else f"keeps transaction {now.before}"
        raise CheckpointError(
            f"{rows.path}: cannot go back to transaction {to}; the store is at transaction {now.last} and {before}"
        )
    return rows.undo()


def common_transaction(held: Sequence[Transactions], folders: Sequence[object]) -> int:
    """Return the least of the last transactions of a server's parts; raise CheckpointError if one cannot go back to
    it.
    """
    to = min(one.last for one in held)
    for one, folder in zip(held, folders, strict=True):
        if to not in (one.last, one.before):
            found = f"transaction {one.last}" if one.before is None else f"transactions {one.before} and {one.last}"
            raise CheckpointError(
                f"{folder}: has {found}, but another part of the server is at transaction {to}; one of the two folders "
                "belongs to a different run or is an older copy"
            )
    return to


# How often the parts of a folder are read, and the seconds in between, before they count as different.
READS, PAUSE = 50, 0.02


def together(stores: Sequence[ClientStore]) -> list[Transactions]:
    """Bring the stores of one server, open for reading, to one transaction if possible; return their transactions.

    They were opened one after another, and a server may write to them. A store stays at its commit until it is
    refreshed, so the stores behind the last one follow it. Those that a kill has left behind stay there.

    Raises:
        StoreError: a server writes faster than the stores can be read.
    """
    until, newest = time.monotonic() + READS * PAUSE, set[int]()
    while True:
        held = list(map(transactions, stores))
        newest.add(max(one.last for one in held))
        behind = [store for store, one in zip(stores, held, strict=True) if one.last < max(newest)]
        if not behind or time.monotonic() > until:
            break
        for store in behind:
            store.refresh()
        time.sleep(PAUSE / 20)
    if behind and len(newest) > 2:
        raise StoreError(f"{stores[0].path}: a server writes to it without a pause; try again")
    return held


@contextmanager
def opened_stores(path: Path) -> Iterator[list[ClientStore]]:
    """Yield the store in a server's folder and those of its groups, open for reading and at one transaction.

    Raises:
        StoreError: the last change is incomplete.
    """
    with ExitStack() as opened:
        stores = [opened.enter_context(ClientStore.open(path, readonly=True))]
        stores += [opened.enter_context(open_part(folder, readonly=True)) for folder in group_folders(path)]
        require_together(path, [stores])
        yield stores


def require_together(path: Path, parts: Sequence[Sequence[ClientStore]]) -> None:
    """Bring the stores of a server, or of its shards, to one transaction; raise StoreError if it is incomplete."""
    stores = [store for own in parts for store in own]
    if len(stores) > 1 and len({one.last for one in together(stores)}) > 1:
        torn = incomplete_change([Path(own[0].path or "") for own in parts])
        raise StoreError(f"{path}: {torn or 'a server writes to it now; try again'}")


def agree(stores: Sequence[ClientStore]) -> None:
    """Roll back the stores of one server that are a transaction ahead of another one."""
    to = common_transaction(list(map(transactions, stores)), [store.path for store in stores])
    for store in stores:
        go_back(store, to)


def incomplete_change(servers: Sequence[Path]) -> str | None:
    """Return a line if some parts of a server, or of its shards, are a change ahead of others; None for other folders.

    A server that writes now soon has the change in all parts, so the line comes only if they stay apart for a second.
    """
    folders = [folder for server in servers for folder in (server, *group_folders(server))]
    for _ in range(READS):
        held: list[tuple[int, int]] = []
        with suppress(FedcoreError), checkpoint_errors(folders[0]):  # of damage, which others report
            held = [(count_of(of), int(of["round_number"])) for of in (state_of(one)["numbers"] for one in folders)]
        if len(set(held)) < 2:
            return None
        time.sleep(PAUSE)
    ahead = f"the last change is incomplete: {sum(one > min(held) for one in held)} of {len(held)} parts have it"
    back = f'Server.load(storage=Storage(medium="mmap")) goes back to the end of {min(held)[1]} rounds'
    return f"{ahead}; the server was killed or writes it now; {back}"


# Verification of a folder: a server can be loaded from it, and its running total is the sum of its rows.


_SLACK = 1e-6  # relative to the terms of T, for the rounding of float64 over any number of rounds
Directions = Mapping[int, npt.NDArray[np.float32]]


def _terms(rows: CommittedRows, directions: Directions | None) -> Iterator[tuple[F32, F32 | None]]:
    """Yield the row of each client that has one, and v[t] of its round if T sums corrections."""
    for client in rows.registry:
        if (round := rows.round_of(client)) is not None:
            yield rows.read(client), None if directions is None else directions.get(round)


@ieee
def total_problems(rows: CommittedRows, total: F64, directions: Directions | None) -> list[str]:
    """Return a line if T, float64[n], is not the sum of all rows, or of all corrections v[t_i] - r_i.

    Args:
        rows: the clients' rows, which are read once.
        total: T.
        directions: v[t] by t if T sums corrections (MimiC), else None.
    """
    sum, size = np.zeros_like(total), np.zeros_like(total)
    for row, v in _terms(rows, directions):
        part = row.astype(np.float64) if directions is None else (0.0 if v is None else v) - row.astype(np.float64)
        sum += part
        size += np.abs(part)
    off = np.abs(total - sum)
    if (off <= _SLACK * (size + np.abs(total))).all():
        return []
    worst = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
    return [f"T: expected the sum of all rows, {sum[worst]:g} in element {worst}, got {total[worst]:g}"]


@ieee
def exact_total_problems(rows: CommittedRows, total: ExactSum, directions: Directions | None) -> list[str]:
    """Return a line if an exact T differs in any bit from the sum of ``total_problems``; the arguments are the same."""
    sum: ExactSum | None = ExactSum.zeros(len(total.high))
    for row, v in _terms(rows, directions):
        terms = [sum, row] if v is None else [sum, row, v]
        sum = kernels.combine_exact(terms, [1, 1 if directions is None else -1, 1][: len(terms)])
        if sum is None:
            return ["T: the sum of the rows exceeds the range of an exact sum"]
    assert sum is not None
    off = np.flatnonzero((sum.high != total.high) | (sum.low != total.low))
    if not len(off):
        return []
    j = int(off[0])
    got, expected = ((int(words.high[j]), int(words.low[j])) for words in (total, sum))
    return [f"T: expected the words {expected} in element {j}, the sum of all rows, got {got}"]


def loading_hints(rows: CommittedRows) -> list[str]:
    """List the arguments that loading a server needs, for a folder without ``loading_problems``."""
    if not _has_server(rows):
        return []
    settings, place = rows.state["settings"], rows.state.get("place")
    hints = [f"pass {what}= again; it was {short_repr(was)}" for what, was in _own(settings).items()]
    if place is not None:
        hints.append(f"load all {place['shards']} shards by cluster.json; this is shard {place['shard']}")
    return hints


def loading_problems(rows: CommittedRows, *, read: bool = True) -> list[str]:
    """Return a line if a server cannot be loaded from its folder; a user's method, optimizer or rule is not checked.

    Args:
        read: whether to read the vectors. If not, only their names, dtypes and shapes are checked.
    """
    if not _has_server(rows):
        return []
    path = rows.path or "store"
    try:
        with checkpoint_errors(path):
            state = server_state(path, rows.state, shard=None)
            require_groups(path, state, map(state_of, group_folders(Path(path))))
            if state["settings"]["layout"].get("groups"):
                return []  # each group has a server's folder
            _require_place(state)
            with suppress(DeviceError):  # the device is on another machine
                device_named(state.get("device", CPU))
            settings = state["settings"]
            own = _own(settings)
            for what in DESCRIBED:
                if what not in own:
                    revive(what, settings[what], None)
            if not {"algorithm", "optimizer"}.intersection(own):
                _require_loadable(state, rows, own, read=read)
    except CheckpointError as error:
        return [str(error)]
    return []


def _require_loadable(state: Mapping[str, Any], rows: CommittedRows, own: Mapping[str, str], *, read: bool) -> None:
    described, next_rates = dict(state["settings"]), dict(state["settings"].get("next_rates", {}))
    if "aggregation" in own:
        del described["rules"]
    for what in RATES:
        if what in own:  # only the next value of a user's rate is known
            described[what] = {"name": "Constant", "options": {"value": next_rates.get(what) or 1.0}}
            next_rates[what] = None
    settings = Settings.from_state(described | {"next_rates": next_rates}, dict.fromkeys(DESCRIBED))
    forms = rows.info().vectors
    vectors: Any = {name: rows.vector(name) if read else _unread(*form) for name, form in forms.items()}
    require_plausible(settings, state, vectors, rows)
    if read:
        Snapshot.of(vectors, state["numbers"], settings.layout.n_parameters, rows.registry)


def _unread(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a vector of that dtype and shape whose numbers pass every check."""
    kind = np.dtype(dtype)
    return np.broadcast_to(np.full((), np.nan if kind.kind == "f" else 0, kind), shape)


def _has_server(rows: CommittedRows) -> bool:
    return isinstance(rows.state, dict) and rows.state.get("what") == SERVER


def _own(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that are the user's code, which ``Server.load`` cannot find by name, and what they were."""

    def is_own(what: str, described: Any) -> bool:
        if not isinstance(described, dict) or not isinstance(described.get("was"), str):
            return False
        name = described.get("name")
        return name is None or (what in BY_MODULE and ":" in name)

    described = [(what, settings[what]) for what in DESCRIBED]
    described += [("aggregation", rule) for rule in settings.get("rules", ())]
    return {what: one["was"] for what, one in described if is_own(what, one)}


def _require_place(state: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or LookupError if the place of a shard is invalid."""
    if "place" not in state:
        return
    place = state["place"]
    numbers = [place[name] for name in ("shard", "shards", "first")]
    valid = isinstance(place["cluster"], str) and all(is_integer(number, 0) for number in numbers)
    if not valid or place["shard"] >= place["shards"]:
        raise ValueError(f"place={place!r}: not a valid position of a shard")


def folder_problems(rows: CommittedRows) -> list[str]:
    """Return the contradictions in a server's folder; the sums of a user's method and other folders are not checked.

    Cost: reads every row once.
    """
    if not _has_server(rows):
        return []
    try:
        with checkpoint_errors(rows.path or "store"):
            return loading_problems(rows) or _sum_problems(rows)
    except CheckpointError as error:
        return [str(error)]


def _sum_problems(rows: CommittedRows) -> list[str]:
    described = rows.state["settings"]["algorithm"]
    total, high, low = (rows.vector(name) for name in ("total", "total/high", "total/low"))
    exact = None if high is None or low is None else ExactSum(high, low)
    if described["name"] not in REGISTRY.own or (total is None and exact is None):
        return []
    algorithm = REGISTRY[described["name"]](**described["options"])
    if not algorithm.total_sums_rows:
        return []
    directions = None
    if algorithm.keeps_history:
        named = {int(name.removeprefix("v/")): name for name in rows.vector_names() if name.startswith("v/")}
        directions = {t: v for t, name in named.items() if (v := rows.vector(name)) is not None}
    compare: Any = total_problems if exact is None else exact_total_problems
    return [f"{rows.path}: {line}" for line in compare(rows, exact or total, directions)]


def documents_in(rows: ClientStore, *, of_shard: bool = False) -> list[str]:
    """Return the audit documents of a server in a folder, or of one of its shards, which may have an incomplete one."""
    documents, numbers = rows.documents(), rows.state["numbers"]
    count = documents_of(numbers)
    return log_of(documents[:count] if of_shard else documents, count, numbers.get("audited"))


def read_audit(path: Path, shards: Sequence[Any] = (), joined: Any = None) -> list[tuple[str, Document]]:
    """Return the audit log of a folder: each document with its digest, checked; see ``fedcore.server.report``.

    ``shards`` are the ``ShardInfo`` of a sharded server, whose slices of x ``joined`` joins. Its ``path`` is the
    manifest.

    Raises:
        CorruptionError: a document was changed or is missing, or x is another.
    """
    with ExitStack() as opened:
        parts = [list(map(opened.enter_context, one.open_all(readonly=True))) for one in shards]
        parts = parts or [opened.enter_context(opened_stores(path))]
        mains = [rows for rows, *_ in parts]
        if not isinstance(mains[0].state, dict) or mains[0].state.get("what") not in (SERVER, TOTALS):
            return []
        if shards:
            require_together(path, parts)
        with checkpoint_errors(path):
            x, logs = None, list[list[tuple[str, Document]]]()
            if shards and mains[0].documents():
                x = joined([one.x_in(own) for one, own in zip(shards, parts, strict=True)])
            elif mains[0].documents():
                x = _model_of(*parts[0]).x if len(parts[0]) > 1 else mains[0].vector("x")
            digest = None if x is None else digest_of_numbers(x)
            for rows in mains:  # each shard has all documents
                with audit_errors(rows.path):
                    logs.append(list(checked(documents_in(rows, of_shard=bool(shards)), x=digest)))
                    if logs[-1] != logs[0]:
                        raise CorruptionError(f"audit: other documents than {mains[0].path} has")
            return logs[0]


# The model of a folder, which can be read while a server writes, without the rows.


class SavedModel(NamedTuple):
    """A server's model after its last committed round.

    Attributes:
        layout: the positions of its tensors in x.
        x: float32[n].
        counters: the tensors outside x, by name.
        round_number: the number of finished rounds.
    """

    layout: Layout
    x: F32
    counters: dict[str, npt.NDArray[Any]]
    round_number: int

    def tensors(self, library: Library | None = None) -> Any:
        """Return the model by name, in its dtypes; see ``Server.tensors``."""
        return self.layout.tensors(self.x, self.counters, library)


def read_model(path: str | os.PathLike[str]) -> SavedModel:
    """Read the model of a server's folder, even while a server writes to it, for any method.

    Args:
        path: a folder that ``Server.save`` wrote, or the folder of an mmap store.

    Raises:
        StoreError: the path has no store, or its version is newer.
        CorruptionError: a file is damaged.
        CheckpointError: the store has no server, or the state is malformed.

    Cost: reads the index, x and the counters, but not the rows.

    >>> from tempfile import TemporaryDirectory
    >>> from fedcore import Server
    >>> with TemporaryDirectory() as folder:
    ...     Server({"w": np.float32([1, 2])}, "FedAvg", 3, lr=0.1).save(f"{folder}/state")
    ...     read_model(f"{folder}/state").tensors()
    {'w': array([1., 2.], dtype=float32)}
    """
    with opened_stores(absolute(path)) as stores, checkpoint_errors(path):
        return _model_of(*stores)


def _model_of(main: ClientStore, *groups: ClientStore) -> SavedModel:
    """Return the model in the stores of a server's folder."""
    state = server_state(main.path or "store", main.state)
    layout, round = Layout.from_state(state["settings"]["layout"]), int(state["numbers"]["round_number"])
    require_groups(main.path, state, [group.state for group in groups])
    if layout.groups:
        models = dict(zip(layout.groups, map(_model_of, groups), strict=True))
        found = {name: counter for model in models.values() for name, counter in model.counters.items()}
        x = layout.join({name: model.x for name, model in models.items()}, np.empty(layout.n, np.float32))
        return SavedModel(layout, x, found, round)
    counters = {piece.name: (f"counter/{piece.name}", piece.shape) for piece in layout.outside}
    names = {"x", *(name for name, _ in counters.values())}
    vectors: dict[str, Any] = {name: main.vector(name) for name in main.vector_names() if name in names}
    _require_vectors(vectors, layout.n, layout.n_parameters)
    found = {piece: copied(vectors[name]).reshape(shape) for piece, (name, shape) in counters.items()}
    return SavedModel(layout, copied(vectors["x"]), found, round)


def group_folders(path: Path) -> list[Path]:
    """Return the folders of the groups of a server with partial updates, in their order; empty for other folders."""
    folder = path / GROUPS
    names = [] if part_of(folder) is None else os.listdir(folder)
    groups = [folder / name for name in sorted(filter(_GROUP.fullmatch, names), key=int)]  # not drafts
    for group in groups:
        part_of(group)
    return groups


def require_groups(path: object, state: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise CheckpointError unless the states of a server's groups are those of its groups, in their order."""
    layout, *found = (Layout.from_state(one["settings"]["layout"]) for one in (state, *groups))
    if len(found) != len(layout.groups):
        raise CheckpointError(f"{path}: has {len(found)} of {len(layout.groups)} groups of tensors; load a backup")
    for i, (name, own) in enumerate(layout.of_groups.items()):
        if found[i] != own:
            raise CheckpointError(f"{path}/{GROUPS}/{i}: has other tensors than the group {name!r}; load a backup")


def journal_of(path: Path) -> Path | None:
    """Return the folder of the journal of a server's folder, or None if it has none; see ``files.part_of``."""
    return None if part_of(path / JOURNAL) is None else path / JOURNAL


def open_part(path: Path, **options: Any) -> ClientStore:
    """Open the store in a part of a server's folder. The part may come from another user, who may replace it by a link.

    Raises:
        StoreError: see ``files.part_of``.
    """
    found = part_of(path)
    store = ClientStore.open(path, **options)
    with closed_on_error(store):
        require_same(path, found, os.lstat(path))
    return store


# The journal of a round: accepted updates are durable before the client gets an answer, and survive a crash.


HEADER = 1024
"""The bytes at the start of a row that hold the claims as JSON. Nothing in it grows with the model."""
CLAIMS = ("steps", "examples", "lr", "count", "round", "kind", "weight", "loss", "update_id")
FORMAT = 2
"""The version of a journal's rows. Version 1 lists the names of the tensors that are not averaged in the header."""


@contextmanager
def journal_errors(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Raise CorruptionError, with the journal's path, for any error from malformed values in a journal."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptionError(
            f"{path}: the journal of the open round is damaged ({reason:.300}); delete this folder, and the round "
            "starts without its updates"
        ) from error


class Journal:
    """The accepted updates of an open round, in a ``ClientStore`` with one row per update.

    A row holds the claims, the vector as float32, the second vector, with partial updates 1 or 0 for each tensor that
    the client may have sent, and the tensors that are not averaged. Its id in the store has the order of the update and
    its client, so that a resumed round adds them in the same order. A client can have several in an asynchronous round.
    The state has the round, its newcomers, and a digest of what its clients were sent. The journal of another round
    than the open one is outdated: the server committed that round and was killed before it emptied the journal, or the
    round before it was undone.

    Args:
        path: the folder of the journal; it is created if it does not exist.
        settings: the server's settings.
        readonly: whether to open an existing journal only for reading, even while a server writes to it.

    Raises:
        CheckpointError: the journal belongs to a different model.

    Cost: an update is written once and synced to disk, and read once for its checksum.
    """

    def __init__(self, path: Path, settings: Settings, *, readonly: bool = False) -> None:
        layout = settings.layout
        self.path, self._layout, self._readonly, self._sent = path, layout, readonly, ""
        self._is_private = settings.rules.private is not None
        self._controls = layout.n_parameters if settings.algorithm.second_vector is not None else 0
        self._outside = {piece.name: (_dtype(piece.dtype), piece.shape) for piece in layout.outside}
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in self._outside.values()]
        start = layout.n + self._controls
        self._has = slice(start, start + len(layout.slices) * bool(layout.groups))
        n = HEADER // 4 + self._has.stop + -(-sum(sizes) // 4)
        if journal_of(path.parent) is not None:
            self._store = open_part(path, readonly=readonly)
        else:
            self._store = ClientStore([], n, medium="mmap", path=path)
        if (self._store.n, self._store.codec) != (n, "f32"):
            self._store.close()
            raise CheckpointError(f"{path}: the journal belongs to a different model; delete this folder")

    def begin(self, round: int, sent: Sequence[npt.NDArray[Any]] = ()) -> None:
        """Start a round whose clients got vectors with these checksums; drop the updates of any other round."""
        is_first = not self._sent  # a kill may have left bytes of dropped updates
        self._sent = blake2b(b"".join(one.tobytes() for one in sent), digest_size=16).hexdigest()
        if (is_first or len(self._store.registry)) and not self._readonly and not _head(self._store, round):
            with suppress(StoreError):  # they have no effect
                self.retain(())

    def outdated(self, round: int) -> str | None:
        """Return why the updates of an interrupted round do not count, or None."""
        if _head(self._store, round).get("sent", self._sent) == self._sent:
            return None
        return "journal: the server sent another model or offset before the round was interrupted; train again"

    def newcomers(self, round: int, given: NewClients, registry: Container[Any]) -> NewClients:
        """Return the newcomers of a round: the given clients, and those of the interrupted round that are not
        registered.
        """
        new = {client: size for client, size in _newcomers(self._store, round).items() if client not in registry}
        if not new:
            return given
        if None in new.values():
            return list(dict.fromkeys([*new, *given]))
        return {**(given if isinstance(given, Mapping) else dict.fromkeys(given)), **new}

    def updates(self, round: int) -> list[tuple[int, int, Update]]:
        """Return the updates of an interrupted round with their orders and bytes as sent, the first accepted one first.

        An older journal has no bytes: 0.

        Their vectors are views of the journal, valid until the update is dropped.

        Raises:
            CorruptionError: an update is damaged.
        """
        with journal_errors(self.path):
            found = _entries(self._store) if _head(self._store, round) else []
            return [(order, *self._read(row, client)) for (order, client), row in found]

    def append(self, round: int, order: int, update: Update, vector: Any, control: Any, newcomers: NewClients) -> None:
        """Write a valid update durably; ``order`` is its number in the round.

        Args:
            update: the update with plain claims; ``vector`` and ``control`` are its vectors as ``read_vector`` and
                ``as_vector`` return them.

        Raises:
            StoreError: the disk is full, for example; the journal is unchanged.
        """
        store = self._store
        try:
            listed: list[Any] = list(map(canonical, newcomers))
            if isinstance(newcomers, Mapping):
                listed = list(zip(listed, map(int, newcomers.values()), strict=True))
            state = {"format": FORMAT, "round": round, "sent": self._sent, "newcomers": listed}
            if not _head(store, round):
                for row in list(store.registry):
                    store.forget(row)
            row = f"{order} {json.dumps(update.client)}"
            store.add(row)
            self._write(update, vector, control, store.stage(row))
            store.commit(round, state=state)
        except BaseException as error:
            store.rollback()
            if isinstance(error, StoreError) or not isinstance(error, Exception):
                raise
            raise StoreError(f"the update cannot be written: {rejection_reason(error)}") from error

    def retain(self, known: Collection[Any]) -> None:
        """Drop all other updates durably. ``known`` has the clients, or (order, client), of some of the updates.

        If it is empty and the server is private, erase the bytes of all updates: they must not stay in unused space.

        Raises:
            StoreError: the disk is full, for example.
        """
        store = self._store
        if len(store.registry) != len(known):
            rows = [
                row
                for row in store.registry
                if not known or ((entry := _entry(store, row)) not in known and entry[1] not in known)
            ]
            self._forget(rows, store.state if known else {})
        if self._is_private and not known:
            self.erase()

    def drop(self, client: ClientId) -> bool:
        """Drop a client's updates and its place as a newcomer durably; return whether the journal had any."""
        store = self._store
        with journal_errors(self.path):
            state = store.state or {}
            rows = [row for row in store.registry if _entry(store, row)[1] == client]
            newcomers = state.get("newcomers", [])
            left = [one for one in newcomers if client not in (one, one[0] if isinstance(one, list) else one)]
        if not rows and left == newcomers:
            return False
        self._forget(rows, state | {"newcomers": left} if len(store.registry) > len(rows) else {})
        return True

    def _forget(self, rows: Sequence[ClientId], state: Any) -> None:
        """Drop updates durably; ``state`` is that of the journal without them."""
        try:
            for row in rows:
                self._store.forget(row)
            self._store.commit(self._store.round or 0, state=state)
        except BaseException:
            self._store.rollback()
            raise

    def erase(self) -> None:
        """Erase the bytes of dropped updates from the files."""
        self._store.compact(erase=True)

    def close(self) -> None:
        """Close the journal; its updates stay in the folder."""
        self._store.close()

    def _write(self, update: Update, vector: Any, control: Any, row: Any) -> None:
        layout, rest = self._layout, row[HEADER // 4 :]
        counters = read_counters(update, layout)
        claims = {name: getattr(update, name) for name in CLAIMS} | {"bytes": bytes_sent(update, layout.names)}
        about = {"apart": isinstance(vector, list), "outside": bool(counters), **claims}
        header = np.frombuffer(json.dumps(about, default=_plain).encode().ljust(HEADER), np.uint8)
        row[: HEADER // 4].view(np.uint8)[:] = header
        places = [slice(piece.start, piece.stop) for piece in layout.slices] if about["apart"] else [slice(len(vector))]
        for place, part in zip(places, vector if about["apart"] else [vector], strict=True):
            if part is not None:
                _write_float32(rest[place], part)
        if layout.groups:
            rest[self._has] = [part is not None for part in vector]
        if self._controls:
            _write_float32(rest[layout.n : layout.n + self._controls], control)
        for name, part, (dtype, _) in self._outside_parts(rest):  # a gradient has none, but the names of a model
            sent = counters.get(name)
            part[:] = 0 if sent is None else np.ascontiguousarray(sent, dtype).reshape(-1).view(np.uint8)

    def _read(self, row: ClientId, client: ClientId) -> tuple[int, Update]:
        layout, about = self._layout, _about(self._store, row)
        claims: dict[str, Any] = {name: about.get(name) for name in CLAIMS}  # an older journal has no loss and no id
        rest: F32 = self._store.row(row)[HEADER // 4 :]  # type: ignore[index, assignment]  # _about has read it
        has = {piece.name for piece, has in zip(layout.slices, rest[self._has].tolist(), strict=False) if has}
        sent = {name for names in layout.groups.values() if not has.isdisjoint(names) for name in names}
        lacks_some = len(sent) < sum(map(len, layout.groups.values()))
        is_flat = not about["outside"] and not (lacks_some if layout.groups else about["apart"])
        value: Any = rest[: layout.n_parameters if is_flat and claims["kind"] == "gradient" else layout.n]
        if not is_flat:
            outside = self._outside_parts(rest)
            value = layout.unflatten(value) | {
                name: part.copy().view(dtype).reshape(shape) for name, part, (dtype, shape) in outside
            }
            value = {name: value[name] for name in sent} if layout.groups else value
        control = rest[layout.n : layout.n + self._controls] if self._controls else None
        return int(about.get("bytes", 0)), Update(client, value, control=control, **claims)

    def _outside_parts(self, rest: F32) -> Iterator[tuple[str, Any, tuple[Any, Any]]]:
        """Yield the name, the bytes, and the dtype and shape of each tensor that is not averaged."""
        after, start = rest[self._has.stop :].view(np.uint8), 0
        for name, (dtype, shape) in self._outside.items():
            size = math.prod(shape) * dtype.itemsize
            yield name, after[start : start + size], (dtype, shape)
            start += size


def _head(store: ClientStore, round: int) -> dict[str, Any]:
    """Return the state of a journal if it is that of this round; else an empty one."""
    with journal_errors(store.path):
        state = store.state or {}
        if state.get("format", 1) > FORMAT:
            raise StoreError(f"{store.path}: written by a newer version of fedcore, which can read it")
        return state if state.get("round") == round else {}


def _newcomers(store: ClientStore, round: int) -> dict[ClientId, int | None]:
    """Return the newcomers of a round in a journal, with their sizes, if any."""
    with journal_errors(store.path):
        before = _head(store, round).get("newcomers", [])
        pairs = [one if isinstance(one, list) else (one, None) for one in before]
        return {canonical(id): None if size is None else check_integer("newcomers", size, 1) for id, size in pairs}


def _about(store: ClientStore, row: ClientId) -> dict[str, Any]:
    """Return the header of an update: its claims, and the form of its vectors."""
    with journal_errors(store.path):
        found: Any = store.row(row)
        about: dict[str, Any] = json.loads(bytes(found[: HEADER // 4].view(np.uint8)))
        if not isinstance(about["apart"], bool) or not isinstance(about["outside"], bool | list):
            raise ValueError(f"{row!r}: the header has no form of the vectors")
        return about


def _entry(store: ClientStore, row: ClientId) -> tuple[int, ClientId]:
    """Return the order and the client of an update from the id of its row in a journal."""
    with journal_errors(store.path):
        order, _, client = str(row).partition(" ")
        try:
            number, id = int(order), json.loads(client)
        except ValueError:  # an older journal: the id is the client, and the header has the order
            number, id = _about(store, row)["order"], row
        return check_integer("order", number, 0, _WIDEST), canonical(id)


def _entries(store: ClientStore) -> list[tuple[tuple[int, ClientId], ClientId]]:
    """Return the entry and the row of each update in a journal, in the order of arrival."""
    return sorted(((_entry(store, row), row) for row in store.registry), key=lambda pair: pair[0][0])


def open_updates(path: Path, state: Any) -> list[ClientId]:
    """Return the client of each update of the open round in the journal of a server's folder, in their order.

    ``state`` is that of the server's store, or of one of its shards.

    Raises:
        CorruptionError: the journal is damaged.
    """
    with suppress(LookupError, TypeError):  # a store without a server
        round = state["numbers"]["round_number"]
        if (journal := journal_of(path)) is not None:
            with open_part(journal, readonly=True) as store:
                return [client for (_, client), _ in _entries(store)] if _head(store, round) else []
    return []


def journal_problems(path: Path) -> list[str]:
    """Return a line for each damaged update in the journal of a server's folder."""
    if (journal := journal_of(path)) is None:
        return []
    with open_part(journal, readonly=True) as store:
        problems = store.verify()
        try:
            _newcomers(store, store.round or 0)
            for _, row in _entries(store) if not problems else ():
                _about(store, row)
        except StoreError as error:
            problems = [str(error)]
        return [f"open round: {problem}" for problem in problems]


def _write_float32(out: F32, vector: Any) -> None:
    for span in spans(len(out), 8):
        out[span] = in_float32(vector[span])


def _dtype(name: str) -> np.dtype[Any]:
    """Return the dtype in which a tensor outside the vector is read."""
    return np.dtype("float32" if name in NARROW else name)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise StoreError(f"{value!r}: cannot be written to a journal")
