"""Exact sums: the definition in integers of any length, the reference, orders and trees, and what is refused."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore import errors, kernels
from fedcore.kernels import Codes, ExactSum, Terms, exact_reference
from fedcore.kernels.exact import LONGEST_EXACT
from tests.kernels.forms import FORMS
from tests.kernels.same_bits import assert_same_bits

# Chunk, tile, run and block edges, and sizes where a second thread joins.
LENGTHS = [0, 1, 15, 16, 17, 255, 257, 511, 513, 2047, 2049, 4095, 4097, 16_383, 16_385, 150_001]
LOW = 1 << 50


def problem(k, n, seed=1):
    """k updates of 16 orders of magnitude, their bases, scales and weights, and a sum that there is already."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n).astype(np.float32)
    ys = [(x - rng.normal(size=n) * 10.0 ** rng.uniform(-12, 4, size=n)).astype(np.float32) for _ in range(k)]
    bases = [x if i % 4 else None for i in range(k)]
    acc = ExactSum(rng.integers(-(2**40), 2**40, n), rng.integers(0, LOW, n))
    return acc, bases, ys, rng.uniform(0.5, 3, size=k), rng.uniform(0.1, 400, size=k)


def fresh(n):
    return ExactSum(np.full(n, 7), np.full(n, 7))


def same(sum, other):
    for word, due in zip(sum, other, strict=True):
        assert_same_bits(np.asarray(word), np.asarray(due))


def whole(sum, j):
    """An element in units of 2^-60, as Python's integers."""
    return int(sum.high[j]) * LOW + int(sum.low[j])


def nearest(number):
    """The nearest integer to a fraction, ties to even."""
    return round(number)


def on_grid(t):
    """A float64 in units of 2^-60, rounded to 2^-10 and then what is left to 2^-60: by Python's fractions."""
    coarse = nearest(Fraction(t) * 2**10)
    return coarse * LOW + nearest((Fraction(t) - Fraction(coarse, 2**10)) * 2**60)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("k", [0, 1, 3, 8, 11])
def test_a_fold_has_the_bits_of_the_reference(k, n):
    acc, bases, ys, scales, weights = problem(k, n)
    bases = bases if n % 2 else [bases[1] if k > 1 else None] * k
    for before in (acc, None):
        due, out = fresh(n), fresh(n)
        norms = exact_reference.accumulate_exact(before, due, bases, ys, scales, weights)
        np.testing.assert_allclose(kernels.accumulate_exact(before, bases, ys, scales, weights, out=out), norms, 1e-5)
        same(out, due)
    kernels.accumulate_exact(acc, bases, ys, scales, weights, out=acc)
    due = fresh(n)
    exact_reference.accumulate_exact(problem(k, n)[0], due, bases, ys, scales, weights)
    same(acc, due)


@pytest.mark.parametrize("weight", ["short", "longest short", "one bit more"])
@pytest.mark.parametrize("based", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.75])
def test_products_that_are_exact_take_fewer_operations_and_have_the_same_bits(scale, based, weight):
    k, n = 11, 5003
    acc, bases, ys, *_ = problem(k, n)
    bases, scales = [bases[1] if based else None] * k, np.full(k, scale)
    weights = {"short": np.arange(k) * 37.0, "longest short": np.full(k, 400 + 2.0**-20)}.get(weight)
    weights = np.full(k, 400 + 2.0**-21) if weights is None else weights
    due, out = fresh(n), fresh(n)
    exact_reference.accumulate_exact(acc, due, bases, ys, scales, weights)
    kernels.accumulate_exact(acc, bases, ys, scales, weights, out=out)
    same(out, due)
    old, none = [*ys[1:], None], [None] * k
    for anchors in (none, ys):
        new, given = [np.empty(n, np.float32) for _ in range(k)], (bases, ys, scales, weights, old)
        exact_reference.exchange_exact(acc, due, *given, anchors, new, keys=None, **FORMS["replaced"])
        kernels.exchange_exact(acc, *given, anchors, new, out=out, **FORMS["replaced"])
        same(out, due)


