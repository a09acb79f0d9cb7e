"""Mixing 64 models of 1 M float32 numbers over a ring (two neighbours per model) and a complete graph."""

import numpy as np
import pytest

import fedcore
from bench.alone import Work
from bench.probe import rewrite_floor
from bench.rivals.mix import stacked_models, torch_neighbours, torch_product
from fedcore import kernels

P, N = 64, 1_000_000


@pytest.mark.parametrize("graph", ["ring", "complete"])
def bench_mix(versus, size, graph):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    p = size(P, 32)
    work = Work(stacked_models, p, N, graph)
    stacked, W = work.arrays
    models, sparse, product = [row.copy() for row in stacked], scipy_sparse.csr_array(W), np.empty_like(stacked)
    kernels.mix(mixed := [row.copy() for row in stacked[:, :1000]], W)
    np.testing.assert_allclose(mixed, W @ stacked[:, :1000], rtol=1e-5)
    rivals = {
        "rewrite floor": rewrite_floor(models, 1, fedcore.threads()),
        "torch W @ Y, stacked before": work.rival(torch_product),
        "numpy W @ Y, stacked before": lambda: np.dot(W, stacked, out=product),
    }
    if graph == "ring":
        rivals["scipy sparse W @ Y"] = lambda: sparse @ stacked
        rivals["torch mul, add_, add_ a model"] = work.rival(torch_neighbours)
    versus(
        f"mix, {graph}, {p} models x {N / 1e6:g} M",
        lambda: kernels.mix(models, sparse),
        rivals,
        targets={"rewrite floor": 0.80} if graph == "ring" else {},
        bytes=8 * p * N,
        rounds=7,
    )
