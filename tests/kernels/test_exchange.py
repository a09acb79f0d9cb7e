"""Exchanges of rows, beyond the comparison with the oracle, or at other lengths."""

from itertools import product

import numpy as np
import pytest

from fedcore import arrays as memory
from fedcore import kernels
from fedcore.kernels import Codes, Linear, Terms
from fedcore.store import checksums
from tests.kernels.arrays import CODECS, DTYPES, FORMS, Numbers, empty_row, random_keys
from tests.kernels.cases import Norms, assert_as_defined, exchange_given, stored


def value(row):
    return kernels.dequantise(row) if isinstance(row, Codes) else row


def problem(k, n, codecs=("f32",), dtypes=("float32",)):
    """The arguments up to the anchors: in turn no row, a row, and a row with an anchor."""
    return exchange_given(Numbers(n), k, codecs, dtypes=dtypes, anchors_alone=False)


def results(given, codecs, form):
    """The norms, the sum and the new rows, each in separate memory."""
    out, new = np.empty_like(given[0]), [empty_row(codec, len(given[0])) for codec in codecs]
    norms = kernels.exchange(*given, new, out=out, keys=random_keys(len(codecs), len(out)), **FORMS[form])
    return [Norms(norms), out, *new]


@pytest.mark.parametrize("offset", [0, 4, 60])  # bytes behind the beginning of a cache line
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sample(1)
def test_rows_too_many_for_the_caches_have_the_bits_of_the_oracle(form, offset):
    """The kernel then stores new rows past the caches, in whole lines."""
    n, k = 262_147, 25  # 80 MB and more
    given = problem(k, n, dtypes=["float32", "float16"])

    def call():
        out, new = np.empty(n), [memory.empty(n + 16)[offset // 4 :][:n] for _ in range(k)]
        return [Norms(kernels.exchange(*given, new, out=out, **FORMS[form])), out, *new]

    assert_as_defined(call)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 511, 513, 16_383, 16_384, 16_385, 40_001, 262_147])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["other rows", "a line's middle", "in place"])
