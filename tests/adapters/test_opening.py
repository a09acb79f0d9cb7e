import numpy as np
import pytest

from fedcore import ClientStore
from fedcore.adapters.open_server import newcomers, open_server
from fedcore.errors import CheckpointError
from fedcore.optimizers import Adam

X0 = {"w": np.arange(4, dtype=np.float32)}


def test_a_job_killed_before_its_server_began_is_begun_anew(tmp_path):
    ClientStore(["a"], 4, medium="mmap", path=tmp_path / "rows").close()
    server = open_server("MIFA", X0, ["a", "b"], store=f"mmap:{tmp_path / 'rows'}", lr=0.1)
    with server.open_round() as opened:
        for client in ("a", "b"):
            opened.add(client, {"w": X0["w"] - 1}, steps=1)
    server.close()
    again = open_server("MIFA", X0, ["c"], store=f"mmap:{tmp_path / 'rows'}", lr=0.1)
    assert again.round_number == 1
    assert list(again.clients) == ["a", "b", "c"]
    again.close()


def test_an_old_server_takes_as_many_steps_as_a_job_asks_for(tmp_path):
    store = f"mmap:{tmp_path / 'rows'}"
    changed = []
    for how in ({"steps": 5}, {"steps": 9}, {"steps": 3}, {"steps": 20, "max_steps": 7}):
        server = open_server("MIFA", X0, ["a"], store=store, lr=0.1, **how)
        with server.open_round() as opened:
            opened.add("a", {"w": X0["w"] - 1}, steps=how["steps"])
        changed.append(opened.report.changed)
        server.close()
    assert changed == [None, {"max_steps": 9}, None, {"max_steps": 7}]
    assert opened.report.refused == (("a", "steps: expected an integer in 1..7, got 20"),)


def test_newcomers_are_those_who_are_new_once_and_whose_size_is_known():
    server = open_server("FedAvg", X0, ["a"], lr=0.1)
    assert newcomers(server, ["b", "a", "c", "b", "\ud800", True, -1, None], None) == ["b", "c"]
    assert newcomers(server, ["b", "a", "c"], {"c": 5, "d": 6}) == {"c": 5}


def test_who_listens_is_told_of_an_old_server_s_rounds_too(tmp_path):
    seen = []
    for due in ([0], [0, 1]):
        server = open_server("MIFA", X0, ["a"], store=f"mmap:{tmp_path / 'rows'}", lr=0.1, on_report=seen.append)
        with server.open_round() as opened:
            opened.add("a", {"w": X0["w"] - 1}, steps=1)
        server.close()
        assert [report.round for report in seen] == due


def test_a_job_without_an_optimizer_does_not_go_on_with_one(tmp_path):
    store = f"mmap:{tmp_path / 'run'}"
    open_server("FedAvg", X0, [0], lr=0.1, store=store, optimizer=Adam()).close()
    with pytest.raises(CheckpointError, match="expected a server without an optimizer"):
        open_server("FedAvg", X0, [0], lr=0.1, store=store)
    open_server("FedAvg", X0, [0], lr=0.1, store=store, optimizer=Adam()).close()
