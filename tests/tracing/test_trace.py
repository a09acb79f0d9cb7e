"""What a trace says of rounds."""

import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import fedcore
from fedcore import Update
from fedcore.errors import PicklingError
from fedcore.optimizers import Adam
from fedcore.tracing.recording import MANY
from tests.tracing.rounds import N, a_network, a_server, calls, spans, updates


def test_every_phase_of_a_round_appears(tmp_path):
    rows = fedcore.ClientStore(4, N, medium="mmap", path=tmp_path / "rows")
    server = fedcore.Server("MimiC", np.zeros(N, np.float32), lr=0.1, store=rows, optimizer=Adam(), diagnostics=True)
    with fedcore.trace() as trace, server:
        server.broadcast(range(3)).of(0)
        server.round(updates(server))
        with server.open_round() as round:
            for update in updates(server):
                round.add_update(update)
        server.save(tmp_path / "copy")
    assert calls(trace) == {
        **{"broadcast": 1, "open": 2, "add": 4, "check": 7, "read": 4, "weigh": 4, "fold": 4, "exchange": 4},
        **{"step": 2, "optimiser": 2, "diagnose": 2, "commit": 2, "store commit": 2, "report": 4, "finish": 2},
        "save": 1,
    }


def test_the_phases_of_a_network_s_round():
    network = a_network()
    with fedcore.trace() as trace:
        network.round([Update(node, np.full(N, node, np.float32), steps=1) for node in range(3)])
    assert calls(trace) == {"open": 1, "add": 3, "check": 3, "read": 3, "fold": 3, "mix": 1, "diagnose": 3, "finish": 1}
    assert {one.phase: one.bytes for one in trace.phases}["mix"] == 2 * (3 * 4 * N + 9 * 8)


def test_updates_that_are_made_while_they_are_read_are_the_clients_phase():
    server = a_server(fold=2)

    def slow():
        for update in updates(server, 4):
            time.sleep(0.01)
            yield update

    with fedcore.trace() as trace:
        server.round(slow())
    (clients,) = [one for one in trace.phases if one.phase == "clients"]
    assert clients.calls == 4  # each is folded before the next is made, since it may be changed
    assert clients.seconds >= 0.04


def test_bytes_are_those_of_the_kernels():
    server, k = a_server("FedAvg", fold=8), 3
    with fedcore.trace() as trace:
        server.round(updates(server, k))
    moved = {one.phase: one.bytes for one in trace.phases}
    columns, squares = 2 * 8 * k, 8 * k
    assert moved["fold"] == 4 * N * k + 4 * N + 4 * N + columns + squares  # the ys, x, the sum; no sum was there before
    assert moved["step"] >= 4 * N * 4  # A and x, v and x'
    assert moved["read"] == moved["open"] == 0


def test_an_exchange_counts_rows_old_and_new():
    server, k = a_server("MIFA"), 3
    server.round(updates(server, k))
    with fedcore.trace() as trace:
        server.round(updates(server, k))
    (exchange,) = [one for one in trace.phases if one.phase == "exchange"]
    columns = 3 * 8 * k
    assert exchange.bytes == 3 * 4 * N * k + 4 * N + 2 * 8 * N + columns  # y, old, new; x; the float64 sum in and out
    assert exchange.gigabytes_per_second == exchange.bytes / exchange.seconds / 1e9


def test_kernels_and_aggregate_alone():
    x = np.ones(N, np.float32)
    with fedcore.trace() as trace:
        fedcore.kernels.weighted_sum([x, x + 1], [0.5, 0.5])
        fedcore.aggregate([{"w": x}, {"w": x}])
    assert calls(trace) == {"aggregate": 1, "kernels": 1}
    assert trace.phases[1].bytes == 3 * x.nbytes
    assert trace.rounds == ()


@pytest.mark.parametrize("method", ["FedAvg", "MimiC", "SCAFFOLDM"])
def test_times_add_up_to_the_clock(method):
    server = a_server(method)
    with fedcore.trace() as trace:
        for _ in range(5):
            server.broadcast(range(3))
            server.round(updates(server))
    phases = trace.phases
    assert sum(one.seconds for one in phases) == pytest.approx(trace.seconds)
    assert sum(one.seconds for one in phases if one.calls) <= trace.seconds
    assert sum(one.share for one in phases) == pytest.approx(1)
    assert all(one.seconds >= 0 for one in phases)
    for round in trace.rounds:
        assert sum(one.seconds for one in round.phases) == pytest.approx(round.seconds)
    assert sum(round.seconds for round in trace.rounds) <= trace.seconds
    of_rounds = sum(one.calls for round in trace.rounds for one in round.phases)
    assert of_rounds == sum(one.calls for one in phases)


def test_spans_nest():
    server = a_server()
    with fedcore.trace() as trace:
        for _ in range(3):
            server.round(updates(server))
    open_ends = []
    for span in sorted(spans(trace), key=lambda span: (span.start, -span.end)):
        open_ends = [end for end in open_ends if end > span.start]
        assert all(span.end <= end for end in open_ends)
        open_ends.append(span.end)


