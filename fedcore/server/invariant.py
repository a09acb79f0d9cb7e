"""The invariant of a server between any two calls: its running total is the sum of what its rows say."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import REGISTRY
from fedcore.float_mode import ieee
from fedcore.kernels import ExactSum
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


def folder_problems(rows: CommittedRows) -> list[str]:
    """The contradictions in a server's folder; of a folder of another kind nothing is known.

    Nor is anything of a method of the caller's own code, whose T may be any sum.

    Args:
        rows: of the folder, none of which is damaged.

    Cost: reads every row once.
    """
    state: Any = rows.state
    if not isinstance(state, dict) or state.get("what") != "a fedcore server":
        return []
    described = state["settings"]["algorithm"]
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