def test_more_terms_than_a_word_holds_are_settled_on_the_way():
    k, n, rng = 9000, 40, np.random.default_rng(6)
    ys = list((rng.normal(size=(k, n)) * 2.0**-11).astype(np.float32))
    acc, none, ones = ExactSum.zeros(n), [None] * k, np.ones(k)
    given = [none, ys, -ones, ones], [none, none, list(np.empty((k, n), np.float32))]
    whole_sum = [sum(on_grid(float(y[j])) for y in ys) for j in range(n)]
    for out in (kernels.accumulate_exact, lambda *a, out: kernels.exchange_exact(*a, *given[1], out=out)):
        found = fresh(n)
        out(acc, *given[0], out=found)
        assert [whole(found, j) for j in range(n)] == whole_sum
        assert ((found.low >= 0) & (found.low < LOW)).all()


def test_a_fold_is_the_sum_of_rounded_terms_in_whole_numbers():
    acc, bases, ys, scales, weights = problem(9, 300, seed=5)
    out = fresh(300)
    kernels.accumulate_exact(acc, bases, ys, scales, weights, out=out)
    for j in range(300):
        terms = []
        for x, y, scale, weight in zip(bases, ys, scales, weights, strict=True):
            h = (-y[j] if x is None else x[j] - y[j]) * np.float32(scale)
            terms.append(on_grid(weight * float(h)))
        assert whole(out, j) == whole(acc, j) + sum(terms)
        assert 0 <= out.low[j] < LOW


@given(st.floats(-(2.0**39), 2.0**39), st.integers(0, 200))
def test_a_term_is_rounded_to_the_nearest(value, exponent):
    y = np.float32([value * 2.0**-exponent])
    if abs(y[0]) >= 2.0**39:
        return
    out = fresh(1)
    kernels.accumulate_exact(None, [None], [y], -np.ones(1), np.ones(1), out=out)
    assert whole(out, 0) == on_grid(float(y[0]))
    kernels.accumulate_exact(out, [None], [y], np.ones(1), np.ones(1), out=out)
    assert whole(out, 0) == 0


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.float32])
def test_every_dtype_and_tensors_apart(dtype):
    acc, bases, ys, scales, weights = problem(5, 5001)
    with np.errstate(over="ignore"):
        ys = [np.clip(y, -1e4, 1e4).astype(dtype) for y in ys]
    due, out = fresh(5001), fresh(5001)
    kernels.accumulate_exact(acc, bases, [y.astype(np.float32) for y in ys], scales, weights, out=due)
    kernels.accumulate_exact(acc, bases, ys, scales, weights, out=out)
    same(out, due)
    apart = [[y[:1000].reshape(10, 100), y[1000:1003], y[1003:]] for y in ys]
    kernels.accumulate_exact(acc, bases, apart, scales, weights, out=out)
    same(out, due)


def joined(parts, rng):
    """Partial sums added two at a time, whichever."""
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
            parts.append(fresh(n))
            kernels.accumulate_exact(None, *given, out=parts[-1])
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
    out, wide = fresh(n), np.zeros(n)
    kernels.accumulate_exact(None, bases, ys, scales, weights, out=out)
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


def exchanged(k, n, codec, form, seed=3):
    """The arguments of an exchange: every other row was never written in one half, and all were in the other."""
    rng = np.random.default_rng(seed)
    acc, bases, ys, scales, weights = problem(k, n, seed)
    bases = [bases[1] if k > 1 else None] * k
    ys = [(np.float32(0) if bases[0] is None else bases[0]) - rng.normal(size=n).astype(np.float32) for _ in range(k)]
    old = [rng.normal(size=n).astype(np.float32) if i % 3 else None for i in range(k)]
    new = [np.empty(n, np.float32) for _ in range(k)]
    if codec != "f32":
        old = [row if row is None else kernels.quantise(row, codec) for row in old]
        new = [kernels.quantise(row, codec) for row in np.zeros((k, n), np.float32)]
    anchors = [rng.normal(size=n).astype(np.float32) if i % 3 == 1 else None for i in range(k)]
    if form == "control":
        anchors = [rng.normal(size=n).astype(np.float32)] * k
    keys = np.arange(2 * k, dtype=np.uint64).reshape(k, 2)
    weights[2:4] = 0, -weights[3]  # one that is left out, and one that is taken off
    return (acc, bases, ys, scales, weights, old, anchors, new), dict(keys=keys, **FORMS[form])


