"""Changes of the number of shards: later rounds have the same bits, for every kind of state."""

import errno
import json
import os
import re
import shutil

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Model, Server, Storage, cluster, files
from fedcore.algorithms import optimizers
from fedcore.cluster import manifest, resharding
from fedcore.cluster.manifest import BLOCK, INTENT
from fedcore.errors import ArrayError, CheckpointError, CorruptionError, LockedError, RangeError, StoreError
from fedcore.rules import CentredClipping, NearestNeighborMixing, PrivateMean
from fedcore.server.folder import JOURNAL, open_updates
from fedcore.store.files import disk as system_calls
from tests.cli.command import invoke
from tests.cluster.pairs import METHODS, SIZES, alike, made, n, one_round, same
from tests.cluster.test_same_bits import batch_norm, robust_pair, robust_round
from tests.kit import flat

X0 = np.linspace(-1, 1, n, dtype=np.float32)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def cut_between(one, many, run, to, rounds=2):
    """Some rounds of both, another number of shards, and as many rounds again; the cluster, to be closed."""
    for _ in range(rounds):
        alike(one_round(one), one_round(many))
    many.close()
    cluster.reshard(run, to)
    many = Server.load(run)
    assert len(many._backend.ranges) == to
    assert many.verify() == []
    same(one, many, opened_again=True)
    for _ in range(rounds):
        alike(one_round(one), one_round(many))
    same(one, many, opened_again=True)
    return many


def by_day():
    """Twelve methods, one for each codec and each pair of numbers of shards; the others are endurance tests."""
    for place, method in enumerate(sorted(METHODS)):
        marks = [] if 12 <= place < 24 else pytest.mark.endurance
        yield pytest.param(place, method, marks=marks, id=method)


@pytest.mark.parametrize(("place", "method"), [*by_day()])
def test_every_method(run, place, method):
    options = dict(clients=SIZES, diagnostics=True, codec=("f32", "bf16", "int8")[place % 3])
    since, to = ((1, 3), (2, 7), (3, 2), (7, 1))[place % 4]
    cut_between(made(method, X0, **options), made(method, X0, shards=since, path=run, **options), run, to).close()


def test_the_last_result_of_a_robust_rule_is_cut(run):
    one, many = robust_pair([NearestNeighborMixing(1), CentredClipping(40.0)], X0, 3)
    many.close()
    many = Server(X0, "FedAvg", 8, lr=0.1, aggregation=one.aggregation, storage=Storage(run), compute=Compute(shards=3))
    for _ in range(2):
        alike(robust_round(one), robust_round(many))
    many.close()
    cluster.reshard(run, 7)
    with Server.load(run) as many:
        alike(robust_round(one), robust_round(many))
        same(one, many, opened_again=True)


@pytest.mark.parametrize(
    "options",
    [
        dict(accumulator="exact"),
        dict(optimizer=optimizers.Yogi(), server_lr=0.5),
        dict(max_staleness=2),
        dict(reject_long=3.0, cap_examples=2.0),
    ],
)
def test_every_kind_of_vector(run, options):
    cut_between(made("MimiC", X0, **options), made("MimiC", X0, shards=3, path=run, **options), run, 4, 3).close()


def test_buffers_and_counters(run):
    """They stay the last shard's, and the first one's."""
    x0 = batch_norm()
    x0["fc.weight"] = np.zeros((100, 1_000), np.float32)
    one, many = made("MIFA", x0), made("MIFA", x0, shards=2, path=run)
    for to in (5, 3):
        many = cut_between(one, many, run, to)
    named = many.tensors(library="numpy")
    assert named["bn.running_var"].shape == (8,)
    assert "bn.num_batches_tracked" in named
    many.close()


def test_added_and_removed_clients(run):
    options = dict(clients=SIZES)
    one, many = made("MIFA", X0, **options), made("MIFA", X0, shards=2, path=run, **options)
    for server in (one, many):
        one_round(server)
        server.add_clients({"anna": 5, 7: 6})
        one_round(server)
        server.remove_client(2)
        server.update_clients({0: 9})
    many = cut_between(one, many, run, 3)
    for server in (one, many):
        server.add_clients({2: 3})
        server.remove_client("anna")
    same(one, many, opened_again=True)
    many.close()


