"""Constants in the theorems on local SGD."""

import math
from collections.abc import Callable

from fedcore.arrays import ieee
from fedcore.errors import RangeError
from fedcore.validation import check_integer, check_number


@ieee
def largest_alpha(kappa: float, diversity: float, K: int) -> float:
    """Return the upper bound of ``InverseStep``'s alpha: alpha exp(-2 / alpha) < kappa sqrt(192 lambda (K + 1) / K).

    Args:
        kappa: L / mu, >= 1.
        diversity: lambda, a bound on the weighted gradient diversity, >= 1.
        K: the number of clients drawn per round.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.2.

    >>> round(largest_alpha(kappa=1.0, diversity=1.0, K=1), 3)
    21.506
    """
    check_number("kappa", kappa, "[1, inf)")
    check_number("diversity", diversity, "[1, inf)")
    check_integer("K", K, 1)
    bound = kappa * math.sqrt(192 * diversity * (K + 1) / K)
    return _largest(lambda alpha: alpha * math.exp(-2 / alpha) <= bound, bound + 2)  # exp(-x) >= 1 - x


@ieee
def largest_full_gradient_rate(L: float, mu: float, E: int, diversity: float) -> float:
    """Return the largest eta with eta (L + 4 kappa L E / (1 - mu eta)^(E-1)) <= 1 / lambda.

    With this rate, each of the E full-gradient steps of a round contracts by exp(-mu eta), if the gradient diversity
    stays below lambda (eq. 20). If all objectives are multiplied by c, the rate is multiplied by 1 / c.

    Args:
        L: the smoothness of the clients' objectives.
        mu: the Polyak-Lojasiewicz constant, in (0, L]; kappa = L / mu.
        E: the local steps of a round.
        diversity: lambda, a bound on the weighted gradient diversity, >= 1.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019, eq. 46.
    Eq. 19, of the same theorem, divides by mu once more. Eqs. 9 and 46 and the proof (eq. 112) do not, and with the
    additional mu the rate would depend on the unit of the objective.

    >>> largest_full_gradient_rate(L=1.0, mu=1.0, E=1, diversity=2.0)
    0.1
    """
    L = check_number("L", L, "(0, inf)")
    mu = check_number("mu", check_number("mu", mu, "(0, inf)"), f"(0, {L!r}]")
    check_integer("E", E, 1)
    check_number("diversity", diversity, "[1, inf)")

    def allowed(eta: float) -> bool:
        shrunk = (1 - mu * eta) ** (E - 1)  # a factor instead of a divisor, since it underflows over many steps
        return eta * (L * shrunk + 4 * (L / mu) * L * E) <= shrunk / diversity

    return _largest(allowed, 1 / (L * diversity))  # the first summand gives this upper bound


@ieee
def largest_rate(L: float, E: int, diversity: float, K: int) -> float:
    """Return the largest eta with eta L (1 + 2 lambda E / K) + lambda eta^2 L^2 E (E - 1) <= 1: nonconvex local SGD.

    With this rate, the mean over T steps of E|grad f|^2 at the mean of all clients' models (at the start of a round,
    the server's model) is at most

        2 (f(x_0) - f*) / (eta T) + eta L sigma^2 (2 / K + sum_j q_j^2) + eta^2 L^2 sigma^2 (E - 1),

    if the gradient diversity at the clients' models stays below lambda. In the change of f over a round, the squared
    mean gradient of a step has the factor -eta / 2 plus three terms:

    - eta^2 L / 2 for the step itself;
    - lambda eta^3 L^2 E (E - 1) / 2 for the clients' drift within the round;
    - lambda eta^2 L E / K for the draw of K clients.

    Args:
        L: the smoothness of the clients' objectives.
        E: the local steps of a round.
        diversity: lambda, a bound on the weighted gradient diversity, >= 1.
        K: the number of clients drawn per round, with replacement.

    Raises:
        RangeError: a number is outside its range, or the rate is not a finite float.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019, Theorem
    3.3 (eq. 25); this project derived the condition again, with its own constants.

    >>> round(largest_rate(L=2.0, E=2, diversity=1.0, K=4), 3)
    0.183
    """
    L, diversity = check_number("L", L, "(0, inf)"), check_number("diversity", diversity, "[1, inf)")
    check_integer("E", E, 1, 2**53)
    check_integer("K", K, 1, 2**53)
    linear = 1 + 2 * diversity * E / K
    eta = 2 / (linear + math.hypot(linear, 2 * math.sqrt(diversity) * math.sqrt(E * (E - 1)))) / L
    if not 0 < eta < math.inf:
        raise RangeError(f"L: the rate for L={L:g}, diversity={diversity:g} is no finite float > 0")
    return eta


def _largest(allowed: Callable[[float], bool], high: float) -> float:
    """Return the largest allowed number in (0, high] by bisection; all smaller numbers must be allowed too."""
    low = 0.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
