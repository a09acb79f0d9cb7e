"""The beta, rates and warm start of the momentum methods for a run of known length: Cheng et al. 2024, Theorems 1 to 4.

"Momentum Benefits Non-IID Federated Learning Simply and Provably", ICLR 2024. The theorems say orders, up to constants.
Here the orders are derived again, from the balance that each theorem rests on, and the constants are this project's:
with them the mean of |grad f|^2 stays within 8 times the order on least squares with noise, in runs of 30 to 480 rounds
and a longer one for FedAvg-M and SCAFFOLD-M-VR (tests/theory/test_momentum.py). Nothing here is proved.

The tests hold, too, that with little noise a quarter of gamma leaves that bound, and that a cold start does where B is
not 0 (of FedAvg-M-VR neither is tested); and that beta = 1 ends 1.3 times as high for FedAvg-M and the -VR methods. The
constants are not held beyond it, for those of proofs are conservative: a larger gamma may do better. Nor is the beta of
SCAFFOLD-M: no case is known in which beta = 1, which is SCAFFOLD, does worse with its rates.

- Over R rounds the mean of |grad f|^2 is about gap / (gamma R), and what the noise leaves in g. A plain g follows the
  gradient while gamma <= beta / (6 L), that of a -VR method while gamma <= sqrt(beta P) / (6 L), where P gradients are
  averaged whose differences are independent: the S clients', and all K steps' where everybody is there. Proofs stop at
  gamma <= 1 / (24 L), although a larger one may gain.
- Minibatches leave beta sigma^2 / (S K) in g. The best beta makes this as large as gap / (gamma R).
- With S of N clients a c_i is N / S rounds old, in which x moves by N / S gamma |grad f|: beta <= S / N^(2/3) for
  SCAFFOLD-M and S / N for SCAFFOLD-M-VR keep what this adds below |grad f|.
- B minibatches a client at the start leave no more noise than the rounds do.
"""

import math
from typing import Literal, NamedTuple, get_args

from fedcore.arguments import real, whole
from fedcore.arrays import ieee
from fedcore.errors import RangeError, UnknownNameError

Method = Literal["FedAvgM", "SCAFFOLDM", "FedAvgMVR", "SCAFFOLDMVR"]
MOST, FOLLOWED, LOCAL = 1 / 24, 1 / 6, 1 / 10
"""gamma L at most; gamma L by beta, or by sqrt(beta P); eta K L by the least of its limits."""


class MomentumRates(NamedTuple):
    """A choice for a run, as ``Server`` takes it."""

    beta: float
    """The method's option."""
    server_lr: float
    """gamma."""
    lr: float
    """eta; any smaller one will do as well, as long as float32 tells x from where its steps end."""
    minibatches: int
    """B, of each client's warm start, which may cost more than a short run; 0 where the method starts cold."""


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
    """The choice for which the mean of |grad f|^2 over R rounds falls as the theorems say, in order.

    For FedAvg-M and SCAFFOLD-M as sqrt(L gap sigma^2 / (S K R)) + L gap / R, the second part times 1 + N^(2/3) / S
    where S < N. For the -VR methods as (L gap sigma / (N K R))^(2/3) + L gap / R where everybody is there (also for
    SCAFFOLD-M-VR, whose controls then cancel in the mean); with some, for SCAFFOLD-M-VR, as
    (L gap sigma / (S sqrt(K) R))^(2/3) + L gap (1 + sqrt(N) / S) / R.

    Args:
        method: the method's name.
        rounds, steps: R and K.
        clients, cohort: N and S; None for everybody, whom FedAvg-M and FedAvg-M-VR need.
        L: the smoothness of the clients' objectives, for the -VR methods of every example's.
        gap: f(x_0) - min f.
        noise: sigma, the standard deviation of a minibatch gradient (the root of its mean squared distance).
        spread: the mean of |grad f_i(x_0)|^2 over the clients.

    Raises:
        UnknownNameError: there is no such method.
        RangeError: a number is outside its range: L and gap > 0, noise and spread >= 0, cohort in 1..clients; or some
            clients are there with a method whose theorem has everybody; or no float holds the rates.

    >>> momentum_rates("SCAFFOLDM", rounds=100, steps=5, clients=20, cohort=5, L=2.0, gap=8.0, noise=4.0, spread=9.0)
    MomentumRates(beta=0.5, server_lr=0.020833333333333332, lr=0.004800000000000001, minibatches=1)
    """
    if method not in get_args(Method):
        raise UnknownNameError.of("method", method, get_args(Method))
    R, K, N = (whole(name, n, 1, 2**53) for name, n in (("rounds", rounds), ("steps", steps), ("clients", clients)))
    S = N if cohort is None else whole("cohort", cohort, 1, N)
    if S < N and not method.startswith("SCAFFOLD"):
        twin = method.replace("FedAvg", "SCAFFOLD")
        raise RangeError(f"cohort: expected {N}, since {method}'s theorem has everybody there, got {S}: take {twin}")
    L, gap = real("L", L, "(0, inf)"), real("gap", gap, "(0, inf)")
    noise, spread = real("noise", noise, "[0, inf)"), real("spread", spread, "[0, inf)")
    try:
        made = _rates(method, R, K, N, S, L, gap, noise, spread)
    except (OverflowError, ZeroDivisionError):
        made = None
    if made is None or not all(0 < rate < math.inf for rate in made[:3]):
        got = f"L={L:g}, gap={gap:g}, noise={noise:g}, spread={spread:g}"
        raise RangeError(f"L: expected numbers whose rates a float holds, got {got}")
    return made


def _rates(
    method: Method, R: int, K: int, N: int, S: int, L: float, gap: float, noise: float, spread: float
) -> MomentumRates:
    """The choice for numbers that are in their ranges, except for what a float does not hold."""
    left, variance, reduces = L * gap / R, noise**2 / (S * K), method.endswith("VR")
    if reduces:
        P = N * K if S == N else S
        beta = min(S / N, (left / math.sqrt(P) / variance) ** (2 / 3) if noise else 1.0)
        gamma = min(MOST, FOLLOWED * math.sqrt(beta * P))
    else:
        beta = min(1.0, S / N ** (2 / 3) if S < N else 1.0, math.sqrt(left / variance) if noise else 1.0)
        gamma = min(MOST, FOLLOWED * beta)
    # Local steps leave x by eta K (beta |grad f_i| + |g|), and a plain g takes beta of the change that L makes of it.
    # That change stays below the gradient; the minibatches' part of it below the noise in g; and the clients' part
    # below the gradient, both as far as x goes from x_0, where |grad f_i| grows, and from the start on.
    eta = min(1.0, (beta * S) ** -0.5, 1 / (beta * gamma * R))
    if spread:
        eta = min(eta, math.sqrt(left / (gamma * spread)) / beta)
    if reduces:  # the difference of two gradients is taken whole
        eta *= beta
    return MomentumRates(beta, gamma / L, LOCAL * eta / (K * L), _minibatches(method, R, K, N, S, beta, noise))


def _minibatches(method: Method, R: int, K: int, N: int, S: int, beta: float, noise: float) -> int:
    """B: the noise in g at the start counts for 1 / beta rounds, and that in a c_i until its client is there again.

    For SCAFFOLD-M-VR the former is never the less, since beta <= S / N.
    """
    if method == "FedAvgM" or (method == "FedAvgMVR" and beta == 1):  # the latter is FedAvg: there is no g to start
        return 0
    if not noise:
        return 1
    return math.ceil(N * K / (S * R)) if method == "SCAFFOLDM" else math.ceil(S * K / (N * R * beta**2))
