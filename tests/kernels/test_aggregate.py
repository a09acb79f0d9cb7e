import ctypes
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore import errors, kernels
from fedcore.kernels import Linear, reference

# Vector edges, tile and block edges, and the sizes where a second thread joins.
LENGTHS = [0, 1, 7, 15, 16, 17, 31, 33, 97, 2047, 2048, 2049, 16383, 16384, 16385, 300_001]


def vectors(k, n, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n).astype(np.float32) for _ in range(k)]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("k", [1, 3, 4, 5, 9])
def test_weighted_sum_has_the_bits_of_the_reference(k, n):
    rows, weights = vectors(k, n), vectors(1, k, seed=1)[0]
    due = np.empty(n, np.float32)
    reference.weighted_sum(rows, weights, due, float64=False)
    np.testing.assert_array_equal(kernels.weighted_sum(rows, weights), due)


def test_weighted_sum_of_no_rows_is_zero():
    out = np.ones(5, np.float32)
    assert kernels.weighted_sum([], [], out=out) is out
    np.testing.assert_array_equal(out, np.zeros(5))
    with pytest.raises(errors.ShapeError, match="rows: expected at least one"):
        kernels.weighted_sum([], [])


@given(k=st.integers(1, 6), n=st.integers(0, 400), seed=st.integers(0, 99), extremes=st.booleans())
def test_weighted_sum_on_any_shape(k, n, seed, extremes):
    rows, weights = vectors(k, n, seed), vectors(1, k, seed + 1)[0]
    if extremes and n:
        specials = np.float32([np.nan, np.inf, -np.inf, 1e-42, -0.0, 3e38])
        for i, row in enumerate(rows):
            row[(seed + i) % n] = specials[(seed + i) % 6]
    due = np.empty(n, np.float32)
    with np.errstate(all="ignore"):
        reference.weighted_sum(rows, weights, due, float64=False)
    np.testing.assert_array_equal(kernels.weighted_sum(rows, weights), due)


