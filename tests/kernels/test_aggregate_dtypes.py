"""Weighted sums of float64, float16 and bfloat16 rows, and of what rows are short of a base."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore import errors, kernels
from fedcore.kernels import reference
from tests.kernels.same_bits import assert_same_bits, bits

DTYPES = ["float32", "float64", "float16", "bfloat16"]
ALL = "float32 or float64 or float16 or bfloat16"
# Vector edges, tile and block edges, and a size where a second thread joins.
LENGTHS = [0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 2047, 2049, 16_385, 70_001]


def empty(n, dtype):
    return torch.empty(n, dtype=torch.bfloat16) if dtype == "bfloat16" else np.empty(n, dtype)


def numbers(n, dtype, rng):
    """Of all sizes that a sum in this dtype can hold: subnormal ones, and the largest but for a factor of 100."""
    lowest, highest = {"float16": (-9, 2), "float64": (-300, 290)}.get(dtype, (-44, 36))
    x = rng.normal(size=n) * 10.0 ** rng.integers(lowest, highest, size=n)
    return torch.from_numpy(x).bfloat16() if dtype == "bfloat16" else x.astype(dtype)


def any_bits(n, dtype, rng):
    """NaN, infinities and numbers of all sizes alike."""
    if dtype == "bfloat16":
        return torch.from_numpy(rng.integers(-(2**15), 2**15, n).astype(np.int16)).view(torch.bfloat16)
    return np.frombuffer(rng.bytes(n * np.dtype(dtype).itemsize), dtype)


def expected(rows, weights, out, **options):
    due = out.clone() if isinstance(out, torch.Tensor) else out.copy()
    with np.errstate(all="ignore"):
        reference.weighted_sum(rows, weights, due, **options)
    return due


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_the_bits_of_the_reference(dtype, with_base, accumulate):
    for n in LENGTHS:
        for k in (1, 4, 8, 9) if n < 10_000 else (9,):
            rng = np.random.default_rng([n, k])
            rows, weights = [numbers(n, dtype, rng) for _ in range(k)], rng.normal(size=k).astype(np.float32)
            base = rng.normal(size=n).astype(np.float32) if with_base else None
            for out in (empty(n, dtype), np.empty(n, np.float32)):
                due = expected(rows, weights, out, base=base, float64=accumulate == "float64")
                assert kernels.weighted_sum(rows, weights, out, base=base, accumulate=accumulate) is out
                assert_same_bits(out, due)


@given(
    dtype=st.sampled_from(DTYPES),
    own=st.booleans(),
    k=st.integers(0, 10),
    n=st.integers(0, 100),
    make=st.sampled_from([numbers, any_bits]),
    with_base=st.booleans(),
    accumulate=st.sampled_from(["float32", "float64"]),
    wide_weights=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_rows(dtype, own, k, n, make, with_base, accumulate, wide_weights, seed):
    rng = np.random.default_rng(seed)
    rows, base = [make(n, dtype, rng) for _ in range(k)], make(n, "float32", rng) if with_base else None
    weights = rng.normal(size=k).astype(np.float64 if wide_weights and accumulate == "float64" else np.float32)
    out = empty(n, dtype) if own else np.empty(n, np.float32)
    due = expected(rows, weights, out, base=base, float64=accumulate == "float64")
    kernels.weighted_sum(rows, weights, out, base=base, accumulate=accumulate)
    assert_same_bits(out, due)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_code_of_16_bits_is_read_and_written_as_what_it_is(dtype, accumulate):
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(getattr(torch, dtype))
    due = torch.add(codes.float(), 0).numpy()  # a sum has no negative zero
    assert_same_bits(kernels.weighted_sum([codes], [1], accumulate=accumulate), due)
    out = torch.empty_like(codes)
    kernels.weighted_sum([codes], [1], out, accumulate=accumulate)
    assert_same_bits(out.float().numpy(), due)


@pytest.mark.parametrize(("dtype", "lost"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_a_float64_sum_is_rounded_once(dtype, lost):
    """1 and half a unit more is a tie; less than float32 can hold beside it decides, either way."""
    row = getattr(torch, dtype)
    for least in (2.0**-24, -(2.0**-24), 0):
        parts = [torch.tensor([part], dtype=row) for part in (1, lost, 1)]
        out = torch.empty(1, dtype=row)
        kernels.weighted_sum(parts, [1, 1, least * 2.0**-16], out, accumulate="float64")
        assert out.item() == (1 + 2 * lost if least > 0 else 1)


def test_what_comes_out_if_nothing_is_given():
    for dtype in DTYPES:
        for accumulate in ("float32", "float64"):
            kept = "float64" if dtype == accumulate == "float64" else "float32"
            row = torch.ones(3, dtype=getattr(torch, dtype))
            assert kernels.weighted_sum([row], [1], accumulate=accumulate).dtype == kept
            assert kernels.weighted_sum_segments([[row]], [1], accumulate=accumulate)[0].dtype == kept
            if dtype != "bfloat16":
                assert kernels.weighted_sum([row.numpy()], [1], accumulate=accumulate).dtype == kept
                view = memoryview(row.numpy().tobytes()).cast({"float32": "f", "float64": "d"}.get(dtype, "B"))
                if view.format != "B":
                    assert kernels.weighted_sum([view], [1], accumulate=accumulate).dtype == kept


def test_float64_keeps_what_float32_would_lose():
    large, close = np.array([1e300]), np.array([1 + 2.0**-50])
    assert kernels.weighted_sum([large, close], [1e-300, 1], accumulate="float64")[0] == 1e300 * 1e-300 + close[0]
    one = [np.ones(1)]
    assert kernels.weighted_sum(one, [1 / 3], accumulate="float64")[0] == 1 / 3
    assert kernels.weighted_sum(one, np.array([1 / 3]), accumulate="float64")[0] == 1 / 3
    assert kernels.weighted_sum(one, np.float32([1 / 3]), accumulate="float64")[0] == np.float32(1 / 3)
    assert kernels.weighted_sum(one, [1 / 3])[0] == np.float32(1 / 3)
    with np.errstate(over="ignore"):
        assert kernels.weighted_sum([large], [1])[0] == np.inf  # read as float32


def test_a_base_is_subtracted_from_without_storing_the_differences():
    rng = np.random.default_rng(0)
    x, rows = rng.normal(size=3000).astype(np.float32), [rng.normal(size=3000).astype(np.float32) for _ in range(11)]
    weights = rng.random(11, dtype=np.float32)
    for accumulate in ("float32", "float64"):
        due = kernels.weighted_sum([x - row for row in rows], weights, accumulate=accumulate)
        np.testing.assert_array_equal(kernels.weighted_sum(rows, weights, base=x, accumulate=accumulate), due)
    out = np.ones(3, np.float32)
    kernels.weighted_sum([], [], out, base=np.ones(3, np.float32))  # of no rows
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "bool", "complex64", "longdouble"])
def test_what_is_no_float_is_refused_by_name(dtype):
    rows, out = [np.ones(4, dtype)] * 2, np.full(4, 7, np.float32)
    name = np.dtype(dtype).name
    for refused in (lambda: kernels.weighted_sum(rows, [1, 1], out), lambda: kernels.weighted_sum(rows, [1, 1])):
        with pytest.raises(errors.DtypeError, match=rf"rows\[0\]: expected {ALL}\[n\], got {name}\[4\]"):
            refused()
    with pytest.raises(errors.DtypeError, match=rf"models\[0\]\[0\]: expected {ALL} of n elements, got {name}\[4\]"):
        kernels.weighted_sum_segments([[row] for row in rows], [1, 1], [out])
    np.testing.assert_array_equal(out, 7)
    if dtype in ("int32", "int64"):
        with pytest.raises(errors.DtypeError, match=rf"rows\[0\]: .*got {dtype}\[4\]"):
            kernels.weighted_sum([torch.from_numpy(rows[0])], [1])


half, double, single = np.ones(4, np.float16), np.ones(4), np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(rows=[half, single]), errors.DtypeError, r"rows\[1\]: expected float16\[4\], got float32\[4\]"),
        (dict(rows=[single, half]), errors.DtypeError, r"rows\[1\]: expected float32\[4\], got float16\[4\]"),
        (dict(rows=[double, half]), errors.DtypeError, r"rows\[1\]: expected float64\[4\], got float16\[4\]"),
        (dict(rows=[half, half[:3]]), errors.ShapeError, r"rows\[1\]: expected float16\[4\], got float16\[3\]"),
        (dict(rows=[np.ones(8, np.float16)[::2]] * 2), errors.ShapeError, r"rows\[0\]: .* not contiguous"),
        (dict(rows=[torch.ones(8, dtype=torch.bfloat16)[::2]] * 2), errors.ShapeError, r"rows\[0\]: .* not contiguous"),
        (dict(rows=[np.ones((2, 2), np.float16)] * 2), errors.ShapeError, rf"rows\[0\]: expected {ALL}\[n\], got"),
        (dict(rows=[np.ones(4, ">f2")] * 2), errors.DtypeError, r"rows\[0\]: .* got >f2\[4\]"),
        (dict(out=np.zeros(4)), errors.DtypeError, r"out: expected float32 or float16\[4\], got float64\[4\]"),
        (dict(out=torch.zeros(4).bfloat16()), errors.DtypeError, r"out: .* got bfloat16\[4\]"),
        (
            dict(out=np.zeros(5, np.float16)),
            errors.ShapeError,
            r"out: expected float32 or float16\[4\], got float16\[5\]",
        ),
        (dict(out=np.zeros(8, np.float16)[::2]), errors.ShapeError, "out: .* not contiguous"),
        (dict(out=np.frombuffer(bytes(8), np.float16)), errors.ArrayError, "out: .* read-only"),
        (dict(base=np.ones(4)), errors.DtypeError, r"base: expected float32\[4\], got float64\[4\]"),
        (dict(base=half), errors.DtypeError, r"base: expected float32\[4\], got float16\[4\]"),
        (dict(base=single[:3]), errors.ShapeError, r"base: expected float32\[4\], got float32\[3\]"),
        (dict(base=np.ones(8, np.float32)[::2]), errors.ShapeError, "base: .* not contiguous"),
        (dict(weights=np.ones(2)), errors.DtypeError, r"weights: expected float32\[2\], got float64\[2\]"),
        (
            dict(weights=half[:2], accumulate="float64"),
            errors.DtypeError,
            r"weights: expected float32 or float64\[2\], got float16\[2\]",
        ),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(change, error, message):
    arguments = dict(rows=[half, half], weights=[1, 1], out=np.full(4, 7, np.float16)) | change
    before = reference.numbers(arguments["out"]).copy()
    for call in (kernels.weighted_sum, partial(kernels.weighted_sum, norms=True)):
        with pytest.raises(error, match=message):
            call(**arguments)
    np.testing.assert_array_equal(reference.numbers(arguments["out"]), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_over_an_input_is_refused(dtype):
    row = torch.ones(6, dtype=getattr(torch, dtype))
    with pytest.raises(errors.ArrayError, match=r"out: must not overlap rows\[1\]"):
        kernels.weighted_sum([row.clone(), row], [1, 1], row)
    with pytest.raises(errors.ArrayError, match=r"out: must not overlap rows\[0\]"):
        kernels.weighted_sum([row[:4]], [1], row[2:])
    x = np.ones(6, np.float32)
    with pytest.raises(errors.ArrayError, match="out: must not overlap base"):
        kernels.weighted_sum([row], [1], x, base=x)
    with pytest.raises(errors.ArrayError, match=r"outs\[1\]: must not overlap base\[0\]"):
        kernels.weighted_sum_segments([[row, row]], [1], [np.empty(6, np.float32), x], base=[x, x.copy()])
    with pytest.raises(errors.ArrayError, match="out: must not overlap weights"):
        kernels.weighted_sum([row], x[:1], x)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_segments_of_several_dtypes(accumulate):
    shapes, dtypes = [(3, 4), (), (0,), (40_000,), (5,), (2, 1, 17_000)], [*DTYPES, "float16", "float64"]
    rng = np.random.default_rng(0)
    models = [
        [numbers(int(np.prod(shape)), dtype, rng).reshape(shape) for shape, dtype in zip(shapes, dtypes, strict=True)]
        for _ in range(9)
    ]
    base = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    weights = rng.random(9, dtype=np.float32)
    own = [empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for outs in (own, None):
        for x in (base, None):
            sums = kernels.weighted_sum_segments(models, weights, outs, base=x, accumulate=accumulate)
            assert outs is None or sums is outs
            for s, shape in enumerate(shapes):
                rows = [model[s].reshape(-1) for model in models]
                flat = None if outs is None else empty(rows[0].shape, dtypes[s])
                of_segment = None if x is None else x[s].reshape(-1)
                due = kernels.weighted_sum(rows, weights, flat, base=of_segment, accumulate=accumulate)
                assert_same_bits(sums[s].reshape(-1), due)
                assert tuple(sums[s].shape) == shape


def test_segments_that_do_not_fit_are_named():
    models = [[np.ones((2, 3), np.float16), np.ones(4)] for _ in range(3)]
    with pytest.raises(errors.DtypeError, match=r"models\[1\]\[1\]: expected float64 of 4 elements, got float16\[4\]"):
        kernels.weighted_sum_segments([models[0], [models[0][0], half]], [1, 1])
    with pytest.raises(errors.DtypeError, match=r"outs\[0\]: expected float32 or float16 of 6 elements, got float64"):
        kernels.weighted_sum_segments(models, [1, 1, 1], [np.empty(6), np.empty(4)])
    with pytest.raises(errors.ShapeError, match="expected 2 entries, got 1"):
        kernels.weighted_sum_segments(models, [1, 1, 1], base=[np.ones(6, np.float32)])
    with pytest.raises(errors.ShapeError, match=r"base\[1\]: expected float32 of 4 elements, got float32\[5\]"):
        kernels.weighted_sum_segments(models, [1, 1, 1], base=[np.ones(6, np.float32), np.ones(5, np.float32)])
    with pytest.raises(errors.ShapeError, match="models: expected at least one when there are no outs, got none"):
        kernels.weighted_sum_segments([], [])
    outs = [np.ones(2, np.float16), torch.ones(3).bfloat16()]
    kernels.weighted_sum_segments([], [], outs)  # of no models, in any dtype
    assert not outs[0].any()
    assert not outs[1].any()


def test_halves_come_through_the_buffer_protocol():
    rows = [np.random.default_rng(i).normal(size=100).astype(np.float16) for i in range(3)]
    views = [memoryview(row) for row in rows]
    np.testing.assert_array_equal(kernels.weighted_sum(views, [1, 2, 3]), kernels.weighted_sum(rows, [1, 2, 3]))


def test_bfloat16_arrays_of_ml_dtypes_are_those_of_torch():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes, NumPy's bfloat16, is not installed")
    tensors = [numbers(1001, "bfloat16", np.random.default_rng(i)) for i in range(9)]
    arrays = [tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) for tensor in tensors]
    weights = np.linspace(-1, 1, 9, dtype=np.float32)
    np.testing.assert_array_equal(kernels.weighted_sum(arrays, weights), kernels.weighted_sum(tensors, weights))
    out, due = np.empty(1001, ml_dtypes.bfloat16), torch.empty(1001, dtype=torch.bfloat16)
    kernels.weighted_sum(arrays, weights, out)
    kernels.weighted_sum(tensors, weights, due)
    np.testing.assert_array_equal(out.view(np.int16), bits(due))
    reference.weighted_sum(arrays, weights, out, float64=False)
    np.testing.assert_array_equal(out.view(np.int16), bits(due))
