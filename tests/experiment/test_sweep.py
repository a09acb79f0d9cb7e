"""A sweep that was killed goes on, and ends as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fedcore.errors import ConfigError
from fedcore.experiment import Sweep, load_preset, run_sweep
from fedcore.experiment.results import read, read_folder, started
from fedcore.reports import write_overview

CHANGES = ["algorithms=['FedAvg', 'FedAvgM']", "rounds=3", "seeds=[0]", "local.epochs=1"]
GRID = "grid={'rate.lr'=[0.1, 0.2]}"


def timeless(folder):
    return {
        path.relative_to(folder): [
            (record.header, [replace(line, seconds={}) for line in record.rounds]) for record in read_folder(path)
        ]
        for path in sorted(config.parent for config in folder.rglob("config.json"))
    }


def test_every_point_is_a_run_of_its_own(tmp_path):
    experiment = load_preset("quickstart", [*CHANGES, GRID])
    assert run_sweep(Sweep([experiment], tmp_path), jobs=0) == []
    found = timeless(tmp_path)
    assert [str(path) for path in found] == ["quickstart/rate.lr=0.1", "quickstart/rate.lr=0.2"]
    assert all([header.algorithm for header, _ in records] == ["FedAvg", "FedAvgM"] for records in found.values())
    assert {line.lr for _, lines in found.popitem()[1] for line in lines} == {0.2}


def test_two_experiments_of_one_name_are_refused(tmp_path):
    """Files of two folders, say: one would be taken for the other, which is complete."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text('base = "quickstart"')
    both = [load_preset(tmp_path / folder / "mine.toml", CHANGES) for folder in ("a", "b")]
    with pytest.raises(ConfigError, match="mine: several experiments have this name"):
        run_sweep(Sweep(both, tmp_path / "runs"), jobs=0)
    assert not (tmp_path / "runs").exists()


def test_what_is_complete_is_not_run_again_and_more_can_be_added(tmp_path):
    run_sweep(Sweep([load_preset("quickstart", CHANGES)], tmp_path), jobs=0)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    assert len(files) == 2
    more = load_preset("quickstart", [*CHANGES, "seeds=[1]"])
    run_sweep(Sweep([more], tmp_path), jobs=0)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert [record.header.seed for record in read_folder(tmp_path / "quickstart")] == [0, 1, 0, 1]
    assert load_preset(tmp_path / "quickstart" / "config.json").seeds == (0, 1)


def test_what_is_complete_is_read_first(tmp_path):
    """Else a sweep that goes on would tell for hours that rounds are left which are there."""
    experiment, ended = load_preset("quickstart", [*CHANGES, "seeds=[0, 1]"]), []
    sweep = Sweep([experiment], tmp_path)
    run_sweep(sweep, jobs=0)
    first, second, *_ = sorted(tmp_path.rglob("*.jsonl"))
    first.unlink()
    second.write_text("{}\n{}\n")  # damaged: its own trial says so, when its turn comes
    failed = run_sweep(sweep, jobs=0, on_event=lambda event: ended.append(event) if event.over else None)
    names = [(event.trial.method.label, event.trial.seed) for event in ended]
    assert names == [("FedAvgM", 0), ("FedAvgM", 1), ("FedAvg", 0), ("FedAvg", 1)]
    assert [event.trial.file_name for event in failed] == [second.name]


@pytest.mark.parametrize("problem", [{}, {"participation.p": [0.1, 0.5]}], ids=["one", "two"])
def test_methods_of_fewer_keys_can_be_added_to_a_sweep_that_was_reported(tmp_path, problem):
    """Their points' folders are those in which others' lie, and have reports already."""
    keys = {"algorithms.beta": [0.2, 0.5]} | problem
    grid = "grid={" + ", ".join(f"'{key}'={values}" for key, values in keys.items()) + "}"
    run_sweep(Sweep([load_preset("quickstart", [*CHANGES[1:], "algorithms=['FedAvgM']", grid])], tmp_path), jobs=0)
    write_overview(tmp_path)
    both = load_preset("quickstart", [*CHANGES, grid])
    assert run_sweep(Sweep([both], tmp_path), jobs=0) == []
    reports = write_overview(tmp_path).reports
    assert len(reports) == (2 if problem else 1)
    assert all([row.algorithm for row in one.summary.rows] == ["FedAvg", "FedAvgM"] for one in reports.values())


