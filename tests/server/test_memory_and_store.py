"""Memory and store never part: whatever stops a change, both are as before it, or both as after it."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from fedcore import ClientStore
from fedcore.errors import RoundError, StoreError
from fedcore.interrupts import uninterrupted
from tests.server.stopping import (
    KINDS,
    METHODS,
    OPERATIONS,
    Stopped,
    a_round,
    a_server,
    by_a_signal,
    check,
    each_line,
    expected,
    from_outside,
    one_in_the_middle_departs,
    raising_handlers,
    seen,
    stores,
    two_arrive,
)

# What is raised in a finaliser, or in a generator that is closed, Python itself reports and drops.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(name="raising_handlers")
def raising():
    with raising_handlers():
        yield


@pytest.fixture(params=[131, pytest.param(1, marks=pytest.mark.endurance)])
def stride(request):
    """Every so many-th line or allocation is tried: no multiple of the kinds of signals, which come in turn."""
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


@pytest.mark.usefixtures("raising_handlers")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_a_signal_waits_until_a_change_that_failed_is_taken_back(operation):
    """A change that is stopped is taken back; nothing would take back what the way back itself leaves half-done."""

    def fails(*_, **__):
        raise StoreError("no space left")

    before = seen(a_server("MIFA", "ram"))
    at, goes_on = 1, True
    while goes_on:
        server = a_server("MIFA", "ram")
        server._backend.store.commit = fails

        def in_vain(server):
            with suppress(StoreError):
                operation(server)

        with suppress(Stopped):
            goes_on = each_line(in_vain, server, at, by_a_signal, room="fedcore/store")
        del server._backend.store.commit
        check(server, before, None)
        at += 1
    assert at > 10


@pytest.mark.usefixtures("raising_handlers")
@pytest.mark.parametrize("stop", [by_a_signal, from_outside], ids=lambda f: f.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_a_stop_at_any_line_of_abort(method, stop):
    """What the round has staged is forgotten once, now or before the next change, whose commit would take it along."""

    _, after = expected(lambda: a_server(method, "ram"), two_arrive)
    at, goes_on = 1, True
    while goes_on:
        server = a_server(method, "ram")
        opened = server.open_round(newcomers={"new": 5} if method == "FlexibleFedAvg" else ["new"])
        opened.add("d", server.x + 1, steps=1)
        with suppress(Stopped):
            goes_on = each_line(lambda _, opened=opened: opened.abort(), server, at, stop)
        opened.abort()  # where the first had not begun
        two_arrive(server)
        check(server, None, after)
        at += 1
    assert at > 10


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def test_an_exception_from_outside_at_any_line(tmp_path, method, medium, operation, stride):
    places = stores(tmp_path, medium)
    before, after = expected(lambda: a_server(method, next(places)), operation)
    at, goes_on = 1 + stride // 2, True
    while goes_on:
        server = a_server(method, next(places))
        with suppress(Stopped):
            goes_on = each_line(operation, server, at, from_outside)
        check(server, before, after)
        at += stride


@pytest.mark.parametrize("operation", [a_round, one_in_the_middle_departs], ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
def test_an_exception_from_outside_at_every_line_of_a_commit(tmp_path, medium, operation):
    """What is between the folder's transaction and the memory that follows it is a few lines."""

    places = stores(tmp_path, medium)
    before, after = expected(lambda: a_server("MIFA", next(places)), operation)
    at, goes_on, ends = 1, True, set()
    while goes_on:
        server = a_server("MIFA", next(places))
        with suppress(Stopped):
            goes_on = each_line(operation, server, at, from_outside, room="fedcore/store/commits.py")
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
        become, failed = server._backend._become, False

        def starved(*arguments, at=at, become=become):
            testing.set_nomemory(at, at + 1)
            become(*arguments)

        server._backend._become = starved
        try:
            operation(server)
        except Exception:  # CPython and NumPy say TypeError and SystemError too where they forget why
            failed = True
        finally:
            testing.remove_mem_hooks()
        server._backend._become = become
        check(server, before, after)
        at += stride
    assert at > 1 + stride


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
            error = other.submit(opened.reject, "b", "why").exception(60)
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
        with pytest.raises(RoundError, match=r"^round\b.*abort\(\)"):
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
    assert opened.report.accepted == ("a",)


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
