"""The same bits on every instruction-set level, number of threads, address, and on every call."""

import os
import subprocess
import sys

import pytest

import fedcore
from fedcore import _core
from tests.kernels.arrays import FORMS

LEVELS = ["baseline", "avx2", "avx512"]
LEVELS = LEVELS[: LEVELS.index(_core.best_isa()) + 1]

DIGEST = """
import hashlib, os, sys
import numpy as np
import ml_dtypes
import fedcore
from fedcore import kernels, sampling
from fedcore.kernels import Linear, Terms
from fedcore.store import checksums

# The digest of every function's results on arrays of those lengths, at the addresses that place() chooses.
def digest_of(lengths, place=lambda array: array):
    rng = np.random.default_rng(5)
    digest = hashlib.sha256()
    for n in lengths:
        noise, starts = rng.normal(size=n + 64).astype(np.float32), iter(range(64))
        vector = lambda: place(noise[next(starts) :][:n].copy())  # every vector starts elsewhere in the noise
        ys, old, anchors = ([vector() for _ in range(9)] for _ in range(3))
        new, x, v, x_out = [place(np.empty(n, np.float32)) for _ in range(9)], vector(), vector(), vector()
        acc, total, out, total_out = (place(array) for array in (*rng.normal(size=(2, n)), np.empty(n), np.empty(n)))
        scales, weights = rng.random(9), rng.random(9)
        partials = np.empty((-(-n // 16_384), 9))
        digest.update(kernels.squared_norms(ys, partials=partials))
        digest.update(partials)
        digest.update(kernels.weighted_sum(ys, weights.astype(np.float32), place(np.empty(n, np.float32))))
        digest.update(kernels.weighted_sum(ys, weights.astype(np.float32), accumulate="float64"))
        for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
            every = [y[:40_001].astype(dtype) for y in ys]
            every[0][::3] *= 1e-6  # subnormal in float16
            own = every[0] * 0
            for base in (None, x[:40_001]):
                for precision in ("float32", "float64"):
                    options = dict(base=base, accumulate=precision)
                    summed = kernels.weighted_sum(every, weights.astype(np.float32), own, norms=True, **options)
                    for array in (own.view(np.int16) if dtype == ml_dtypes.bfloat16 else own, summed.squared_norms):
                        digest.update(array)
                    digest.update(np.array(summed.squared_norm_of_sum))
                    digest.update(kernels.weighted_sum(every, weights.astype(np.float32), **options))
        for sums in (out, place(np.empty(n, np.float32))):
            bases = [x] * 5 + [None] + [x] * 3  # four at once, and one by one
            given = place(acc.astype(sums.dtype)), bases, ys, scales, weights
            digest.update(kernels.accumulate(*given, out=sums, partials=partials))
            digest.update(partials)
            digest.update(sums)
        mixed = [np.float16, np.float64, np.float32] * 3
        mixed = [y.astype(dtype) for y, dtype in zip(ys, mixed)]
        keys = np.arange(18, dtype=np.uint64).reshape(9, 2)
        digest.update(kernels.accumulate(acc, [x] * 9, mixed, scales, weights, out=out))
        given = [x] * 8 + [None], mixed, scales
        digest.update(kernels.gram_matrix(*given))
        for mixing in (None, rng.random((4, 9))):
            for function, number in ((kernels.trimmed_mean, 1), (kernels.mean_near_median, 3)):
                digest.update(function(*given, number, out=place(np.empty(n, np.float32)), mixing=mixing))
        for form in ("replaced", "control", "stale", "general"):
            given = acc, [x] * 9, ys, scales, weights, old, anchors, new
            sums = np.zeros((9, -(-n // 16_384)), np.uint64)
            digest.update(kernels.exchange(*given, out=out, **FORMS[form], sums=sums))
            digest.update(out)
            digest.update(sums)
            for row in new:
                digest.update(row)
        for codes in (False, True):
            words = [place(np.full(n, 3)) for _ in range(4)]
            sum, spare = kernels.ExactSum(*words[:2]), kernels.ExactSum(*words[2:])
            digest.update(kernels.accumulate(sum, bases, mixed if codes else ys, scales, weights, out=spare))
            for form in ("replaced", "general"):
                made = [kernels.quantise(row, "int8") for row in old] if codes else new
                given = sum, [x] * 9, ys, scales, weights, old, anchors, made
                digest.update(kernels.exchange(*given, out=spare, keys=keys, **FORMS[form]))
                kernels.combine_exact([sum, spare, ys[0]], [1, -2, 5], sum)
                for word in (*sum, *spare, kernels.read_exact(sum)):
                    digest.update(word)
        none = [None] * 9
        for codec in ("bf16", "f16", "int8"):
            for form, at in (("replaced", anchors), ("replaced", none), ("control", anchors), ("general", anchors)):
                coded, kept = [kernels.quantise(row, codec) for row in old], dict(out=out, **FORMS[form], keys=keys)
                kept |= dict(first=64 * n, partials=partials)
                digest.update(kernels.exchange(acc, [x] * 9, mixed, scales, weights, coded, at, coded, **kept))
                digest.update(partials)
                digest.update(out)
                for row in coded:
                    digest.update(kernels.dequantise(row))
        step = dict(v_of=Linear(A=.1, B=.8, T=.2, g=.6), total_of=Linear(A=.3, B=.7, T=.9, g=.8, v=.4), gamma=.5)
        step |= dict(momentum=ys[3], control=acc)
        squares = kernels.server_step(out, total, x, v=v, total_out=total_out, x_out=x_out, **step)
        digest.update(np.array(squares))
        for array in (v, total_out, x_out):
            digest.update(array)
        vectors = dict(grad_prev=ys[1], offset=ys[2], x=x)
        kernels.direction_step(v, ys[0], lr=.1, a=.2, b=.3, mu=.4, weight_decay=.5, **vectors)
        digest.update(v)
        digest.update(checksums(total, 65_536))
        for sums in (place(np.empty(n, np.float32)), place(np.empty(n))):
            digest.update(kernels.combine([total, ys[0], ys[1]], [.1, .2, .3], sums))
        digest.update(np.array(kernels.combined_square([total, ys[0], ys[1]], [.1, .2, .3])))
        for rule in (dict(from_square=.1), dict(from_square=.3, yogi=True), None):
            m_out, s_out = place(np.empty(n, np.float32)), None if rule is None else place(np.empty(n, np.float32))
            moments = dict(m_out=m_out, s_out=s_out, x_out=x_out, from_m=.9, from_v=.1, gamma=.5)
            second = None if rule is None else ys[2] * ys[2]
            square = kernels.optimizer_step(ys[0], ys[1], second, x, **moments, **(rule or {}))
            for array in (m_out, x_out, np.array(square)) + (() if rule is None else (s_out,)):
                digest.update(array)
        kernels.mix(new, rng.normal(size=(9, 9)) * (rng.random((9, 9)) < .7))
        for row in new:
            digest.update(row)
        old[0][::3] *= np.float32(1e-6)  # subnormal in f16
        for codec, dtype in (("bf16", np.uint16), ("f16", np.uint16), ("int8", np.int8)):
            for seed in (None, 7):
                coded = kernels.Codes(codec, place(np.empty(n, dtype)))
                if codec == "int8":
                    coded = coded._replace(scales=place(np.empty(-(-n // 64), np.float32)))
                kernels.quantise(old[0], codec, coded, seed=seed, row=n, first=128 * n)
                digest.update(coded.codes)
                digest.update(kernels.dequantise(coded, place(np.empty(n, np.float32))))
    for codes in (np.arange(2**16).astype(np.uint16).view(np.float16), np.full(999, np.inf, np.float16)):  # all codes
        digest.update(kernels.weighted_sum([codes], [1]))
        digest.update(kernels.dequantise(kernels.Codes("f16", codes)))
    draw = dict(seed=1, round=2)
    weights = place(rng.exponential(size=70_001))
    digest.update(sampling.without_replacement(10**6, 3000, **draw))
    digest.update(sampling.weighted_without_replacement(weights, 3000, **draw))
    digest.update(sampling.with_replacement(weights, 40_000, **draw))
    digest.update(sampling.bernoulli(300_001, .3, **draw))
    digest.update(sampling.permutation(70_001, **draw))
    return digest.hexdigest()

LENGTHS = (1, 17, 5000, 16385, 500_003)
"""