def test_another_experiment_of_the_same_name_is_refused(tmp_path):
    run_sweep(Sweep([load_preset("quickstart", CHANGES)], tmp_path), jobs=0)
    with pytest.raises(ConfigError, match="take another folder"):
        run_sweep(Sweep([load_preset("quickstart", [*CHANGES, "local.batch=8"])], tmp_path), jobs=0)


def test_a_folder_that_was_being_made_is_made_again(tmp_path):
    half = tmp_path / "quickstart"
    (half / "records").mkdir(parents=True)
    (half / "build.json").write_text('{"engine": {}, "device": {}}')
    assert run_sweep(Sweep([load_preset("quickstart", CHANGES)], tmp_path), jobs=0) == []
    assert len(read_folder(half)) == 2


@pytest.mark.parametrize("name", ["build.json", "records/notes.jsonl"])
def test_a_file_of_the_user_s_is_neither_deleted_nor_replaced(tmp_path, name):
    file = tmp_path / "quickstart" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"years": "of work"}')
    with pytest.raises(ConfigError, match="move"):
        run_sweep(Sweep([load_preset("quickstart", CHANGES)], tmp_path), jobs=0)
    assert file.read_text() == '{"years": "of work"}'


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_a_killed_sweep_goes_on_with_the_same_command(tmp_path):
    settings = ["--seeds", "1", "--rounds", "25", "--set", "algorithms=['MimiC', 'FedAvgM']", "--set", GRID]
    command = [sys.executable, "-m", "fedcore", "run", "quickstart", *settings, "--workers", "1", "--out"]
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and sum(f.read_bytes().count(b"\n") for f in folder.rglob("*.jsonl")) < 32:
        time.sleep(0.02)  # until the first trial is complete and the second one is on its way
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    lengths = [len(read(path).rounds) for path in folder.rglob("*.jsonl") if started(path)]
    assert max(lengths) == 25
    assert min(lengths) < 25
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "MimiC" in done.stdout
    straight = tmp_path / "straight"
    run_sweep(Sweep([load_preset("quickstart", ["rounds=25", "seeds=[0]", settings[5], settings[7]])], straight))
    assert timeless(folder) == timeless(straight)
    assert len(timeless(folder)) == 2
    assert {path.name for path in folder.iterdir()} == {
        "quickstart",
        "overview.md",
        "overview.csv",
        "overview.html",
        "trials.csv",
    }


def test_pictures_are_no_part_of_what_is_compared(tmp_path):
    experiment = load_preset("quickstart", CHANGES)
    run_sweep(Sweep([experiment], tmp_path), jobs=0)
    config = tmp_path / "quickstart" / "config.json"
    tables = json.loads(config.read_text())
    del tables["pictures"]  # as it was written before there were any
    config.write_text(json.dumps(tables))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    other = load_preset("quickstart", [*CHANGES, "pictures.over=uploadings"])
    assert run_sweep(Sweep([other], tmp_path), jobs=0) == []
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert load_preset(config).pictures.over == "uploadings"


@pytest.mark.parametrize("place", ["quickstart", "quickstart/rate.lr=0.1"])
def test_a_link_in_the_place_of_a_run_is_not_written_through(tmp_path, place):
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    (shared / place).parent.mkdir(parents=True)
    victim.mkdir()
    (shared / place).symlink_to(victim)
    experiment = load_preset("quickstart", [*CHANGES, GRID])
    with pytest.raises(ConfigError, match="a link at"):
        run_sweep(Sweep([experiment], shared), jobs=0)
    assert list(victim.iterdir()) == []
