"""Rates, conditions and a bound of the theorems on local SGD.

Source: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019. C1 is the
relative part of a minibatch's noise (eq. 14): E|g~ - g|^2 <= C1 |g|^2 + sigma^2 / B.
"""

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
def least_steps(alpha: float, kappa: float, diversity: float, K: int) -> int:
    """Return the least E with E >= 1 + (alpha^2 + 6 alpha) / d + sqrt(5 / d), the minimum of ``InverseStep``'s E.

    Here d = 192 lambda kappa^2 exp(4 / alpha) (K + 1) / K - alpha^2. It is positive for alpha < ``largest_alpha``.

    Args:
        alpha: the option of ``InverseStep``.
        kappa, diversity, K: as for ``largest_alpha``.

    Raises:
        RangeError: a number is outside its range; alpha must be below ``largest_alpha``.

    Reference: Haddadpour, Mahdavi 2019, eq. 21.

    >>> least_steps(alpha=20.0, kappa=1.0, diversity=1.0, K=1)
    9
    """
    least = _least_steps(alpha, kappa, diversity, K)
    if least == math.inf:
        limit = largest_alpha(kappa, diversity, K)
        raise RangeError(f"alpha={alpha:g}: must be below largest_alpha(...) = {limit:g}")
    return math.ceil(least)


def _least_steps(alpha: float, kappa: float, diversity: float, K: int) -> float:
    """Return the right side of eq. 21; inf if d <= 0."""
    check_number("alpha", alpha, "(0, inf)")
    check_number("kappa", kappa, "[1, inf)")
    check_number("diversity", diversity, "[1, inf)")
    check_integer("K", K, 1, 2**53)
    # d / alpha^2 over exp(4 / alpha), which may be too large for a float
    ratio, small = kappa / alpha, math.exp(-4 / alpha)
    rest = 192 * diversity * (K + 1) / K * ratio * ratio - small
    if rest <= 0:
        return math.inf
    inverse = small / rest
    return 1 + inverse + 6 * (inverse / alpha) + math.sqrt(5 * inverse) / alpha


@ieee
def meets_theorem_4_2(E: int, *, alpha: float, kappa: float, diversity: float, K: int, C1: float = 0.0) -> bool:
    """Whether a run with ``InverseStep`` meets the conditions of Theorem 4.2, so that ``error_bound`` holds.

    The conditions are, with a = alpha E + 4:

    - alpha < ``largest_alpha`` and E >= ``least_steps``;
    - 4 (a - 3)^(E-1) L (C1 + K) <= 64 L^2 (K + 1) / (mu K) (E - 1) E (a + 1)^(E-2);
    - C1 <= 2 E.

    Args:
        E: the local steps of a round.
        alpha: the option of ``InverseStep``.
        kappa, diversity, K: as for ``largest_alpha``.
        C1: the relative part of the noise, >= 0.

    Raises:
        RangeError: a number is outside its range.

    >>> [meets_theorem_4_2(E, alpha=10.0, kappa=4.0, diversity=1.0, K=4) for E in (1, 2)]
    [False, True]
    """
    check_integer("E", E, 1, 2**53)
    check_number("C1", C1, "[0, inf)")
    if _least_steps(alpha, kappa, diversity, K) > E or E < 2 or C1 > 2 * E:
        return False
    a = alpha * E + 4
    left = math.log(4) + (E - 1) * math.log(a - 3) + math.log(C1 + K)
    return left <= math.log(64 * kappa * (K + 1) / K * (E - 1) * E) + (E - 2) * math.log(a + 1)


