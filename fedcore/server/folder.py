"""The folder of a server: checks before it is loaded, its transactions, and the model it holds."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import REGISTRY
from fedcore.algorithms.rates import rate_at
from fedcore.arguments import is_whole, shown
from fedcore.arrays import CPU, F32, NARROW, Library, copied, device_named, ieee
from fedcore.errors import CheckpointError, DeviceError
from fedcore.kernels import ExactSum
from fedcore.model import Layout
from fedcore.options import BY_MODULE, DESCRIBED, LARGEST, RATES, Settings, revive
from fedcore.rules import WINDOW
from fedcore.server.step import Snapshot, count_of
from fedcore.store import ClientStore
from fedcore.store.commits import Medium
from fedcore.store.reader import CommittedRows

# Checks of a folder's words about its server, before one is made of them.


_WIDEST = 2**53


@contextmanager
def believed(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the folder in whatever goes wrong in making a server of what it says: a stranger may have written it.

    Raises:
        CheckpointError: it says what no server has said.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected what a server has written, got what none can be made of: {type(error).__name__}: {error}"
        ) from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: expected a server that memory can hold, got {str(error) or 'more'}") from error


def server_state(path: str | os.PathLike[str], state: Any, *, shard: bool | None = False) -> dict[str, Any]:
    """A store's state, which is a server's.

    Args:
        shard: whether it is to be a shard of one; None for either.

    Raises:
        CheckpointError: it is not.
    """
    if state is None:
        raise CheckpointError(
            f"{path}: expected a folder written by a fedcore Server, got a ClientStore without one: where a server is "
            "just being made, it is there in a moment: load it again"
        )
    if not isinstance(state, dict) or state.get("what") != "a fedcore server":
        raise CheckpointError(f"{path}: expected a folder written by a fedcore Server, got a ClientStore without one")
    if shard is not None and shard != ("place" in state):
        whole, part = "a whole server", "a shard of one, whose folder with cluster.json Server.load takes"
        due, got = (part, whole) if shard else (whole, part)
        raise CheckpointError(f"{path}: expected {due}, got {got}")
    if state["medium"] not in get_args(Medium):
        raise CheckpointError(f"{path}: expected a server on one of {get_args(Medium)}, got {state['medium']!r}")
    return state


def require_plausible(
    settings: Settings, state: Mapping[str, Any], vectors: Mapping[str, npt.NDArray[Any]], store: CommittedRows
) -> None:
    """Refuse settings, numbers and vectors that do not fit each other, or the rows.

    Raises:
        ValueError, TypeError: they do not.
    """
    numbers, p = state["numbers"], settings.layout.n_parameters
    if store.n != p:
        raise ValueError(f"rows of {store.n} elements, and {p} parameters")
    if state.get("clients", len(store.registry)) != len(store.registry):  # the first folders do not say
        raise ValueError(f"{state['clients']} clients, and {len(store.registry)} in the index")
    round = numbers["round_number"]
    if not is_whole(round, 0, _WIDEST) or not all(
        latest is None or latest <= round for latest in (store.round, store.latest)
    ):
        raise ValueError(f"round {round!r}, and a commit of round {store.round}, rows of {store.latest}")
    if not is_whole(numbers.get("transactions", round), round, 2 * _WIDEST):
        raise ValueError(f"{numbers['transactions']!r} transactions, and {round} rounds, which are some of them")
    if not isinstance(state.get("undoable", False), bool):
        raise ValueError(f"undoable {state['undoable']!r}")
    rate = None
    with suppress(Exception):  # one of the caller's own may have come to its end
        rate = rate_at(settings.lr, round)
    if not math.isfinite(numbers["gamma"]) or (rate is not None and not rate <= LARGEST):
        raise ValueError(f"gamma {numbers['gamma']!r}, and the rate {rate!r}, which float32 must hold")
    due = _due(settings)
    for name, vector in vectors.items():
        kind, _, entry = name.partition("/")
        said = f"{name}: expected %s, got {vector.dtype}{list(vector.shape)}"
        dtype, length = due.get(f"{kind}/" if entry else kind, (None, 0))
        if kind == "total" and not _is_word(vector, entry):
            raise ValueError(said % "the words of an exact sum, or one vector of floats")
        if dtype is not None and (vector.dtype != dtype or vector.shape != (length,)):
            raise ValueError(said % f"{np.dtype(dtype)}[{length}]")
        if kind == "population" and (vector.dtype != np.int64 or vector.shape[:-1] != (2,)):
            raise ValueError(said % "int64[2, m]")
        if kind == "norms" and not _is_window(vector, np.float64 if entry in ("steps", "examples") else np.float32):
            raise ValueError(said % f"float[{WINDOW}] > 0, NaN behind the last")
    outside = {piece.name: piece for piece in settings.layout.outside}
    held = {name.removeprefix("counter/"): vector for name, vector in vectors.items() if name.startswith("counter/")}
    if held.keys() != outside.keys():
        raise ValueError(f"counters: expected {sorted(outside)}, got {sorted(held)}")
    for name, piece in outside.items():
        as_held = np.dtype("float32" if piece.dtype in NARROW else piece.dtype)
        if held[name].dtype != as_held or held[name].size != math.prod(piece.shape):
            raise ValueError(f"counter/{name}: expected {as_held}{list(piece.shape)}, got {held[name].dtype}")
    for client, start in numbers.get("starts", []):
        if not is_whole(start, 0, _WIDEST) or not isinstance(client, int | str):
            raise ValueError(f"starts: expected pairs of a client and a round, got {client!r}, {start!r}")
    words = {"total/high", "total/low"} if settings.is_exact else {"total"}
    if {name for name in vectors if name.partition("/")[0] == "total"} != (
        words if settings.algorithm.keeps_total else set()
    ):
        raise ValueError(f"total: expected {sorted(words)} where the method keeps one, and nowhere else")
    kept = {name.removeprefix("v/") for name in vectors if name.startswith("v/")}
    if kept != {str(t) for t, _ in numbers["references"]} or any(count < 1 for _, count in numbers["references"]):
        raise ValueError(f"references: expected those of the directions {sorted(kept)}, got {numbers['references']}")


def _is_word(vector: npt.NDArray[Any], word: str) -> bool:
    """Tell whether a vector can be that word of an exact sum in its one form; or of a sum of floats, which has none."""
    if word == "low":
        return bool(((vector >= 0) & (vector < 2**50)).all())
    return word == "" or (word == "high" and bool(((vector > -(2**62)) & (vector < 2**62)).all()))


def _is_window(vector: npt.NDArray[Any], dtype: type) -> bool:
    """Tell whether a vector can be what ``NormWindow.packed`` and ``ClaimWindow.packed`` are."""
    if vector.dtype != dtype or vector.shape != (WINDOW,):
        return False
    count = WINDOW - int(np.isnan(vector).sum())
    return bool((vector[:count] > 0).all() and np.isfinite(vector[:count]).all())


def _due(settings: Settings) -> dict[str, tuple[type, int]]:
    """The dtype and length of a vector by name, or by its beginning."""
    n, p = settings.layout.n, settings.layout.n_parameters
    return {
        "x": (np.float32, n),
        "x_prev": (np.float32, n),
        "ahead": (np.float32, n),
        "past/": (np.float32, n),
        "momentum": (np.float32, p),
        "moment/": (np.float32, p),
        "v/": (np.float32, p),
        "total": (np.float64, p),
        "total/": (np.int64, p),
    }


# The transactions of a server's folder: the number of the last, and going back to the one before it.


class Transactions(NamedTuple):
    """Two of a server's transactions, by number: what it was made with is 0, and each round, arrival, departure,
    resizing, change of options and warm start is one more; one that is taken back does not count.

    Attributes:
        last: the last that the folder holds.
        before: the one that an undo goes back to; None where nothing is kept, or no server was there before.
    """

    last: int
    before: int | None


def transactions(rows: CommittedRows) -> Transactions:
    """The transactions that a store holds of a server.

    With durability="checkpoint" an undo goes back to the checkpoint before the last, and so may be more than one back.

    Args:
        rows: as ``ClientStore.open`` gives them; a server need not have been made of them.

    Raises:
        CheckpointError: it is a store without a server.
    """
    kept, path = rows.previous, rows.path or "store"
    with believed(path):
        last = count_of(server_state(path, rows.state, shard=None)["numbers"])
        # Before a new server's first commit there was an empty store.
        state = None if kept is None else kept.state
        before = None if state is None else count_of(server_state(path, state, shard=None)["numbers"])
    return Transactions(last, before)


def last_change(rows: CommittedRows) -> str | None:
    """The change that an undo of a server's folder takes back, in words; None where nothing of it is kept.

    Raises:
        CheckpointError: it is a store without a server.
    """
    kept, path, (last, before) = rows.previous, rows.path or "store", transactions(rows)
    if before is None or kept is None:
        return None
    with believed(path):
        first, end = (int(state["numbers"]["round_number"]) for state in (kept.state, rows.state))
        came = int(rows.state["clients"]) - int(kept.state["clients"])
        said = [] if end == first else [f"round {first}" if end == first + 1 else f"rounds {first} to {end - 1}"]
        if came:
            who = "1 client" if abs(came) == 1 else f"{abs(came):,} clients"
            said.append(f"the {'arrival' if came > 0 else 'departure'} of {who}")
        was, now = (state["numbers"].get("changed", {}) for state in (kept.state, rows.state))
        if options := [name for name, value in now.items() if name not in was or was[name] != value]:
            said.append(f"a change of {', '.join(options)}")
        had, have = (state["numbers"]["population"]["total"] for state in (kept.state, rows.state))
    if said:
        return " and ".join(said)
    of_clients = first or had != have
    if last == before + 1:
        return "a change of client_sizes" if of_clients else "a warm start"
    return "changes of the clients" if of_clients else "a warm start, or changes of the clients"


def go_back(rows: ClientStore, to: int) -> bool:
    """Have a store hold this transaction as the last, by an undo if it holds the one after it.

    Where several stores hold parts of one server, this makes them agree after a crash: each is opened, which takes its
    lock, then all are asked for their ``transactions``, and each goes back to the least of them. Twice is as once.

    Args:
        rows: opened with ``undoable=True``; ``Server.load`` takes them then.
        to: the number of the transaction.

    Returns:
        whether one was taken back.

    Raises:
        CheckpointError: it holds neither this transaction nor the one after it with what that replaced; or no server.
        StoreError, CorruptionError: as ``ClientStore.undo``.

    Cost: none, or that of an undo.
    """
    now = transactions(rows)
    if now.last == to:
        return False
    if now.before != to:
        kept = "nothing of before it" if now.before is None else f"what it replaced, of {now.before}"
        raise CheckpointError(
            f"{rows.path}: expected transaction {to}, or the one after it and what that replaced, got {now.last} and "
            f"{kept}"
        )
    return rows.undo()


# Checks of a server's folder: a server can be made of it, and its running total is the sum of what its rows say.
#
# The second is the invariant of a server between any two calls.


_SLACK = 1e-6  # of what T sums, for the rounding of float64 over any number of rounds


@ieee
def total_problems(
    rows: CommittedRows, total: npt.NDArray[np.float64], directions: Mapping[int, npt.NDArray[np.float32]] | None
) -> list[str]:
    """The places where T is not the sum of all rows, or MimiC's of all corrections v[t_i] - r_i: a line, or none.

    Args:
        rows: the clients' rows.
        total: T, float64[n].
        directions: v[t] by t where T sums corrections, else None.

    Raises:
        CorruptionError: a row is damaged.

    Cost: reads every row once.
    """
    due, size = np.zeros_like(total), np.zeros_like(total)
    for client in rows.registry:
        round = rows.round_of(client)
        if round is None:
            continue
        part = rows.read(client).astype(np.float64)
        if directions is not None:
            part = directions.get(round, 0.0) - part
        due += part
        size += np.abs(part)
    off = np.abs(total - due)
    if (off <= _SLACK * (size + np.abs(total))).all():
        return []
    worst = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
    return [f"T: expected the sum of all rows, {due[worst]:g} in element {worst}, got {total[worst]:g}"]


@ieee
def exact_total_problems(
    rows: CommittedRows, total: ExactSum, directions: Mapping[int, npt.NDArray[np.float32]] | None
) -> list[str]:
    """The places where an exact T is not, to the last bit, the sum that ``total_problems`` takes; its arguments."""
    n = len(total.high)
    due: ExactSum | None = ExactSum.zeros(n)
    for client in rows.registry:
        round = rows.round_of(client)
        if round is None or due is None:
            continue
        v = None if directions is None else directions.get(round)
        vectors = [rows.read(client), *([] if v is None else [v])]
        due = kernels.combine_exact([due, *vectors], [1, 1 if directions is None else -1, 1][: 1 + len(vectors)])
    if due is None:
        return ["T: expected rows that an exact sum holds, got longer ones"]
    off = np.flatnonzero((due.high != total.high) | (due.low != total.low))
    if not len(off):
        return []
    j = int(off[0])
    got, sum = ((int(words.high[j]), int(words.low[j])) for words in (total, due))
    return [f"T: expected the words {sum} in element {j}, the sum of all rows, got {got}"]


def loading_hints(rows: CommittedRows) -> list[str]:
    """List what loading a server takes beside its folder, in which there are no ``loading_problems``."""
    if not _has_server(rows):
        return []
    said, place = rows.state["settings"], rows.state.get("place")
    hints = [
        f"give {what}= again, which was {shown(said[what]['was'])}" for what in DESCRIBED if _is_own(what, said[what])
    ]
    if place is not None:
        hints.append(f"load all {place['shards']} shards by cluster.json, of which this is number {place['shard']}")
    return hints


def loading_problems(rows: CommittedRows, *, read: bool = True) -> list[str]:
    """The reason why no server can be made of the folder of one: a line, or none.

    What depends on a method or an optimizer of the caller's own code is not looked at.

    Args:
        read: whether the vectors are read; else only their names, dtypes and shapes are looked at.
    """
    if not _has_server(rows):
        return []
    where = rows.path or "store"
    try:
        with believed(where):
            state = server_state(where, rows.state, shard=None)
            _require_place(state)
            with suppress(DeviceError):  # of a device that this machine lacks
                device_named(state.get("device", CPU))
            said = {what: state["settings"][what] for what in DESCRIBED}
            own = [what for what in ("algorithm", "optimizer") if _is_own(what, said[what])]
            for what in DESCRIBED:
                if what not in own and not (what in RATES and _is_own(what, said[what])):
                    revive(what, said[what], None)
            if not own:
                _require_loadable(state, rows, read=read)
    except CheckpointError as error:
        return [str(error)]
    return []


def _require_loadable(state: Mapping[str, Any], rows: CommittedRows, *, read: bool) -> None:
    said, next_rates = dict(state["settings"]), dict(state["settings"].get("next_rates", {}))
    for what in ("lr", "server_lr"):
        if _is_own(what, said[what]):  # it is known by its next value alone
            said[what] = {"name": "Constant", "options": {"value": next_rates.get(what) or 1.0}}
            next_rates[what] = None
    settings = Settings.from_state(said | {"next_rates": next_rates}, dict.fromkeys(DESCRIBED))
    if not read:
        vectors = {name: _unread(dtype, shape) for name, (dtype, shape) in rows.info().vectors.items()}
        require_plausible(settings, state, vectors, rows)
        return
    found = {name: rows.vector(name) for name in rows.vector_names()}
    vectors = {name: vector for name, vector in found.items() if vector is not None}
    require_plausible(settings, state, vectors, rows)
    Snapshot.of(vectors, state["numbers"], settings.layout.n_parameters, rows.registry)


def _unread(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A vector of that form whose numbers nothing can be said against."""
    kind = np.dtype(dtype)
    return np.broadcast_to(np.full((), np.nan if kind.kind == "f" else 0, kind), shape)


