"""Memory and store never part: whatever stops a change, both are as before it, or both as after it."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from tempfile import mkdtemp

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, algorithms
from fedcore.errors import RoundError, StoreError
from fedcore.server.uninterrupted import uninterrupted
from tests.server.invariant import contradictions

METHODS = ["MIFA", "MimiC", "SCAFFOLDM", "FlexibleFedAvg"]
KINDS = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1]
CLIENTS, P = ["a", "b", 7, "d"], 6

# What is raised in a finaliser, or in a generator that is closed, Python itself reports and drops.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


class Stopped(BaseException):
    """What a handler raises."""


def a_server(method, store):
    algorithm = algorithms.MIFA(wait=False) if method == "MIFA" else method
    sizes = [1, 2, 3, 4] if method == "FlexibleFedAvg" else None
    server = Server(algorithm, np.zeros(P, np.float32), CLIENTS, lr=0.1, store=store, examples=sizes)
    a_round(server)
    return server


def a_round(server):
    number = server.round_number
    return server.round([Update(client, server.x + 1 + number, 1) for client in list(server.store.registry)[:3]])


def the_first_departs(server):
    server.depart(next(iter(server.store.registry)))


def one_in_the_middle_departs(server):
    server.depart(list(server.store.registry)[1])


def two_arrive(server):
    sized = server._state.now.population.is_sized
    names = [f"new {server.round_number} {i}" for i in range(2)]
    server.arrive_all(names, examples=[3, 4] if sized else None)


OPERATIONS = [a_round, the_first_departs, one_in_the_middle_departs, two_arrive]


def seen(server):
    """All that can be asked of a server."""
    rows = {client: server.store.read(client).tobytes() for client in server.store.registry}
    total = server._state.now.total
    population = server._state.now.population
    shares = population.shares(server.store.registry, list(rows))
    return (
        server.round_number,
        server.x.tobytes(),
        server.v.tobytes(),
        None if total is None else total.tobytes(),
        rows,
        None if shares is None else shares.tobytes(),
    )


def lasting(server):
    """Of what is seen, what another process finds in the folder: not v, where the method has no use for it."""
    number, x, _v, *others = seen(server)
    return number, x, *others


def expected(make, operation):
    """What there is to be seen before an operation and after it."""
    server = make()
    before = seen(server)
    operation(server)
    return before, seen(server)


def check(server, before, after):
    """Both sides are old or both new; returns which."""
    assert contradictions(server) == []
    now = seen(server)
    assert now in (before, after)
    if server.store.medium == "mmap":
        assert lasting(Server.load(server.store.path, medium="ram")) == lasting(server)
    for go_on in (a_round, two_arrive, a_round, the_first_departs, a_round):  # in slots of its own
        go_on(server)
        assert contradictions(server) == []
    server.close()
    return now == after


def each_line(operation, server, at, action, room="fedcore"):
    """Run an operation, with the action before the line ``at`` of those that it runs in a room; were there so many?"""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if room not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                sys.settrace(None)
                action()
        return trace

    sys.settrace(trace)
    try:
        operation(server)
    finally:
        sys.settrace(None)
    return lines >= at


def stores(tmp_path, medium):
    """Places for new stores."""
    number = 0
    while True:
        number += 1
        yield "ram" if medium == "ram" else f"mmap:{tmp_path / str(number)}"


@pytest.fixture
def raising_handlers():
    def stop(number, frame):
        raise Stopped(number)

    before = {kind: signal.signal(kind, stop) for kind in KINDS}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.fixture(params=[90, pytest.param(1, marks=pytest.mark.endurance)])
def stride(request):
    """Every so many-th line or allocation is tried."""
    return request.param


@pytest.mark.usefixtures("raising_handlers")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", METHODS)
def test_a_signal_at_any_line(tmp_path, method, medium, operation, stride):
    places = stores(tmp_path, medium)
    before, after = expected(lambda: a_server(method, next(places)), operation)
    at, goes_on, ends = 1 + stride // 2, True, set()
    while goes_on:
        server = a_server(method, next(places))
        kind = KINDS[at % len(KINDS)]
        with suppress(Stopped):
            goes_on = each_line(operation, server, at, lambda kind=kind: signal.raise_signal(kind))
        ends.add(check(server, before, after))
        at += stride
    assert ends == {False, True}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def test_an_exception_from_outside_at_any_line(tmp_path, method, medium, operation, stride):
    """As a thread's PyThreadState_SetAsyncExc raises, which nothing can hold back."""

    def stop():
        raise Stopped

    places = stores(tmp_path, medium)
    before, after = expected(lambda: a_server(method, next(places)), operation)
    at, goes_on = 1 + stride // 2, True
    while goes_on:
        server = a_server(method, next(places))
        with suppress(Stopped):
            goes_on = each_line(operation, server, at, stop)
        check(server, before, after)
        at += stride


