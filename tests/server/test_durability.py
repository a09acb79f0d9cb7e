"""What a crash leaves of a server's folder, by the table of docs/state.md; and a kill while the folder is written."""

import logging
import os
import re
import shutil
import signal
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Model, Server, Storage, Update
from fedcore.errors import FedcoreError
from fedcore.store import Durability
from tests.kills import calls_of, die_at, killed
from tests.store.killed import holds_anything
from tests.store.recording import Recorder, put

N = 40_000
MODEL = {"a.w": np.zeros(100, np.float32), "b.w": np.zeros(N - 100, np.float32)}
PAGE = Path(__file__).parents[2] / "docs" / "state.md"
ROW = re.compile(r'^\| `"(\w+)"` \| (.+) \| (.+) \| (.+) \|$', re.M)
TABLE = {row[0]: dict(zip(("kill", "power", "reader"), row[1:], strict=True)) for row in ROW.findall(PAGE.read_text())}
LEFT = {
    "all finished rounds": lambda rounds, checkpoint: {rounds},
    "the last finished round": lambda rounds, checkpoint: {rounds},
    "those up to the last `server.checkpoint()`, or more": lambda rounds, checkpoint: {*range(checkpoint, rounds + 1)},
}
"""The possible numbers of rounds after a crash, for each promise of the table but that of detected damage."""
STRUCTURES = {
    "plain": {},
    "journal": {"journal": True},
    "audit": {"audit": True},
    "keep_previous": {"keep_previous": True},
    "resident": {"resident": 1 << 20},
    "shards": {"compute": Compute(shards=2)},
    "shards, journal": {"compute": Compute(shards=2), "journal": True},
    "groups": {"partial": {"A": "a.*"}},
}


def combined(structures, levels):
    """All pairs of them but the one that a server refuses."""
    return [pair for pair in product(structures, levels) if pair != ("keep_previous", "checkpoint")]


def create(path, method="MIFA", *, structure="plain", **options):
    options = STRUCTURES[structure] | options
    model = Model(MODEL, partial=options.pop("partial")) if "partial" in options else MODEL
    compute = options.pop("compute", Compute())
    return Server(model, method, 3, lr=0.1, storage=Storage(path, **options), compute=compute)


def go_on(server, rounds=1):
    for _ in range(rounds):
        t = server.round_number
        server.round([Update(i, {name: v + t + i for name, v in MODEL.items()}, 2) for i in range(3) if (i + t) % 3])


def test_the_table_has_every_durability():
    assert TABLE.keys() == set(get_args(Durability))


@pytest.mark.parametrize("checkpoint", [None, 2])
@pytest.mark.parametrize(("structure", "durability"), combined(["plain", "keep_previous", "shards", "groups"], TABLE))
def test_a_kill(durability, structure, checkpoint, folder_in_memory):
    def act():
        server = create(folder_in_memory / "s", structure=structure, durability=durability)
        for t in range(5):
            if t == checkpoint:
                server.checkpoint()
            go_on(server)
        os.kill(os.getpid(), signal.SIGKILL)

    assert killed(act)
    straight = create(None)
    with Server.load(folder_in_memory / "s", storage=Storage(durability=durability)) as server:
        assert {server.round_number} == LEFT[TABLE[durability]["kill"]](5, checkpoint or 0)
        assert server.verify() == []
        go_on(server)
        go_on(straight, server.round_number)
        np.testing.assert_array_equal(server.x, straight.x)


@pytest.mark.parametrize("structure", ["plain", "groups"])
@pytest.mark.parametrize("durability", TABLE)
def test_a_reader(durability, structure, tmp_path):
    with create(tmp_path / "s", structure=structure, durability=durability) as server:
        for t in range(3):
            copy = Server.load(tmp_path / "s", storage=Storage(medium="ram"))
            assert {copy.round_number} == LEFT[TABLE[durability]["reader"]](t, 0)
            np.testing.assert_array_equal(copy.x, server.x)
            go_on(server)