PROGRAM = (
    f"{DIGEST}\nFORMS = {FORMS!r}\n"  # written out, because tests.kernels.arrays imports torch
    + """
PAGE = 4096
count = 0

# Puts arrays `offset` bytes behind a page, each `apart` more than the one before, into memory of their own.
def at(offset, apart):
    def place(array):
        global count
        count += 1
        shift = (offset + count * apart) // array.itemsize * array.itemsize % (2 * PAGE)
        memory = np.empty(array.nbytes + 4 * PAGE, np.uint8)
        start = -memory.ctypes.data % PAGE + shift
        placed = memory[start : start + array.nbytes].view(array.dtype)
        assert placed.ctypes.data % PAGE == shift % PAGE
        placed[:] = array
        return placed
    return place

DAY = sys.argv[1] == "day"
print(fedcore.isa())
for threads in (1, 7) if DAY else (1, 2, 3, 7, 1):
    fedcore.set_threads(threads)
    print("long", digest_of(LENGTHS))
    if "FEDCORE_TILING" in os.environ:
        sys.exit()
fedcore.set_threads(7)
for offset, apart in ((4, 12),) if DAY else ((4, 12), (60, 20)):
    print("long", digest_of(LENGTHS, at(offset, apart)))
fedcore.set_threads(3)
SHORT = LENGTHS[:-1]
print("short", digest_of(SHORT))
for offset in range(0, 64, 28 if DAY else 4):  # all arrays at one offset
    print("short", digest_of(SHORT, at(offset, 0)))
for apart in (4, 12, 20, 60, 68, 4092):  # all arrays at different offsets
    print("short", digest_of(SHORT, at(0, apart)))
print("short", digest_of(SHORT))
"""
)


