"""Options of ``fedcore run`` that conflict or need others."""

import json
from dataclasses import replace

import pytest

from fedcore.sim.experiment.results import read_folder
from tests.cli.command import SMALL, assert_rejected, invoke, output_of


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run", "nosuch", "--resume"], "nosuch: not the folder of a run"),
        (["run", "quickstart", "--seeds", "-1"], "--seeds '-1': the count"),
        (["run", "quickstart", "--seeds", "0"], "--seeds '0': the count"),
        (["run", "quickstart", "quickstart", "mine", "--resume"], "--resume: does not work with several PRESETs"),
        (["run", "quickstart", "--resume", "--sweep"], "--resume: does not work with --sweep"),
        (["run", "quickstart", "--resume", "--scale", "quick"], "--resume: does not work with --scale"),
        (["run", "quickstart", "--ray-address", "auto"], "--ray-address: needs --backend ray"),
        (["run", "quickstart", "--gpus-per-worker", "1"], "--gpus-per-worker: needs --backend ray"),
        (["run", "quickstart", "--backend", "ray", "--workers", "0"], "--workers 0: must be at least 1 on Ray"),
        (["run", "quickstart", "--set", "rate.lr"], "override 'rate.lr': must be KEY=VALUE"),
        (["run", "quickstart", "--sweep", "--set", "grid=3"], "quickstart: grid: "),
        (["run", "quickstart", "--sweep", "--set", "pictures=3", "--set", "data.name='x'"], "pictures: "),
    ],
)
def test_conflicting_options_are_rejected(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*command)
    assert done.status == 2
    assert message in " ".join(done.errors.split())
    assert not list(tmp_path.iterdir())


def test_folder_of_a_run_needs_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output_of("run", "quickstart", *SMALL, "--out", "earlier")
    done = invoke("run", "earlier")
    assert done.status == 2
    assert all(hint in " ".join(done.errors.split()) for hint in ("--resume", "`fedcore report earlier`"))


def test_folder_named_like_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("quickstart", "again"):
        output_of("run", "quickstart", *SMALL, "--out", out)


def of_label(folder, label):
    """The rounds of the first seed, without what the test changes or the machine determines."""
    (one,) = (r for r in read_folder(folder) if (r.header.algorithm, r.header.seed) == (label, 0))
    return [replace(line, seconds={}, accuracy=0.5) for line in one.rounds]


def test_best_settings_of_a_sweep_run_with_more_seeds(tmp_path):
    sweep, final = tmp_path / "sweep", tmp_path / "final"
    methods = "algorithms=['FedAvg', {name='MIFA', wait=false, label='MIFA'}]"
    grid = "grid={'rate.lr'=[0.05, 0.2], 'rate.optimizer'=['SGD', 'Adam']}"
    changes = [methods, grid, "local.epochs=none", "local.steps=2", "local.clip=0.5"]
    options = [word for change in changes for word in ("--set", change)]
    output_of("run", "quickstart", "--rounds", "1", "--seeds", "1", "--workers", "0", *options, "--out", sweep)
    points = {"FedAvg": "rate.lr=0.2,rate.optimizer=SGD", "MIFA": "rate.lr=0.05,rate.optimizer=Adam"}
    for order, (label, point) in enumerate(points.items()):  # make these points the best ones
        path = sweep / "quickstart" / point / "records" / f"{order}-{label.lower()}-seed0.jsonl"
        header, line = path.read_text().splitlines()
        path.write_text(f"{header}\n{json.dumps(json.loads(line) | {'accuracy': 1.0})}\n")
    output_of("run", sweep, "--best", "--seeds", "2", "--workers", "0", "--out", final)
    assert [(one.header.algorithm, one.header.seed) for one in read_folder(final)] == [
        *(("FedAvg", 0), ("FedAvg", 1), ("MIFA", 0), ("MIFA", 1))
    ]
    for label, point in points.items():
        assert of_label(final, label) == of_label(sweep / "quickstart" / point, label)
    config = json.loads((final / "config.json").read_text())
    assert config["local"] == {"batch": 16, "steps": 2, "weight_decay": 0.0, "momentum": 0.0, "clip": 0.5}
    own = {"lr": {"name": "Constant", "value": 0.05}, "optimizer": {"name": "Adam"}}
    assert [one.get("rate") for one in config["algorithms"]] == [None, own]
    text = (final / "table.md").read_text().replace("\\", "")
    assert all(f"{label}: {point}, the best of 4 points" in text for label, point in points.items())
    assert "only these methods" in text
    assert_rejected(invoke("run", final, "--best"), "this is the folder of a run")
    assert_rejected(invoke("run", tmp_path / "nowhere", "--best"), "no records found")
