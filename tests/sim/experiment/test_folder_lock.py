"""Two processes or calls never run trials in one folder."""

import os
import signal
from contextlib import contextmanager

import pytest

from fedcore.cli.app import main
from fedcore.errors import ConfigError, LockedError, MissingDataError
from fedcore.sim.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.sim.experiment.results import read_folder
from fedcore.sim.experiment.runner import folder_lock
from tests.sim.experiment.kit import FEDAVG

LOCKED = "is in use by another run"


def small(*changes):
    return load_preset("quickstart", [*FEDAVG, *changes])


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@contextmanager
def forked(body):
    """A child process that runs a function and then waits for its end."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(3)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_running_run_is_locked(tmp_path):
    folder, rejected = tmp_path / "run", []

    def resume_meanwhile(event):
        before = (folder / "config.json").read_bytes()
        with pytest.raises(LockedError, match=LOCKED):
            run_experiment(small("seeds=[0, 1]"), folder, resume=True, jobs=0)
        assert (folder / "config.json").read_bytes() == before
        rejected.append(event)

    assert run_experiment(small(), folder, jobs=0, on_event=resume_meanwhile) == []
    assert len(rejected) >= 2
    assert run_experiment(small("seeds=[0, 1]"), folder, resume=True, jobs=0) == []
    assert len(read_folder(folder)) == 2


def test_running_sweep_locks_its_presets_only(tmp_path):
    other = small().model_copy(update={"name": "other"})
    ran = []

    def sweep_meanwhile(event):
        if event.round is None and not event.over:
            before = contents(tmp_path)
            with pytest.raises(LockedError, match=f"quickstart: {LOCKED}"):
                run_sweep(Sweep([small("grid={'rate.lr'=[0.3]}")], tmp_path), jobs=0)
            assert contents(tmp_path) == before
            ran.append(run_sweep(Sweep([other], tmp_path), jobs=0))

    assert run_sweep(Sweep([small()], tmp_path), jobs=0, on_event=sweep_meanwhile) == []
    assert ran == [[]]
    assert [len(read_folder(tmp_path / name)) for name in ("quickstart", "other")] == [1, 1]


def test_point_and_sweep_exclude_each_other(tmp_path):
    experiment = small("grid={'rate.lr'=[0.1, 0.3]}")
    assert run_sweep(Sweep([experiment], tmp_path), jobs=0) == []
    point = tmp_path / "quickstart" / "rate.lr=0.3"
    more = load_preset(point / "config.json", ["seeds=[0, 1]"])
    rejected = []

    def while_the_point_runs(event):
        if event.trial.seed == 1 and event.round is not None:
            with pytest.raises(LockedError, match=LOCKED):
                run_sweep(Sweep([experiment], tmp_path), jobs=0)
            assert run_experiment(small(), tmp_path / "quickstart" / f"beside{event.round.round}", jobs=0) == []
            rejected.append("sweep")

    def while_the_sweep_runs(event):
        with pytest.raises(LockedError, match=LOCKED):
            run_experiment(more, point, resume=True, jobs=0)
        rejected.append("point")

    assert run_experiment(more, point, resume=True, jobs=0, on_event=while_the_point_runs) == []
    assert run_sweep(Sweep([experiment], tmp_path), jobs=0, on_event=while_the_sweep_runs) == []
    assert set(rejected) == {"sweep", "point"}


def test_additions_of_another_process_before_the_lock_are_kept(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert run_experiment(small(), folder, jobs=0) == []

    def add_a_seed(_):
        monkeypatch.undo()
        assert run_experiment(small("seeds=[0, 7]"), folder, resume=True, jobs=0) == []

    monkeypatch.setattr("fedcore.sim.experiment.runner.find_device", add_a_seed)
    assert run_experiment(small("seeds=[0, 1]"), folder, resume=True, jobs=0) == []
    assert load_preset(folder / "config.json").seeds == (0, 7, 1)
    assert [record.header.seed for record in read_folder(folder)] == [0, 1, 7]


def test_missing_run_is_not_begun_by_resume(tmp_path):
    with pytest.raises(MissingDataError, match=r"missing: .*config\.json"):
        run_experiment(small(), tmp_path / "missing", resume=True, jobs=0)
    assert list(tmp_path.iterdir()) == []


def test_command_reports_a_locked_folder(tmp_path, capsys):
    run_experiment(small(), tmp_path / "run", jobs=0)
    with folder_lock([tmp_path / "run"]), pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "run"), "--resume"])
    assert ended.value.code == 2
    assert LOCKED in capsys.readouterr().err


def test_lock_ends_with_its_process(tmp_path):
    reading, writing = os.pipe()

    def lock():
        with folder_lock([tmp_path / "a", tmp_path / "b"]):
            os.write(writing, b"x")
            signal.pause()

    with forked(lock):
        assert os.read(reading, 1) == b"x"
        for name in ("a", "b"):
            with pytest.raises(LockedError, match=f"{name}: {LOCKED}"), folder_lock([tmp_path / name]):
                pass
    os.close(reading)
    os.close(writing)
    with folder_lock([tmp_path / "a", tmp_path / "b", tmp_path / "a"]):
        pass
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "b"]


def test_fork_does_not_keep_the_lock(tmp_path):
    lock = folder_lock([tmp_path])
    lock.__enter__()
    with forked(signal.pause):
        lock.__exit__(None, None, None)
        with folder_lock([tmp_path]):
            pass


def test_file_instead_of_a_folder_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output folder: cannot write to .*file"), folder_lock([tmp_path / "file"]):
        pass


def test_file_system_without_locks(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fedcore.sim.experiment.runner.fcntl.flock", fail)
    with folder_lock([tmp_path]), folder_lock([tmp_path]):
        pass
