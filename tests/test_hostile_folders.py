"""Folders in which another user put a link, a pipe, a changed file or its own file at a name.

Each command refuses the folder by name, or is unharmed; nothing outside of the folder changes, and nothing waits.
"""

import os
import shutil
import signal
from contextlib import contextmanager, suppress
from itertools import product

import numpy as np
import pytest

from fedcore import Model, Server, Storage, merge, write_model
from fedcore.algorithms.optimizers import Nesterov
from fedcore.cluster.manifest import BLOCK
from fedcore.errors import CorruptionError, FedcoreError, StoreError
from fedcore.experiment import load_results, run_experiment
from fedcore.model import windows
from fedcore.model.safetensors import Safetensors, StoredFile
from fedcore.options import Compute
from fedcore.rules import Krum
from tests.cli.command import invoke
from tests.experiment.kit import FEDAVG, quick
from tests.model.kill_merges import content, in_child

STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def tree(folder):
    """The content, owner and mode of everything in a folder."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        at = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = content, at.st_uid, at.st_mode, at.st_nlink
    return found


def as_link(path, outside):
    shutil.move(path, outside / path.name)
    path.symlink_to(outside / path.name)


def as_hard_link(path, outside):
    if path.is_dir():
        pytest.skip("a folder has one name")
    os.link(path, outside / path.name)


def as_pipe(path, outside):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mkfifo(path)


def as_folder(path, outside):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (path / "thesis").mkdir(parents=True)


def of_another(path, outside):
    os.chown(path, STRANGER, STRANGER)


def changed(path, outside):
    if path.is_dir():
        (path / "..data").write_text("years of work")
        (path / "7x").mkdir()
    else:
        content = bytearray(path.read_bytes()) or bytearray(1)
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


ATTACKS = [as_link, as_hard_link, as_pipe, as_folder, pytest.param(of_another, marks=needs_root), changed]
REFUSED = (as_link, as_pipe, of_another)
"""What is refused under the name of a part of a server's folder."""


