"""Steps, combinations, mixing and norms, beyond the comparison with the oracle."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore import kernels
from fedcore.kernels import Linear
from tests.kernels.arrays import Numbers, assert_same_bits, vectors
from tests.kernels.cases import RULES, STEP, assert_as_defined, matrix, ring

OUTS = ("m_out", "s_out", "x_out")


def test_outputs_may_be_what_they_replace():
    g = Numbers(5000)
    given = dict(sum=g("float64"), total=g("float64"), x=g(), momentum=g(), control=g("float64"))
    v, total_out, x_out = g(), g("float64"), g()
    kernels.server_step(**given, v=v, total_out=total_out, x_out=x_out, **STEP)
    places = dict(v=given["momentum"], total_out=given["total"], x_out=given["x"])
    kernels.server_step(**given, **places, **STEP)
    for place, due in zip(places.values(), (v, total_out, x_out), strict=True):
        assert_same_bits(place, due)
    for rule in RULES:
        v, m, s, x, *outs = g.many(7)
        s, outs = (None, [outs[0], None, outs[2]]) if rule == "momentum" else (s * s, outs)
        square = kernels.optimizer_step(v, m, s, x, **dict(zip(OUTS, outs, strict=True)), gamma=0.1, **RULES[rule])
        assert square == kernels.squared_norms([outs[2]])[0]
        kernels.optimizer_step(v, m, s, x, **dict(zip(OUTS, (m, s, x), strict=True)), gamma=0.1, **RULES[rule])
        for array, due in zip((m, s, x), outs, strict=True):
            assert due is None or array.tobytes() == due.tobytes()
    for dtype in ("float32", "float64"):
        terms = [g(dtype), g(), g("float64")]
        due = kernels.combine(terms, [0.5, 2, -1], np.empty(5000, dtype))
        assert_same_bits(kernels.combine(terms, [0.5, 2, -1], terms[0]), due)


def test_an_overflow_of_the_server_step():
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


def test_squares_past_the_range_of_float32():
    large = np.full(1000, 1e30, np.float32)
    assert kernels.combined_square([large, large], [1e20, -2e20]) == pytest.approx(1000 * 1e100)
    assert kernels.combined_square([large], [1e-60]) == pytest.approx(1000 * 1e-60)


def test_two_nan_in_one_operation():
    """The sign of their sum depends on NumPy's loops, so it is not compared."""
    for n in range(1, 130):
        y, grad, grad_prev, offset, x = vectors(5, n)
        grad[:], offset[:] = np.nan, -np.float32(np.nan)
        grad_prev[::2], x[1::2] = -np.float32(np.nan), np.nan
        terms = dict(a=0.7, b=-0.3, mu=0.4, weight_decay=1e-2, grad_prev=grad_prev, offset=offset, x=x)

        def step(y=y, grad=grad, terms=terms):
            kernels.direction_step(out := y.copy(), grad, lr=0.1, **terms)
            return [out]

        assert_as_defined(step)


def test_the_local_steps_of_the_papers():
    y, grad, grad_prev, c, c_i, g, x = vectors(7, 50)
    y64, grad64, prev64 = (v.astype(np.float64) for v in (y, grad, grad_prev))
    beta, lr, clients = 0.2, 0.1, 5
    total = c.astype(np.float64) * clients
    scaffold = kernels.combine([total, c_i], [1 / clients, -1])
    momentum = kernels.combine([g], [1 - beta])
    scaffold_m = kernels.combine([total, c_i, g], [beta / clients, -beta, 1 - beta])
    for arguments, direction in [
        (dict(), grad64),
        (dict(mu=0.3, x=x), grad64 + 0.3 * (y64 - x)),
        (dict(offset=scaffold), grad64 - c_i + c),
        (dict(a=beta, offset=momentum), beta * grad64 + (1 - beta) * g),
        (dict(a=beta, offset=scaffold_m), beta * (grad64 - c_i + c) + (1 - beta) * g),
        (dict(b=beta - 1, grad_prev=grad_prev, offset=momentum), grad64 + (1 - beta) * (g - prev64)),
        (
            dict(b=beta - 1, grad_prev=grad_prev, offset=scaffold_m),
            grad64 - beta * (c_i - c) + (1 - beta) * (g - prev64),
        ),
        (dict(a=beta, weight_decay=0.01), beta * (grad64 + 0.01 * y64)),
    ]:
        out = y.copy()
        kernels.direction_step(out, grad, lr=lr, **arguments)
        np.testing.assert_allclose(out, y64 - lr * direction, rtol=1e-5, atol=1e-6)


def test_a_vector_whose_coefficient_is_zero_is_not_read():
    y, grad = vectors(2, 40)
    nan = np.full(40, np.nan, np.float32)
    out, plain = y.copy(), y.copy()
    kernels.direction_step(out, grad, lr=0.5, grad_prev=nan, x=nan)
    kernels.direction_step(plain, grad, lr=0.5)
    np.testing.assert_array_equal(out, plain)


