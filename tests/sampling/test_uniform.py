from itertools import permutations, product
from math import factorial, perm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore import _core, errors, sampling
from tests import oracle
from tests.sampling.laws import assert_law

WORD = st.integers(0, 2**64 - 1)
KEYS = st.tuples(WORD, WORD, WORD, WORD)
POPULATIONS = st.one_of(st.integers(1, 300), st.sampled_from([10**6, 2**32, 2**53 + 1, 2**63 - 1]))


@given(POPULATIONS, st.integers(0, 120), KEYS)
def test_without_replacement_is_the_oracles(population, k, key):
    k = min(k, population)
    native = _core.without_replacement(population, k, key)
    np.testing.assert_array_equal(native, oracle.without_replacement(population, k, key))
    assert native.dtype == np.int64
    assert len(set(native.tolist())) == k
    assert all(0 <= i < population for i in native.tolist())


@pytest.mark.parametrize("k", [0, 1, 2499, 2500, 9999, 10_000])  # a hash table below a quarter, an array above
def test_a_larger_k_appends(k):
    longest = sampling.without_replacement(10_000, 10_000, seed=1, round=2)
    np.testing.assert_array_equal(sampling.without_replacement(10_000, k, seed=1, round=2), longest[:k])
    np.testing.assert_array_equal(np.sort(longest), np.arange(10_000))


@pytest.mark.parametrize(("population", "k"), [(1, 1), (4, 1), (4, 4), (5, 2), (9, 2), (5, 3)])
def test_every_sequence_has_the_same_probability(population, k):
    outcomes = list(permutations(range(population), k))
    draws = [sampling.without_replacement(population, k, seed=0, round=t).tolist() for t in range(20_000)]
    assert_law(draws, dict.fromkeys(outcomes, 1 / perm(population, k)))


def test_many_clients_are_drawn_equally_often():
    accepted = np.bincount(
        np.concatenate([sampling.without_replacement(1000, 10, seed=3, round=t) for t in range(10_000)]), minlength=1000
    )
    square = ((accepted - 100) ** 2 / (100 * 0.99)).sum()
    assert abs(square - 999) < 4.5 * np.sqrt(2 * 999)


BERNOULLI_SIZES = [0, 1, 3, 63, 64, 65, 511, 512, 513, 16_383, 16_384, 16_385, 40_001]


@pytest.mark.parametrize("population", BERNOULLI_SIZES)
@pytest.mark.parametrize("p", [0.0, 2.0**-60, 0.1, 0.5, 1.0, "each"])
def test_bernoulli_is_the_oracles(population, p):
    key = (1, 2, 3, population)
    if p == "each":
        p = np.random.default_rng(0).random(population)
        p[::5], p[1::5] = 0, 1
    native = _core.bernoulli(population, p, key)
    np.testing.assert_array_equal(native, oracle.bernoulli(population, p, key))
    assert native.dtype == np.int64
    certain = np.flatnonzero(np.broadcast_to(p, population) == 1)
    assert np.isin(certain, native).all()
    assert not np.isin(np.flatnonzero(np.broadcast_to(p, population) == 0), native).any()


def test_bernoulli_has_its_law():
    p = np.array([0.1, 0.5, 0.8, 0.3])
    law = {
        tuple(np.flatnonzero(active).tolist()): float(np.prod(np.where(active, p, 1 - p)))
        for active in product([False, True], repeat=4)
    }
    draws = [sampling.bernoulli(4, p, seed=0, round=t).tolist() for t in range(20_000)]
    assert_law(draws, law)


def test_a_larger_p_only_adds_clients_and_a_smaller_population_only_drops_the_last():
    few = sampling.bernoulli(70_000, 0.1, seed=5, round=6)
    many = sampling.bernoulli(70_000, 0.2, seed=5, round=6)
    assert np.isin(few, many).all()
    assert abs(len(few) - 7000) < 4.5 * np.sqrt(7000 * 0.9)
    np.testing.assert_array_equal(sampling.bernoulli(30_000, 0.1, seed=5, round=6), few[few < 30_000])
    np.testing.assert_array_equal(sampling.bernoulli(70_000, [0.1] * 70_000, seed=5, round=6), few)


PERMUTATION_SIZES = [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4096, 4097, 5000, 66_000]


@pytest.mark.parametrize("population", PERMUTATION_SIZES)
def test_permutation_is_the_oracles_and_one(population):
    key = (4, 3, 2, population)
    native = _core.permutation(population, 0, population, key)
    np.testing.assert_array_equal(np.sort(native), np.arange(population))
    some = min(population, 1000)
    np.testing.assert_array_equal(native[:some], oracle.permutation(population, 0, some, key))


