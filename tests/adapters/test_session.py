"""The parts that the adapters share: the server of a job, and the instructions that a framework can carry."""

from dataclasses import fields

import numpy as np
import pytest

from fedcore import ClientStore, Limits, Server, Storage, Update
from fedcore.adapters.session import RejectedRounds, newcomers, open_server, require_steps, with_plain_steps
from fedcore.algorithms import MIFA, SCAFFOLD
from fedcore.algorithms.optimizers import Adam
from fedcore.errors import CheckpointError, RangeError, RoundError, StoreError
from fedcore.server.broadcast import Instructions
from tests.adapters.orders import OF_STEPS, ORDERS, PLAIN
from tests.rejections import rejected_arguments

X0 = {"w": np.arange(4, dtype=np.float32)}


def test_a_job_that_was_killed_before_it_made_the_server_starts_anew(tmp_path):
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


def test_a_job_over_an_empty_store_has_all_options_of_storage(tmp_path):
    """As in a new folder; a store with a commit is refused."""
    ClientStore(["a"], 4, medium="mmap", path=tmp_path / "s").close()
    options = dict(
        codec="bf16", durability="none", keep_previous=True, journal=True, audit_key=bytes(32), resident=1 << 30
    )
    found = []
    for path in (tmp_path / "s", tmp_path / "new"):
        with open_server(X0, "MIFA", ["b"], storage=Storage(path=path, **options), lr=0.1) as server:
            store, settings = server._backend.store, server._settings
            found.append((store.codec, store.durability, store.keep_previous, settings.journal, settings.audit))
            found[-1] += (f"{settings.device}", [*server.clients])
    assert found[0] == found[1] == ("bf16", "none", True, True, True, "cpu", ["b"])
    with ClientStore(["a"], 4, medium="mmap", path=tmp_path / "rows") as rows:
        rows.commit(0)
    with pytest.raises(StoreError, match="not empty"):
        open_server(X0, "MIFA", ["b"], storage=tmp_path / "rows", lr=0.1)


def test_an_earlier_server_accepts_the_steps_that_a_job_asks_for(tmp_path):
    storage = tmp_path / "rows"
    changed = []
    for how in ({"steps": 5}, {"steps": 9}, {"steps": 3}, {"steps": 20, "limits": Limits(max_steps=7)}):
        server = open_server(X0, "MIFA", ["a"], storage=storage, lr=0.1, **how)
        with server.open_round() as opened:
            opened.add("a", {"w": X0["w"] - 1}, steps=how["steps"])
        changed.append(opened.report.changed)
        server.close()
    assert changed == [None, {"limits": {"max_steps": 9}}, None, {"limits": {"max_steps": 7}}]
    assert rejected_arguments(opened.report) == [("a", "steps")]


def test_newcomers_are_unknown_ids_of_known_size():
    server = open_server(X0, "FedAvg", ["a"], lr=0.1)
    assert newcomers(server, ["b", "a", "c", "b", "\ud800", True, -1, None], None) == ["b", "c"]
    assert newcomers(server, ["b", "a", "c"], {"c": 5, "d": 6}) == {"c": 5}


def test_a_job_must_give_the_saved_optimizer(tmp_path):
    storage = tmp_path / "run"
    open_server(X0, "FedAvg", [0], lr=0.1, storage=storage, optimizer=Adam()).close()
    with pytest.raises(CheckpointError, match="optimizer"):
        open_server(X0, "FedAvg", [0], lr=0.1, storage=storage)
    open_server(X0, "FedAvg", [0], lr=0.1, storage=storage, optimizer=Adam()).close()


def test_only_rejected_rounds_in_a_row_end_a_run():
    rejected = [("b", "lr=2: must be 1")]
    rounds = RejectedRounds(2)
    for accepted, refused in (((), rejected), ((), ()), (("a",), rejected), ((), rejected), ((), ())):
        rounds.note(accepted, refused)
    with pytest.raises(RoundError, match=r"1 x lr=2: must be 1"):
        rounds.note((), rejected)
    with pytest.raises(RangeError, match=r"^abort_after"):
        RejectedRounds(0)


@pytest.mark.parametrize("name", ORDERS)
def test_a_method_of_more_than_plain_steps_is_refused(name):
    if name in PLAIN:
        assert with_plain_steps(ORDERS[name], 0.1) is ORDERS[name]
    else:
        with pytest.raises(RangeError, match=rf"^algorithm\b.*{type(ORDERS[name]).__name__}"):
            with_plain_steps(ORDERS[name], 0.1)


def test_a_rate_of_each_step_is_refused():
    with pytest.raises(RangeError, match=r"^lr\b.*InverseStep.*lambda round"):
        with_plain_steps("FedAvg", OF_STEPS)


@pytest.mark.parametrize("steps", [0, -1, 1.5, 2**53 + 1, True, "", [3]])
def test_steps_are_a_number_or_a_name(steps):
    require_steps(3, MIFA())
    require_steps("num-steps", MIFA())
    with pytest.raises(RangeError, match=r"^steps\b"):
        require_steps(steps, MIFA())


def test_steps_are_refused_for_methods_of_more_than_plain_steps():
    with pytest.raises(RangeError, match=r"^steps\b"):
        require_steps(3, SCAFFOLD())


def test_the_method_everything_sets_every_field_of_the_instructions():
    server = Server(np.zeros(3, np.float32), ORDERS["everything"], clients=2, lr=0.5)
    server.round([Update(0, np.float32([1, 2, 3]), 1, control=np.ones(3, np.float32), loss=1.0)])
    asked, usual = server.broadcast([0]).of(0), Instructions(round=0, lr=0.1)
    for name in {field.name for field in fields(Instructions)} - {"lr_of_step", "start"}:
        assert np.any(getattr(asked, name) != getattr(usual, name)), name
