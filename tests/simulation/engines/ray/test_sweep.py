"""Sweeps whose trials run in workers on Ray: the folder is the one that processes of this machine make."""

import json
import signal
from contextlib import suppress

import psutil
import pytest
import torch

from fedcore.cli import main
from fedcore.errors import RangeError
from fedcore.experiment import Sweep, executor, load_preset, run_sweep
from fedcore.experiment.executor import RayTrials
from fedcore.experiment.results import read, read_folder
from fedcore.simulation.nets import REGISTRY

ROUNDS = 24
"""More than a worker does between two messages, so that some are to come when the run is stopped."""
# The second one's clients keep rows of their own, which a copy has too.
METHODS = 'algorithms=["MimiC", {name="SCAFFOLD", placement="client", label="SCAFFOLD"}]'
SMALL = [f"rounds={ROUNDS}", "evaluate.keep=8", "seeds=[0]", METHODS, "together=true", "local.epochs=1"]


def contents(folder):
    """All files by their places, with the seconds taken out, and who did it."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[path.name] = [line | {"seconds": None} for line in lines]
        elif path.name == "build.json":
            found[path.name] = json.loads(path.read_text()) | {"engine": None}
        elif path.suffix == ".pt":  # in its bytes is the name that it was written under
            tensors = torch.load(path, weights_only=True)
            found[path.parent.name, path.name] = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        else:
            found[path.name] = path.read_bytes()
    return found


def workers():
    """The processes of this Ray's trials."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += [child] if "".join(child.cmdline()[:1]).startswith("ray::TrialWorker") else []
    return found


def rounds_of(events):
    return [(event.trial.order, event.round.round) for event in events if event.round is not None]


def test_what_is_killed_and_stopped_on_ray_and_in_process_ends_as_if_it_had_not_been(ray_session, tmp_path, capsys):
    """A worker is lost; then Ctrl-C, on Ray and in this process, which goes on; and the command goes on with that."""
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
    config = (folder / "quickstart" / "config.json").read_bytes()  # before there is anything to go on with
    assert rounds_of(events) == [*((0, round) for round in range(ROUNDS)), (1, 0), (1, 1), (1, 2)]  # each was told once
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
    due, got = contents(straight / "quickstart"), contents(folder / "quickstart") | {"config.json": config}
    assert {name: got[name] for name in due} == due
    built = json.loads((folder / "quickstart" / "build.json").read_text())["engine"]
    assert built == {"name": "RayTrials", "workers": 1, "gpus": 0.0, "checkpoint_seconds": 0}


FAILING = '''
import os
from torch import nn
from fedcore.simulation import nets


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


def test_trials_that_fail_and_that_end_their_workers_stop_no_others(ray_session, tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "MOST_TRIES", 2)
    monkeypatch.setitem(REGISTRY, "net that fails", None)  # the file sets it; the test's end removes it
    own = tmp_path / "own_net_that_fails.py"
    own.write_text(FAILING)
    main(["list", "--import", str(own)])  # imports it here too
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
    assert ended.error.startswith("2 workers ended while they ran it: The actor")
    assert len(read_folder(tmp_path / "run" / "well")[0].rounds) == 2


def test_numbers_out_of_range():
    for wrong in ({"workers": 0}, {"gpus": -1.0}, {"checkpoint_seconds": float("nan")}):
        with pytest.raises(RangeError, match=rf"^{next(iter(wrong))}\b"):
            RayTrials(**wrong)
