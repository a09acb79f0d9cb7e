"""What rounds do not notice of a trace: their bits, their memory, forks, signals, and exceptions from outside."""

import gc
import os
import signal
import weakref
from contextlib import suppress

import numpy as np
import pytest

import fedcore
from fedcore import Update, algorithms
from tests.server.invariant import contradictions
from tests.server.stopping import Stopped, a_round, check, each_line, expected
from tests.server.stopping import a_server as a_server_to_stop
from tests.tracing.rounds import N, a_server, calls, spans, updates


@pytest.mark.parametrize("method", sorted(algorithms.REGISTRY))
def test_a_traced_run_has_the_same_bits(method):
    def run():
        options = {"client_sizes": [1, 2, 3, 4]} if algorithms.named(method).needs_shares else {}
        server = a_server(method, **options)
        second = server.broadcast([0]).second
        for _ in range(3):
            x = server.broadcast(range(4)).x
            server.round([Update(i, x + 1 + i, steps=1, control=(x + i) if second else None) for i in range(4)])
        return server.x.tobytes(), server.v.tobytes()

    plain = run()
    with fedcore.trace():
        assert run() == plain


def most_alive(server):
    """How many updates that are made while they are read are there at once."""
    there, most = weakref.WeakSet(), 0

    def made():
        nonlocal most
        for client in range(4):
            y = np.ones(N, np.float32).view(Counted)
            there.add(y)
            most = max(most, len(there))
            yield Update(client, y, steps=1)
            del y

    server.round(made())
    return most


class Counted(np.ndarray):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_no_array_is_kept():
    server = a_server("FedAvg")
    untraced = most_alive(server)
    assert untraced < 4
    with fedcore.trace() as trace:
        with server.open_round() as round:
            y = np.ones(N, np.float32)
            there = weakref.ref(y)
            round.add(0, y, steps=1)
            del y
            assert there() is None
        assert most_alive(server) == untraced
        state = weakref.ref(server._state)
        del server, round
        gc.collect()
        assert state() is None
    assert len(trace.rounds) == 2
    assert state() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_is_not_traced_and_may_have_traces_of_its_own():
    server = a_server()
    with fedcore.trace() as trace:
        child = os.fork()
        if not child:
            server.round(updates(server))
            with fedcore.trace() as own:
                server.round(updates(server))
            os._exit(0 if not calls(trace) and calls(own)["open"] == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert calls(trace) == {}


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("medium", ["ram", "mmap"])
def test_an_exception_from_outside_at_any_line_of_tracing_in_a_round(tmp_path, medium, stride):
    """The round is all there or not at all, and the spans that were running are over."""

    def stop():
        raise Stopped

    def server():
        return a_server_to_stop("MIFA", "ram" if medium == "ram" else f"mmap:{tmp_path / str(at)}")

    at = 0
    before, after = expected(server, a_round)
    at, goes_on, ends = 1, True, set()
    while goes_on:
        one = server()
        with fedcore.trace() as trace:
            with suppress(Stopped):
                goes_on = each_line(a_round, one, at, stop, room="fedcore/tracing")
            fedcore.kernels.squared_norms([np.float32([1])])
        assert contradictions(one) == []
        last = spans(trace)[-1]
        assert (last.round, last.own > 0) == (-1, True)  # it is within no span that was left
        ends.add(check(one, before, after))
        at += stride
    assert ends == {False, True}


def test_a_handler_may_abort_a_round_and_look_at_the_trace_within_a_span():
    server, tables = a_server("FedAvg"), []
    before = signal.getsignal(signal.SIGTERM)
    with fedcore.trace() as trace:
        round = server.open_round()
        signal.signal(signal.SIGTERM, lambda *_: (round.abort(), tables.append(trace.table())))
        try:
            each_line(
                lambda _: round.add(0, server.x, steps=1),
                server,
                5,
                lambda: signal.raise_signal(signal.SIGTERM),
                room="fedcore/aggregation",
            )
        finally:
            signal.signal(signal.SIGTERM, before)
        server.round(updates(server))
    assert not round.is_open
    assert tables[0].startswith("phase")
    assert calls(trace)["finish"] == 1
