"""A cluster in folders: it resumes with the same bits, or the error names the reason."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Server, Storage, errors
from fedcore.cluster import coordinator, manifest, reshard, state
from fedcore.cluster.manifest import INTENT
from fedcore.cluster.state import ShardedState
from fedcore.rules import Mean, RejectLong
from fedcore.server.state import State
from fedcore.store.files.locks import WriterLock
from fedcore.store.registry import Registry
from tests.cluster.pairs import N, made, n, one_round, same
from tests.cluster.processes import Processes

X0 = np.linspace(-1, 1, n, dtype=np.float32)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(coordinator, "PATIENCE", 0.2)


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC, short history", "SCAFFOLD"])
def test_it_resumes(tmp_path, caplog, method):
    one, many = made(method, X0), made(method, X0, shards=3, path=tmp_path / "run")
    for t in range(6):
        one_round(one)
        one_round(many)
        if t == 2:
            many.save(tmp_path / "copy")
        if t % 2:
            many.close()
            found = manifest.manifest_at(tmp_path / "run")[1]
            other = manifest.Manifest("other", found.layout, (), (str(tmp_path / "other"),))
            manifest.write_intent(tmp_path / "run", new=found, old=other if t == 1 else None)  # a kill
            many = Server.load(tmp_path / "run" / "cluster.json")
            assert not (tmp_path / "run" / INTENT).exists()
    assert many.verify() == []
    same(one, many, opened_again=True)
    many.close()
    assert str(tmp_path / "other") in caplog.text
    with Server.load(tmp_path / "copy") as copy:
        assert copy.round_number == 3
        for _ in range(3):
            one_round(copy)
        same(one, copy, opened_again=True)


def test_a_copy_takes_the_place_of_an_older_one(tmp_path):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        server.save(tmp_path / "copy")
        one_round(server)
        server.save(tmp_path / "copy")
        with pytest.raises(errors.StoreError, match="server's own"):
            server.save(tmp_path / "run")
    assert len(list((tmp_path / "copy").iterdir())) == 3
    with Server.load(tmp_path / "copy") as copy:
        assert copy.round_number == 1


class Killed(BaseException):
    """The end of a process, as far as the folder shows."""


def killed(*_):
    raise Killed


def names(folder):
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("moment", ["in the middle", "before the manifest", "behind it"])
@pytest.mark.parametrize("moved", [False, True], ids=["", "and moved"])
def test_the_next_save_deletes_leftovers_of_a_killed_one(tmp_path, monkeypatch, moment, moved):
    """Other folders stay, whatever their names; and so does a new folder at the old place of a moved one."""
    home = tmp_path / "copy"
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        server.save(home)
        one_round(server)

        save = State.save

        def in_the_second(state, path):
            if state.reducer.place["shard"]:
                draft = Path(f"{path}.draft-{12 * '0'}")
                shutil.copytree(tmp_path / "run" / "shard-1", draft)  # not yet in its place
                WriterLock(draft, disposable=True).close()
                raise Killed
            save(state, path)

        with monkeypatch.context() as patched:
            if moment == "in the middle":
                patched.setattr(State, "save", in_the_second)
            elif moment == "before the manifest":
                patched.setattr(manifest.Manifest, "write", killed)
            else:
                patched.setattr(ShardedState, "_delete", killed)
            with pytest.raises(Killed):
                server.save(home)
        assert len(names(home)) == 6
        shutil.copytree(home / sorted(names(home) - {"cluster.json", INTENT})[0], home / "shard-0-mine")
        with Server.load(home) as copy:
            assert copy.round_number == (1 if moment == "behind it" else 0)
        if moved:
            shutil.copytree(home, tmp_path / "moved")
            before, home = names(home), tmp_path / "moved"
        server.save(home)
        assert len(names(home)) == 4
        assert names(home) >= {"cluster.json", "shard-0-mine"}
        assert not moved or names(tmp_path / "copy") == before
    with Server.load(home) as copy:
        assert copy.round_number == 1
    if moved:
        Server.load(tmp_path / "copy").close()


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / f".{INTENT}.{12 * '0'}").touch()  # a draft that a kill has left
        server.save(tmp_path / "copy")
        before = names(tmp_path / "copy")

        def full(*_):
            raise errors.StoreError("no room")

        with monkeypatch.context() as patched, pytest.raises(errors.StoreError, match="no room"):
            patched.setattr(manifest.Manifest, "write", full)
            server.save(tmp_path / "copy")
        assert names(tmp_path / "copy") == before


def test_shards_on_separate_disks(tmp_path):
    folders = [tmp_path / "disk0" / "run", tmp_path / "disk1" / "run"]
    for folder in folders:
        folder.parent.mkdir()
    made("FedAvg", X0, shards=2, path=tmp_path / "run", folders=folders).close()
    assert all((folder / "index.sqlite").is_file() for folder in folders)
    with Server.load(tmp_path / "run", storage=Storage(folders=folders)) as server:
        assert server.x.tobytes() == X0.tobytes()
    with pytest.raises(errors.StoreError, match="folders="):
        Server.load(tmp_path / "run")
    with pytest.raises(errors.RangeError, match=r"^folders\b"):
        Server.load(tmp_path / "run", storage=Storage(folders=folders[:1]))
    with pytest.raises(errors.CheckpointError, match="manifest"):
        Server.load(tmp_path / "run", storage=Storage(folders=folders[::-1]))


def test_one_has_it_at_a_time(tmp_path):
    with made("FedAvg", X0, shards=2, path=tmp_path / "run"), pytest.raises(errors.LockedError):
        Server.load(tmp_path / "run")
    Server.load(tmp_path / "run").close()


def test_other_folders_are_not_clusters(tmp_path):
    made("MIFA", X0, shards=2, path=tmp_path / "run").close()
    with pytest.raises(errors.CheckpointError, match=r"cluster\.json"):
        Server.load(tmp_path / "run" / "shard-0")
    with pytest.raises(errors.StoreError, match=r"cluster\.json"):
        made("MIFA", X0, shards=2, path=tmp_path / "run")
    with pytest.raises(errors.StoreError, match="elsewhere"):
        Server.load(tmp_path / "elsewhere")
    with pytest.raises(errors.StoreError, match=r"cluster\.json"):
        Server.load(tmp_path / "run" / "shard-0", compute=Compute(shards=2))
    manifest = tmp_path / "run" / "cluster.json"
    saved = json.loads(manifest.read_text())
    for change in (
        {"what": "a server"},
        {"version": 2},
        {"shards": saved["shards"][:1]},
        {"shards": saved["shards"][::-1]},
        {"cluster": "another"},
        {"layout": {}},
    ):
        manifest.write_text(json.dumps(saved | change))
        with pytest.raises(errors.CheckpointError):
            Server.load(manifest)
    manifest.write_text("{")
    with pytest.raises(errors.CheckpointError):
        Server.load(manifest)
    manifest.write_text(json.dumps(saved))
    Server.load(manifest).close()


def test_a_shard_of_an_older_copy_is_found_out(tmp_path):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        server.save(tmp_path / "copy")
        one_round(server)
        one_round(server)
    (old,) = (tmp_path / "copy").glob("shard-1-*")
    shutil.rmtree(tmp_path / "run" / "shard-1")
    shutil.copytree(old, tmp_path / "run" / "shard-1")
    with pytest.raises(errors.CheckpointError, match="transaction 0"):
        Server.load(tmp_path / "run")


def test_in_memory_nothing_survives_the_loss_of_a_shard(monkeypatch):
    with made("MIFA", X0, shards=2) as server:
        monkeypatch.setattr(ClientStore, "commit", broken)
        with pytest.raises(MemoryError):
            one_round(server)
        with pytest.raises(errors.ClusterError, match="memory"):
            server.x  # noqa: B018


def broken(*_, **__):
    raise MemoryError("none left")


def test_arguments_are_refused_by_name():
    with pytest.raises(errors.RangeError, match=r"^clients\b"):
        Server(X0, "FedAvg", lr=0.1, compute=Compute(shards=2))
    with pytest.raises(errors.RangeError, match=r"^shards\b.*8"):
        Server(X0, "FedAvg", N, lr=0.1, compute=Compute(shards=100))


def test_arguments_of_loading_are_refused_by_name(tmp_path):
    made("FedAvg", X0, shards=2, path=tmp_path / "run").close()
    for options, match in (
        ({"storage": Storage(medium="ram")}, r"^medium\b"),
        ({"compute": Compute(shards=3)}, r"^shards\b.*reshard"),
        ({"compute": Compute(accumulator="exact")}, r"^accumulator\b"),
        ({"compute": Compute(diagnostics=True)}, r"^diagnostics\b"),
    ):
        with pytest.raises((errors.RangeError, errors.CheckpointError), match=match):
            Server.load(tmp_path / "run", **options)
    with Server.load(tmp_path / "run", compute=Compute(shards=2, batch_size=3)) as server:
        assert server.settings.batch_size == 3


def test_a_round_that_is_left_leaves_nothing(tmp_path):
    with made("MIFA", X0, shards=3, path=tmp_path / "run") as server:
        one_round(server)
        before = server.x.tobytes(), server.row(0).tobytes(), server.transactions
        with pytest.raises(KeyError), server.open_round(newcomers=["anna"]) as opened:
            opened.add("anna", X0, steps=1)
            opened.add("bert", X0, steps=1)
        assert (server.x.tobytes(), server.row(0).tobytes(), server.transactions) == before
        assert "anna" not in server.clients
        one_round(server)


class Losing(Processes):
    """A placement that loses a shard once, during the call of a method."""

    def __init__(self):
        super().__init__()
        self.at = []

    def begin(self, name, arguments):
        if self.at[:1] == [name]:
            self.at.pop(0)
            self._shards[1][0].kill()
        super().begin(name, arguments)


@pytest.fixture
def losing():
    placement = Losing()
    yield placement
    placement.drop()


def test_a_shard_is_lost_behind_a_change_of_clients(tmp_path, losing):
    """The change has happened; that no shard could return the clients' numbers is no error."""
    one = made("MIFA", X0)
    with made("MIFA", X0, shards=2, path=tmp_path / "run", executor=losing) as many:

        def lose(server):
            assert 1 in server.clients  # all are known: the next change asks only for its own clients' numbers
            losing.at = ["client_numbers"] if server is many else []

        for server in (one, many):
            one_round(server)
            lose(server)
            server.add_clients(["anna", "bert"])
            assert losing.at == []
            assert "bert" in server.clients
            lose(server)
            server.remove_client(0)
            assert losing.at == []
            assert 0 not in server.clients
            with server.open_round(newcomers=["cora", "dan"]) as opened:
                opened.add("cora", X0 * np.float32(2), steps=1)
                lose(server)
            assert losing.at == []
            assert opened.report.accepted == ("cora",)
            assert ("cora" in server.clients, "dan" in server.clients) == (True, False)
        same(one, many, opened_again=True)


