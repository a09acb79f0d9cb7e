"""Drawing clients from 10^6, against NumPy's Generator."""

import numpy as np
import pytest

import fedcore
from bench.probe import read_floor
from fedcore import sampling

N, K = 1_000_000, 1_000
RNG = np.random.default_rng(0)
WEIGHTS = RNG.uniform(1, 10, N)
P = WEIGHTS / WEIGHTS.sum()
DRAW = dict(seed=0, round=0)
FLOOR = read_floor(np.split(WEIGHTS, 8), fedcore.threads())


TO_DO = {
    "1,000 of 10^6, weighted, without replacement": (
        lambda: sampling.weighted_without_replacement(WEIGHTS, K, **DRAW),
        {"numpy choice(p=, replace=False)": lambda: RNG.choice(N, K, p=P, replace=False), "read floor": FLOOR},
        8 * N,
    ),
    "1,000 of 10^6, weighted, with replacement": (
        lambda: sampling.with_replacement(WEIGHTS, K, **DRAW),
        {"numpy choice(p=)": lambda: RNG.choice(N, K, p=P), "read floor": FLOOR},
        8 * N,
    ),
    "1,000 of 10^6, uniform, without replacement": (
        lambda: sampling.without_replacement(N, K, **DRAW),
        {"numpy choice(replace=False)": lambda: RNG.choice(N, K, replace=False)},
        8 * K,
    ),
    "10^6 chances of 0.1": (
        lambda: sampling.bernoulli(N, 0.1, **DRAW),
        {"numpy random(N) < p": lambda: np.flatnonzero(RNG.random(N) < 0.1)},
        8 * N,
    ),
    "a permutation of 10^6": (
        lambda: sampling.permutation(N, **DRAW),
        {"numpy permutation": lambda: RNG.permutation(N)},
        8 * N,
    ),
}
TARGETS = {"1,000 of 10^6, weighted, without replacement": {"numpy choice(p=, replace=False)": 3.0}}


@pytest.mark.parametrize("draw", TO_DO)
def bench_draw(versus, draw):
    ours, rivals, moved = TO_DO[draw]
    versus(draw, ours, rivals, bytes=moved, targets=TARGETS.get(draw))
