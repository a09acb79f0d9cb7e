"""Arrays for the kernels' tests, and comparisons of bits."""

import numpy as np
import torch

from fedcore.kernels import Codes, ExactSum, Terms
from tests import oracle

CODECS = ["f32", "bf16", "f16", "int8"]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
# The forms of MimiC, SCAFFOLD and FedStale, and one with every coefficient.
FORMS = {
    "replaced": dict(row=Terms(h=1), adds=Terms(row=1, r=-1, q=1)),
    "control": dict(row=Terms(h=1, r=1, q=1), adds=Terms(row=1, r=-1)),
    "stale": dict(row=Terms(h=1), adds=Terms(row=1, r=-0.3)),
    "general": dict(row=Terms(h=0.7, r=0.25, q=-2), adds=Terms(row=0.75, r=-0.5, h=0.3, q=1.25)),
}
LOW = 1 << 50  # the low word of an exact sum is below it
SPECIALS = [np.nan, np.inf, -np.inf, -0.0, 1e-42, -1e-45, 3e38, -3e38]
# The powers of ten of "all sizes", within the range of sums in this dtype.
SIZES = {"float16": (-9, 2), "float64": (-300, 290), "float32": (-44, 36), "bfloat16": (-44, 36)}
KINDS = {"usual": 1.0, "tiny": 1e-40, "huge": 1e30, "all sizes": 1.0, "special": 1.0}


class Numbers:
    """Seeded arrays of n numbers of one of ``KINDS``."""

    def __init__(self, n, seed=0, kind="usual"):
        self.n, self.kind, self.rng = n, kind, np.random.default_rng([n, seed])

    def __call__(self, dtype="float32", n=None):
        x = self.rng.normal(size=self.n if n is None else n) * KINDS[self.kind]
        if self.kind == "all sizes":
            x *= 10.0 ** self.rng.integers(*SIZES[dtype], size=len(x))
        if self.kind == "special" and len(x):
            x[self.rng.integers(len(x), size=1 + len(x) // 9)] = self.rng.choice(SPECIALS)
        return converted(x, dtype)

    def many(self, k, dtype="float32"):
        return [self(dtype) for _ in range(k)]


def vectors(k, n, seed=0):
    return Numbers(n, seed).many(k)


def converted(x, dtype):
    """Return numbers in a dtype, of torch if NumPy lacks it."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.asarray(x)).bfloat16() if dtype == "bfloat16" else np.asarray(x).astype(dtype)


def empty(shape, dtype):
    """Return memory with arbitrary contents."""
    return converted(np.full(shape, 7.0), dtype)


def empty_row(codec, n):
    if codec == "f32":
        return np.full(n, np.nan, np.float32)
    scales = np.empty(-(-n // 64), np.float32) if codec == "int8" else None
    return Codes(codec, np.empty(n, np.int8 if codec == "int8" else np.uint16), scales)


def random_keys(k, seed):
    return np.random.default_rng(seed).integers(0, 2**64, (k, 2), np.uint64)


def exact(n):
    """Return memory for an exact sum, with arbitrary contents."""
    return ExactSum(np.full(n, 7), np.full(n, 7))


def bits(array):
    """Return every number as an integer; bfloat16 is a torch tensor."""
    if isinstance(array, torch.Tensor):
        return (array.view(torch.int16) if array.dtype == torch.bfloat16 else array).numpy()
    return array.view(f"i{array.itemsize}")


def assert_same_bits(array, due):
    """Assert the same dtype, shape and bits, except that NaNs may differ in their bits.

    Where an operation has two NaN, the processor takes the sign and payload of the first operand. Which one is first
    depends on how NumPy's loops split an array, and so on its alignment.
    """
    assert array.dtype == due.dtype
    number, nan = oracle.numbers(due), np.isnan(oracle.numbers(due))
    np.testing.assert_array_equal(np.isnan(oracle.numbers(array)), nan)
    assert number.shape == tuple(array.shape)
    np.testing.assert_array_equal(bits(array)[~nan], bits(due)[~nan])
