"""Mixing 64 models of 1 M float32: a ring (each model and its two neighbours), and a complete graph."""

import numpy as np
import pytest
import torch

import fedcore
from bench.probe import rewrite_seconds
from fedcore import kernels

P, N = 64, 1_000_000


def ring(p):
    W = np.zeros((p, p))
    for i in range(p):
        W[i, [(i - 1) % p, i, (i + 1) % p]] = 1 / 3
    return W


@pytest.mark.parametrize("graph", ["ring", "complete"])
def bench_mix(versus, graph):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    torch.set_num_threads(fedcore.threads())
    W = ring(P) if graph == "ring" else np.full((P, P), 1 / P)
    W32 = W.astype(np.float32)
    sparse = scipy_sparse.csr_array(W32)
    tensor, into, matrix = torch.rand(P, N), torch.empty(P, N), torch.from_numpy(W32)
    stacked, product = tensor.numpy(), into.numpy()
    tensors, outs, models = list(tensor), list(into), list(tensor.clone().numpy())

    def torch_neighbours():
        """Into second copies: in place would read what was already mixed."""
        for i, out in enumerate(outs):
            torch.mul(tensors[i], 1 / 3, out=out)
            out.add_(tensors[i - 1], alpha=1 / 3)
            out.add_(tensors[(i + 1) % P], alpha=1 / 3)

    rivals = {
        "rewrite floor": lambda: rewrite_seconds(models, 1, fedcore.threads()),
        "torch W @ Y, stacked before": lambda: torch.mm(matrix, tensor, out=into),
        "numpy W @ Y, stacked before": lambda: np.dot(W32, stacked, out=product),
    }
    if graph == "ring":
        rivals["scipy sparse W @ Y"] = lambda: sparse @ stacked
        rivals["torch mul, add_, add_ a model"] = torch_neighbours
    versus(
        f"{graph}, {P} models x {N / 1e6:g} M float32; {fedcore.threads()} threads, {fedcore.isa()}",
        lambda: kernels.mix(models, sparse),
        rivals,
        timed=["rewrite floor"],
        bytes=8 * P * N,
        rounds=7,
    )
    kernels.mix(mixed := [row.copy() for row in stacked[:, :1000]], W)
    np.testing.assert_allclose(mixed, W @ stacked[:, :1000], rtol=1e-5)
