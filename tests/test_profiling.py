"""Profiles: times and bytes add up, results do not change, and the Chrome trace has a valid format."""

import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import fedcore
from fedcore import Compute, Network, Server, Update, algorithms, profiling
from fedcore.algorithms.optimizers import Adam
from fedcore.errors import ConfigError, RangeError
from fedcore.profiling import PHASES, span
from fedcore.sim.experiment import load_preset, run_experiment
from tests.cli.command import invoke
from tests.kills import ended
from tests.kit import in_threads, one_by_one
from tests.server.invariant import contradictions
from tests.server.stopping import a_round, check, expected, from_outside, line_by_line, stores, with_line
from tests.server.stopping import a_server as a_server_to_stop

N = 1000
NUMBER = (int, float)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")


def make_server(method="MIFA", clients=4, **options):
    return Server(np.zeros(N, np.float32), method, clients=clients, lr=0.1, **options)


def updates(server, count=3):
    return [Update(client, server.x + 1 + client, steps=1) for client in range(count)]


def calls(profile):
    """Calls by phase."""
    return {one.phase: one.calls for one in profile.phases if one.calls}


def bytes_of(profile):
    return {one.phase: one.bytes for one in profile.phases}


def spans(profile):
    """The spans of the timeline."""
    return [one for part in profile._parts() for one in part.spans()]


def saved(profile, path):
    profile.save(path)
    return json.loads(path.read_text())


def complete(content, kind):
    return [event for event in content["traceEvents"] if event["ph"] == "X" and event["cat"] == kind]


def assert_valid_trace(content):
    """The JSON object format of "Trace Event Format" (Google, 2016), with metadata and nested complete events."""
    assert {"traceEvents", "displayTimeUnit", "otherData"} == content.keys()
    assert content["displayTimeUnit"] in ("ms", "ns")
    tracks, named = {}, set()
    for event in content["traceEvents"]:
        assert event["ph"] in ("M", "X")
        for name, kind in {"name": str, "pid": int, "tid": int, "args": dict, "cat": str}.items():
            assert isinstance(event[name], kind)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            named.add((event["pid"], event["tid"] if event["name"] == "thread_name" else None))
        else:
            assert isinstance(event["ts"], NUMBER)
            assert isinstance(event["dur"], NUMBER)
            assert min(event["ts"], event["dur"]) >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for (process, thread), events in tracks.items():
        assert {(process, None), (process, thread)} <= named
        ends = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            ends = [end for end in ends if end > event["ts"] + 1e-6]
            assert all(event["ts"] + event["dur"] <= end + 1e-3 for end in ends)
            ends.append(event["ts"] + event["dur"])


def test_docstring_explains_every_phase():
    root = Path(fedcore.__file__).parent
    found = {
        name for file in root.rglob("*.py") for name in re.findall(r'\b(?:span|begin|timed)\("(\w+)"', file.read_text())
    }
    assert found == set(PHASES)
    table = fedcore.profile.__doc__.partition("====")[2].rpartition("====")[0]
    assert [phase for phase in PHASES if not re.search(rf"\b{phase}\b", table)] == []


def test_phases_of_a_round(tmp_path):
    rows = fedcore.ClientStore(4, N, medium="mmap", path=tmp_path / "rows")
    server = Server(
        np.zeros(N, np.float32), "MimiC", lr=0.1, storage=rows, optimizer=Adam(), compute=Compute(diagnostics=True)
    )
    with fedcore.profile() as profile, server:
        server.broadcast(range(3)).of(0)
        server.round(updates(server))
        one_by_one(server, updates(server))
        server.save(tmp_path / "copy")
    found = calls(profile)
    assert {
        "round": 2,
        "read": 4,
        "fold": 2,
        "step": 2,
        "diagnose": 2,
        "commit": 2,
        "publish": 2,
        "save": 1,
    }.items() <= found.items()
    assert {"broadcast", "validate"} <= found.keys()


