import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore import errors, kernels
from fedcore.kernels import reference
from tests.kernels.same_bits import assert_same_bits

# Chunk, tile and block edges, and sizes where a second thread joins.
LENGTHS = [0, 1, 15, 16, 17, 511, 512, 513, 2047, 2048, 2049, 16_383, 16_384, 16_385, 300_001]


def terms_of(k, n, seed=1):
    """k vectors, every other one float32, and their coefficients."""
    rng = np.random.default_rng(seed)
    vectors = [rng.normal(size=n).astype(np.float32 if i % 2 else np.float64) for i in range(k)]
    return vectors, rng.normal(size=k)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_a_combination_has_the_bits_of_the_reference(k, n):
    terms, coefficients = terms_of(k, n)
    for dtype in (np.float32, np.float64):
        due, out = np.empty(n, dtype), np.empty(n, dtype)
        reference.combine(terms, coefficients, due)
        assert kernels.combine(terms, list(coefficients), out=out) is out
        assert_same_bits(out, due)
    assert_same_bits(kernels.combine(terms, coefficients), due.astype(np.float32))


@pytest.mark.parametrize("n", LENGTHS)
def test_the_square_is_that_of_the_combination(n):
    terms, coefficients = terms_of(3, n)
    due = reference.combined_square(terms, coefficients)
    assert kernels.combined_square(terms, coefficients) == pytest.approx(due, rel=1e-13)


def test_the_square_of_what_float32_cannot_hold():
    large = np.full(1000, 1e30, np.float32)
    assert kernels.combined_square([large, large], [1e20, -2e20]) == pytest.approx(1000 * 1e100)
    assert kernels.combined_square([large], [1e-60]) == pytest.approx(1000 * 1e-60)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_first_term_can_be_overwritten(dtype):
    terms, coefficients = terms_of(3, 5000)
    terms[0] = terms[0].astype(dtype)
    due = kernels.combine(terms, coefficients, np.empty(5000, dtype))
    kernels.combine(terms, coefficients, terms[0])
    assert_same_bits(terms[0], due)


@given(n=st.integers(1, 300), seed=st.integers(0, 99))
def test_special_values(n, seed):
    terms, coefficients = terms_of(3, n, seed)
    for i, vector in enumerate(terms):
        vector[(seed + i) % n] = np.float32([np.nan, np.inf, -0.0, 1e-42, 3e38])[(seed + i) % 5]
    due = np.empty(n, np.float32)
    with np.errstate(all="ignore"):
        reference.combine(terms, coefficients, due)
        finite = bool(np.isfinite(reference.combination(terms, coefficients)).all())
    assert_same_bits(kernels.combine(terms, coefficients), due)
    assert np.isfinite(kernels.combined_square(terms, coefficients)) == finite


def test_bad_arguments_are_named():
    memory = np.zeros(10, np.float32)
    with pytest.raises(errors.ArrayError, match=r"out: must not overlap terms\[1\]"):
        kernels.combine([memory + 1, memory], [1, 1], out=memory)
    with pytest.raises(errors.ArrayError, match=r"out: must not overlap terms\[0\]"):
        kernels.combine([memory[:6]], [1], out=memory[4:])
    for function in (kernels.combine, kernels.combined_square):
        with pytest.raises(errors.ShapeError, match="terms: expected at least one vector, got none"):
            function([], [])
        with pytest.raises(errors.ShapeError, match=r"coefficients: expected float64\[1\], got float64\[2\]"):
            function([memory], [1, 2])
        with pytest.raises(errors.DtypeError, match=r"terms\[0\]: expected float32 or float64\[n\], got int64\[3\]"):
            function([np.arange(3)], [1])
        with pytest.raises(errors.ShapeError, match=r"terms\[1\]: expected .*\[10\], got float32\[9\]"):
            function([memory, memory[1:]], [1, 1])
