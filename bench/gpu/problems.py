"""Random problems for every kernel, solved on the CPU and on the GPU, whose bits must be equal.

Outputs initially hold garbage, which differs between the two sides. Sizes are at the edges of tiles and pieces, and
arrays start at arbitrary addresses.
"""

from collections import Counter

import numpy as np
import torch

from bench.gpu.arrays import Placed, placed
from fedcore import kernels
from fedcore.kernels import Codes, ExactSum

EDGES = [1, 31, 63, 64, 65, 2047, 2048, 2049, 16383, 16384, 16385]
FLOATS = ["float32", "float64", "float16", "bfloat16"]
KINDS = ["usual", "subnormal", "large", "special"]


class Problems:
    """A stream of problems.

    Args:
        largest: the approximate number of elements of all arrays of a problem.
        seed: the seed of the problems.
    """

    def __init__(self, largest, seed):
        self.rng, self.largest, self.done = np.random.default_rng(seed), largest, Counter()
        self._garbage = set()

    def some(self, most):
        return int(self.rng.integers(1, most + 1))

    def chance(self, p):
        return bool(self.rng.random() < p)

    def size(self, arrays=1):
        """Return the number of elements of each of ``arrays`` arrays."""
        most = max(2, self.largest // arrays)
        edges = [n for n in EDGES if n <= most]
        drawn = self.rng.choice(edges) if edges and self.chance(0.5) else np.exp(self.rng.uniform(0, np.log(most)))
        return int(drawn)

    def numbers(self, n, dtype="float32", kind="usual"):
        values = self.rng.normal(size=n)
        if kind == "subnormal":
            values *= self.rng.choice([1e-39, 1e-42, 1], n)
        if kind == "large":
            values *= 3e24
        if kind == "special":
            at = self.rng.random(n)
            values[at < 1e-3] = np.inf
            values[at > 1 - 1e-3] = np.nan
        with np.errstate(all="ignore"):
            if dtype == "bfloat16":
                return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)
            return values.astype(dtype)

    def row(self, codec, n, kind="usual"):
        values = self.numbers(n, "float32", kind)
        return values if codec == "f32" else kernels.quantise(values, codec, seed=self.some(99))

    def poisoned(self, n, dtype="float32"):
        """Return an output that holds garbage, which differs from the garbage on the device."""
        array = self.rng.integers(0, 256, n * np.dtype(dtype).itemsize, np.uint8).view(dtype)
        self._garbage.add(id(array))
        return array

    def sum(self, n, dtype):
        """Return a sum of the dtype, or of int64 an exact one."""
        if dtype != "int64":
            return self.numbers(n, dtype)
        return ExactSum(self.rng.integers(-(2**40), 2**40, n), self.rng.integers(0, 2**50, n))

    def poisoned_sum(self, n, dtype):
        return self.poisoned(n, dtype) if dtype != "int64" else ExactSum(*(self.poisoned(n, dtype) for _ in range(2)))

    def place(self, array):
        here = (array.view(np.uint8) ^ 0xFF).view(array.dtype) if id(array) in self._garbage else array
        return Placed(here, self.some(7) if self.chance(0.2) else 0, own=self.chance(0.3))

    def compare(self, name, run, arrays, outputs, worthless=lambda due: {}):
        """Solve a problem on both sides, and compare the bits.

        Args:
            run: a function of the arrays by name, which returns numbers or None.
            arrays: the arrays, lists of arrays and codes by name.
            outputs: the names of the arrays that are written.
            worthless: a function from the returned numbers to the outputs without meaning: names, or (name, index).
        """
        known = {}
        there = placed(arrays, self.place, known)
        self._garbage.clear()
        with np.errstate(all="ignore"):
            due = run(arrays)
            found = run(there)
        if due is not None:
            found, due = np.float64(found), np.float64(due)
            whole = np.isfinite(due)  # the kind of a non-finite length is unspecified
            np.testing.assert_array_equal(np.isfinite(found), whole, err_msg=f"{name}: what it returns")
            same(f"{name}: what it returns", found[whole], due[whole])
        skipped = worthless(due)
        for output in outputs:
            if output in skipped:
                continue
            for number, array in enumerate(leaves(arrays[output])):
                if (output, number) not in skipped:
                    same(f"{name}: {output}", known[id(array)][1].numpy(), array)
        self.done[name] += 1


def leaves(tree):
    """Return the arrays of a tree in order."""
    if tree is None:
        return []
    if isinstance(tree, ExactSum):
        return [*tree]
    if isinstance(tree, Codes):
        return [part for part in tree[1:] if part is not None]
    if isinstance(tree, list):
        return [array for part in tree for array in leaves(part)]
    return [tree]


def same(what, found, due):
    """Assert that two results have equal bits; any two NaNs count as equal."""
    if isinstance(due, torch.Tensor):
        due = due.view(torch.int16).numpy().view(np.uint16)
        found, due = ((array.astype(np.uint32) << 16).view(np.float32) for array in (found, due))
    nan = np.isnan(due) if due.dtype.kind == "f" else np.zeros(due.shape, bool)
    if due.dtype.kind == "f":
        np.testing.assert_array_equal(np.isnan(found), nan, err_msg=what)
    whole = f"u{due.dtype.itemsize}"
    np.testing.assert_array_equal(found.view(whole)[~nan], due.view(whole)[~nan], err_msg=what)
