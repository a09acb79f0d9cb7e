import numpy as np
import pytest
import torch

from fedcore import errors, kernels
from fedcore.kernels import reference


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 2049, 16_385, 300_001])
def test_squared_norms_agree_with_the_reference(n):
    rows = [np.random.default_rng(i).normal(size=n).astype(np.float32) for i in range(5)]
    norms = kernels.squared_norms(rows)
    np.testing.assert_allclose(norms, reference.squared_norms(rows), rtol=1e-5)
    np.testing.assert_array_equal(kernels.squared_norms([torch.from_numpy(row) for row in rows]), norms)


def test_no_finite_float32_overflows():
    largest = np.full(20_000, np.finfo(np.float32).max, np.float32)
    assert kernels.all_finite([largest]).all()
    assert kernels.squared_norms([largest])[0] == pytest.approx(20_000 * float(largest[0]) ** 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite_finds_one_bad_element_anywhere(bad):
    for where in (0, 15, 16, 2047, 2048, 16_384, 16_999):
        row = np.zeros(17_000, np.float32)
        row[where] = bad
        np.testing.assert_array_equal(kernels.all_finite([row, np.zeros_like(row)]), [False, True])


def test_rows_of_two_lengths_are_refused():
    with pytest.raises(errors.ShapeError, match=r"rows\[1\]: expected float32\[3\], got float32\[4\]"):
        kernels.squared_norms([np.zeros(3, np.float32), np.zeros(4, np.float32)])
    assert kernels.squared_norms([]).shape == (0,)


@pytest.mark.parametrize("n", [1, 15, 2048, 5000])
@pytest.mark.parametrize("difference", [0.0, 2.0**-126, 2.0**-149, np.inf, np.nan])
def test_a_layer_that_nobody_trains_has_length_zero_and_no_other(n, difference):
    """The squares of tiny differences are zero in float32, and equal infinities differ by a NaN."""
    x = np.zeros(n, np.float32)
    y = x.copy()
    y[-1] = difference
    if not np.isfinite(difference):
        x[-1] = difference
    (squared,) = kernels.accumulate(None, [x], [y], np.ones(1), np.ones(1), out=np.empty(n, np.float32))
    np.testing.assert_equal(squared, difference**2 if np.isfinite(difference) else np.nan)
    assert kernels.squared_norms([y])[0] == pytest.approx(difference**2, nan_ok=True)
