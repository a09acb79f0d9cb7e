"""Weighted sums, their norms, and sums of mean gradients, beyond the comparison with the oracle."""

import array
import ctypes
import dataclasses
import math

import numpy as np
import pytest
import torch

from fedcore import errors, kernels
from tests import oracle
from tests.kernels.arrays import DTYPES, Numbers, assert_same_bits, bits, vectors


def test_weighted_sum_of_no_rows_is_zero():
    out = np.ones(5, np.float32)
    assert kernels.weighted_sum([], [], out=out) is out
    np.testing.assert_array_equal(out, np.zeros(5))


def test_tensors_buffers_and_unaligned_rows_are_not_copied():
    rows = vectors(3, 1001)
    due = kernels.weighted_sum(rows, [1, 2, 3])
    tensors = [torch.from_numpy(row) for row in rows]
    out = torch.empty(1001)
    assert kernels.weighted_sum(tensors, torch.tensor([1.0, 2.0, 3.0]), out=out) is out
    np.testing.assert_array_equal(out.numpy(), due)  # written into torch's own memory
    views = [memoryview(row.tobytes()).cast("f") for row in rows]
    np.testing.assert_array_equal(kernels.weighted_sum(views, [1, 2, 3]), due)
    for offset in range(4, 64, 4):
        moved = []
        for row in rows:
            memory = np.empty(4 * 1001 + offset, np.uint8)
            memory[offset:] = row.view(np.uint8)
            moved.append(memory[offset:].view(np.float32))
        np.testing.assert_array_equal(kernels.weighted_sum(moved, [1, 2, 3]), due)


def test_a_float64_sum_of_a_thousand_rows_is_right_to_the_last_bit_but_one():
    rows, weights = vectors(1000, 301), vectors(1, 1000, seed=1)[0]
    due = np.array([math.fsum(np.float64(weights) * np.float64([row[j] for row in rows])) for j in range(301)])
    sums = kernels.weighted_sum(rows, weights, accumulate="float64")
    assert (np.abs(sums - due) <= np.spacing(np.abs(due).astype(np.float32))).all()
    assert np.abs(kernels.weighted_sum(rows, weights) - due).max() > np.abs(sums - due).max()


class Exporter:
    """Exports a given DLPack capsule."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule


def test_an_unnamed_capsule_and_a_tensor_with_an_offset():
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    memory = ctypes.create_string_buffer(256)
    for capsule in (new(ctypes.addressof(memory), None, None), 7):
        with pytest.raises(errors.ArrayError, match=r"rows\[0\]: .*DLPack capsule"):
            kernels.squared_norms([Exporter(capsule)])
    offset = torch.arange(10, dtype=torch.float32)[4:7]
    np.testing.assert_array_equal(kernels.weighted_sum([offset], [1]), [4, 5, 6])


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_code_is_read_and_written_exactly(dtype, accumulate):
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(getattr(torch, dtype))
    due = torch.add(codes.float(), 0).numpy()  # a sum has no negative zero
    assert_same_bits(kernels.weighted_sum([codes], [1], accumulate=accumulate), due)
    out = torch.empty_like(codes)
    kernels.weighted_sum([codes], [1], out, accumulate=accumulate)
    assert_same_bits(out.float().numpy(), due)


@pytest.mark.parametrize(("dtype", "lost"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_a_float64_sum_is_rounded_once(dtype, lost):
    """1 plus half a unit is a tie, which a term below float32's precision decides either way."""
    row = getattr(torch, dtype)
    for least in (2.0**-24, -(2.0**-24), 0):
        parts = [torch.tensor([part], dtype=row) for part in (1, lost, 1)]
        out = torch.empty(1, dtype=row)
        kernels.weighted_sum(parts, [1, 1, least * 2.0**-16], out, accumulate="float64")
        assert out.item() == (1 + 2 * lost if least > 0 else 1)


def test_the_dtype_of_a_sum_without_out():
    for dtype in DTYPES:
        for accumulate in ("float32", "float64"):
            kept = "float64" if dtype == accumulate == "float64" else "float32"
            row = torch.ones(3, dtype=getattr(torch, dtype))
            assert kernels.weighted_sum([row], [1], accumulate=accumulate).dtype == kept
            assert kernels.weighted_sum_segments([[row]], [1], accumulate=accumulate)[0].dtype == kept
            if dtype != "bfloat16":
                assert kernels.weighted_sum([row.numpy()], [1], accumulate=accumulate).dtype == kept
                view = memoryview(row.numpy().tobytes()).cast({"float32": "f", "float64": "d"}.get(dtype, "B"))
                if view.format != "B":
                    buffer = array.array(view.format, view)
                    assert kernels.weighted_sum([buffer], [1], accumulate=accumulate).dtype == kept
                    assert kernels.weighted_sum([view], [1], accumulate=accumulate).dtype == kept


