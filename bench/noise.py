"""The law and the speed of the noise of private rounds.

python -m bench.noise law     10^8 draws: Kolmogorov-Smirnov, moments and tails (a minute)
python -m bench.noise speed   nanoseconds an element, beside NumPy's and torch's normals
"""

import argparse
import contextlib
import os
import time

import numpy as np

import fedcore
from fedcore import kernels

N, CHUNK, SIGMA = 10**8, 10**6, 2**24 + 2**23
BINS, WIDTH = 1 << 16, 8


def law() -> None:
    """Compare 10^8 draws with the normal law."""
    from scipy import stats

    edges = np.linspace(-WIDTH, WIDTH, BINS + 1)
    counts, moments, y = np.zeros(BINS, np.int64), np.zeros(4), np.empty(CHUNK)
    tails = dict.fromkeys((1, 2, 3, 4, 5, 5.5), 0)
    for _ in range(N // CHUNK):
        y[:] = 0
        kernels.add_discrete_gaussian(y, 1.0, SIGMA, os.urandom(32), out=y)
        y /= SIGMA
        counts += np.bincount(((y + WIDTH) * (BINS / (2 * WIDTH))).astype(np.int64), minlength=BINS)
        square = y * y
        moments += y.sum(), square.sum(), (square * y).sum(), (square * square).sum()
        for t in tails:
            tails[t] += int(np.count_nonzero(square > t * t))
    moments /= N
    found, due = np.cumsum(counts) / N, stats.norm.cdf(edges[1:])
    distance = abs(found - due).max()
    print(f"{N:.0e} draws, sigma = {SIGMA}")
    print(f"KS distance on {BINS} bins  {distance:.2e}   p = {stats.kstwobign.sf(distance * N**0.5):.3f}")
    for k, (value, deviation) in enumerate(zip(moments, (1, 2, 15, 96), strict=True), 1):
        expected = {1: 0, 2: 1, 3: 0, 4: 3}[k]
        off = (value - expected) / (deviation / N) ** 0.5
        print(f"moment {k}   {value:+.6f}   {off:+.2f} deviations from {expected}")
    for t, count in tails.items():
        expected = 2 * N * stats.norm.sf(t)
        print(f"|y| > {t}   {count}   {(count - expected) / expected**0.5:+.2f} deviations from {expected:.1f}")


def speed(n: int = 10**7) -> None:
    """Time the noise and others' normals."""

    def best(run) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return min(times) / n * 1e9

    from fedcore.arrays import core

    out, rng, key, most = np.zeros(n), np.random.default_rng(0), os.urandom(32), fedcore.threads()
    chacha = best(lambda: core.chacha20(key, 0, bytes(12), n // 64))
    print(f"ChaCha20, 16 bytes on one thread             {chacha:.1f} ns")
    for threads in sorted({1, most}):
        fedcore.set_threads(threads)
        ns = best(lambda: kernels.add_discrete_gaussian(out, 1.0, SIGMA, key, out=out))
        print(f"discrete Gaussian by ChaCha20, {threads} threads     {ns:.1f} ns")
    print(f"NumPy, standard_normal float64, one thread   {best(lambda: rng.standard_normal(out=out)):.1f} ns")
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
        vector = torch.empty(n, dtype=torch.float64)
        print(f"torch, normal_ float64, one thread           {best(vector.normal_):.1f} ns")
        single = torch.empty(n)
        print(f"torch, normal_ float32, one thread           {best(single.normal_):.1f} ns")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["law", "speed"])
    {"law": law, "speed": speed}[parser.parse_args().what]()
