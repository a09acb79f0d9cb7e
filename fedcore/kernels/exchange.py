"""exchange: what is new against what each client's row remembers, accumulated while the row is replaced."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.float_mode import ieee
from fedcore.kernels.forms import Terms
from fedcore.native import core

REPLACED, CHANGE = Terms(h=1), Terms(row=1, r=-1)
"""A row becomes h, and the sum sees by how much a row changed: the usual forms."""
ANCHORED = CHANGE._replace(q=1)
"""The same, and the anchor."""


@ieee
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
    row: Terms = REPLACED,
    adds: Terms = ANCHORED,
    keys: npt.NDArray[np.uint64] | None = None,
    sums: npt.NDArray[np.uint64] | None = None,
    first: int = 0,
    partials: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.float64]:
    """Add each client's news against its row to a sum, and replace the row, in one pass.

    With the coefficients of the two forms, each a number of its name::

        r_i' = row.h h_i + row.r r_i + row.q q_i
        out  = acc + sum_i weights[i] (adds.row r_i' + adds.r r_i + adds.h h_i + adds.q q_i)

    Without any given r_i' = h_i, for rows that are the clients' last mean gradients, and the sum sees r_i' - r_i + q_i.
    A row is float32 or quantised, and r_i and r_i' in the sums are what is stored, decoded again: the sum follows the
    rows exactly.

    Args:
        acc, out: float64[n]; the same array, or disjoint.
        bases, ys, scales, weights: as for ``accumulate``, which also defines h_i and the dtypes of the ys.
        old_rows: k entries: r_i, float32[n] or ``Codes`` of n elements, or None for a row that was never written and
            reads as zero. Read-only.
        anchors: k entries: q_i, float32[n], or None for zero.
        new_rows: k entries, written: float32[n] or ``Codes``, whatever the old row is; entry i may lie exactly where
            ``old_rows[i]`` does, which is then lost even where ``ys[i]`` turns out not to be finite.
        row: what a row becomes; ``row.row`` counts for nothing. Its numbers are rounded to float32.
        adds: what the sum sees.
        keys: uint64[k, 2], the seed and the row with which ``quantise`` rounds r_i' stochastically: the codes are those
            of ``quantise(r_i', codec, seed=keys[i, 0], row=keys[i, 1], first=first)``. May be None where all new rows
            are float32.
        sums: uint64[k, ceil(n / 16,384)], written: the checksums of each new row's blocks of 64 KiB, those that
            ``fedcore.store.checksums`` gives, made while the block is at hand. None where a new row is not float32.
        first: the place of element 0 in the whole rows, of which these are a part, for ``keys``, as in ``quantise``.
        partials: float64[ceil(n / 16,384), k], written: the blocks' shares of the squared norms, as of ``accumulate``.

    Returns:
        float64[k], the squared norms |h_i|^2 before any rounding. One that is not finite tells what it tells in
        ``accumulate``, or that r_i' as stored is not finite, which a codec's range or an r_i may cause; then ``out``
        and the new row are worthless.

    Raises:
        UnknownNameError: there is no such codec.
        RangeError: ``first`` is not what ``quantise`` says.
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: h_i and r_i' in float32, the sums in float64, each formula from its left to its right (behind row.h,
        and behind adds.r, without a term whose coefficient is 0), one client after another: the same bits one by one,
        in batches, on every ISA level and thread count.
    Cost: with b bytes an element of a row (4 for float32, 2 for bf16 and f16, 1 + 1/16 for int8) and float32 ys, reads
        (4 + b) k n (4 k n more with anchors) + 12 n bytes, writes b k n + 8 n bytes.
    Reference: Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability" (MIFA), the
        memory-efficient form; Sun, Mao, Zhang, "MimiC", arXiv 2306.12212, Algorithm 1; Karimireddy et al., "SCAFFOLD:
        Stochastic Controlled Averaging for Federated Learning", Algorithm 1, option II (r' = h + r - c).

    >>> row, total, none = np.float32([1, 1]), np.zeros(2), [None]
    >>> exchange(total, none, [np.float32([-3, -4])], np.ones(1), np.ones(1), [row], none, [row], out=total)
    array([25.])
    >>> total, row
    (array([2., 3.]), array([3., 4.], dtype=float32))
    """
    norms: npt.NDArray[np.float64] = core.exchange(
        acc,
        out,
        bases,
        ys,
        scales,
        weights,
        old_rows,
        anchors,
        new_rows,
        row=row,
        adds=adds,
        keys=keys,
        sums=sums,
        first=first,
        partials=partials,
    )
    return norms