@ieee
def error_bound(T: int, *, alpha: float, E: int, L: float, mu: float, K: int, gap: float, variance: float) -> float:
    """Return the bound of E f(x_T) - f* after T local steps with ``InverseStep`` (eq. 22).

    The bound is, with a = alpha E + 4 and kappa = L / mu:

        (a^3 gap + (4 T (T + 2 a) + 256 kappa T (E - 1)) kappa variance / (mu K)) / (T + a)^3

    Args:
        T: the number of local steps.
        alpha, E: as for ``meets_theorem_4_2``, whose conditions must hold.
        L, mu: the constants of smoothness and of the Polyak-Lojasiewicz condition.
        K: the number of clients drawn per round.
        gap: f(x_0) - f*.
        variance: sigma^2 / B, the mean squared distance of a minibatch gradient from the gradient.

    Raises:
        RangeError: a number is outside its range.

    >>> round(error_bound(1000, alpha=10.0, E=2, L=2.0, mu=0.5, K=4, gap=3.0, variance=1.0), 4)
    0.0098
    """
    check_integer("T", T, 0, 2**53)
    check_integer("E", E, 1, 2**53)
    check_integer("K", K, 1, 2**53)
    for name, value in {"alpha": alpha, "L": L, "mu": mu}.items():
        check_number(name, value, "(0, inf)")
    check_number("gap", gap, "[0, inf)")
    check_number("variance", variance, "[0, inf)")
    a, kappa = alpha * E + 4, L / mu
    noise = (4 * T * (T + 2 * a) + 256 * kappa * T * (E - 1)) * kappa * variance / (mu * K)
    return (a**3 * gap + noise) / (T + a) ** 3


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

    Reference: Haddadpour, Mahdavi 2019, Theorem 3.3. This project derived the condition again, with its own constants.
    The paper's condition is ``paper_rate``.

    >>> round(largest_rate(L=2.0, E=2, diversity=1.0, K=4), 3)
    0.183
    """
    L, diversity = check_number("L", L, "(0, inf)"), check_number("diversity", diversity, "[1, inf)")
    check_integer("E", E, 1, 2**53)
    check_integer("K", K, 1, 2**53)
    return _root(diversity * E * (E - 1), 1 + 2 * diversity * E / K, 1.0, L)


@ieee
def paper_rate(L: float, E: int, diversity: float, K: int, C1: float = 0.0) -> float:
    """Return the largest eta of the paper for nonconvex local SGD: the root of eq. 23, which is eq. 25.

    The condition is eta L (C1 / K + 1) + eta^2 L^2 (2 C1 + E (E + 1)) (K + 1) / K <= 1 / lambda.

    ``largest_rate`` also has a term for the draws of clients, lambda E / K, and no C1. Without this term the bound does
    not always hold: for two clients with opposite gradients, lambda = 101, E = 10 and K = 1, the mean of |grad f|^2 is
    1.7 times the bound (``tests/theory/test_largest_rate.py``).

    Args:
        L, E, diversity, K: as for ``largest_rate``.
        C1: the relative part of the noise, >= 0.

    Raises:
        RangeError: a number is outside its range, or the rate is not a finite float.

    Reference: Haddadpour, Mahdavi 2019, eqs. 23 and 25.

    >>> round(paper_rate(L=2.0, E=5, diversity=1.5, K=4, C1=0.3), 4)
    0.0594
    """
    L, diversity = check_number("L", L, "(0, inf)"), check_number("diversity", diversity, "[1, inf)")
    check_integer("E", E, 1, 2**53)
    check_integer("K", K, 1, 2**53)
    check_number("C1", C1, "[0, inf)")
    return _root((2 * C1 + E * (E + 1)) * (K + 1) / K, C1 / K + 1, 1 / diversity, L)


@ieee
def largest_network_rate(L: float, E: int, diversity: float, p: int, zeta: float, C1: float = 0.0) -> float:
    """Return the largest eta for nonconvex local SGD in a network (eq. 28).

    The condition is

        2 L^2 eta^2 C1 E / (1 - zeta^2)
        + L^2 eta^2 E^2 / (1 - zeta) (2 zeta^2 / (1 + zeta) + 2 zeta / (1 - zeta) + (E - 1) / E)
        + eta L (C1 / p + 1) <= 1 / lambda.

    Args:
        L, E, diversity, C1: as for ``paper_rate``.
        p: the number of nodes.
        zeta: the second largest absolute eigenvalue of the mixing matrix, in [0, 1) (``Topology.zeta``).

    Raises:
        RangeError: a number is outside its range, or the rate is not a finite float.

    Reference: Haddadpour, Mahdavi 2019, eq. 28.

    >>> round(largest_network_rate(L=2.0, E=1, diversity=1.5, p=4, zeta=0.0), 4)
    0.3333
    """
    L, diversity = check_number("L", L, "(0, inf)"), check_number("diversity", diversity, "[1, inf)")
    check_integer("E", E, 1, 2**53)
    check_integer("p", p, 1, 2**53)
    check_number("zeta", zeta, "[0, 1)")
    check_number("C1", C1, "[0, inf)")
    mixing = 2 * zeta**2 / (1 + zeta) + 2 * zeta / (1 - zeta) + (E - 1) / E
    square = 2 * C1 * E / (1 - zeta**2) + E * E / (1 - zeta) * mixing
    return _root(square, C1 / p + 1, 1 / diversity, L)


def _root(square: float, linear: float, limit: float, L: float) -> float:
    """Return eta with square (eta L)^2 + linear eta L = limit; raise RangeError if it is not a finite float > 0."""
    eta = 2 * limit / (linear + math.hypot(linear, 2 * math.sqrt(square) * math.sqrt(limit))) / L
    if not 0 < eta < math.inf:
        raise RangeError(f"L: the rate for L={L:g} is no finite float > 0")
    return eta


def _largest(allowed: Callable[[float], bool], high: float) -> float:
    """Return the largest allowed number in (0, high] by bisection; all smaller numbers must be allowed too."""
    low = 0.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
