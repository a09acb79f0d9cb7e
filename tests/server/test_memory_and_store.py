"""Memory and store agree after every interruption: both as before a change, or both as after it."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import cycle
from unittest.mock import Mock

import numpy as np
import pytest

from fedcore import Server, Update
from fedcore.errors import RoundError, StoreError
from fedcore.runtime import uninterrupted
from tests.kit import compiled, python
from tests.server import stopping

# What is raised in a finaliser, or in a generator that is closed, Python itself reports and drops.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(name="raising_handlers")
def raising():
    with stopping.raising_handlers():
        yield


@pytest.fixture(params=[131, pytest.param(1, marks=pytest.mark.endurance)])
def stride(request):
    """Tries every ``stride``-th line or allocation, which is no multiple of the number of signals."""
    return request.param


@pytest.mark.usefixtures("raising_handlers")
@pytest.mark.parametrize("operation", stopping.OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", stopping.METHODS)
@pytest.mark.sample(1)
def test_a_signal_at_any_line(tmp_path, method, medium, operation, stride):
    places, kinds, ends = stopping.stores(tmp_path, medium), cycle(stopping.KINDS), set()
    before, after = stopping.expected(lambda: stopping.a_server(method, next(places)), operation)
    stop = lambda: signal.raise_signal(next(kinds))  # noqa: E731
    for run in stopping.line_by_line(stop, first=1 + stride // 2, stride=stride):
        server = stopping.a_server(method, next(places))
        run(operation, server)
        ends.add(stopping.check(server, before, after))
    assert ends == {False, True}


@pytest.mark.usefixtures("raising_handlers")
@pytest.mark.parametrize("operation", stopping.OPERATIONS, ids=lambda f: f.__name__)
def test_a_signal_waits_until_a_failed_change_is_rolled_back(operation):
    """An interrupted rollback would stay half-done."""

    def in_vain(server):
        with suppress(StoreError):
            operation(server)

    before = stopping.seen(stopping.a_server("MIFA", "ram"))
    for run in stopping.line_by_line(stopping.by_a_signal, room="fedcore/store", least=10):
        server = stopping.a_server("MIFA", "ram")
        server._backend.store.commit = Mock(side_effect=StoreError("no space left"))
        run(in_vain, server)
        del server._backend.store.commit
        stopping.check(server, before, None)


@pytest.mark.usefixtures("raising_handlers")
@pytest.mark.parametrize("stop", [stopping.by_a_signal, stopping.from_outside], ids=lambda f: f.__name__)
@pytest.mark.parametrize("method", stopping.METHODS)
def test_an_interruption_at_any_line_of_abort(method, stop):
    """The staged rows are discarded now, or before the commit of the next change."""

    _, after = stopping.expected(lambda: stopping.a_server(method, "ram"), stopping.two_arrive)
    for run in stopping.line_by_line(stop, least=10):
        server = stopping.a_server(method, "ram")
        opened = server.open_round(newcomers={"new": 5} if method == "FlexibleFedAvg" else ["new"])
        opened.add("d", server.x + 1, steps=1)
        run(opened.abort)
        opened.abort()  # where the first had not begun
        stopping.two_arrive(server)
        stopping.check(server, None, after)


@pytest.mark.parametrize("operation", stopping.OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
@pytest.mark.sample(1)
def test_an_exception_from_outside_at_any_line(tmp_path, method, medium, operation, stride):
    places = stopping.stores(tmp_path, medium)
    before, after = stopping.expected(lambda: stopping.a_server(method, next(places)), operation)
    for run in stopping.line_by_line(stopping.from_outside, first=1 + stride // 2, stride=stride):
        server = stopping.a_server(method, next(places))
        run(operation, server)
        stopping.check(server, before, after)


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("operation", [stopping.a_round, stopping.one_in_the_middle_departs], ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
def test_an_exception_from_outside_at_every_line_of_a_commit(tmp_path, medium, operation, stride):
    """Few lines are between the folder's transaction and the memory that follows it."""
    places, ends = stopping.stores(tmp_path, medium), set()
    before, after = stopping.expected(lambda: stopping.a_server("MIFA", next(places)), operation)
    for run in stopping.line_by_line(stopping.from_outside, room="fedcore/store/commits.py", stride=stride):
        server = stopping.a_server("MIFA", next(places))
        run(operation, server)
        ends.add(stopping.check(server, before, after))
    assert ends == {False, True}


