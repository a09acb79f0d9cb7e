"""Common errors of public implementations, most of them of SCAFFOLD, by hand on few clients."""

import numpy as np
import torch
from torch import nn

from fedcore import Server, Update
from fedcore.algorithms.rates import Exponential

LR, K = 0.5, 2


def vector(*values):
    return np.array(values, np.float32)


def gradient_of(server, broadcast, client, raw):
    """y of a client whose gradients are all ``raw``: K steps along raw + offset."""
    return server.x - np.float32(broadcast.lr * K) * (vector(raw) + broadcast.offset(client))


def one_round(server, **raws):
    broadcast = server.broadcast([int(name[1:]) for name in raws])
    pairs = zip(broadcast.ids, raws.values(), strict=True)
    ys = {client: gradient_of(server, broadcast, client, raw) for client, raw in pairs}
    return server.round([Update(client, y, steps=K) for client, y in ys.items()])


def offsets(server):
    broadcast = server.broadcast([0, 1])
    return [broadcast.offset(0).tolist(), broadcast.offset(1).tolist()]


def test_controls_start_at_zero_not_at_random_and_not_at_the_model():
    server = Server(vector(3), "SCAFFOLD", clients=2, lr=LR)
    assert offsets(server) == [[0], [0]]
    one_round(server, c0=8)
    # c_0 = 8, c_1 = 0 and c = 4; with c_i = c = x_0 at first the offsets are zero too, but then c = 5.5
    assert offsets(server) == [[-4], [4]]


def test_c_moves_by_1_over_n_and_c_i_is_kept():
    server = Server(vector(0), "SCAFFOLD", clients=4, lr=LR)
    one_round(server, c0=8)
    # c_0 = 8 and c = 8 / N = 2, not 8 / S; the offset is c - c_i
    assert offsets(server) == [[2 - 8], [2]]
    assert server.x == [-8]
    one_round(server, c0=4, c1=12)
    # c_0 = 4, c_1 = 12, c = 2 + (4 - 8 + 12) / 4 = 4
    assert offsets(server) == [[0], [-8]]
    # h_0 = 4 - 6 = -2, h_1 = 12 + 2 = 14, v = 6
    assert server.x == [-8 - 6]


def test_controls_are_gradients_whatever_the_rate_and_the_steps():
    """Not (x - y) / epochs, and not divided by the first rate while steps use a later one."""
    server = Server(vector(0), "SCAFFOLD", clients=2, lr=Exponential(0.5, 0.5))
    one_round(server, c0=1)
    broadcast = server.broadcast([1])
    assert broadcast.lr == 0.25
    server.round([Update(1, server.x - np.float32(0.25 * 7) * (4 + broadcast.offset(1)), steps=7)])
    # c_1 = 4, c = (1 + 4) / 2
    assert offsets(server) == [[1.5], [-1.5]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)


def test_counters_stay_integers_and_statistics_are_averaged_but_never_corrected():
    server = Server(Net(), "SCAFFOLD", clients=2, lr=LR)
    assert server.broadcast([0]).offset(0).shape == (4,)  # weight and bias alone
    nets = [Net(), Net()]
    for i, net in enumerate(nets):
        with torch.no_grad():
            net.norm.running_mean += i + 1
            net.norm.weight -= 0.5 * (i + 1)
        net.norm.num_batches_tracked += 7 * (i + 1)
    for t in range(2):
        server.round([Update(i, net.state_dict(), steps=14) for i, net in enumerate(nets)])
        tensors = server.tensors(library="numpy")
        assert tensors["norm.num_batches_tracked"].dtype == np.int64
        assert tensors["norm.num_batches_tracked"] == 14
        np.testing.assert_array_equal(tensors["norm.running_mean"], [1.5, 1.5])
        np.testing.assert_array_equal(tensors["norm.running_var"], [1, 1])
        assert t == server.round_number - 1


def test_the_server_shares_no_memory_with_its_callers():
    x0 = vector(1, 2)
    server = Server(x0, "SCAFFOLD", clients=2, lr=LR)
    x0[:] = 99
    y = vector(5, 6)
    server.round([Update(0, y, steps=K)])
    x, offset = server.x.copy(), server.broadcast([1]).offset(1).copy()
    sent = server.broadcast([0]).x  # what a slow client still trains on
    y[:] = 99
    server.tensors()["x"][:] = 99
    server.store.read(0)[:] = 99
    server.v[:] = 99
    np.testing.assert_array_equal(server.x, x)
    np.testing.assert_array_equal(server.broadcast([1]).offset(1), offset)
    assert not server.x.flags.writeable
    server.round([Update(0, y, steps=K)])
    np.testing.assert_array_equal(sent, x)
