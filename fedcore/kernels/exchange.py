"""exchange: what is new against what each client's row remembers, accumulated while the row is replaced."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.kernels.backend import implementation


def exchange(
    acc: npt.NDArray[np.floating[Any]],
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    old_rows: Sequence[Any],
    anchors: Sequence[Any],
    new_rows: Sequence[Any],
    *,
    out: npt.NDArray[np.floating[Any]],
) -> npt.NDArray[np.float64]:
    """out = acc + sum_i weights[i] (h_i - r_i + v_i) and r_i' = h_i, in one pass over the cohort.

    Args:
        acc, out: float64[n]; the same array, or disjoint.
        bases, ys, scales, weights: as for ``accumulate``, which also defines h_i.
        old_rows: k entries: r_i, float32[n], or None for a row that was never written and reads as zero.
        anchors: k entries: v_i, float32[n], or None where nothing is added back (MIFA), or there is no old row.
        new_rows: k arrays float32[n], written; entry i may be ``old_rows[i]`` itself, which is then lost even where
            ``ys[i]`` turns out not to be finite.

    Returns:
        float64[k], the squared norms |h_i|^2; what is not finite tells what it tells in ``accumulate``.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: the sum sees h_i as the row stores it, so it follows the rows exactly (to float64 rounding); order
        and bits as in ``accumulate``.
    Cost: reads 8 k n (12 k n with anchors) + 12 n bytes, writes 4 k n + 8 n bytes.
    Reference: Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability" (MIFA), the
        memory-efficient form; Sun, Mao, Zhang, "MimiC", arXiv 2306.12212, Algorithm 1.
    """
    norms: npt.NDArray[np.float64] = implementation.exchange(
        acc, out, bases, ys, scales, weights, old_rows, anchors, new_rows
    )
    return norms
