"""Results as a pandas frame, compared with the records."""

import math
import shutil
import sys

import pytest

from fedcore.errors import MissingDataError, MissingDependencyError
from fedcore.sim.experiment import load_results, run_experiment
from fedcore.sim.experiment.results import read_folder
from tests.sim.experiment import kit

pandas = pytest.importorskip("pandas", reason="pandas is not installed")

SMALL = ["rounds=3", "seeds=[0, 4]", "evaluate.every=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    run_experiment(kit.quick(*SMALL, 'algorithms=["FedAvg", "MimiC"]'), folder, jobs=0)
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    changes = ['algorithms=["FedAvg", "FedAvgM"]', "grid={'rate.lr'=[0.1, 0.2], 'algorithms.beta'=[0.5, 0.7]}"]
    kit.sweep(folder, *SMALL, "seeds=[0]", *changes)
    return folder


def test_each_round_of_each_trial_is_a_row(run):
    frame = load_results(run)
    lines = [(record.header, line) for record in read_folder(run) for line in record.rounds]
    assert len(frame) == len(lines) == 2 * 2 * 3
    for (_, row), (header, line) in zip(frame.iterrows(), lines, strict=True):
        trial = ("", "quickstart", header.algorithm, header.seed)
        assert (row["run"], row["preset"], row["algorithm"], row["seed"]) == trial
        for name in ("round", "heard", "refused", "lr", "gamma", "steps", "uploads", "bytes", "bytes_down", "together"):
            assert row[name] == getattr(line, name), name
        assert row["active"] == tuple(line.active)
        for name in ("accuracy", "loss"):
            value = getattr(line, name)
            assert math.isnan(row[name]) if value is None else row[name] == value
        for part, seconds in line.seconds.items():
            assert row[f"seconds_{part}"] == seconds
    assert frame["accuracy"].isna().sum() == 4  # round 0 of four trials
    assert not [name for name in frame.columns if "." in name]  # all trials have the same settings
    assert [name for name in frame.columns if f"``{name}``" not in load_results.__doc__] == []


def test_wait_for_workers_is_a_column(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    record = sorted((copy / "records").iterdir())[0]
    record.write_text(record.read_text().replace('"seconds": {', '"seconds": {"waited": 0.25, ', 1))
    assert load_results(copy)["seconds_waited"].dropna().tolist() == [0.25]


def test_settings_of_a_sweep_are_columns(sweep):
    frame = load_results(sweep)
    trials = frame[["run", "algorithm", "rate.lr", "algorithms.beta"]].drop_duplicates()
    assert {tuple(row) for row in trials.astype(object).where(trials.notna(), None).itertuples(index=False)} == {
        *((f"quickstart/rate.lr={lr}", "FedAvg", lr, None) for lr in (0.1, 0.2)),
        *((f"quickstart/rate.lr={lr},beta={b}", "FedAvgM", lr, b) for lr in (0.1, 0.2) for b in (0.5, 0.7)),
    }
    assert (frame["lr"] == frame["rate.lr"]).all()
    assert len(frame) == 6 * 3
    # The example of the docstring.
    last = frame[frame["round"] == frame.groupby("run")["round"].transform("max")]
    table = last.pivot_table("accuracy", "rate.lr", "algorithm")
    assert list(table.columns) == ["FedAvg", "FedAvgM"]
    (plain,) = read_folder(sweep / "quickstart" / "rate.lr=0.2")
    assert table.loc[0.2, "FedAvg"] == plain.rounds[-1].accuracy
    both = [read_folder(sweep / "quickstart" / f"rate.lr=0.2,beta={beta}")[0] for beta in (0.5, 0.7)]
    assert table.loc[0.2, "FedAvgM"] == pytest.approx(sum(one.rounds[-1].accuracy for one in both) / 2)


def test_incomplete_sweep(sweep, tmp_path):
    folder = shutil.copytree(sweep, tmp_path / "sweep")
    shutil.rmtree(folder / "quickstart" / "rate.lr=0.1" / "records")  # not begun
    (torn,) = (folder / "quickstart" / "rate.lr=0.2" / "records").iterdir()
    torn.write_bytes(torn.read_bytes()[:-10])
    frame = load_results(folder)
    assert (frame["run"] != "quickstart/rate.lr=0.1").all()
    assert (frame["run"] == "quickstart/rate.lr=0.2").sum() == 2


def test_folder_without_a_run_or_with_damage_is_rejected(run, tmp_path):
    for folder, message in ((tmp_path, "records"), (tmp_path / "nowhere", "nowhere")):
        with pytest.raises(MissingDataError, match=message):
            load_results(folder)
    folder = shutil.copytree(run, tmp_path / "run")
    first = min((folder / "records").iterdir())
    first.write_text(first.read_text().replace('"heard"', '"herd"'))
    with pytest.raises(MissingDataError, match=rf"{first.name}.*line 2"):
        load_results(folder)


def test_error_without_pandas(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match=r"fedcore-fl\[pandas\]"):
        load_results(run)
