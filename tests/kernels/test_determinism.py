"""The same bits on every instruction-set level, on every number of threads, and again."""

import os
import subprocess
import sys

import pytest

import fedcore
from fedcore import _core

LEVELS = ["baseline", "avx2", "avx512"]
LEVELS = LEVELS[: LEVELS.index(_core.best_isa()) + 1]

DIGEST = """
import hashlib, sys
import numpy as np
import fedcore
from fedcore import kernels, sampling
print(fedcore.isa())
for threads in (1, 2, 3, 7, 1):
    fedcore.set_threads(threads)
    rng = np.random.default_rng(5)
    digest = hashlib.sha256()
    for n in (1, 17, 5000, 16385, 400_003):
        vector = lambda: rng.normal(size=n).astype(np.float32)
        ys, old, anchors = ([vector() for _ in range(9)] for _ in range(3))
        new, x, v, x_out = [np.empty(n, np.float32) for _ in range(9)], vector(), vector(), vector()
        acc, total, out, total_out = rng.normal(size=n), rng.normal(size=n), np.empty(n), np.empty(n)
        scales, weights = rng.random(9), rng.random(9)
        digest.update(kernels.weighted_sum(ys, weights.astype(np.float32)))
        digest.update(kernels.weighted_sum(ys, weights.astype(np.float32), accumulate="float64"))
        for sums in (out, np.empty(n, np.float32)):
            bases = [x] * 5 + [None] + [x] * 3  # four at once, and one by one
            digest.update(kernels.accumulate(acc.astype(sums.dtype), bases, ys, scales, weights, out=sums))
            digest.update(sums)
        digest.update(kernels.exchange(acc, [x] * 9, ys, scales, weights, old, anchors, new, out=out))
        digest.update(out)
        for row in new:
            digest.update(row)
        step = dict(from_sum=.1, from_total=.2, keep_sum=.3, keep_v=.4, gamma=.5)
        squares = kernels.server_step(out, total, x, v=v, total_out=total_out, x_out=x_out, **step)
        digest.update(np.array(squares))
        for array in (v, total_out, x_out):
            digest.update(array)
        vectors = dict(grad_prev=ys[1], offset=ys[2], x=x)
        kernels.direction_step(v, ys[0], lr=.1, a=.2, b=.3, mu=.4, weight_decay=.5, **vectors)
        digest.update(v)
        digest.update(kernels.direction_offset([total, ys[0], ys[1]], [.1, .2, .3]))
        kernels.mix(new, rng.normal(size=(9, 9)) * (rng.random((9, 9)) < .7))
        for row in new:
            digest.update(row)
        old[0][::3] *= np.float32(1e-6)  # subnormal in f16
        for codec in ("bf16", "f16", "int8"):
            for seed in (None, 7):
                coded = kernels.quantise(old[0], codec, seed=seed, row=n)
                digest.update(coded.codes)
                digest.update(kernels.dequantise(coded))
    draw = dict(seed=1, round=2)
    weights = rng.exponential(size=70_001)
    digest.update(sampling.without_replacement(10**6, 3000, **draw))
    digest.update(sampling.weighted_without_replacement(weights, 3000, **draw))
    digest.update(sampling.with_replacement(weights, 40_000, **draw))
    digest.update(sampling.bernoulli(300_001, .3, **draw))
    digest.update(sampling.permutation(70_001, **draw))
    print(digest.hexdigest())
"""


def run(code, level):
    environment = os.environ | {"FEDCORE_ISA": level}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    return done


def test_every_level_and_thread_count_gives_the_same_bits():
    digests = set()
    for level in LEVELS:
        done = run(DIGEST, level)
        assert done.returncode == 0, done.stderr
        active, *lines = done.stdout.split()
        assert active == level
        assert len(lines) == 5
        digests |= set(lines)
    assert len(digests) == 1


def test_a_level_that_does_not_exist_is_an_error():
    done = run("import fedcore; fedcore.isa()", "avx1024")
    assert done.returncode != 0
    assert "FEDCORE_ISA: expected one of the levels from baseline to" in done.stderr
    assert done.stderr.rstrip().endswith("got avx1024")


SERVER_ROUNDS = """
import hashlib
import numpy as np
import fedcore
digest = hashlib.sha256()
for name in ("FedAvg", "MIFA", "MimiC"):
    rng = np.random.default_rng(3)
    server = fedcore.Server(name, rng.normal(size=3001).astype(np.float32), clients=6, lr=.1)
    for _ in range(8):
        with server.open_round() as round:
            for client in np.flatnonzero(rng.random(6) < .5).tolist():
                y = server.x + rng.normal(size=3001).astype(np.float32)
                round.add(client, y, steps=3, examples=int(rng.integers(1, 9)))
        digest.update(server.x)
print(digest.hexdigest())
"""


def test_the_package_runs_on_the_reference_with_the_same_bits():
    native, numpy = run(SERVER_ROUNDS, ""), run(SERVER_ROUNDS, "reference")
    assert native.returncode == 0, native.stderr
    assert numpy.returncode == 0, numpy.stderr
    assert native.stdout == numpy.stdout
    assert run("import fedcore; print(fedcore.isa())", "reference").stdout.strip() == "reference"


@pytest.mark.parametrize("count", [0, -1, 5000])
def test_thread_counts_out_of_range_are_refused(count):
    before = fedcore.threads()
    with pytest.raises(fedcore.errors.RangeError, match=r"count: expected 1\.\.4096 threads"):
        fedcore.set_threads(count)
    assert fedcore.threads() == before
