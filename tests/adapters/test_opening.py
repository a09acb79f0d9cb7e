import numpy as np
import pytest

from fedcore import ClientStore, Limits
from fedcore.adapters.session import newcomers, open_server
from fedcore.algorithms.optimizers import Adam
from fedcore.errors import CheckpointError
from tests.refusals import refused_arguments

X0 = {"w": np.arange(4, dtype=np.float32)}


def test_a_job_killed_before_its_server_began_is_begun_anew(tmp_path):
    ClientStore(["a"], 4, medium="mmap", path=tmp_path / "rows").close()
    server = open_server(X0, "MIFA", ["a", "b"], storage=tmp_path / "rows", lr=0.1)
    with server.open_round() as opened:
        for client in ("a", "b"):
            opened.add(client, {"w": X0["w"] - 1}, steps=1)
    server.close()
    again = open_server(X0, "MIFA", ["c"], storage=tmp_path / "rows", lr=0.1)
    assert again.round_number == 1
    assert list(again.clients) == ["a", "b", "c"]
    again.close()


def test_an_old_server_takes_as_many_steps_as_a_job_asks_for(tmp_path):
    storage = tmp_path / "rows"
    changed = []
    for how in ({"steps": 5}, {"steps": 9}, {"steps": 3}, {"steps": 20, "limits": Limits(max_steps=7)}):
        server = open_server(X0, "MIFA", ["a"], storage=storage, lr=0.1, **how)
        with server.open_round() as opened:
            opened.add("a", {"w": X0["w"] - 1}, steps=how["steps"])
        changed.append(opened.report.changed)
        server.close()
    assert changed == [None, {"limits": {"max_steps": 9}}, None, {"limits": {"max_steps": 7}}]
    assert refused_arguments(opened.report) == [("a", "steps")]


def test_newcomers_are_those_who_are_new_once_and_whose_size_is_known():
    server = open_server(X0, "FedAvg", ["a"], lr=0.1)
    assert newcomers(server, ["b", "a", "c", "b", "\ud800", True, -1, None], None) == ["b", "c"]
    assert newcomers(server, ["b", "a", "c"], {"c": 5, "d": 6}) == {"c": 5}


def test_who_listens_is_told_of_an_old_server_s_rounds_too(tmp_path):
    seen = []
    for due in ([0], [0, 1]):
        server = open_server(X0, "MIFA", ["a"], storage=tmp_path / "rows", lr=0.1, callbacks=[seen.append])
        with server.open_round() as opened:
            opened.add("a", {"w": X0["w"] - 1}, steps=1)
        server.close()
        assert [report.round for report in seen] == due


def test_a_job_without_an_optimizer_does_not_go_on_with_one(tmp_path):
    storage = tmp_path / "run"
    open_server(X0, "FedAvg", [0], lr=0.1, storage=storage, optimizer=Adam()).close()
    with pytest.raises(CheckpointError, match="optimizer"):
        open_server(X0, "FedAvg", [0], lr=0.1, storage=storage)
    open_server(X0, "FedAvg", [0], lr=0.1, storage=storage, optimizer=Adam()).close()
