"""Sweeps with trials in workers on Ray write the same folders as processes of this machine."""

import json
import signal
from contextlib import suppress

import psutil
import pytest
import torch

from fedcore.cli import main
from fedcore.errors import RangeError
from fedcore.sim.experiment import Sweep, executor, load_preset, run_sweep
from fedcore.sim.experiment.executor import RayTrials
from fedcore.sim.experiment.results import read, read_folder
from fedcore.sim.nets import REGISTRY

ROUNDS = 24
"""More rounds than a worker reports in one message, so that some are missing when the run stops."""
# The clients of the second method keep rows, which a copy must contain.
METHODS = 'algorithms=["MimiC", {name="SCAFFOLD", placement="client", label="SCAFFOLD"}]'
SMALL = [f"rounds={ROUNDS}", "evaluate.keep=8", "seeds=[0]", METHODS, "together=true", "local.epochs=1"]


def contents(folder):
    """The contents of all files, without the seconds and the engine."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            files[path.name] = [line | {"seconds": None} for line in lines]
        elif path.name == "build.json":
            files[path.name] = json.loads(path.read_text()) | {"engine": None}
        elif path.suffix == ".pt":  # Its bytes contain its first name.
            tensors = torch.load(path, weights_only=True)
            files[path.parent.name, path.name] = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        else:
            files[path.name] = path.read_bytes()
    return files


def workers():
    """The processes of this Ray's trials."""
    processes = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            processes += [child] if "".join(child.cmdline()[:1]).startswith("ray::TrialWorker") else []
    return processes


def rounds_of(events):
    return [(event.trial.order, event.round.round) for event in events if event.round is not None]


def test_an_interrupted_sweep_can_be_resumed_by_another_engine(ray_session, tmp_path, capsys):
    """A worker is lost, then Ctrl-C stops the sweep on Ray and later in this process; the command resumes both."""
    chosen = Sweep([load_preset("quickstart", SMALL)], folder := tmp_path / "run")
    on_ray = RayTrials(workers=1, checkpoint_seconds=0)
    straight = tmp_path / "straight"
    assert run_sweep(Sweep(chosen.experiments, straight), jobs=0) == []
    events = []

    def seen(event):
        events.append(event)
        if len(rounds_of(events)) == 3:
            for worker in workers():
                worker.send_signal(signal.SIGKILL)
        if rounds_of(events)[-1:] == [(1, 2)]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(chosen, runner=on_ray, on_event=seen)
    config = (folder / "quickstart" / "config.json").read_bytes()  # Before a resume changes it.
    assert rounds_of(events) == [*((0, round) for round in range(ROUNDS)), (1, 0), (1, 1), (1, 2)]
    second = folder / "quickstart" / "records" / "1-scaffold-seed0.jsonl"
    assert len(read(second).rounds) >= 3
    copied = (folder / "quickstart" / "checkpoints" / second.stem / "rows.slots").stat().st_mtime_ns

    def stopped(event):
        if rounds_of([event]) == [(1, ROUNDS - 2)]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(chosen, jobs=0, on_event=stopped)
    assert (folder / "quickstart" / "checkpoints" / second.stem / "rows.slots").stat().st_mtime_ns == copied
    words = [word for change in SMALL for word in ("--set", change)]
    main(["run", "quickstart", "--sweep", *words, "--backend", "ray", "--workers", "1", "--out", str(folder)])
    assert "SCAFFOLD" in capsys.readouterr().out
    assert not (folder / "quickstart" / "checkpoints").exists()
    expected, resumed = contents(straight / "quickstart"), contents(folder / "quickstart") | {"config.json": config}
    assert {name: resumed[name] for name in expected} == expected
    built = json.loads((folder / "quickstart" / "build.json").read_text())["engine"]
    assert built == {"name": "RayTrials", "workers": 1, "gpus": 0.0, "checkpoint_seconds": 0}


FAILING = '''
import os
from torch import nn
from fedcore.sim import nets


class Net(nn.Linear):
    def __init__(self, how):
        super().__init__(64, 10)
        self.how = how

    def forward(self, inputs):
        if self.training and self.how == "end":
            os._exit(3)
        if self.training and self.how == "raise":
            raise KeyError("made up")
        return super().forward(inputs)


def net(how: str = ""):
    """A net."""
    return nn.Sequential(nn.Flatten(), Net(how))


nets.REGISTRY["net that fails"] = net
'''


def test_failed_trials_and_lost_workers_do_not_stop_other_trials(ray_session, tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "MOST_TRIES", 2)
    monkeypatch.setitem(REGISTRY, "net that fails", REGISTRY["mlp"])  # So that the test's end removes it.
    own = tmp_path / "own_net_that_fails.py"
    own.write_text(FAILING)
    main(["list", "--import", str(own)])  # This process imports it too.
    experiments = []
    for how in ("raise", "end", "well"):
        preset = tmp_path / f"{how}.toml"
        preset.write_text(f'base = "quickstart"\nmodel = {{ name = "net that fails", how = "{how}" }}\n')
        experiments.append(load_preset(preset, ["rounds=2", "seeds=[0]", 'algorithms=["FedAvg"]', "together=false"]))
    events = []
    runner = RayTrials(workers=1)
    chosen = Sweep(experiments, tmp_path / "run")
    raised, ended = run_sweep(chosen, imports=[str(own)], runner=runner, on_event=events.append)
    assert [event.job.folder.name for event in events if event.over] == ["raise", "end", "well"]
    (log,) = (tmp_path / "run").rglob("*.traceback.txt")
    assert raised.error == f"KeyError: 'made up' (see {log})"
    assert "in forward" in log.read_text()
    assert ended.error.startswith("gave up after 2 lost workers: The actor")
    assert len(read_folder(tmp_path / "run" / "well")[0].rounds) == 2


def test_numbers_out_of_range_are_rejected():
    for wrong in ({"workers": 0}, {"gpus": -1.0}, {"checkpoint_seconds": float("nan")}):
        with pytest.raises(RangeError, match=rf"^{next(iter(wrong))}\b"):
            RayTrials(**wrong)
