"""The models that a run keeps: those whose accuracy the records have."""

import re

import pytest
import torch

from fedcore.errors import ConfigError
from fedcore.experiment import load_preset, run_experiment
from fedcore.experiment.results import read
from fedcore.experiment.schema import Trial, trials
from fedcore.experiment.trial import build, run_trial
from fedcore.simulation import nets

KEPT = ["rounds=5", "seeds=[0]", "evaluate.keep=2", "local.epochs=1"]


def models(folder):
    """Trial -> round -> its state_dict."""
    found = {}
    for file in folder.glob("models/*/*.pt"):
        round = int(re.fullmatch(r"round(\d+)", file.stem)[1])
        found.setdefault(file.parent.name, {})[round] = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_model_every_so_many_rounds_and_the_last_one(tmp_path, jobs):
    experiment = load_preset("quickstart", [*KEPT, "algorithms=['FedAvg', 'MimiC']"])
    assert not any(event.error for event in run_experiment(experiment, tmp_path, jobs=jobs))
    found = models(tmp_path)
    for trial in trials(experiment):
        record, parts = read(tmp_path / "records" / trial.file_name), build(trial)
        kept = found.pop(trial.file_name.removesuffix(".jsonl"))
        assert sorted(kept) == [1, 3, 4]
        for round, tensors in kept.items():
            module = nets.build(experiment.model.name, seed=1, **experiment.model.options)
            module.load_state_dict(tensors)
            x = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
            assert parts.evaluate(round, x).accuracy == record.rounds[round].accuracy
    assert not found


def test_a_stopped_trial_keeps_the_same_models(tmp_path):
    trial = Trial(load_preset("quickstart", [*KEPT, "algorithms=['MIFA']"]), 0, 0)

    def stop(line):
        if line.round == 2:
            raise KeyboardInterrupt

    run_trial(trial, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run_trial(trial, tmp_path / "stopped", stop, checkpoint_seconds=0)
    (kept,) = models(tmp_path / "stopped").values()
    assert sorted(kept) == [1]
    run_trial(trial, tmp_path / "stopped")
    (straight,), (stopped,) = (models(tmp_path / name).values() for name in ("straight", "stopped"))
    assert straight.keys() == stopped.keys()
    for round, tensors in straight.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, stopped[round][name])


def test_without_it_there_are_none(tmp_path):
    run_trial(Trial(load_preset("quickstart", ["rounds=1", "local.epochs=1"]), 0, 0), tmp_path)
    assert not (tmp_path / "models").exists()


def test_nodes_have_no_one_model():
    with pytest.raises(ConfigError, match="keep: must be left out, since nodes have a model each"):
        load_preset("descent/nfsgd-star", ["evaluate.keep=1"])