@pytest.mark.parametrize("one_of", [80, pytest.param(1, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("durability", [name for name in TABLE if TABLE[name]["power"] in LEFT])
def test_a_loss_of_power(durability, one_of, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    create(tmp_path / "s", durability=durability).close()
    server, made, xs = Server.load(tmp_path / "s", storage=Storage(durability=durability)), 0, {}
    recorder = Recorder(tmp_path / "s", monkeypatch)
    for t in range(6):
        recorder.upcoming = t + 1, made
        go_on(server)
        if t in (1, 4):
            recorder.upcoming, made = (t + 1, t + 1), t + 1
            server.checkpoint()
        xs[t + 1] = server.x
    monkeypatch.undo()
    found = set()
    for i, (files, committed) in enumerate(recorder.crashes(most=40)):
        if i % one_of:
            continue
        put(files, tmp_path / "left")
        rounds, _ = recorder.latest or (0, 0)
        _, checkpoint = committed or (0, 0)
        with Server.load(tmp_path / "left", storage=Storage(durability="none")) as left:
            assert left.round_number in LEFT[TABLE[durability]["power"]](rounds, checkpoint)
            assert left.verify() == []
            if left.round_number:
                np.testing.assert_array_equal(left.x, xs[left.round_number])
            found.add(left.round_number - rounds)
    assert len(found) > (durability == "checkpoint")
    server.close()


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_kill_while_the_folder_is_created(structure, stride, folder_in_memory):
    """A job that loads its server if it is there, and else creates it, always starts."""

    def act(path):
        create(path, structure=structure)

    calls = calls_of(lambda: act(folder_in_memory / "whole"))
    assert calls > 10
    created = set()
    for call in range(1 + 3 * [*STRUCTURES].index(structure) % stride, calls + 1, stride):  # others in each structure
        path = folder_in_memory / str(call)

        def dies(path=path, call=call):
            die_at(call, after=call % 2 == 0)
            act(path)

        assert killed(dies)
        is_there = (path / "cluster.json").exists() if "shards" in structure else path.exists()
        created.add(is_there)
        with Server.load(path) if is_there else create(path, structure=structure) as server:
            go_on(server)
            assert (path / "round").exists() == ("journal" in structure)
        with Server.load(path) as server:
            assert server.round_number == 1
            assert server.verify() == []
        assert not [entry for entry in path.glob("*.draft-*") if entry.is_dir() and holds_anything(entry)]
    assert False in created


@pytest.mark.parametrize(("structure", "durability"), combined(STRUCTURES, ["round", "checkpoint"]))
@pytest.mark.sample(1)
def test_a_kill_while_x_is_replaced(structure, durability, folder_in_memory):
    """The folder has the old x or the new one, at every call."""
    new = np.full(N, 7, np.float32)
    with create(folder_in_memory / "s", structure=structure) as server:
        go_on(server, 2)
        old = server.x.tobytes()

    def act(path):
        shutil.copytree(folder_in_memory / "s", path)

        def replace():
            with Server.load(path, storage=Storage(durability=durability)) as server:
                server.replace_x(new)

        return replace

    calls, found = calls_of(act(folder_in_memory / "whole")), set()
    for call in range(1, calls + 1, 2 if structure == "plain" else 5):
        replace = act(path := folder_in_memory / f"copy {call}")

        def dies(replace=replace, call=call):
            die_at(call, after=call % 3 == 0)
            replace()

        assert killed(dies)
        with Server.load(path) as server:
            assert server.x.tobytes() in (old, new.tobytes())
            found.add(server.x.tobytes())
            assert (server.round_number, server.verify()) == (2, [])
            assert go_on(server) is None
        with Server.load(path) as server:
            assert server.round_number == 3
        shutil.rmtree(path)
    assert found == {old, new.tobytes()}


def test_a_kill_while_a_server_with_groups_is_saved(folder_in_memory):
    create(folder_in_memory / "s", structure="groups").close()

    def act(rounds, copy="copy"):
        server = Server.load(folder_in_memory / "s", storage=Storage(medium="ram"))
        go_on(server, rounds)
        server.save(folder_in_memory / copy)

    act(1)
    calls = calls_of(lambda: act(1))
    for call in range(1, calls + 1, 7):

        def dies(call=call):
            die_at(call, after=call % 2 == 0)
            act(2)

        killed(dies)
        copy = Server.load(folder_in_memory / "copy", storage=Storage(medium="ram"))
        assert copy.round_number in (1, 2)
        assert copy.verify() == []
        act(1)
        assert Server.load(folder_in_memory / "copy", storage=Storage(medium="ram")).round_number == 1
        assert sorted(entry.name for entry in folder_in_memory.iterdir() if holds_anything(entry)) == ["copy", "s"]


def test_a_server_with_groups_is_not_saved_over_one_that_went_on(tmp_path):
    server = create(None, structure="groups")
    server.save(tmp_path / "copy")
    with Server.load(tmp_path / "copy", storage=Storage(medium="mmap")) as resumed:
        go_on(resumed)
    with pytest.raises(FedcoreError, match="not an older copy"):
        server.save(tmp_path / "copy")


def test_a_store_without_a_commit_gives_way_to_a_server(tmp_path):
    """As older versions left it after a kill; one with a commit does not."""
    ClientStore(3, N, medium="mmap", path=tmp_path / "s").close()
    with create(tmp_path / "s") as server:
        go_on(server)
    with ClientStore(3, N, medium="mmap", path=tmp_path / "rows") as store:
        store.commit(0)
    for path in ("s", "rows"):
        with pytest.raises(FedcoreError, match="not empty"):
            create(tmp_path / path)
    assert Server.load(tmp_path / "s", storage=Storage(medium="ram")).round_number == 1
