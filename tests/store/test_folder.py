"""Folders of stores: they are created, replaced and deleted in one step, and do not depend on the working directory."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Server, Storage, Update, errors
from fedcore.cluster import LocalThreads, reshard
from fedcore.errors import RangeError, StoreError
from fedcore.model import write_model
from fedcore.server.folder import read_model
from fedcore.sim.network import Network
from fedcore.store.files import disk
from fedcore.store.files import folder as store_folder
from fedcore.store.files.inventory import draft_of
from fedcore.store.files.locks import WriterLock
from tests.kills import killed
from tests.store.kit import content, write

N = 40
DRAFT = "run.draft-0123456789ab"


def made(path, round=0):
    with ClientStore(3, N, medium="mmap", path=path) as store:
        write(store, 1, content(N, round))
        store.commit(round)


def saved(path, round=1):
    """Save a store in memory, at this round, to the path."""
    store = ClientStore(3, N)
    write(store, 1, content(N, round))
    store.commit(round)
    store.save(path)


def round_of(path):
    with ClientStore.open(path, readonly=True) as store:
        assert store.verify() == []
        return store.round


def tree(folder):
    """The content of every path below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def left_behind(parent, name=DRAFT):
    """A draft of a dead process."""
    made(parent / "other")
    (parent / "other").rename(parent / name)
    WriterLock(parent / name, disposable=True).close()
    return parent / name