def test_a_shard_is_lost_within_a_change_of_clients(tmp_path, losing):
    """It has happened in no shard, or in all: the registered clients are read from the shards again."""
    one = made("MIFA", X0)
    with made("MIFA", X0, shards=2, path=tmp_path / "run", executor=losing) as many:
        for change in (lambda server: server.add_clients("anna"), lambda server: server.remove_client(0)):
            before = list(many.clients)
            losing.at = ["apply"]
            with suppress(errors.ClusterError):
                change(many)
            assert losing.at == []
            if list(many.clients) == before:
                change(many)
            change(one)
            same(one, many, opened_again=True)
        many.close()
    with Server.load(tmp_path / "run") as many:
        same(one, many, opened_again=True)


@pytest.mark.parametrize("clients", [N, [f"c{i}" for i in range(N)]], ids=["counted", "listed"])
def test_numbers_of_clients_stay_those_of_the_shards(clients):
    """During added, returning and removed clients and newcomers, some of them rejected or without updates."""
    with made("MIFA", X0, clients, shards=2) as server:
        rng, names, seen = np.random.default_rng(3), [*server.clients, "x", "y", 2, 9, np.int64(4), -1], set()
        for t in range(60):
            chosen = [names[i] for i in rng.permutation(len(names))[: 1 + t % 2]]
            with suppress(errors.FedcoreError):
                if t % 3 == 0:
                    server.add_clients(chosen)
                elif t % 3 == 1:
                    server.remove_client(chosen[0])
                else:
                    with server.open_round(newcomers=chosen) as opened:
                        opened.add(chosen[0], X0, steps=1)
            backend = server._backend
            known, read = backend._registry, Registry.restore(*backend._first("registry"))
            assert known == read
            seen.add(tuple(known))
        assert len(seen) > 10


