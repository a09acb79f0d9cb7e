"""Stores where the system lacks what only Linux has, as macOS does: the same rows, and durable by its own means."""

import errno
import fcntl
import mmap
import os

import numpy as np
import pytest

from fedcore import Server
from fedcore.store.files import file_system, slot_file, system_calls
from tests.cluster.pairs import one_round

LINUX_ALONE = ("posix_fallocate", "fdatasync", "posix_fadvise")
FULL_SYNC = 51  # macOS's number


@pytest.fixture
def macos(monkeypatch):
    """This system without what macOS lacks, and with what it has; the syncs that were asked for."""
    for name in LINUX_ALONE:
        monkeypatch.delattr(os, name)
    for name in ("free", "exchange"):
        monkeypatch.setattr(system_calls, name, lambda *_: False)
    monkeypatch.setattr(system_calls, "start_writing", lambda fd: None)
    monkeypatch.setattr(file_system.sys, "platform", "darwin")
    synced, control = [], fcntl.fcntl

    def recorded(fd, command, *rest):
        if command != FULL_SYNC:
            return control(fd, command, *rest)
        synced.append(fd)
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_SYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", recorded)
    return synced


class Mapped(mmap.mmap):
    """A mapping whose flushes are counted."""

    flushed = 0

    def flush(self, *where):
        Mapped.flushed += 1
        return super().flush(*where)


def test_rounds_on_a_store_in_files(macos, tmp_path, monkeypatch):
    monkeypatch.setattr(slot_file.mmap, "mmap", Mapped)
    Mapped.flushed = 0

    def rounds(server, count):
        for _ in range(count):
            one_round(server)

    x0 = np.linspace(-1, 1, 40_000, dtype=np.float32)
    due = Server("MIFA", x0, 6, lr=0.1)
    rounds(due, 4)
    with Server("MIFA", x0, 6, lr=0.1, store=f"mmap:{tmp_path / 'run'}") as server:
        rounds(server, 2)
        server.broadcast(range(6))
        server.save(tmp_path / "copy")
        before = len(macos)
        rounds(server, 1)
        assert Mapped.flushed >= 3  # in each round
        assert len(macos) >= before + 2  # the rows, and the index's log or the folder
        server.save(tmp_path / "copy")
    for folder in ("run", "copy"):
        with Server.load(tmp_path / folder) as server:
            assert server.store.verify() == []
            rounds(server, 1)
            assert server.x.tobytes() == due.x.tobytes()


def test_a_range_has_its_place(macos, tmp_path):
    """Without a byte of the file that changes, also behind its end."""
    content = np.random.default_rng(0).bytes(10_000)
    with (tmp_path / "file").open("wb+") as file:
        file.write(content)
        file.truncate(3 << 20)
        file.flush()
        system_calls.reserve(file.fileno(), 5_000, 4 << 20)
        said = os.fstat(file.fileno())
        assert said.st_size == 5_000 + (4 << 20)
        assert said.st_blocks * 512 >= 4 << 20
        file.seek(0)
        assert file.read() == content.ljust(said.st_size, b"\0")


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EIO])
def test_a_sync_that_is_refused(macos, tmp_path, monkeypatch, code):
    """By a file system that has no such thing, which has another; or by a disk that fails, which is an error."""

    def refused(*_):
        raise OSError(code, os.strerror(code))

    plain = []
    monkeypatch.setattr(fcntl, "fcntl", refused)
    monkeypatch.setattr(os, "fsync", plain.append)
    with (tmp_path / "file").open("wb") as file:
        if code == errno.EIO:
            with pytest.raises(OSError, match="Input/output"):
                system_calls.sync(file.fileno())
            assert plain == []
        else:
            system_calls.sync(file.fileno())
            assert plain == [file.fileno()]