def start(code, *words, **environment):
    command, pipes = [sys.executable, "-c", code, *words], dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, env=os.environ | environment, text=True, **pipes)


@pytest.fixture(scope="module", params=["day", pytest.param("night", marks=pytest.mark.endurance)])
def digests(request):
    """The digests of each level, and of the best level with two forced tilings, from processes that run at once."""
    keys = [(level, "") for level in LEVELS] + [(LEVELS[-1], tiling) for tiling in ("4x65536", "3x32768")]
    processes = {
        (level, tiling): start(
            PROGRAM, request.param, FEDCORE_ISA=level, **{"FEDCORE_TILING": tiling} if tiling else {}
        )
        for level, tiling in keys
    }
    found = {}
    for (level, tiling), process in processes.items():
        out, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
        active, *lines = out.splitlines()
        assert active == level
        found[level, tiling] = lines
    return found


def of_kind(digests, kind):
    """The digests of all levels that have the kind's lengths."""
    return [line for level in LEVELS for line in digests[level, ""] if line.startswith(kind)]


def test_every_level_and_thread_count_gives_the_same_bits(digests):
    """On 1, 2, 3, 7 and again 1 threads, and on 7 at two other addresses, on every level; by day, some of these."""
    lines = of_kind(digests, "long")
    assert len(lines) in (3 * len(LEVELS), 7 * len(LEVELS))
    assert len(set(lines)) == 1


def test_every_tiling_gives_the_same_bits(digests):
    """Calls on arrays in memory try several tilings; a forced tiling also applies to arrays in the caches."""
    expected = digests[LEVELS[-1], ""][0]
    for tiling in ("4x65536", "3x32768"):
        assert digests[LEVELS[-1], tiling] == [expected]


def test_every_address_gives_the_same_bits(digests):
    """A loop that first takes single elements up to an aligned address must round them alike."""
    lines = of_kind(digests, "short")
    assert len(lines) in (11 * len(LEVELS), 24 * len(LEVELS))
    assert len(set(lines)) == 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        *(({"FEDCORE_TILING": wrong}, "FEDCORE_TILING") for wrong in ("9x16384", "4x1000", "4", "4x65536 ")),
        ({"FEDCORE_ISA": "avx1024"}, "FEDCORE_ISA"),
    ],
)
def test_a_variable_with_a_wrong_value_is_an_error(environment, expected):
    code = "import numpy, fedcore; fedcore.kernels.weighted_sum([numpy.ones(4)], [1.0])"
    process = start(code, **{"FEDCORE_ISA": LEVELS[-1]} | environment)
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert expected in errors
    assert environment[expected].strip() in errors


@pytest.mark.parametrize("count", [0, -1, 5000])
def test_thread_counts_out_of_range_are_refused(count):
    before = fedcore.threads()
    with pytest.raises(fedcore.errors.RangeError, match=r"count=.*: must be an integer in 1\.\.4096"):
        fedcore.set_threads(count)
    assert fedcore.threads() == before