def test_phases_of_a_network():
    W = np.full((3, 3), 1 / 3)
    network = Network([np.zeros(N, np.float32)] * 3, W, lr=0.1)
    with fedcore.profile() as profile:
        network.round([Update(node, np.full(N, node, np.float32), steps=1) for node in range(3)])
    assert calls(profile) == {"round": 1, "clients": 3, "read": 3, "fold": 3, "step": 1, "diagnose": 1}
    assert bytes_of(profile)["step"] == 2 * 3 * 4 * N
    assert [(one.server, one.round) for one in profile.rounds] == [(0, 0)]


def test_phases_of_shards():
    server = Server(np.zeros(40_000, np.float32), "FedAvg", clients=2, lr=0.1, compute=Compute(shards=2))
    with server, fedcore.profile() as profile:
        server.round([Update(client, np.ones(40_000, np.float32), steps=1) for client in range(2)])
    assert calls(profile)["gather"] > 1
    assert calls(profile)["fold"] == 2


def test_generated_updates_are_the_clients_phase():
    server = make_server(compute=Compute(batch_size=2))

    def slow():
        for update in updates(server, 4):
            time.sleep(0.01)
            yield update

    with fedcore.profile() as profile:
        server.round(slow())
    (clients,) = [one for one in profile.phases if one.phase == "clients"]
    assert clients.calls == 4
    assert clients.seconds >= 0.04


def test_bytes_of_read_and_written_arrays():
    server, mifa, k = make_server("FedAvg", compute=Compute(batch_size=8)), make_server("MIFA"), 3
    mifa.round(updates(mifa, k))
    with fedcore.profile() as profile:
        server.round(updates(server, k))
        fedcore.aggregate([{"w": np.ones(N, np.float32)}] * 2)
    assert bytes_of(profile)["fold"] == 4 * N * k + 4 * N + 4 * N  # three y, x, and the new sum
    assert bytes_of(profile)["step"] == 4 * 4 * N  # A and x, v and x'
    assert bytes_of(profile)["aggregate"] == 3 * 4 * N
    assert bytes_of(profile)["round"] == 0
    with fedcore.profile() as profile:
        mifa.round(updates(mifa, k))
    (fold,) = [one for one in profile.phases if one.phase == "fold"]
    assert fold.bytes == 3 * 4 * N * k + 4 * N + 2 * 8 * N  # y, old and new row; x; the float64 sum in and out
    assert fold.gigabytes_per_second == fold.bytes / fold.seconds / 1e9


@pytest.mark.parametrize("method", ["FedAvg", "MimiC", "SCAFFOLDM"])
def test_times_add_up_and_spans_nest(method):
    server = make_server(method)
    with fedcore.profile() as profile:
        for _ in range(5):
            server.broadcast(range(3))
            server.round(updates(server))
    phases = profile.phases
    assert sum(one.seconds for one in phases) == pytest.approx(profile.seconds)
    assert sum(one.seconds for one in phases if one.calls) <= profile.seconds
    assert sum(one.share for one in phases) == pytest.approx(1)
    assert all(one.seconds >= 0 for one in phases)
    for round in profile.rounds:
        assert sum(one.seconds for one in round.phases) == pytest.approx(round.seconds)
    assert sum(round.seconds for round in profile.rounds) <= profile.seconds
    assert sum(one.calls for round in profile.rounds for one in round.phases) == sum(one.calls for one in phases)
    ends = []
    for start, end in sorted((one[4:6] for one in spans(profile)), key=lambda times: (times[0], -times[1])):
        ends = [other for other in ends if other > start]
        assert all(end <= other for other in ends)
        ends.append(end)


def test_nested_server_has_its_own_rounds():
    outer, inner = make_server("FedAvg"), make_server("FedAvg")

    def regions():
        for client in range(3):
            inner.round(updates(inner))
            yield Update(client, inner.x, steps=1)

    with fedcore.profile() as profile:
        outer.round(regions())
    assert [(one.server, one.round) for one in profile.rounds] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert {one.phase: one.calls for one in profile.rounds[0].phases}["round"] == 1


def test_earlier_round_is_not_recorded(tmp_path):
    server = make_server()
    with fedcore.profile():
        server.round(updates(server))
    with fedcore.profile() as profile:
        server.save(tmp_path / "copy")
    assert calls(profile) == {"save": 1}
    assert profile.rounds == ()


