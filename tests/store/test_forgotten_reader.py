"""A reader that nobody refreshes or closes is named before it has filled the disk."""

import logging
import os

import pytest

from fedcore import ClientStore
from tests.cli.command import invoke
from tests.store.contents import content, write

N, CLIENTS = 20, 60


@pytest.fixture
def store(tmp_path):
    with ClientStore(CLIENTS, N, medium="mmap", path=tmp_path / "store", durability="none") as store:
        play(store, 0, 1)
        yield store


@pytest.fixture
def reader(store):
    """A process that looks at round 0."""
    reading, writing = os.pipe()
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        kept = ClientStore.open(store.path, readonly=True)
        os.write(say, b"!")
        os.read(reading, 1)
        assert kept.round == 0
        os._exit(0)
    os.close(reading)
    os.read(ready, 1)
    yield child
    os.close(writing)
    os.waitpid(child, 0)


def play(store, first, last):
    for round in range(first, last):
        for client in range(CLIENTS):
            write(store, client, content(N, client, round))
        store.commit(round, {"x": content(N, round)})


def test_a_forgotten_reader_is_named_once(store, reader, caplog):
    with caplog.at_level(logging.WARNING, logger="fedcore.store"):
        play(store, 1, 2)
        assert not caplog.records
        play(store, 2, 9)
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"{store.path}: ")
    assert "wait for readers, and 61 are in use: the files grow with every round" in said
    assert f"process {reader}, 2 commits behind" in said
    lines = invoke("store", "info", store.path).output.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines if "read by" in line] == [
        f"process {reader}, 8 commits behind"
    ]


def test_readers_that_go_on_or_have_died_are_no_matter(store, caplog):
    with ClientStore.open(store.path, readonly=True) as other:
        for round in range(1, 9):
            play(store, round, round + 1)
            other.refresh()
    assert store.info().readers == ()
    assert not caplog.records


def test_without_readers_nothing_is_said(store, caplog):
    play(store, 1, 9)
    assert not caplog.records
    assert ClientStore(3, N).info().readers == ()