def test_the_draft_of_a_dead_process_is_deleted(tmp_path):
    left = left_behind(tmp_path)
    (left / "readers" / f"1234-{'0' * 32}").touch()
    made(tmp_path / "run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_folder_without_a_store_is_not_removed(tmp_path):
    folder = tmp_path / "data"
    (folder / "readers").mkdir(parents=True)
    for name in ("rows.slots", "vectors-8.slots", f"readers/1-{'0' * 32}"):
        (folder / name).write_text("years of work")
    before = tree(tmp_path)
    store_folder.remove(folder)
    assert tree(tmp_path) == before


def renamed(parent):
    """A store that another user of the parent folder has renamed; its lock file shows that it is not a draft."""
    made(parent / "thesis")
    (parent / "thesis").rename(parent / DRAFT)


def given_away(parent):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(left_behind(parent), 1001, 1001)


def files_and_links(parent):
    (parent / DRAFT).symlink_to(left_behind(parent, "kept"))
    (parent / "run.draft-111111111111").write_text("a file")
    (parent / "run.draft-222222222222").symlink_to(parent / "nowhere")


def with_entry(add):
    return lambda parent: add(left_behind(parent))


STAYS = {
    "a store": renamed,
    "another user's": given_away,
    "files and links": files_and_links,
    "with a text": with_entry(lambda draft: (draft / "thesis.tex").touch()),
    "with a folder": with_entry(lambda draft: (draft / "chapters").mkdir()),
    "with a text among the readers": with_entry(lambda draft: (draft / "readers" / "1.tex").touch()),
    "with a link": with_entry(lambda draft: (draft / "vectors-8.slots").symlink_to(draft.parent / "elsewhere")),
    "with a folder for a file": with_entry(lambda draft: [(draft / "lock").unlink(), (draft / "lock").mkdir()]),
    **{
        f"the name -{name}": lambda parent, name=name: left_behind(parent, f"run.draft-{name}")
        for name in ("notes", "2024", "0123456789abc", "0123456789aB", "")
    },
}


@pytest.mark.parametrize("act", [made, saved])
@pytest.mark.parametrize("what", STAYS)
def test_what_is_no_draft_of_a_dead_process_stays(tmp_path, what, act):
    STAYS[what](tmp_path)
    before = tree(tmp_path)
    act(tmp_path / "run")
    saved(tmp_path / "run", 2)
    assert before.items() <= tree(tmp_path).items()


@pytest.mark.parametrize(
    ("name", "act"), [(DRAFT, made), (DRAFT, saved), (DRAFT, store_folder.remove), ("run", store_folder.remove)]
)
@pytest.mark.parametrize("lock", [None, b"", b"process 1\n", b"to be deleted\n", b"process 1\nto be deleted\nmine"])
def test_a_folder_with_only_an_unmarked_lock_stays(tmp_path, name, act, lock):
    """Another program may have just created it, or have it open."""
    folder = tmp_path / name
    folder.mkdir()
    if lock is not None:
        (folder / "lock").write_bytes(lock)
    found, before = folder.stat(), tree(folder)
    act(tmp_path / "run")
    assert os.path.samestat(folder.stat(), found)
    assert tree(folder) == before


def test_a_folder_with_only_a_marked_lock_is_deleted(tmp_path):
    (tmp_path / DRAFT).mkdir()
    WriterLock(tmp_path / DRAFT, disposable=True).close()
    made(tmp_path / "run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_brackets_in_a_name_are_not_a_pattern(tmp_path):
    left_behind(tmp_path, "run1.draft-0123456789ab")
    mine = left_behind(tmp_path, "run[12].draft-0123456789ab")
    made(tmp_path / "run[12]")
    assert (tmp_path / "run1.draft-0123456789ab").exists()
    assert not mine.exists()
    with pytest.raises(errors.StoreError, match="does not exist"):
        made(tmp_path / "run1.previous-000000000000")
        ClientStore.open(tmp_path / "run[1]")


def test_the_draft_of_a_live_process_stays(tmp_path):
    left = left_behind(tmp_path)
    lock = WriterLock(left, disposable=True)
    made(tmp_path / "run")
    assert left.exists()
    lock.close()
    saved(tmp_path / "run")
    assert not left.exists()


def test_a_draft_that_is_deleted_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Another process deletes it between the creation of the folder and of its lock."""
    mkdir, swept = Path.mkdir, []

    def swept_once(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        if ".draft-" in path.name and not swept:
            swept.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", swept_once)
    made(tmp_path / "run")
    assert len(swept) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("act", [made, saved])
def test_a_store_that_another_process_creates_meanwhile_stays(tmp_path, monkeypatch, act):
    with monkeypatch.context() as patch:
        patch.setattr(disk, "rename", lambda *names: (patch.undo(), made(tmp_path / "run", 7), os.rename(*names)))
        with pytest.raises(errors.LockedError):
            act(tmp_path / "run")
    assert (round_of(tmp_path / "run"), os.listdir(tmp_path)) == (7, ["run"])


def test_saving_over_a_copy_with_other_files_is_rejected(tmp_path):
    made(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("what I found")
    with pytest.raises(errors.StoreError, match=r"files .*: notes\.txt"):
        saved(tmp_path / "run")
    assert (tmp_path / "run" / "notes.txt").read_text() == "what I found"
    assert round_of(tmp_path / "run") == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


OPENER = """
import sys
from fedcore import ClientStore, errors
try:
    ClientStore.open(sys.argv[1]).close()
    print("opened")
except errors.LockedError as error:
    print("locked")
"""


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_copy_that_is_being_replaced_cannot_be_opened_for_writing(tmp_path, monkeypatch, exchanges):
    """A writer would commit to files that are about to be deleted."""
    copy, tried = tmp_path / "copy", []
    made(copy)

    def attempt(act):
        def acting(*arguments):
            program = [sys.executable, "-c", OPENER, copy]
            tried.append(subprocess.run(program, capture_output=True, text=True, timeout=300, check=True).stdout)
            return act(*arguments)

        return acting

    monkeypatch.setattr(disk, "exchange", attempt(disk.exchange if exchanges else lambda *_: False))
    saved(copy)
    assert tried == ["locked\n"]
    monkeypatch.undo()
    assert round_of(copy) == 1
    with ClientStore.open(copy):  # the lock is released
        assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]


def test_a_deleted_lock_file_is_not_locked(tmp_path):
    """A process that waits for the lock of a deleted store does not get the lock of the new one."""
    made(tmp_path / "run")
    flock, path = fcntl.flock, tmp_path / "run" / "lock"
    replaced = []

    def late(fd, how):
        if not replaced:
            replaced.append(path.unlink())
            path.touch()
        return flock(fd, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        lock = WriterLock(tmp_path / "run")
    assert replaced
    with pytest.raises(errors.LockedError):
        ClientStore.open(tmp_path / "run")
    lock.close()


@pytest.mark.parametrize("act", [made, saved])
def test_a_link_is_followed_and_stays_a_link(tmp_path, act):
    big, link = tmp_path / "big", tmp_path / "run"
    big.mkdir()
    link.symlink_to(big / "run")
    if act is saved:
        made(big / "run")
    act(link, 1)
    assert link.is_symlink()
    assert round_of(link) == round_of(big / "run") == 1
    assert [entry.name for entry in big.iterdir()] == ["run"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["big", "run"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("over", [True, False])
def test_an_error_at_the_end_of_a_save_is_raised(tmp_path, monkeypatch, error, over):
    copy, real = tmp_path / "copy", disk.sync_path
    if over:
        made(copy)

    def failing(path):
        if Path(path) == tmp_path:
            raise error
        real(path)

    monkeypatch.setattr(disk, "sync_path", failing)
    due = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else errors.StoreError
    with pytest.raises(due) as raised:
        saved(copy)
    assert due is KeyboardInterrupt or str(raised.value).endswith("failed: Input/output error")
    monkeypatch.undo()
    assert round_of(copy) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]


def test_every_created_folder_is_made_durable(tmp_path, monkeypatch):
    synced, real = [], disk.sync_path
    monkeypatch.setattr(disk, "sync_path", lambda path: (synced.append(Path(path)), real(path)))
    made(tmp_path / "a" / "b" / "run")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)


def test_a_carried_store_has_equal_files(tmp_path):
    made(tmp_path / "here", round=2)
    made(tmp_path / "there")
    files = store_folder.carried(tmp_path / "here")
    store_folder.put(tmp_path / "there", files)
    own = [path.name for path in (tmp_path / "here").iterdir() if path.is_file() and path.name != "lock"]
    assert sorted(files) == sorted(own)
    for name in own:
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    assert round_of(tmp_path / "there") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"here", "there"}


@pytest.mark.parametrize("name", ["../rows.slots", "lock", "run.sh", "readers"])
def test_put_rejects_other_file_names(name, tmp_path):
    made(tmp_path / "here")
    before = tree(tmp_path)
    with pytest.raises(errors.StoreError, match="not a file of a store"):
        store_folder.put(tmp_path / "here", {name: store_folder.CarriedFile(3, [])})
    assert tree(tmp_path) == before


def test_put_on_a_full_disk_leaves_the_old_store(tmp_path, monkeypatch):
    made(tmp_path / "here", round=1)
    files = store_folder.carried(tmp_path / "here")

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(disk, "sync", full)
    with pytest.raises(errors.StoreError):
        store_folder.put(tmp_path / "here", files)
    monkeypatch.undo()
    assert round_of(tmp_path / "here") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def held(value, path):
    """A copy, at a path, of a store with one row of this value, and a vector."""
    with ClientStore(2, 5) as store:
        write(store, 1, np.full(5, value, np.float32))
        store.commit(0, {"x": np.full(5, value)}, {"value": value})
        store.save(path)


@pytest.mark.parametrize("options", [{"medium": "ram"}, {"readonly": True}], ids=["into memory", "beside a writer"])
@pytest.mark.parametrize("moment", ["it is made", "it is replaced", "it is replaced again and again"])
def test_a_folder_that_is_replaced_while_it_is_opened(tmp_path, monkeypatch, options, moment):
    path, count, saving = tmp_path / "store", [], []
    if moment != "it is made":
        held(1.0, path)

    def then(act, most):
        def acted(*arguments, **named):
            result = act(*arguments, **named)
            if len(count) < most and not saving:
                count.append(0)
                saving.append(0)
                held(2.0, path)
                saving.clear()
            return result

        return acted

    if moment == "it is made":
        monkeypatch.setattr(store_folder, "_hint", then(store_folder._hint, 1))
    else:
        most = 1 if moment == "it is replaced" else store_folder.TRIES - 2
        monkeypatch.setattr(store_folder.Index, "head", then(store_folder.Index.head, most))
    with ClientStore.open(path, **options) as store:
        assert (store.state, store.vector("x")[0], store.read(1)[0]) == ({"value": 2.0}, 2.0, 2.0)
    assert len(count) == (store_folder.TRIES - 2 if "again" in moment else 1)


def test_an_unchanged_folder_is_read_once(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(store_folder, "_hint", lambda path: looked.append(path) or "")
    with pytest.raises(errors.StoreError, match="not a store"):
        ClientStore.open(tmp_path / "none", medium="ram")
    assert len(looked) == 1


@pytest.mark.parametrize("links", [False, True])
def test_a_run_is_not_replaced_by_a_copy_of_another(tmp_path, links):
    """A copy has no commits since it was written. A link in a shared folder may lead to a run."""
    run, place = tmp_path / "months-of-work", tmp_path / "shared"
    with Server(np.zeros(N, np.float32), "MimiC", 3, lr=0.1, storage=run) as server:
        server.round([Update(i, np.ones(N, np.float32), 5) for i in range(3)])
    if links:
        place.symlink_to(run)
    before = tree(run)
    for save in (Server(np.zeros(N, np.float32), "FedAvg", 3, lr=0.1).save, saved):
        with pytest.raises(errors.StoreError, match="a store with commits"):
            save(place if links else run)
    assert tree(run)["rows.slots"] == before["rows.slots"]
    assert Server.load(run, storage=Storage(medium="ram")).round_number == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_another_user_s_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "place").symlink_to(tmp_path / "elsewhere")
    saved(tmp_path / "place")
    assert round_of(tmp_path / "elsewhere") == 1
    os.lchown(tmp_path / "place", 12345, 12345)
    (tmp_path / "mine").symlink_to(tmp_path / "place")
    for make in (saved, made):
        for place in (tmp_path / "place", tmp_path / "mine", tmp_path / "place" / "below"):
            with pytest.raises(errors.StoreError, match="belongs to a different user"):
                make(place)
    with pytest.raises(errors.StoreError, match="belongs to a different user"):
        Server(np.zeros(N, np.float32), "FedAvg", 3, lr=0.1, compute=Compute(executor=LocalThreads())).save(
            tmp_path / "place"
        )


def test_a_hard_link_in_a_copy_is_not_written(tmp_path):
    """SQLite writes to the shared memory of an index even when it reads."""
    saved(tmp_path / "copy")
    (tmp_path / "precious").write_text("mine")
    os.link(tmp_path / "precious", tmp_path / "copy" / "index.sqlite-shm")
    with pytest.raises(errors.StoreError, match="hard links"):
        saved(tmp_path / "copy")
    assert (tmp_path / "precious").read_text() == "mine"


def test_the_error_of_a_damaged_copy(tmp_path):
    saved(tmp_path / "copy")
    index = tmp_path / "copy" / "index.sqlite"
    index.write_bytes(index.read_bytes().replace(b'"codec"', b'"cedoc"'))
    with pytest.raises(errors.StoreError, match="delete it, then save again"):
        saved(tmp_path / "copy")


def test_a_compacted_copy_may_be_replaced(tmp_path):
    for round in range(3):
        saved(tmp_path / "copy", round)
        with ClientStore.open(tmp_path / "copy") as copy:
            copy.compact()
    assert round_of(tmp_path / "copy") == 2


def test_an_empty_draft_is_deleted_by_its_name(tmp_path):
    (tmp_path / DRAFT).mkdir()
    draft_of(tmp_path / "run").mkdir()
    draft_of(tmp_path / "run").symlink_to(tmp_path)
    (taken := draft_of(tmp_path / "run")).mkdir()
    (taken / "thesis").touch()
    saved(tmp_path / "run")
    left = {path.name for path in tmp_path.iterdir()} - {"run", DRAFT, taken.name}
    assert [(tmp_path / name).is_symlink() for name in left] == [True]
    assert (tmp_path / DRAFT).exists()
    assert (taken / "thesis").exists()


X0 = np.zeros(20_000, np.float32)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, which is also the home directory; it has a folder "other"."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    return tmp_path


def play(server, client=0):
    with server.open_round() as round:
        round.add(client, X0 + 1, steps=1)


def test_a_changed_working_directory_changes_nothing(here):
    server = Server(X0, "MIFA", clients=9, lr=0.1, storage=Storage(path="state", keep_previous=True))
    many = Server(X0, "MIFA", 9, lr=0.1, storage=Storage(path="many", folders=["a", "b"]), compute=Compute(shards=2))
    reader = ClientStore.open("state", readonly=True)
    os.chdir("other")
    for one in (server, many):
        play(one)
        one.add_clients("new")
        play(one, "new")
        one.checkpoint()
    reader.refresh()
    assert reader.round == 1

    def act():
        assert reader.read("new")[0] == pytest.approx(-10)

    assert not killed(act)
    server.compact()
    server.save("copy")
    many.save("copies")
    for opened in (reader, server, many):
        opened.close()
    os.chdir(here)
    assert sorted(os.listdir()) == ["a", "b", "many", "other", "state"]
    for path in ("state", "other/copy"):
        with Server.load(path) as again:
            os.chdir("other")
            play(again)
            assert again.round_number == 3
            os.chdir(here)
    for path, folders in (("many", ["a", "b"]), ("other/copies", None)):
        with Server.load(path, storage=Storage(folders=folders)) as again:
            os.chdir("other")
            play(again)
            assert again.round_number == 3
            os.chdir(here)


def test_a_tilde_means_the_home_directory(here):
    os.chdir("other")
    ClientStore(2, 3, medium="mmap", path="~/rows").save("~/saved")
    ClientStore.open("~/saved", readonly=True).close()
    with Server(X0, "FedAvg", clients=2, lr=0.1, storage="~/state") as server:
        server.save("~/copy")
        write_model({"w": X0}, "~/model.npz")
    Server.load("~/copy", storage=Storage(medium="ram"))
    assert read_model("~/copy").round_number == 0
    Network([X0] * 2, np.full((2, 2), 0.5), lr=0.1).save("~/network")
    Network.load("~/network")
    Server(
        X0, "FedAvg", 2, lr=0.1, storage=Storage(path="~/many", folders=["~/a", "~/b"]), compute=Compute(shards=2)
    ).close()
    with Server.load("~/many", storage=Storage(folders=["~/a", "~/b"])) as many:
        many.save("~/copies")
    reshard("~/many", 1, to="~/one", current_folders=["~/a", "~/b"])
    names = "a b copies copy many model.npz network one other rows saved state"
    assert sorted(os.listdir(here)) == names.split()
    assert os.listdir() == []
    with Server(X0, "FedAvg", clients=2, lr=0.1, storage="./~"):  # a folder of this name
        assert os.listdir() == ["~"]


def test_a_missing_home_directory(here):
    experiment = pytest.importorskip("fedcore.sim.experiment", reason="needs the simulator's packages")
    for make in (
        lambda: Server(X0, "FedAvg", clients=2, lr=0.1, storage="~no-such-user/state"),
        lambda: Server.load("~no-such-user/state"),
        lambda: experiment.load_results("~no-such-user/runs"),
    ):
        with pytest.raises(RangeError, match="home directory"):
            make()
    os.chdir("other")
    (here / "other").rmdir()
    with pytest.raises(StoreError, match="state: the working directory"):
        Server(X0, "FedAvg", clients=2, lr=0.1, storage="state")


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_moved_or_deleted_folder_is_named(here, how):
    server = Server(X0, "MIFA", clients=9, lr=0.1, storage=Storage(path="state", keep_previous=True))
    play(server)
    reader = ClientStore.open("state", readonly=True)
    if how == "moved":
        os.rename("state", "moved")
    else:
        shutil.rmtree("state")
    calls = [
        lambda: play(server, 1),
        lambda: server.add_clients("new"),
        lambda: server.remove_client(0),
        lambda: server.change(lr=0.2),
        server.checkpoint,
        server.compact,
        server.store.info,
        reader.info,
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"/state: .*moved or deleted"):
            call()
    assert (server.round_number, server.transactions) == (1, 1)
    server.save("copy")  # open files can still be read
    with Server.load("copy") as copy:
        play(copy, 1)
        if how == "moved":
            os.rename("moved", "state")
            play(server, 1)
            np.testing.assert_array_equal(server.x, copy.x)
    reader.close()
    server.close()
    assert os.path.exists("state") == (how == "moved")