def test_options_change_in_all_shards_or_in_none(tmp_path, losing):
    one = made("MIFA", X0)
    with made("MIFA", X0, shards=2, path=tmp_path / "run", executor=losing) as many:
        for server in (one, many):
            one_round(server)
            server.change(lr=0.05, aggregation=[RejectLong(50.0)])
            one_round(server)
        losing.at = ["apply"]
        with pytest.raises(errors.ClusterError, match="changed"):
            many.change(lr=7.0)
        with pytest.raises(errors.RangeError, match=r"^lr\b"):
            many.change(lr=lambda t: 0.1)
        for server in (one, many):
            one_round(server)
        same(one, many, opened_again=True)
    with Server.load(tmp_path / "run", lr=0.02, aggregation=[Mean()]) as many:
        one.change(lr=0.02, aggregation=[Mean()])
        reports = []
        for server in (one, many):
            with server.open_round() as opened:
                opened.add(0, X0 + 1, steps=1)
            reports.append(opened.report.changed)
        assert reports == [{"lr": 0.02, "aggregation": ["Mean(weights=None)"]}] * 2
        same(one, many, opened_again=True)
    with pytest.raises(errors.UnknownNameError, match="Mdian"):
        Server.load(tmp_path / "run", aggregation="Mdian")
    Server.load(tmp_path / "run").close()  # it is not locked


