"""Exact sums: their definition in integers of any length, orders and trees, and bounds."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore import kernels
from fedcore.kernels import Codes, ExactSum, Terms
from fedcore.kernels.exact import LONGEST_EXACT
from tests import oracle
from tests.kernels.arrays import LOW, Numbers, exact
from tests.kernels.cases import exact_sent, exact_sum


def problem(k, n, seed=1):
    """A previous sum, and the updates of k clients."""
    g = Numbers(n, seed)
    return exact_sum(g), *exact_sent(g, k)


def same(sum, other):
    np.testing.assert_array_equal(np.array(sum), np.array(other))


def whole(sum, j):
    """An element in units of 2^-60, as a Python int."""
    return int(sum.high[j]) * LOW + int(sum.low[j])


def on_grid(t):
    """A float64 in units of 2^-60, rounded to 2^-10, with the rest rounded to 2^-60, by Python's fractions."""
    coarse = round(Fraction(t) * 2**10)
    return coarse * LOW + round((Fraction(t) - Fraction(coarse, 2**10)) * 2**60)


def test_more_terms_than_a_word_holds():
    k, n, rng = 9000, 40, np.random.default_rng(6)
    ys = list((rng.normal(size=(k, n)) * 2.0**-11).astype(np.float32))
    acc, none, ones = ExactSum.zeros(n), [None] * k, np.ones(k)
    given = [none, ys, -ones, ones], [none, none, list(np.empty((k, n), np.float32))]
    whole_sum = [sum(on_grid(float(y[j])) for y in ys) for j in range(n)]
    for out in (kernels.accumulate, lambda *a, out: kernels.exchange(*a, *given[1], out=out)):
        found = exact(n)
        out(acc, *given[0], out=found)
        assert [whole(found, j) for j in range(n)] == whole_sum
        assert ((found.low >= 0) & (found.low < LOW)).all()


def test_a_fold_is_the_integer_sum_of_rounded_terms():
    acc, bases, ys, scales, weights = problem(9, 300, seed=5)
    out = exact(300)
    kernels.accumulate(acc, bases, ys, scales, weights, out=out)
    for j in range(300):
        terms = []
        for x, y, scale, weight in zip(bases, ys, scales, weights, strict=True):
            h = (-y[j] if x is None else x[j] - y[j]) * np.float32(scale)
            terms.append(on_grid(weight * float(h)))
        assert whole(out, j) == whole(acc, j) + sum(terms)
        assert 0 <= out.low[j] < LOW


@given(st.floats(-(2.0**39), 2.0**39), st.integers(0, 200))
def test_a_term_is_rounded_to_the_grid(value, exponent):
    y = np.float32([value * 2.0**-exponent])
    if abs(y[0]) >= 2.0**39:
        return
    out = exact(1)
    kernels.accumulate(None, [None], [y], -np.ones(1), np.ones(1), out=out)
    assert whole(out, 0) == on_grid(float(y[0]))
    kernels.accumulate(out, [None], [y], np.ones(1), np.ones(1), out=out)
    assert whole(out, 0) == 0


def joined(parts, rng):
    """Add random pairs of partial sums."""
    while len(parts) > 1:
        first, second = (parts.pop(int(rng.integers(len(parts)))) for _ in range(2))
        parts.append(kernels.combine_exact([first, second], [1, 1]))
    return parts[0]


def test_sixty_orders_and_trees_have_one_hash_and_float64_has_many():
    k, n, rng = 48, 2000, np.random.default_rng(2)
    _, bases, ys, scales, weights = problem(k, n)
    hashes, plain = set(), set()
    for _ in range(60):
        order, parts = rng.permutation(k), []
        while len(order):
            size = int(rng.integers(1, 12))
            some, order = order[:size], order[size:]
            given = [bases[i] for i in some], [ys[i] for i in some], scales[some], weights[some]
            parts.append(exact(n))
            kernels.accumulate(None, *given, out=parts[-1])
        total = joined(parts, rng)
        hashes.add(hashlib.sha256(total.high.tobytes() + total.low.tobytes()).hexdigest())
        order = rng.permutation(k)
        wide = np.zeros(n)
        kernels.accumulate(
            wide, [bases[i] for i in order], [ys[i] for i in order], scales[order], weights[order], out=wide
        )
        plain.add(wide.tobytes())
    assert len(hashes) == 1
    assert len(plain) > 50


