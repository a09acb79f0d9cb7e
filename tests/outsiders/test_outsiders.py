"""Methods, patterns, data and models of a user's package, run by ``fedcore run``."""

import json
import os
import shutil
from pathlib import Path

import pytest

from fedcore.sim.experiment.results import read_folder
from tests.cli.command import invoke, output_of
from tests.kit import python
from tests.outsiders.test_registries import house  # noqa: F401, a fixture

HOUSE = Path(__file__).parent / "house"
NAMES = {
    "mine.methods:Accelerated": "Accelerated",
    "mine.data:clouds": "clouds",
    "mine.models:line": "line",
    "mine.patterns:OddAndEven": "OddAndEven",
}
ENTRY_POINTS = """
[fedcore.algorithms]
Accelerated = mine.methods:Accelerated
[fedcore.data]
clouds = mine.data:clouds
[fedcore.models]
line = mine.models:line
[fedcore.participation]
OddAndEven = mine.patterns:OddAndEven
"""


def fedcore(*words, path=(HOUSE,), folder="."):
    # Unlike `python -m`, the installed command does not put the working folder on the path.
    return python("-P", "-m", "fedcore", *words, cwd=folder, PYTHONPATH=os.pathsep.join(map(str, path)), COLUMNS="200")


def figures(folder):
    return {
        (record.header.algorithm, record.header.seed): [
            (line.active, line.accuracy, line.loss) for line in record.rounds
        ]
        for record in read_folder(folder)
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run by dotted names, in a separate process."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    fedcore("run", HOUSE / "experiment.toml", "--workers", 1, "--out", folder)
    return folder


def registered_file(folder):
    """Write the experiment with the names that an import or an entry point adds."""
    text = (HOUSE / "experiment.toml").read_text()
    for dotted, name in NAMES.items():
        text = text.replace(dotted, name)
    (folder / "short.toml").write_text(text)
    return folder / "short.toml"


def test_by_dotted_names_in_spawned_workers(straight):
    found = figures(straight)
    assert found.keys() == {(label, seed) for label in ("FedAvg", "Accelerated (lam=0.5)") for seed in (0, 1)}
    assert all(len(rounds) == 6 for rounds in found.values())
    assert found["FedAvg", 0] != found["Accelerated (lam=0.5)", 0]
    assert found["FedAvg", 0][0][0] == [1, 3]
    assert found["Accelerated (lam=0.5)", 0][-1][1] > 0.5


def cut_short(folder):
    """Cut a run's records as an interruption does: to headers, or headers and two rounds."""
    for kept, record in zip((1, 1, 3, 3), sorted((folder / "records").glob("*.jsonl")), strict=True):
        record.write_text("".join(record.read_text().splitlines(keepends=True)[:kept]))


def test_an_interrupted_run_resumes(straight, tmp_path, house):  # noqa: F811
    folder = shutil.copytree(straight, tmp_path / "run")
    cut_short(folder)
    output_of("run", folder, "--resume", "--workers", 0)
    assert figures(folder) == figures(straight)


def test_by_an_import_in_every_worker(straight, tmp_path, house):  # noqa: F811
    """A module is named first, and given as a file when the run resumes, which needs it too."""
    run = tmp_path / "run"
    fedcore("run", registered_file(tmp_path), "--import", "mine.registers", "--workers", 1, "--out", run)
    assert figures(run) == figures(straight)
    assert "unknown" in invoke("run", run, "--resume").errors
    cut_short(run)
    output_of("run", run, "--resume", "--import", HOUSE / "mine" / "registers.py", "--workers", 0)
    assert figures(run) == figures(straight)


def test_by_entry_points(straight, tmp_path):
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    path = (HOUSE, tmp_path)
    fedcore("run", registered_file(tmp_path), "--workers", 0, "--out", tmp_path / "run", path=path)
    assert figures(tmp_path / "run") == figures(straight)
    listed = fedcore("list", path=path).stdout
    assert all(name in listed for name in NAMES.values())
    assert "two clouds of points" in fedcore("list", "data", path=path).stdout


def test_modules_beside_the_configuration_are_found(tmp_path):
    """The path is empty, and the working folder is another one; each process of the run finds the modules."""
    shutil.copytree(HOUSE, tmp_path / "lab")
    words = ("--rounds", 1, "--seeds", 1, "--workers", 1, "--out", tmp_path / "run")
    fedcore("run", "lab/experiment.toml", *words, path=(), folder=tmp_path)
    assert [label for label, _ in figures(tmp_path / "run")] == ["FedAvg", "Accelerated (lam=0.5)"]


def test_a_report_of_a_folder_imports_nothing(straight, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("raise SystemExit('imported')")
    assert "Accelerated (lam=0.5)" in fedcore("report", straight, path=[tmp_path]).stdout


def test_in_a_notebook(tmp_path):
    """A program without a guard, whose class other processes cannot import: jobs=0 runs the trials in this process."""
    program = tmp_path / "cells.py"
    program.write_text(
        """
from pathlib import Path
import torch
from fedcore import algorithms, threads
from fedcore.sim.experiment import load_preset, run_experiment

class Mine(algorithms.MIFA):
    pass

before = torch.get_num_threads(), threads()
algorithms.REGISTRY["Mine"] = Mine
small = load_preset("quickstart", ["rounds=2", "seeds=[0]", 'algorithms=["MIFA", "Mine", "__main__:Mine"]',
                    'algorithms=[{name="MIFA"}, {name="Mine"}, {name="__main__:Mine", label="again"}]'])
events = []
assert run_experiment(small, Path("here"), jobs=0, on_event=events.append) == []
assert sum(event.over for event in events) == 3
assert (torch.get_num_threads(), threads()) == before
small = load_preset("quickstart", ["rounds=2", "seeds=[0]", 'algorithms=["Mine"]'])
failed = run_experiment(small, Path("apart"), jobs=1)
assert len(failed) == 1, failed
assert "__main__" in failed[0].error and "jobs=0" in failed[0].error, failed[0].error
print("done")
"""
    )
    ended = python(program, cwd=tmp_path)
    found = figures(tmp_path / "here")
    assert found["MIFA", 0] == found["Mine", 0] == found["again", 0]
    assert ended.stdout == "done\n", ended.stderr
    assert json.loads((tmp_path / "here" / "config.json").read_text())["algorithms"][1]["name"] == "Mine"
