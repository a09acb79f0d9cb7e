"""The beta, rates and warm start of the momentum methods for a run of known length: Cheng et al. 2024, Theorems 1 to 4.

Source: "Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024, eqs. 19, 27, 28 and 30. The
theorems allow any c in (0, 1] as a limit of beta, and bound eta up to an unprinted constant. Here c is 1, and the
constant is 1/10.

On least squares with noise, the mean of |grad f|^2 then stays within 8 times the order of the theorem
(tests/theory/test_momentum.py). With hardly any noise it can be 24 times the order for FedAvg-M and FedAvg-M-VR, whose
gamma is at most 1 / (24 L). These are measurements, not proofs. The tests also show:

- With little noise, a quarter of gamma makes the mean more than twice as large.
- So does a cold start of the -VR methods.
- With beta = 1 the mean is at least 1.5 times as large for FedAvg-M and the -VR methods; for FedAvg-M this needs a
  constant of 1 instead of 1/10.
- No case is known in which SCAFFOLD-M needs its beta. If clients differ much, the limit by G0 makes beta and gamma
  small.
"""

import math
from typing import Literal, NamedTuple, get_args

from fedcore.arrays import ieee
from fedcore.errors import RangeError, UnknownNameError
from fedcore.validation import check_integer, check_number

Method = Literal["FedAvgM", "SCAFFOLDM", "FedAvgMVR", "SCAFFOLDMVR"]
LOCAL = 1 / 10
"""eta K L over the smallest of its limits; the theorems do not print this constant."""


class MomentumRates(NamedTuple):
    """The beta, rates and warm start for a run."""

    beta: float
    """The method's option ``beta``."""
    server_lr: float
    """gamma."""
    lr: float
    """eta; a smaller rate works too if float32 can represent the steps."""
    minibatches: int
    """B, the minibatches per client of the warm start, which may cost more than a short run; 0 for a cold start."""


@ieee
def momentum_rates(
    method: Method,
    *,
    rounds: int,
    steps: int,
    clients: int,
    cohort: int | None = None,
    L: float,
    gap: float,
    noise: float,
    spread: float,
) -> MomentumRates:
    """Return rates with which the mean of |grad f|^2 over R rounds has the order of the theorems.

    The order is:

    - FedAvg-M (Theorem 1): sqrt(L gap sigma^2 / (N K R)) + L gap / R.
    - FedAvg-M-VR (Theorem 2): (L gap sigma / (N K R))^(2/3) + L gap / R.
    - SCAFFOLD-M (Theorem 3): sqrt(L gap sigma^2 / (S K R)) + L gap (1 + N^(2/3) / S) / R. The limit of beta by G0 adds
      sqrt(L gap N G0) / (S R).
    - SCAFFOLD-M-VR (Theorem 4): (L gap sigma / (S sqrt(K) R))^(2/3) + L gap (1 + sqrt(N) / S) / R.

    Args:
        method: the method's name.
        rounds, steps: R and K.
        clients, cohort: N and S. Default: S = N, which FedAvg-M and FedAvg-M-VR need.
        L: the smoothness of the clients' objectives, or for the -VR methods of every example's objective.
        gap: f(x_0) - min f.
        noise: sigma, the standard deviation of a minibatch gradient (the root of its mean squared distance).
        spread: G0, the mean of |grad f_i(x_0)|^2 over the clients.

    Raises:
        UnknownNameError: the method does not exist.
        RangeError: a number is outside its range: L and gap > 0, noise and spread >= 0, cohort in 1..clients; S < N
            with a method whose theorem needs all clients; or a rate is not a finite float.

    >>> momentum_rates("SCAFFOLDM", rounds=100, steps=5, clients=20, cohort=5, L=2.0, gap=8.0, noise=4.0, spread=9.0)
    MomentumRates(beta=0.5, server_lr=0.25, lr=0.001118033988749895, minibatches=1)
    """
    if method not in get_args(Method):
        raise UnknownNameError.of("method", method, get_args(Method))
    R, K, N = (
        check_integer(name, n, 1, 2**53) for name, n in (("rounds", rounds), ("steps", steps), ("clients", clients))
    )
    S = N if cohort is None else check_integer("cohort", cohort, 1, N)
    if S < N and not method.startswith("SCAFFOLD"):
        other = method.replace("FedAvg", "SCAFFOLD")
        raise RangeError(f"cohort={S}: must be {N}, since {method}'s theorem needs all clients; or use {other}")
    L, gap = check_number("L", L, "(0, inf)"), check_number("gap", gap, "(0, inf)")
    noise, spread = check_number("noise", noise, "[0, inf)"), check_number("spread", spread, "[0, inf)")
    try:
        rates = _rates(method, R, K, N, S, L, gap, noise, spread)
    except (OverflowError, ZeroDivisionError):
        rates = None
    if rates is None or not all(0 < rate < math.inf for rate in rates[:3]):
        numbers = f"L={L:g}, gap={gap:g}, noise={noise:g}, spread={spread:g}"
        raise RangeError(f"L: the rates for {numbers} are no finite floats > 0")
    return rates


def _rates(
    method: Method, R: int, K: int, N: int, S: int, L: float, gap: float, noise: float, spread: float
) -> MomentumRates:
    """Return the rates for valid numbers; a rate may be infinite or NaN."""
    left, variance, minibatches = L * gap / R, noise**2 / (S * K), 0.0
    # L gap / R over the variance of a round's mean gradient, and L gap over G0
    quiet, similar = (left / variance if noise else math.inf), (L * gap / spread if spread else math.inf)
    if method == "FedAvgM":  # eq. 19
        beta = min(1.0, math.sqrt(quiet))
        gamma = min(1 / 24, beta / 6)
        eta = min(1.0, 1 / (beta * gamma * R), math.sqrt(similar / R / beta) / beta, (beta * N) ** -0.5)
        eta = min(eta, (beta**3 * N * K) ** -0.25)
    elif method == "SCAFFOLDM":  # eq. 28
        beta = gamma = min(1.0, S / N ** (2 / 3), math.sqrt(quiet), S * math.sqrt(similar / N))
        eta = min(S**-0.5, 1 / (beta * K**0.25), math.sqrt(S) / N)
        minibatches = N * K / (S * R)
    elif method == "FedAvgMVR":  # eq. 27
        beta = min(1.0, (quiet / math.sqrt(N * K)) ** (2 / 3))
        gamma = min(1 / 24, math.sqrt(beta * N * K / 54))
        eta = min(math.sqrt(similar / R / gamma), math.sqrt(beta / N), (beta / (N * K)) ** 0.25)
        minibatches = K / (R * beta**2) if beta < 1 else 0.0  # with beta = 1 this is FedAvg, without g
    else:  # eq. 30
        beta = min(S / N, (quiet / math.sqrt(S)) ** (2 / 3))
        gamma = min(1.0, math.sqrt(beta * S))
        eta = min(math.sqrt(beta / S), (beta / (S * K)) ** 0.25)
        minibatches = max(S * K / (N * R * beta**2), N * K / (S * R))
    return MomentumRates(beta, gamma / L, LOCAL * eta / (K * L), math.ceil(minibatches))