@pytest.mark.sample(2)
def test_checksums_are_those_of_the_new_rows(n, form, place):
    """Includes rows stored past the caches (80 MB and more), in whole lines or not."""
    k = 25 if n > 10**5 else 5
    acc, bases, ys, scales, weights, old, anchors = problem(k, n, dtypes=["float32", "float16"])
    offset = 3 if place == "a line's middle" else 0
    new = [memory.empty(n + 16)[offset:][:n] for _ in range(k)]
    if place == "in place":
        new = [row if row is not None else other for row, other in zip(old, new, strict=True)]
    sums = np.zeros((k, -(-n // 16_384)), np.uint64)
    given = acc, bases, ys, scales, weights, old, anchors, new
    kernels.exchange(*given, out=np.empty_like(acc), **FORMS[form], sums=sums)
    np.testing.assert_array_equal(sums, [checksums(row, 65_536) for row in new])


@pytest.mark.parametrize("codec", CODECS[1:])
def test_new_codes_equal_quantise(codec):
    acc, _, ys, scales, weights, old, anchors = problem(3, 5000)
    keys = np.array([[0, 0], [7, 2**63], [2**64 - 1, 3]], np.uint64)
    new = [empty_row(codec, 5000) for _ in range(3)]
    kernels.exchange(acc, [None] * 3, ys, scales, weights, old, anchors, new, out=np.empty(5000), keys=keys)
    for row, y, scale, (seed, number) in zip(new, ys, scales, keys.tolist(), strict=True):
        due = kernels.quantise(-y * np.float32(scale), codec, seed=seed, row=number)
        assert [np.array(part).tobytes() for part in row[1:]] == [np.array(part).tobytes() for part in due[1:]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_may_be_replaced_in_place(codec, form):
    acc, *rest, old, anchors = problem(3, 5000)
    old = [stored(np.ones(5000, np.float32) if row is None else row, codec) for row in old]
    out, new, keys = np.empty(5000), [empty_row(codec, 5000) for _ in range(3)], random_keys(3, 0)
    kernels.exchange(acc, *rest, old, anchors, new, out=out, **FORMS[form], keys=keys)
    kernels.exchange(acc, *rest, old, anchors, old, out=acc, **FORMS[form], keys=keys)
    np.testing.assert_array_equal(acc, out)
    for row, due in zip(old, new, strict=True):
        np.testing.assert_array_equal(value(row), value(due))


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_single_calls_equal_one_batch(codec):
    acc, *rest = problem(7, 20_000, [codec], DTYPES)
    keys, new, single = random_keys(7, 0), [empty_row(codec, 20_000) for _ in range(7)], acc.copy()
    norms = kernels.exchange(acc, *rest, new, out=acc, keys=keys)
    for i in range(7):
        one = [part[i : i + 1] for part in rest]
        norm = kernels.exchange(single, *one, [empty_row(codec, 20_000)], out=single, keys=keys[i : i + 1])
        assert norm[0] == norms[i]
    np.testing.assert_array_equal(single, acc)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_the_sum_follows_the_rows_for_ten_thousand_exchanges(codec):
    """A sum over h instead of the stored row would be off by one rounding of the codec for each exchange."""
    n, clients, seed = 130, 25, 5
    rng = np.random.default_rng(seed)
    rows = [None] * clients
    total = np.zeros(n)
    for turn in range(10_000 // 4):
        chosen = rng.choice(clients, 4, replace=False)
        ys = [rng.normal(size=n).astype(np.float32) for _ in chosen]
        old = [rows[i] for i in chosen]
        for i in chosen:
            rows[i] = empty_row(codec, n) if rows[i] is None else rows[i]
        keys = np.array([[seed, 25 * turn + i] for i in chosen], np.uint64)
        new = [rows[i] for i in chosen]
        kernels.exchange(total, [None] * 4, ys, np.ones(4), np.ones(4), old, [None] * 4, new, out=total, keys=keys)
    due = np.sum([kernels.dequantise(row) for row in rows], axis=0, dtype=np.float64)
    np.testing.assert_allclose(total, due, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", [0, 511, 2047, 4999])
@pytest.mark.sample(2)
def test_a_bad_update_has_an_infinite_norm_and_does_not_affect_others(bad, codec, form, where):
    given = problem(3, 5000, [codec])
    before, ys = given[0].copy(), given[2]
    _, _, *alone = results(given, [codec] * 3, form)
    ys[1] = ys[1].copy()
    ys[1][where] = bad
    norms, _, *new = results(given, [codec] * 3, form)
    np.testing.assert_array_equal(np.isfinite(norms), [True, False, True])
    np.testing.assert_array_equal(given[0], before)
    for i in (0, 2):
        np.testing.assert_array_equal(value(new[i]), value(alone[i]))


@pytest.mark.parametrize(
    ("codec", "form", "h", "r"),
    [
        ("bf16", "replaced", 3.4e38, 0),
        ("f16", "replaced", 7e4, 0),
        ("f32", "control", 3e38, 3e38),
        ("int8", "control", 3e38, 3e38),
    ],
)
def test_a_finite_update_with_an_infinite_row_has_an_infinite_norm(codec, form, h, r):
    y, old, out = np.float32([1, -h, 1]), [np.float32([0, r, 0])], np.empty(3)
    norms = kernels.exchange(
        *(np.zeros(3), [None], [y], np.ones(1), np.ones(1), old, [None], [empty_row(codec, 3)]),
        out=out,
        **FORMS[form],
        keys=random_keys(1, 0),
    )
    assert norms == [np.inf]


def test_every_coefficient_of_a_form_by_hand():
    old, new, total = np.float32([2]), np.empty(1, np.float32), np.float64([100])
    arguments = [None], [np.float32([-3])], np.ones(1), np.full(1, 0.5), [old], [np.float32([5])], [new]
    row, adds = Terms(h=1, r=10, q=100), Terms(h=1, r=10, q=100, row=1000)
    norms = kernels.exchange(total, *arguments, out=total, row=row, adds=adds)
    np.testing.assert_array_equal(new, [3 + 20 + 500])
    np.testing.assert_array_equal(total, [100 + 0.5 * (3 + 20 + 500 + 523_000)])
    np.testing.assert_array_equal(norms, [9])


def test_the_repr_of_a_form():
    assert repr(Terms(h=1, r=-0.5)) == "Terms(h=1, r=-0.5)"
    assert repr(Linear(T=1, v=2)) == "Linear(T=1, v=2)"


def test_the_control_form_by_hand():
    """SCAFFOLD, option II: c_i+ = c_i - c + h_i, and c changes by the sum of the changes of c_i."""
    old, new = np.float32([1, 2]), np.empty(2, np.float32)
    total = np.float64([10, 20])
    minus_c = np.float32([-0.5, 0.25])
    arguments = [None], [np.float32([-4, -8])], np.ones(1), np.full(1, 0.5), [old], [minus_c], [new]
    norms = kernels.exchange(total, *arguments, out=total, **FORMS["control"])
    np.testing.assert_array_equal(new, [4 + 1 - 0.5, 8 + 2 + 0.25])
    np.testing.assert_array_equal(total, [10 + 0.5 * (4.5 - 1), 20 + 0.5 * (10.25 - 2)])
    np.testing.assert_array_equal(norms, [80])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", CODECS)
@pytest.mark.parametrize("second", CODECS)
@pytest.mark.sample(2)
def test_neighbours_do_not_affect_a_client(form, first, second):
    """Whether neighbours share a pass depends on their bases, rows and anchors."""
    g = Numbers(2100)
    x, other = g(), g()
    kinds = [(None, None), (g(), None), (g(), g()), (None, g())]
    kinds += [(stored(old, codec), anchor) for old, anchor in kinds[1:3] for codec in {first, second} - {"f32"}]
    acc, ys, ones = g("float64"), [g(), g()], np.ones(2)
    apart = [(x, other), (x, None), (None, x)]  # two of a kind meet all of them, and others each in turn
    for (i, mine), (j, theirs) in product(enumerate(kinds), enumerate(kinds)):
        old, anchors = (list(part) for part in zip(mine, theirs, strict=True))
        for bases in [(x, x), *(apart if i == j else [apart[(i + j) % 3]])]:
            given = acc, list(bases), ys, ones, ones, old, anchors
            assert_as_defined(lambda given=given: results(given, [first, second], form))
