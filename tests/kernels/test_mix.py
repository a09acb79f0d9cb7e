from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore import errors, kernels
from fedcore.kernels import reference
from fedcore.kernels.mix import compressed_rows


def models(p, n, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n).astype(np.float32) for _ in range(p)]


def matrix(p, density, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(p, p)) * (rng.random((p, p)) < density)


def ring(p):
    W = np.zeros((p, p))
    for i in range(p):
        W[i, [(i - 1) % p, i, (i + 1) % p]] = 1 / 3
    return W


def assert_mixes_like_the_reference(before, W):
    due, out = [m.copy() for m in before], [m.copy() for m in before]
    reference.mix(due, *compressed_rows(W, len(before)))
    kernels.mix(out, W)
    np.testing.assert_array_equal(out, due)
    return out


@pytest.mark.parametrize("n", [0, 1, 15, 63, 64, 65, 1217, 16_384, 16_385, 40_001])
@pytest.mark.parametrize("W", [ring(7), matrix(7, 1), matrix(7, 0.4), np.eye(7)[::-1], np.zeros((7, 7))])
def test_mix_has_the_bits_of_the_reference(n, W):
    assert_mixes_like_the_reference(models(7, n), W)


@given(p=st.integers(0, 24), n=st.integers(0, 200), density=st.floats(0, 1), seed=st.integers(0, 99))
def test_any_matrix(p, n, density, seed):
    before, W = models(p, n, seed), matrix(p, density, seed)
    out = assert_mixes_like_the_reference(before, W)
    if p:
        np.testing.assert_allclose(out, W @ np.array(before, np.float64).reshape(p, n), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [1, 2, 3, 64, 300])
def test_many_models(p):
    W = ring(p) if p >= 3 else matrix(p, 1)
    assert_mixes_like_the_reference(models(p, 1000), W)
    assert_mixes_like_the_reference(models(p, 300), matrix(p, 0.5))


def test_models_that_start_anywhere_in_a_cache_line():
    before = models(5, 5000)
    moved = [np.empty(5016, np.float32)[i : i + 5000] for i in range(5)]
    for view, model in zip(moved, before, strict=True):
        view[:] = model
    kernels.mix(moved, ring(5))
    np.testing.assert_array_equal(moved, assert_mixes_like_the_reference(before, ring(5)))


def test_dense_and_every_kind_of_sparse_matrix_give_the_same_bits():
    before, W = models(9, 3001), matrix(9, 0.4)
    due = assert_mixes_like_the_reference(before, W)
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
    twice = SimpleNamespace(indptr=[0, 3, 4], indices=[1, 0, 1], data=np.float32([0.25, 1, 0.5]))
    out = models(2, 100)
    first, second = (model.copy() for model in out)
    kernels.mix(out, SimpleNamespace(indptr=[0, 3, 4], indices=[1, 0, 1, 0], data=np.float32([0.25, 1, 0.5, 2])))
    np.testing.assert_array_equal(
        out[0], (np.float32(1) * first + np.float32(0.25) * second) + np.float32(0.5) * second
    )
    np.testing.assert_array_equal(out[1], 2 * first)
    with pytest.raises(errors.RangeError, match=r"^W: expected indptr"):
        kernels.mix(out, twice)


def test_torch_models_are_mixed_where_they_lie():
    before = models(3, 2000)
    tensors = [torch.from_numpy(model.copy()) for model in before]
    kernels.mix(tensors, ring(3))
    np.testing.assert_array_equal(
        np.array([t.numpy() for t in tensors]), assert_mixes_like_the_reference(before, ring(3))
    )


def test_a_weight_of_zero_leaves_a_diverged_neighbour_out():
    diverged = [np.ones(40, np.float32), np.full(40, np.nan, np.float32)]
    kernels.mix(diverged, [[1, 0], [0, 1]])
    np.testing.assert_array_equal(diverged[0], np.ones(40))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(W=np.ones((2, 3))), errors.ShapeError, r"W: expected \[2, 2\], one row a model, got \[2, 3\]"),
        (dict(W=np.ones(2)), errors.ShapeError, r"W: expected \[2, 2\], one row a model, got \[2\]"),
        (dict(W=np.ones((2, 2), int)), errors.DtypeError, "W: expected float32 or float64, got int64"),
        (dict(W=[[1, np.nan], [0, 1]]), errors.RangeError, "W: expected entries that are finite"),
        (dict(W=[[1, 1e300], [0, 1]]), errors.RangeError, "W: expected entries that are finite in float32"),
        (dict(W=scipy.sparse.eye_array(3)), errors.ShapeError, r"W: expected \[2, 2\], one row a model, got 3 rows"),
        (dict(models=[np.ones(4, np.float32), np.ones(3, np.float32)]), errors.ShapeError, r"models\[1\]: expected"),
        (dict(models=[np.ones(4, np.float32)[:2], np.ones(2)]), errors.DtypeError, r"models\[1\]: .* float64\[2\]"),
        (dict(models=np.ones((2, 4), np.float32)), errors.ArrayError, "models: expected a list or tuple"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        kernels.mix(**(dict(models=models(2, 4), W=np.eye(2)) | change))


def test_models_that_overlap_and_columns_that_do_not_exist_are_refused():
    memory = np.zeros(10, np.float32)
    with pytest.raises(errors.ArrayError, match=r"models\[1\]: must not overlap models\[0\]"):
        kernels.mix([memory[:6], memory[4:]], np.eye(2))
    beyond = SimpleNamespace(indptr=[0, 1, 2], indices=[0, 2], data=np.ones(2))
    with pytest.raises(errors.RangeError, match=r"columns\[1\]: expected 0\.\.1, got 2"):
        kernels.mix(models(2, 4), beyond)
