"""One experiment on the CPU and on the emulated device: the same in every record, whatever stops it in between."""

import json
from dataclasses import replace

import pytest

from fedcore.errors import ConfigError
from fedcore.sim.experiment import load_preset, run_experiment
from fedcore.sim.experiment.results import read, read_folder
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import run_trial
from tests.cli.command import invoke

METHODS = ["FedAvg", "MIFA", "MimiC", "SCAFFOLDMVR"]


def quickstart(device, rounds=20):
    changes = [f"rounds={rounds}", f"algorithms={METHODS}", "seeds=[0]", "evaluate.every=5", f"server_device={device}"]
    return load_preset("quickstart", changes)


def timeless(record):
    return record.header, [replace(line, seconds={}) for line in record.rounds]


def test_20_rounds_have_the_same_bits_in_every_record(cuda_device, tmp_path):
    folders = [tmp_path / device for device in ("cpu", "cuda")]
    for folder in folders:
        assert run_experiment(quickstart(folder.name), folder, jobs=0) == []
    here, there = ([timeless(record) for record in read_folder(folder)] for folder in folders)
    assert [len(rounds) for _, rounds in here] == [20] * len(METHODS)
    assert there == here


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_a_stopped_trial_resumes_on_another_device(cuda_device, tmp_path, first):
    def stop(line):
        if line.round == 3:
            raise KeyboardInterrupt

    onward = "cuda" if first == "cpu" else "cpu"
    of = {device: Trial(quickstart(device, rounds=6), 2, 0) for device in ("cpu", "cuda")}
    run_trial(of["cpu"], tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run_trial(of[first], tmp_path / "moved", stop, checkpoint_seconds=0)
    run_trial(of[onward], tmp_path / "moved")
    straight, moved = (read(tmp_path / name / "records" / of["cpu"].file_name) for name in ("straight", "moved"))
    assert timeless(moved) == timeless(straight)


def test_a_device_is_no_other_experiment():
    assert quickstart("cuda").server_device == "cuda"
    assert quickstart("cuda").changes == quickstart("cpu").changes
    assert not {"device", "server_device"} & load_preset("quickstart").tables().keys()
    with pytest.raises(ConfigError, match="device"):
        quickstart("gpu")


def test_the_server_device_of_the_command_line(cuda_device, tmp_path):
    options = ["--rounds", 1, "--seeds", 1, "--workers", 0, "--server-device", "cuda:1"]
    assert invoke("run", "quickstart", *options, "--out", tmp_path / "run").status == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["server_device"] == "cuda:1"
