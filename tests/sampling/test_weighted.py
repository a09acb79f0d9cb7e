import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore import _core, errors, sampling
from tests import oracle
from tests.sampling.laws import assert_law, successive

WORD = st.integers(0, 2**64 - 1)
KEYS = st.tuples(WORD, WORD, WORD, WORD)
WEIGHT = st.one_of(st.just(0.0), st.floats(0, 1e300), st.floats(0.5, 2))
# where leaves of 32, nodes of 32^2 and 32^3 and blocks of 16,384 begin and end
SIZES = [1, 2, 31, 32, 33, 1023, 1024, 1025, 16_383, 16_384, 16_385, 32_768, 32_769, 70_001]


def both(name, weights, k, key=(1, 2, 3, 4)):
    native = getattr(_core, name)(weights, k, key)
    np.testing.assert_array_equal(native, getattr(oracle, name)(weights, k, key))
    assert native.dtype == np.int64
    return native


@given(st.lists(WEIGHT, min_size=0, max_size=80), st.integers(0, 90), KEYS)
def test_native_draws_are_the_oracles(weights, k, key):
    weights = np.array(weights, np.float64)
    drawn = both("weighted_without_replacement", weights, k, key)
    assert len(drawn) == min(k, np.count_nonzero(weights))
    assert len(set(drawn.tolist())) == len(drawn)
    assert (weights[drawn] > 0).all()
    again = both("with_replacement", weights, k, key)
    assert len(again) == (k if weights.any() else 0)
    assert (weights[again] > 0).all()


@pytest.mark.parametrize("n", SIZES)
def test_native_draws_are_the_oracles_at_the_edges(n):
    rng = np.random.default_rng(n)
    weights = rng.exponential(size=n) ** 3
    before = weights.copy()
    both("weighted_without_replacement", weights, min(n, 300))
    both("with_replacement", weights, 300)
    weights[rng.random(n) < 0.9] = 0
    weights[-1] = before[-1] = 1e9  # the last one of a node that is not full
    assert both("weighted_without_replacement", weights, 5 if n > 1000 else 1)[0] == n - 1
    np.testing.assert_array_equal(weights[-1:], before[-1:])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (5, 31, 32, 50), (0, 40, 1025, 39_999)], ids=["leaf", "node", "tree"])
def test_draws_are_successive(k, places):
    weights = np.zeros(max(places) + 3)
    weights[list(places)] = [1, 2, 5, 10]
    rounds = 3000 if len(weights) > 1000 else 20_000
    law = successive(np.array([1.0, 2, 5, 10]), k)
    index = {place: i for i, place in enumerate(places)}
    draws = [
        [index[i] for i in sampling.weighted_without_replacement(weights, k, seed=0, round=t).tolist()]
        for t in range(rounds)
    ]
    assert_law(draws, law)


def test_inclusion_probabilities_are_those_of_successive_draws():
    weights, k, rounds = np.array([0.5, 1.0, 1.5, 3.0, 7.0, 9.0]), 3, 20_000
    due = np.zeros(6)
    for order, probability in successive(weights, k).items():
        due[list(order)] += probability
    drawn = np.concatenate([sampling.weighted_without_replacement(weights, k, seed=1, round=t) for t in range(rounds)])
    accepted = np.bincount(drawn, minlength=6) / rounds
    assert (np.abs(accepted - due) < 4.5 * np.sqrt(due * (1 - due) / rounds)).all()


def test_draws_with_replacement_are_by_the_weights():
    for n in (5, 40, 3000):
        weights = np.random.default_rng(0).random(n)
        weights[1] = 0
        drawn = sampling.with_replacement(weights, 200_000, seed=0, round=n)
        due = 200_000 * weights / weights.sum()
        counts = np.bincount(drawn, minlength=n)
        assert counts[1] == 0
        some = due >= 5
        square = ((counts[some] - due[some]) ** 2 / due[some]).sum()
        assert abs(square - some.sum()) < 4.5 * np.sqrt(2 * some.sum()) + 1
    pairs = sampling.with_replacement([1, 2, 3], 40_000, seed=0, round=0).reshape(-1, 2).tolist()
    assert_law(pairs, {(i, j): (i + 1) * (j + 1) / 36 for i in range(3) for j in range(3)})


@pytest.mark.parametrize("name", ["weighted_without_replacement", "with_replacement"])
def test_a_larger_k_appends(name):
    draw, weights = getattr(sampling, name), np.random.default_rng(0).random(40_000)
    longest = draw(weights, 40_000, seed=3, round=4)
    for k in (0, 1, 5, 16_385):
        np.testing.assert_array_equal(draw(weights, k, seed=3, round=4), longest[:k])
    if name == "weighted_without_replacement":
        np.testing.assert_array_equal(np.sort(longest), np.arange(40_000))


