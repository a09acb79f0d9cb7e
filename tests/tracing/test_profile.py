"""``FEDCORE_PROFILE``, the simulator's workers, and ``fedcore run --profile``."""

import json
import os
import subprocess
import sys

import pytest

import fedcore
from fedcore.experiment import load_preset, run_experiment
from tests.cli.command import invoke
from tests.tracing.rounds import as_they_are, calls
from tests.tracing.test_chrome import assert_is_in_the_format

PROGRAM = """
import numpy as np, fedcore
def main():
    server = fedcore.Server("FedAvg", np.zeros(100, np.float32), clients=3, lr=0.1)
    for _ in range(4):
        server.round([fedcore.Update(i, server.x + i, steps=1) for i in range(3)])
"""


def run(code, cwd, *file, **environment):
    command = [sys.executable, *(file or ("-c", code))]
    whole = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, timeout=120)


def test_the_table_at_the_end_of_a_program(tmp_path):
    done = run(f"{PROGRAM}\nmain(); print('done')", tmp_path, FEDCORE_PROFILE="1")
    assert (done.returncode, done.stdout) == (0, "done\n")
    rows = {line.split("  ")[0]: line.split() for line in done.stderr.splitlines()}
    assert rows["open"][1] == rows["finish"][1] == "4"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["", "raise ValueError", "import sys; sys.exit(3)", "raise KeyboardInterrupt"])
def test_the_file_also_after_an_error(tmp_path, ending):
    done = run(f"{PROGRAM}\nmain()\n{ending}", tmp_path, FEDCORE_PROFILE="mine.json")
    assert (done.returncode == 0) == (not ending)
    assert f"wrote {tmp_path / 'mine.json'}" in done.stderr
    content = json.loads((tmp_path / "mine.json").read_text())
    assert_is_in_the_format(content)
    rounds = [event["name"] for event in content["traceEvents"] if event.get("cat") == "round"]
    assert rounds == ["round 0", "round 1", "round 2", "round 3"]


@pytest.mark.parametrize("value", ["", "0"])
def test_no_trace_where_none_is_asked_for(tmp_path, value):
    code = f"{PROGRAM}\nmain()\nfrom fedcore.tracing.spans import OPEN\nprint(OPEN.recorders)"
    done = run(code, tmp_path, FEDCORE_PROFILE=value)
    assert (done.stdout, done.stderr) == ("()\n", "")


def test_a_program_in_which_nothing_ran_says_nothing(tmp_path):
    done = run("import fedcore", tmp_path, FEDCORE_PROFILE="mine.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_another_value_is_refused(tmp_path):
    done = run("import fedcore", tmp_path, FEDCORE_PROFILE="yes")
    assert done.returncode == 1
    assert "FEDCORE_PROFILE: expected 1, or the path of a .json file to be written, got 'yes'" in done.stderr


def test_a_file_that_cannot_be_written_is_told_beside_the_table(tmp_path):
    done = run(f"{PROGRAM}\nmain()", tmp_path, FEDCORE_PROFILE="no/mine.json")
    assert done.returncode == 0
    assert done.stderr.startswith("phase")
    assert "error: FEDCORE_PROFILE: path: cannot write to" in done.stderr
    assert "Traceback" not in done.stderr


def test_forks_and_processes_of_multiprocessing_report_nothing(tmp_path):
    (tmp_path / "mine.py").write_text(
        f"{PROGRAM}\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing, os, sys\n"
        "    main()\n"
        "    if not os.fork():\n"
        "        main(); sys.exit()\n"
        "    os.wait()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=main)\n"
        "    process.start(); process.join(); assert process.exitcode == 0\n"
    )
    done = run(None, tmp_path, "mine.py", FEDCORE_PROFILE="mine.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("phase ") == done.stderr.count("wrote ") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"mine.json", "mine.py"}


@pytest.mark.parametrize("jobs", [0, 2])
def test_a_simulation_s_processes_are_part_of_the_trace(tmp_path, jobs):
    before = as_they_are()
    experiment = load_preset("quickstart", ["rounds=3", "seeds=[0]", "algorithms=['FedAvg', 'MIFA']"])
    with fedcore.trace() as trace:
        assert run_experiment(experiment, tmp_path / "run", jobs=jobs) == []
    assert as_they_are().items() >= before.items()
    done = calls(trace)
    assert done["open"] == done["finish"] == done["evaluate"] == 6
    assert done["train"] >= done["open"]
    assert [one[:2] for one in trace.rounds] == [(server, round) for server in (0, 1) for round in range(3)]
    assert all("evaluate" in [phase.phase for phase in one.phases] for one in trace.rounds)
    trace.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert_is_in_the_format(content)
    processes = {event["pid"] for event in content["traceEvents"] if event["ph"] == "X"}
    assert (os.getpid() in processes) == (jobs == 0)
    assert len(processes) == max(jobs, 1)


def test_an_untraced_simulation_sends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcore.experiment.worker.absorb", lambda _: pytest.fail("a worker was traced"))
    experiment = load_preset("quickstart", ["rounds=1", "seeds=[0]", "algorithms=['FedAvg']"])
    assert run_experiment(experiment, tmp_path / "run", jobs=1) == []


def test_fedcore_run_profile(tmp_path):
    arguments = ("run", "quickstart", "--rounds", 2, "--seeds", 1, "--jobs", 2, "--out", tmp_path / "run", "--profile")
    done = invoke(*arguments)
    assert done.status == 0, done.errors
    assert "train" in done.output
    assert f"wrote {tmp_path / 'run' / 'trace.json'}" in done.output.replace("\n", "")
    content = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert_is_in_the_format(content)
    assert sum(event.get("cat") == "round" for event in content["traceEvents"]) == 6
    assert invoke("report", tmp_path / "run").status == 0