def _has_server(rows: CommittedRows) -> bool:
    return isinstance(rows.state, dict) and rows.state.get("what") == "a fedcore server"


def _is_own(what: str, description: Any) -> bool:
    """Tell whether that is how an object of the caller's own code is described."""
    if not isinstance(description, dict) or not isinstance(description.get("was"), str):
        return False
    name = description.get("name")
    return name is None or (what in BY_MODULE and ":" in name)


def _require_place(state: Mapping[str, Any]) -> None:
    """Refuse a place that no shard has; where there is none, it is a whole server.

    Raises:
        ValueError, TypeError, LookupError: it is such a place.
    """
    if "place" not in state:
        return
    place = state["place"]
    numbers = [place[name] for name in ("shard", "shards", "first")]
    if not isinstance(place["cluster"], str) or not all(is_whole(one, 0) for one in numbers):
        raise ValueError(f"place: expected that of a shard, got {place}")
    if place["shard"] >= place["shards"]:
        raise ValueError(f"place: expected one of {place['shards']} shards, got {place['shard']}")


def folder_problems(rows: CommittedRows) -> list[str]:
    """The contradictions in a server's folder; of a folder of another kind nothing is known.

    Nor is anything of the sums of a method of the caller's own code, whose T may be any.

    Args:
        rows: of the folder, none of which is damaged.

    Cost: reads every row once.
    """
    if not _has_server(rows):
        return []
    if found := loading_problems(rows):
        return found
    try:
        with believed(rows.path or "store"):
            return _total_problems(rows)
    except CheckpointError as error:
        return [str(error)]