@pytest.mark.parametrize("n", [0, 1, 17, 513, 2049, 4097, 16_385, 150_001])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
def test_an_exchange_has_the_bits_of_the_reference(codec, form, n):
    given, options = exchanged(5, n, codec, form)
    due, due_rows = fresh(n), exchanged(5, n, codec, form)[0][-1]
    norms = exact_reference.exchange_exact(given[0], due, *given[1:-1], due_rows, **options)
    out = fresh(n)
    np.testing.assert_allclose(kernels.exchange_exact(*given, out=out, **options), norms, 1e-5)
    same(out, due)
    for row, other in zip(given[-1], due_rows, strict=True):
        of_row, of_other = ((r.codes, r.scales) if isinstance(r, Codes) else (r, None) for r in (row, other))
        assert_same_bits(np.asarray(of_row[0]), np.asarray(of_other[0]))


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
        assert np.isfinite(kernels.exchange_exact(*given, out=total, keys=keys, adds=Terms(row=1, r=-1))).all()
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


@pytest.mark.parametrize("n", [1, 17, 513, 16_385, 50_001])
@pytest.mark.parametrize(
    "times", [[1, 1, 1], [-1, 1, 3], [5, -1, 1000], [1, -2, 2000], [4097, -4095, 4], [2**22, 3, -4096]]
)
def test_a_combination_has_the_bits_of_the_reference(times, n):
    rng = np.random.default_rng(n)
    a = ExactSum(rng.integers(-(2**24), 2**24, n), rng.integers(0, LOW, n))
    b = ExactSum(rng.integers(-(2**24), 2**24, n), rng.integers(0, LOW, n))
    vector = (rng.normal(size=n) * 10.0 ** rng.uniform(-20, 1, size=n)).astype(np.float32)
    due, out = fresh(n), fresh(n)
    fits = exact_reference.combine_exact([a, b, vector], times, due)
    assert fits == (abs(times[2]) < 4000)  # a vector's element may be as large as 2^40
    assert (kernels.combine_exact([a, b, vector], times, out) is out) == fits
    same(out, due)
    assert (kernels.combine_exact([b, vector, a], [times[1], times[2], times[0]], out) is out) == fits
    same(out, due)
    kernels.combine_exact([a, b, vector], times, a)
    same(a, due)


