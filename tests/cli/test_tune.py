"""``fedcore tune``: methods tuned on validation data, with other seeds than the experiment's."""

import json
import tomllib

import numpy as np
import pytest

from fedcore.errors import RangeError
from fedcore.sim import data
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.config import load_and_partition
from fedcore.sim.experiment.results import read_folder
from tests.cli.command import assert_rejected, invoke, output_of

FILE = """
base = "quickstart"
title = "Tuned"
rounds = 1
seeds = [3, 4]
algorithms = ["FedAvg", { name = "MimiC", rate = { lr = 0.4 } }]
[local]
epochs = 1
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(FILE)


def tune(*arguments, rates="0.001,0.1,0.2", folder="tuned"):
    return output_of("tune", "mine.toml", "--rates", rates, "--workers", 0, "--out", folder, *arguments)


def test_methods_are_tuned_and_the_printed_lines_are_a_configuration(tmp_path):
    output = tune("--seeds", 2, "--validation", 0.2)
    for rate in ("0.001", "0.1", "0.2"):
        records = read_folder(tmp_path / "tuned" / "mine" / f"rate.lr={rate}")
        assert [(r.header.algorithm, r.header.seed) for r in records] == [
            *(("FedAvg", 5), ("FedAvg", 6), ("MimiC", 5), ("MimiC", 6))
        ]
    config = json.loads((tmp_path / "tuned" / "mine" / "rate.lr=0.1" / "config.json").read_text())
    assert config["validation"] == 0.2
    lines = output[output.index("note = ") :]
    found = tomllib.loads(lines)
    assert "over rate.lr=0.001, 0.1, 0.2" in found["note"]
    assert "20 % of each client's training examples" in found["note"]
    (tmp_path / "final.toml").write_text(lines + '\nbase = "quickstart"\ntitle = "Final"\nrounds = 1\nseeds = [3]\n')
    final = load_preset("final.toml")
    assert final.validation is None
    assert [method.label for method in final.algorithms] == ["FedAvg", "MimiC"]
    output_of("run", "final.toml", "--workers", 0, "--out", "final")
    assert "over rate.lr=0.001, 0.1, 0.2" in (tmp_path / "final" / "table.md").read_text().replace("\\", "")


def test_the_printed_lines_have_the_changes_of_the_tuning(tmp_path):
    output = tune(
        "--seeds", 2, "--rounds", 2, "--set", "local.batch=7", "--set", "limits={max_norm=9.0}", rates="0.1,0.2"
    )
    assert "accuracy % (95 % interval)" in output
    found = tomllib.loads(output[output.index("note = ") :])
    assert "for 2 rounds" in found["note"]
    assert "local.batch" in found["note"]
    assert found["rounds"] == 2
    assert found["local"]["batch"] == 7
    assert found["limits"]["max_norm"] == 9
    (tmp_path / "final.toml").write_text(output[output.index("note = ") :] + '\nbase = "quickstart"\n')
    assert load_preset("final.toml").rounds == 2


def test_a_later_rate_and_method_run_beside_the_complete_ones(tmp_path):
    tune("--seeds", 1, "--only", "FedAvg", rates="0.1")
    before = {file: file.read_bytes() for file in tmp_path.rglob("records/*.jsonl")}
    output = tune("--seeds", 1, rates="0.1,0.2")
    after = {file: file.read_bytes() for file in tmp_path.rglob("records/*.jsonl")}
    assert len(before) == 1 < len(after) == 4
    assert all(after[file] == text for file, text in before.items())
    assert "MimiC" in output[output.index("algorithms = [") :]
    output = tune("--seeds", 1, "--only", "MimiC (lr=0.4)", rates="0.1,0.4")
    assert (
        "over rate.lr=0.1, 0.2 (FedAvg), rate.lr=0.1, 0.2, 0.4 (MimiC), for 1 rounds, on seed 5 and on 10 %" in output
    )


def test_options_of_the_grid_are_no_fixed_changes():
    few = "--seeds", 1, "--set", "algorithms=['FedAvgM']", "--set", "grid={'algorithms.beta'=[0.5, 0.8]}"
    output = output_of("tune", "mine.toml", *few, "--set", "local.batch=7", "--workers", 0, "--out", "tuned")
    assert "over beta=0.5, 0.8, for 1 rounds (with local.batch 16 -> 7), on seed 5" in output


def test_wrong_options_are_rejected(tmp_path):
    assert_rejected(invoke("tune", "mine.toml", "--only", "MIFA"), "--only")
    assert_rejected(invoke("tune", "mine.toml", "--rates", "0.1,x"), "--rates")
    for rates in ("0,0.1", "-0.1", "0.1,0.1"):
        assert_rejected(invoke("tune", "mine.toml", f"--rates={rates}"), "--rates")
    for share in (0, 1):
        assert_rejected(invoke("tune", "mine.toml", "--validation", share), f"--validation {share}: must be a share")
    assert_rejected(invoke("tune", "mine.toml", "--set", "grid={rounds=[1, 2]}"), "grid: rounds")
    assert not (tmp_path / "runs").exists()


def test_validation_examples_are_no_training_examples_and_depend_on_the_seed():
    plain, held = load_preset("quickstart"), load_preset("quickstart", ["validation=0.25"])
    (whole, parts), (dataset, rest) = (load_and_partition(one, 1) for one in (plain, held))
    out = [np.setdiff1d(part, own) for part, own in zip(parts, rest, strict=True)]
    assert [len(own) for own in out] == [round(0.25 * len(part)) for part in parts]
    assert np.array_equal(dataset.test_y, whole.train_y[np.concatenate(out)])
    assert np.array_equal(dataset.test_x, whole.train_x[np.concatenate(out)])
    assert all(np.array_equal(a, b) for a, b in zip(rest, load_and_partition(held, 1)[1], strict=True))
    other = data.hold_out(whole, parts, 0.25, seed=2)[1]
    assert not all(np.array_equal(a, b) for a, b in zip(rest, other, strict=True))
    with pytest.raises(RangeError, match="validation"):
        data.hold_out(whole, [part[:1] for part in parts], 0.5, seed=0)
