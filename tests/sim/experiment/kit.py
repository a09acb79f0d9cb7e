"""Helpers of the tests of experiments."""

import json
import time
from dataclasses import replace
from functools import cache

import pytest

from fedcore.sim.data import Source, load
from fedcore.sim.experiment import Sweep, load_preset, run_sweep
from fedcore.sim.experiment.results import read, read_folder
from fedcore.sim.experiment.trial import run_trial

LION = "{name='tests.outsiders.house.mine.parts:Lion', eta=0.01}"
DECAY = "{name='tests.sim.experiment.test_additions:Cosine'}"
FEDAVG = ["rounds=2", "seeds=[0]", "algorithms=['FedAvg']", "local.epochs=1"]

UNTESTED = Source(lambda: replace(d := load("digits"), test_x=d.test_x[:0], test_y=d.test_y[:0]), "", (1, 8, 8), 10)
"""The digits without test examples."""


@cache
def preset(name):
    """A preset, loaded once: checking all of them takes seconds."""
    return load_preset(name)


def quick(*changes):
    """The quickstart with one local epoch."""
    return load_preset("quickstart", ["local.epochs=1", *changes])


def timeless(lines):
    """Rounds without their wall time, which differs between runs."""
    return [replace(line, seconds={}) for line in lines]


def records_in(folder):
    """Header and rounds of each record by path."""
    return {
        path.relative_to(folder).as_posix(): (record.header, timeless(record.rounds))
        for path in sorted(folder.rglob("*.jsonl"))
        for record in [read(path)]
    }


def facts(folder, name="config.json"):
    """A JSON file of a run."""
    return json.loads((folder / name).read_text())


def rounds_in(folder):
    """The rounds of all records of a run, without their wall time."""
    return timeless(line for record in read_folder(folder) for line in record.rounds)


def write_times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")}


def rounds_of(trial, folder):
    return read(folder / "records" / trial.file_name).rounds


def interrupt(trial, folder, round, seconds=0):
    """Run a trial until a round is recorded."""

    def stop(line):
        if line.round == round:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(trial, folder, stop, checkpoint_seconds=seconds)


def assert_resumes(trial, folder, stops, seconds=0, before_resume=lambda path: None):
    """An interrupted trial ends with the bits of an uninterrupted one; return the rounds that it reports."""
    run_trial(trial, folder / "straight")
    for stop in stops:
        interrupt(trial, folder / "interrupted", stop, seconds)
    before_resume(folder / "interrupted" / "records" / trial.file_name)
    reported = []
    run_trial(trial, folder / "interrupted", reported.append, checkpoint_seconds=seconds)
    assert records_in(folder / "interrupted") == records_in(folder / "straight")
    return reported


def sweep(folder, *changes):
    assert run_sweep(Sweep([quick(*changes)], folder), jobs=0) == []


def wait_until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
