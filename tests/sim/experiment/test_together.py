"""The choice of batched client training: measured, stored, and kept."""

import json

import pytest
from torch import nn

from fedcore.errors import ConfigError
from fedcore.sim import nets
from fedcore.sim.experiment import Sweep, load_preset, run_experiment, run_sweep, runner
from fedcore.sim.experiment.config import points
from tests.sim.experiment.kit import facts, rounds_in

CHANGES = ["rounds=2", "seeds=[0]", "algorithms=['FedAvg', 'MIFA']", "model='convolution'", "name='conv'"]


@pytest.fixture(autouse=True)
def convolution(monkeypatch):
    def make():
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 10))

    monkeypatch.setitem(nets.REGISTRY, "convolution", make)


@pytest.fixture
def measured(monkeypatch):
    """A fake measurement: its answer, and the number of its calls."""

    class Measurement:
        answer, calls = True, 0

        def __call__(self, *_):
            self.calls += 1
            return self.answer

    measurement = Measurement()
    monkeypatch.setattr(runner, "_fastest", measurement)
    return measurement


def conv(*more):
    return load_preset("quickstart", [*CHANGES, *more])


def test_run_stores_the_measured_choice(tmp_path):
    assert run_experiment(conv(), tmp_path, jobs=0) == []
    assert facts(tmp_path)["together"] in (True, False)
    assert {line.together for line in rounds_in(tmp_path)} == {facts(tmp_path)["together"]}


@pytest.mark.parametrize("found", [True, False])
def test_stored_choice_is_used_when_the_configuration_runs_again(tmp_path, measured, found):
    measured.answer = found
    assert run_experiment(conv(), tmp_path / "first", jobs=0) == []
    measured.answer = not found
    again = load_preset(tmp_path / "first" / "config.json")
    assert run_experiment(again, tmp_path / "again", jobs=0) == []
    assert rounds_in(tmp_path / "again") == rounds_in(tmp_path / "first")
    assert measured.calls == 1
    assert again.changes == conv().changes  # no result depends on it


def test_configured_choice_and_perceptrons_are_not_measured(tmp_path, measured, small):
    assert run_experiment(conv("together=false"), tmp_path, jobs=0) == []
    assert {line.together for line in rounds_in(tmp_path)} == {False}
    assert runner.choose_batching(small, tmp_path) == small
    assert not measured.calls


@pytest.mark.parametrize("found", [True, False])
def test_run_without_the_choice_resumes_with_that_of_its_records(tmp_path, measured, found):
    """Older versions stored it only in the records."""
    measured.answer = found
    assert run_experiment(conv(), tmp_path, jobs=0) == []
    expected = rounds_in(tmp_path)
    tables = facts(tmp_path)
    del tables["together"]
    (tmp_path / "config.json").write_text(json.dumps(tables))
    (tmp_path / "records" / "0-fedavg-seed0.jsonl").unlink()
    measured.answer = not found
    assert run_experiment(load_preset(tmp_path / "config.json"), tmp_path, resume=True, jobs=0) == []
    assert rounds_in(tmp_path) == expected
    assert facts(tmp_path)["together"] == found


def test_damaged_record_has_no_choice(tmp_path, measured):
    assert run_experiment(conv("together=false"), tmp_path, jobs=0) == []
    lines = (tmp_path / "records" / "0-fedavg-seed0.jsonl").read_text().split("\n")
    (tmp_path / "records" / "0-fedavg-seed0.jsonl").write_text("\n".join([lines[0], "damaged", *lines[2:]]))
    assert runner.choose_batching(conv(), tmp_path).together is False
    (tmp_path / "records" / "1-mifa-seed0.jsonl").write_text("")
    assert runner.choose_batching(conv(), tmp_path).together is True


def test_sweep_keeps_the_choice_of_each_folder(tmp_path, measured):
    experiment = conv("grid={'rate.lr'=[0.1, 0.2]}")
    assert run_sweep(Sweep([experiment], tmp_path), jobs=0) == []
    folders = [tmp_path / "conv" / point.name for point in points(experiment)]
    assert [facts(folder)["together"] for folder in folders] == [True, True]
    measured.answer = False
    more = experiment.model_copy(update={"seeds": (0, 1)})
    assert run_sweep(Sweep([more], tmp_path), jobs=0) == []
    assert {line.together for folder in folders for line in rounds_in(folder)} == {True}
    assert [facts(folder)["together"] for folder in folders] == [True, True]
    with pytest.raises(ConfigError, match="settings"):
        run_sweep(Sweep([conv("grid={'rate.lr'=[0.1, 0.2]}", "together=false")], tmp_path), jobs=0)