@pytest.mark.parametrize("operation", stopping.OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", stopping.METHODS)
@pytest.mark.sample(1)
def test_a_failed_allocation_anywhere_in_a_commit(tmp_path, method, medium, operation, stride):
    """Only in a commit: other libraries crash where they do not check allocations."""
    testing = pytest.importorskip("_testcapi")
    places = stopping.stores(tmp_path, medium)
    before, after = stopping.expected(lambda: stopping.a_server(method, next(places)), operation)
    at, failed = 1, True
    while failed:
        server = stopping.a_server(method, next(places))
        become, failed = server._backend.become, False

        def starved(*arguments, at=at, become=become):
            testing.set_nomemory(at, at + 1)
            become(*arguments)

        server._backend.become = starved
        try:
            operation(server)
        except Exception:  # CPython and NumPy say TypeError and SystemError too where they forget why
            failed = True
        finally:
            testing.remove_mem_hooks()
        server._backend.become = become
        stopping.check(server, before, after)
        at += stride
    assert at > 1 + stride


@pytest.mark.parametrize("method", ["FedAvg", "MIFA"])
def test_a_handler_may_abort_the_round_at_any_line_of_add(method):
    """The interrupted call ends first, and no lock waits for itself."""
    before = signal.getsignal(signal.SIGTERM)
    at, goes_on, ends = 1, True, set()
    while goes_on:
        server = stopping.a_server(method, "ram")
        old = stopping.seen(server)
        opened = server.open_round()
        signal.signal(signal.SIGTERM, lambda *_, opened=opened: opened.abort())
        add = partial(opened.add, "a", server.x + 1, steps=1)
        try:
            goes_on = stopping.with_line(add, at, lambda: signal.raise_signal(signal.SIGTERM))
        except RoundError:
            ends.add("rejected")  # the signal came before the call had begun
        finally:
            signal.signal(signal.SIGTERM, before)
        assert opened.is_open == (not goes_on)
        with ThreadPoolExecutor(1) as other:  # no lock stays held
            error = other.submit(opened.reject, "b", "why").exception(60)
        assert isinstance(error, RoundError) == goes_on
        assert not goes_on or stopping.seen(server) == old
        opened.abort()
        stopping.check(server, old, old)
        at += 1
    assert at > 20


def test_a_signal_handler_may_not_add_during_add():
    server = stopping.a_server("MIFA", "ram")
    said = []

    def add(number, frame):
        with pytest.raises(RoundError, match=r"^round\b.*abort\(\)"):
            opened.add("b", server.x + 1, steps=1)
        said.append(number)

    before = signal.signal(signal.SIGTERM, add)
    try:
        with server.open_round() as opened:
            add_one = partial(opened.add, "a", server.x + 1, steps=1)
            stopping.with_line(add_one, 30, lambda: signal.raise_signal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == [signal.SIGTERM]
    assert opened.report.accepted == ("a",)


def test_all_deferred_handlers_run():
    came = []

    def handler(number, frame):
        came.append(number)
        raise stopping.Stopped(number)

    before = {kind: signal.signal(kind, handler) for kind in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        with pytest.raises(stopping.Stopped), uninterrupted():
            for _ in range(2000):
                signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGUSR1] * 2000 + [signal.SIGTERM]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


HANDLED_IN_C = """
#include <signal.h>
#include <unistd.h>
static void handle(int number) { (void)number; (void)!write(1, "C\\n", 2); }
__attribute__((constructor)) static void install(void) { signal(SIGINT, handle); }
"""
ROUND = """
import signal
import numpy as np
from fedcore import Server, Update
assert signal.getsignal(signal.SIGINT) is None
server = Server(np.zeros(4, np.float32), "MIFA", 2, lr=0.1)
keep = server._backend.keep
def interrupted(*arguments):
    signal.raise_signal(signal.SIGINT)
    return keep(*arguments)
server._backend.keep = interrupted
server.round([Update(0, server.x + 1, 1)])
print(server.round_number, signal.getsignal(signal.SIGINT))
"""


def test_a_handler_of_a_c_program_stays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("handler")  # code may be loaded from there, as from tmpfs not everywhere
    (folder / "handler.c").write_text(HANDLED_IN_C)
    handler = compiled(folder / "handler.c", folder / "handler.so", "-shared", "-fPIC")
    run = python("-u", "-c", ROUND, LD_PRELOAD=str(handler))
    assert (run.stdout, run.stderr) == ("C\n1 None\n", "")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_a_round_restores_the_signal_handler(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        server = Server(np.zeros(4, np.float32), "MIFA", 2, lr=0.1)
        server.round([Update(0, server.x + 1, 1)])
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
