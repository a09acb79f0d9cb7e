"""Held updates, buffers of the server, the memory of the caller, and large cohorts."""

from weakref import ref

import numpy as np
import pytest

import fedcore
from fedcore import Compute, Server, Update, algorithms, kernels
from fedcore.server import step as population
from fedcore.server.aggregation import PART
from fedcore.server.update import kept_batches
from tests.rejections import rejected_arguments

n = 4099


def test_buffers_are_used_again_after_the_fold():
    server, addresses = (
        Server(np.zeros(n, np.float32), "FedAvg", clients=40, lr=0.1, compute=Compute(batch_size=4)),
        set(),
    )
    for _ in range(2):
        with server.open_round() as round:
            for client in range(20):
                buffer = round.buffer()
                addresses.add(buffer.ctypes.data)
                buffer[:] = client
                round.add(client, buffer, steps=1)
                del buffer
    assert len(addresses) == 4  # a fold's, used over and over


def test_a_buffer_that_the_caller_holds_is_not_used_again():
    server = Server(np.zeros(n, np.float32), "FedAvg", clients=40, lr=0.1, compute=Compute(batch_size=1))
    with server.open_round() as round:
        mine = round.buffer()
        mine[:] = 1
        round.add(0, mine, steps=1)
        for client in range(1, 20):
            buffer = round.buffer()
            assert not np.shares_memory(buffer, mine)
            buffer[:] = 1
            round.add(client, buffer, steps=1)
    np.testing.assert_array_equal(server.x, np.ones(n, np.float32))


def test_a_buffer_stays_valid_after_its_round():
    server = Server(np.zeros(n, np.float32), "FedAvg", clients=2, lr=0.1)
    with server.open_round() as round:
        buffer = round.buffer()
        buffer[:] = 3
        round.abort()
    with pytest.raises(fedcore.errors.RoundError, match=r"^round\b"):
        round.buffer()
    assert (buffer == 3).all()


def test_a_control_that_may_change_is_folded_with_its_vector():
    """Immutable memory of y says nothing about the second vector."""
    rows = []
    for again in (False, True):
        server = Server(np.zeros(n, np.float32), fedcore.algorithms.SCAFFOLDMVR(), 2, lr=0.1)
        control = np.ones(n, np.float32)
        with server.open_round() as round:
            round.add(0, np.ones(n, np.float32).tobytes(), steps=1, control=control)
            if again:
                control[:] = 7
            round.add(1, np.ones(n, np.float32).tobytes(), steps=1, control=control)
        rows.append(server.store.read(0))
    np.testing.assert_array_equal(*rows)


def test_a_broadcast_with_other_offsets():
    server = Server(np.zeros(3, np.float32), "SCAFFOLD", clients=2, lr=0.1)
    server.round([Update(0, np.float32([1, 2, 3]), steps=1)])
    sent = server.broadcast([0, 1])
    other = sent.with_offset(lambda client, out: np.full(3, client, np.float32))
    assert (other.ids, other.round, other.lr, other.b) == (sent.ids, sent.round, sent.lr, sent.b)
    np.testing.assert_array_equal(other.x, sent.x)
    np.testing.assert_array_equal(other.offset(1), [1, 1, 1])
    np.testing.assert_array_equal(other.of(1).offset, [1, 1, 1])
    assert sent.offset(1).any()
    plain = Server(np.zeros(3, np.float32), "FedAvg", clients=2, lr=0.1).broadcast([0])
    assert plain.of(0).offset is None
    np.testing.assert_array_equal(plain.with_offset(other.offset).of(0).offset, [0, 0, 0])
    assert plain.whole() is plain
    assert plain.on_host() is plain


def test_kept_updates_are_grouped():
    updates = [Update(i, None, 1, keep=i != 4) for i in range(9)]
    assert [[update.client for update in some] for some in kept_batches(updates, 3)] == [
        [0, 1, 2],
        [3, 4],  # which may change once the next is asked for
        [5, 6, 7],
        [8],
    ]


def test_buffers_of_bytes_or_float32_are_models():
    due = np.float32([1, -2, 3])
    server = Server(np.zeros(3, np.float32), "FedAvg", clients=9, lr=0.1)
    for y in (due.tobytes(), bytearray(due), memoryview(due), memoryview(due).cast("B")):
        report = server.round([Update(0, y, steps=1)])
        assert report.accepted == (0,)
        np.testing.assert_array_equal(server.x, due)
    wide = np.repeat(due, 2)
    for y in (memoryview(due.view(np.int32)), memoryview(wide)[::2], memoryview(wide), due.tobytes()[1:]):
        assert rejected_arguments(server.round([Update(0, y, steps=1)])) == [(0, "model")]


def test_at_most_batch_size_kept_updates_are_held():
    server, made = Server(np.zeros(n, np.float32), "FedAvg", clients=50, lr=0.1, compute=Compute(batch_size=4)), []

    def trained():
        for client in range(50):
            y = np.ones(n, np.float32)
            made.append(ref(y))
            yield Update(client, y, 1, keep=True)
            del y
            assert sum(array() is not None for array in made) <= 4 + 1  # those of the fold before may go a little later

    assert len(server.round(trained()).accepted) == 50


