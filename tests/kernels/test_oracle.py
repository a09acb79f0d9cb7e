"""Every kernel, for every dtype, codec and form, has the bits of its definition in ``tests/oracle``."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.arrays import Numbers
from tests.kernels.cases import CASES, ELEMENTWISE, FINITE, USUAL, assert_as_defined, direction_step, run

# Edges of vectors, lanes, an int8 scale's 64, chunks, runs, tiles and blocks, and sizes where a second thread joins.
LENGTHS = [0, 1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 255, 257, 511, 512, 513, 577, 2047, 2048, 2049, 2113]
LENGTHS += [4095, 4097, 16_383, 16_385, 70_001]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(1, 2)
def test_a_kernel_has_the_bits_of_its_definition(name, n):
    assert_as_defined(lambda: run(name, Numbers(n)))


KINDS = [(name, "usual") for name in USUAL] + [(name, kind) for name in FINITE for kind in ("usual", "tiny", "huge")]
KINDS += [(name, kind) for name in ELEMENTWISE for kind in ("usual", "all sizes", "special")]


@settings(max_examples=500)
@given(case=st.sampled_from(KINDS), n=st.integers(0, 300), seed=st.integers(0, 2**32 - 1))
def test_any_numbers(case, n, seed):
    name, kind = case
    assert_as_defined(lambda: run(name, Numbers(n, seed, kind)))


@given(n=st.integers(0, 300), seed=st.integers(0, 99), numbers=st.tuples(*[st.floats(-2, 2, width=32)] * 5))
def test_any_coefficients_of_a_direction(n, seed, numbers):
    assert_as_defined(lambda: direction_step(Numbers(n, seed, "special"), 15, numbers))
