"""Records as a pandas frame, compared with the records themselves."""

import math
import shutil
import sys

import pytest

import fedcore
from fedcore.errors import MissingDataError, MissingDependencyError
from fedcore.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.experiment.results import read_folder

pandas = pytest.importorskip("pandas", reason="pandas is not installed")

SMALL = ["rounds=3", "seeds=[0, 4]", "local.epochs=1", "evaluate.every=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    run_experiment(load_preset("quickstart", [*SMALL, 'algorithms=["FedAvg", "MimiC"]']), folder, jobs=0)
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    changes = ['algorithms=["FedAvg", "FedAvgM"]', "grid={'rate.lr'=[0.1, 0.2], 'algorithms.beta'=[0.5, 0.7]}"]
    run_sweep(Sweep([load_preset("quickstart", [*SMALL, "seeds=[0]", *changes])], folder), jobs=0)
    return folder


def test_every_round_of_every_trial_is_a_row(run):
    frame = fedcore.experiment.read_records(run)
    records = read_folder(run)
    assert len(frame) == sum(len(record.rounds) for record in records) == 2 * 2 * 3
    lines = [(record, line) for record in records for line in record.rounds]
    for (_, row), (record, line) in zip(frame.iterrows(), lines, strict=True):
        whose = record.header
        assert (row["run"], row["preset"], row["algorithm"], row["seed"]) == (
            "",
            "quickstart",
            whose.algorithm,
            whose.seed,
        )
        for name in ("round", "heard", "refused", "lr", "gamma", "steps", "uploads", "bytes", "bytes_down", "together"):
            assert row[name] == getattr(line, name), name
        assert row["active"] == tuple(line.active)
        if line.accuracy is None:
            assert math.isnan(row["accuracy"])
            assert math.isnan(row["loss"])
        else:
            assert (row["accuracy"], row["loss"]) == (line.accuracy, line.loss)
        for part, seconds in line.seconds.items():
            assert row[f"seconds_{part}"] == seconds
    assert frame["accuracy"].isna().sum() == 4  # rounds 0 of four trials


def test_the_wait_for_workers_is_a_column(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    record = sorted((copy / "records").iterdir())[0]
    record.write_text(record.read_text().replace('"seconds": {', '"seconds": {"waited": 0.25, ', 1))
    assert fedcore.experiment.read_records(copy)["seconds_waited"].dropna().tolist() == [0.25]


def test_every_column_is_documented(run):
    said = fedcore.experiment.read_records.__doc__
    assert [name for name in fedcore.experiment.read_records(run).columns if f"``{name}``" not in said] == []


def test_a_sweep_s_settings_are_columns(sweep):
    frame = fedcore.experiment.read_records(sweep)
    trials = frame[["run", "algorithm", "rate.lr", "algorithms.beta"]].drop_duplicates()
    found = {tuple(row) for row in trials.astype(object).where(trials.notna(), None).itertuples(index=False)}
    assert found == {
        *((f"quickstart/rate.lr={lr}", "FedAvg", lr, None) for lr in (0.1, 0.2)),
        *((f"quickstart/rate.lr={lr},beta={b}", "FedAvgM", lr, b) for lr in (0.1, 0.2) for b in (0.5, 0.7)),
    }
    assert (frame["lr"] == frame["rate.lr"]).all()
    assert len(frame) == 6 * 3


def test_a_table_of_conditions_by_methods(sweep):
    """The docstring's example."""
    frame = fedcore.experiment.read_records(sweep)
    last = frame[frame["round"] == frame.groupby("run")["round"].transform("max")]
    table = last.pivot_table("accuracy", "rate.lr", "algorithm")
    assert list(table.columns) == ["FedAvg", "FedAvgM"]
    (plain,) = read_folder(sweep / "quickstart" / "rate.lr=0.2")
    assert table.loc[0.2, "FedAvg"] == plain.rounds[-1].accuracy
    both = [read_folder(sweep / "quickstart" / f"rate.lr=0.2,beta={beta}")[0] for beta in (0.5, 0.7)]
    assert table.loc[0.2, "FedAvgM"] == pytest.approx(sum(one.rounds[-1].accuracy for one in both) / 2)


def test_where_all_agree_there_is_no_column(run):
    assert not [name for name in fedcore.experiment.read_records(run).columns if "." in name]


def test_a_run_of_which_some_is_missing(sweep, tmp_path):
    """A point whose turn has not come, and a trial that was killed in the middle of a line."""
    folder = shutil.copytree(sweep, tmp_path / "sweep")
    shutil.rmtree(folder / "quickstart" / "rate.lr=0.1" / "records")
    (torn,) = (folder / "quickstart" / "rate.lr=0.2" / "records").iterdir()
    torn.write_bytes(torn.read_bytes()[:-10])
    frame = fedcore.experiment.read_records(folder)
    assert (frame["run"] != "quickstart/rate.lr=0.1").all()
    assert (frame["run"] == "quickstart/rate.lr=0.2").sum() == 2


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(MissingDataError, match="records"):
        fedcore.experiment.read_records(tmp_path)
    with pytest.raises(MissingDataError, match="nowhere"):
        fedcore.experiment.read_records(tmp_path / "nowhere")


def test_a_damaged_record_is_named(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    first = min((folder / "records").iterdir())
    first.write_text(first.read_text().replace('"heard"', '"herd"'))
    with pytest.raises(MissingDataError, match=rf"{first.name}.*line 2"):
        fedcore.experiment.read_records(folder)


def test_without_pandas_it_says_what_to_install(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match=r"fedcore-fl\[pandas\]"):
        fedcore.experiment.read_records(run)
