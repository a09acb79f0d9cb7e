"""Recorded results of draws: a change would change every cohort ever drawn."""

import hashlib

import pytest

from fedcore import sampling

DRAW = dict(seed=42, round=3)
WEIGHTS = [1, 2, 3, 4, 5, 6, 7, 8]
VECTORS = [
    ("without_replacement", (1000, 8), {}, [427, 572, 480, 543, 472, 101, 150, 173]),
    ("without_replacement", (10, 10), {}, [4, 6, 5, 1, 3, 2, 0, 7, 9, 8]),
    ("weighted_without_replacement", (WEIGHTS, 8), {}, [4, 6, 5, 7, 1, 3, 2, 0]),
    ("with_replacement", (WEIGHTS, 10), {}, [6, 6, 6, 3, 5, 7, 4, 4, 6, 6]),
    ("bernoulli", (30, 0.3), {}, [6, 8, 15, 17, 25, 27, 28, 29]),
    ("permutation", (12,), {}, [8, 5, 0, 9, 6, 10, 11, 1, 2, 7, 4, 3]),
    ("permutation", (10**6,), {"stop": 5}, [637334, 947768, 922289, 882757, 856544]),
    ("permutation", (2**62,), {"stop": 2}, [3874917953464787913, 440005600554523787]),
]
# SHA-256 of the little-endian int64 of longer ones; weights 1 .. 10 in turn
LONG = [
    ("without_replacement", (10**6, 1000), "9b35e78bc4a011184284512f3c722c4e027577ad1d3ca07f4ef1287641259d40"),
    (
        "weighted_without_replacement",
        ([1.0 + i % 10 for i in range(10**6)], 1000),
        "ca31eb0374c77b7c2da97474a54ec9d94e32d8ccdc9a2e3539efac2dcc52b141",
    ),
    (
        "with_replacement",
        ([1.0 + i % 10 for i in range(10**6)], 1000),
        "4471a1317f39a0e90d0ec66012d58508c21c5e5b2278ace1107837a2f17af927",
    ),
    ("bernoulli", (10**6, 0.1), "bfb7a6a5021a7d7bdcb231416ed528ce684550611ad44914370fd5c2a9685c14"),
    ("permutation", (10**6,), "c89b39471b0668aef702a8e5c1b29f07a3dca7afec374b545875943dad6e9e02"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "due"), VECTORS)
def test_short_draws(name, arguments, options, due):
    assert getattr(sampling, name)(*arguments, **options, **DRAW).tolist() == due


@pytest.mark.parametrize(("name", "arguments", "due"), LONG, ids=[name for name, *_ in LONG])
def test_long_draws(name, arguments, due):
    drawn = getattr(sampling, name)(*arguments, **DRAW)
    assert hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest() == due
