"""Stores in a folder, other users, and actions at events of the interpreter."""

import errno
import os
import shutil
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedcore import ClientStore
from fedcore.store.files import disk
from fedcore.testing.stores import content, write

N = 40_000  # 160,000 bytes: three blocks
CALLS = ("resize", "reserve", "sync", "sync_path", "write", "commit")


def made(path, n=N, **options):
    return ClientStore([0, 1, 2, "a"], n, medium="mmap", path=path, keep_previous=True, **options)


def play(store, round, clients=(0, 1)):
    for client in clients:
        write(store, client, content(store.n, str(client), round))
    store.commit(round, {"x": content(100, round), f"of{round}": content(100 + round, round)}, {"round": round})


def assert_is_at(store, round, rows):
    """Rows by the rounds that wrote them."""
    assert (store.round, store.state) == (round, None if round is None else {"round": round})
    assert {client: store.round_of(client) for client in store.registry if store.row(client) is not None} == rows
    for client, written in rows.items():
        np.testing.assert_array_equal(store.read(client), content(store.n, str(client), written))
    assert set(store.vector_names()) == (set() if round is None else {"x", f"of{round}"})
    if round is not None:
        np.testing.assert_array_equal(store.vector("x"), content(100, round))
        np.testing.assert_array_equal(store.vector(f"of{round}"), content(100 + round, round))
    assert store.verify() == []


def died(store):
    """Leave the folder as a process that ends at once does."""
    store._session._finalizer()


def fail_at(monkeypatch, call, error, names):
    """Let the call with this number fail; return a list that gets the names of the calls."""
    called = []

    def failing(name, act):
        def acting(*arguments):
            called.append(name)
            if len(called) == call:
                raise error(name)
            return act(*arguments)

        return acting

    for name in names:
        monkeypatch.setattr(disk, name, failing(name, getattr(disk, name)))
    return called


def error_of(name, number, text, code):
    """The system's error, or that of SQLite in a commit."""
    if name != "commit":
        return OSError(number, os.strerror(number))
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


def full(name):
    return error_of(name, errno.ENOSPC, "database or disk is full", sqlite3.SQLITE_FULL)


def broken(name):
    return error_of(name, errno.EIO, "disk I/O error", sqlite3.SQLITE_IOERR_FSYNC)


def each_call(start, monkeypatch, failure, **options):
    """A copy of a store for each call of a change, which fails; with the call's number and the names of all calls."""
    for call in range(1, 100):
        path = shutil.copytree(start, start.with_name("store"))
        store = ClientStore.open(path, **options)
        called = fail_at(monkeypatch, call, failure, CALLS)
        yield store, call, called
        store._session._finalizer()
        shutil.rmtree(path)
        if len(called) < call:
            assert call > 2
            return


@contextmanager
def opened_to_all(folder):
    """A copy of a store that every user may read and write, unlike pytest's folders."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o777)
        copy = shutil.copytree(folder, place / "store")
        for entry in [copy, *copy.rglob("*")]:
            entry.chmod(0o777 if entry.is_dir() else 0o666)
        yield copy


@contextmanager
def as_user(number):
    """In a fork: become another user; an error ends the process with its traceback."""
    os.setgroups([])
    os.setgid(2000)
    os.setuid(number)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(3)


OPENING, OPENED = "sqlite3.connect", "sqlite3.connect/handle"
_moves: list[Mapping[str, Callable[..., object]]] = []


@contextmanager
def meanwhile(moves: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Call functions at audit events of the interpreter, by the name of the event."""
    if not _moves:
        sys.addaudithook(lambda event, facts: _moves[-1][event](*facts) if event in _moves[-1] else None)
    _moves.append(moves)
    try:
        yield
    finally:
        _moves.append({})
