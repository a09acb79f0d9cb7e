"""Two clients, rounds computed by hand."""

import numpy as np
import pytest

import fedcore
from fedcore import Limits, Server, Update
from tests.server.rounds import METHODS, N, go_on, made, n

LR, K = 0.5, 2  # eta K = 1: h_i = x - y_i


def vector(*values):
    return np.array(values, np.float32)


def one_round(server, **ys):
    """A round in which the clients named c0, c1 send these h: y = x - h."""
    with server.open_round() as round:
        for name, h in ys.items():
            round.add(int(name[1:]), server.x - np.float32(h), steps=K)
    return round.report


def test_fedavg_weighs_models_by_examples():
    server = Server(vector(0, 0), "FedAvg", clients=2, lr=LR)
    report = server.round([Update(0, vector(4, 8), steps=K, examples=3), Update(1, vector(0, 4), steps=9, examples=1)])
    np.testing.assert_array_equal(server.x, [3, 7])
    assert report.accepted == (0, 1)
    assert report.steps == K + 9
    assert report.gamma == 1
    np.testing.assert_allclose(report.norms, [np.hypot(4, 8) / (LR * K), 4 / (LR * 9)])
    # sum q |h|^2 / |sum q h|^2 = (3/4 80 + 1/4 16) / (9 + 49)
    assert report.diversity == pytest.approx(64 / 58)


def test_mifa_waits_for_the_first_update_of_every_client():
    server = Server(vector(10), "MIFA", clients=2, lr=LR)
    assert one_round(server, c0=4).gamma == 0
    assert server.x == [10]
    one_round(server)
    assert server.x == [10]
    assert one_round(server, c1=6).gamma == 1
    assert server.x == [5]
    assert server.round_number == 3


def test_mimic_by_hand():
    server = Server(vector(0), "MimiC", clients=2, lr=LR)
    one_round(server, c0=2, c1=6)  # v = 4, c = (2, -2)
    assert server.x == [-4]
    assert (server.correction(0), server.correction(1)) == ([2], [-2])
    one_round(server, c0=3)  # v = 3 + 2 = 5, c_0 = 5 - 3
    assert server.x == [-9]
    assert (server.correction(0), server.correction(1)) == ([2], [-2])
    one_round(server, c1=1)  # v = 1 - 2, c_1 = -1 - 1
    assert server.x == [-8]
    assert server.correction(1) == [-2]
    one_round(server)  # no clients: x stays, the round counts
    assert server.x == [-8]
    one_round(server, c0=0, c1=4)  # v = ((0 + 2) + (4 - 2)) / 2 = 2; c = (2, -2)
    assert server.x == [-10]
    assert (server.correction(0), server.correction(1)) == ([2], [-2])
    assert server.round_number == 5


@pytest.mark.parametrize("kind", ["model", "delta", "gradient"])
@pytest.mark.parametrize("name", ["FedAvg", "MIFA", "MimiC"])
def test_a_model_a_difference_and_a_gradient_have_the_same_result(name, kind):
    server = Server(vector(8, 16), name, clients=1, lr=LR)
    y = {"model": vector(4, 8), "delta": vector(-4, -8), "gradient": vector(1, 2)}[kind]  # eta K = 4
    report = server.round([Update(0, y, steps=8, kind=kind)])
    np.testing.assert_array_equal(server.x, [4, 8])
    np.testing.assert_allclose(report.norms, [np.hypot(1, 2)])


def test_the_rate_of_the_client_makes_its_gradient():
    server = Server(vector(0), "MimiC", clients=1, lr=LR, limits=Limits(max_client_lr=100.0))
    server.round([Update(0, vector(-3), steps=2, lr=0.25)])
    assert server.store.read(0) == [6]
    assert server.x == [-3]


@pytest.mark.parametrize("method", METHODS)
def test_the_formula_of_the_client_step_holds_for_every_method(method):
    """README: y -= lr (a grad(y) + b grad(x_prev) + offset + mu (y - x))."""
    server = made(method)
    go_on(server, 2)
    sent = server.broadcast(range(N))
    assert sent.has_offset == server.algorithm.sends_offset
    for i in sent.ids:
        y, offset = sent.x.copy(), sent.offset(i)
        y -= sent.lr * (sent.a * y + offset + sent.mu * (y - sent.x))
        assert (offset.shape, offset.dtype, offset.flags.c_contiguous) == ((n,), np.float32, True)
        assert offset.any() == sent.has_offset
        out = np.full(n, np.nan, np.float32)
        assert sent.offset(i, out) is out
        np.testing.assert_array_equal(out, offset)
    if not sent.has_offset:
        assert sent.offset(0) is sent.offset(1)
        with pytest.raises(ValueError, match="read-only"):
            sent.offset(0)[:] = 1


def test_fedavg_uniform_with_a_server_rate_steps_along_the_mean_gradient():
    server = Server(vector(1), fedcore.algorithms.FedAvg("uniform"), clients=2, lr=LR, server_lr=0.1)
    # h_0 = (1 - 0) / (.5 * 2) = 1 and h_1 = (1 + 5) / (.5 * 4) = 3
    report = server.round([Update(0, vector(0), steps=2, examples=9), Update(1, vector(-5), steps=4)])
    np.testing.assert_allclose(server.x, [1 - 0.1 * 2], rtol=1e-7)
    np.testing.assert_allclose(report.norms, [1, 3])
    assert report.gamma == 0.1