def test_float64_keeps_what_float32_would_lose():
    large, close = np.array([1e300]), np.array([1 + 2.0**-50])
    assert kernels.weighted_sum([large, close], [1e-300, 1], accumulate="float64")[0] == 1e300 * 1e-300 + close[0]
    one = [np.ones(1)]
    assert kernels.weighted_sum(one, [1 / 3], accumulate="float64")[0] == 1 / 3
    assert kernels.weighted_sum(one, np.array([1 / 3]), accumulate="float64")[0] == 1 / 3
    assert kernels.weighted_sum(one, np.float32([1 / 3]), accumulate="float64")[0] == np.float32(1 / 3)
    assert kernels.weighted_sum(one, [1 / 3])[0] == np.float32(1 / 3)
    with np.errstate(over="ignore"):
        assert kernels.weighted_sum([large], [1])[0] == np.inf  # read as float32


def test_halves_come_through_the_buffer_protocol():
    rows = [np.random.default_rng(i).normal(size=100).astype(np.float16) for i in range(3)]
    views = [memoryview(row) for row in rows]
    np.testing.assert_array_equal(kernels.weighted_sum(views, [1, 2, 3]), kernels.weighted_sum(rows, [1, 2, 3]))


def test_bfloat16_arrays_of_ml_dtypes_are_those_of_torch():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes, NumPy's bfloat16, is not installed")
    tensors = [Numbers(1001, i, "all sizes")("bfloat16") for i in range(9)]
    arrays = [tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) for tensor in tensors]
    weights = np.linspace(-1, 1, 9, dtype=np.float32)
    np.testing.assert_array_equal(kernels.weighted_sum(arrays, weights), kernels.weighted_sum(tensors, weights))
    out, due = np.empty(1001, ml_dtypes.bfloat16), torch.empty(1001, dtype=torch.bfloat16)
    kernels.weighted_sum(arrays, weights, out)
    kernels.weighted_sum(tensors, weights, due)
    np.testing.assert_array_equal(out.view(np.int16), bits(due))
    oracle.weighted_sum(arrays, weights, out, float64=False)
    np.testing.assert_array_equal(out.view(np.int16), bits(due))


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 33, 2047, 2048, 2049, 16_385, 70_001])
def test_norms_have_the_bits_of_squared_norms(n):
    rows, weights = vectors(9, n), np.linspace(-1, 2, 9, dtype=np.float32)
    rows[3] *= np.float32(1e25)  # beyond what lanes of float32 hold
    rows[4] *= np.float32(1e-25)
    summed = kernels.weighted_sum(rows, weights, norms=True)
    np.testing.assert_array_equal(summed.squared_norms, kernels.squared_norms(rows))
    assert summed.squared_norm_of_sum == kernels.squared_norms([summed.sum])[0]
    halves = Numbers(n).many(9, "bfloat16")
    wide = kernels.squared_norms([row.float() for row in halves])
    np.testing.assert_array_equal(kernels.weighted_sum(halves, weights, norms=True).squared_norms, wide)
    x = vectors(1, n, seed=1)[0]
    differences = kernels.squared_norms([x - row for row in rows])
    np.testing.assert_array_equal(kernels.weighted_sum(rows, weights, base=x, norms=True).squared_norms, differences)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_is_found_anywhere(dtype, bad):
    for where in (0, 15, 16, 2047, 2048, 16_384, 16_999):
        rows = Numbers(17_000).many(9, dtype)
        rows[8][where] = bad
        np.testing.assert_array_equal(kernels.weighted_sum(rows, [1] * 9, norms=True).finite, [True] * 8 + [False])
        base = np.zeros(17_000, np.float32)
        base[where] = bad
        assert not kernels.weighted_sum(Numbers(17_000).many(2, dtype), [1, 1], base=base, norms=True).finite.any()


def test_norms_of_float64_rows_up_to_overflow():
    rows = [np.array([1e100, 1]), np.array([1e-100, 0]), np.array([1e200, 0])]
    summed = kernels.weighted_sum(rows, [1, 1, 1e-150], accumulate="float64", norms=True)
    np.testing.assert_allclose(summed.squared_norms, [1e200, 1e-200, np.inf])
    assert summed.squared_norm_of_sum == pytest.approx(1e200)
    np.testing.assert_array_equal(summed.finite, [True, True, False])
    with np.errstate(over="ignore"):
        assert not kernels.weighted_sum(rows, [1, 1, 1], norms=True).finite[0]  # read as float32 it is infinite


def test_norms_of_16_bit_sums_are_those_before_rounding():
    rows = [np.full(100, 60_000, np.float16), np.full(100, 60_000, np.float16)]
    summed = kernels.weighted_sum(rows, [1, 1], np.empty(100, np.float16), norms=True)
    assert np.isinf(summed.sum).all()
    assert summed.squared_norm_of_sum == pytest.approx(100 * 120_000.0**2)


