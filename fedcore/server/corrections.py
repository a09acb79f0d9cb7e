"""How much a method corrects, and how the cohort's mean is found where the method does not form it."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedcore import kernels

if TYPE_CHECKING:
    from fedcore.algorithms import Cohort, Step
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
    if not state.sums.weight > 0:
        return Corrections()
    if at_clients:
        mean_row = _mean_row(state, tally)
        return Corrections(_length(direction.from_row * mean_row + (0 if shared is None else shared)))
    mean_h = _mean_of_sums(state)
    if mean_h is None:  # A = sum of w_i (h_i - r_i + v[t_i]), so mean h = A / W + mean r - mean v[t]
        mean_h = _mean_row(state, tally)
        mean_h += state.sums.parameters / state.sums.weight
        if algorithm.keeps_history:
            for client, weight in zip(tally.clients, tally.column("weights").tolist(), strict=True):
                past = state.now.history.get(state.store.round_of(client))
                if past is not None:
                    mean_h -= weight * past.astype(np.float64) / state.sums.weight
    mean_square = _length(mean_h) ** 2
    mean_h -= v
    return Corrections(_length(mean_h), mean_square)


def mean_square(state: "State", cohort: "Cohort", step: "Step", v_square: float) -> float | None:
    """|sum_i (w_i / W) h_i|^2 as the sums tell it; None where the rows would have to be read.

    Args:
        v_square: |v|^2, which is that, or as many times that, in most methods.

    Cost: nothing there; for a method whose v is another one a pass over A.
    """
    algorithm, W = state.settings.algorithm, cohort.W
    d = algorithm.direction
    if not W > 0:
        return None
    if algorithm.adds == "h" and step.from_sum and not step.from_total and not step.from_momentum:
        return v_square / (step.from_sum * W) ** 2
    if algorithm.adds == "raw - r" and (
        (step.from_sum, step.from_total, step.from_momentum) == (d.a / W, d.from_mean / cohort.N, d.from_momentum)
    ):
        return v_square
    mean = _mean_of_sums(state)
    return None if mean is None else _length(mean) ** 2


def _mean_of_sums(state: "State") -> F64 | None:
    """sum_i (w_i / W) h_i, float64[n_parameters], where it follows from A alone; else None."""
    algorithm, W = state.settings.algorithm, state.sums.weight
    if algorithm.adds not in ("h", "raw - r"):
        return None
    A = state.sums.parameters.astype(np.float64)
    if algorithm.adds == "h":
        return np.asarray(A / W)
    shared = state.shared_offset()  # from_mean c + from_momentum g, so that h_i = a (raw_i - r_i) + that
    return np.asarray(A * (algorithm.direction.a / W) + (0 if shared is None else shared))


def _mean_row(state: "State", tally: "Tally") -> F64:
    """sum_i (w_i / W) r_i, float64[n_parameters]."""
    mean, clients = np.zeros(state.settings.layout.n_parameters), tally.clients
    shares = tally.column("weights") / state.sums.weight
    for start in range(0, len(clients), AT_ONCE):
        rows = [state.store.read(client) for client in clients[start : start + AT_ONCE]]
        k = len(rows)
        kernels.accumulate(mean, [None] * k, rows, -np.ones(k), shares[start : start + k], out=mean)
    return mean


def _length(vector: npt.NDArray[np.floating]) -> float:
    # Not numpy.linalg.norm: it wakes OpenBLAS's threads, which then spin for longer than all of this takes.
    wide = vector.astype(np.float64, copy=False)
    return math.sqrt(float(np.einsum("i,i->", wide, wide)))
