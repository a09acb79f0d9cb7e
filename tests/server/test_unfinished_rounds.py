"""A round that was dropped, or interrupted while it opened, leaves nothing; only one is open at a time."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from tempfile import mkdtemp

import numpy as np
import pytest

from fedcore import Server
from fedcore.errors import RoundError, StoreError
from tests.server import stopping

pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


def compacted(server):
    server.compact()


def saved(server):
    server.save(f"{server.store.path}.copy" if server.store.medium == "mmap" else mkdtemp())


@pytest.mark.parametrize("operation", [*stopping.OPERATIONS, compacted, saved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", stopping.METHODS)
@pytest.mark.sample(1)
def test_a_dropped_round_leaves_nothing(tmp_path, monkeypatch, method, medium, operation):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    places = stopping.stores(tmp_path, medium)
    before, after = stopping.expected(lambda: stopping.a_server(method, next(places)), operation)
    server = stopping.a_server(method, next(places))
    opened = server.open_round()
    opened.add("b", np.full(stopping.P, 1000, np.float32), steps=1)
    opened.add("d", np.full(stopping.P, 10, np.float32), steps=1)  # which has no row yet
    del opened
    operation(server)
    stopping.check(server, before, after)


@pytest.mark.parametrize("act", [Server.close, Server.checkpoint, Server.compact, saved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_open", [False, True])
def test_newcomers_of_an_unfinished_round_are_not_saved(tmp_path, act, is_open):
    server = stopping.a_server("MIFA", f"mmap:{tmp_path / 'run'}")
    before = stopping.seen(server)
    opened = server.open_round(newcomers=["new", 8])
    opened.add("new", np.full(stopping.P, 10, np.float32), steps=1)
    if is_open and act is not Server.close:
        with pytest.raises(RoundError, match="open"):
            act(server)
        opened.abort()
    if not is_open:
        del opened
    act(server)
    server.close()
    with Server.load(tmp_path / "run") as again:
        assert stopping.immutable_copy(again) == (before[0], before[1], *before[3:])
        with again.open_round(newcomers=["new", 8]) as opened:
            opened.add(8, np.full(stopping.P, 10, np.float32), steps=1)
        assert set(again.clients) == {*stopping.CLIENTS, 8}


@pytest.mark.parametrize("finishes", [False, True])
def test_two_threads_cannot_open_two_rounds(finishes):
    """One opens at every line of the other's opening, and may finish its round."""

    def open_it():
        with suppress(RoundError):
            opened.append(server.open_round())

    def race():
        other.submit(open_it).result(60)
        if finishes and opened:
            other.submit(opened[0].finish).result(60)

    with ThreadPoolExecutor(1) as other:
        for run in stopping.line_by_line(race, least=20):
            server, opened = stopping.a_server("FedAvg", "ram"), []
            run(open_it)
            assert opened
            is_open = [round for round in opened if round.is_open]
            assert len(is_open) <= 1
            for round in is_open:
                round.abort()
            stopping.a_round(server)


def test_a_closed_server_opens_no_round(tmp_path):
    server = stopping.a_server("FedAvg", f"mmap:{tmp_path / 'store'}")
    server.close()
    with pytest.raises(StoreError, match=r"/store\b"):
        server.open_round()


@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("medium", ["ram", "mmap"])
def test_an_interrupted_opening_leaves_no_newcomers(tmp_path, medium, stride):
    places = stopping.stores(tmp_path, medium)
    for run in stopping.line_by_line(stopping.from_outside, stride=stride, least=40):
        server = stopping.a_server("MIFA", next(places))
        before = stopping.seen(server)
        run(lambda server: server.open_round(newcomers=["new", 8]).abort(), server)
        assert set(server.clients) == set(stopping.CLIENTS)
        stopping.check(server, before, before)
