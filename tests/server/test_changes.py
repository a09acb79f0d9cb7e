"""Rates and limits that change between rounds or on loading: recorded, and with the bits of a schedule."""

import numpy as np
import pytest

from fedcore import ClientStore, Limits, RoundPolicy, Server, Storage, Update, algorithms
from fedcore.algorithms import rates
from fedcore.errors import RangeError, RoundError, StoreError, UnknownNameError
from fedcore.server.folder import go_back, last_change
from tests.rejections import rejected_arguments
from tests.server.rounds import METHODS, everything, go_on, made

X0 = np.zeros(2, np.float32)


@pytest.mark.parametrize("method", METHODS)
def test_a_changed_rate_has_the_bits_of_a_schedule(method, tmp_path):
    """Between rounds, and by ``load`` of a copy."""
    straight = made(method, lr=lambda t: 0.1 if t < 3 else 0.05)
    changed = made(method, lr=0.1)
    go_on(changed, 3)
    changed.save(tmp_path / "s")
    changed.change(lr=0.05)
    loaded = Server.load(tmp_path / "s", lr=0.05)
    go_on(straight, 6)
    for server in (changed, loaded):
        go_on(server, 3)
        np.testing.assert_array_equal(server.x, straight.x)
        assert everything(server)[1:3] == everything(straight)[1:3]


def test_a_round_without_clients_steps_along_old_rows_at_the_rate_of_today(tmp_path):
    with Server(X0, "MIFA", 1, lr=0.5, storage=tmp_path / "s") as server:
        server.round([Update(0, X0 - 1, steps=2)])  # h = 1
        server.change(lr=0.125)
    with Server.load(tmp_path / "s") as server:
        assert (server.round([]).gamma, server.x.tolist()) == (0.25, [-1.25, -1.25])


def test_the_folder_and_the_next_report_have_the_changes(tmp_path, caplog):
    options = dict(lr=0.1, limits=Limits(max_steps=9), storage=tmp_path / "s")
    Server(X0, algorithms.named("MIFA", wait=False), 2, **options).close()
    with Server.load(tmp_path / "s") as server:
        server.change(lr=np.float32(0.5), limits=Limits(max_steps=9, max_norm=3))
        server.change(server_lr=rates.Exponential(0.5, 0.9), limits=Limits(max_steps=9, max_norm=4))
        assert server.transactions == 2
    due = {"lr": 0.5, "limits": {"max_steps": 9, "max_norm": 4.0}, "server_lr": repr(rates.Exponential(0.5, 0.9))}
    with Server.load(tmp_path / "s") as server:  # as after a crash
        assert server.broadcast([0]).lr == 0.5
        report = server.round([Update(0, X0 + 9, 1), Update(1, X0 + 1, 9)])
        assert report.changed == due
        assert report.rejected[0][1].endswith("= 25.4558 exceeds max_norm=4")
        assert report.gamma == 0.5
        assert server.round([]).changed is None
    assert "changed these options" not in caplog.text
    with Server.load(tmp_path / "s", lr=0.5, limits=Limits(max_steps=9, max_norm=4)) as server:
        assert server.transactions == 4  # nothing is another
    with Server.load(tmp_path / "s", limits=Limits(max_norm=None, max_steps=8)) as server:
        assert server.round([Update(0, X0 + 9, 1), Update(1, X0 + 1, 9)]).changed == {"limits": {"max_steps": 8}}
    assert "limits={'max_steps': 8}" in caplog.text


def test_a_change_is_rolled_back(tmp_path):
    with Server(X0, "MIFA", clients=2, lr=0.1, storage=Storage(path=tmp_path / "s", keep_previous=True)) as server:
        server.change(lr=0.2)
        server.change(lr=0.3, limits=Limits(max_client_lr=100.0))
    with ClientStore.open(tmp_path / "s", keep_previous=True) as rows:
        assert last_change(rows) == "a change of lr, limits"
        assert go_back(rows, 1)
    with Server.load(tmp_path / "s") as server:
        assert server.broadcast([0]).lr == pytest.approx(0.2)
        assert server.round([Update(0, X0, 1, lr=5.0)]).changed == {"lr": 0.2}


def test_a_change_that_fails_changes_nothing(tmp_path, monkeypatch):
    with Server(X0, "MIFA", clients=2, lr=0.1, storage=tmp_path / "s") as server:

        def full(*_, **__):
            raise StoreError("full")

        monkeypatch.setattr(ClientStore, "commit", full)
        with pytest.raises(StoreError, match="full"):
            server.change(lr=0.2)
        monkeypatch.undo()
        assert (server.broadcast([0]).lr, server.transactions) == (0.1, 0)
        assert server.round([]).changed is None
        with server.open_round(), pytest.raises(RoundError):
            server.change(lr=0.2)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (dict(lr=0), RangeError, r"^rate\b"),
        (dict(lr=None), RangeError, r"^rate\b"),
        (dict(lr=1e39), RangeError, r"^lr\b"),
        (dict(limits={"max_steps": 0}), RangeError, r"^max_steps\b"),
        (dict(aggregation="medain"), UnknownNameError, r"'medain'"),
        (dict(server_lr=0.5), RangeError, r"^server_lr\b"),
        (dict(limit=Limits()), UnknownNameError, r"^option\b.*'limits'"),
        (dict(batch_size=1), UnknownNameError, r"^option\b.*'batch_size'"),
    ],
)
def test_other_options_are_rejected(options, error, match, tmp_path):
    server = Server(X0, "FedAvg", clients=2, lr=0.1)
    with pytest.raises(error, match=match):
        server.change(**options)
    assert server.transactions == 0
    server.save(tmp_path / "s")
    if options.get("lr", 1) is not None and not {"batch_size", "limit"} & options.keys():
        with pytest.raises(error, match=match):
            Server.load(tmp_path / "s", storage=Storage(medium="mmap"), **options)
    Server.load(tmp_path / "s", storage=Storage(medium="mmap")).close()  # the folder is unlocked


def test_late_updates_at_the_old_rate_are_rejected():
    server = Server(X0, "MIFA", clients=2, lr=0.1, policy=RoundPolicy(max_staleness=2))
    server.round([])
    server.change(limits=Limits(max_steps=5))
    assert server.round([Update(0, X0 + 1, 1, round=0)]).accepted == (0,)
    server.change(lr=0.2)
    report = server.round([Update(0, X0 + 1, 1, round=1), Update(1, X0 + 1, 1, round=2)])
    assert rejected_arguments(report) == [(0, "round")]
    assert report.accepted == (1,)