def _total_problems(rows: CommittedRows) -> list[str]:
    described = rows.state["settings"]["algorithm"]
    total, high, low = (rows.vector(name) for name in ("total", "total/high", "total/low"))
    exact = None if high is None or low is None else ExactSum(high, low)
    if exact is not None:
        total = kernels.read_exact(exact)
    if described["name"] not in REGISTRY.own or total is None:
        return []
    algorithm = REGISTRY[described["name"]](**described["options"])
    if not algorithm.total_sums_rows:
        return []
    directions = None
    if algorithm.keeps_history:
        named = {int(name.removeprefix("v/")): name for name in rows.vector_names() if name.startswith("v/")}
        directions = {t: v for t, name in named.items() if (v := rows.vector(name)) is not None}
    found = total_problems(rows, total, directions)
    if exact is not None and not found:
        found = exact_total_problems(rows, exact, directions)
    return [f"{rows.path}: {line}" for line in found]


# The model alone of a folder that a server wrote: read beside its writer, without the clients' rows.


class SavedModel(NamedTuple):
    """A server's model as its last committed round left it.

    Attributes:
        layout: the places of its tensors in x.
        x: float32[n].
        counters: the tensors outside x, by name.
        round_number: how many rounds had been finished.
    """

    layout: Layout
    x: F32
    counters: dict[str, npt.NDArray[Any]]
    round_number: int

    def tensors(self, library: Library | None = None) -> Any:
        """The model by name, in its own dtypes: see ``Server.tensors``."""
        return self.layout.tensors(self.x, self.counters, library)


