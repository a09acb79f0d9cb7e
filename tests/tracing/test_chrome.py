"""The file of a trace is what chrome://tracing and Perfetto read, and is there as a whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import fedcore
from fedcore import tracing
from fedcore.errors import ConfigError
from fedcore.tracing import chrome
from fedcore.tracing.phases import PHASES
from tests.tracing.rounds import a_server, calls, updates

NUMBER = (int, float)


def saved(trace, path):
    trace.save(path)
    return json.loads(path.read_text())


def assert_is_in_the_format(content):
    """By "Trace Event Format" (Google, 2016): the JSON object form, metadata and complete events, which nest."""
    assert {"traceEvents", "displayTimeUnit", "otherData"} == content.keys()
    assert content["displayTimeUnit"] in ("ms", "ns")
    tracks, named = {}, set()
    for event in content["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            named.add((event["pid"], event["tid"] if event["name"] == "thread_name" else None))
        else:
            assert isinstance(event["cat"], str)
            assert isinstance(event["ts"], NUMBER)
            assert event["ts"] >= 0
            assert isinstance(event["dur"], NUMBER)
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for (process, thread), events in tracks.items():
        assert {(process, None), (process, thread)} <= named
        ends = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            ends = [end for end in ends if end > event["ts"] + 1e-6]
            assert all(event["ts"] + event["dur"] <= end + 1e-3 for end in ends)
            ends.append(event["ts"] + event["dur"])


def complete(content, kind):
    return [event for event in content["traceEvents"] if event["ph"] == "X" and event["cat"] == kind]


def test_the_file_is_in_the_format(tmp_path):
    server, other = a_server(), a_server("FedAvg")
    with fedcore.trace() as trace:
        for one in (server, other, server):
            one.broadcast(range(3))
            one.round(updates(one))
        thread = threading.Thread(target=lambda: other.round(updates(other)), name="another")
        thread.start()
        thread.join()
    content = saved(trace, tmp_path / "trace.json")
    assert_is_in_the_format(content)
    phases = complete(content, "phase")
    assert {event["name"] for event in phases} == set(calls(trace)) <= PHASES.keys()
    assert {(event["args"]["server"], event["args"]["round"]) for event in phases} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(event["args"]["function"].startswith("fedcore") for event in phases)
    assert {event["name"] for event in complete(content, "kernel")} >= {"accumulate", "exchange", "server_step"}
    (exchange,) = {event["args"]["bytes"] for event in phases if event["name"] == "exchange" and event["args"]["round"]}
    assert exchange > 0
    rounds = complete(content, "round")
    assert [event["name"] for event in rounds] == ["round 0", "round 0", "round 1", "round 1"]
    names = {event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"}
    assert {"MainThread", "another", "rounds of server 0", "rounds of server 1"} <= names
    assert content["otherData"] == {"seconds": trace.seconds, "spans left out": 0}


def test_a_kernel_s_event_lies_within_its_phase_s(tmp_path):
    server = a_server("FedAvg")
    with fedcore.trace() as trace:
        server.round(updates(server))
    content = saved(trace, tmp_path / "trace.json")
    (fold,) = [event for event in complete(content, "phase") if event["name"] == "fold"]
    (kernel,) = [event for event in complete(content, "kernel") if event["name"] == "accumulate"]
    assert fold["ts"] <= kernel["ts"]
    assert kernel["ts"] + kernel["dur"] <= fold["ts"] + fold["dur"]
    assert kernel["args"]["bytes"] == fold["args"]["bytes"]


def test_an_empty_trace_and_one_that_left_spans_out(tmp_path):
    with fedcore.trace() as nothing:
        pass
    assert_is_in_the_format(saved(nothing, tmp_path / "nothing.json"))
    with fedcore.trace(timeline=3) as trace:
        a_server().round([])
    content = saved(trace, tmp_path / "some.json")
    assert_is_in_the_format(content)
    assert content["otherData"]["spans left out"] > 0
    assert len(complete(content, "phase")) + len(complete(content, "kernel")) == 3


def test_processes_are_apart(tmp_path):
    """As a worker of the simulator sends what it has recorded."""
    code = (
        "import pickle, sys, fedcore; from tests.tracing.rounds import a_server, updates\n"
        "with fedcore.trace() as trace:\n"
        "    server = a_server(); server.round(updates(server)); server.round(updates(server))\n"
        "sys.stdout.buffer.write(pickle.dumps(trace.recorded()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
    server = a_server()
    with fedcore.trace() as trace:
        server.round(updates(server))
        tracing.absorb(__import__("pickle").loads(done.stdout))
    assert calls(trace)["finish"] == 3
    assert sorted(one[:2] for one in trace.rounds) in ([(0, 0), (0, 1), (1, 0)], [(0, 0), (1, 0), (1, 1)])
    content = saved(trace, tmp_path / "trace.json")
    assert_is_in_the_format(content)
    assert len({event["pid"] for event in content["traceEvents"]}) == 2


def test_where_nothing_can_be_written(tmp_path):
    with fedcore.trace() as trace:
        a_server().round([])
    with pytest.raises(ConfigError, match="path: cannot write to"):
        trace.save(tmp_path / "no" / "trace.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match="path: cannot write to"):
        trace.save(tmp_path / "folder.json")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_an_interrupted_writing_leaves_what_was_there(tmp_path, monkeypatch):
    path, written = tmp_path / "trace.json", []
    with fedcore.trace() as trace:
        a_server().round([])
    trace.save(path)
    before = path.read_bytes()

    def interrupted(event):
        written.append(event)
        if len(written) == 5:
            raise KeyboardInterrupt
        return "{}"

    monkeypatch.setattr(chrome.json, "dumps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trace.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_kill_in_the_midst_of_writing_leaves_no_half_file(tmp_path):
    path, server = tmp_path / "trace.json", a_server()
    with fedcore.trace() as trace:
        server.round(updates(server))
    trace.save(path)
    before, dumps, count = path.read_bytes(), json.dumps, 0

    def killed(event):
        nonlocal count
        count += 1
        if count == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return dumps(event)

    child = os.fork()
    if not child:
        chrome.json.dumps = killed
        trace.save(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == before
    trace.save(path)
    assert_is_in_the_format(json.loads(path.read_text()))


def test_the_numbers_of_events_are_plain(tmp_path):
    """NumPy's integers, as a caller may give a round's, are no JSON."""
    server = a_server()
    with fedcore.trace() as trace, server.open_round() as round:
        round.add(np.int64(0), server.x, steps=np.int64(1), round=np.int64(0))
    assert_is_in_the_format(saved(trace, tmp_path / "trace.json"))
