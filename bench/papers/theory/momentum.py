"""The beta, rates and warm start of the momentum methods for a run of known length: Cheng et al. 2024, Theorems 1 to 4.

Source: "Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024. The theorems give orders, up to
constants. This module derives the orders again from the balance of errors in each theorem, with this project's
constants. On least squares with noise, the mean of |grad f|^2 then stays within 8 times the order. The runs have 30 to
480 rounds, and for FedAvg-M and SCAFFOLD-M-VR also more (tests/theory/test_momentum.py). This is a measurement, not a
proof.

The tests also show:

- With little noise, a quarter of gamma exceeds this bound, and so does a cold start if B is not 0. FedAvg-M-VR is not
  tested for either.
- beta = 1 makes the mean 1.3 times larger for FedAvg-M and the -VR methods.
- No case is known in which SCAFFOLD-M needs its beta: with the same rates, beta = 1 (SCAFFOLD) is not worse.

As in proofs, the constants may be conservative, and a larger gamma may be better. The derivation:

- Over R rounds the mean of |grad f|^2 is about gap / (gamma R), plus the noise in g. A plain g follows the gradient for
  gamma <= beta / (6 L), and the g of a -VR method for gamma <= sqrt(beta P) / (6 L). P is the number of averaged
  gradients with independent differences: S, or S K if all clients take part. Proofs need gamma <= 1 / (24 L).
- Minibatches add beta sigma^2 / (S K) to g. The best beta makes this equal to gap / (gamma R).
- With S of N clients a c_i is N / S rounds old, during which x moves by N / S gamma |grad f|. The resulting error is
  below |grad f| for beta <= S / N^(2/3) (SCAFFOLD-M) or S / N (SCAFFOLD-M-VR).
- B minibatches per client at the start add at most the noise of the rounds.
"""

import math
from typing import Literal, NamedTuple, get_args

from fedcore.arrays import ieee
from fedcore.errors import RangeError, UnknownNameError
from fedcore.validation import check_integer, check_number

Method = Literal["FedAvgM", "SCAFFOLDM", "FedAvgMVR", "SCAFFOLDMVR"]
MOST, FOLLOWED, LOCAL = 1 / 24, 1 / 6, 1 / 10
"""The maximum of gamma L, of gamma L / beta or gamma L / sqrt(beta P), and of eta K L over its smallest limit."""


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

    - FedAvg-M, SCAFFOLD-M: sqrt(L gap sigma^2 / (S K R)) + L gap / R, the second term times 1 + N^(2/3) / S if S < N.
    - -VR methods with all clients: (L gap sigma / (N K R))^(2/3) + L gap / R. This includes SCAFFOLD-M-VR, whose
      controls then cancel in the mean.
    - SCAFFOLD-M-VR with S < N: (L gap sigma / (S sqrt(K) R))^(2/3) + L gap (1 + sqrt(N) / S) / R.

    Args:
        method: the method's name.
        rounds, steps: R and K.
        clients, cohort: N and S. Default: S = N, which FedAvg-M and FedAvg-M-VR need.
        L: the smoothness of the clients' objectives, or for the -VR methods of every example's objective.
        gap: f(x_0) - min f.
        noise: sigma, the standard deviation of a minibatch gradient (the root of its mean squared distance).
        spread: the mean of |grad f_i(x_0)|^2 over the clients.

    Raises:
        UnknownNameError: the method does not exist.
        RangeError: a number is outside its range: L and gap > 0, noise and spread >= 0, cohort in 1..clients; S < N
            with a method whose theorem needs all clients; or a rate is not a finite float.

    >>> momentum_rates("SCAFFOLDM", rounds=100, steps=5, clients=20, cohort=5, L=2.0, gap=8.0, noise=4.0, spread=9.0)
    MomentumRates(beta=0.5, server_lr=0.020833333333333332, lr=0.004800000000000001, minibatches=1)
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
    left, variance, reduces = L * gap / R, noise**2 / (S * K), method.endswith("VR")
    if reduces:
        P = N * K if S == N else S
        beta = min(S / N, (left / math.sqrt(P) / variance) ** (2 / 3) if noise else 1.0)
        gamma = min(MOST, FOLLOWED * math.sqrt(beta * P))
    else:
        beta = min(1.0, S / N ** (2 / 3) if S < N else 1.0, math.sqrt(left / variance) if noise else 1.0)
        gamma = min(MOST, FOLLOWED * beta)
    # Local steps move by eta K (beta |grad f_i| + |g|). This changes the gradients by up to L times the move, and a
    # plain g by beta times the change. The change must stay below the gradient, and its part from minibatches below the
    # noise in g. Its part from clients must stay below the gradient at x_0 and later, since |grad f_i| may grow.
    eta = min(1.0, (beta * S) ** -0.5, 1 / (beta * gamma * R))
    if spread:
        eta = min(eta, math.sqrt(left / (gamma * spread)) / beta)
    if reduces:  # the difference of two gradients has no factor beta
        eta *= beta
    return MomentumRates(beta, gamma / L, LOCAL * eta / (K * L), _minibatches(method, R, K, N, S, beta, noise))


def _minibatches(method: Method, R: int, K: int, N: int, S: int, beta: float, noise: float) -> int:
    """Return B.

    The noise in the first g lasts for 1 / beta rounds, and the noise in a c_i until its client takes part again. For
    SCAFFOLD-M-VR the first time is at least the second, since beta <= S / N.
    """
    if method == "FedAvgM" or (method == "FedAvgMVR" and beta == 1):  # FedAvg-M-VR with beta = 1 is FedAvg, without g
        return 0
    if not noise:
        return 1
    return math.ceil(N * K / (S * R)) if method == "SCAFFOLDM" else math.ceil(S * K / (N * R * beta**2))