def test_torch_tensors_are_stepped_in_place():
    y, grad, offset = vectors(3, 1001)
    due = y.copy()
    kernels.direction_step(due, grad, lr=0.1, offset=offset)
    tensor = torch.from_numpy(y)
    kernels.direction_step(tensor, torch.from_numpy(grad), lr=0.1, offset=torch.from_numpy(offset))
    np.testing.assert_array_equal(tensor.numpy(), due)


def mixed(before, W):
    """Return the mixed models after a comparison with the oracle."""

    def call():
        models = [model.copy() for model in before]
        kernels.mix(models, W)
        return models

    return assert_as_defined(call)


@given(p=st.integers(0, 24), n=st.integers(0, 200), density=st.floats(0, 1), seed=st.integers(0, 99))
def test_any_matrix(p, n, density, seed):
    before, W = vectors(p, n, seed), matrix(p, density, seed)
    out = mixed(before, W)
    if p:
        np.testing.assert_allclose(out, W @ np.array(before, np.float64).reshape(p, n), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [2, 3, 64, 300])
def test_many_models(p):
    mixed(vectors(p, 1000), ring(p) if p >= 3 else matrix(p, 1))
    mixed(vectors(p, 300), matrix(p, 0.5))


def test_models_that_start_anywhere_in_a_cache_line():
    before = vectors(5, 5000)
    moved = [np.empty(5016, np.float32)[i : i + 5000] for i in range(5)]
    for view, model in zip(moved, before, strict=True):
        view[:] = model
    kernels.mix(moved, ring(5))
    np.testing.assert_array_equal(moved, mixed(before, ring(5)))


def test_dense_and_every_kind_of_sparse_matrix_give_the_same_bits():
    before, W = vectors(9, 3001), matrix(9, 0.4)
    due = mixed(before, W)
    csr = scipy.sparse.csr_array(W)
    shuffled = scipy.sparse.csr_array(W)
    for i in range(9):
        row = slice(shuffled.indptr[i], shuffled.indptr[i + 1])
        shuffled.indices[row], shuffled.data[row] = shuffled.indices[row][::-1].copy(), shuffled.data[row][::-1].copy()
    zeros = scipy.sparse.csr_array(
        (np.append(csr.data, 0), np.append(csr.indices, 2), np.append(csr.indptr[:-1], csr.nnz + 1))
    )
    bare = SimpleNamespace(indptr=csr.indptr, indices=csr.indices, data=csr.data)
    kinds = [W.tolist(), torch.from_numpy(W), csr, shuffled, zeros, bare]
    kinds += [scipy.sparse.csc_array(W), scipy.sparse.coo_matrix(W), W.astype(np.float32)]
    for kind in kinds:
        out = [model.copy() for model in before]
        kernels.mix(out, kind)
        np.testing.assert_array_equal(out, due)


def test_a_column_listed_twice_counts_twice():
    out = vectors(2, 100)
    first, second = (model.copy() for model in out)
    kernels.mix(out, SimpleNamespace(indptr=[0, 3, 4], indices=[1, 0, 1, 0], data=np.float32([0.25, 1, 0.5, 2])))
    np.testing.assert_array_equal(
        out[0], (np.float32(1) * first + np.float32(0.25) * second) + np.float32(0.5) * second
    )
    np.testing.assert_array_equal(out[1], 2 * first)


def test_torch_models_are_mixed_in_place():
    before = vectors(3, 2000)
    tensors = [torch.from_numpy(model.copy()) for model in before]
    kernels.mix(tensors, ring(3))
    np.testing.assert_array_equal(np.array([t.numpy() for t in tensors]), mixed(before, ring(3)))


def test_a_weight_of_zero_leaves_a_diverged_neighbour_out():
    diverged = [np.ones(40, np.float32), np.full(40, np.nan, np.float32)]
    kernels.mix(diverged, [[1, 0], [0, 1]])
    np.testing.assert_array_equal(diverged[0], np.ones(40))


def test_no_finite_float32_overflows():
    largest = np.full(20_000, np.finfo(np.float32).max, np.float32)
    assert kernels.all_finite([largest]).all()
    assert kernels.squared_norms([largest])[0] == pytest.approx(20_000 * float(largest[0]) ** 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite_finds_one_bad_element_anywhere(bad):
    for where in (0, 15, 16, 2047, 2048, 16_384, 16_999):
        row = np.zeros(17_000, np.float32)
        row[where] = bad
        np.testing.assert_array_equal(kernels.all_finite([row, np.zeros_like(row)]), [False, True])


@pytest.mark.parametrize("n", [1, 15, 2048, 5000])
@pytest.mark.parametrize("difference", [0.0, 2.0**-126, 2.0**-149, np.inf, np.nan])
def test_only_an_untrained_layer_has_length_zero(n, difference):
    """The squares of tiny differences are zero in float32, and equal infinities differ by a NaN."""
    x = np.zeros(n, np.float32)
    y = x.copy()
    y[-1] = difference
    if not np.isfinite(difference):
        x[-1] = difference
    (squared,) = kernels.accumulate(None, [x], [y], np.ones(1), np.ones(1), out=np.empty(n, np.float32))
    np.testing.assert_equal(squared, difference**2 if np.isfinite(difference) else np.nan)
    assert kernels.squared_norms([y])[0] == pytest.approx(difference**2, nan_ok=True)