@pytest.mark.parametrize("method", ["MIFA", "SCAFFOLD", "MimiC, short history", "FedAvg"])
def test_a_server_becomes_a_cluster(tmp_path, run, method):
    """Its own folder stays as it is; and so does a copy of a server in memory."""
    one = made(method, X0)
    one_round(one)
    one.save(tmp_path / "state")
    cluster.reshard(tmp_path / "state", 3, to=run)
    Server.load(tmp_path / "state").close()
    with Server.load(run) as many:
        same(one, many, opened_again=True)
        for _ in range(3):
            alike(one_round(one), one_round(many))
        same(one, many, opened_again=True)


@pytest.mark.parametrize(("shards", "to", "elsewhere"), [(1, 2, True), (2, 3, False), (3, 1, False), (3, 2, True)])
def test_the_journal_of_an_open_round_is_kept(tmp_path, run, shards, to, elsewhere):
    one = made("SCAFFOLD", X0)
    many = made("SCAFFOLD", X0, shards=None if shards == 1 else shards, path=run, journal=True)
    alike(one_round(one), one_round(many))
    many.open_round().add(0, one.x + 1, steps=2)
    many.close()
    place = tmp_path / "new" if elsewhere else run
    cluster.reshard(run, to, to=place if elsewhere else None)
    with Server.load(place) as many:
        rounds = many.open_round(), one.open_round()
        assert rounds[0].clients == (0,)
        assert rounds[1].add(0, one.x + 1, steps=2)
        for round in rounds:
            assert round.add(1, one.x + 2, steps=3)
        alike(*(round.finish() for round in rounds))
        same(one, many, opened_again=True)
        assert open_updates(place, {"numbers": {"round_number": 2}}) == []
        many.open_round().add(0, one.x, steps=1)
    with Server.load(place) as many:
        assert many.open_round().clients == (0,)


