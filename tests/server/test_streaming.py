"""One by one, held and folded, or as a batch: the same bits."""

from weakref import ref

import numpy as np
import pytest
import torch

import fedcore
from fedcore import Compute, Server, Update
from fedcore.server.update import held_together
from tests.refusals import refused_arguments

n, N = 4099, 9


def run(name, deliver, *, batch_size=8, rounds=4):
    rng = np.random.default_rng(1)
    server = Server(
        rng.normal(size=n).astype(np.float32), name, clients=N, lr=0.1, compute=Compute(batch_size=batch_size)
    )
    for _ in range(rounds):
        cohort = rng.permutation(N)[: rng.integers(1, N + 1)].tolist()
        ys = [(server.x + rng.normal(size=n)).astype(np.float32) for _ in cohort]
        numbers = rng.integers(1, 50, size=(len(cohort), 2)).tolist()
        deliver(server, [Update(i, y, steps=k, examples=e) for i, y, (k, e) in zip(cohort, ys, numbers, strict=True)])
    return server


def batch(server, updates):
    server.round(updates)


def generated_in_one_buffer(server, updates):
    buffer = np.empty(n, np.float32)

    def trained():
        for update in updates:
            buffer[:] = update.value
            yield Update(update.client, buffer, update.steps, update.examples)

    server.round(trained())
    buffer[:] = np.nan


def generated_and_some_kept(server, updates):
    """Kept updates may be folded together; one whose buffer is used again must be folded before the next is made."""
    buffer = np.empty(n, np.float32)

    def trained():
        for i, update in enumerate(updates):
            if i % 4 != 2:
                yield update._replace(value=update.value.copy(), keep=True)
            else:
                buffer[:] = update.value
                yield update._replace(value=buffer)
                buffer[:] = np.nan

    server.round(trained())


def one_by_one(**options):
    def deliver(server, updates):
        with server.open_round() as round:
            for update in updates:
                round.add(update.client, update.value, steps=update.steps, examples=update.examples, **options)
            round.finish()

    return deliver


def as_bytes(server, updates):
    with server.open_round() as round:
        for update in updates:
            round.add(update.client, update.value.tobytes(), steps=update.steps, examples=update.examples)


def within_a_message(server, updates):
    """At an odd address, where a float32 may not lie."""
    with server.open_round() as round:
        for update in updates:
            message = memoryview(b"\x00" + update.value.tobytes())
            round.add(update.client, message[1:], steps=update.steps, examples=update.examples)


def lent(server, updates):
    """Into the server's own buffers, which are lent again once they are folded; views of them will do."""
    with server.open_round() as round:
        for i, update in enumerate(updates):
            buffer = round.buffer()
            buffer[:] = update.value
            round.add(update.client, buffer[:] if i % 2 else buffer, steps=update.steps, examples=update.examples)


def as_tensors(server, updates):
    server.round([Update(u.client, torch.from_numpy(u.value), u.steps, u.examples) for u in updates])


@pytest.mark.parametrize("name", ["FedAvg", "MIFA", "MimiC"])
@pytest.mark.parametrize("fold", [1, 3, 8, 100])
def test_every_way_of_delivery_gives_the_same_bits(name, fold):
    due = run(name, batch)
    for deliver in (
        batch,
        generated_in_one_buffer,
        generated_and_some_kept,
        one_by_one(),
        one_by_one(keep=True),
        as_bytes,
        within_a_message,
        lent,
        as_tensors,
    ):
        server = run(name, deliver, batch_size=fold)
        np.testing.assert_array_equal(server.x, due.x)
        for client in range(N):
            np.testing.assert_array_equal(server.store.read(client), due.store.read(client))


def test_lent_buffers_come_back_when_they_are_folded():
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


def test_a_lent_buffer_that_the_caller_still_has_is_lent_to_nobody_else():
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


def test_a_lent_buffer_outlives_its_round():
    server = Server(np.zeros(n, np.float32), "FedAvg", clients=2, lr=0.1)
    with server.open_round() as round:
        buffer = round.buffer()
        buffer[:] = 3
        round.abort()
    with pytest.raises(fedcore.errors.RoundError, match=r"^round\b"):
        round.buffer()
    assert (buffer == 3).all()


def test_a_control_that_may_change_is_folded_with_its_vector():
    """A y that nobody can change does not speak for the second vector beside it."""
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