def test_the_error_is_not_above_float64s():
    k, n = 48, 400
    _, bases, ys, scales, weights = problem(k, n)
    out, wide = exact(n), np.zeros(n)
    kernels.accumulate(None, bases, ys, scales, weights, out=out)
    kernels.accumulate(wide, bases, ys, scales, weights, out=wide)
    errors_of = {"exact": [], "float64": []}
    for j in range(n):
        hs = [(-y[j] if x is None else x[j] - y[j]) * np.float32(s) for x, y, s in zip(bases, ys, scales, strict=True)]
        terms = [Fraction(float(h)) * Fraction(w) for h, w in zip(hs, weights, strict=True)]
        size = sum(map(abs, terms))
        errors_of["exact"].append(float(abs(Fraction(float(kernels.read_exact(out)[j])) - sum(terms)) / size))
        errors_of["float64"].append(float(abs(Fraction(float(wide[j])) - sum(terms)) / size))
    assert max(errors_of["exact"]) <= 2.0**-52  # a product, and the reading of the sum
    assert np.mean(errors_of["exact"]) <= np.mean(errors_of["float64"])
    assert max(errors_of["exact"]) <= max(errors_of["float64"])


@pytest.mark.parametrize("codec", ["f32", "bf16", "f16", "int8"])
def test_a_running_total_is_the_sum_of_the_rows_however_often_they_are_replaced(codec):
    n, clients, rng = 700, 6, np.random.default_rng(4)
    total, rows = ExactSum.zeros(n), [None] * clients
    for t in range(30):
        some = rng.permutation(clients)[: 1 + t % 4]
        ys = [(rng.normal(size=n) * 10.0 ** rng.integers(-6, 4)).astype(np.float32) for _ in some]
        new = [np.empty(n, np.float32) if codec == "f32" else kernels.quantise(y, codec) for y in ys]
        k, none = len(some), [None] * len(some)
        keys = rng.integers(0, 2**62, (k, 2)).astype(np.uint64)
        old = [rows[i] for i in some]
        given = total, none, ys, -np.ones(k), np.ones(k), old, none, new
        assert np.isfinite(kernels.exchange(*given, out=total, keys=keys, adds=Terms(row=1, r=-1))).all()
        for i, row in zip(some, new, strict=True):
            rows[i] = row
    due = ExactSum.zeros(n)
    for row in rows:
        wide = kernels.dequantise(row) if isinstance(row, Codes) else row
        due = due if row is None else kernels.combine_exact([due, wide], [1, 1])
    same(total, due)
    for row in rows:
        if row is not None:
            wide = kernels.dequantise(row) if isinstance(row, Codes) else row
            total = kernels.combine_exact([total, wide], [1, -1])
    assert not total.high.any()
    assert not total.low.any()


