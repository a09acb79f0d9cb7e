from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

version: str
compiler: str

def weighted_sum(rows: Sequence[Any], weights: Any, out: Any) -> None: ...
def accumulate(
    acc: Any, out: Any, bases: Sequence[Any], ys: Sequence[Any], scales: Any, weights: Any
) -> npt.NDArray[np.float64]: ...
def server_step(
    sum: Any,
    total: Any,
    x: Any,
    v: Any,
    total_out: Any,
    x_out: Any,
    *,
    from_sum: float,
    from_total: float,
    keep_sum: float,
    keep_v: float,
    gamma: float,
) -> tuple[float, float]: ...
def exchange(
    acc: Any,
    out: Any,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: Any,
    weights: Any,
    old_rows: Sequence[Any],
    anchors: Sequence[Any],
    new_rows: Sequence[Any],
) -> npt.NDArray[np.float64]: ...
def direction_step(
    y: Any,
    grad: Any,
    grad_prev: Any,
    offset: Any,
    x: Any,
    lr: float,
    a: float,
    b: float,
    mu: float,
    weight_decay: float,
) -> None: ...
def direction_offset(terms: Sequence[Any], coefficients: Any, out: Any) -> None: ...
def mix(models: Sequence[Any], starts: Any, columns: Any, weights: Any) -> None: ...
def squared_norms(rows: Sequence[Any]) -> npt.NDArray[np.float64]: ...
def quantise(x: Any, codec: str, codes: Any, scales: Any, seed: int | None, row: int) -> None: ...
def dequantise(codes: Any, scales: Any, codec: str, out: Any) -> None: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def isa() -> str: ...
def best_isa() -> str: ...