def test_what_shards_do_not_support_is_refused_before_anything_is_written(tmp_path):
    """With the error of a new server in shards."""
    model = Model({"w": X0, "b": X0[:5]}, partial={"one": ["b"]})
    options = dict(clients=2, lr=0.1, aggregation=[PrivateMean(1.0, 1.0, 2, seed=3)])
    Server(model, **flat(path=tmp_path / "one", **options)).close()
    with pytest.raises(RangeError) as error:
        Server(model, **flat(shards=2, **options))
    with pytest.raises(RangeError, match=re.escape(str(error.value))):
        cluster.reshard(tmp_path / "one", 2, to=tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_a_killed_copy_of_a_journal_is_written_again(tmp_path, run, monkeypatch):
    made("FedAvg", X0, path=run, journal=True).open_round().add(0, X0, steps=1)

    def fail(*_):
        raise StoreError("full")

    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(manifest.Manifest, "write", fail)
        cluster.reshard(run, 2, to=tmp_path / "new")
    assert os.listdir(tmp_path / "new") == []
    with ClientStore.open(run / JOURNAL, readonly=True) as store:
        store.save(tmp_path / "new" / JOURNAL)  # as by a call that was killed
    (tmp_path / "new" / INTENT).write_text(json.dumps({"made": {"cluster": "killed", "folders": []}, "going": None}))
    cluster.reshard(run, 2, to=tmp_path / "new")
    with Server.load(tmp_path / "new") as many:
        assert many.open_round().clients == (0,)


def test_a_copy_elsewhere(tmp_path, run):
    """The old shards stay; the new ones lie in the given folders."""
    folders = [tmp_path / "disk0" / "new", tmp_path / "disk1" / "new"]
    one, many = made("MIFA", X0), made("MIFA", X0, shards=3, path=run)
    for server in (one, many):
        one_round(server)
    many.close()
    cluster.reshard(run, 2, to=tmp_path / "new", folders=folders)
    for place, shards, named in ((run, 3, None), (tmp_path / "new", 2, folders)):
        with Server.load(place, storage=Storage(folders=named)) as found:
            assert len(found._backend.ranges) == shards
            same(one, found, opened_again=True)
    with pytest.raises(StoreError, match="folders="):
        cluster.reshard(tmp_path / "new", 3)
    cluster.reshard(tmp_path / "new", 3, current_folders=folders)
    assert not any(folder.exists() for folder in folders)
    with Server.load(tmp_path / "new") as found:
        same(one, found, opened_again=True)
    cluster.reshard(tmp_path / "new", 2, folders=folders)
    assert all((folder / "index.sqlite").is_file() for folder in folders)
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["cluster.json"]


def test_a_shard_that_is_ahead_rolls_back(run, tmp_path):
    one = made("MIFA", X0)
    with made("MIFA", X0, shards=2, path=run) as many:
        alike(one_round(one), one_round(many))
        shutil.copytree(run / "shard-1", tmp_path / "before")
        one_round(many)
    shutil.rmtree(run / "shard-1")
    shutil.copytree(tmp_path / "before", run / "shard-1")
    cluster.reshard(run, 3)
    with Server.load(run) as many:
        same(one, many, opened_again=True)


def test_only_its_own_folders_are_deleted(run):
    """The old shards and leftovers of a killed call are deleted; other copies stay, whatever their names."""
    made("MIFA", X0, shards=2, path=run).close()
    mine = {"shard-9-0123abcd", "shard-2", "shard-0.before"}
    for name in mine:
        shutil.copytree(run / "shard-0", run / name)
    left = run / "shard-1-89abcdef"
    shutil.copytree(run / "shard-1", left)
    name = json.loads((run / "cluster.json").read_text())["cluster"]
    made_, going = ({"cluster": name, "folders": [folder]} for folder in (left.name, "shard-2"))
    (run / INTENT).write_text(json.dumps({"home": str(run), "made": made_, "going": going}))
    cluster.reshard(run / ".." / "run", 3)
    found = {entry.name for entry in run.iterdir()}
    assert mine <= found
    assert len(found - mine) == 4
    assert left.name not in found


def test_a_copy_that_is_cut_deletes_nothing_of_the_original(run, tmp_path):
    """It was copied while the original was being cut into folders elsewhere, which are the original's shards by now."""
    made("MIFA", X0, shards=2, path=run).close()
    elsewhere = [tmp_path / "disk-0", tmp_path / "disk-1"]
    shutil.copytree(run, tmp_path / "copy")
    cluster.reshard(run, 2, folders=elsewhere)
    name = json.loads((run / "cluster.json").read_text())["cluster"]
    parts = {"cluster": name, "folders": [str(folder) for folder in elsewhere]}
    (tmp_path / "copy" / INTENT).write_text(json.dumps({"home": str(run), "made": parts, "going": None}))
    cluster.reshard(tmp_path / "copy", 3)
    for folder, shards, named in ((run, 2, elsewhere), (tmp_path / "copy", 3, None)):
        with Server.load(folder, storage=Storage(folders=named)) as many:
            assert len(many._backend.ranges) == shards
            assert many.verify() == []


def test_another_cluster_that_replaced_leftovers_stays(run, tmp_path):
    """A user has deleted the leftovers of a killed call, and created other shards in their place."""
    made("MIFA", X0, shards=2, path=run).close()
    place = tmp_path / "disk" / "new"
    parts = {"cluster": "of the killed cut", "folders": [str(place)]}
    (run / INTENT).write_text(json.dumps({"home": str(run), "made": parts, "going": None}))
    made("MIFA", X0, shards=1, path=tmp_path / "other", folders=[place]).close()
    cluster.reshard(run, 1)
    assert not (run / INTENT).exists()
    with Server.load(tmp_path / "other", storage=Storage(folders=[place])) as other:
        assert other.verify() == []


def after_a_round(path):
    with made("MIFA", X0, shards=2, path=path) as many:
        one_round(many)
        return many.x


def test_complete_shards_stay_if_their_manifest_is_moved_away(run, tmp_path, monkeypatch):
    """The call was killed at its very end, and nothing has loaded the new shards yet."""
    home, kept = tmp_path / "copy", tmp_path / "cluster.json"
    with made("MIFA", X0, shards=2, path=run) as many:
        one_round(many)
        many.save(home)
        monkeypatch.setattr(resharding, "clean_up", lambda *_, **__: None)
        cluster.reshard(home, 3)
        (home / JOURNAL).mkdir()
        (home / "cluster.json").rename(kept)
        before = sorted(home.rglob("*"))
        for again in (lambda: many.save(home), lambda: made("MIFA", X0, shards=2, path=home)):
            with pytest.raises(StoreError, match=r"cluster\.json: missing.*put it back"):
                again()
        assert sorted(home.rglob("*")) == before
        (home / JOURNAL).rmdir()
        kept.rename(home / "cluster.json")
        with Server.load(home) as copy:
            assert (len(copy._backend.ranges), copy.x.tobytes()) == (3, many.x.tobytes())


def test_an_error_behind_the_manifest_leaves_the_new_shards(run, monkeypatch):
    """The manifest may exist by then: nothing is deleted until it is durable."""
    x = after_a_round(run)
    sync = files.sync_folder

    def failing(path, folder=None):
        if len(json.loads((run / "cluster.json").read_text())["shards"]) == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path, folder)

    with monkeypatch.context() as patched:
        patched.setattr(files, "sync_folder", failing)
        with pytest.raises(StoreError, match="put"):
            cluster.reshard(run, 3)
    assert (run / "shard-0").exists()
    with Server.load(run) as many:
        assert (len(many._backend.ranges), many.x.tobytes()) == (3, x.tobytes())
    cluster.reshard(run, 2)
    assert len(list(run.iterdir())) == 3