def test_large_coefficients_are_exact():
    a, b = (
        ExactSum(np.array([-3, 0]), np.array([LOW - 1, 5])),
        ExactSum(np.array([7, -1]), np.array([LOW // 3, LOW - 1])),
    )
    for times in (2**31, -(2**31), 2**20 + 1, -4097):
        found = kernels.combine_exact([a, b], [times, 5 - times // 2])
        for j in range(2):
            assert whole(found, j) == times * whole(a, j) + (5 - times // 2) * whole(b, j)


def test_sums_that_could_leave_the_range_are_no_result():
    most = ExactSum(np.array([2**61]), np.array([0]))
    assert kernels.combine_exact([most], [1]) is not None
    assert kernels.combine_exact([most, most], [1, 1]) is None
    assert kernels.combine_exact([ExactSum(np.array([-(2**63)]), np.array([0]))], [1]) is None
    for value in (2.0**40, -np.inf, np.nan):
        assert kernels.combine_exact([np.float32([0, value])], [1]) is None
    assert kernels.combine_exact([np.float32([2.0**39])], [-1]) is not None


@pytest.mark.parametrize("n", [0, 1, 17, 16_385, 300_001])
def test_reading_has_the_bits_of_the_reference_and_is_the_nearest(n):
    rng = np.random.default_rng(n)
    high = rng.integers(-(2**62), 2**62, n) >> rng.integers(0, 62, n)
    sum = ExactSum(high, rng.integers(0, LOW, n) >> rng.integers(0, 50, n))
    for dtype in (np.float64, np.float32):
        due, out = np.empty(n, dtype), np.empty(n, dtype)
        exact_reference.read_exact(sum, due)
        assert kernels.read_exact(sum, out) is out
        assert_same_bits(out, due)
    for j in range(min(n, 200)):
        if abs(int(high[j])) < 2**53:
            assert kernels.read_exact(sum)[j] == float(Fraction(whole(sum, j), 2**60))


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 2.0**39])
def test_a_row_that_the_grid_cannot_hold_is_told_and_the_sum_before_is_good(value):
    acc, _, ys, *_ = problem(3, 5000)
    before = ExactSum(acc.high.copy(), acc.low.copy())
    ys[1][4000] = value
    norms = kernels.accumulate_exact(acc, [None] * 3, ys, np.ones(3), np.ones(3), out=fresh(5000))
    assert np.isfinite(norms).tolist() == [True, False, True]
    same(acc, before)
    new = [np.empty(5000, np.float32) for _ in range(3)]
    given = acc, [None] * 3, ys, np.ones(3), np.ones(3), [None] * 3, [None] * 3, new
    assert np.isfinite(kernels.exchange_exact(*given, out=fresh(5000))).tolist() == [True, False, True]
    control = kernels.exchange_exact(*given, out=fresh(5000), row=Terms(h=1, r=1, q=1))
    assert np.isfinite(control).tolist() == [True, False, True]


def test_a_weight_counts_for_what_the_grid_holds():
    y, out = np.float32([2.0**20]), fresh(1)
    for weight, held in ((2.0**18, True), (2.0**19, False), (-(2.0**19), False), (0.0, True)):
        norms = kernels.accumulate_exact(None, [None], [y], np.ones(1), np.array([weight]), out=out)
        assert np.isfinite(norms[0]) == held
        assert np.isfinite(exact_reference.accumulate_exact(None, out, [None], [y], [1.0], [weight])[0]) == held
    rows = [None], [None], [np.empty(1, np.float32)]
    large = [np.float32([2.0**38.5])]
    given = ExactSum.zeros(1), [None], [np.float32([2.0**38])], np.ones(1), np.ones(1)
    assert np.isfinite(kernels.exchange_exact(*given, *rows, out=out))[0]
    rows = large, [None], [np.empty(1, np.float32)]  # a row that becomes the sum of two large numbers
    held = kernels.exchange_exact(*given, *rows, out=out, row=Terms(h=-3, r=3), adds=Terms(row=1, r=-1))
    assert not np.isfinite(held[0])
    assert LONGEST_EXACT == 2.0**39


def test_bad_arguments_are_named():
    a, y = ExactSum.zeros(4), np.zeros(4, np.float32)
    ones = np.ones(1)
    with pytest.raises(errors.ArrayError, match="acc: expected an ExactSum of two"):
        kernels.accumulate_exact(np.zeros(4), [None], [y], ones, ones, out=a)
    with pytest.raises(errors.DtypeError, match=r"acc\.low: expected int64\[4\], got float64\[4\]"):
        kernels.accumulate_exact(ExactSum(a.high, np.zeros(4)), [None], [y], ones, ones, out=a)
    with pytest.raises(errors.ShapeError, match=r"out\.low: expected int64\[4\], got int64\[5\]"):
        kernels.accumulate_exact(None, [None], [y], ones, ones, out=ExactSum(a.high, np.zeros(5, np.int64)))
    with pytest.raises(errors.ArrayError, match="out: expected both words of acc, or none"):
        kernels.accumulate_exact(a, [None], [y], ones, ones, out=ExactSum(a.high, np.zeros(4, np.int64)))
    with pytest.raises(errors.ArrayError, match="must not overlap"):
        kernels.accumulate_exact(a, [None], [y], ones, ones, out=ExactSum(a.low, a.high))
    with pytest.raises(errors.ArrayError, match="must not overlap"):
        kernels.accumulate_exact(None, [None], [y], ones, ones, out=ExactSum(a.high, a.high))
    with pytest.raises(errors.ShapeError, match="terms: expected at least one, got none"):
        kernels.combine_exact([], [])
    with pytest.raises(errors.RangeError, match=r"coefficients: expected integers of at most 2\^31"):
        kernels.combine_exact([a], [2**31 + 1])
    with pytest.raises(errors.DtypeError, match=r"terms\[1\]: expected float32\[4\], got float64\[4\]"):
        kernels.combine_exact([a, np.zeros(4)], [1, 1])
    with pytest.raises(errors.DtypeError, match="out: expected float32 or float64"):
        kernels.read_exact(a, np.zeros(4, np.int32))
