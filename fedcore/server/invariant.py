"""Checks of a server's folder: a server can be made of it, and its running total is the sum of what its rows say.

The second is the invariant of a server between any two calls.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import devices, kernels
from fedcore.algorithms import REGISTRY
from fedcore.algorithms.descriptions import BY_MODULE, REGISTRIES, revive
from fedcore.arguments import is_whole, shown
from fedcore.errors import CheckpointError, DeviceError
from fedcore.float_mode import ieee
from fedcore.kernels import ExactSum
from fedcore.server.folder_checks import believed, require_plausible, server_state
from fedcore.server.settings import RATES, Settings
from fedcore.server.snapshot import Snapshot
from fedcore.store.committed_rows import CommittedRows

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
        f"give {what}= again, which was {shown(said[what]['was'])}" for what in REGISTRIES if _is_own(what, said[what])
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
                devices.named(state.get("device", devices.CPU))
            said = {what: state["settings"][what] for what in REGISTRIES}
            own = [what for what in ("algorithm", "optimizer") if _is_own(what, said[what])]
            for what in REGISTRIES:
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
    settings = Settings.from_state(said | {"next_rates": next_rates}, dict.fromkeys(REGISTRIES))
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