@pytest.mark.parametrize("population", [1, 5, 4097, 10**6, 2**32 + 1, 2**62, 2**63 - 1])
def test_single_places_equal_those_from_a_table(population):
    key, count = (9, 8, 7, 6), min(population, 1100)
    start = population - count
    alone = [_core.permutation(population, start + j, 1, key)[0] for j in range(count)]
    np.testing.assert_array_equal(_core.permutation(population, start, count, key), alone)
    np.testing.assert_array_equal(oracle.permutation(population, start, count, key), alone)
    assert 0 <= min(alone) <= max(alone) < population


@given(st.integers(1, 5000), st.data())
def test_parts_join_up(population, data):
    middle = data.draw(st.integers(0, population))
    whole = sampling.permutation(population, seed=1, round=2)
    first = sampling.permutation(population, seed=1, round=2, stop=middle)
    second = sampling.permutation(population, seed=1, round=2, start=middle)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)


@pytest.mark.parametrize("population", [2, 3, 4, 5, 6])
def test_small_permutations_are_even(population):
    draws = [sampling.permutation(population, seed=2, round=t).tolist() for t in range(20_000)]
    assert_law(draws, dict.fromkeys(permutations(range(population)), 1 / factorial(population)))


@pytest.mark.parametrize("population", [16, 64, 100])  # a plain Feistel network has even ones only
def test_odd_permutations_are_as_frequent(population):
    def odd(order):
        cycles, left = 0, set(range(population))
        while left:
            cycles, at = cycles + 1, min(left)
            while at in left:
                left.remove(at)
                at = order[at]
        return (population - cycles) % 2

    count = sum(odd(sampling.permutation(population, seed=3, round=t).tolist()) for t in range(2000))
    assert abs(count - 1000) < 4.5 * np.sqrt(500)


@pytest.mark.parametrize("population", [100, 5000])
def test_pairs_of_places_are_even(population):
    # neighbours in the row, and neighbours in the column of the network's square
    for distance in (1, int(np.ceil(np.sqrt(population)))):
        gaps = np.concatenate(
            [
                np.diff(sampling.permutation(population, seed=4, round=t)[::distance][:200]) % population
                for t in range(400)
            ]
        )
        assert (gaps != 0).all()
        counts = np.bincount((gaps - 1) * 50 // (population - 1), minlength=50)
        width = np.bincount((np.arange(population - 1)) * 50 // (population - 1), minlength=50) / (population - 1)
        square = ((counts - len(gaps) * width) ** 2 / (len(gaps) * width)).sum()
        assert abs(square - 49) < 4.5 * np.sqrt(2 * 49), distance


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampling.without_replacement(5, 6, seed=0, round=0), r"k=6: must be an integer in 0\.\.5"),
        (lambda: sampling.without_replacement(5, -1, seed=0, round=0), r"k=-1"),
        (lambda: sampling.without_replacement(5, 2.0, seed=0, round=0), r"k=2\.0"),
        (lambda: sampling.without_replacement(0, 0, seed=0, round=0), r"population=.*: must be an integer in 1\.\.2"),
        (lambda: sampling.without_replacement(2**63, 0, seed=0, round=0), "population"),
        (lambda: sampling.without_replacement(5, 1, seed=-1, round=0), "seed=-1"),
        (lambda: sampling.without_replacement(5, 1, seed=2**64, round=0), "seed"),
        (lambda: sampling.without_replacement(5, 1, seed=0, round=-1), "round=-1"),
        (lambda: sampling.permutation(0, seed=0, round=0), "population"),
        (lambda: sampling.permutation(5, seed=0, round=0, stop=6), r"stop=6: must be an integer in 0\.\.5"),
        (lambda: sampling.permutation(5, seed=0, round=0, start=3, stop=2), r"start=3: must be an integer in 0\.\.2"),
        (lambda: sampling.bernoulli(-1, 0.5, seed=0, round=0), "population"),
        (lambda: sampling.bernoulli(5, 1.5, seed=0, round=0), r"p=1\.5: must be a number in \[0, 1\]"),
        (lambda: sampling.bernoulli(5, float("nan"), seed=0, round=0), r"p=nan"),
        (lambda: sampling.bernoulli(3, [0, 1, -0.1], seed=0, round=0), r"p\[2\]=-0\.1"),
        (lambda: sampling.bernoulli(3, np.array([0, np.nan, 2]), seed=0, round=0), r"p\[1\]=nan"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(errors.RangeError, match=message):
        call()


def test_chances_of_a_wrong_shape_or_dtype_are_refused():
    with pytest.raises(errors.ShapeError, match=r"p: expected float64\[3\], got float64\[2\]"):
        sampling.bernoulli(3, np.zeros(2), seed=0, round=0)
    with pytest.raises(errors.DtypeError, match=r"p: expected float64\[3\], got float32\[3\]"):
        sampling.bernoulli(3, np.zeros(3, np.float32), seed=0, round=0)
