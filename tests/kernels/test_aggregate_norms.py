"""The norms that come with a weighted sum."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore import kernels
from fedcore.kernels import reference

DTYPES = ["float32", "float64", "float16", "bfloat16"]
LENGTHS = [0, 1, 15, 16, 17, 33, 2047, 2048, 2049, 16_385, 70_001]


def rows_of(dtype, k, n, seed=0):
    rows = np.random.default_rng(seed).normal(size=(k, n))
    return [torch.from_numpy(row).bfloat16() if dtype == "bfloat16" else row.astype(dtype) for row in rows]


def expected(rows, weights, **options):
    with np.errstate(all="ignore"):
        out = np.empty(len(rows[0]), np.float64)
        return reference.weighted_sum(rows, weights, out, norms=True, **options)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_agree_with_the_reference_and_the_sum_has_the_bits_of_the_plain_one(dtype, with_base, accumulate):
    for n in LENGTHS:
        for k in (1, 8, 11) if n < 10_000 else (9,):
            rows, weights = rows_of(dtype, k, n, seed=n), np.linspace(-1, 2, k, dtype=np.float32)
            base = rows_of("float32", 1, n, seed=1)[0] if with_base else None
            summed = kernels.weighted_sum(rows, weights, base=base, accumulate=accumulate, norms=True)
            due = expected(rows, weights, base=base, float64=accumulate == "float64")
            np.testing.assert_allclose([*summed.squared_norms, summed.squared_norm_of_sum], due, rtol=1e-5)
            plain = kernels.weighted_sum(rows, weights, base=base, accumulate=accumulate)
            np.testing.assert_array_equal(summed.sum, plain)
            assert summed.sum.dtype == plain.dtype
            np.testing.assert_array_equal(summed.weights, weights)
            assert summed.finite.all()


@pytest.mark.parametrize("n", LENGTHS)
def test_norms_have_the_bits_of_squared_norms(n):
    rows, weights = rows_of("float32", 9, n), np.linspace(-1, 2, 9, dtype=np.float32)
    rows[3] *= np.float32(1e25)  # beyond what lanes of float32 hold
    rows[4] *= np.float32(1e-25)
    summed = kernels.weighted_sum(rows, weights, norms=True)
    np.testing.assert_array_equal(summed.squared_norms, kernels.squared_norms(rows))
    assert summed.squared_norm_of_sum == kernels.squared_norms([summed.sum])[0]
    halves = rows_of("bfloat16", 9, n)
    wide = kernels.squared_norms([row.float() for row in halves])
    np.testing.assert_array_equal(kernels.weighted_sum(halves, weights, norms=True).squared_norms, wide)
    x = rows_of("float32", 1, n, seed=1)[0]
    differences = kernels.squared_norms([x - row for row in rows])
    np.testing.assert_array_equal(kernels.weighted_sum(rows, weights, base=x, norms=True).squared_norms, differences)


@given(
    dtype=st.sampled_from(DTYPES),
    k=st.integers(1, 10),
    n=st.integers(1, 70),
    accumulate=st.sampled_from(["float32", "float64"]),
    scale=st.integers(-38, 38),
    bad=st.sampled_from([None, np.nan, np.inf, -np.inf]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_of_numbers_and_any_bad_one(dtype, k, n, accumulate, scale, bad, seed):
    rows, rng = rows_of(dtype, k, n, seed), np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        rows = [row * 10.0**scale for row in rows]
    if bad is not None:
        rows[rng.integers(k)][rng.integers(n)] = bad
    weights = rng.normal(size=k).astype(np.float32)
    summed = kernels.weighted_sum(rows, weights, accumulate=accumulate, norms=True)
    due = expected(rows, weights, float64=accumulate == "float64")
    norms = np.array([*summed.squared_norms, summed.squared_norm_of_sum])
    np.testing.assert_array_equal(np.isfinite(norms), np.isfinite(due))
    np.testing.assert_allclose(norms[np.isfinite(due)], due[np.isfinite(due)], rtol=1e-5)
    with np.errstate(over="ignore"):
        read = [reference.numbers(row).astype(accumulate) for row in rows]
    np.testing.assert_array_equal(summed.finite, [np.isfinite(row).all() for row in read])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_is_found_anywhere(dtype, bad):
    for where in (0, 15, 16, 2047, 2048, 16_384, 16_999):
        rows = rows_of(dtype, 9, 17_000)
        rows[8][where] = bad
        np.testing.assert_array_equal(kernels.weighted_sum(rows, [1] * 9, norms=True).finite, [True] * 8 + [False])
        base = np.zeros(17_000, np.float32)
        base[where] = bad
        assert not kernels.weighted_sum(rows_of(dtype, 2, 17_000), [1, 1], base=base, norms=True).finite.any()


def test_float64_rows_are_measured_as_far_as_float64_holds_their_squares():
    rows = [np.array([1e100, 1]), np.array([1e-100, 0]), np.array([1e200, 0])]
    summed = kernels.weighted_sum(rows, [1, 1, 1e-150], accumulate="float64", norms=True)
    np.testing.assert_allclose(summed.squared_norms, [1e200, 1e-200, np.inf])
    assert summed.squared_norm_of_sum == pytest.approx(1e200)
    np.testing.assert_array_equal(summed.finite, [True, True, False])
    with np.errstate(over="ignore"):
        assert not kernels.weighted_sum(rows, [1, 1, 1], norms=True).finite[0]  # read as float32 it is infinite


def test_what_was_summed_to_16_bits_is_measured_before_it_is_rounded():
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
def test_diversity_is_that_of_the_paper(accumulate):
    """Haddadpour and Mahdavi 2019, eq. 7, in float64."""
    gradients, counts = np.random.default_rng(0).normal(size=(7, 500)).astype(np.float32), np.arange(1, 8.0)
    q = counts / counts.sum()
    due = q @ np.square(gradients, dtype=np.float64).sum(1) / np.square(q @ gradients.astype(np.float64)).sum()
    for weights in (counts, q, -q):  # it does not depend on the weights' scale
        summed = kernels.weighted_sum(list(gradients), list(weights), accumulate=accumulate, norms=True)
        assert summed.diversity == pytest.approx(due, rel=1e-5)
    alike = kernels.weighted_sum([gradients[0]] * 5, [0.2] * 5, accumulate=accumulate, norms=True)
    assert alike.diversity == pytest.approx(1, rel=1e-5)


def test_diversity_is_none_where_it_is_undefined():
    up, down = np.ones(4, np.float32), -np.ones(4, np.float32)
    assert kernels.weighted_sum([up, up], [1, -1], norms=True).diversity is None  # weights add up to 0
    assert kernels.weighted_sum([up, down], [1, 1], norms=True).diversity is None  # gradients do
    assert kernels.weighted_sum([up * 0, up * 0], [1, 1], norms=True).diversity is None
    assert kernels.weighted_sum([up, up * np.float32(np.inf)], [1, 1], norms=True).diversity is None
    assert kernels.weighted_sum([up, down], [1, 2], np.empty(4, np.float32), norms=True).diversity == pytest.approx(9)


def test_the_result_is_frozen_and_keeps_its_own_weights():
    weights, out = np.ones(2, np.float32), np.empty(4, np.float32)
    summed = kernels.weighted_sum([np.ones(4, np.float32)] * 2, weights, out, norms=True)
    assert summed.sum is out
    weights[:] = 5
    assert summed.diversity == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        summed.sum = None


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_segments_are_measured_as_whole_models(accumulate, with_base):
    shapes, dtypes = [(3, 4), (), (0,), (40_000,), (7,)], [*DTYPES, "float32"]
    models = [
        [
            rows_of(dtype, 1, int(np.prod(shape)), 9 * i)[0].reshape(shape)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        for i in range(9)
    ]
    base = [np.full(shape, 0.5, np.float32) for shape in shapes] if with_base else None
    weights = np.linspace(-1, 2, 9, dtype=np.float32)
    summed = kernels.weighted_sum_segments(models, weights, base=base, accumulate=accumulate, norms=True)
    outs = [np.empty(shape) for shape in shapes]
    due = reference.weighted_sum_segments(models, weights, outs, base=base, float64=accumulate == "float64", norms=True)
    np.testing.assert_allclose([*summed.squared_norms, summed.squared_norm_of_sum], due, rtol=1e-5)
    plain = kernels.weighted_sum_segments(models, weights, base=base, accumulate=accumulate)
    for array, same in zip(summed.sum, plain, strict=True):
        np.testing.assert_array_equal(array, same)
    models[4][3][39_999] = np.nan
    finite = kernels.weighted_sum_segments(models, weights, base=base, accumulate=accumulate, norms=True).finite
    np.testing.assert_array_equal(finite, np.arange(9) != 4)
