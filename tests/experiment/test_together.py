"""Whether clients are trained together: measured, written down, and kept."""

import json
from dataclasses import replace

import pytest
from torch import nn

from fedcore.errors import ConfigError
from fedcore.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.experiment import run_folder as together
from fedcore.experiment.presets import points
from fedcore.experiment.results import read_folder
from fedcore.simulation import nets

CHANGES = ["rounds=2", "seeds=[0]", "algorithms=['FedAvg', 'MIFA']", "model='convolution'", "name='conv'"]


@pytest.fixture(autouse=True)
def convolution(monkeypatch):
    def make():
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 10))

    monkeypatch.setitem(nets.REGISTRY, "convolution", make)


@pytest.fixture
def measured(monkeypatch):
    """What the measurement finds, which a test may choose; and how often it was asked."""

    class Measured:
        answer, asked = True, 0

        def __call__(self, *_):
            self.asked += 1
            return self.answer

    made = Measured()
    monkeypatch.setattr(together, "_fastest", made)
    return made


def conv(*more):
    return load_preset("quickstart", [*CHANGES, *more])


def config(folder):
    return json.loads((folder / "config.json").read_text())


def rounds(folder):
    return [replace(line, seconds={}) for record in read_folder(folder) for line in record.rounds]


def test_a_run_measures_and_says_what_it_found(tmp_path):
    assert run_experiment(conv(), tmp_path, jobs=0) == []
    assert config(tmp_path)["together"] in (True, False)
    assert {line.together for line in rounds(tmp_path)} == {config(tmp_path)["together"]}


@pytest.mark.parametrize("found", [True, False])
def test_its_configuration_runs_again_with_the_same_bits_whatever_is_measured_then(tmp_path, measured, found):
    measured.answer = found
    assert run_experiment(conv(), tmp_path / "first", jobs=0) == []
    measured.answer = not found
    again = load_preset(tmp_path / "first" / "config.json")
    assert run_experiment(again, tmp_path / "again", jobs=0) == []
    assert rounds(tmp_path / "again") == rounds(tmp_path / "first")
    assert measured.asked == 1
    assert again.changes == conv().changes  # no figure depends on it


def test_who_says_which_is_not_measured(tmp_path, measured):
    assert run_experiment(conv("together=false"), tmp_path, jobs=0) == []
    assert not measured.asked
    assert {line.together for line in rounds(tmp_path)} == {False}


def test_of_a_perceptron_nothing_is_measured_or_said(tmp_path, measured, small):
    assert together.settled(small, tmp_path) == small
    assert not measured.asked


@pytest.mark.parametrize("found", [True, False])
def test_a_run_without_the_choice_goes_on_as_its_records_say(tmp_path, measured, found):
    """As one that an older fedcore began."""
    measured.answer = found
    assert run_experiment(conv(), tmp_path, jobs=0) == []
    due = rounds(tmp_path)
    tables = config(tmp_path)
    del tables["together"]
    (tmp_path / "config.json").write_text(json.dumps(tables))
    (tmp_path / "records" / "0-fedavg-seed0.jsonl").unlink()
    measured.answer = not found
    assert run_experiment(load_preset(tmp_path / "config.json"), tmp_path, resume=True, jobs=0) == []
    assert rounds(tmp_path) == due
    assert config(tmp_path)["together"] == found


def test_a_damaged_record_says_nothing(tmp_path, measured):
    assert run_experiment(conv("together=false"), tmp_path, jobs=0) == []
    lines = (tmp_path / "records" / "0-fedavg-seed0.jsonl").read_text().split("\n")
    (tmp_path / "records" / "0-fedavg-seed0.jsonl").write_text("\n".join([lines[0], "damaged", *lines[2:]]))
    assert together.settled(conv(), tmp_path).together is False
    (tmp_path / "records" / "1-mifa-seed0.jsonl").write_text("")
    assert together.settled(conv(), tmp_path).together is True


def test_a_sweep_keeps_what_each_of_its_folders_says(tmp_path, measured):
    experiment = conv("grid={'rate.lr'=[0.1, 0.2]}")
    assert run_sweep(Sweep([experiment], tmp_path), jobs=0) == []
    folders = [tmp_path / "conv" / point.name for point in points(experiment)]
    assert [config(folder)["together"] for folder in folders] == [True, True]
    measured.answer = False
    more = experiment.model_copy(update={"seeds": (0, 1)})
    assert run_sweep(Sweep([more], tmp_path), jobs=0) == []
    assert {line.together for folder in folders for line in rounds(folder)} == {True}
    assert [config(folder)["together"] for folder in folders] == [True, True]
    with pytest.raises(ConfigError, match="has other settings"):
        run_sweep(Sweep([conv("grid={'rate.lr'=[0.1, 0.2]}", "together=false")], tmp_path), jobs=0)
