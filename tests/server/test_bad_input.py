"""Mistakes of the caller raise, invalid updates are rejected, and the state stays as before."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import fedcore
from fedcore import ClientStore, Limits, Server, Storage, Update, errors
from tests.kit import flat
from tests.server.runaway import Runaway

N, n = 3, 5
ALGORITHMS = ["FedAvg", "MIFA", "MimiC"]


def warm(name, **options):
    """A server with rows, history and a total to lose."""
    server = Server(np.arange(n, dtype=np.float32), name, clients=N, lr=0.1, **flat(**options))
    for t in range(3):
        server.round([Update(i, server.x - np.float32(1 + i + t), steps=2) for i in range(N)])
    return server


def snapshot(server):
    rows = [server.store.read(i).tobytes() for i in range(N)]
    corrections = [server.correction(i).tobytes() for i in range(N)]
    return server.x.tobytes(), server.round_number, rows, corrections, [server.store.round_of(i) for i in range(N)]


def finish_as_if_nothing(server):
    """One more round, which reveals the hidden state."""
    server.round([Update(1, server.x - np.float32(3), steps=2)])
    return snapshot(server)


def test_a_step_that_diverges_names_the_longest_update():
    server = warm("MIFA", server_lr=10.0, optimizer=Runaway())
    server.settings.optimizer.factor = 3e38
    with pytest.raises(errors.DivergedError, match=r"\bx\b.*client 2\b"), server.open_round() as round:
        for client in range(N):
            round.add(client, value=np.full(n, -1 - client, np.float32), kind="gradient", steps=1)
    plain = Server(np.full(n, np.finfo(np.float32).max), "FedAvg", N, lr=0.1, server_lr=1e3)
    with pytest.raises(errors.DivergedError):
        plain.round([Update(0, np.full(n, 1e28, np.float32), 1, kind="delta")])


FIVE, BF16 = np.zeros(5, np.float32), torch.zeros(10, dtype=torch.bfloat16)
INVALID = {
    "model": [FIVE[:4], FIVE[:, np.newaxis], FIVE.astype(np.int32), FIVE.astype(">f4"), {"w": FIVE}, b"123", None],
    "x": [{"x": torch.zeros(5, device="meta")}],
    "update": [np.float32([0, 0, np.nan, 0, 0]), np.float32([0, 0, 0, 0, np.inf])],
    "steps": [0, -3, 10**18, 2.5, True],
    "examples": [0, 9e-13, 10**18, "many"],
    "lr": [float("nan"), float("inf"), 1e30, 10**400, 10**5000, True, np.complex64(0.1), "a" * 10**5, -1.0],
    "round": [2, 3.0, np.array([3, 3])],
}
INVALID["model"] += [np.zeros(10, np.float32)[::2], BF16[:6], BF16[::2], np.array([None] * 5), memoryview(np.zeros(5))]
INVALID["model"] += [torch.zeros(5, device="meta"), torch.zeros(5, device="meta", dtype=torch.bfloat16)]
INVALID["model"] += [np.ma.masked_equal(np.arange(5, dtype=np.float32), 2)]
"""Invalid values by the name with which the reason begins."""


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("reason", "i"), [(reason, i) for reason, values in INVALID.items() for i in range(len(values))]
)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_an_invalid_update_is_rejected_and_the_round_continues(name, reason, i):
    change = {"value" if reason in ("model", "x", "update") else reason: INVALID[reason][i]}
    server, without = warm(name), warm(name)
    good = Update(2, server.x + np.float32(1), steps=4)
    report = server.round(
        [Update(**(dict(client=0, value=server.x + np.float32(2), steps=2, keep=True) | change)), good]
    )
    assert report.accepted == (2,)
    [(client, why)] = report.rejected
    assert client == 0
    assert re.match(rf"{reason}\b", why), why
    without.round([good])
    assert snapshot(server) == snapshot(without)
    assert finish_as_if_nothing(server) == finish_as_if_nothing(without)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_mistakes_of_the_caller_raise(name):
    server = warm(name)
    y = server.x.copy()
    with server.open_round() as round:
        round.add(0, y, steps=1, keep=True)
        for unknown in (N, -1, "0", 1.0, True, None):
            with pytest.raises(errors.UnknownClientError, match=r"^client\b"):
                round.add(unknown, y, steps=1)
        for wrong in ({"kind": "delta and model"}, {"count": 0}, {"count": 10**5000}, {"client": N}, {"weight": -1}):
            with pytest.raises(errors.FedcoreError, match=next(iter(wrong))):
                round.add_batch([Update(1, y, 1), Update(2, y.tobytes(), 1)._replace(**wrong)])
        with pytest.raises(errors.RangeError, match="updates"):
            round.add_batch([Update(1, y, 1), (2, y, 1)])
        with pytest.raises(errors.RoundError, match="round 3"):
            server.open_round()
    assert round.report.accepted == (0,)
    for call in (lambda: round.add(1, y, steps=1), round.finish):
        with pytest.raises(errors.RoundError, match=r"^round\b"):
            call()
    with pytest.raises(errors.UnknownClientError, match=r"^client=99\b"):
        server.broadcast([0, 99])
    for given in ((1, y, 1), Update(1, y, 1), iter([(1, y, 1)]), None):
        with pytest.raises(errors.RangeError, match="updates"):
            server.round(given)


@pytest.mark.parametrize("name", ["FedAvg", "MimiC"])
def test_a_round_without_updates_counts_and_moves_nothing(name):
    server = warm(name)
    x, number = server.x.copy(), server.round_number
    report = server.round([])
    np.testing.assert_array_equal(server.x, x)
    assert server.round_number == number + 1
    assert (report.round, report.accepted, report.gamma, report.steps, report.diversity) == (number, (), 0.0, 0, None)
    # a cohort without accepted updates is empty too
    assert server.round([Update(0, np.zeros(1, np.float32), steps=1)]).accepted == ()
    np.testing.assert_array_equal(server.x, x)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(algorithm="MIMIC"), errors.UnknownNameError, r"^algorithm\b.*'MimiC'"),
        (dict(model=np.zeros(3, np.complex64)), errors.DtypeError, r"^x\b"),
        (dict(model=np.zeros(0, np.float32)), errors.ShapeError, r"^model\b"),
        (dict(model=np.float32([np.nan])), errors.ArrayError, r"^model, x\b"),
        (dict(clients=["a", "a"]), errors.RangeError, r"^clients\b.*'a'"),
        *[(dict(clients=N), errors.RangeError, r"^clients\b") for N in (0, -1, None, 2.5, True, np.array(3))],
        *[(dict(lr=lr), errors.RangeError, r"^(rate|lr)\b") for lr in (0, 1e300, 10**400, "fast")],
        *[(dict(server_lr=lr), errors.RangeError, r"^(rate|server_lr)\b") for lr in (float("inf"), 1e39, 10**400)],
        (dict(callbacks=[3]), errors.RangeError, r"^callbacks\b"),
        (dict(clients=[2**64]), errors.UnknownClientError, r"^client\b"),
        (dict(batch_size=0), errors.RangeError, r"^batch_size\b"),
        (dict(medium="disk"), errors.UnknownNameError, r"^medium\b.*'disk'.*cuda.*mmap.*ram"),
        (dict(storage="mmap:run"), errors.RangeError, r"^storage\b.*'mmap:run'"),
        (dict(path="run", medium="ram"), errors.RangeError, r"^medium\b.*'ram'"),
        (dict(limits="open"), errors.RangeError, r"^limits\b.*'open'"),
        (dict(compute=3), errors.RangeError, r"^compute=3: must be a Compute"),
        (dict(storage=ClientStore(3, 4), clients=None), errors.ShapeError, r"^storage\b"),
        (dict(algorithm=fedcore.algorithms.MIFA), errors.RangeError, r"^algorithm=MIFA: is a class; call it"),
        (dict(accumulator="float16"), errors.UnknownNameError, r"^accumulator\b.*'float16'"),
        (dict(storage=ClientStore(3, 2)), errors.RangeError, r"^clients\b"),
    ],
)
def test_invalid_arguments_of_a_server(change, error, message):
    arguments = dict(model=np.zeros(2, np.float32), algorithm="FedAvg", clients=3, lr=0.1) | change
    with pytest.raises(error, match=message):
        Server(**flat(**arguments))


@pytest.mark.parametrize("keep", [False, True])
def test_a_client_may_replace_an_invalid_held_update(keep):
    server = warm("MIFA")
    report = server.round([Update(0, np.full(n, np.nan, np.float32), steps=1, keep=keep), Update(0, server.x, steps=1)])
    assert report.accepted == (0,)
    assert [client for client, _ in report.rejected] == [0]


@pytest.mark.parametrize("name", ["MIFA", "MimiC"])
def test_a_round_whose_fold_fails_is_rolled_back(name, monkeypatch):
    server, untouched = warm(name), warm(name)
    before = snapshot(server)
    round = server.open_round()
    round.add(0, server.x.tobytes(), steps=1)  # held
    with monkeypatch.context() as patch:
        patch.setattr(fedcore.kernels, "exchange", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            round.add(1, server.x.astype(np.float64), steps=1)  # folded at once
    with pytest.raises(errors.RoundError, match=r"^round\b"):
        round.add(2, server.x.copy(), steps=1)
    assert snapshot(server) == before
    assert finish_as_if_nothing(server) == finish_as_if_nothing(untouched)


def test_threads_that_add_take_turns():
    clients, width = 8, 200_000
    server = Server(np.zeros(width, np.float32), "FedAvg", clients=clients, lr=0.1)
    with server.open_round() as round, ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda i: round.add(i, np.full(width, i, np.float32), steps=1), range(clients)))
    assert len(round.report.accepted) == clients
    np.testing.assert_array_equal(server.x, np.full(width, 3.5, np.float32))


def test_numbers_of_narrow_types_do_not_wrap():
    server = Server(np.zeros(1, np.float32), "FedAvg", clients=2, lr=0.1, limits=Limits(max_client_lr=100.0))
    y = [np.float32([1]), np.float32([4])]
    report = server.round(
        [
            Update(0, y[0], steps=np.int16(30_000), examples=np.int32(10**9), count=3),
            Update(1, y[1], steps=1, examples=np.int32(10**9), lr=np.float32(0.5)),
        ]
    )
    assert server.x[0] == 1.75
    assert report.steps == 90_001


def test_x_cannot_be_made_writable(tmp_path):
    server = warm("FedAvg")
    with pytest.raises(ValueError, match="WRITEABLE"):
        server.x.flags.writeable = True
    server.save(tmp_path / "run")
    for medium in ("ram", "mmap"):
        with (
            Server.load(tmp_path / "run", storage=Storage(medium=medium)) as loaded,
            pytest.raises(ValueError, match="read-only"),
        ):
            loaded.x[0] = 1


def test_a_store_with_rows_is_rejected():
    store = ClientStore(2, 3)
    store.stage(0)[:] = 1
    store.commit(0)
    with pytest.raises(errors.RangeError, match=r"^storage\b"):
        Server(np.zeros(3, np.float32), "MIFA", lr=0.1, storage=store)


def test_bytes_and_seconds_are_counted():
    server = Server(np.zeros(1000, np.float32), "FedAvg", clients=3, lr=0.1)
    report = server.round([Update(0, np.ones(1000, np.float32), steps=1), Update(1, np.ones(10, np.float32), steps=1)])
    assert report.bytes == 4000 + 40
    assert 0 < report.seconds < 10


@pytest.mark.parametrize("kind", ["model", "delta"])
def test_a_huge_update_cannot_end_the_round_of_others(kind):
    """3e38 is a float32, ten times it is not: the sum of weighted models must not contain it."""
    model = {"w": np.zeros(2, np.float32), "running_mean": np.zeros(2, np.float32)}
    server = Server(model, "FedAvg", clients=3, lr=0.1)
    huge, huge_buffer = np.float32([3e38, 3e38, 0, 0]), np.float32([0, 0, 3e38, 3e38])
    report = server.round(
        [
            Update(0, value=huge, kind=kind, steps=1, examples=10),
            Update(1, np.float32([1, 2, 3, 4]), steps=1, examples=1),
            Update(2, value=huge_buffer, kind=kind, steps=1, examples=10),
        ]
    )
    assert report.accepted == (1,)
    assert [client for client, why in report.rejected if "norm" in why] == [0, 2]
    np.testing.assert_array_equal(server.x, [1, 2, 3, 4])


@pytest.mark.parametrize("name", ["MIFA", "MimiC"])
def test_a_gradient_that_float32_cannot_hold_is_rejected(name):
    server = warm(name, max_client_lr=100.0)
    report = server.round([Update(0, np.full(n, 3e38, np.float32), steps=1, lr=1e-9)])
    assert report.accepted == ()
    assert "norm" in report.rejected[0][1]