def test_a_server_rejects_shards_that_were_resharded(run, monkeypatch):
    with made("MIFA", X0, shards=2, path=run) as many:
        one_round(many)
        shutil.copytree(run, run.with_name("old"))
        many._backend.coordinator.placement.drop()  # all its processes have died
        cluster.reshard(run, 3)
        for folder in ("shard-0", "shard-1"):
            shutil.copytree(run.with_name("old") / folder, run / folder)
        with pytest.raises(StoreError, match=r"cluster\.json.*load"):
            many._backend.coordinator.open()


def test_a_copy_takes_the_place_of_one_with_other_shards(run, tmp_path):
    copy = tmp_path / "copy"
    with made("MIFA", X0, shards=2, path=run) as many:
        many.save(copy)
    for shards in (3, 1):
        cluster.reshard(run, shards)
        with Server.load(run) as many:
            many.save(copy)
        assert len(list(copy.iterdir())) == shards + 1
        with Server.load(copy) as many:
            assert len(many._backend.ranges) == shards


def test_a_save_over_a_copy_that_is_being_resharded(run, tmp_path):
    with made("MIFA", X0, shards=2, path=run) as many:
        many.save(tmp_path / "copy")
        with manifest.locked(tmp_path / "copy"):
            with pytest.raises(LockedError):
                many.save(tmp_path / "copy")
            with pytest.raises(LockedError):
                cluster.reshard(tmp_path / "copy", 3)


def test_every_waiting_thread_gets_the_error(run, monkeypatch):
    """It had read the old manifest, and gets the lock of an old shard once the new ones exist."""
    made("MIFA", X0, shards=2, path=run).close()
    read, calls = manifest.Manifest.read, []

    def early(path):
        calls.append(path)
        found = read(path)
        if len(calls) == 1:
            shutil.copytree(run, run.with_name("old"))
            cluster.reshard(run, 3)
            for folder in ("shard-0", "shard-1"):
                shutil.copytree(run.with_name("old") / folder, run / folder)
        return found

    monkeypatch.setattr(manifest.Manifest, "read", early)
    with pytest.raises(StoreError, match=r"cluster\.json.*load"):
        Server.load(run)


def test_a_full_disk_changes_nothing(run, monkeypatch):
    x = after_a_round(run)
    before = sorted(os.listdir(run))
    sync, calls = system_calls.sync, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sync(*arguments)

    monkeypatch.setattr(system_calls, "sync", full)
    with pytest.raises(StoreError, match="space"):
        cluster.reshard(run, 3)
    assert len(calls) >= 9
    assert sorted(os.listdir(run)) == before
    with Server.load(run) as many:
        assert many.x.tobytes() == x.tobytes()


