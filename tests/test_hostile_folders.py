"""Folders in which another user put a link, a pipe, a changed file or its own file at a name.

Each command refuses the folder by name, or is unharmed; nothing outside of the folder changes, and nothing waits.
"""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fedcore import Model, Server, Storage, aggregate, merge, write_model
from fedcore.algorithms.optimizers import Nesterov
from fedcore.cluster.manifest import BLOCK
from fedcore.errors import CorruptionError, FedcoreError, StoreError
from fedcore.model import windows
from fedcore.model.safetensors import Safetensors, StoredFile
from fedcore.options import Compute
from fedcore.rules import Krum
from fedcore.sim.experiment import load_results
from fedcore.sim.experiment.runner import prepare
from fedcore.sim.experiment.schema import trials
from tests.cli.command import invoke
from tests.kit import in_time
from tests.model.kill_merges import content, in_child
from tests.sim.experiment.kit import FEDAVG, interrupt, quick
from tests.store.kit import meanwhile

STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def tree(folder):
    """The content, owner and mode of everything in a folder."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        at = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = content, at.st_uid, at.st_mode
    return found


def as_link(path, outside):
    shutil.move(path, outside / path.name)
    path.symlink_to(outside / path.name)


def as_hard_link(path, outside):
    if path.is_dir():
        pytest.skip("a folder has one name")
    os.link(path, outside / path.name)


def removed(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path


def as_dangling_link(path, outside):
    removed(path).symlink_to(outside / "nowhere")


def as_pipe(path, outside):
    os.mkfifo(removed(path))


def as_folder(path, outside):
    (removed(path) / "thesis").mkdir(parents=True)


def as_file(path, outside):
    removed(path).write_text("years of work")


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


ATTACKS = [as_link, as_dangling_link, as_hard_link, as_pipe, as_folder, as_file]
ATTACKS += [pytest.param(of_another, marks=needs_root), changed]
REFUSED = (as_link, as_dangling_link, as_pipe, as_file, of_another)
"""What is refused under the name of a part of a server's folder."""


