"""Files that are replaced as a whole; a link that somebody else has put in the folder leads nowhere."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fedcore import atomic_file
from fedcore.engines.keeping import written_whole
from fedcore.errors import ConfigError
from fedcore.experiment import load_preset
from fedcore.experiment.journal import FolderJournal
from fedcore.experiment.records import Header, Writer
from fedcore.experiment.run_folder import write_config
from fedcore.experiment.trial import Trial
from fedcore.model_files import write_model
from fedcore.reports.drawing import new_figure, save_figure
from fedcore.tracing import chrome

HEADER = Header("quickstart", "", "FedAvg", 0, 0, 1, "0")


def a_record(path):
    Writer(path, HEADER, []).close()


WRITERS = {
    "config.json": lambda path: write_config(path.parent, load_preset("quickstart")),
    "trial.jsonl": a_record,
    "rows-3.npz": lambda path: written_whole(path, a=np.zeros(3)),
    "model.npz": lambda path: write_model({"w": np.zeros(3, np.float32)}, path),
    "trace.json": lambda path: chrome.write(path, [], {}),
    "curves.png": lambda path: save_figure(new_figure(1, 1), path),
    "report.md": lambda path: atomic_file.write_text(path, "words"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_link_is_followed(tmp_path, name):
    victim, folder = tmp_path / "thesis.txt", tmp_path / "run"
    folder.mkdir()
    victim.write_text("years of work")
    path = folder / name
    links = [path, path.with_suffix(".draft"), path.with_suffix(".unfinished"), folder / f".{name}.{os.getpid()}"]
    for link in links:
        link.symlink_to(victim)
    WRITERS[name](path)
    assert victim.read_text() == "years of work"
    assert path.is_file()
    assert not path.is_symlink()
    assert len(list(folder.iterdir())) == len(links)


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(KeyError), atomic_file.replacing(path) as file:
        file.write("half")
        raise KeyError
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_its_mode_follows_the_umask(tmp_path):
    mask = os.umask(0o027)
    try:
        atomic_file.write_text(tmp_path / "file", json.dumps({}))
    finally:
        os.umask(mask)
    assert Path(tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["records", "checkpoints", "models", "checkpoints/0-fedavg-seed0"])
def test_a_run_s_folder_with_a_link_in_it_is_not_gone_on_with(tmp_path, name):
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(victim)
    experiment = load_preset("quickstart", ["algorithms=['FedAvg']"])
    with pytest.raises(ConfigError, match="a link"):
        FolderJournal(Trial(experiment, 0, 0), run)
    assert list(victim.iterdir()) == []