def test_a_shard_is_lost_while_all_are_opened(tmp_path, losing):
    """As on a lost machine that Ray does not know of yet: all are opened again, a limited number of times."""
    one = made("MIFA", X0)
    with made("MIFA", X0, shards=2, path=tmp_path / "run", executor=losing) as many:
        one_round(one)
        one_round(many)
        losing.at = ["begin_round", "open_folder", "resume", "shard_state"]
        with pytest.raises(errors.ClusterError, match=r"^begin_round\b"):
            many.open_round()
        assert losing.at == []
        one_round(one)
        one_round(many)
        same(one, many, opened_again=True)
        losing.at = ["begin_round", "open_folder", "open_folder", "resume", "shard_state"]
        with pytest.raises(errors.ClusterError, match=r"^shard_state\b"):
            many.open_round()
        with pytest.raises(errors.ClusterError, match=r"Server\.load"):
            many.x  # noqa: B018
    with Server.load(tmp_path / "run") as many:
        same(one, many, opened_again=True)


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("where", [".", "round"])
@pytest.mark.parametrize("way", ["create", "reshard"])
def test_shards_never_share_a_folder_with_another_server(tmp_path, where, way):
    home, source = tmp_path / "home", tmp_path / "source"
    for path, value in ((home / where, 8), (source, 1)):
        with Server(X0, clients=2, lr=0.1, storage=Storage(path, journal=True)) as server:
            server.open_round().add(0, X0 + value, steps=1)
    before = files_of(home)
    with pytest.raises(errors.StoreError, match="another server"):
        if way == "create":
            made("FedAvg", X0, shards=2, path=home)
        else:
            reshard(source, 2, to=home)
    assert files_of(home) == before
    with Server.load(home / where) as server, server.open_round() as opened:
        assert opened.clients == (0,)


@pytest.mark.parametrize("at", [(state, "Journal"), (manifest.Manifest, "write"), (ShardedState, "_first")])
def test_a_creation_that_fails_leaves_nothing_and_opening_again_replaces_one_that_was_killed(tmp_path, monkeypatch, at):
    def fail(*_):
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(*at, fail)
        made("MIFA", X0, shards=3, path=tmp_path / "run", journal=True)
    assert not names(tmp_path / "run")
    (tmp_path / "killed" / f".cluster.json.{12 * '0'}").touch()
    Server.open(tmp_path / "killed", X0, "MIFA", 2, lr=0.1, compute=Compute(shards=2)).close()
    assert names(tmp_path / "killed") == {"cluster.json", "shard-0", "shard-1"}