def read_model(path: str | os.PathLike[str]) -> SavedModel:
    """The model of a server's folder, also while a server writes to it; what its method is does not matter.

    Args:
        path: what ``Server.save`` wrote, or the folder of an mmap store.

    Raises:
        StoreError: there is no store, or one of a newer version.
        CorruptionError: a file was damaged.
        CheckpointError: it is a store without a server, or says what no server has said.

    Cost: reads the index and the vectors of x and the counters; no client's row.

    >>> from tempfile import TemporaryDirectory
    >>> from fedcore import Server
    >>> with TemporaryDirectory() as folder:
    ...     Server({"w": np.float32([1, 2])}, "FedAvg", 3, lr=0.1).save(f"{folder}/state")
    ...     read_model(f"{folder}/state").tensors()
    {'w': array([1., 2.], dtype=float32)}
    """
    with ClientStore.open(path, readonly=True) as store, believed(path):
        state = server_state(path, store.state)
        layout = Layout.from_state(state["settings"]["layout"])
        x = store.vector("x")
        if x is None or x.dtype != np.float32 or x.shape != (layout.n,):
            raise ValueError(f"x: expected float32[{layout.n}], got {'none' if x is None else f'{x.dtype}{x.shape}'}")
        counters = {}
        for piece in layout.outside:
            counter = store.vector(f"counter/{piece.name}")
            if counter is None or counter.size != int(np.prod(piece.shape)):
                raise ValueError(f"counter {piece.name}: expected {piece.shape}, got {counter!r:.100}")
            counters[piece.name] = copied(counter).reshape(piece.shape)
        return SavedModel(layout, copied(x), counters, int(state["numbers"]["round_number"]))