def test_a_broadcast_with_other_offsets_is_the_same_beside_them():
    server = Server(np.zeros(3, np.float32), "SCAFFOLD", clients=2, lr=0.1)
    server.round([Update(0, np.float32([1, 2, 3]), steps=1)])
    sent = server.broadcast([0, 1])
    other = sent.with_offset(lambda client, out: np.full(3, client, np.float32))
    assert (other.ids, other.round, other.lr, other.direction) == (sent.ids, sent.round, sent.lr, sent.direction)
    np.testing.assert_array_equal(other.x, sent.x)
    np.testing.assert_array_equal(other.offset(1), [1, 1, 1])
    np.testing.assert_array_equal(other.of(1).offset, [1, 1, 1])
    assert sent.offset(1).any()
    plain = Server(np.zeros(3, np.float32), "FedAvg", clients=2, lr=0.1).broadcast([0])
    assert plain.of(0).offset is None
    np.testing.assert_array_equal(plain.with_offset(other.offset).of(0).offset, [0, 0, 0])
    assert plain.whole() is plain
    assert plain.on_host() is plain


def test_kept_updates_come_as_many_at_a_time_as_may_be():
    updates = [Update(i, None, 1, keep=i != 4) for i in range(9)]
    assert [[update.client for update in some] for some in held_together(updates, 3)] == [
        [0, 1, 2],
        [3, 4],  # which may change once the next is asked for
        [5, 6, 7],
        [8],
    ]


def test_a_buffer_of_bytes_or_of_float32_is_a_model_and_no_other():
    due = np.float32([1, -2, 3])
    server = Server(np.zeros(3, np.float32), "FedAvg", clients=9, lr=0.1)
    for y in (due.tobytes(), bytearray(due), memoryview(due), memoryview(due).cast("B")):
        report = server.round([Update(0, y, steps=1)])
        assert report.accepted == (0,)
        np.testing.assert_array_equal(server.x, due)
    wide = np.repeat(due, 2)
    for y in (
        memoryview(due.view(np.int32)),
        memoryview(wide)[::2],
        memoryview(wide),
        due.tobytes()[1:],
    ):
        report = server.round([Update(0, y, steps=1)])
        assert refused_arguments(report) == [(0, "model")]


def test_no_more_than_fold_kept_updates_are_held():
    server, made = Server(np.zeros(n, np.float32), "FedAvg", clients=50, lr=0.1, compute=Compute(batch_size=4)), []

    def trained():
        for client in range(50):
            y = np.ones(n, np.float32)
            made.append(ref(y))
            yield Update(client, y, 1, keep=True)
            del y
            assert sum(array() is not None for array in made) <= 4 + 1  # those of the fold before may go a little later

    assert len(server.round(trained()).accepted) == 50


def test_a_writable_buffer_is_folded_before_add_returns():
    server = Server(np.zeros(2, np.float32), "MIFA", clients=2, lr=1)
    buffer = np.float32([-1, -1])
    with server.open_round() as round:
        round.add(0, buffer, steps=1)
        buffer[:] = -5
        round.add(1, buffer, steps=1)
    np.testing.assert_array_equal(server.x, [-3, -3])


def test_a_read_only_view_of_writable_memory_is_folded_at_once_too():
    server = Server(np.zeros(2, np.float32), "FedAvg", clients=1, lr=1)
    memory = np.float32([1, 1])
    view = memory.view()
    view.flags.writeable = False
    with server.open_round() as round:
        round.add(0, view, steps=1)
        memory[:] = 9
    np.testing.assert_array_equal(server.x, [1, 1])


def test_nothing_is_shared_with_the_caller():
    x0 = np.zeros(3, np.float32)
    server = Server(x0, "MIFA", clients=1, lr=1)
    sent = server.broadcast([0]).x
    y = np.float32([1, 2, 3])
    server.round([Update(0, y, steps=1)])
    x0[:] = y[:] = 77
    np.testing.assert_array_equal(server.x, [1, 2, 3])
    np.testing.assert_array_equal(sent, [0, 0, 0])  # what a slow client still trains on
    with pytest.raises(ValueError, match="read-only"):
        server.x[0] = 5
    server.tensors()["x"][0] = 5
    np.testing.assert_array_equal(server.x, [1, 2, 3])


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


def count_folds(monkeypatch):
    """How many updates each pass of the kernel took."""
    passes, whole = [], fedcore.kernels.accumulate

    def counted(acc, bases, ys, *rest, **options):
        passes.append(len(ys))
        return whole(acc, bases, ys, *rest, **options)

    monkeypatch.setattr(fedcore.kernels, "accumulate", counted)
    return passes


def test_what_may_be_held_is_folded_in_one_pass(monkeypatch):
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
    assert passes == [1, 1, 1]