def names_in(folder):
    """The entries of a folder, without those of a second shard or group, which are like those of the first."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [name for name in names if not name.startswith(("groups/1", "shard-1"))]


def command(*arguments):
    def call(path):
        done = invoke(arguments[0], *(path if one is PATH else one for one in arguments[1:]))
        assert done.status in (0, 1, 2), done
        if done.status == 2:
            raise StoreError(done.errors)

    return call


PATH = object()
"""The hostile folder, as an argument of a command."""


def commands(kind, beside):
    """What users do with a folder, each on its own copy of it."""

    def load(path):
        with Server.load(path) as server, server.open_round() as opened:
            opened.add(2, update_of(server), steps=1)

    def save(path):
        with Server(np.zeros(8, np.float32), "FedAvg", clients=3, lr=0.1) as server:
            server.save(path)

    if kind == "run":
        return {"report": command("report", PATH), "resume": command("run", PATH, "--resume", "--workers", "0")}
    if kind == "merged":
        inputs = [beside / f"{k}.safetensors" for k in range(2)]
        for k, path in enumerate(inputs):
            write_model({"w": np.full(100, k, np.float32)}, path)
        return {
            "again": lambda path: merge(path, inputs),
            "continued": lambda path: merge(beside / "again", inputs, base=path, optimizer=Nesterov()),
            "round": lambda path: aggregate([path, inputs[0]]),
        }
    found = {"load": load, "save": save}
    for name, *arguments in (
        ("info",),
        ("audit",),
        ("verify", "--round"),
        ("verify",),
        ("compact", "--erase"),
        ("compact",),
        ("undo",),
        ("recover", "--accept-loss"),
        ("export", beside / "exported.npz"),
        ("remove-client", "1", "--erase"),
        ("reshard", "--shards", "2", "--to", beside / "resharded"),
    ):
        found[" ".join([name, *map(str, arguments[:1])])] = command("store", name, PATH, *arguments)
    return found


def update_of(server):
    return {name: np.asarray(tensor) + 1 for name, tensor in server.tensors().items()}


def make(kind, path):
    n = 3 * BLOCK if kind == "shards" else 40
    model = {name: np.zeros(n, np.float32) for name in "wv"}
    is_whole = True if kind == "whole" else None
    options = {"storage": Storage(path, journal=kind != "groups" or None, keep_previous=is_whole, audit=is_whole)}
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


@cache
def original(kind):
    """A folder that fedcore wrote."""
    path = Path(tempfile.mkdtemp()) / "gift"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    if kind == "run":
        experiment = quick(*FEDAVG, "evaluate.keep=1")
        prepare(path, experiment)
        interrupt(trials(experiment)[0], path, 0)
    elif kind == "merged":
        killed_merge(path.parent)()
        (path.parent / "out").rename(path)
    else:
        make(kind, path)
    return path


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("kind", ["whole", "groups", "shards", "run", "merged"])
@pytest.mark.sample(1)
def test_folders(kind, tmp_path, attack):
    parts = {str(p.relative_to(original(kind))) for p in original(kind).rglob("*") if p.is_dir()} - {"readers"}
    place, outside = tmp_path / "gift", tmp_path / "outside"
    for name, (what, call) in product(names_in(original(kind)), commands(kind, tmp_path).items()):
        is_server = kind in ("whole", "groups", "shards")
        if is_server and name not in parts and what.partition(" ")[0] not in ("load", "verify", "undo", "export"):
            continue
        outside.mkdir()
        (outside / "thesis").write_text("years of work")
        shutil.copytree(original(kind), place)
        with suppress(pytest.skip.Exception):
            attack(place / name, outside)
            before, error = tree(outside), None
            with in_time():
                try:
                    call(place)
                except FedcoreError as raised:
                    error = raised
            assert tree(outside) == before, (what, name)
            if is_server and what == "load" and name in parts and attack in REFUSED and "readers" not in name:
                assert str(place / name) in str(error), name
        for left in (place, outside, tmp_path / "resharded", tmp_path / "again"):
            shutil.rmtree(left, ignore_errors=True)


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


@pytest.mark.parametrize("attack", [*ATTACKS, lambda path, outside: path.chmod(0o777)])
def test_the_folder_of_a_killed_merge(tmp_path, attack):
    killed_merge(tmp_path)
    for name in ["", "merge.json", *names_in(tmp_path / ".out.part")]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        outside, again, part = folder / "outside", killed_merge(folder, clip_norm=1.0), folder / ".out.part"
        outside.mkdir()
        (outside / "thesis").write_text("years of work")
        (part / "merge.json").touch()
        with suppress(pytest.skip.Exception):
            attack(part / name, outside)
            before, error = tree(outside), None
            with in_time():
                try:
                    again()
                except StoreError as raised:
                    error = raised
            assert tree(outside) == before, name
            if error is None:
                assert attack not in (*REFUSED[:3], as_hard_link, of_another), name
                (folder / "out").rename(folder / "first")
                again()
                assert content(folder / "first") == content(folder / "out")
            else:
                assert str(part) in str(error), name
                assert not (folder / "out").exists()


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


@pytest.mark.parametrize("way", ["clip", "rule", "aggregate"])
@pytest.mark.parametrize("which", range(2))
def test_content_that_changes_between_two_passes_is_noticed(tmp_path, monkeypatch, way, which):
    monkeypatch.setattr(windows, "LARGEST", 1 << 18)
    monkeypatch.setattr(StoredFile, "reopen", lambda file: StoredFile.open(file.path, file.folder)[1])  # no times
    paths = [tmp_path / f"{k}.safetensors" for k in range(6)]
    for k, path in enumerate(paths):
        write_model({"w": np.full(8 * windows.UNIT, k / 100, np.float32), "n": np.array(k)}, path)

    def change(done=1, total=1):
        if done >= total / 2:
            with open(paths[which], "r+b") as file:
                file.seek(Safetensors(paths[which])["w"].start + 4 * 8 * windows.UNIT - 4)
                file.write(np.float32(-which / 100 or 1).tobytes())  # the input has the same norm

    class Changing(Krum):
        def combine(self, k, products):
            found = super().combine(k, products)
            change()
            return found

    with pytest.raises(CorruptionError, match=paths[which].name):
        if way == "aggregate":
            aggregate(paths, rule=Changing(f=1))
        else:
            options = {"clip_norm": 1.0, "progress": change} if way == "clip" else {"rule": Changing(f=1)}
            merge(tmp_path / "out", paths[1:], base=paths[0], **options)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_takes_the_place_of_a_model_s_draft_stays(tmp_path):
    thesis, moved = tmp_path / "thesis", []
    thesis.mkdir()
    (thesis / "notes").write_text("years of work")

    def swap(path, *_):
        if str(path).endswith("model.safetensors") and not moved:
            moved.extend(tmp_path.glob(".model.*"))
            moved[0].rename(tmp_path / "aside")
            thesis.rename(moved[0])

    server = Server(np.zeros(8, np.float32), "FedAvg", clients=3, lr=0.1)
    with meanwhile({"open": swap}), pytest.raises(StoreError, match="replaced"):
        server.write(tmp_path / "model")
    assert (moved[0] / "notes").read_text() == "years of work"
    assert not (tmp_path / "model").exists()


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


DEEP = b'{"note":%s}' % (b"[" * 900 + b"]" * 900)  # json reads it, and Python cannot copy it


@pytest.mark.parametrize("text", [b"[" * 100_000, DEEP, b"\xff", b"5"])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path, text):
    shutil.copytree(original("run"), tmp_path / "run")
    (tmp_path / "run" / "config.json").write_bytes(text)
    for command in (("report",), ("run", "--resume", "--workers", "0")):
        done = invoke(command[0], tmp_path / "run", *command[1:])
        assert (done.status, "config.json" in done.errors) == (2, True), done
    with pytest.raises(FedcoreError, match=r"config\.json"):
        load_results(tmp_path / "run")


JOB = """
import sys
from pathlib import Path
import numpy as np
from fedcore import Server, aggregate, merge
from fedcore.sim.experiment import run_experiment
from fedcore.rules import Krum
from tests.sim.experiment.kit import FEDAVG, quick
from tests.model.kill_merges import models
from tests.test_hostile_folders import make, update_of