def test_small_updates_are_copied_and_folded_in_one_pass(monkeypatch):
    passes = count_folds(monkeypatch)
    for size, due in ((4, [5]), (2**16, [5]), (2**16 + 1, [1] * 5)):  # 256 KiB is small
        server, y = Server(np.zeros(size, np.float32), "FedAvg", clients=5, lr=1), np.empty(size, np.float32)
        with server.open_round() as round:
            for client in range(5):
                y[:] = client
                assert round.add(client, y, steps=1)
        assert (passes, server.x.tolist()) == (due, [2.0] * size)
        passes.clear()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_small_update_that_is_not_finite_is_rejected_at_once(bad):
    server = Server(np.zeros(3, np.float32), "FedAvg", clients=3, lr=1)
    with server.open_round() as round:
        assert round.add(0, np.ones(3, np.float32), steps=1)
        assert not round.add(1, np.float32([1, bad, 1]), steps=1)
        assert round.add(1, np.full(3, 3, np.float32), steps=1)
    assert server.x.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("method", ["FedAvg", "MimiC", algorithms.SCAFFOLD(control="sent")])
def test_the_form_of_a_kept_array_may_change_but_not_its_numbers(method, dtype):
    for more in ({}, {"count": np.int64(1)}, None):
        x = np.zeros(4, np.float32) if more is None else {"w": np.zeros(4, np.float32), **more}
        server, ys = Server(x, method, clients=2, lr=1), [np.ones(4, dtype) for _ in "01"]
        with server.open_round() as round:
            for client, y in enumerate(ys):
                assert round.add(client, y if more is None else {"w": y, **more}, steps=1, control=y, keep=True)
            ys[0].dtype = "u1"
            ys[1].resize((2, 2), refcheck=False)
        assert (round.report.accepted, [*server.x]) == ((0, 1), [1] * 4)


def test_a_read_only_view_of_writable_memory_is_folded_before_add_returns():
    server = Server(np.zeros(2, np.float32), "FedAvg", clients=1, lr=1)
    memory = np.float32([1, 1])
    view = memory.view()
    view.flags.writeable = False
    with server.open_round() as round:
        round.add(0, view, steps=1)
        memory[:] = 9
    np.testing.assert_array_equal(server.x, [1, 1])


def test_bits_do_not_depend_on_threads():
    before = fedcore.threads()
    try:
        results = []
        for count in (1, 2):
            fedcore.set_threads(count)
            rng = np.random.default_rng(0)
            server = Server(rng.normal(size=300_000).astype(np.float32), "MimiC", clients=4, lr=0.1)
            for _ in range(3):
                server.round([Update(i, server.x + rng.normal(size=300_000).astype("f"), steps=3) for i in range(4)])
            results.append(server.x)
        np.testing.assert_array_equal(*results)
    finally:
        fedcore.set_threads(before)


def count_folds(monkeypatch, kernel="accumulate"):
    """The number of updates of each kernel call."""
    passes, whole = [], getattr(kernels, kernel)

    def counted(acc, bases, ys, *rest, **options):
        passes.append(len(ys))
        return whole(acc, bases, ys, *rest, **options)

    monkeypatch.setattr(kernels, kernel, counted)
    return passes


def test_held_updates_are_folded_in_one_pass(monkeypatch):
    passes = count_folds(monkeypatch)
    y = np.ones(3, np.float32)
    server = Server(np.zeros(3, np.float32), "FedAvg", clients=20, lr=1, compute=Compute(batch_size=4))
    with server.open_round() as round:
        for client in range(9):
            round.add(client, y.tobytes(), steps=1)
        for client in range(9, 15):
            round.add(client, y, steps=1, keep=True)
    assert passes == [4, 4, 4, 3]
    passes.clear()
    server.round([Update(client, y, steps=1) for client in range(20)])
    assert passes == [20]
    passes.clear()
    server.round(Update(client, y.copy(), steps=1) for client in range(3))
    assert passes == [3]


METHODS = {
    "MIFA": lambda: algorithms.MIFA(wait=False),
    "MimiC": algorithms.MimiC,
    "SCAFFOLD": algorithms.SCAFFOLD,
    "SCAFFOLD, two vectors": lambda: algorithms.SCAFFOLD(control="sent"),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_call_has_at_most_part_rows(method, monkeypatch):
    S, n, sizes = 2 * PART + 3, 5, count_folds(monkeypatch, "exchange")
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


def test_a_kernel_call_of_a_warm_start_has_at_most_part_rows(monkeypatch):
    S, sizes = 2 * PART + 3, count_folds(monkeypatch, "exchange")
    server = Server(np.zeros(3, np.float32), "SCAFFOLD", S, lr=0.1)
    server.warm_start({i: np.full(3, i, np.float32) for i in range(S)})
    assert sizes == [PART, PART, 3]
    np.testing.assert_array_equal(server.store.read(S - 1), np.full(3, S - 1, np.float32))


class Counted(str):
    """An id that counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        type(self).compared += 1
        return str.__eq__(self, other)


def test_sizes_of_new_clients_are_not_searched_in_a_list():
    k = 2000
    clients, sizes = [Counted(i) for i in range(k)], {Counted(i): i + 1 for i in range(k)}
    Counted.compared = 0
    assert population.checked_sizes(clients, sizes, sized=True) == list(range(1, k + 1))
    assert Counted.compared <= 4 * k