def test_rounds_of_several_servers():
    servers = [a_server(), a_server("FedAvg"), a_server()]
    servers[0].round(updates(servers[0]))
    with fedcore.trace() as trace:
        for server in (*servers, *servers):
            server.broadcast(range(3))
            server.round(updates(server))
    assert [one[:2] for one in trace.rounds] == [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]
    lines = [line.split()[:2] for line in trace.table(by_round=True).splitlines()]
    assert lines[:2] == [["server", "round"], ["0", "1"]]


def test_a_server_within_the_updates_of_another_has_rounds_of_its_own():
    outer, inner = a_server("FedAvg"), a_server("FedAvg")

    def regions():
        for client in range(3):
            inner.round(updates(inner))
            yield Update(client, inner.x, steps=1)

    with fedcore.trace() as trace:
        outer.round(regions())
    assert [(one.server, one.round) for one in trace.rounds] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert {one.phase: one.calls for one in trace.rounds[0].phases}["finish"] == 1


def test_a_round_before_the_trace_has_no_part_in_it(tmp_path):
    server = a_server()
    with fedcore.trace():
        server.round(updates(server))
    with fedcore.trace() as trace:
        server.save(tmp_path / "copy")
    assert calls(trace)["save"] == 1
    assert trace.rounds == ()


def test_an_exception_in_a_round_closes_its_spans():
    server = a_server()
    with fedcore.trace() as trace:
        for _ in range(2):
            with suppress(ZeroDivisionError), server.open_round() as round:
                round.add(0, server.x, steps=1)
                raise ZeroDivisionError
        with suppress(Exception):
            server.round([Update("nobody", server.x, steps=1)])
        server.round(updates(server))
    assert calls(trace)["abort"] == 3
    assert calls(trace)["open"] == 5  # the round of the unknown client is opened twice
    outermost = max(spans(trace), key=lambda span: span.end)
    assert outermost.start > min(span.end for span in spans(trace))  # nothing from the beginning is still open
    assert [one[:2] for one in trace.rounds] == [(0, 0)]


def test_traces_within_each_other_see_what_happens_while_they_are_open():
    server = a_server()
    with fedcore.trace() as outer:
        server.round(updates(server))
        with fedcore.trace() as inner:
            server.round(updates(server))
        server.round(updates(server))
    assert (calls(outer)["open"], calls(inner)["open"]) == (3, 1)


def test_a_trace_may_go_on_and_within_itself_is_one():
    server = a_server()
    trace = fedcore.trace()
    for _ in range(2):
        with trace, trace:
            server.round(updates(server))
        server.round(updates(server))
    assert calls(trace)["open"] == 2
    seconds = trace.seconds
    assert trace.seconds == seconds


def test_a_span_that_began_before_or_ends_after_a_trace_is_not_in_it():
    server, within = a_server(), fedcore.trace()

    def halfway():
        yield updates(server)[0]
        with within:
            server.broadcast([0])
            within.__enter__()  # to be closed after the round

    with fedcore.trace() as around:
        server.round(halfway())
    within.__exit__(None, None, None)
    assert calls(around)["clients"] >= 1
    assert "clients" not in calls(within)
    assert calls(within)["finish"] == 1


def test_a_trace_can_be_read_while_it_is_open():
    server = a_server()
    with fedcore.trace() as trace:
        server.round(updates(server))
        assert calls(trace)["open"] == 1
        server.round(updates(server))
        assert calls(trace)["open"] == 2
        assert len(trace.rounds) == 2


def test_threads_that_add_take_turns_and_all_are_counted():
    server = a_server("FedAvg", clients=40)
    with fedcore.trace() as trace, server.open_round() as round:

        def add(first):
            for client in range(first, 40, 4):
                round.add(client, np.full(N, client, np.float32), steps=1)

        threads = [threading.Thread(target=add, args=(i,), name=f"adder {i}") for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert calls(trace)["add"] == calls(trace)["fold"] == 40
    assert len(trace.rounds) == 1
    (part,) = trace._recording.parts()
    assert {f"adder {i}" for i in range(4)} <= set(part.threads.values())


def test_a_long_trace_counts_all_and_keeps_the_first_spans():
    server = a_server("FedAvg")
    with fedcore.trace(timeline=50) as trace:
        while calls(trace).get("open", 0) < MANY // 5:
            server.round(updates(server))
    assert len(spans(trace)) == 50
    assert trace._recording.parts()[0].left_out > MANY
    assert 1 <= len(trace.rounds) < 10
    assert sum(one.calls for one in trace.phases) > 50


def test_tables():
    server = a_server()
    with fedcore.trace() as trace:
        server.round(updates(server))
    lines = str(trace).splitlines()
    assert lines[0].split() == ["phase", "calls", "time", "share", "moved", "GB/s"]
    assert [line.split("  ")[0] for line in lines[1:]] == [*[one.phase for one in trace.phases], "in all"]
    assert lines[-2].startswith("elsewhere")
    assert trace._repr_html_().count("<tr>") == len(lines)
    assert repr(trace).startswith("Trace(seconds=")
    assert "rounds=1" in repr(trace)
    assert trace.table(by_round=True).splitlines()[0].split()[:2] == ["round", "time"]
    with pytest.raises(PicklingError, match="save"):
        __import__("pickle").dumps(trace)


def test_a_trace_of_nothing():
    with fedcore.trace() as trace:
        pass
    assert [one.phase for one in trace.phases] == ["elsewhere"]
    assert trace.rounds == ()
    assert trace.table(by_round=True).split() == ["round", "time", "elsewhere"]
