"""Interruptions at any line of a server's change, and the check that memory and store agree afterwards."""

import dis
import signal
import sys
from contextlib import contextmanager, suppress

import numpy as np

from fedcore import Server, Storage, Update, algorithms
from tests.kit import place
from tests.server.invariant import contradictions

METHODS = ["MIFA", "MimiC", "SCAFFOLDM", "FlexibleFedAvg"]


KINDS = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1]


CLIENTS, P = ["a", "b", 7, "d"], 6


class Stopped(BaseException):
    """Raised by the handlers."""


@contextmanager
def raising_handlers():
    """Signals whose handlers raise."""

    def handler(number, frame):
        raise Stopped(number)

    before = {kind: signal.signal(kind, handler) for kind in KINDS}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def by_a_signal():
    signal.raise_signal(signal.SIGINT)


def from_outside():
    """An exception like that of PyThreadState_SetAsyncExc, which cannot be deferred."""
    raise Stopped


def a_server(method, store):
    algorithm = algorithms.MIFA(wait=False) if method == "MIFA" else method
    clients = dict(zip(CLIENTS, [1, 2, 3, 4], strict=True)) if method == "FlexibleFedAvg" else CLIENTS
    server = Server(np.zeros(P, np.float32), algorithm, clients, lr=0.1, storage=place(store))
    a_round(server)
    return server


def a_round(server):
    number = server.round_number
    return server.round([Update(client, server.x + 1 + number, 1) for client in list(server.clients)[:3]])


def the_first_departs(server):
    server.remove_client(next(iter(server.clients)))


def one_in_the_middle_departs(server):
    server.remove_client(list(server.clients)[1])


def two_arrive(server):
    sized = server._backend.snapshot.population.sizes
    names = [f"new {server.round_number} {i}" for i in range(2)]
    server.add_clients(dict(zip(names, [3, 4], strict=True)) if sized else names)


def x_is_replaced(server):
    server.replace_x(server.x + 1)


OPERATIONS = [a_round, the_first_departs, one_in_the_middle_departs, two_arrive, x_is_replaced]


def seen(server):
    """All public values of a server."""
    rows = {client: server.store.read(client).tobytes() for client in server.clients}
    total = server._backend.snapshot.total
    population = server._backend.snapshot.population
    shares = population.shares(server.clients, list(rows))
    return (
        server.round_number,
        server.x.tobytes(),
        server.v.tobytes(),
        None if total is None else total.tobytes(),
        rows,
        None if shares is None else shares.tobytes(),
    )


def immutable_copy(server):
    """The part of ``seen`` that a folder keeps: without v, which some methods do not save."""
    number, x, _v, *others = seen(server)
    return number, x, *others


def expected(make, operation):
    """The values before an operation and after it."""
    server = make()
    before = seen(server)
    operation(server)
    return before, seen(server)


def check(server, before, after):
    """Require that memory and folder are both old or both new; return whether they are new."""
    assert contradictions(server) == []
    now = seen(server)
    assert now in (before, after)
    if server.store.medium == "mmap":
        assert immutable_copy(Server.load(server.store.path, storage=Storage(medium="ram"))) == immutable_copy(server)
    for go_on in (a_round, two_arrive, a_round, the_first_departs, a_round):  # in slots of its own
        go_on(server)
        assert contradictions(server) == []
    server.close()
    return now == after


def leaves_a_block(frame):
    """Whether the line is a with statement's second one, whose ``__exit__`` comes next.

    No signal can arrive between a block and its end: Python checks after calls and where a loop jumps back.
    """
    units = [frame.f_code.co_code[at : at + 2] for at in range(frame.f_lasti, frame.f_lasti + 8, 2)]
    to_begin = 1 if dis.opname[units[0][0]] == "SWAP" else 0  # a value that is returned goes below
    loads = units[to_begin : to_begin + 3]  # __exit__(None, None, None)
    return dis.opname[loads[0][0]] == "LOAD_CONST" and loads == 3 * loads[:1]


def line_by_line(stop, room="fedcore", *, first=1, stride=1, least=0):
    """Yield a function that calls another one with arguments, and stops it before a line in a folder.

    The next one stops it some lines later, and the last one not at all: there must be more than ``least`` lines.
    """
    at, goes_on = first, True

    def run(act, *arguments):
        nonlocal goes_on
        with suppress(Stopped):
            goes_on = with_line(lambda: act(*arguments), at, stop, room)

    while goes_on:
        yield run
        at += stride
    assert at > least


def with_line(act, at, action, room="fedcore"):
    """Call a function, with an action before its ``at``-th line in a folder; return whether there are so many."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if room not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        if event == "line" and not leaves_a_block(frame):
            lines += 1
            if lines == at:
                sys.settrace(None)
                action()
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return lines >= at


def stores(tmp_path, medium):
    """Places for new stores."""
    number = 0
    while True:
        number += 1
        yield "ram" if medium == "ram" else f"mmap:{tmp_path / str(number)}"
