"""Compare the GPU kernels with the CPU kernels, bit for bit, on new random problems: ``python -m bench.gpu.parity``.

The script prints as JSON the number of problems of each kernel with equal bits. With --repeats it repeats the same
calls during other GPU work, and prints the number of different results, which should be 1.
"""

import argparse
import hashlib
import json
import sys
import time

import numpy as np

from bench.gpu.arrays import REAL, Placed
from bench.gpu.kernel_problems import ALL
from bench.gpu.problems import KINDS, Problems
from fedcore import kernels
from fedcore.kernels import Codes


def parity(seconds, largest, seed):
    problems, end = Problems(largest, seed), time.perf_counter() + seconds
    rounds = 0
    while rounds < len(KINDS) or time.perf_counter() < end:
        for solve in ALL:
            solve(problems, KINDS[rounds % len(KINDS)])
        rounds += 1
    return {"seed": seed, "largest": largest, "same bits": dict(problems.done)}


def repeats():
    """Repeat an exchange and a weighted sum with norms, and count the different results by their hashes."""
    n, calls = (3_000_017, 100) if REAL else (20_017, 3)
    rng = np.random.default_rng(11)
    ys = [Placed(rng.normal(size=n).astype(np.float32)) for _ in range(6)]
    acc, out, mean = Placed(rng.normal(size=n)), Placed(np.zeros(n)), Placed(np.zeros(n, np.float32))
    rows = [(Placed(np.zeros(n, np.int8)), Placed(np.zeros(-(-n // 64), np.float32))) for _ in ys]
    new, sent, none = [Codes("int8", *(part.array for part in row)) for row in rows], [y.array for y in ys], [None] * 6
    keys, ones = np.arange(12, dtype=np.uint64).reshape(6, 2), np.ones(6)
    found, beside = set(), other_work()
    for _ in range(calls):
        beside()
        squares = kernels.exchange(
            acc.array, [sent[0]] * 6, sent, 0.3 * ones, ones, none, none, new, out=out.array, keys=keys
        )
        summed = kernels.weighted_sum(sent, [0.1] * 6, mean.array, norms=True)
        parts = [
            squares,
            summed.squared_norms,
            *(one.numpy() for one in (out, mean, *(p for row in rows for p in row))),
        ]
        found.add(hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest())
    return {"calls": calls, "different results": len(found)}


def other_work():
    """Return a function that keeps the GPU busy on a separate stream."""
    if not REAL:
        return lambda: None
    import torch

    stream, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")

    def multiply():
        with torch.cuda.stream(stream):
            matrix @ matrix

    return multiply


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--largest", type=float, default=3e6, help="elements of all arrays of one problem")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--repeats", action="store_true")
    chosen = parser.parse_args()
    if chosen.repeats:
        found = repeats()
        print(json.dumps(found))
        sys.exit(found["different results"] != 1)
    print(json.dumps(parity(chosen.seconds, int(chosen.largest), chosen.seed)))


if __name__ == "__main__":
    main()