def test_damage_is_not_copied(run):
    after_a_round(run)
    rows = max((run / "shard-1").glob("rows*"), key=lambda file: file.stat().st_size)
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1
    rows.write_bytes(content)
    with pytest.raises(CorruptionError, match="damaged"):
        cluster.reshard(run, 3)
    assert sorted(os.listdir(run)) == ["cluster.json", "shard-0", "shard-1"]


def test_rejected_arguments(tmp_path, run):
    with made("MIFA", X0, shards=2, path=run), pytest.raises(LockedError):
        cluster.reshard(run, 3)
    made("FedAvg", X0).save(tmp_path / "state")
    for arguments, error, match in (
        ((run, 0), RangeError, "shards"),
        ((run, 9), RangeError, r"^shards\b.*8"),
        ((run, 3, ["one"]), RangeError, r"^folders\b"),
        ((tmp_path / "nowhere", 2), RangeError, "nowhere"),
        ((tmp_path / "state", 2), RangeError, r"^to\b"),
        ((run / "shard-0", 2), RangeError, r"^to\b"),
    ):
        path, shards, *folders = arguments
        with pytest.raises(error, match=match):
            cluster.reshard(path, shards, folders=folders[0] if folders else None)
    with pytest.raises(CheckpointError, match=r"cluster\.json"):
        cluster.reshard(run / "shard-0", 2, to=tmp_path / "new")
    with pytest.raises(StoreError, match=r"cluster\.json"):
        cluster.reshard(tmp_path / "state", 2, to=run)
    with pytest.raises(StoreError, match="not empty"):
        cluster.reshard(run, 2, folders=[tmp_path / "state", tmp_path / "other"])
    assert len(Server.load(run)._backend.ranges) == 2


def test_the_command(run):
    x = after_a_round(run)
    done = invoke("store", "reshard", run / "cluster.json", "--shards", 4)
    assert (done.status, done.errors) == (0, "")
    assert "4 shards:" in done.output
    with Server.load(run) as many:
        assert many.x.tobytes() == x.tobytes()
        assert {span.start % BLOCK for span in many._backend.ranges} == {0}


def test_progress_counts_rows(run):
    with made("MIFA", X0, shards=2, path=run) as many:
        one_round(many)
        rows = sum(many.row(client).any() for client in many.clients)
    seen = []
    cluster.reshard(run, 3, progress=lambda done, due: seen.append((done, due)))
    assert seen == [(done, 3 * rows) for done in range(3 * rows + 1)]


class Trust(optimizers.SGD):
    """An optimiser with a length in it, which a cluster cannot have."""

    elementwise = False


def test_an_optimizer_that_needs_the_whole(tmp_path, run):
    """One of the caller's own code is known when it is given again."""
    made("FedAvg", X0, optimizer=Trust()).save(tmp_path / "state")
    cluster.reshard(tmp_path / "state", 2, to=run)
    with pytest.raises(RangeError, match=r"^optimizer\b.*Trust"):
        Server.load(run, optimizer=Trust())


def test_buffers_of_an_older_folder_stay_guarded(tmp_path, run):
    x0 = batch_norm()
    made("MIFA", x0).save(tmp_path / "state")
    with ClientStore.open(tmp_path / "state") as store:
        state = store.state
        del state["settings"]["nonnegative"]
        store.commit(0, None, state)
    cluster.reshard(tmp_path / "state", 2, to=run)
    with Server.load(run) as many:
        bad = batch_norm() | {"bn.running_var": np.full(8, -4, np.float32)}
        with many.open_round() as opened:
            opened.add(0, bad, steps=1)
            opened.add(1, batch_norm(), steps=1)
        assert [client for client, _ in opened.report.rejected] == [0]


def test_digests_of_a_warm_start():
    with made("MIFA", X0, shards=2) as many:
        parts = [np.ones(span.end - span.start, np.float32) for span in many._backend.ranges]
        with pytest.raises(ArrayError, match="digest"):
            many.warm_start({0: cluster.Slices(parts, [cluster.digest_of(parts[0]), "11"])})
        many.warm_start({0: cluster.Slices(parts, [cluster.digest_of(part) for part in parts])})
        assert many.row(0).all()
