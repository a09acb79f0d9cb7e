"""Sweeps: their folders, additions, and resumption after a kill."""

import json
import os
import signal
import subprocess
import sys

import pytest

from fedcore.errors import ConfigError
from fedcore.sim.experiment import Sweep, load_preset, run_sweep
from fedcore.sim.experiment.results import read, read_folder, started
from fedcore.sim.reports import write_overview
from tests.cli.command import output_of
from tests.sim.experiment.kit import quick, records_in, sweep, wait_until, write_times

CHANGES = ["algorithms=['FedAvg', 'FedAvgM']", "rounds=3", "seeds=[0]"]
GRID = "grid={'rate.lr'=[0.1, 0.2]}"


def test_each_point_is_a_run(tmp_path):
    sweep(tmp_path, *CHANGES, GRID)
    found = records_in(tmp_path)
    assert {path.rpartition("/records/")[0] for path in found} == {"quickstart/rate.lr=0.1", "quickstart/rate.lr=0.2"}
    assert [header.algorithm for header, _ in found.values()] == ["FedAvg", "FedAvgM"] * 2
    _, (_, lines) = found.popitem()
    assert {line.lr for line in lines} == {0.2}


def test_experiments_of_the_same_name_are_rejected(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text('base = "quickstart"')
    both = [load_preset(tmp_path / folder / "mine.toml", CHANGES) for folder in ("a", "b")]
    with pytest.raises(ConfigError, match="mine: several experiments have this name"):
        run_sweep(Sweep(both, tmp_path / "runs"), jobs=0)
    assert not (tmp_path / "runs").exists()


def test_complete_trials_are_skipped_and_seeds_are_added(tmp_path):
    sweep(tmp_path, *CHANGES)
    files = write_times(tmp_path)
    assert len(files) == 2
    sweep(tmp_path, *CHANGES, "seeds=[1]")
    assert files.items() <= write_times(tmp_path).items()
    assert [record.header.seed for record in read_folder(tmp_path / "quickstart")] == [0, 1, 0, 1]
    assert load_preset(tmp_path / "quickstart" / "config.json").seeds == (0, 1)
    with pytest.raises(ConfigError, match="settings"):
        sweep(tmp_path, *CHANGES, "local.batch=8")


def test_complete_trials_are_read_first(tmp_path):
    """The progress of a resumed sweep must not count rounds that are complete."""
    sweep(tmp_path, *CHANGES, "seeds=[0, 1]")
    first, second, *_ = sorted(tmp_path.rglob("*.jsonl"))
    first.unlink()
    second.write_text("{}\n{}\n")  # damaged, which its trial reports when it runs
    ended = []
    again = Sweep([quick(*CHANGES, "seeds=[0, 1]")], tmp_path)
    failed = run_sweep(again, jobs=0, on_event=lambda event: ended.append(event) if event.over else None)
    names = [(event.trial.method.label, event.trial.seed) for event in ended]
    assert names == [("FedAvgM", 0), ("FedAvgM", 1), ("FedAvg", 0), ("FedAvg", 1)]
    assert [event.trial.file_name for event in failed] == [second.name]


@pytest.mark.parametrize("problem", [{}, {"participation.p": [0.1, 0.5]}], ids=["one", "two"])
def test_methods_of_fewer_keys_are_added_to_a_reported_sweep(tmp_path, problem):
    """Their folders contain those of the other points, and reports."""
    keys = {"algorithms.beta": [0.2, 0.5]} | problem
    grid = "grid={" + ", ".join(f"'{key}'={values}" for key, values in keys.items()) + "}"
    sweep(tmp_path, *CHANGES, "algorithms=['FedAvgM']", grid)
    write_overview(tmp_path)
    sweep(tmp_path, *CHANGES, grid)
    reports = write_overview(tmp_path).reports
    assert len(reports) == (2 if problem else 1)
    assert all([row.algorithm for row in one.summary.rows] == ["FedAvg", "FedAvgM"] for one in reports.values())


def test_folder_of_a_killed_prepare_is_reused(tmp_path):
    half = tmp_path / "quickstart"
    (half / "records").mkdir(parents=True)
    (half / "build.json").write_text('{"engine": {}, "device": {}}')
    sweep(tmp_path, *CHANGES)
    assert len(read_folder(half)) == 2


@pytest.mark.parametrize("name", ["build.json", "records/notes.jsonl"])
def test_file_of_the_user_is_not_replaced(tmp_path, name):
    file = tmp_path / "quickstart" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"years": "of work"}')
    with pytest.raises(ConfigError, match="move"):
        sweep(tmp_path, *CHANGES)
    assert file.read_text() == '{"years": "of work"}'


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_killed_sweep_resumes_with_the_same_command(tmp_path):
    methods = "algorithms=['MimiC', 'FedAvgM']"
    settings = ["--seeds", "1", "--rounds", "25", "--set", methods, "--set", GRID, "--set", "local.epochs=1"]
    folder = tmp_path / "killed"
    command = ["run", "quickstart", *settings, "--out", str(folder), "--workers"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-m", "fedcore", *command, "1"], **quiet, start_new_session=True) as process:
        # Wait until the first trial is complete and the second one has begun.
        wait_until(lambda: sum(file.read_bytes().count(b"\n") for file in folder.rglob("*.jsonl")) >= 32)
        os.killpg(process.pid, signal.SIGKILL)
    lengths = [len(read(path).rounds) for path in folder.rglob("*.jsonl") if started(path)]
    assert max(lengths) == 25
    assert min(lengths) < 25
    assert "MimiC" in output_of(*command, "0")
    sweep(tmp_path / "straight", "rounds=25", "seeds=[0]", methods, GRID)
    assert records_in(folder) == records_in(tmp_path / "straight")
    assert len(records_in(folder)) == 4
    files = {"quickstart", "overview.md", "overview.csv", "overview.html", "trials.csv"}
    assert {path.name for path in folder.iterdir()} == files


def test_pictures_may_change(tmp_path):
    sweep(tmp_path, *CHANGES)
    config = tmp_path / "quickstart" / "config.json"
    tables = json.loads(config.read_text())
    del tables["pictures"]  # as in older versions
    config.write_text(json.dumps(tables))
    files = write_times(tmp_path)
    sweep(tmp_path, *CHANGES, "pictures.over=uploadings")
    assert write_times(tmp_path) == files
    assert load_preset(config).pictures.over == "uploadings"


@pytest.mark.parametrize("place", ["quickstart", "quickstart/rate.lr=0.1"])
def test_link_instead_of_a_run_is_not_followed(tmp_path, place):
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    (shared / place).parent.mkdir(parents=True)
    victim.mkdir()
    (shared / place).symlink_to(victim)
    with pytest.raises(ConfigError, match="without links"):
        sweep(shared, *CHANGES, GRID)
    assert list(victim.iterdir()) == []