if __name__ == "__main__":
    home, inputs = Path(sys.argv[1]), Path(sys.argv[2])
    for kind in ("whole", "groups", "shards"):
        make(kind, home / kind)
        with Server.load(home / kind) as server:
            with server.open_round() as opened:
                opened.add(2, update_of(server), steps=1)
            server.compact()
            server.save(home / f"copy of {kind}")
            server.save(home / f"copy of {kind}")
            server.write(home / f"model of {kind}")
        Server.load(home / f"copy of {kind}").close()
    paths = models(inputs, 6)
    merge(home / "merged", paths[1:], base=paths[0], rule=Krum(f=1), optimizer="Nesterov")
    aggregate(paths, rule=Krum(f=1))
    run_experiment(quick(*FEDAVG, "evaluate.keep=1"), home / "run")
"""
BY_PATH = re.compile(
    r"open(at)? /[^/]+(/(round|groups/|shard-)[^/]*)?"  # a store's folder, which SQLite syncs
    r"|unlink .*/(index\.sqlite-(wal|shm)|cluster\.json\.intent)"  # SQLite asks first whether the index is in its place
    r"|(mkdir|rename|renameat2|rmdir) (/[^/]+|.*\.draft-[0-9a-f]{12})"  # the named folder, and drafts
    r"|(rename|rmdir) .*/(groups/\d|round|shard-[-0-9a-f]+)"  # what a draft becomes, or replaces
    r"|mkdir .*/(groups|records|checkpoints|models|models/[^/]+)|rmdir .*/checkpoints"
)
"""What is opened, made, renamed or deleted by its path; the system then follows no link at the end of the path."""
READING = {"stat", "lstat", "newfstatat", "statx", "statfs", "access", "faccessat", "faccessat2", "readlink", "execve"}


@pytest.mark.endurance
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_system_calls_open_files_without_following_links(tmp_path):
    """Of Python, SQLite, torch and NumPy alike: inside of fedcore's folders, no call follows a link at the end."""
    home, log = tmp_path / "home", tmp_path / "log"
    for folder in (home, tmp_path / "inputs"):
        folder.mkdir()
    (tmp_path / "job.py").write_text(JOB)
    traced = ["strace", "-f", "-qq", "-z", "-s", "4096", "-e", "trace=%file", "-o", log]
    job = [sys.executable, tmp_path / "job.py", home, tmp_path / "inputs"]
    root = Path(__file__).parent.parent
    subprocess.run([*traced, *job], check=True, timeout=1200, env=os.environ | {"PYTHONPATH": str(root)})
    opened, odd = 0, set()
    for line in log.read_text().splitlines():
        call, _, given = line.partition(" ")[2].strip().partition("(")
        paths = [path.removeprefix(str(home)) for path in re.findall(r'"([^"]*)"', given) if path.startswith(str(home))]
        flags = "O_NOFOLLOW|O_DIRECTORY|O_PATH|O_CREAT.O_EXCL"
        is_safe = re.search(flags, given) if call.startswith("open") else call in READING
        opened += '"rows.slots"' in given
        if not is_safe and not all(BY_PATH.fullmatch(f"{call} {path}") for path in paths):
            odd.add(line)
    assert opened, "strace shows no calls"
    assert not odd, "\n".join(sorted(odd))
