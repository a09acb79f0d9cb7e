"""Checks of a folder's words about its server, before one is made of them."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from fedcore.arguments import is_whole
from fedcore.errors import CheckpointError
from fedcore.libraries import NARROW
from fedcore.rates import rate_at
from fedcore.server.norm_window import WINDOW
from fedcore.server.settings import LARGEST, Settings
from fedcore.store.committed_rows import CommittedRows
from fedcore.store.session import Medium

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
        whole, part = "a whole server", "a shard of one, all of which fedcore.cluster.Server.load takes"
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
