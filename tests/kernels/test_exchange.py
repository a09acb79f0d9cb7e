from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore import errors, kernels, memory
from fedcore.kernels import Codes, Linear, Terms, reference
from fedcore.store import checksums
from tests.kernels.forms import FORMS
from tests.kernels.rows import empty, random_keys

CODECS = ["f32", "bf16", "f16", "int8"]
DTYPES = [np.float32, np.float64, np.float16, torch.bfloat16]
# Vector edges, blocks of a scale, chunks, tiles, blocks of the partition, and a size where a second thread joins.
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 97, 127, 511, 512, 513, 577, 2047, 2048, 2049, 2113, 16_384, 16_385, 40_001]


def sent(y, dtype):
    return torch.from_numpy(y).to(dtype) if isinstance(dtype, torch.dtype) else y.astype(dtype)


def stored(x, codec):
    return x.copy() if codec == "f32" else kernels.quantise(x, codec)


def value(row):
    return kernels.dequantise(row) if isinstance(row, Codes) else row


def arrays(row):
    return [array for array in row[1:] if array is not None] if isinstance(row, Codes) else [row]


def problem(k, n, seed, *, dtypes=DTYPES[:1], codecs=CODECS[:1], anchors_alone=False, size=0):
    """The arguments up to the anchors: dtypes, codecs and what may be absent in turn, numbers of about 10^size."""
    rng = np.random.default_rng(seed)
    rows = lambda: [(rng.normal(size=n) * 10.0**size).astype(np.float32) for _ in range(k)]  # noqa: E731
    x = (rng.normal(size=n) * 10.0**size).astype(np.float32)
    old, anchors, ys = rows(), rows(), rows()
    # every combination that may come: no row, a row, a row and an anchor; or an anchor alone
    kinds = [(0, 0), (1, 0), (1, 1), (0, 1)][: 4 if anchors_alone else 3]
    for i in range(k):
        has_row, has_anchor = kinds[(i + seed) % len(kinds)]
        old[i] = stored(old[i], codecs[i // 3 % len(codecs)]) if has_row else None
        anchors[i] = anchors[i] if has_anchor else None
        ys[i] = sent(ys[i], dtypes[(i + seed) % len(dtypes)])
    bases = [x if i % 2 else None for i in range(k)]
    return rng.normal(size=n), bases, ys, rng.random(k), rng.random(k), old, anchors


def both(acc, *rest, codecs, form="replaced"):
    """The sum, the rows and the norms, of the native function and of the reference."""
    results, keys = [], random_keys(len(codecs), len(acc))
    for native in (True, False):
        out, new = np.empty_like(acc), [empty(codec, len(acc)) for codec in codecs]
        if native:
            norms = kernels.exchange(acc, *rest, new, out=out, **FORMS[form], keys=keys)
        else:
            with np.errstate(all="ignore"):
                norms = reference.exchange(acc, out, *rest, new, **FORMS[form], keys=keys)
        results.append((out, new, norms))
    return results


def assert_equal(ours, due):
    np.testing.assert_array_equal(ours[0], due[0])
    for row, due_row in zip(ours[1], due[1], strict=True):
        for array, due_array in zip(arrays(row), arrays(due_row), strict=True):
            np.testing.assert_array_equal(array, due_array)
    np.testing.assert_allclose(ours[2], due[2], rtol=1e-5)


@settings(max_examples=150)
@given(
    k=st.integers(0, 9),
    n=st.one_of(st.integers(0, 70), st.sampled_from(LENGTHS)),
    seed=st.integers(0, 9),
    form=st.sampled_from(sorted(FORMS)),
    shift=st.integers(0, 3),
    size=st.sampled_from([0, -6, -40, 30]),  # subnormal numbers, and squares past float32
)
def test_exchange_has_the_bits_of_the_reference(k, n, seed, form, shift, size):
    arguments = problem(k, n, seed, dtypes=DTYPES[: 2 if size > 4 else 4], codecs=CODECS, anchors_alone=True, size=size)
    codecs = [CODECS[(i + shift) % 4] for i in range(k)]  # old and new alike in some clients only
    assert_equal(*both(*arguments, codecs=codecs, form=form))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("form", FORMS)
def test_every_length_has_the_bits_of_the_reference(n, codec, form):
    arguments = problem(6, n, 1, dtypes=DTYPES, codecs=[codec], anchors_alone=True)
    assert_equal(*both(*arguments, codecs=[codec] * 6, form=form))


@pytest.mark.parametrize("offset", [0, 4, 60])  # bytes behind the beginning of a cache line
@pytest.mark.parametrize("form", FORMS)
def test_rows_too_many_for_the_caches_have_the_bits_of_the_reference(form, offset):
    """What goes to other rows is stored past them then, whole lines at a time."""
    n, k = 262_147, 25  # 80 MB and more
    acc, *rest = problem(k, n, 1, dtypes=[np.float32, np.float16])
    new = [memory.empty(n + 16)[offset // 4 :][:n] for _ in range(k)]
    out, due_out, due = np.empty_like(acc), np.empty_like(acc), [np.empty(n, np.float32) for _ in range(k)]
    norms = kernels.exchange(acc, *rest, new, out=out, **FORMS[form])
    due_norms = reference.exchange(acc, due_out, *rest, due, **FORMS[form], keys=None)
    assert_equal((out, new, norms), (due_out, due, due_norms))


@pytest.mark.parametrize("n", [0, 1, 15, 16, 511, 513, 16_383, 16_384, 16_385, 40_001, 262_147])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["other rows", "a line's middle", "in place"])
def test_checksums_are_those_of_the_new_rows(n, form, place):
    """Also past the caches, where the longest go: 80 MB and more, in whole lines or not."""
    k = 25 if n > 10**5 else 5
    acc, bases, ys, scales, weights, old, anchors = problem(k, n, 2, dtypes=[np.float32, np.float16])
    offset = 3 if place == "a line's middle" else 0
    new = [memory.empty(n + 16)[offset:][:n] for _ in range(k)]
    if place == "in place":
        new = [row if row is not None else other for row, other in zip(old, new, strict=True)]
    sums, due = np.zeros((2, k, -(-n // 16_384)), np.uint64)
    before = [None if row is None else row.copy() for row in old]
    arguments = bases, ys, scales, weights
    kernels.exchange(acc, *arguments, old, anchors, new, out=np.empty_like(acc), **FORMS[form], sums=sums)
    np.testing.assert_array_equal(sums, [checksums(row, 65_536) for row in new])
    if n < 10**5:
        rows = [np.empty(n, np.float32) for _ in range(k)]
        reference.exchange(acc, acc.copy(), *arguments, before, anchors, rows, **FORMS[form], keys=None, sums=due)
        np.testing.assert_array_equal(sums, due)


def test_rows_through_a_codec_have_no_checksums():
    acc, *rest = problem(2, 100, 0)
    new = [empty("f32", 100), empty("bf16", 100)]
    with pytest.raises(errors.ArrayError, match=r"sums: expected None, because new_rows\[1\] is not float32"):
        kernels.exchange(acc, *rest, new, out=acc, keys=random_keys(2, 0), sums=np.zeros((2, 1), np.uint64))
    assert np.isnan(new[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_y_of_any_dtype_is_first_rounded_to_float32(dtype):
    acc, bases, ys, *rest = problem(5, 5000, 0)
    ys = [sent(y, dtype) for y in ys]
    rounded = [np.float32(y.float() if isinstance(y, torch.Tensor) else y) for y in ys]
    assert_equal(
        both(acc, bases, ys, *rest, codecs=["int8"] * 5)[0], both(acc, bases, rounded, *rest, codecs=["int8"] * 5)[0]
    )


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_rows_codes_are_those_of_quantise(codec):
    acc, bases, ys, scales, weights, old, anchors = problem(3, 5000, 0)
    keys = np.array([[0, 0], [7, 2**63], [2**64 - 1, 3]], np.uint64)
    new = [empty(codec, 5000) for _ in range(3)]
    kernels.exchange(acc, bases, ys, scales, weights, old, anchors, new, out=np.empty(5000), keys=keys)
    for i, row in enumerate(new):
        h = reference.gradient(bases[i], ys[i], scales[i])
        seed, number = (int(key) for key in keys[i])
        due = kernels.quantise(h, codec, seed=seed, row=number)
        for array, due_array in zip(arrays(row), arrays(due), strict=True):
            np.testing.assert_array_equal(array, due_array)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_may_be_replaced_where_it_lies(codec, form):
    acc, bases, ys, scales, weights, old, anchors = problem(3, 5000, 0)
    old = [stored(np.ones(5000, np.float32) if row is None else row, codec) for row in old]
    out, new, keys = np.empty(5000), [empty(codec, 5000) for _ in range(3)], random_keys(3, 0)
    kernels.exchange(acc, bases, ys, scales, weights, old, anchors, new, out=out, **FORMS[form], keys=keys)
    kernels.exchange(acc, bases, ys, scales, weights, old, anchors, old, out=acc, **FORMS[form], keys=keys)
    np.testing.assert_array_equal(acc, out)
    for row, due in zip(old, new, strict=True):
        np.testing.assert_array_equal(value(row), value(due))


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_one_by_one_is_all_at_once(codec):
    acc, *rest, old, anchors = problem(7, 20_000, 0, dtypes=DTYPES, codecs=[codec])
    keys, new, single = random_keys(7, 0), [empty(codec, 20_000) for _ in range(7)], acc.copy()
    norms = kernels.exchange(acc, *rest, old, anchors, new, out=acc, keys=keys)
    for i in range(7):
        one = [part[i : i + 1] for part in (*rest, old, anchors)]
        norm = kernels.exchange(single, *one, [empty(codec, 20_000)], out=single, keys=keys[i : i + 1])
        assert norm[0] == norms[i]
    np.testing.assert_array_equal(single, acc)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_the_sum_follows_the_rows_for_ten_thousand_exchanges(codec):
    """A sum that saw h instead of what the row stores of it would be off by a rounding of the codec an exchange."""
    n, clients, seed = 130, 25, 5
    rng = np.random.default_rng(seed)
    rows = [None] * clients
    total = np.zeros(n)
    for turn in range(10_000 // 4):
        chosen = rng.choice(clients, 4, replace=False)
        ys = [rng.normal(size=n).astype(np.float32) for _ in chosen]
        old = [rows[i] for i in chosen]
        for i in chosen:
            rows[i] = empty(codec, n) if rows[i] is None else rows[i]
        keys = np.array([[seed, 25 * turn + i] for i in chosen], np.uint64)
        new = [rows[i] for i in chosen]
        kernels.exchange(total, [None] * 4, ys, np.ones(4), np.ones(4), old, [None] * 4, new, out=total, keys=keys)
    due = np.sum([kernels.dequantise(row) for row in rows], axis=0, dtype=np.float64)
    np.testing.assert_allclose(total, due, rtol=0, atol=1e-11)


@pytest.mark.parametrize("codec", CODECS[1:])
def test_stochastic_rows_are_unbiased(codec):
    """The mean of 10^6 roundings lies within 5 sigma of the number."""
    n, total = 250_000, np.zeros(250_000)
    y = np.full(n, -0.3, np.float32)
    y[::64] = -7.5  # sets the scale
    for i in range(4):
        key = np.array([[3, i]], np.uint64)
        kernels.exchange(
            total, [None], [y], np.ones(1), np.ones(1), [None], [None], [empty(codec, n)], out=total, keys=key
        )
    stores = total[y == np.float32(-0.3)] / 4
    assert abs(stores.mean() - np.float64(np.float32(0.3))) < 5 * stores.std() / np.sqrt(len(stores))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", [0, 511, 2047, 4999])
def test_what_is_not_finite_shows_in_its_norm_and_leaves_the_others_alone(bad, codec, form, where):
    acc, bases, ys, scales, weights, old, anchors = problem(3, 5000, 0, codecs=[codec])
    before = acc.copy()
    alone, due = both(acc, bases, ys, scales, weights, old, anchors, codecs=[codec] * 3, form=form)
    ys[1] = ys[1].copy()
    ys[1][where] = bad
    ours, due = both(acc, bases, ys, scales, weights, old, anchors, codecs=[codec] * 3, form=form)
    np.testing.assert_array_equal(np.isfinite(ours[2]), [True, False, True])
    np.testing.assert_array_equal(np.isfinite(due[2]), [True, False, True])
    np.testing.assert_array_equal(acc, before)
    for i in (0, 2):
        np.testing.assert_array_equal(value(ours[1][i]), value(alone[1][i]))


@pytest.mark.parametrize(
    ("codec", "form", "h", "r"),
    [
        ("bf16", "replaced", 3.4e38, 0),
        ("f16", "replaced", 7e4, 0),
        ("f32", "control", 3e38, 3e38),
        ("int8", "control", 3e38, 3e38),
    ],
)
def test_a_finite_h_whose_row_is_not_finite_tells(codec, form, h, r):
    y, old, out = np.float32([1, -h, 1]), [np.float32([0, r, 0])], np.empty(3)
    norms = kernels.exchange(
        *(np.zeros(3), [None], [y], np.ones(1), np.ones(1), old, [None], [empty(codec, 3)]),
        out=out,
        **FORMS[form],
        keys=random_keys(1, 0),
    )
    assert norms == [np.inf]


def test_every_number_of_a_form_counts_by_hand():
    old, new, total = np.float32([2]), np.empty(1, np.float32), np.float64([100])
    arguments = [None], [np.float32([-3])], np.ones(1), np.full(1, 0.5), [old], [np.float32([5])], [new]
    row, adds = Terms(h=1, r=10, q=100), Terms(h=1, r=10, q=100, row=1000)
    norms = kernels.exchange(total, *arguments, out=total, row=row, adds=adds)
    np.testing.assert_array_equal(new, [3 + 20 + 500])
    np.testing.assert_array_equal(total, [100 + 0.5 * (3 + 20 + 500 + 523_000)])
    np.testing.assert_array_equal(norms, [9])


def test_a_form_shows_what_it_holds():
    assert repr(Terms(h=1, r=-0.5)) == "Terms(h=1, r=-0.5)"
    assert repr(Linear(T=1, v=2)) == "Linear(T=1, v=2)"


def test_the_control_form_by_hand():
    """SCAFFOLD, option II: c_i+ = c_i - c + h_i, and c moves by what the c_i do."""
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
def test_whoever_is_beside_a_client_changes_nothing(form, first, second):
    """Neighbours may share a pass, or not, by what they start from and by what there is of them."""
    n = 2100
    rng = np.random.default_rng(0)
    vector = lambda: rng.normal(size=n).astype(np.float32)  # noqa: E731
    x, other = vector(), vector()
    kinds = [(None, None), (vector(), None), (vector(), vector()), (None, vector())]
    kinds += [(stored(old, codec), anchor) for old, anchor in kinds[1:3] for codec in {first, second} - {"f32"}]
    acc, ys, ones = rng.normal(size=n), [vector(), vector()], np.ones(2)
    apart = [(x, other), (x, None), (None, x)]  # two of a kind meet all of them, and others each in turn
    for (i, mine), (j, theirs) in product(enumerate(kinds), enumerate(kinds)):
        old, anchors = (list(part) for part in zip(mine, theirs, strict=True))
        for bases in [(x, x), *(apart if i == j else [apart[(i + j) % 3]])]:
            ours, due = both(acc, list(bases), ys, ones, ones, old, anchors, codecs=[first, second], form=form)
            assert_equal(ours, due)
