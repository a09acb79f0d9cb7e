"""How much a method corrects, and how the cohort's mean is found where the method does not form it."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedcore import kernels

if TYPE_CHECKING:
    from fedcore.server.state import State
    from fedcore.server.tally import Tally

F64 = npt.NDArray[np.float64]
AT_ONCE = 8
"""Rows that are decoded and summed in one pass."""


@dataclass(frozen=True)
class Corrections:
    """The length of a cohort's correction, and |mean h_i|^2 where the server corrects; see ``RoundReport``."""

    norm: float | None = None
    mean_square: float | None = None


def corrections(state: "State", tally: "Tally", v: npt.NDArray[np.float32]) -> Corrections:
    """Those of the round that is about to be committed.

    Args:
        v: float32[n_parameters], the round's direction.

    Cost: nothing for methods without a correction; a pass over one vector for those whose correction is one vector for
        all; else a reading of the cohort's rows, copied and decoded: 12 n S bytes, and some vectors (30 clients of
        44,426 parameters: 1 to 3 ms more than the 2 ms of the round).
    """
    algorithm, direction = state.settings.algorithm, state.settings.algorithm.direction
    shared = state.shared_offset()
    if not tally.clients or (direction.from_row and not algorithm.keeps_rows):
        return Corrections()
    at_clients = shared is not None or bool(direction.from_row)
    if at_clients and not direction.from_row:
        assert shared is not None
        return Corrections(_length(shared))
    if not algorithm.keeps_rows or not state.settings.diagnostics:
        return Corrections()
    mean_row = _mean_row(state, tally)
    if at_clients:
        return Corrections(_length(direction.from_row * mean_row + (0 if shared is None else shared)))
    # A = sum of (h_i - r_i + v[t_i]), so mean h = A / S + mean r - mean v[t].
    mean_h = mean_row
    mean_h += state.sums.parameters / len(tally.clients)
    if algorithm.keeps_history:
        for client in tally.clients:
            past = state.now.history.get(state.store.round_of(client))
            if past is not None:
                mean_h -= past.astype(np.float64) / len(tally.clients)
    mean_square = _length(mean_h) ** 2
    mean_h -= v
    return Corrections(_length(mean_h), mean_square)


def _mean_row(state: "State", tally: "Tally") -> F64:
    mean, clients = np.zeros(state.settings.layout.n_parameters), tally.clients
    for start in range(0, len(clients), AT_ONCE):
        rows = [state.store.read(client) for client in clients[start : start + AT_ONCE]]
        k = len(rows)
        kernels.accumulate(mean, [None] * k, rows, -np.ones(k), np.full(k, 1 / len(clients)), out=mean)
    return mean


def _length(vector: npt.NDArray[np.floating]) -> float:
    # Not numpy.linalg.norm: it wakes OpenBLAS's threads, which then spin for longer than all of this takes.
    wide = vector.astype(np.float64, copy=False)
    return math.sqrt(float(np.einsum("i,i->", wide, wide)))
