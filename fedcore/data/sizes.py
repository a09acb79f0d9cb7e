"""Laws of the number of examples that a client holds."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedcore.arguments import real, whole
from fedcore.randomness import generator

Sizes = npt.NDArray[np.int64]

UNCAPPED = 2**53 - 1
"""A cap that no size reaches that memory could hold."""


def pareto(clients: int, *, seed: int, smallest: int, largest: int, index: float = 0.5) -> Sizes:
    """Sizes by a Pareto law of type I, P(size > s) = (smallest / s)^index, rounded down and capped.

    With an index up to 1 the law has no mean, so the cap is part of the setting: a size above it becomes the cap. With
    index .5 that happens to the share (smallest / largest)^.5 of the clients.

    Args:
        clients: N.
        seed: the run's seed.
        smallest: the law's scale.
        largest: the cap. Equal to ``smallest`` it gives every client the same size.
        index: the law's exponent.

    Returns:
        int64[N].

    Raises:
        RangeError: a number is outside its range.

    Determinism: the arguments alone; a client's size does not depend on how many clients come after it.

    >>> pareto(6, seed=0, smallest=10, largest=500).tolist()
    [10, 500, 16, 500, 12, 22]
    """
    _check(clients, smallest, largest)
    real("index", index, "(0, inf)")
    uniform = generator(seed, "data: pareto sizes").random(clients)
    with np.errstate(over="ignore"):  # an infinite size is above the cap like any other
        sizes = np.minimum(smallest * (1 - uniform) ** (-1 / index), largest)
    return sizes.astype(np.int64)


def lognormal(
    clients: int, *, seed: int, smallest: int, largest: int, mean: float = 4.0, deviation: float = 2.0
) -> Sizes:
    """Sizes by a lognormal law: smallest + exp(N(mean, deviation^2)), rounded down and capped.

    With the default numbers and smallest = 50 these are the sizes of SYNTHETIC in its authors' public code, except
    the cap, which that code does not have.

    Args:
        clients: N.
        seed: the run's seed.
        smallest: what is added.
        largest: the cap.
        mean, deviation: of the logarithm.

    Returns:
        int64[N].

    Raises:
        RangeError: a number is outside its range.

    Determinism: as ``pareto``.
    """
    _check(clients, smallest, largest)
    real("mean", mean, "(-inf, inf)")
    real("deviation", deviation, "[0, inf)")
    normal = generator(seed, "data: lognormal sizes").normal(mean, deviation, clients)
    with np.errstate(over="ignore"):
        sizes: npt.NDArray[np.float64] = np.minimum(smallest + np.exp(normal), largest)
    return sizes.astype(np.int64)


LAWS: dict[str, Callable[..., Sizes]] = {"pareto": pareto, "lognormal": lognormal}


def _check(clients: int, smallest: int, largest: int) -> None:
    for name, value, least in (("clients", clients, 1), ("smallest", smallest, 1), ("largest", largest, smallest)):
        whole(name, value, least, UNCAPPED)
