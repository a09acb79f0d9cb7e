"""Look for bytes on which the `.npy` reader does not do what it says: ``python -m tests.adapters.fuzz_npy 600``.

Its arguments are how many seconds, and a seed. It ends with the first such bytes, or with how many it has tried.
"""

import random
import sys
import time

import numpy as np

from tests.adapters.test_npy import check, saved

WORDS = [
    b"'descr': ",
    b"'<f4'",
    b"'<V2'",
    b"'|O8'",
    b"'shape': ",
    b"(",
    b")",
    b",",
    b", ",
    b"0",
    b"1",
    b"9" * 19,
    b"True",
    b"\n",
    b" ",
    b"}",
]


def mutated(rng, seeds):
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randrange(6)):
        at = rng.randrange(min(len(data), 140) + 1)
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.randrange(1, 20)]
        elif kind == 2:
            data[at:at] = rng.choice(WORDS)
        elif kind == 3:
            word = rng.choice(WORDS)
            data[at : at + len(word)] = word
        else:
            data[at:at] = rng.randbytes(rng.randrange(9))
        if rng.randrange(2) and len(data) > 10:  # so that headers of another length are parsed too
            end = data.find(b"\n", 10)
            data[8:10] = ((end - 9) if end > 0 else rng.randrange(2**16)).to_bytes(2, "little")
    return bytes(data)


def main(seconds, seed=0):
    rng, end, tried, taken = random.Random(seed), time.monotonic() + seconds, 0, 0
    shapes = [(), (0,), (3,), (2, 3), (2, 0, 2), (1,) * 8]
    seeds = [
        saved(np.zeros(shape, dtype)) for shape in shapes for dtype in ("f4", "f8", "f2", "i8", "u1", "V2", "c8", "?")
    ]
    while time.monotonic() < end:
        for _ in range(1000):
            data = mutated(rng, seeds)
            try:
                taken += check(data, rng.random() < 0.5)
            except BaseException:
                print(f"after {tried} inputs: {data!r}")
                raise
            tried += 1
    print(f"{tried} inputs, of which {taken} are arrays: no finding")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
