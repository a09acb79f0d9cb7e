"""Runs with clients on Ray have the records and configuration of runs in this process, and can be resumed there."""

import json
from dataclasses import replace
from functools import partial

import pytest

from fedcore.cli import main
from fedcore.sim.experiment import load_preset, run_experiment
from fedcore.sim.experiment.results import read, read_folder
from fedcore.sim.experiment.schema import trials
from fedcore.sim.experiment.trial import run_trial
from fedcore.sim.nets import REGISTRY
from fedcore.sim.ray_engine import Ray

SMALL = ["rounds=4", "seeds=[0]", 'algorithms=["FedAvg", "SCAFFOLD"]', "together=true"]


def figures(folder):
    return [[replace(line, seconds={}) for line in record.rounds] for record in read_folder(folder)]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "in process"
    assert run_experiment(load_preset("quickstart", SMALL), folder, jobs=0) == []
    return folder


def test_the_command_writes_the_same_records(ray_session, in_process, tmp_path, capsys):
    words = [word for change in SMALL for word in ("--set", change)]
    main(["run", "quickstart", *words, "--backend", "ray", "--workers", "1", "--out", str(tmp_path / "run")])
    assert "FedAvg" in capsys.readouterr().out
    assert figures(tmp_path / "run") == figures(in_process)
    engines = {"name": "Ray", "workers": 1, "gpus": 0.0}, {"name": "process"}
    files = []
    for folder, engine in zip((tmp_path / "run", in_process), engines, strict=True):
        build = json.loads((folder / "build.json").read_text())
        assert build.pop("engine") == engine
        files.append((build, json.loads((folder / "config.json").read_text())))
    assert files[0] == files[1]
    for line in read_folder(tmp_path / "run")[0].rounds:
        assert line.seconds["waited"] > 0
        assert line.seconds["local"] >= 0
    assert "waited" not in read_folder(in_process)[0].rounds[0].seconds


def test_another_engine_resumes_a_run(ray_session, in_process, tmp_path):
    class StoppedError(Exception):
        pass

    def stop(line):
        if line.round == 2:
            raise StoppedError

    trial = trials(load_preset("quickstart", SMALL))[1]
    on_ray = partial(Ray, workers=1)
    (tmp_path / "records").mkdir()
    with pytest.raises(StoppedError):
        run_trial(trial, tmp_path, stop, checkpoint_seconds=0)
    assert len(read(tmp_path / "records" / trial.file_name).rounds) == 3
    run_trial(trial, tmp_path, make_engine=on_ray)
    assert figures(tmp_path) == [figures(in_process)[1]]


def test_workers_import_the_same_modules(ray_session, tmp_path, capsys, monkeypatch):
    """The model's class is in a file that workers cannot import by name."""
    monkeypatch.setitem(REGISTRY, "net of a file", REGISTRY["mlp"])  # So that the test's end removes it.
    own = tmp_path / "own_net_of_a_file.py"
    own.write_text(
        "from torch import nn\n"
        "from fedcore.sim import nets\n\n\n"
        "class Net(nn.Sequential):\n"
        "    pass\n\n\n"
        "def net():\n"
        "    '''A net.'''\n"
        "    return Net(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))\n\n\n"
        "nets.REGISTRY['net of a file'] = net\n"
    )
    words = ["rounds=2", "seeds=[0]", 'algorithms=["MimiC"]', 'model={name="net of a file"}']
    changes = ["--import", str(own), *(word for change in words for word in ("--set", change))]
    main(["run", "quickstart", *changes, "--workers", "0", "--out", str(tmp_path / "here")])
    main(["run", "quickstart", *changes, "--backend", "ray", "--workers", "1", "--out", str(tmp_path / "there")])
    assert figures(tmp_path / "there") == figures(tmp_path / "here")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus-per-worker", "0.5"], "--gpus-per-worker"),
        (["--backend", "ray", "--workers", "0"], "--workers"),
        (["--backend", "ray", "--gpus-per-worker", "-1"], "--gpus-per-worker"),
        (["--backend", "dask"], "--backend"),
    ],
)
def test_wrong_options_are_rejected(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "quickstart", *words, "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
