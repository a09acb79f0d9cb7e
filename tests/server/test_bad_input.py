"""The caller's mistakes raise, what a client sent is refused by name, and either way the state is as before."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcore
from fedcore import ClientStore, Server, Update, errors
from tests.server.runaway import Runaway

N, n = 3, 5
ALGORITHMS = ["FedAvg", "MIFA", "MimiC"]


def warm(name, **options):
    """A server with rows, history and a total to lose."""
    server = Server(name, np.arange(n, dtype=np.float32), clients=N, lr=0.1, **options)
    for t in range(3):
        server.round([Update(i, server.x - np.float32(1 + i + t), steps=2) for i in range(N)])
    return server


def snapshot(server):
    rows = [server.store.read(i).tobytes() for i in range(N)]
    corrections = [server.correction(i).tobytes() for i in range(N)]
    return server.x.tobytes(), server.round_number, rows, corrections, [server.store.round_of(i) for i in range(N)]


def finish_as_if_nothing(server):
    """One more round, which shows the state that cannot be seen."""
    server.round([Update(1, server.x - np.float32(3), steps=2)])
    return snapshot(server)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("way", ["exception", "abort", "mistake", "diverged"])
def test_a_round_that_is_left_leaves_everything_as_before(name, way):
    server, untouched = (warm(name, server_lr=10.0, optimizer=Runaway()) for _ in range(2))
    before = snapshot(server)

    def spoil(round):
        round.add(0, server.x + np.float32(9), steps=1)
        round.add(2, (server.x + np.float32(8)).tobytes(), steps=1)  # held

    if way == "exception":
        with pytest.raises(ZeroDivisionError), server.open_round() as round:
            spoil(round)
            1 / 0  # noqa: B018
    elif way == "abort":
        with server.open_round() as round:
            spoil(round)
            round.abort()
        assert round.report is None
    elif way == "mistake":
        with pytest.raises(errors.UnknownClientError), server.open_round() as round:
            spoil(round)
            round.add(N, server.x, steps=1)
    else:
        why = "would make x infinite .* the longest update is that of client 2, "
        with pytest.raises(errors.DivergedError, match=why), server.open_round() as round:
            server._settings.optimizer.factor = 3e38
            for client in range(N):
                round.add(client, gradient=np.full(n, -1 - client, np.float32), steps=1)
        server._settings.optimizer.factor = 1.0
    assert snapshot(server) == before
    assert finish_as_if_nothing(server) == finish_as_if_nothing(untouched)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(model=np.zeros(4, np.float32)), r"model: expected float32\[5\], got float32\[4\]"),
        (dict(model=np.zeros((5, 1), np.float32)), r"model: expected float32\[5\], got float32\[5, 1\]"),
        (dict(model=np.zeros(5, np.int32)), r"model: expected float32\[5\], got int32\[5\]"),
        (dict(model=np.zeros(10, np.float32)[::2]), r"not contiguous"),
        (dict(model=torch.zeros(6, dtype=torch.bfloat16)), r"model: expected float32\[5\], got bfloat16\[6\]"),
        (dict(model=torch.zeros(10, dtype=torch.bfloat16)[::2]), "not contiguous"),
        (dict(model=np.zeros(5, ">f4")), r"model: expected float32\[5\], got >f4\[5\]"),
        (
            dict(model=np.ma.masked_equal(np.arange(5, dtype=np.float32), 2)),
            "model: .* without a mask",
        ),
        (dict(model=np.array([None] * 5)), r"model: expected float32\[5\], got object\[5\]"),
        (dict(model=b"123"), r"model: expected 20 bytes of float32\[5\], got 3 bytes"),
        (dict(model=memoryview(np.zeros(5))), "model: expected 20 bytes .* got 40 bytes of format 'd'"),
        (dict(model=torch.zeros(5, device="meta")), r"model: expected float32\[5\] in CPU memory"),
        (
            dict(model=torch.zeros(5, device="meta", dtype=torch.bfloat16)),
            r"model: expected float32\[5\] in CPU memory",
        ),
        (dict(model={"x": torch.zeros(5, device="meta")}), "x: expected an array in CPU memory"),
        (
            dict(model={"w": np.zeros(5, np.float32)}),
            r"model: expected 1 tensor by name, got 1; missing 1 \(x\); unexpected 1 \(w\)",
        ),
        (dict(model=None), "model: expected a module, a mapping"),
        (dict(model=np.float32([0, 0, np.nan, 0, 0])), "update: expected finite numbers"),
        (dict(model=np.float32([0, 0, 0, 0, np.inf])), "update: expected finite numbers"),
        (dict(steps=0), r"steps: expected an integer in 1\.\.1000000, got 0"),
        (dict(steps=-3), r"steps: .* got -3"),
        (dict(steps=10**18), r"steps: .* got 1000000000000000000"),
        (dict(steps=2.5), r"steps: .* got 2.5"),
        (dict(steps=True), r"steps: .* got True"),
        (dict(examples=0), r"examples: expected a number in \(0, 9007199254740992\], got 0"),
        (dict(examples=10**18), "examples: .* got 1000000000000000000"),
        (dict(examples="many"), "examples: .* got 'many'"),
        (dict(lr=float("nan")), r"lr: expected a number in \(0, 100\], got nan"),
        (dict(lr=float("inf")), "lr: .* got inf"),
        (dict(lr=1e30), r"lr: .* got 1e\+30"),
        (dict(lr=10**400), "lr: .* got 1000"),
        (dict(lr=10**5000), "lr: .* got an unprintable int"),
        (dict(lr=True), "lr: .* got True"),
        (dict(lr=np.complex64(0.1)), "lr: expected a number"),
        (dict(lr="a" * 10**5), "lr: expected a number .{0,60}$"),
        (dict(lr=-1.0), r"lr: .* got -1\.0"),
        (dict(round=2), "round: expected 3, the open one, got 2"),
        (dict(round=3.0), "round: expected 3, the open one, got 3.0"),
        (dict(round=np.array([3, 3])), "round: expected 3, the open one, got array"),
    ],
)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_what_a_client_sent_is_refused_by_name_and_the_round_goes_on(name, change, reason):
    server, without = warm(name), warm(name)
    good = Update(2, server.x + np.float32(1), steps=4)
    report = server.round(
        [Update(**(dict(client=0, model=server.x + np.float32(2), steps=2, keep=True) | change)), good]
    )
    assert report.heard == (2,)
    [(client, why)] = report.refused
    assert client == 0
    assert re.search(reason, why), why
    # as if it had never come
    without.round([good])
    assert snapshot(server) == snapshot(without)
    assert finish_as_if_nothing(server) == finish_as_if_nothing(without)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("fold", [1, 2, 8])
def test_bad_rows_among_held_ones_fall_out_alone(name, fold):
    server, without = warm(name, fold=fold), warm(name)
    bad = np.full(n, np.nan, np.float32)
    updates = [Update(i, server.x - np.float32(i), steps=2, keep=True) for i in range(N)]
    report = server.round([Update(1, bad, steps=1, keep=True), updates[0], Update(2, bad, steps=1, keep=True)])
    assert report.heard == (0,)
    assert [client for client, _ in report.refused] == [1, 2]
    without.round([updates[0]])
    assert finish_as_if_nothing(server) == finish_as_if_nothing(without)


def test_a_refused_client_may_try_again():
    server = warm("MIFA")
    with server.open_round() as round:
        round.add(0, np.full(n, np.nan, np.float32), steps=1)
        round.add(0, server.x, steps=1)
    assert round.report.heard == (0,)
    assert len(round.report.refused) == 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_callers_mistakes_raise(name):
    server = warm(name)
    y = server.x.copy()
    with server.open_round() as round:
        round.add(0, y, steps=1, keep=True)
        for unknown in (N, -1, "0", 1.0, True, None):
            with pytest.raises(errors.UnknownClientError, match=r"client: expected .* got"):
                round.add(unknown, y, steps=1)
        with pytest.raises(errors.RangeError, match="gradient: expected one of them, got model and delta"):
            round.add(1, y, delta=y, steps=1)
        with pytest.raises(errors.RangeError, match="count: expected"):
            round.add(1, y, steps=1, count=0)
        with pytest.raises(errors.RoundError, match="round 3 is open already"):
            server.open_round()
    assert round.report.heard == (0,)
    for call in (lambda: round.add(1, y, steps=1), round.finish):
        with pytest.raises(errors.RoundError, match="finished or aborted"):
            call()
    with pytest.raises(errors.UnknownClientError, match="got 99"):
        server.broadcast([0, 99])
    if name != "FedAvg":
        with pytest.raises(errors.RangeError, match="count: expected 1, since the method hears a client once a round"):
            server.round([Update(1, y, steps=1, count=2)])


@pytest.mark.parametrize("name", ["FedAvg", "MimiC"])
def test_an_empty_cohort_is_recorded_counts_and_moves_nothing(name):
    server = warm(name)
    x, number = server.x.copy(), server.round_number
    report = server.round([])
    np.testing.assert_array_equal(server.x, x)
    assert server.round_number == number + 1
    assert (report.round, report.heard, report.gamma, report.steps, report.diversity) == (number, (), 0.0, 0, None)
    # a cohort that was refused to the last one is empty too
    assert server.round([Update(0, np.zeros(1, np.float32), steps=1)]).heard == ()
    np.testing.assert_array_equal(server.x, x)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(algorithm="MIMIC"), errors.UnknownNameError, "algorithm: 'MIMIC' is unknown; did you mean 'MimiC'"),
        (dict(x0=np.zeros(3, np.complex64)), errors.DtypeError, "x: expected float32, .* or bool, got complex64"),
        (dict(x0=np.zeros(0, np.float32)), errors.ShapeError, "x0: expected at least one parameter"),
        (dict(x0=np.float32([np.nan])), errors.ArrayError, "x0, x: expected finite numbers"),
        (dict(clients=0), errors.RangeError, "clients: expected at least one, got none"),
        (dict(clients=-1), errors.RangeError, "clients: expected an integer in 0..2\\*\\*62, got -1"),
        (dict(clients=["a", "a"]), errors.RangeError, "each once, got 'a'"),
        (dict(clients=[2**64]), errors.UnknownClientError, "client: expected an int in"),
        (dict(clients=None), errors.RangeError, "clients: expected a count or the ids"),
        (dict(lr=0), errors.RangeError, "rate: expected a finite number > 0, got 0"),
        (dict(lr=1e300), errors.RangeError, r"lr: expected a rate that float32 holds, in \(0, 3.4e\+38\], got 1e\+300"),
        (dict(server_lr=float("inf")), errors.RangeError, "rate: expected a finite number > 0, got inf"),
        (dict(fold=0), errors.RangeError, r"fold: expected an integer in 1\.\.2\*\*53, got 0"),
        (dict(store="disk"), errors.UnknownNameError, "store: 'disk' is unknown"),
        (dict(store=Path("run")), errors.UnknownNameError, "known: cuda, mmap:PATH, ram"),
        (dict(store=ClientStore(3, 4), clients=None), errors.ShapeError, "store: expected rows of 2 parameters, got 4"),
        (
            dict(algorithm=fedcore.algorithms.MIFA),
            errors.UnknownNameError,
            "algorithm: expected an Algorithm",
        ),
        (dict(lr="fast"), errors.RangeError, "rate: expected a finite number > 0 or a function"),
        (dict(clients=2.5), errors.RangeError, "clients: expected a count or the ids, got 2.5"),
        (dict(clients=True), errors.RangeError, "clients: expected a count or the ids, got True"),
        (dict(accumulate="float16"), errors.UnknownNameError, "accumulate: 'float16' is unknown"),
        (dict(store=ClientStore(3, 2)), errors.RangeError, "clients: expected none beside a ClientStore"),
    ],
)
def test_a_server_that_cannot_be(change, error, message):
    arguments = dict(algorithm="FedAvg", x0=np.zeros(2, np.float32), clients=3, lr=0.1) | change
    with pytest.raises(error, match=message):
        Server(**arguments)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(errors.UnknownNameError, match="option of MIFA: 'wiat' is unknown; did you mean 'wait'"):
        fedcore.algorithms.named("MIFA", wiat=True)


@pytest.mark.parametrize("keep", [False, True])
def test_a_held_update_that_is_none_lets_its_client_try_again(keep):
    server = warm("MIFA")
    report = server.round([Update(0, np.full(n, np.nan, np.float32), steps=1, keep=keep), Update(0, server.x, steps=1)])
    assert report.heard == (0,)
    assert [client for client, _ in report.refused] == [0]


@pytest.mark.parametrize("name", ["MIFA", "MimiC"])
def test_a_round_whose_fold_fails_is_over_and_leaves_no_trace(name, monkeypatch):
    server, untouched = warm(name), warm(name)
    before = snapshot(server)
    round = server.open_round()
    round.add(0, server.x.tobytes(), steps=1)  # held
    with monkeypatch.context() as patch:
        patch.setattr(fedcore.kernels, "exchange", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            round.add(1, server.x.copy(), steps=1)
    with pytest.raises(errors.RoundError, match="finished or aborted"):
        round.add(2, server.x.copy(), steps=1)
    assert snapshot(server) == before
    assert finish_as_if_nothing(server) == finish_as_if_nothing(untouched)


def test_a_round_that_was_dropped_does_not_stay_open():
    server = warm("MIFA")
    before = snapshot(server)
    server.open_round().add(0, server.x + np.float32(1), steps=1)
    with server.open_round():
        pass
    assert snapshot(server)[2] == before[2]


def test_threads_that_add_take_turns():
    clients, width = 8, 200_000
    server = Server("FedAvg", np.zeros(width, np.float32), clients=clients, lr=0.1)
    with server.open_round() as round, ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda i: round.add(i, np.full(width, i, np.float32), steps=1), range(clients)))
    assert len(round.report.heard) == clients
    np.testing.assert_array_equal(server.x, np.full(width, 3.5, np.float32))


def test_numbers_of_narrow_types_do_not_wrap():
    server = Server("FedAvg", np.zeros(1, np.float32), clients=2, lr=0.1, own_rates=True)
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
        with Server.load(tmp_path / "run", medium=medium) as loaded, pytest.raises(ValueError, match="read-only"):
            loaded.x[0] = 1


def test_a_rate_that_runs_out_is_an_error():
    server = Server("FedAvg", np.zeros(1, np.float32), clients=1, lr=lambda round: 0.1 * (round < 1))
    server.round([])
    with pytest.raises(errors.RangeError, match=r"rate: expected a finite number > 0 in round 1, got 0\.0"):
        server.open_round()
    with pytest.raises(errors.RangeError, match="in round 1"):
        server.broadcast([0])


def test_a_store_with_rows_is_refused():
    store = ClientStore(2, 3)
    store.stage(0)[:] = 1
    store.commit(0)
    with pytest.raises(errors.RangeError, match=r"^store: "):
        Server("MIFA", np.zeros(3, np.float32), lr=0.1, store=store)


def test_bytes_and_seconds_are_counted():
    server = Server("FedAvg", np.zeros(1000, np.float32), clients=3, lr=0.1)
    report = server.round([Update(0, np.ones(1000, np.float32), steps=1), Update(1, np.ones(10, np.float32), steps=1)])
    assert report.bytes == 4000 + 40
    assert 0 < report.seconds < 10


@pytest.mark.parametrize("name", ["MIFA", "MimiC"])
def test_a_gradient_that_float32_cannot_hold_is_refused(name):
    server = warm(name, own_rates=True)
    report = server.round([Update(0, np.full(n, 3e38, np.float32), steps=1, lr=1e-9)])
    assert report.heard == ()
    assert "an update past float32's range" in report.refused[0][1]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_interrupt_while_a_round_is_committed_waits_until_it_is(name, monkeypatch, interruptible):
    """Or the round never was, where all of the commit is one assignment."""
    server, untouched = warm(name), warm(name)
    keep = server._state.keep

    def interrupted_keep(*commit):
        signal.raise_signal(signal.SIGINT)
        return keep(*commit)

    update = Update(1, server.x - np.float32(2), steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(server._state, "keep", interrupted_keep)
        with pytest.raises(KeyboardInterrupt):
            server.round([update])
    if server.round_number > untouched.round_number:
        untouched.round([update])
    else:
        assert not server.algorithm.keeps_rows
    assert snapshot(server) == snapshot(untouched)
    assert finish_as_if_nothing(server) == finish_as_if_nothing(untouched)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("kind", ["model", "delta"])
def test_a_huge_update_cannot_end_the_round_of_others(kind):
    """3e38 is a float32, ten times it is not: the sum of models weighted by examples must never see it."""
    model = {"w": np.zeros(2, np.float32), "running_mean": np.zeros(2, np.float32)}
    server = Server("FedAvg", model, clients=3, lr=0.1)
    huge, huge_buffer = np.float32([3e38, 3e38, 0, 0]), np.float32([0, 0, 3e38, 3e38])
    report = server.round(
        [
            Update(0, **{kind: huge}, steps=1, examples=10),
            Update(1, np.float32([1, 2, 3, 4]), steps=1, examples=1),
            Update(2, **{kind: huge_buffer}, steps=1, examples=10),
        ]
    )
    assert report.heard == (1,)
    assert [client for client, why in report.refused if "past float32's range" in why] == [0, 2]
    np.testing.assert_array_equal(server.x, [1, 2, 3, 4])
