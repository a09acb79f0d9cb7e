"""Kernels work in threads with small stacks, such as musl's."""

import pytest

from fedcore import _core
from tests.kit import python

LEVELS = ["baseline", "avx2", "avx512"]
LEVELS, LONG = LEVELS[: LEVELS.index(_core.best_isa()) + 1], pytest.mark.endurance
KIB = 64  # half of what musl gives; Python and NumPy themselves need some of it

EVERY_CALL = """
import itertools, threading
import ml_dtypes
import numpy as np
import fedcore
from fedcore import kernels, sampling
from fedcore.store import checksums
from tests.kernels.calls import CALLS
from tests.kernels.arrays import FORMS

FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
N = 40_001

def sums():
    rng = np.random.default_rng(1)
    numbers = [rng.normal(size=N) for _ in range(9)]
    numbers[0][:5] = 1e30  # squares that float32 does not hold
    x, weights, none = np.ones(N, np.float32), rng.random(9), [None] * 9
    keys = np.arange(18, dtype=np.uint64).reshape(9, 2)
    for dtype, base, precision in itertools.product(FLOATS, (None, x), ("float32", "float64")):
        rows = [array.astype(dtype) for array in numbers]
        for out in {np.float32, dtype}:
            kernels.weighted_sum(
                rows, weights.astype("f"), np.empty(N, out), base=base, accumulate=precision, norms=True
            )
    for dtype, base, total in itertools.product(FLOATS, (None, x), (np.float32, np.float64)):
        ys = [array.astype(dtype) for array in numbers]
        kernels.accumulate(np.zeros(N, total), [base] * 9, ys, np.ones(9), weights, out=np.empty(N, total))
    codecs = ("f32", "bf16", "f16", "int8")
    for dtype, codec, form, anchor in itertools.product(FLOATS, codecs, FORMS, (None, x)):
        ys = [array.astype(dtype) for array in numbers]
        old = [np.ones(N, np.float32) if codec == "f32" else kernels.quantise(x, codec) for _ in ys]
        for new in (old, [np.ones(N, np.float32) for _ in ys]):
            arguments = (np.zeros(N), [x] * 9, ys, np.ones(9), weights, old, [anchor] * 9, new)
            kernels.exchange(*arguments, out=np.empty(N), **FORMS[form], keys=keys)

def others():
    for name, call in CALLS.items():
        call.run(call.arrays(N))
    sampling.without_replacement(10**6, 3000, seed=1, round=1)
    sampling.bernoulli(N, 0.5, seed=1, round=1)
    sampling.permutation(N, seed=1, round=1)
    checksums(np.ones(N), 4096)
    fedcore.aggregate([{"w": np.ones(N, np.float32)}, {"w": np.ones(N, np.float32)}])

def on_a_small_stack(work):
    done = []
    def run():
        with np.errstate(all="ignore"):
            done.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done, work

with np.errstate(all="ignore"):
    others()  # imports and caches of the first call
    sums()
    threading.stack_size(KIB * 1024)
    fedcore.set_threads(1)
    on_a_small_stack(sums)
    on_a_small_stack(others)
print("done")
"""


@pytest.mark.parametrize("level", [LEVELS[-1], *(pytest.param(each, marks=LONG) for each in LEVELS[:-1])])
def test_every_kernel_on_a_small_stack(level):
    code = EVERY_CALL.replace("KIB", str(KIB))
    assert python("-c", code, FEDCORE_ISA=level).stdout.strip() == "done"
