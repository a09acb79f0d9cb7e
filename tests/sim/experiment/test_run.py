"""Runs: events, failed trials, lost processes and missing data."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedcore import __version__
from fedcore.cluster.workers import Processes
from fedcore.errors import ConfigError, MissingDataError
from fedcore.sim.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.sim.experiment.executor import Ended, TrialWorker
from fedcore.sim.experiment.results import Header, RoundRecord, Writer, read_folder
from fedcore.sim.experiment.runner import prepare
from fedcore.sim.experiment.schema import trials
from tests.sim.experiment.kit import wait_until


def test_run_writes_all_trials_and_a_configuration(tmp_path, small):
    events = []
    assert run_experiment(small, tmp_path / "run", jobs=2, on_event=events.append) == []
    records = read_folder(tmp_path / "run")
    expected = [(method.label, seed) for method in small.algorithms for seed in small.seeds]
    assert [(record.header.algorithm, record.header.seed) for record in records] == expected
    assert all(len(record.rounds) == 2 for record in records)
    assert sum(event.round is not None for event in events) == 12
    assert sum(event.over for event in events) == 6
    assert load_preset(tmp_path / "run" / "config.json") == small
    assert {"fedcore", "torch", "numpy", "isa"} <= json.loads((tmp_path / "run" / "build.json").read_text()).keys()


def test_folder_with_other_files_is_rejected(tmp_path, small):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="must be new or empty"):
        run_experiment(small, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_trial_and_a_killed_process_do_not_affect_the_others(tmp_path, small):
    first, spoiled, *others = trials(small)
    record, killed = tmp_path / "records" / spoiled.file_name, []

    def spoil(event):
        record.mkdir(exist_ok=True)
        if not killed:
            (child,) = multiprocessing.active_children()
            killed.append(child.pid)
            os.kill(child.pid, signal.SIGKILL)

    failed = run_experiment(small, tmp_path, jobs=1, on_event=spoil)
    assert [event.trial for event in failed] == [first, spoiled]
    assert failed[0].error == "the worker's process ended with exit status -9"
    assert "expected a regular file" in failed[1].error
    record.rmdir()
    assert len([record for record in read_folder(tmp_path) if len(record.rounds) == 2]) == len(others)
    for trial in trials(small)[:2]:  # as left by a run that is killed after the last round
        (tmp_path / "checkpoints" / Path(trial.file_name).stem).mkdir(parents=True, exist_ok=True)
    assert run_experiment(small, tmp_path, resume=True, jobs=0) == []
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "build.json", "records"}


@pytest.mark.parametrize("jobs", [0, 1])
def test_an_error_of_on_event_ends_the_run(tmp_path, small, jobs):
    with pytest.raises(ZeroDivisionError):
        run_experiment(small, tmp_path, jobs=jobs, on_event=lambda event: event.round and 1 / 0)


def test_error_without_a_traceback_file(tmp_path, small):
    assert Ended("made up", "Traceback").logged(trials(small)[0], tmp_path / "nowhere") == Ended("made up")


def test_worker_of_a_killed_run_ends_without_a_traceback(tmp_path):
    (endless,) = trials(load_preset("quickstart", ["rounds=100000", "seeds=[0]", "algorithms=['FedAvg']"]))
    (tmp_path / "records").mkdir()
    processes = Processes()
    worker = processes.start(TrialWorker)
    assert processes.result(processes.submit(worker, "prepare", ())) == worker.process.pid
    begun = processes.submit(worker, "begin", endless, tmp_path, None)
    assert processes.result(begun)[0].round == 0
    processes.submit(worker, "proceed")
    worker.pipe.close()
    worker.process.join(60)
    assert worker.process.exitcode == 0
    assert [path.name for path in (tmp_path / "records").iterdir()] == [endless.file_name]


ENDLESS = """
import multiprocessing, sys
from pathlib import Path
from fedcore.sim.experiment import load_preset, run_experiment

def show(event):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)

if __name__ == "__main__":
    changes = ["rounds=2", "seeds=[0]", "algorithms=['FedAvg']", "local.epochs=500000"]
    run_experiment(load_preset("quickstart", changes), Path(sys.argv[1]), jobs=1, on_event=show)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("sent", [pytest.param(signal.SIGTERM, marks=pytest.mark.endurance), signal.SIGKILL])
def test_worker_ends_with_its_run_within_a_round(tmp_path, sent):
    program = tmp_path / "endless.py"
    program.write_text(ENDLESS)
    command = [sys.executable, str(program), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        worker = Path("/proc", process.stdout.readline().strip())
        wait_until(lambda: list((tmp_path / "run" / "records").glob("*.jsonl")), 60)
        process.send_signal(sent)
        process.wait(60)
        wait_until(lambda: not worker.exists() or "State:\tZ" in (worker / "status").read_text(), 60)


@pytest.fixture
def without_data(tmp_path, monkeypatch):
    """An experiment whose data is missing."""
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path / "data"))
    changes = ["data.name=mnist", "model.name=lenet", "rounds=2", "seeds=[0, 1]", "algorithms=['FedAvg', 'MIFA']"]
    return load_preset("quickstart", changes)


def test_missing_data_is_reported_before_anything_is_written(tmp_path, without_data):
    with pytest.raises(MissingDataError) as caught:
        run_experiment(without_data, tmp_path / "run")
    assert str(caught.value).startswith("mnist: expected train-images-idx3-ubyte.gz, ")
    fashion = load_preset("mimic/table3-tau20")
    with pytest.raises(MissingDataError) as caught:
        run_sweep(Sweep([without_data, fashion], tmp_path / "sweep"))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["mnist", "fashion-mnist"]
    assert list(tmp_path.iterdir()) == []


def test_complete_run_needs_no_data(tmp_path, without_data):
    prepare(tmp_path / "run", without_data)
    for trial in trials(without_data):
        header = Header("quickstart", without_data.title, trial.method.label, trial.order, trial.seed, 2, __version__)
        with Writer(tmp_path / "run" / "records" / trial.file_name, header) as record:
            for round in range(2):
                record.add(RoundRecord(round, [0], 1, 0, 0.5, None, 0.1, 0.1, 5, round + 1, 1.0, 8, {}))
    assert run_experiment(without_data, tmp_path / "run", resume=True, jobs=0) == []
    (tmp_path / "run" / "records" / trial.file_name).unlink()
    with pytest.raises(MissingDataError, match="mnist: expected"):
        run_experiment(without_data, tmp_path / "run", resume=True, jobs=0)


def test_notebook_shows_an_experiment_and_its_events(small, tmp_path):
    events = []
    run_experiment(small, tmp_path / "run", jobs=0, on_event=events.append)
    assert repr(events[0]) == "Event(job='FedAvg, seed 0')"
    assert repr(events[1]) == "Event(job='FedAvg, seed 0', round=0)"
    assert repr(events[3]) == "Event(job='FedAvg, seed 0', over=True)"
    html = small._repr_html_()
    assert html.startswith("<table><caption>Experiment</caption>")
    assert "<tr><td>algorithms</td><td>(&#x27;FedAvg&#x27;, &#x27;MIFA&#x27;, &#x27;MimiC&#x27;)</td></tr>" in html