@contextmanager
def in_time():
    def late(*_):
        raise AssertionError("a command waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def names_in(folder):
    """The entries of a folder, without those of a second shard or group, which are like those of the first."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [name for name in names if not name.startswith(("groups/1", "shard-1"))]


def commands(folder, outside):
    """What users do with a server's folder, each on its own copy of it."""

    def load(path):
        with Server.load(path) as server, server.open_round() as opened:
            opened.add(2, update_of(server), steps=1)

    def save(path):
        with Server(np.zeros(8, np.float32), "FedAvg", clients=3, lr=0.1) as server:
            server.save(path)

    def command(name, *arguments):
        def call(path):
            done = invoke("store", name, path, *arguments)
            assert done.status in (0, 1, 2), done
            if done.status == 2:
                raise StoreError(done.errors)

        return call

    yield "load", load
    yield "save", save
    for name, *arguments in (
        ("info",),
        ("verify", "--round"),
        ("verify",),
        ("compact", "--erase"),
        ("compact",),
        ("undo",),
        ("recover", "--accept-loss"),
        ("export", outside.parent / "exported.npz"),
        ("remove-client", "1", "--erase"),
        ("reshard", "--shards", "2", "--to", outside.parent / "resharded"),
    ):
        yield f"{name} {arguments[:1]}", command(name, *arguments)


def update_of(server):
    return {name: np.asarray(tensor) + 1 for name, tensor in server.tensors().items()}


def make(kind, path):
    n = 3 * BLOCK if kind == "shards" else 40
    model = {name: np.zeros(n, np.float32) for name in "wv"}
    options = {
        "storage": Storage(path, journal=kind != "groups" or None, keep_previous=True if kind == "whole" else None)
    }
    if kind == "groups":
        model = Model(model, {"first": "w"})
    if kind == "shards":
        options["compute"] = Compute(shards=2)
    with Server(model, "MIFA", clients=3, lr=0.1, **options) as server:
        with server.open_round() as opened:
            for client in range(3):
                opened.add(client, update_of(server), steps=1)
        if kind != "groups":
            opened = server.open_round()
            opened.add(0, update_of(server), steps=1)


@pytest.fixture(scope="module", params=["whole", "groups", "shards"])
def server(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "run"
    make(request.param, path)
    return path


@pytest.mark.parametrize("attack", ATTACKS)
def test_servers(server, tmp_path, attack):
    parts = {str(p.relative_to(server)) for p in server.rglob("*") if p.is_dir() and p.name != "readers"}
    assert parts & {"round", "groups/0", "shard-0"}
    for name in names_in(server):
        found = {}
        every = [what for what, _ in commands(server, tmp_path / "outside")]
        for number, what in enumerate(every):
            if name not in parts and what.partition(" ")[0] not in ("load", "verify", "undo"):
                continue
            place, outside = tmp_path / "gift", tmp_path / "outside"
            outside.mkdir()
            (outside / "thesis").write_text("years of work")
            shutil.copytree(server, place)
            with suppress(pytest.skip.Exception):
                attack(place / name, outside)
                before = tree(outside)
                _, call = list(commands(place, outside))[number]
                error = None
                with in_time():
                    try:
                        call(place)
                    except FedcoreError as raised:
                        error = raised
                assert tree(outside) == before, (what, name)
                found[what] = error
            for left in (place, outside, tmp_path / "resharded"):
                shutil.rmtree(left, ignore_errors=True)
        if name in parts and attack in REFUSED:
            assert str(tmp_path / "gift" / name) in str(found["load"]), (name, found)


def killed_merge(folder, **options):
    """A merge into ``folder/out`` that was killed; return how to call it again."""
    paths = [folder / f"{name}.safetensors" for name in ("base", "1", "2", "3")]
    for k, path in enumerate(paths):
        write_model({"w": np.full(1000, k * k, np.float32), "b": np.full(10, k, np.float32)}, path)

    def run(**more):
        return merge(folder / "out", paths[1:], base=paths[0], optimizer=Nesterov(), **options, **more)

    def fatal(done, total):
        if done >= total:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: run(progress=fatal))
    return run


OF_A_MERGE = ["", "progress.json", "model.safetensors", "optimizer", "optimizer/moments.safetensors", "merge.json"]


@pytest.mark.parametrize("attack", [*ATTACKS, lambda path, outside: path.chmod(0o777)])
@pytest.mark.parametrize("name", OF_A_MERGE)
def test_the_folder_of_a_killed_merge(tmp_path, name, attack):
    outside, again, part = tmp_path / "outside", killed_merge(tmp_path, clip_norm=1.0), tmp_path / ".out.part"
    outside.mkdir()
    (outside / "thesis").write_text("years of work")
    (part / "merge.json").touch()
    attack(part / name, outside)
    before, error = tree(outside), None
    with in_time():
        try:
            again()
        except StoreError as raised:
            error = raised
    assert tree(outside) == before
    if error is None:
        assert attack not in (as_link, as_hard_link, as_pipe, of_another)
        (tmp_path / "out").rename(tmp_path / "first")
        again()
        assert content(tmp_path / "first") == content(tmp_path / "out")
    else:
        assert str(part) in str(error)
        assert not (tmp_path / "out").exists()


def test_a_result_of_another_user_is_not_taken_for_ones_own(tmp_path):
    again = killed_merge(tmp_path)
    again()
    os.chown(tmp_path / "out", STRANGER, STRANGER)
    with pytest.raises(StoreError, match="exists"):
        again()


def test_a_finished_folder_has_the_rights_of_a_new_one(tmp_path):
    again, before = killed_merge(tmp_path), os.umask(0o027)
    try:
        again()
    finally:
        os.umask(before)
    (tmp_path / "new").mkdir()
    assert oct((tmp_path / "out").stat().st_mode) == "0o40750"
    assert not (tmp_path / "out" / "progress.json").exists()


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"rule": Krum(f=1)}])
@pytest.mark.parametrize("which", range(2))
def test_content_that_changes_between_two_passes_is_noticed(tmp_path, monkeypatch, options, which):
    monkeypatch.setattr(windows, "LARGEST", 1 << 18)
    monkeypatch.setattr(StoredFile, "reopen", lambda file: StoredFile.open(file.path, file.folder)[1])  # no times
    paths = [tmp_path / f"{k}.safetensors" for k in range(6)]
    for k, path in enumerate(paths):
        write_model({"w": np.full(8 * windows.UNIT, k / 100, np.float32)}, path)

    def change(done, total):
        if done >= total / 2:
            with open(paths[which], "r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(np.float32(-which / 100 or 1).tobytes())  # the input has the same norm

    with pytest.raises(CorruptionError, match=paths[which].name):
        merge(tmp_path / "out", paths[1:], base=paths[0], progress=change, **options)
    assert not list(tmp_path.glob(".*"))


def test_a_time_that_was_set_back_does_not_hide_a_change(tmp_path):
    path = tmp_path / "model.safetensors"
    write_model({"w": np.zeros(3, np.float32)}, path)
    model, was = Safetensors(path), path.stat()
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    with pytest.raises(CorruptionError, match="changed"):
        np.asarray(model["w"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    run_experiment(quick(*FEDAVG, "rounds=1"), path)
    return path


@pytest.mark.parametrize("attack", ATTACKS)
def test_runs(run, tmp_path, attack):
    names = ["config.json", "build.json", "records", *(f"records/{file.name}" for file in (run / "records").iterdir())]
    for i, (name, command) in enumerate(product(names, (("report",), ("run", "--resume", "--workers", "0")))):
        place, outside = tmp_path / str(i) / "gift", tmp_path / str(i) / "outside"
        outside.mkdir(parents=True)
        shutil.copytree(run, place)
        with suppress(pytest.skip.Exception):
            attack(place / name, outside)
            before = tree(outside)
            with in_time():
                done = invoke(command[0], place, *command[1:])
            assert done.status in (0, 1, 2), (name, done)
            assert tree(outside) == before, (name, command)


DEEP = b'{"note":%s}' % (b"[" * 900 + b"]" * 900)  # json reads it, and Python cannot copy it


@pytest.mark.parametrize("text", [b"[" * 100_000, DEEP, b"\xff", b"5"])
def test_a_configuration_that_cannot_be_read_is_named(run, tmp_path, text):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_bytes(text)
    for command in (("report",), ("run", "--resume", "--workers", "0")):
        done = invoke(command[0], tmp_path / "run", *command[1:])
        assert (done.status, "config.json" in done.errors) == (2, True), done
    with pytest.raises(FedcoreError, match=r"config\.json"):
        load_results(tmp_path / "run")
