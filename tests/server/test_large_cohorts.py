"""A list of many updates is folded some at a time, with the bits of one at a time."""

import numpy as np
import pytest

from fedcore import Server, Update, algorithms, kernels
from fedcore.server import step as population
from fedcore.server.aggregation import PART

METHODS = {
    "MIFA": lambda: algorithms.MIFA(wait=False),
    "MimiC": algorithms.MimiC,
    "SCAFFOLD": algorithms.SCAFFOLD,
    "SCAFFOLD, two vectors": lambda: algorithms.SCAFFOLD(control="sent"),
}


@pytest.mark.parametrize("method", METHODS)
def test_no_call_holds_more_rows_against_each_other_than_a_part(method, monkeypatch):
    S, n, sizes, real = 2 * PART + 3, 5, [], kernels.exchange

    def counted(acc, bases, ys, *rest, **more):
        sizes.append(len(ys))
        return real(acc, bases, ys, *rest, **more)

    monkeypatch.setattr(kernels, "exchange", counted)
    whole, streamed = (Server(np.zeros(n, np.float32), METHODS[method](), S, lr=0.1) for _ in range(2))
    for t in range(3):
        rng = np.random.default_rng(t)
        ys = rng.normal(size=(2, S, n)).astype(np.float32)
        updates = [
            Update(i, ys[0, i], 1, control=ys[1, i] if whole.algorithm.second_vector else None) for i in range(S)
        ]
        sizes.clear()
        whole.round(updates)
        assert max(sizes) == PART
        assert sum(sizes) == S
        streamed.round(iter(updates))
        assert whole.x.tobytes() == streamed.x.tobytes()
    assert all(whole.store.read(i).tobytes() == streamed.store.read(i).tobytes() for i in range(S))


def test_a_warm_start_of_many_too(monkeypatch):
    S, sizes, real = 2 * PART + 3, [], kernels.exchange

    def counted(acc, bases, ys, *rest, **more):
        sizes.append(len(ys))
        return real(acc, bases, ys, *rest, **more)

    monkeypatch.setattr(kernels, "exchange", counted)
    server = Server(np.zeros(3, np.float32), "SCAFFOLD", S, lr=0.1)
    server.warm_start({i: np.full(3, i, np.float32) for i in range(S)})
    assert sizes == [PART, PART, 3]
    np.testing.assert_array_equal(server.store.read(S - 1), np.full(3, S - 1, np.float32))


class Counted(str):
    """An id that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        type(self).compared += 1
        return str.__eq__(self, other)


def test_sizes_of_clients_that_arrive_are_not_looked_up_in_a_list():
    k = 2000
    clients, sizes = [Counted(i) for i in range(k)], {Counted(i): i + 1 for i in range(k)}
    Counted.compared = 0
    assert population.checked_sizes(clients, sizes, sized=True) == list(range(1, k + 1))
    assert Counted.compared <= 4 * k
