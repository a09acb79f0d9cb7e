"""The constants that the theorems on local SGD ask for."""

import math
from collections.abc import Callable

from fedcore.arguments import real, whole
from fedcore.arrays import ieee
from fedcore.errors import RangeError


@ieee
def largest_alpha(kappa: float, diversity: float, K: int) -> float:
    """The bound above the alpha of ``InverseStep``: alpha exp(-2 / alpha) < kappa sqrt(192 lambda (K + 1) / K).

    Args:
        kappa: L / mu, >= 1.
        diversity: lambda, a bound on the weighted gradient diversity, >= 1.
        K: the clients drawn a round.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.2.

    >>> round(largest_alpha(kappa=1.0, diversity=1.0, K=1), 3)
    21.506
    """
    real("kappa", kappa, "[1, inf)")
    real("diversity", diversity, "[1, inf)")
    whole("K", K, 1)
    bound = kappa * math.sqrt(192 * diversity * (K + 1) / K)
    return _largest(lambda alpha: alpha * math.exp(-2 / alpha) <= bound, bound + 2)  # exp(-x) >= 1 - x


@ieee
def largest_full_gradient_rate(L: float, mu: float, E: int, diversity: float) -> float:
    """The largest eta with eta (L + 4 kappa L E / (1 - mu eta)^(E-1)) <= 1 / lambda.

    With it E full-gradient steps a round contract by exp(-mu eta) a step, as long as the gradient diversity stays
    below lambda (eq. 20). The rate is 1/c of what it was where every objective is c times what it was.

    Args:
        L: the smoothness of the clients' objectives.
        mu: the Polyak-Lojasiewicz constant, in (0, L]; kappa = L / mu.
        E: the local steps of a round.
        diversity: lambda, a bound on the weighted gradient diversity, >= 1.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019, eq. 46.
    Eq. 19, of the same theorem, divides by mu once more; eqs. 9 and 46 and the proof (eq. 112) do not, and a rate with
    that mu in it would depend on the unit of the objective.

    >>> largest_full_gradient_rate(L=1.0, mu=1.0, E=1, diversity=2.0)
    0.1
    """
    L = real("L", L, "(0, inf)")
    mu = real("mu", real("mu", mu, "(0, inf)"), f"(0, {L!r}]")
    whole("E", E, 1)
    real("diversity", diversity, "[1, inf)")

    def allowed(eta: float) -> bool:
        shrunk = (1 - mu * eta) ** (E - 1)  # multiplied by, not divided by: over many steps it underflows
        return eta * (L * shrunk + 4 * (L / mu) * L * E) <= shrunk / diversity

    return _largest(allowed, 1 / (L * diversity))  # the first summand alone allows no more


@ieee
def largest_rate(L: float, E: int, diversity: float, K: int) -> float:
    """The largest eta with eta L (1 + 2 lambda E / K) + lambda eta^2 L^2 E (E - 1) <= 1, for nonconvex local SGD.

    With it, over T steps, the mean of E|grad f|^2 at the mean of all clients' models (which at a round's beginning is
    the server's) is at most

        2 (f(x_0) - f*) / (eta T) + eta L sigma^2 (2 / K + sum_j q_j^2) + eta^2 L^2 sigma^2 (E - 1),

    as long as the gradient diversity at the clients' models stays below lambda. For in what f loses over a round the
    squared mean gradient of a step is weighed by -eta / 2, in what f gains by eta^2 L / 2 for the step itself, by
    lambda eta^3 L^2 E (E - 1) / 2 for the clients' drift within the round, and by lambda eta^2 L E / K for the draw:
    the mean of K clients at the round's end lies about the mean of all.

    Args:
        L: the smoothness of the clients' objectives.
        E: the local steps of a round.
        diversity: lambda, a bound on the weighted gradient diversity, >= 1.
        K: the clients drawn a round, with replacement.

    Raises:
        RangeError: a number is outside its range, or no float holds the rate.

    Reference: the condition of Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated
    Learning", 2019, Theorem 3.3 (eq. 25), derived again and with constants of this project's own.

    >>> round(largest_rate(L=2.0, E=2, diversity=1.0, K=4), 3)
    0.183
    """
    L, diversity = real("L", L, "(0, inf)"), real("diversity", diversity, "[1, inf)")
    whole("E", E, 1, 2**53)
    whole("K", K, 1, 2**53)
    linear = 1 + 2 * diversity * E / K
    eta = 2 / (linear + math.hypot(linear, 2 * math.sqrt(diversity) * math.sqrt(E * (E - 1)))) / L
    if not 0 < eta < math.inf:
        raise RangeError(f"L: expected a number whose rate a float holds, got L={L:g}, diversity={diversity:g}")
    return eta


def _largest(allowed: Callable[[float], bool], high: float) -> float:
    """The largest number in (0, high] that is allowed, where all smaller ones are too: by bisection."""
    low = 0.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