def test_large_coefficients_are_exact():
    a, b = (
        ExactSum(np.array([-3, 0]), np.array([LOW - 1, 5])),
        ExactSum(np.array([7, -1]), np.array([LOW // 3, LOW - 1])),
    )
    for times in (2**31, -(2**31), 2**20 + 1, -4097):
        found = kernels.combine_exact([a, b], [times, 5 - times // 2])
        for j in range(2):
            assert whole(found, j) == times * whole(a, j) + (5 - times // 2) * whole(b, j)


def test_a_combination_of_more_terms_than_a_word_holds():
    a, k = ExactSum(np.array([-3, 0]), np.array([LOW - 1, 5])), 9000
    found = kernels.combine_exact([a] * k + [np.float32([0.3, -2])], [1] * (k // 2) + [-1, 2] * (k // 4) + [4095])
    for j, value in enumerate((float(np.float32(0.3)), -2.0)):
        assert whole(found, j) == (k // 2 + k // 4) * whole(a, j) + 4095 * on_grid(value)


def test_sums_that_may_overflow_return_none():
    most = ExactSum(np.array([2**61]), np.array([0]))
    assert kernels.combine_exact([most], [1]) is not None
    assert kernels.combine_exact([most, most], [1, 1]) is None
    assert kernels.combine_exact([ExactSum(np.array([-(2**63)]), np.array([0]))], [1]) is None
    for value in (2.0**40, -np.inf, np.nan):
        assert kernels.combine_exact([np.float32([0, value])], [1]) is None
    assert kernels.combine_exact([np.float32([2.0**39])], [-1]) is not None


def test_reading_rounds_once():
    g = Numbers(200)
    sum = ExactSum(g.rng.integers(-(2**52), 2**52, 200) >> g.rng.integers(0, 52, 200), g.rng.integers(0, LOW, 200))
    assert kernels.read_exact(sum).tolist() == [float(Fraction(whole(sum, j), 2**60)) for j in range(200)]


@pytest.mark.parametrize("dtype", ["float64", "float16", "float32", "bfloat16"])
def test_every_dtype_is_rounded_to_float32_first(dtype):
    acc, bases, _, scales, weights = problem(5, 5001)
    ys, due, out = Numbers(5001).many(5, dtype), exact(5001), exact(5001)
    kernels.accumulate(acc, bases, [np.float32(oracle.numbers(y)) for y in ys], scales, weights, out=due)
    kernels.accumulate(acc, bases, ys, scales, weights, out=out)
    same(out, due)
    apart = [[y[:1000].reshape(10, 100), y[1000:1003], y[1003:]] for y in ys]
    kernels.accumulate(acc, bases, apart, scales, weights, out=out)
    same(out, due)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 2.0**39])
def test_a_row_past_the_grid_has_an_infinite_norm_and_keeps_the_old_sum(value):
    acc, _, ys, *_ = problem(3, 5000)
    before = ExactSum(acc.high.copy(), acc.low.copy())
    ys[1][4000] = value
    norms = kernels.accumulate(acc, [None] * 3, ys, np.ones(3), np.ones(3), out=exact(5000))
    assert np.isfinite(norms).tolist() == [True, False, True]
    same(acc, before)
    new = [np.empty(5000, np.float32) for _ in range(3)]
    given = acc, [None] * 3, ys, np.ones(3), np.ones(3), [None] * 3, [None] * 3, new
    assert np.isfinite(kernels.exchange(*given, out=exact(5000))).tolist() == [True, False, True]
    control = kernels.exchange(*given, out=exact(5000), row=Terms(h=1, r=1, q=1))
    assert np.isfinite(control).tolist() == [True, False, True]


def test_the_grids_range_includes_the_weight():
    y, out = np.float32([2.0**20]), exact(1)
    for weight, held in ((2.0**18, True), (2.0**19, False), (-(2.0**19), False), (0.0, True)):
        norms = kernels.accumulate(None, [None], [y], np.ones(1), np.array([weight]), out=out)
        assert np.isfinite(norms[0]) == held
        assert np.isfinite(oracle.accumulate(None, [None], [y], [1.0], [weight], out=out)[0]) == held
    rows = [None], [None], [np.empty(1, np.float32)]
    large = [np.float32([2.0**38.5])]
    given = ExactSum.zeros(1), [None], [np.float32([2.0**38])], np.ones(1), np.ones(1)
    assert np.isfinite(kernels.exchange(*given, *rows, out=out))[0]
    rows = large, [None], [np.empty(1, np.float32)]  # a row that becomes the sum of two large numbers
    held = kernels.exchange(*given, *rows, out=out, row=Terms(h=-3, r=3), adds=Terms(row=1, r=-1))
    assert not np.isfinite(held[0])
    assert LONGEST_EXACT == 2.0**39