def test_exception_closes_spans():
    server = make_server()
    with fedcore.profile() as profile:
        for _ in range(2):
            with suppress(ZeroDivisionError), server.open_round() as round:
                round.add(0, server.x, steps=1)
                raise ZeroDivisionError
        with suppress(Exception):
            server.round([Update("unknown", server.x, steps=1)])
        with suppress(ZeroDivisionError), span("save"), span("publish"):
            raise ZeroDivisionError
        with suppress(ZeroDivisionError):
            server.round(Update(0, server.x, steps=1 // 0) for _ in range(2))
        server.round(updates(server))
    assert (calls(profile)["save"], calls(profile)["publish"]) == (1, 1)
    assert [one for one in profiling._thread.running if one() is not None] == []
    assert [one[:2] for one in profile.rounds] == [(0, 0)]


def test_nested_and_repeated_profiles():
    server = make_server()
    with fedcore.profile() as outer:
        server.round(updates(server))
        with fedcore.profile() as inner:
            server.round(updates(server))
        assert calls(outer)["round"] == 2  # an open profile can be read
        server.round(updates(server))
    assert (calls(outer)["round"], calls(inner)["round"]) == (3, 1)
    again = fedcore.profile()
    for _ in range(2):
        with again, again:  # nested in itself
            server.round(updates(server))
        server.round(updates(server))
    assert calls(again)["round"] == 2
    assert again.seconds == again.seconds


def test_span_across_the_end_of_a_profile_is_not_recorded():
    server, within = make_server(), fedcore.profile()

    def halfway():
        yield updates(server)[0]
        with within:
            server.broadcast([0])
            within.__enter__()  # to be closed after the round

    with fedcore.profile() as around:
        server.round(halfway())
    within.__exit__(None, None, None)
    assert calls(around)["clients"] >= 1
    assert not {"clients"} & calls(within).keys()
    assert calls(within)["step"] == 1


def test_all_threads_are_recorded(tmp_path):
    server = make_server("FedAvg", clients=40)
    with fedcore.profile() as profile, server.open_round() as round:

        def adder(first):
            for client in range(first, 40, 4):
                round.add(client, np.full(N, client, np.float32), steps=1)

        in_threads(adder, range(4))
    assert (calls(profile)["read"], calls(profile)["fold"]) == (40, 1)
    assert len(profile.rounds) == 1
    content = saved(profile, tmp_path / "trace.json")
    assert_valid_trace(content)
    assert {f"adder {i}" for i in range(4)} <= {event["args"].get("name") for event in content["traceEvents"]}


def test_profiles_open_and_close_during_rounds():
    server, over, errors = make_server(), threading.Event(), []

    def rounds():
        try:
            while not over.is_set():
                server.round(updates(server))
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=rounds, daemon=True)
    worker.start()
    try:
        for _ in range(50):
            with fedcore.profile() as profile, fedcore.profile():
                time.sleep(0.001)
            assert sum(one.seconds for one in profile.phases if one.calls) <= profile.seconds
    finally:
        over.set()
        worker.join(60)
    assert not worker.is_alive()
    assert errors == []


def test_timeline_keeps_the_first_spans(tmp_path):
    server = make_server("FedAvg")
    with fedcore.profile(timeline=50) as profile:
        while calls(profile).get("round", 0) < 400:
            server.round(updates(server))
    assert len(spans(profile)) == 50
    assert 1 <= len(profile.rounds) < 20
    assert calls(profile) == {"round": 400, "read": 400, "fold": 400, "step": 400}
    content = saved(profile, tmp_path / "trace.json")
    assert_valid_trace(content)
    assert content["otherData"]["spans left out"] == 1600 - 50
    assert len(complete(content, "phase")) == 50


def test_invalid_timeline():
    with pytest.raises(RangeError, match="timeline"):
        fedcore.profile(timeline=-1)


def test_tables(tmp_path):
    with fedcore.profile() as profile:
        server = make_server()
        server.round(updates(server))
    lines = str(profile).splitlines()
    assert lines[0].split() == ["phase", "calls", "time", "share", "moved", "GB/s"]
    assert [line.split("  ")[0] for line in lines[1:]] == [*[one.phase for one in profile.phases], "in all"]
    assert lines[-2].startswith("elsewhere")
    assert repr(profile) == str(profile)
    assert profile.table(by_round=True).splitlines()[0].split()[:2] == ["round", "time"]
    with fedcore.profile() as nothing:
        pass
    assert [one.phase for one in nothing.phases] == ["elsewhere"]
    assert nothing.table(by_round=True).split() == ["round", "time", "elsewhere"]
    assert_valid_trace(saved(nothing, tmp_path / "nothing.json"))


def test_trace_file(tmp_path):
    server, other = make_server(), make_server("FedAvg")
    with fedcore.profile() as profile:
        for one in (server, other, server):
            one.broadcast(range(3))
            one.round(updates(one))
        with other.open_round() as round:  # NumPy numbers are not JSON
            round.add(np.int64(0), other.x, steps=np.int64(1), round=np.int64(1))
    content = saved(profile, tmp_path / "trace.json")
    assert_valid_trace(content)
    phases = complete(content, "phase")
    assert {event["name"] for event in phases} == set(calls(profile))
    assert {(event["args"]["server"], event["args"]["round"]) for event in phases} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert sum(event["args"].get("bytes", 0) for event in phases) == sum(one.bytes for one in profile.phases)
    rounds = complete(content, "round")
    assert sorted(event["name"] for event in rounds) == ["round 0", "round 0", "round 1", "round 1"]
    names = {event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"}
    assert {"MainThread", "rounds of server 0", "rounds of server 1"} <= names
    assert content["otherData"] == {"seconds": profile.seconds, "spans left out": 0}


def test_trace_file_that_cannot_be_written(tmp_path):
    with fedcore.profile() as profile:
        make_server().round([])
    (tmp_path / "folder.json").mkdir()
    for path in (tmp_path / "no" / "trace.json", tmp_path / "folder.json"):
        with pytest.raises(ConfigError, match="path"):
            profile.save(path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_recording_of_another_process(tmp_path):
    """A worker of the simulator sends its recording like this."""
    code = (
        "import pickle, sys, fedcore; from tests.test_profiling import make_server, updates\n"
        "with fedcore.profile() as profile:\n"
        "    server = make_server(); server.round(updates(server)); server.round(updates(server))\n"
        "sys.stdout.buffer.write(pickle.dumps(profile.recorded()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
    server = make_server()
    with fedcore.profile() as profile:
        server.round(updates(server))
        profiling.absorb(pickle.loads(done.stdout))
    assert calls(profile)["round"] == 3
    assert sorted(one[:2] for one in profile.rounds) in ([(0, 0), (0, 1), (1, 0)], [(0, 0), (1, 0), (1, 1)])
    content = saved(profile, tmp_path / "trace.json")
    assert_valid_trace(content)
    assert len({event["pid"] for event in content["traceEvents"]}) == 2


# Results are the same with and without a profile.


@pytest.mark.parametrize("method", sorted(algorithms.REGISTRY))
def test_profiled_run_has_the_same_bits(method):
    def run():
        options = {"clients": {0: 1, 1: 2, 2: 3, 3: 4}} if algorithms.named(method).needs_shares else {}
        server = make_server(method, **options)
        second = server.broadcast([0]).second
        for _ in range(3):
            x = server.broadcast(range(4)).x
            server.round([Update(i, x + 1 + i, steps=1, control=(x + i) if second else None) for i in range(4)])
        return server.x.tobytes(), server.v.tobytes()

    plain = run()
    with fedcore.profile():
        assert run() == plain


class Counted(np.ndarray):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def most_existing(server):
    """Return the maximum number of generated updates that exist at once."""
    existing, most = weakref.WeakSet(), 0

    def generate():
        nonlocal most
        for client in range(4):
            y = np.ones(N, np.float32).view(Counted)
            existing.add(y)
            most = max(most, len(existing))
            yield Update(client, y, steps=1)
            del y

    server.round(generate())
    return most


def test_no_array_is_kept():
    server = make_server("FedAvg")
    without_profile = most_existing(server)
    assert without_profile < 4
    with fedcore.profile() as profile:
        with server.open_round() as round:
            y = np.ones(N, np.float32)
            reference = weakref.ref(y)
            round.add(0, y, steps=1)
            del y
            assert reference() is None
        assert most_existing(server) == without_profile
        state = weakref.ref(server._backend)
        del server, round
        gc.collect()
        assert state() is None
    assert len(profile.rounds) == 2


@needs_fork
def test_fork_is_not_profiled():
    server = make_server()
    with fedcore.profile() as profile:
        child = os.fork()
        if not child:
            server.round(updates(server))
            with fedcore.profile() as own:
                server.round(updates(server))
            os._exit(0 if not calls(profile) and calls(own)["round"] == 1 else 1)
        assert os.waitstatus_to_exitcode(ended(child)) == 0
    assert calls(profile) == {}


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("medium", ["ram", "mmap"])
def test_interrupt_at_any_line_of_profiling(tmp_path, medium, stride):
    """The round is complete or rolled back, and its spans are closed."""
    places, ends = stores(tmp_path, medium), set()
    before, after = expected(lambda: a_server_to_stop("MIFA", next(places)), a_round)
    for run in line_by_line(from_outside, "fedcore/profiling", stride=stride):
        one = a_server_to_stop("MIFA", next(places))
        with fedcore.profile() as profile:
            run(a_round, one)
            with span("save"):
                pass
        assert contradictions(one) == []
        assert calls(profile)["save"] == 1
        last = spans(profile)[-1]
        assert last[6] == last[5] - last[4]
        assert not any(running() for running in profiling._thread.running)
        ends.add(check(one, before, after))
    assert ends == {False, True}


def test_signal_handler_aborts_a_round_and_reads_the_profile():
    server, tables = make_server("FedAvg"), []
    before = signal.getsignal(signal.SIGTERM)
    with fedcore.profile() as profile:
        round = server.open_round()
        signal.signal(signal.SIGTERM, lambda *_: (round.abort(), tables.append(profile.table())))
        try:
            with_line(
                lambda: round.add(0, server.x.astype(np.float64), steps=1),  # folded before add returns
                5,
                lambda: signal.raise_signal(signal.SIGTERM),
                room="fedcore/server/aggregation",
            )
        finally:
            signal.signal(signal.SIGTERM, before)
        server.round(updates(server))
    assert not round.is_open
    assert tables[0].startswith("phase")
    assert calls(profile)["round"] == 1


# FEDCORE_PROFILE, the simulator's workers, and ``fedcore run --profile``.

PROGRAM = """
import numpy as np, fedcore
def main():
    server = fedcore.Server(np.zeros(100, np.float32), "FedAvg", clients=3, lr=0.1)
    for _ in range(4):
        server.round([fedcore.Update(i, server.x + i, steps=1) for i in range(3)])
"""


def run(code, cwd, *file, **environment):
    command, env = [sys.executable, *(file or ("-c", code))], {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_table_at_the_end_of_a_program(tmp_path):
    done = run(f"{PROGRAM}\nmain(); print('done')", tmp_path, FEDCORE_PROFILE="1")
    assert (done.returncode, done.stdout) == (0, "done\n")
    rows = {line.split("  ")[0]: line.split() for line in done.stderr.splitlines()}
    assert rows["round"][1] == rows["fold"][1] == "4"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["", "raise ValueError", "import sys; sys.exit(3)", "raise KeyboardInterrupt"])
def test_trace_file_after_an_error(tmp_path, ending):
    done = run(f"{PROGRAM}\nmain()\n{ending}", tmp_path, FEDCORE_PROFILE="mine.json")
    assert (done.returncode == 0) == (not ending)
    assert f"wrote {tmp_path / 'mine.json'}" in done.stderr
    content = json.loads((tmp_path / "mine.json").read_text())
    assert_valid_trace(content)
    assert [event["name"] for event in complete(content, "round")] == ["round 0", "round 1", "round 2", "round 3"]


@pytest.mark.parametrize(
    ("value", "code"), [("", "main()"), ("0", "main()"), ("mine.json", "")], ids=["unset", "0", "nothing ran"]
)
def test_program_without_a_report(tmp_path, value, code):
    done = run(f"{PROGRAM}\n{code}", tmp_path, FEDCORE_PROFILE=value)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_invalid_value_of_the_variable(tmp_path):
    done = run("import fedcore", tmp_path, FEDCORE_PROFILE="yes")
    assert done.returncode == 1
    assert "FEDCORE_PROFILE=" in done.stderr


def test_error_of_the_file_follows_the_table(tmp_path):
    done = run(f"{PROGRAM}\nmain()", tmp_path, FEDCORE_PROFILE="no/mine.json")
    assert done.returncode == 0
    assert done.stderr.startswith("phase")
    assert "error: FEDCORE_PROFILE: path" in done.stderr
    assert "Traceback" not in done.stderr


@needs_fork
def test_child_processes_have_no_report(tmp_path):
    (tmp_path / "mine.py").write_text(
        f"{PROGRAM}\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing, os, sys\n"
        "    main()\n"
        "    if not os.fork():\n"
        "        main(); sys.exit()\n"
        "    os.wait()\n"
        "    for method in ('spawn', 'fork'):\n"
        "        process = multiprocessing.get_context(method).Process(target=main)\n"
        "        process.start(); process.join(); assert process.exitcode == 0\n"
    )
    done = run(None, tmp_path, "mine.py", FEDCORE_PROFILE="mine.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("phase ") == done.stderr.count("wrote ") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"mine.json", "mine.py"}


@pytest.mark.parametrize("jobs", [0, 2])
def test_profile_includes_worker_processes(tmp_path, jobs):
    experiment = load_preset("quickstart", ["rounds=3", "seeds=[0]", "algorithms=['FedAvg', 'MIFA']"])
    with fedcore.profile() as profile:
        assert run_experiment(experiment, tmp_path / "run", jobs=jobs) == []
    done = calls(profile)
    assert done["round"] == done["evaluate"] == 6
    assert done["train"] >= 6
    assert [one[:2] for one in profile.rounds] == [(server, round) for server in (0, 1) for round in range(3)]
    assert all("evaluate" in [phase.phase for phase in one.phases] for one in profile.rounds)
    content = saved(profile, tmp_path / "trace.json")
    assert_valid_trace(content)
    processes = {event["pid"] for event in content["traceEvents"] if event["ph"] == "X"}
    assert (os.getpid() in processes) == (jobs == 0)
    assert len(processes) == max(jobs, 1)


def test_workers_record_nothing_without_a_profile(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcore.sim.experiment.executor.absorb", lambda _: pytest.fail("a worker was profiled"))
    experiment = load_preset("quickstart", ["rounds=1", "seeds=[0]", "algorithms=['FedAvg']"])
    assert run_experiment(experiment, tmp_path / "run", jobs=1) == []


def test_fedcore_run_profile(tmp_path):
    words = ("run", "quickstart", "--rounds", 2, "--seeds", 1, "--workers", 0, "--profile")
    arguments = (*words, "--out", tmp_path / "run")
    done = invoke(*arguments)
    assert done.status == 0, done.errors
    assert "train" in done.output
    assert f"wrote {tmp_path / 'run' / 'trace.json'}" in done.output.replace("\n", "")
    content = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert_valid_trace(content)
    assert len(complete(content, "round")) == 6
    assert invoke("report", tmp_path / "run").status == 0


def test_phases_of_a_flower_strategy(tmp_path):
    pytest.importorskip("flwr")
    from tests.adapters.flower.federation import NODES, initial_arrays, make_app, make_data, make_strategy
    from tests.adapters.flower.local_grid import LocalGrid

    dataset, parts = make_data()
    grid = LocalGrid({node: (make_app(i, dataset, parts), {}) for i, node in enumerate(NODES)})
    with fedcore.profile() as profile:
        make_strategy("MIFA").start(grid, initial_arrays(), num_rounds=2)
    done = calls(profile)
    assert (done["round"], done["broadcast"]) == (2, 2)
    assert done["decode"] == done["read"] == done["wait"] == 2 * len(NODES)
    assert done["encode"] >= 4
    assert [one[:2] for one in profile.rounds] == [(0, 0), (0, 1)]
    assert_valid_trace(saved(profile, tmp_path / "trace.json"))