def test_torch_tensors_buffers_and_rows_off_the_cache_line_go_in_without_a_copy():
    rows = vectors(3, 1001)
    due = kernels.weighted_sum(rows, [1, 2, 3])
    tensors = [torch.from_numpy(row) for row in rows]
    out = torch.empty(1001)
    assert kernels.weighted_sum(tensors, torch.tensor([1.0, 2.0, 3.0]), out=out) is out
    np.testing.assert_array_equal(out.numpy(), due)  # written into torch's own memory
    views = [memoryview(row.tobytes()).cast("f") for row in rows]
    np.testing.assert_array_equal(kernels.weighted_sum(views, [1, 2, 3]), due)
    for offset in range(4, 64, 4):
        moved = []
        for row in rows:
            memory = np.empty(4 * 1001 + offset, np.uint8)
            memory[offset:] = row.view(np.uint8)
            moved.append(memory[offset:].view(np.float32))
        np.testing.assert_array_equal(kernels.weighted_sum(moved, [1, 2, 3]), due)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(weights=np.ones(3)), errors.DtypeError, r"weights: expected float32\[2\], got float64\[3\]"),
        (dict(weights=np.ones(3, np.float32)), errors.ShapeError, r"weights: expected float32\[2\], got float32\[3\]"),
        (dict(out=np.zeros(4)), errors.DtypeError, r"out: expected float32\[4\], got float64\[4\]"),
        (dict(out=np.zeros(5, np.float32)), errors.ShapeError, r"out: expected float32\[4\], got float32\[5\]"),
        (dict(out=np.zeros(8, np.float32)[::2]), errors.ShapeError, "out: .* not contiguous"),
        (dict(out=np.zeros((4, 1), np.float32)), errors.ShapeError, r"got float32\[4, 1\]"),
        (dict(out=np.frombuffer(bytes(16), np.float32)), errors.ArrayError, "out: .* read-only"),
        (dict(out=[0.0] * 4), errors.ArrayError, "out: expected an array in CPU memory or on a CUDA device, got list"),
        (dict(rows=[np.ones(4, np.float32), np.ones(3, np.float32)]), errors.ShapeError, r"rows\[1\]: expected"),
        (dict(rows=[np.ones(4, ">f4")] * 2), errors.DtypeError, r"rows\[0\]: .* got >f4\[4\]"),
        (dict(rows=[torch.ones(4, dtype=torch.int16)] * 2), errors.DtypeError, r"rows\[0\]: .* got int16\[4\]"),
        (dict(rows=[torch.ones(4, 2)[:, 0]] * 2), errors.ShapeError, r"rows\[0\]: .* not contiguous"),
        (dict(rows=np.ones((2, 4), np.float32)), errors.ArrayError, "rows: expected a list or tuple, got ndarray"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(change, error, message):
    arguments = dict(rows=vectors(2, 4), weights=np.ones(2, np.float32), out=np.full(4, 7, np.float32)) | change
    before = np.array(arguments["out"]).copy()
    with pytest.raises(error, match=message):
        kernels.weighted_sum(**arguments)
    np.testing.assert_array_equal(arguments["out"], before)


def test_an_output_over_an_input_is_refused():
    memory = np.zeros(10, np.float32)
    with pytest.raises(errors.ArrayError, match=r"out: must not overlap rows\[1\]"):
        kernels.weighted_sum([np.ones(6, np.float32), memory[:6]], [1, 1], out=memory[4:])
    acc = np.zeros(4)
    with pytest.raises(errors.ArrayError, match="out: must not overlap acc"):
        kernels.accumulate(acc[:3], [None], [np.ones(3, np.float32)], np.ones(1), np.ones(1), out=acc[1:])


def test_a_float64_sum_of_a_thousand_rows_is_right_to_the_last_bit_but_one():
    rows, weights = vectors(1000, 301), vectors(1, 1000, seed=1)[0]
    due = np.array([math.fsum(np.float64(weights) * np.float64([row[j] for row in rows])) for j in range(301)])
    sums = kernels.weighted_sum(rows, weights, accumulate="float64")
    assert (np.abs(sums - due) <= np.spacing(np.abs(due).astype(np.float32))).all()
    assert np.abs(kernels.weighted_sum(rows, weights) - due).max() > np.abs(sums - due).max()
    with pytest.raises(errors.UnknownNameError, match="accumulate: 'double' is unknown"):
        kernels.weighted_sum(rows, weights, accumulate="double")


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_segments_are_summed_where_they_lie(accumulate):
    shapes = [(3, 4), (), (0,), (70_000,), (5,), (2, 1, 33_000)]
    rng = np.random.default_rng(0)
    models = [[np.asarray(rng.normal(size=shape), np.float32) for shape in shapes] for _ in range(6)]
    weights = vectors(1, 6)[0]
    sums = kernels.weighted_sum_segments(models, weights, accumulate=accumulate)
    for s, shape in enumerate(shapes):
        assert sums[s].shape == shape
        rows = [model[s].reshape(-1) for model in models]
        np.testing.assert_array_equal(sums[s].reshape(-1), kernels.weighted_sum(rows, weights, accumulate=accumulate))
    tensors = [[torch.from_numpy(tensor) for tensor in model] for model in models]
    outs = [np.empty(shape, np.float32) for shape in shapes]
    assert kernels.weighted_sum_segments(tensors, weights, outs, accumulate=accumulate) is outs
    for s in range(len(shapes)):
        np.testing.assert_array_equal(outs[s], sums[s])


def test_segments_that_do_not_fit_are_named():
    models = [[np.ones((2, 3), np.float32), np.ones(4, np.float32)] for _ in range(3)]
    models[2][0] = np.ones((2, 2), np.float32)
    with pytest.raises(errors.ShapeError, match=r"models\[2\]\[0\]: expected float32 of 6 elements, got"):
        kernels.weighted_sum_segments(models, [1, 1, 1])
    with pytest.raises(errors.ShapeError, match="expected 2 entries, got 1"):
        kernels.weighted_sum_segments([models[0], models[1][:1]], [1, 1])
    with pytest.raises(errors.ArrayError, match=r"outs\[1\]: must not overlap models\[0\]\[1\]"):
        kernels.weighted_sum_segments(models[:2], [1, 1], [np.empty(6, np.float32), models[0][1]])


class Exporter:
    """Hands out a DLPack capsule of our choice."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule


def test_capsules_are_looked_at_before_they_are_trusted():
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    memory = ctypes.create_string_buffer(256)
    for name in (None, b"used_dltensor", b"something"):
        with pytest.raises(errors.ArrayError, match=r"rows\[0\]: expected a DLPack capsule that nobody used"):
            kernels.squared_norms([Exporter(new(ctypes.addressof(memory), name, None))])
    with pytest.raises(errors.ArrayError, match=r"rows\[0\]: expected a DLPack capsule from __dlpack__"):
        kernels.squared_norms([Exporter(7)])
    with pytest.raises(errors.ArrayError, match=r"rows\[0\]: .* whose export says"):
        kernels.squared_norms([torch.ones(3, requires_grad=True)])
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False

    class Frozen:
        def __dlpack__(self, **options):
            return frozen.__dlpack__(**options)

    with pytest.raises(errors.ArrayError, match=r"out: .*read-only"):
        kernels.weighted_sum([np.ones(3, np.float32)], [1], out=Frozen())
    offset = torch.arange(10, dtype=torch.float32)[4:7]
    np.testing.assert_array_equal(kernels.weighted_sum([offset], [1]), [4, 5, 6])


def test_bits_do_not_follow_the_callers_flush_to_zero():
    rows = [np.full(1_000_000, 1e-40, np.float32)] * 2
    due = kernels.weighted_sum(rows, [1, 1])
    try:
        torch.set_flush_denormal(True)
        sums = kernels.weighted_sum(rows, [1, 1])
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(sums.view(np.int32), due.view(np.int32))
    assert (due.view(np.int32) > 0).all()


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_accumulate_has_the_bits_of_the_reference(n, in_place, dtype):
    ys, x = vectors(5, n), vectors(1, n, seed=2)[0]
    bases = [x, None, x, x, None]
    scales, weights = np.linspace(0.5, 7, 5), np.linspace(-1, 3, 5)
    acc = np.random.default_rng(3).normal(size=n).astype(dtype)
    due = np.empty(n, dtype)
    due_norms = reference.accumulate(acc, due, bases, ys, scales, weights)
    out = acc if in_place else np.full(n, np.nan, dtype)
    norms = kernels.accumulate(acc, bases, ys, scales, weights, out=out)
    np.testing.assert_array_equal(out, due)
    np.testing.assert_allclose(norms, due_norms, rtol=1e-5)


def test_one_by_one_is_all_at_once():
    ys, x = vectors(9, 20_000), vectors(1, 20_000, seed=2)[0]
    scales, weights = np.linspace(0.5, 7, 9), np.linspace(-1, 3, 9)
    whole = np.empty(20_000)
    norms = kernels.accumulate(np.zeros(20_000), [x] * 9, ys, scales, weights, out=whole)
    single = np.zeros(20_000)
    singles = [
        kernels.accumulate(single, [x], [ys[i]], scales[i : i + 1], weights[i : i + 1], out=single) for i in range(9)
    ]
    np.testing.assert_array_equal(single, whole)
    np.testing.assert_array_equal(np.concatenate(singles), norms)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 2047, 16_384, 19_999])
def test_a_bad_row_shows_in_its_norm_and_leaves_the_sum_that_was(bad, where):
    ys = vectors(3, 20_000)
    ys[1][where] = bad
    acc = np.ones(20_000)
    norms = kernels.accumulate(acc, [None] * 3, ys, np.ones(3), np.ones(3), out=np.empty(20_000))
    np.testing.assert_array_equal(np.isfinite(norms), [True, False, True])
    np.testing.assert_array_equal(acc, np.ones(20_000))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_accumulate_takes_every_client_in_its_own_dtype(n, dtype):
    """Rounded to float32 first, it is the same to the last bit, norms included, in fours and one by one."""
    ys, x = vectors(9, n), vectors(1, n, seed=2)[0]
    half = lambda y: torch.from_numpy(y).bfloat16()  # noqa: E731
    double = lambda y: y + np.float64(1e-9)  # noqa: E731
    sent = [
        convert(y)
        for y, convert in zip(ys, [half, double, np.float16, half, np.copy, half, half, half, half], strict=True)
    ]
    rounded = [np.float32(y.float() if isinstance(y, torch.Tensor) else y) for y in sent]
    bases, scales, weights = [x] * 4 + [None] + [x] * 4, np.linspace(0.5, 7, 9), np.linspace(-1, 3, 9)
    acc = np.random.default_rng(3).normal(size=n).astype(dtype)
    out, due, reference_due = (np.empty(n, dtype) for _ in range(3))
    norms = kernels.accumulate(acc, bases, sent, scales, weights, out=out)
    due_norms = kernels.accumulate(acc, bases, rounded, scales, weights, out=due)
    reference.accumulate(acc, reference_due, bases, sent, scales, weights)
    np.testing.assert_array_equal(out, due)
    np.testing.assert_array_equal(out, reference_due)
    np.testing.assert_array_equal(norms, due_norms)


def test_accumulate_names_a_dtype_that_no_client_sends():
    with pytest.raises(
        errors.DtypeError, match=r"ys\[1\]: expected float32 or float64 or float16 or bfloat16\[3\], got int"
    ):
        ys = [np.zeros(3, np.float16), np.zeros(3, np.int32)]
        kernels.accumulate(np.zeros(3), [None] * 2, ys, np.ones(2), np.ones(2), out=np.zeros(3))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e39])
def test_a_float64_that_float32_cannot_hold_shows_in_the_norm(bad):
    ys = [np.ones(5000), np.full(5000, bad)]
    norms = kernels.accumulate(np.zeros(5000), [None] * 2, ys, np.ones(2), np.ones(2), out=np.empty(5000))
    np.testing.assert_array_equal(np.isfinite(norms), [True, False])


STEP = dict(v_of=Linear(A=0.3, B=0.4, T=-0.7, g=1.1), total_of=Linear(A=1.5, B=0.6, T=1.2, g=0.7, v=-2.5), gamma=0.9)


def step_arrays(n, dtype, with_total, with_momentum, with_control):
    rng = np.random.default_rng(4)
    return dict(
        sum=rng.normal(size=n).astype(dtype),
        total=rng.normal(size=n) if with_total else None,
        x=rng.normal(size=n).astype(np.float32),
        momentum=rng.normal(size=n).astype(np.float32) if with_momentum else None,
        control=rng.normal(size=n) if with_control else None,
    )


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("with_momentum", [True, False])
@pytest.mark.parametrize(("with_total", "with_control"), [(True, True), (True, False), (False, True), (False, False)])
def test_server_step_has_the_bits_of_the_reference(n, dtype, with_momentum, with_total, with_control):
    arrays = step_arrays(n, dtype, with_total, with_momentum, with_control)
    results = []
    for run in (kernels.server_step, reference.server_step):
        v, x_out = np.empty(n, np.float32), np.empty(n, np.float32)
        total_out = np.empty(n) if with_total else None
        squares = run(**arrays, v=v, total_out=total_out, x_out=x_out, **STEP)
        results.append((v, x_out, total_out, squares))
    (v, x_out, total_out, squares), (due_v, due_x, due_total, due_squares) = results
    np.testing.assert_array_equal(v, due_v)
    np.testing.assert_array_equal(x_out, due_x)
    if with_total:
        np.testing.assert_array_equal(total_out, due_total)
    np.testing.assert_allclose(squares, due_squares, rtol=1e-5)


def test_server_step_writes_over_what_it_replaces():
    arrays = step_arrays(5000, np.float64, True, True, True)
    v, total_out, x_out = np.empty(5000, np.float32), np.empty(5000), np.empty(5000, np.float32)
    kernels.server_step(**arrays, v=v, total_out=total_out, x_out=x_out, **STEP)
    places = dict(v=arrays["momentum"], total_out=arrays["total"], x_out=arrays["x"])
    kernels.server_step(**arrays, **places, **STEP)
    for place, due in zip(places.values(), (v, total_out, x_out), strict=True):
        np.testing.assert_array_equal(place, due)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(momentum=np.zeros(4)), errors.DtypeError, r"momentum: expected float32\[4\], got float64\[4\]"),
        (dict(control=np.zeros(3)), errors.ShapeError, r"control: expected float64\[4\], got float64\[3\]"),
        (dict(total_out=None), errors.ArrayError, "total_out: expected an array exactly where total is one"),
    ],
)
def test_server_step_names_bad_arguments(change, error, message):
    arrays = step_arrays(4, np.float64, True, True, True)
    outputs = dict(v=np.empty(4, np.float32), total_out=np.empty(4), x_out=np.empty(4, np.float32))
    with pytest.raises(error, match=message):
        kernels.server_step(**(arrays | outputs | STEP | change))
    with pytest.raises(errors.ArrayError, match="v: must not overlap x"):
        kernels.server_step(**(arrays | outputs | STEP | dict(v=arrays["x"])))


def test_server_step_tells_an_overflow():
    v, x_out = np.empty(2, np.float32), np.empty(2, np.float32)
    _, square = kernels.server_step(
        np.array([1e30, 0]),
        None,
        np.zeros(2, np.float32),
        v_of=Linear(A=1),
        gamma=1e30,
        v=v,
        total_out=None,
        x_out=x_out,
    )
    assert not np.isfinite(square)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("k", [0, 1, 9])
def test_a_fold_of_tensors_apart_has_the_bits_of_whole_vectors(dtype, k):
    sizes = [12, 0, 40_000, 1, 17]
    n, cuts = sum(sizes), np.cumsum(sizes)[:-1]
    ys, base, acc = vectors(k, n), vectors(1, n, seed=3)[0], vectors(1, n, seed=4)[0].astype(dtype)
    bases = [None if i % 4 == 3 else base for i in range(k)]
    scales, weights = np.linspace(0.5, 2, k), np.linspace(-1, 3, k)
    lists = [y if i % 3 == 1 else np.split(y, cuts) for i, y in enumerate(ys)]
    if k:
        lists[0] = [lists[0][0].reshape(3, 4), *lists[0][1:]]
    for start in (acc, None):
        due, out = np.empty(n, dtype), np.full(n, 7, dtype)
        squares = reference.accumulate(start, due, bases, lists, scales, weights)
        close = kernels.accumulate(start, bases, lists, scales, weights, out=out)
        np.testing.assert_array_equal(out, due)
        np.testing.assert_allclose(close, squares, rtol=1e-5)
        kernels.accumulate(start, bases, ys, scales, weights, out=due)
        np.testing.assert_array_equal(out, due)


def test_tensors_that_do_not_fit_a_fold_are_named():
    out, ones = np.full(5, 7, np.float32), np.ones(2)
    good = [np.ones((2, 1), np.float32), np.ones(3, np.float32)]
    for bad, error, message in (
        ([good, [good[0], np.ones(2, np.float32)]], errors.ShapeError, r"ys\[1\]\[1\]: expected .* of 3 elements"),
        ([good, good[:1]], errors.ShapeError, r"ys\[1\]: expected 2 entries, got 1"),
        ([good[:1], good], errors.ShapeError, r"ys\[0\]: expected tensors of 5 elements together, got 2"),
        ([good, [good[0], np.ones(3, np.int32)]], errors.DtypeError, r"ys\[1\]\[1\]: expected float32"),
        ([good, [good[0], out[2:]]], errors.ArrayError, r"out: must not overlap ys\[1\]\[1\]"),
        ([good, np.ones(4, np.float32)], errors.ShapeError, r"ys\[1\]: expected"),
    ):
        with pytest.raises(error, match=message):
            kernels.accumulate(None, [None, None], bad, ones, ones, out=out)
        np.testing.assert_array_equal(out, np.full(5, 7))
    with pytest.raises(errors.ShapeError, match="out: expected"):
        kernels.accumulate(None, [], [], ones[:0], ones[:0], out=np.ones((2, 2), np.float32))
