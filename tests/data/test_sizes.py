import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.data.sizes import lognormal, pareto
from fedcore.errors import RangeError


@pytest.mark.parametrize("law", [pareto, lognormal])
@given(
    clients=st.integers(1, 50),
    more=st.integers(0, 50),
    seed=st.integers(0, 2**32),
    smallest=st.integers(1, 100),
    spread=st.integers(0, 10_000),
)
def test_sizes_keep_their_bounds_and_come_from_the_seed(law, clients, more, seed, smallest, spread):
    sizes = law(clients, seed=seed, smallest=smallest, largest=smallest + spread)
    assert sizes.dtype == np.int64
    assert sizes.shape == (clients,)
    assert smallest <= sizes.min() <= sizes.max() <= smallest + spread
    longer = law(clients + more, seed=seed, smallest=smallest, largest=smallest + spread)
    np.testing.assert_array_equal(longer[:clients], sizes)


def test_the_pareto_law():
    sizes = pareto(100_000, seed=3, smallest=100, largest=10**9)
    for factor in (2, 4, 25, 100):
        assert (sizes >= 100 * factor).mean() == pytest.approx(factor**-0.5, abs=0.005)
    steep = pareto(100_000, seed=3, smallest=100, largest=10**9, index=2.0)
    assert (steep >= 200).mean() == pytest.approx(0.25, abs=0.005)


def test_what_is_above_the_cap_becomes_the_cap():
    free = pareto(1000, seed=1, smallest=10, largest=10**6)
    capped = pareto(1000, seed=1, smallest=10, largest=90)
    np.testing.assert_array_equal(capped, np.minimum(free, 90))
    assert (capped == 90).mean() == pytest.approx(1 / 3, abs=0.05)


def test_an_index_near_zero_does_not_overflow():
    assert pareto(200, seed=0, smallest=1, largest=7, index=1e-300).max() == 7


def test_the_lognormal_law():
    logs = np.log(lognormal(100_000, seed=0, smallest=1, largest=10**12, mean=12.0) - 1 + 0.5)
    assert logs.mean() == pytest.approx(12, abs=0.03)
    assert logs.std() == pytest.approx(2, abs=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "clients: expected an integer in 1..*got 0"),
        ({"smallest": 0}, "smallest: expected an integer in 1.*got 0"),
        ({"largest": 4}, "largest: expected an integer in 5.*got 4"),
        ({"largest": 2**53}, "largest: expected an integer in 5.."),
        ({"index": 0.0}, "index: expected a finite number > 0, got 0.0"),
        ({"index": float("nan")}, "index: expected a finite number > 0, got nan"),
    ],
)
def test_numbers_out_of_range(arguments, message):
    given = {"clients": 3, "smallest": 5, "largest": 9} | arguments
    with pytest.raises(RangeError, match=message):
        pareto(given.pop("clients"), seed=0, **given)


def test_a_lognormal_law_needs_finite_numbers():
    with pytest.raises(RangeError, match=r"(mean|deviation): expected a"):
        lognormal(3, seed=0, smallest=1, largest=9, deviation=-1.0)
