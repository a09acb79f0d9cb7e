"""Vectors in parts, cut at multiples of 16,384 elements: the bits of one call on the whole."""

from functools import partial

import numpy as np
import pytest

from fedcore import kernels
from fedcore.kernels import Codes, ExactSum, Linear
from tests import oracle
from tests.kernels.arrays import FORMS, empty_row, random_keys

BLOCK, K = 16_384, 5
PARTS = [1, 2, 3, 7]


def cuts(parts, seed):
    """The bounds of the parts, each of one or two blocks, the last of any length."""
    blocks = np.random.default_rng(seed).integers(1, 3, parts)
    ends = np.cumsum(blocks) * BLOCK
    ends[-1] -= np.random.default_rng(seed + 1).integers(1, BLOCK)
    return [slice(int(start), int(end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def cut(array, span):
    """A part of a kernel's argument."""
    if array is None or isinstance(array, int | float):
        return array
    if isinstance(array, list):
        return [cut(one, span) for one in array]
    if isinstance(array, ExactSum):
        return array.cut(span)
    if isinstance(array, Codes):
        scales = None if array.scales is None else array.scales[span.start // 64 : -(-span.stop // 64)]
        return Codes(array.codec, array.codes[span], scales)
    return array[span]


def vectors(rng, k, n):
    return [rng.standard_normal(n, np.float32) * np.float32(10 ** rng.uniform(-3, 3)) for _ in range(k)]


def in_parts(parts, seed, k, call):
    """The partials of ``call(span, partials)`` on each part, in memory with arbitrary contents."""
    spans = cuts(parts, seed)
    partials = np.full((-(-spans[-1].stop // BLOCK), k), 7.0)
    for span in spans:
        call(span, partials[span.start // BLOCK : -(-span.stop // BLOCK)])
    return partials


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, "exact"])
def test_a_fold_in_parts_has_the_bits_of_one(dtype, parts):
    n, rng = cuts(parts, parts)[-1].stop, np.random.default_rng(parts)
    ys, scales, weights = vectors(rng, K, n), rng.random(K), rng.random(K)
    bases = [*vectors(rng, K - 1, n), None]
    if dtype == "exact":
        acc, whole, made = ExactSum.zeros(n), ExactSum.empty(n), ExactSum.empty(n)
        fold, total = kernels.accumulate, partial(kernels.sum_of_partials_exact, weights=weights)
    else:
        acc, whole, made = rng.normal(size=n).astype(dtype), np.empty(n, dtype), np.empty(n, dtype)
        fold, total = kernels.accumulate, kernels.sum_of_partials
    squares = fold(acc, bases, ys, scales, weights, out=whole)

    def of_part(span, partials):
        given = cut(acc, span), cut(bases, span), cut(ys, span), scales, weights
        of_part = fold(*given, out=cut(made, span), partials=partials)
        np.testing.assert_array_equal(of_part, total(partials))

    partials = in_parts(parts, parts, K, of_part)
    np.testing.assert_array_equal(total(partials), squares)
    np.testing.assert_array_equal(np.array(made), np.array(whole))
    np.testing.assert_allclose(partials, oracle.squares_of_blocks(hs(bases, ys, scales)), rtol=1e-5)


def hs(bases, ys, scales):
    return [oracle.gradient(*sent) for sent in zip(bases, ys, scales, strict=True)]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", ["f32", "bf16", "f16", "int8"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.sample(2)
def test_an_exchange_in_parts_has_the_bits_of_one(exact, codec, form, parts):
    n, rng = cuts(parts, parts + 9)[-1].stop, np.random.default_rng(parts)
    ys, bases, anchors, old = (vectors(rng, K, n) for _ in range(4))
    scales, weights, options = rng.random(K), rng.random(K), FORMS[form] | dict(keys=random_keys(K, parts))
    if codec != "f32":
        old = [kernels.quantise(row, codec) for row in old]
    rows, made_rows = [empty_row(codec, n) for _ in ys], [empty_row(codec, n) for _ in ys]
    if exact:
        acc, whole, made = ExactSum.zeros(n), ExactSum.empty(n), ExactSum.empty(n)
        swap, total = kernels.exchange, partial(kernels.sum_of_partials_exact, weights=weights, **FORMS[form])
    else:
        acc, whole, made = rng.normal(size=n), np.empty(n), np.empty(n)
        swap, total = kernels.exchange, kernels.sum_of_partials
    squares = swap(acc, bases, ys, scales, weights, old, anchors, rows, out=whole, **options)
    assert np.isfinite(squares).all()

    def of_part(span, partials):
        given = cut(acc, span), cut(bases, span), cut(ys, span), scales, weights, cut(old, span), cut(anchors, span)
        to = dict(out=cut(made, span), partials=partials, first=span.start)
        swap(*given, cut(made_rows, span), **to, **options)

    partials = in_parts(parts, parts + 9, K, of_part)
    np.testing.assert_array_equal(total(partials), squares)
    np.testing.assert_array_equal(np.array(made), np.array(whole))
    for row, due in zip(made_rows, rows, strict=True):
        assert_same_row(row, due)


def assert_same_row(row, due):
    for array, of_due in zip(row[1:], due[1:], strict=True) if isinstance(row, Codes) else [(row, due)]:
        np.testing.assert_array_equal(array, of_due)


STEP = dict(v_of=Linear(A=0.1, B=0.8, T=0.2, g=0.6), total_of=Linear(A=0.3, B=0.7, T=0.9, g=0.8, v=0.4), gamma=0.5)
ADAM = dict(from_m=0.9, from_v=0.1, from_s=0.8, from_square=0.2, tau=0.1, gamma=0.5)


def server_step(a, span, partials):
    a = {name: array[span].copy() for name, array in a.items()}
    given = dict(momentum=a["g"], control=a["B"], v=a["v"], total_out=a["T"], x_out=a["x"], partials=partials)
    return kernels.server_step(a["A"], a["T"], a["x"], **given, **STEP)


def optimizer_step(a, span, partials):
    a = {name: array[span].copy() for name, array in a.items()}
    out = dict(m_out=a["g"], s_out=a["s"], x_out=a["x"], partials=partials)
    return [kernels.optimizer_step(a["v"], a["g"], a["s"], a["x"], **out, **ADAM)]


ENDS = {
    "server_step": (2, server_step),
    "optimizer_step": (1, optimizer_step),
    "squared_norms": (
        2,
        lambda a, span, partials: kernels.squared_norms([a["x"][span], a["g"][span]], partials=partials),
    ),
    "combined_square": (
        1,
        lambda a, span, partials: [kernels.combined_square([a["T"][span], a["x"][span]], [0.5, -2], partials=partials)],
    ),
}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", ENDS)
def test_a_rounds_end_in_parts_has_the_norms_of_one(name, parts):
    k, call = ENDS[name]
    n, rng = cuts(parts, parts + 5)[-1].stop, np.random.default_rng(parts)
    arrays = {letter: rng.normal(size=n) for letter in "ABT"}
    arrays |= {letter: np.abs(rng.normal(size=n)).astype(np.float32) for letter in "gxvs"}
    squares = call(arrays, slice(None), None)

    def of_part(span, partials):
        np.testing.assert_array_equal(call(arrays, span, partials), kernels.sum_of_partials(partials))

    np.testing.assert_array_equal(kernels.sum_of_partials(in_parts(parts, parts + 5, k, of_part)), squares)


def test_separate_tensors_have_separate_blocks():
    rng = np.random.default_rng(3)
    tensors = [vectors(rng, 1, n)[0] for n in (3, 20_000, 0, BLOCK)]
    y, partials = np.concatenate(tensors), np.empty((1 + 2 + 1, 2))
    given = [None, None], [tensors, y], np.ones(2), np.ones(2)
    squares = kernels.accumulate(None, *given, out=np.empty(len(y)), partials=partials)
    np.testing.assert_array_equal(kernels.sum_of_partials(partials), squares)
    for row, part in zip(partials, np.split(y, [3, 3 + BLOCK, 20_003]), strict=True):
        np.testing.assert_array_equal(row, kernels.squared_norms([part, part]))


def test_a_bad_number_is_found_in_its_part():
    y, partials = np.ones(3 * BLOCK, np.float32), np.empty((3, 1))
    y[2 * BLOCK] = np.nan
    kernels.accumulate(None, [None], [y], np.ones(1), np.ones(1), out=np.empty(len(y)), partials=partials)
    np.testing.assert_array_equal(np.isfinite(partials[:, 0]), [True, True, False])
    assert not np.isfinite(kernels.sum_of_partials(partials)).any()


def test_an_overflow_of_a_row_is_found_in_its_part():
    y, row, partials = np.ones(2 * BLOCK, np.float32), empty_row("f16", 2 * BLOCK), np.empty((2, 1))
    y[0] = 1e6  # past float16's range
    given = np.zeros(len(y)), [None], [y], np.ones(1), np.ones(1), [None], [None], [row]
    kernels.exchange(*given, out=np.empty(len(y)), keys=random_keys(1, 1), partials=partials)
    np.testing.assert_array_equal(partials[:, 0], [np.inf, BLOCK])


@pytest.mark.parametrize("form", [None, *FORMS])
def test_an_update_too_long_only_as_a_whole(form):
    n, forms = 2 * BLOCK, FORMS.get(form, {})
    y, weights, partials = (
        np.full(n, np.float32(2.0**39 / np.sqrt(0.75 * n))),
        np.array([1.0, 1, 4, 0]),
        np.empty((2, 4)),
    )
    ys, rows, out = [y, y / 2, y / 4, y], [empty_row("f32", n) for _ in range(4)], ExactSum.empty(n)

    def call(span, partials):
        given = cut(ExactSum.zeros(n), span), [None] * 4, cut(ys, span), np.ones(4), weights
        if form is None:
            return kernels.accumulate(*given, out=cut(out, span), partials=partials)
        rows_of_part = [None] * 4, [None] * 4, cut(rows, span)
        return kernels.exchange(*given, *rows_of_part, out=cut(out, span), partials=partials, **forms)

    of_parts = [call(slice(i * BLOCK, (i + 1) * BLOCK), partials[i : i + 1]) for i in (0, 1)]
    whole = call(slice(0, n), None)
    np.testing.assert_array_equal(kernels.sum_of_partials_exact(partials, weights, **forms), whole)
    if form != "general":  # whose row and sum shorten it
        assert np.isfinite(of_parts).all()
        np.testing.assert_array_equal(np.isfinite(whole), [False, True, False, True])


@pytest.mark.parametrize("codec", ["bf16", "f16", "int8"])
@pytest.mark.parametrize("place", [64, 2**20 + 192, 3 * BLOCK, 2**32 - BLOCK, 2**32, 2**40 + 64])
def test_codes_of_a_part_are_those_of_the_whole_row(codec, place):
    n = 2 * BLOCK + 5
    x, seed, row = vectors(np.random.default_rng(1), 1, n)[0], 3, 2**64 - 1
    made, due = kernels.quantise(x, codec, seed=seed, row=row, first=place), empty_row(codec, n)
    oracle.quantise(x, codec, due.codes, due.scales, seed, row, place)
    np.testing.assert_array_equal(made.codes, due.codes)
    if place < n:
        before = vectors(np.random.default_rng(2), 1, place)[0]
        whole = kernels.quantise(np.concatenate([before, x]), codec, seed=seed, row=row)
        np.testing.assert_array_equal(made.codes, whole.codes[place:])
    assert (made.codes != kernels.quantise(x, codec, seed=seed, row=row).codes).any()


def test_sums_of_no_blocks_are_zeros():
    np.testing.assert_array_equal(kernels.sum_of_partials(np.empty((0, 3))), np.zeros(3))
    assert kernels.accumulate(None, [None], [y := np.empty(0, np.float32)], np.ones(1), np.ones(1), out=y.copy()) == [0]
