"""A run that was stopped goes on, and ends as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fedcore.errors import ConfigError
from fedcore.experiment import load_preset, run_experiment
from fedcore.experiment.folder import prepare
from fedcore.experiment.records import read, read_folder
from fedcore.experiment.trial import Trial, run_trial

METHODS = ["FedAvg", "MIFA", "MimiC", "SCAFFOLD", "FedAvgMVR", "SCAFFOLDMVR"]


def timeless(record):
    return [replace(line, seconds={}) for line in record.rounds]


def stopped_after(count):
    def on_round(line):
        if line.round == count:
            raise KeyboardInterrupt

    return on_round


@pytest.mark.parametrize("seconds", [0, 1e9], ids=["checkpoint every round", "none"])
@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_trial_goes_on_bit_for_bit(tmp_path, method, seconds):
    experiment = load_preset("quickstart", ["rounds=9", f"algorithms=['{method}']", "seeds=[0]"])
    trial = Trial(experiment, 0, 0)
    run_trial(trial, tmp_path / "straight")
    for stop in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            run_trial(trial, tmp_path / "stopped", stopped_after(stop), checkpoint_seconds=seconds)
    seen = []
    run_trial(trial, tmp_path / "stopped", seen.append, checkpoint_seconds=seconds)
    straight, stopped = (read(tmp_path / name / "records" / trial.file_name) for name in ("straight", "stopped"))
    assert timeless(stopped) == timeless(straight)
    assert [line.round for line in seen] == list(range(9))
    assert not list((tmp_path / "stopped" / "checkpoints").glob("*"))


def test_another_experiments_record_is_not_gone_on_with(tmp_path, small):
    run_trial(Trial(small, 0, 0), tmp_path)
    with pytest.raises(ConfigError, match="expected the record of"):
        run_trial(Trial(load_preset("quickstart", ["rounds=3", "seeds=[0, 1]"]), 0, 0), tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_a_killed_run_is_resumed_from_the_command_line(tmp_path):
    overrides = ["--rounds", "40", "--seeds", "0,", "--set", "algorithms=['MimiC', 'SCAFFOLD']"]
    command = [sys.executable, "-m", "fedcore", "run", "quickstart", *overrides, "--jobs", "2"]
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "--out", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    files = []
    while time.monotonic() < deadline and not (
        len(files) == 2 and all(file.read_bytes().count(b"\n") > 4 for file in files)
    ):
        time.sleep(0.02)
        files = list((folder / "records").glob("*.jsonl"))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert any(len(record.rounds) < 40 for record in read_folder(folder))
    resume = [sys.executable, "-m", "fedcore", "run", str(folder), "--resume"]
    done = subprocess.run(resume, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    prepare(tmp_path / "straight", experiment := load_preset(str(folder / "config.json"), []))
    run_experiment(experiment, tmp_path / "straight", resume=True, jobs=1)
    for killed, straight in zip(read_folder(folder), read_folder(tmp_path / "straight"), strict=True):
        assert timeless(killed) == timeless(straight)
        assert len(killed.rounds) == 40
    changed = subprocess.run([*resume, "--rounds", "50"], capture_output=True, text=True, timeout=60)
    assert changed.returncode != 0
    assert "a run goes on as it was begun" in changed.stderr.replace("\n", " ")
