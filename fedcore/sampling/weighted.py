"""Draws by weights, with and without replacement."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arguments import due_in, numbers, whole
from fedcore.errors import RangeError
from fedcore.float_mode import ieee
from fedcore.native import core
from fedcore.sampling.key import LONGEST, Key, key

Clients = npt.NDArray[np.int64]


@ieee
def weighted_without_replacement(weights: Any, k: int, *, seed: int, round: int, purpose: str = "cohort") -> Clients:
    """Draw k different clients by successive draws: each takes i with probability w_i / (sum of the w not yet drawn).

    Args:
        weights: float64[n], or a list of n numbers: >= 0, with a finite sum. Read-only.
        k: how many to draw, at most as many as there are weights > 0.
        seed: the run's seed, 0 .. 2^64 - 1.
        round: the round, 0 .. 2^64 - 1.
        purpose: what the draw is for; two purposes never share random numbers.

    Returns:
        int64[k] in the order in which they were drawn. The order matters: heavy clients come early. Sort it where the
        set is meant.

    Raises:
        RangeError: a weight is negative or not finite, their sum is infinite, or fewer than k are positive.
        ShapeError, DtypeError, ArrayError: ``weights`` is not what is said above.

    Determinism: the arguments alone, on every platform; sums are taken in a fixed order. A larger k appends to what a
        smaller one gives.
    Cost: reads 8 n bytes once, then about 150 ns a draw at n = 10^6; 0.4 n bytes of scratch.
    Accuracy: the law is that of successive draws up to float64 rounding: a client's chance is off by a few 2^-53 of
        the chance of each of the log_32(n) tree nodes above it. The sums are added up anew after each draw, so light
        weights keep their ratios after the heavy ones are gone. Sums below 1e-290 lose digits.
    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
        2023, the time-varying pattern. Wong, Easton, "An efficient method for weighted sampling without replacement",
        1980: the tree of sums.

    >>> weighted_without_replacement([1.0, 0.0, 100.0], 2, seed=7, round=0)
    array([2, 0])
    """
    k, weights = whole("k", k, 0, LONGEST), _listed(weights)
    return _draw(core.weighted_without_replacement, weights, k, k, seed, round, purpose)


@ieee
def with_replacement(weights: Any, k: int, *, seed: int, round: int, purpose: str = "cohort") -> Clients:
    """Draw k times by weights, each time from all: a client may come more than once.

    Args:
        weights, seed, round, purpose: as for ``weighted_without_replacement``.
        k: how many to draw, any int >= 0.

    Returns:
        int64[k] in the order in which they were drawn; ``np.unique(drawn, return_counts=True)`` gives the counts.

    Raises:
        RangeError: a weight is negative or not finite, their sum is infinite, or none is positive though k > 0.
        ShapeError, DtypeError, ArrayError: ``weights`` is not what is said above.

    Determinism: as for ``weighted_without_replacement``.
    Cost: reads 8 n bytes once, then about 200 to 400 ns a draw on one thread at n = 10^6.
    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
        Algorithm 1.

    >>> with_replacement([1.0, 0.0, 3.0], 5, seed=7, round=0)
    array([2, 2, 0, 2, 2])
    """
    k, weights = whole("k", k, 0, LONGEST), _listed(weights)
    return _draw(core.with_replacement, weights, k, min(k, 1), seed, round, purpose)


def _draw(
    draw: Callable[[Any, int, Key], Clients | None],
    weights: Any,
    k: int,
    needed: int,
    seed: int,
    round: int,
    purpose: str,
) -> Clients:
    """``draw`` by checked arguments; ``needed``: how many positive weights that takes."""
    drawn = draw(weights, k, key(seed, round, purpose))
    if drawn is None or len(drawn) < k:
        raise _refusal(weights, needed)
    return drawn


def _refusal(weights: Any, needed: int) -> RangeError:
    """The reason why there are no draws by these weights."""
    w = np.asarray(weights)
    bad = np.flatnonzero(~((w >= 0) & np.isfinite(w)))
    if len(bad):
        return RangeError(f"weights[{bad[0]}]: expected {due_in('[0, inf)')}, got {float(w[bad[0]])!r}")
    positive = int(np.count_nonzero(w))
    if positive < needed:
        return RangeError(f"weights: expected at least {needed} that are positive, got {positive}")
    return RangeError("weights: expected a finite sum, got inf")


def _listed(weights: Any) -> Any:
    """``weights``, as an array if they are a list; what else they are is checked natively."""
    return numbers("weights", weights, np.float64) if isinstance(weights, list | tuple) else weights
