"""An experiment in a program or a notebook: its results and its progress."""

from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

import fedcore.sim.experiment
from fedcore.errors import ConfigError
from fedcore.sim import data, nets
from fedcore.sim.experiment import Run, load_preset, load_results, run_experiment, runner
from tests.sim.experiment.kit import facts, records_in

SMALL = {"rounds": 2, "local": {"epochs": 1}, "algorithms": ["FedAvg", "MimiC"]}


def test_a_run_and_its_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    uniform = {"name": "Uniform", "k": 5}
    events, more = [], {"on_event": lambda event: events.append(event)}
    run = fedcore.sim.experiment.run("quickstart", seeds=2, participation=uniform, **more, **SMALL, **{"rate.lr": 0.3})
    assert sum(event.over for event in events) == 4
    assert "MimiC, seed 1: " in capsys.readouterr().out
    changes = ["rounds=2", "seeds=[0, 1]", "local.epochs=1", "algorithms=['FedAvg', 'MimiC']", "rate.lr=0.3"]
    experiment = load_preset("quickstart", [*changes, "participation={name='Uniform', k=5}"])
    run_experiment(experiment, tmp_path / "same", jobs=0)
    assert records_in(run.folder) == records_in(tmp_path / "same")
    assert run.folder.parent == tmp_path / "runs"
    assert run.frame.equals(load_results(run.folder))
    table = run.table()
    assert list(table["algorithm"]) == ["FedAvg", "MimiC"]
    parts = ("Quickstart", table["accuracy %"][1], " 0.3", str(run.folder))
    for text in (repr(run), run._repr_html_()):
        assert all(part in text for part in parts)
    (axes,) = run.plot("loss", band="se").axes
    assert [line.get_label() for line in axes.lines] == ["FedAvg", "MimiC"]
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    page = run.report()
    assert page == run.folder / "report.html"
    assert page.exists()
    more = fedcore.sim.experiment.run(run.folder / "config.json", out=run.folder, resume=True, progress=False, seeds=3)
    assert set(more.frame["seed"]) == {0, 1, 2}
    assert repr(Run(run.folder)).splitlines()[3:5] != repr(run).splitlines()[3:5]


def test_runs_within_a_second_have_their_own_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 2)))
    for name in ("", "-2", "-3"):
        (folder := runner.default_folder(load_preset("quickstart"))).mkdir(parents=True)
        assert folder == Path(f"runs/quickstart-20260102-000000{name}")


def test_a_run_that_fails_raises(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"rate\.lr: must be a number"):
        fedcore.sim.experiment.run("quickstart", rate={"lr": -1})
    with pytest.raises(ConfigError, match=r"evaluate\.metric: must be .*, got 'f1'; for another metric"):
        fedcore.sim.experiment.run("quickstart", evaluate={"metric": "f1"})
    with pytest.raises(ConfigError, match="grid: run"):
        fedcore.sim.experiment.run("quickstart", grid={"rate.lr": [0.1]})

    def fail(*arguments, **options):
        raise ValueError("no luck")

    monkeypatch.setattr("fedcore.sim.experiment.trial.run_trial", fail)
    with pytest.raises(ConfigError, match=r"FedAvg, seed 0: failed: .*no luck.*; 2 of 2 trials failed"):
        fedcore.sim.experiment.run("quickstart", out=tmp_path / "run", seeds=1, progress=False, **SMALL)
    failed = fedcore.sim.experiment.run("quickstart", out=tmp_path / "kept", seeds=1, check=False, **SMALL).failed
    assert [event.trial.method.label for event in failed] == ["FedAvg", "MimiC"]


def test_corrected_files_and_definitions_are_used(tmp_path, monkeypatch):
    file, hashes = tmp_path / "clients.csv", set()

    def load(columns: list[int], scale=1):
        x, clients = scale * np.eye(4, dtype=np.float32)[:, columns].repeat(3, 0), np.loadtxt(file, int)
        return data.from_arrays(x, clients % 2, x, clients % 2, clients=clients)

    own = {"data": {"name": "mine", "columns": [2, 0]}, "model": {"name": "own"}, "partition": {"name": "natural"}}
    for clients, scale in ((2, 1), (3, 1), (3, 2)):
        file.write_text("\n".join(str(row % clients) for row in range(12)))
        monkeypatch.setitem(data.REGISTRY, "mine", data.Source(partial(load, scale=scale), "", [2], 2))
        monkeypatch.setitem(nets.REGISTRY, "own", partial(nn.Linear, 2, 3))
        with pytest.raises(ConfigError, match="must have 2 outputs"):
            load_preset("quickstart", own)
        monkeypatch.setitem(nets.REGISTRY, "own", partial(nn.Linear, 2, 2))
        out = fedcore.sim.experiment.run("quickstart", out=tmp_path / f"{clients} {scale}", **own, **SMALL).folder
        assert facts(out)["partition"]["clients"] == clients
        hashes |= {header.data for header, _ in records_in(out).values()}
    assert len(hashes) == 3