def test_light_weights_keep_their_ratios_after_heavy_ones():
    weights = np.array([1e300, 1e-200, 3e-200, 1e250])
    draws = [sampling.weighted_without_replacement(weights, 4, seed=0, round=t).tolist() for t in range(20_000)]
    assert_law(draws, {(0, 3, 1, 2): 0.25, (0, 3, 2, 1): 0.75})


def test_the_smallest_and_the_largest_weights():
    tiny = np.array([0.0, 5e-324, 0.0])
    assert sampling.weighted_without_replacement(tiny, 1, seed=0, round=0).tolist() == [1]
    assert set(sampling.with_replacement(tiny, 100, seed=0, round=0).tolist()) == {1}
    huge = np.array([1.7e308, -0.0])
    assert sampling.weighted_without_replacement(huge, 1, seed=0, round=0).tolist() == [0]


def test_tensors_and_lists_are_taken_and_nothing_is_written():
    weights = np.random.default_rng(0).random(100)
    weights.flags.writeable = False
    due = sampling.weighted_without_replacement(weights, 50, seed=0, round=0)
    for same in (weights.tolist(), tuple(weights), torch.from_numpy(weights.copy())):
        np.testing.assert_array_equal(sampling.weighted_without_replacement(same, 50, seed=0, round=0), due)


def test_functions_purposes_rounds_and_seeds_do_not_share_numbers():
    weights = np.ones(64)
    draws = [
        sampling.weighted_without_replacement(weights, 20, seed=0, round=0),
        sampling.weighted_without_replacement(weights, 20, seed=1, round=0),
        sampling.weighted_without_replacement(weights, 20, seed=0, round=1),
        sampling.weighted_without_replacement(weights, 20, seed=0, round=0, purpose="other"),
        sampling.with_replacement(weights, 20, seed=0, round=0),
        sampling.without_replacement(64, 20, seed=0, round=0),
        sampling.permutation(64, seed=0, round=0)[:20],
    ]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


@pytest.mark.parametrize("name", ["weighted_without_replacement", "with_replacement"])
@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (-1.0, r"weights\[BAD\]=-1\.0: must be a finite number >= 0"),
        (np.nan, r"weights\[BAD\]=nan"),
        (-np.nan, r"weights\[BAD\]=nan"),
        (np.inf, r"weights\[BAD\]=inf"),
        (-np.inf, r"weights\[BAD\]=-inf"),
        (1.7e308, "sum must be finite"),
    ],
)
def test_a_bad_weight_is_rejected_at_any_position(name, k, bad, message):
    for n, place in ((2, 0), (2, 1), (64, 13), (40_001, 40_000), (40_001, 17_000)):
        weights = np.full(n, 1e308)
        weights[place] = bad
        if np.isfinite(bad) and bad < 0:
            weights[place - 1] = 1
        with pytest.raises(errors.RangeError, match=message.replace("BAD", str(place))):
            getattr(sampling, name)(weights, k, seed=0, round=0)


def test_too_few_positive_weights_are_refused():
    with pytest.raises(errors.RangeError, match="at least 3 positive weights, got 2"):
        sampling.weighted_without_replacement([1, 0, 2], 3, seed=0, round=0)
    with pytest.raises(errors.RangeError, match=f"at least {2**62} positive weights, got 1"):
        sampling.weighted_without_replacement([1], 2**62, seed=0, round=0)
    with pytest.raises(errors.RangeError, match="at least 1 positive weights, got 0"):
        sampling.with_replacement([0, 0], 3, seed=0, round=0)
    for nothing in ([], [0, 0]):
        assert sampling.with_replacement(nothing, 0, seed=0, round=0).shape == (0,)
        assert sampling.weighted_without_replacement(nothing, 0, seed=0, round=0).shape == (0,)


def test_other_arguments_are_refused_by_name():
    with pytest.raises(errors.RangeError, match=r"^k="):
        sampling.with_replacement([1.0], -1, seed=0, round=0)
    with pytest.raises(errors.DtypeError, match=r"weights: expected float64\[n\], got float32\[2\]"):
        sampling.weighted_without_replacement(np.ones(2, np.float32), 1, seed=0, round=0)
    with pytest.raises(errors.ShapeError, match="weights"):
        sampling.with_replacement(np.ones((2, 2)), 1, seed=0, round=0)
    with pytest.raises(errors.ArrayError, match="weights: expected an array in CPU memory, got int"):
        sampling.with_replacement(3, 1, seed=0, round=0)
