"""Commits that a disk has lost are given up by consent alone, and the store goes on from the last that is there."""

import errno
import os
import shutil

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.store import recovery
from fedcore.store.files import system_calls as disk
from tests.cli.command import invoke
from tests.server.invariant import contradictions


def play(server, rounds):
    for _ in range(rounds):
        server.round([Update(i, server.x + 1 + i + server.round_number, 1) for i in range(3)])


def lose(folder, rounds):
    """A server's folder whose index lacks the last commits: the disk said that it had them, and did not."""
    with Server("MIFA", np.zeros(50, np.float32), 3, lr=0.1, store=f"mmap:{folder}") as server:
        play(server, 4)
    shutil.copy(folder / "index.sqlite", folder.with_name("index"))
    child = os.fork()
    if child == 0:
        server = Server.load(folder)
        play(server, rounds)
        os._exit(0)  # as the power goes: nothing is closed
    assert os.waitpid(child, 0)[1] == 0
    (folder / "index.sqlite-wal").unlink()
    (folder / "index.sqlite-shm").unlink()
    shutil.move(folder.with_name("index"), folder / "index.sqlite")
    return folder


def content(folder):
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.suffix == ".slots"}


def test_the_error_says_what_to_do_and_it_helps(tmp_path):
    folder = lose(tmp_path / "run", 1)
    before = content(folder)
    for opened in (ClientStore.open, Server.load, lambda path: Server.load(path, medium="ram")):
        with pytest.raises(errors.CorruptionError, match=rf"lost; .* `fedcore store recover {folder}` can go back to"):
            opened(folder)
    said = invoke("store", "recover", folder)
    assert said.status == 1
    assert "commit 5 (round 3) is the last that is there\ncommit 6 would be given up, for ever" in said.output
    assert content(folder) == before
    said = invoke("store", "recover", folder, "--accept-loss")
    assert said.status == 0, said.errors
    assert said.output.endswith("commit 6 given up: the store opens again\n")
    assert invoke("store", "verify", folder).status == 0
    with Server.load(folder) as server:
        assert server.round_number == 4
        assert contradictions(server) == []
        play(server, 3)
        assert contradictions(server) == []
    with Server.load(folder) as server:
        assert server.round_number == 7
    assert recovery.look(folder).lost == range(10, 10)


def test_a_commit_that_a_lost_one_wrote_over_is_not_gone_back_to(tmp_path):
    folder = lose(tmp_path / "run", 4)
    before = content(folder)
    said = invoke("store", "recover", folder, "--accept-loss")
    assert said.status == 1
    assert "the row of client 0" in said.output
    assert "use a copy of the store" in said.output
    with pytest.raises(errors.CorruptionError, match=r"expected commit 5 to be whole, got .* and more; use a copy"):
        recovery.give_up(folder)
    assert content(folder) == before


def test_a_sound_store_stays_as_it_is(tmp_path):
    with Server("MIFA", np.zeros(5, np.float32), 3, lr=0.1, store=f"mmap:{tmp_path / 'run'}") as server:
        play(server, 2)
    before = content(tmp_path / "run")
    said = invoke("store", "recover", tmp_path / "run", "--accept-loss")
    assert (said.status, said.output) == (0, "commit 3 (round 1) is the last that is there\nno commit was lost\n")
    assert recovery.give_up(tmp_path / "run").lost == range(4, 4)
    assert content(tmp_path / "run") == before


def test_a_recovery_that_dies_leaves_the_store_as_it_was_or_recovered(tmp_path, monkeypatch):
    folder = lose(tmp_path / "run", 1)
    monkeypatch.setattr(
        "fedcore.store.files.system_calls.commit", lambda connection: (_ for _ in ()).throw(MemoryError)
    )
    with pytest.raises(MemoryError):
        recovery.give_up(folder)
    monkeypatch.undo()
    with pytest.raises(errors.CorruptionError, match="commits were lost"):
        ClientStore.open(folder)
    write = disk.write

    def full(fd, content, start=0):
        if start:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd, content)  # of the lock

    monkeypatch.setattr(disk, "write", full)
    recovery.give_up(folder)  # the mark is a note only: the index is ahead of what the rows have seen
    monkeypatch.undo()
    Server.load(folder).close()
