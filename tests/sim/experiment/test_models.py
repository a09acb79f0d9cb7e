"""The models that a run keeps have the recorded accuracy."""

import re

import pytest
import torch

from fedcore.sim import nets
from fedcore.sim.experiment import load_preset, run_experiment
from fedcore.sim.experiment.schema import Trial, trials
from fedcore.sim.experiment.trial import build, run_trial
from tests.sim.experiment.kit import assert_resumes, quick, rounds_of

KEPT = ["rounds=5", "seeds=[0]", "evaluate.keep=2", "local.epochs=1"]


def models(folder):
    """The state_dicts by trial and round."""
    found = {}
    for file in folder.glob("models/*/*.pt"):
        round = int(re.fullmatch(r"round(\d+)", file.stem)[1])
        found.setdefault(file.parent.name, {})[round] = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("jobs", [0, pytest.param(1, marks=pytest.mark.endurance)])
def test_models_of_every_second_round_and_the_last(tmp_path, jobs):
    experiment = load_preset("quickstart", [*KEPT, "algorithms=['FedAvg', 'MimiC']"])
    assert run_experiment(experiment, tmp_path, jobs=jobs) == []
    found = models(tmp_path)
    for trial in trials(experiment):
        parts, lines = build(trial), rounds_of(trial, tmp_path)
        kept = found.pop(trial.file_name.removesuffix(".jsonl"))
        assert sorted(kept) == [1, 3, 4]
        for round, tensors in kept.items():
            module = nets.build(experiment.model.name, seed=1, **experiment.model.options)
            module.load_state_dict(tensors)
            x = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
            assert parts.evaluate(round, x).accuracy == lines[round].accuracy
    assert not found


def test_interrupted_trial_keeps_the_same_models(tmp_path):
    def check(_):
        (kept,) = models(tmp_path / "interrupted").values()
        assert sorted(kept) == [1]

    trial = Trial(load_preset("quickstart", [*KEPT, "algorithms=['MIFA']"]), 0, 0)
    assert_resumes(trial, tmp_path, [2], before_resume=check)
    (straight,), (resumed,) = (models(tmp_path / name).values() for name in ("straight", "interrupted"))
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


def test_no_models_by_default(tmp_path):
    run_trial(Trial(quick("rounds=1"), 0, 0), tmp_path)
    assert not (tmp_path / "models").exists()