@pytest.mark.parametrize("operation", [a_round, one_in_the_middle_departs], ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
def test_an_exception_from_outside_at_every_line_of_a_commit(tmp_path, medium, operation):
    """What is between the folder's transaction and the memory that follows it is a few lines."""

    def stop():
        raise Stopped

    places = stores(tmp_path, medium)
    before, after = expected(lambda: a_server("MIFA", next(places)), operation)
    at, goes_on, ends = 1, True, set()
    while goes_on:
        server = a_server("MIFA", next(places))
        with suppress(Stopped):
            goes_on = each_line(operation, server, at, stop, room="fedcore/store/journal.py")
        ends.add(check(server, before, after))
        at += 1
    assert ends == {False, True}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", METHODS)
def test_no_memory_left_at_any_allocation_of_a_commit(tmp_path, method, medium, operation, stride):
    """Of a commit alone: elsewhere there are libraries that do not look at what they are given, and crash."""
    testing = pytest.importorskip("_testcapi")
    places = stores(tmp_path, medium)
    before, after = expected(lambda: a_server(method, next(places)), operation)
    at, failed = 1, True
    while failed:
        server = a_server(method, next(places))
        become, failed = server._state._become, False

        def starved(*arguments, at=at, become=become):
            testing.set_nomemory(at, at + 1)
            become(*arguments)

        server._state._become = starved
        try:
            operation(server)
        except Exception:  # CPython and NumPy say TypeError and SystemError too where they forget why
            failed = True
        finally:
            testing.remove_mem_hooks()
        server._state._become = become
        check(server, before, after)
        at += stride


def compacted(server):
    server.compact()


def saved(server):
    server.save(f"{server.store.path}.copy" if server.store.medium == "mmap" else mkdtemp())


@pytest.mark.parametrize("operation", [*OPERATIONS, compacted, saved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", METHODS)
def test_a_round_that_was_dropped_leaves_nothing(tmp_path, monkeypatch, method, medium, operation):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    places = stores(tmp_path, medium)
    before, after = expected(lambda: a_server(method, next(places)), operation)
    server = a_server(method, next(places))
    opened = server.open_round()
    opened.add("b", np.full(P, 1000, np.float32), steps=1)
    opened.add("d", np.full(P, 10, np.float32), steps=1)  # which has no row yet
    del opened
    operation(server)
    check(server, before, after)


@pytest.mark.parametrize("act", [Server.close, Server.checkpoint, Server.compact, saved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_open", [False, True])
def test_newcomers_of_a_round_that_was_not_finished_do_not_reach_the_folder(tmp_path, act, is_open):
    server = a_server("MIFA", f"mmap:{tmp_path / 'run'}")
    before = seen(server)
    opened = server.open_round(newcomers=["new", 8])
    opened.add("new", np.full(P, 10, np.float32), steps=1)
    if is_open and act is not Server.close:
        with pytest.raises(RoundError, match="is open already"):
            act(server)
        opened.abort()
    if not is_open:
        del opened
    act(server)
    server.close()
    with Server.load(tmp_path / "run") as again:
        assert lasting(again) == (before[0], before[1], *before[3:])
        with again.open_round(newcomers=["new", 8]) as opened:
            opened.add(8, np.full(P, 10, np.float32), steps=1)
        assert set(again.store.registry) == {*CLIENTS, 8}


@pytest.mark.parametrize("method", ["FedAvg", "MIFA"])
def test_a_handler_may_abort_the_round_at_any_line_of_add(method):
    """And the call in the midst of which it came ends first; nothing waits for itself."""
    before = signal.getsignal(signal.SIGTERM)
    at, goes_on, ends = 1, True, set()
    while goes_on:
        server = a_server(method, "ram")
        old = seen(server)
        opened = server.open_round()
        signal.signal(signal.SIGTERM, lambda *_, opened=opened: opened.abort())
        try:
            goes_on = each_line(
                lambda server, opened=opened: opened.add("a", server.x + 1, steps=1),
                server,
                at,
                lambda: signal.raise_signal(signal.SIGTERM),
            )
        except RoundError:
            ends.add("refused")  # it came before the call had begun
        finally:
            signal.signal(signal.SIGTERM, before)
        assert opened.is_open == (not goes_on)
        with ThreadPoolExecutor(1) as other:  # and nobody waits for ever for its turn
            error = other.submit(opened.refuse, "b", "why").exception(60)
        assert isinstance(error, RoundError) == goes_on
        assert not goes_on or seen(server) == old
        opened.abort()
        check(server, old, old)
        at += 1
    assert at > 20


def test_a_handler_may_not_add_in_the_midst_of_add():
    server = a_server("MIFA", "ram")
    said = []

    def add(number, frame):
        with pytest.raises(RoundError, match=r"one call at a time.*abort\(\) alone"):
            opened.add("b", server.x + 1, steps=1)
        said.append(number)

    before = signal.signal(signal.SIGTERM, add)
    try:
        with server.open_round() as opened:
            each_line(
                lambda server: opened.add("a", server.x + 1, steps=1),
                server,
                30,
                lambda: signal.raise_signal(signal.SIGTERM),
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == [signal.SIGTERM]
    assert opened.report.heard == ("a",)


def test_named_clients_that_departed_are_back_after_a_commit_that_failed(tmp_path):
    for at in range(3):
        with ClientStore(["a", "b", "c"], 2) as store:
            for number, client in enumerate("abc"):
                store.stage(client)[:] = number
            store.commit(0)
            before = store.registry.explicit()
            store.forget("abc"[at])
            store.add_all(["x", "y"])
            store.forget("x")
            store.rollback()
            assert store.registry.explicit() == before
            assert [store.read(client)[0] for client in "abc"] == [0, 1, 2]


def test_handlers_that_waited_all_run_however_many_and_whatever_they_raise():
    came = []

    def handler(number, frame):
        came.append(number)
        raise Stopped(number)

    before = {kind: signal.signal(kind, handler) for kind in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        with pytest.raises(Stopped), uninterrupted():
            for _ in range(2000):
                signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGUSR1] * 2000 + [signal.SIGTERM]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@pytest.mark.parametrize("finishes", [False, True])
def test_two_threads_never_get_two_rounds(finishes):
    """One opens at every line of the other's opening, and finishes its round or not."""

    def attempt(at):
        server, opened = a_server("FedAvg", "ram"), []

        def open_it(server):
            with suppress(RoundError):
                opened.append(server.open_round())

        def race():
            other.submit(open_it, server).result(60)
            if finishes and opened:
                other.submit(opened[0].finish).result(60)

        goes_on = each_line(open_it, server, at, race)
        assert opened
        is_open = [round for round in opened if round.is_open]
        assert len(is_open) <= 1
        for round in is_open:
            round.abort()
        a_round(server)
        return goes_on

    with ThreadPoolExecutor(1) as other:
        at = 1
        while attempt(at):
            at += 1
    assert at > 20


def test_a_closed_server_opens_no_round(tmp_path):
    server = a_server("FedAvg", f"mmap:{tmp_path / 'store'}")
    server.close()
    with pytest.raises(StoreError, match="store: expected an open store, got one that was closed"):
        server.open_round()


@pytest.mark.parametrize("medium", ["ram", "mmap"])
def test_an_opening_that_is_stopped_at_any_line_leaves_no_newcomers(tmp_path, medium, stride):
    def stop():
        raise Stopped

    places = stores(tmp_path, medium)
    at, goes_on = 1, True
    stride = -(-stride // 8)
    while goes_on:
        server = a_server("MIFA", next(places))
        before = seen(server)
        with suppress(Stopped):
            goes_on = each_line(lambda server: server.open_round(newcomers=["new", 8]).abort(), server, at, stop)
        assert set(server.store.registry) == set(CLIENTS)
        check(server, before, before)
        at += stride
    assert at > 40
