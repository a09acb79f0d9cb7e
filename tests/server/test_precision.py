"""The precision of sums: one long vector, and then 200 of length 1 that a float32 sum loses."""

import numpy as np
import pytest

from fedcore import Compute, Server, Update, algorithms

LONG, N = 2.0**24, 201
MEAN = (LONG + N - 1) / N
VECTORS = [np.float32([0, LONG if i == 0 else 1, 0]) for i in range(N)]


def started(algorithm, **options):
    return Server(np.zeros(3, np.float32), algorithm, N, lr=1.0, server_lr=1.0, compute=Compute(**options))


@pytest.mark.parametrize("fold", [1, 7])
@pytest.mark.parametrize("of", ["float64", "float32", None])
def test_the_accumulator_is_the_precision_of_the_sum_and_a_total_is_always_a_float64_sum(of, fold):
    server = started(algorithms.FedAvg("uniform") if of else algorithms.MIFA(), accumulator=of, batch_size=fold)
    due = LONG / N if of == "float32" else MEAN
    server.round(Update(i, value=vector, kind="gradient", steps=1, keep=True) for i, vector in enumerate(VECTORS))
    np.testing.assert_allclose(-server.x, [0, due, 0], rtol=1e-6)


@pytest.mark.parametrize("fold", [1, 7])
@pytest.mark.parametrize("placement", ["server", "client"])
def test_second_vectors_are_summed_in_float64(placement, fold):
    server = started(algorithms.SCAFFOLD(control="sent", placement=placement), batch_size=fold)
    still = np.zeros(3, np.float32)
    server.round(Update(i, still, 1, control=vector, keep=True) for i, vector in enumerate(VECTORS))
    c_i = VECTORS[5] if placement == "server" else 0  # where clients keep their rows, they take them off themselves
    np.testing.assert_allclose(server.broadcast([5]).offset(5) + c_i, [0, MEAN, 0], rtol=1e-6)


@pytest.mark.parametrize("placement", ["server", "client"])
def test_a_warm_start_is_summed_in_float64(placement):
    server = started(algorithms.SCAFFOLD(placement=placement))
    server.warm_start(dict(enumerate(VECTORS)))
    c_i = VECTORS[5] if placement == "server" else 0
    np.testing.assert_allclose(server.broadcast([5]).offset(5) + c_i, [0, MEAN, 0], rtol=1e-6)