def test_no_rows_and_no_elements():
    summed = kernels.weighted_sum([], [], np.ones(3, np.float32), norms=True)
    assert summed.squared_norms.shape == (0,)
    assert summed.squared_norm_of_sum == 0
    assert summed.diversity is None
    empty = kernels.weighted_sum([np.empty(0, np.float16)] * 2, [1, 1], norms=True)
    np.testing.assert_array_equal(empty.squared_norms, [0, 0])
    assert empty.diversity is None


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_diversity_matches_the_paper(accumulate):
    """Haddadpour and Mahdavi 2019, eq. 7, in float64."""
    gradients, counts = np.random.default_rng(0).normal(size=(7, 500)).astype(np.float32), np.arange(1, 8.0)
    q = counts / counts.sum()
    due = q @ np.square(gradients, dtype=np.float64).sum(1) / np.square(q @ gradients.astype(np.float64)).sum()
    for weights in (counts, q, -q):  # it does not depend on the weights' scale
        summed = kernels.weighted_sum(list(gradients), list(weights), accumulate=accumulate, norms=True)
        assert summed.diversity == pytest.approx(due, rel=1e-5)
    alike = kernels.weighted_sum([gradients[0]] * 5, [0.2] * 5, accumulate=accumulate, norms=True)
    assert alike.diversity == pytest.approx(1, rel=1e-5)


def test_undefined_diversity_is_none():
    up, down = np.ones(4, np.float32), -np.ones(4, np.float32)
    assert kernels.weighted_sum([up, up], [1, -1], norms=True).diversity is None  # weights add up to 0
    assert kernels.weighted_sum([up, down], [1, 1], norms=True).diversity is None  # gradients do
    assert kernels.weighted_sum([up * 0, up * 0], [1, 1], norms=True).diversity is None
    assert kernels.weighted_sum([up, up * np.float32(np.inf)], [1, 1], norms=True).diversity is None
    assert kernels.weighted_sum([up, down], [1, 2], np.empty(4, np.float32), norms=True).diversity == pytest.approx(9)


def test_the_result_is_frozen_and_copies_the_weights():
    weights, out = np.ones(2, np.float32), np.empty(4, np.float32)
    summed = kernels.weighted_sum([np.ones(4, np.float32)] * 2, weights, out, norms=True)
    assert summed.sum is out
    weights[:] = 5
    assert summed.diversity == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        summed.sum = None


def test_single_calls_equal_one_batch():
    ys, x = vectors(9, 20_000), vectors(1, 20_000, seed=2)[0]
    scales, weights = np.linspace(0.5, 7, 9), np.linspace(-1, 3, 9)
    whole = np.empty(20_000)
    norms = kernels.accumulate(np.zeros(20_000), [x] * 9, ys, scales, weights, out=whole)
    single = np.zeros(20_000)
    singles = [
        kernels.accumulate(single, [x], [ys[i]], scales[i : i + 1], weights[i : i + 1], out=single) for i in range(9)
    ]
    np.testing.assert_array_equal(single, whole)
    np.testing.assert_array_equal(np.concatenate(singles), norms)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 2047, 16_384, 19_999])
def test_a_bad_row_has_an_infinite_norm_and_keeps_the_old_sum(bad, where):
    ys = vectors(3, 20_000)
    ys[1][where] = bad
    acc = np.ones(20_000)
    norms = kernels.accumulate(acc, [None] * 3, ys, np.ones(3), np.ones(3), out=np.empty(20_000))
    np.testing.assert_array_equal(np.isfinite(norms), [True, False, True])
    np.testing.assert_array_equal(acc, np.ones(20_000))


@pytest.mark.parametrize("n", [1, 17, 2049, 40_001])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_client_s_dtype_is_rounded_to_float32_first(n, dtype):
    """The sum and the norms equal those of the rounded updates, in passes of four clients and of one."""
    g, acc = Numbers(n), Numbers(n, 1)(dtype)
    sent = [g(DTYPES[min(i, 3)]) for i in (3, 1, 2, 3, 0, 3, 3, 3, 3)]
    rounded = [np.float32(oracle.numbers(y)) for y in sent]
    bases, scales, weights = [g()] * 4 + [None] + [g()] * 4, np.linspace(0.5, 7, 9), np.linspace(-1, 3, 9)
    out, due = np.empty(n, dtype), np.empty(n, dtype)
    norms = kernels.accumulate(acc, bases, sent, scales, weights, out=out)
    np.testing.assert_array_equal(norms, kernels.accumulate(acc, bases, rounded, scales, weights, out=due))
    np.testing.assert_array_equal(out, due)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e39])
def test_a_float64_past_the_range_of_float32_has_an_infinite_norm(bad):
    ys = [np.ones(5000), np.full(5000, bad)]
    norms = kernels.accumulate(np.zeros(5000), [None] * 2, ys, np.ones(2), np.ones(2), out=np.empty(5000))
    np.testing.assert_array_equal(np.isfinite(norms), [True, False])
