"""Atomic replacement of files, and links of other users in the folder."""

import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest

from fedcore import Server
from fedcore import files as atomic_file
from fedcore.errors import ConfigError, FedcoreError, StoreError
from fedcore.model import write_model
from fedcore.profiling import profile
from fedcore.sim.engines import AtWork, KeepingClients, RecoveringClients, write_arrays
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment import results as records
from fedcore.sim.experiment.results import FolderJournal, Header, Writer, _config_tables
from fedcore.sim.experiment.runner import check_device, with_additions, write_config
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.reports.report import draw_holdings
from tests.kit import in_time

HEADER = Header("quickstart", "", "FedAvg", 0, 0, 1, "0")


def a_record(path):
    Writer(path, HEADER, []).close()


WRITERS = {
    "config.json": lambda path: write_config(path.parent, load_preset("quickstart")),
    "trial.jsonl": a_record,
    "rows-3.npz": lambda path: write_arrays(path, a=np.zeros(3)),
    "model.npz": lambda path: write_model({"w": np.zeros(3, np.float32)}, path),
    "trace.json": lambda path: profile().save(path),
    "curves.png": lambda path: draw_holdings(np.ones((2, 2), np.int64), path, title=""),
    "report.md": lambda path: atomic_file.write_text(path, "words"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_link_is_followed(tmp_path, name):
    victim, folder = tmp_path / "thesis.txt", tmp_path / "run"
    folder.mkdir()
    victim.write_text("years of work")
    path = folder / name
    links = [path, path.with_suffix(".draft"), path.with_suffix(".unfinished"), folder / f".{name}.{os.getpid()}"]
    for link in links:
        link.symlink_to(victim)
    WRITERS[name](path)
    assert victim.read_text() == "years of work"
    assert path.is_file()
    assert not path.is_symlink()
    assert len(list(folder.iterdir())) == len(links)


def test_an_error_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(KeyError), atomic_file.replacing(path) as file:
        file.write("half")
        raise KeyError
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_error_names_the_file_and_not_its_draft():
    with pytest.raises(OSError, match="'/proc/file'"):
        atomic_file.write_text(Path("/proc/file"), "")  # no one can make it


def test_a_new_file_follows_the_umask(tmp_path):
    mask = os.umask(0o027)
    try:
        atomic_file.write_text(tmp_path / "file", json.dumps({}))
    finally:
        os.umask(mask)
    assert Path(tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_keeps_its_mode_when_it_is_replaced(tmp_path, name, mode):
    path = tmp_path / name
    WRITERS[name](path)
    path.chmod(mode)
    before = path.stat().st_ino
    WRITERS[name](path)
    assert path.stat().st_ino != before
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_only_regular_files_pass_on_their_mode(tmp_path, kind):
    (tmp_path / "open").touch()
    (tmp_path / "open").chmod(0o666)
    path = tmp_path / "file"
    path.symlink_to(tmp_path / "open") if kind == "link" else path.mkdir(0o777)
    assert atomic_file.mode_of(path) is None


def test_a_private_file_is_private_while_it_is_written(tmp_path):
    path = tmp_path / "file"
    path.touch(0o600)
    with atomic_file.draft_of(path) as draft:
        assert draft.stat().st_mode & 0o777 == 0o600


def test_the_folder_is_synced_after_the_rename(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def watched(fd):
        fsync(fd)
        synced.append((os.path.samestat(os.fstat(fd), tmp_path.stat()), (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", watched)
    atomic_file.write_text(tmp_path / "file", "words")
    assert synced == [(False, False), (True, True)]


READERS = {
    "cluster.json": Server.load,
    "trial.jsonl": records.read,
    "header.jsonl": records.read_header,
    "started.jsonl": records.started,
    "rows-1.npz": lambda path: KeepingClients.load(KeepingClients.__new__(KeepingClients), path),
    "rows-2.npz": lambda path: RecoveringClients.load(RecoveringClients.__new__(RecoveringClients), path),
    "config.json": lambda path: with_additions(path.parent, load_preset("quickstart")),
    "build.json": lambda path: check_device(path.parent, load_preset("quickstart")),
    "config.json of a report": _config_tables,
}


@pytest.mark.parametrize("kind", [KeepingClients, RecoveringClients, AtWork])
@pytest.mark.parametrize("content", [b"", b"PK", b"my notes", {"a": 0}, {"claims": "{", "count": 0}, {"claims": 5}])
def test_a_damaged_file_of_clients_is_named(tmp_path, kind, content):
    path = tmp_path / "trial.rows-3.npz"
    path.write_bytes(content) if isinstance(content, bytes) else np.savez(path, **content)
    with pytest.raises(StoreError, match=re.escape(str(path))):
        kind.load(kind.__new__(kind), path)


def made_pipe(path):
    os.mkfifo(path)


def made_socket(path):
    with socket.socket(socket.AF_UNIX) as opened:
        before = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            opened.bind(path.name)
        finally:
            os.chdir(before)


def made_link_to_a_pipe(path):
    os.mkfifo(path.parent / "pipe")
    path.symlink_to(path.parent / "pipe")


def made_link_to_a_device(path):
    path.symlink_to("/dev/null")


@in_time(20)
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("made", [made_pipe, made_socket, made_link_to_a_pipe, made_link_to_a_device])
def test_a_pipe_or_a_device_is_not_read(tmp_path, name, made):
    path = tmp_path / name
    made(path)
    with pytest.raises(FedcoreError, match=re.escape(str(path))):
        READERS[name](path)


@in_time(20)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("made", [made_pipe, made_socket])
def test_a_pipe_or_a_device_is_not_replaced(tmp_path, name, made):
    path = tmp_path / name
    made(path)
    with pytest.raises(FedcoreError, match=re.escape(f"{path}")):
        WRITERS[name](path)
    assert not path.is_file()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["records", "checkpoints", "models", "checkpoints/0-fedavg-seed0"])
def test_a_run_folder_with_a_link_is_not_resumed(tmp_path, name):
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(victim)
    experiment = load_preset("quickstart", ["algorithms=['FedAvg']"])
    with pytest.raises(ConfigError, match="link"):
        FolderJournal(Trial(experiment, 0, 0), run)
    assert list(victim.iterdir()) == []
