"""Two processes never run trials in one folder: each would write into the other's records."""

import os
import signal

import pytest

from fedcore.cli.app import main
from fedcore.errors import ConfigError, LockedError, MissingDataError
from fedcore.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.experiment.results import read_folder
from fedcore.experiment.run_folder import locked

REFUSED = "it is in use by another run: wait for it, stop it"


def small(*changes):
    return load_preset("quickstart", ["rounds=2", "seeds=[0]", 'algorithms=["FedAvg"]', "local.epochs=1", *changes])


def test_a_run_that_is_running_cannot_be_gone_on_with(tmp_path):
    experiment, folder, refused = small(), tmp_path / "run", []

    def meanwhile(event):
        before = (folder / "config.json").read_bytes()
        with pytest.raises(LockedError, match=REFUSED):
            run_experiment(small("seeds=[0, 1]"), folder, resume=True, jobs=0)
        assert (folder / "config.json").read_bytes() == before
        refused.append(event)

    assert run_experiment(experiment, folder, jobs=0, on_event=meanwhile) == []
    assert len(refused) >= 2
    assert run_experiment(small("seeds=[0, 1]"), folder, resume=True, jobs=0) == []
    assert len(read_folder(folder)) == 2


def test_a_sweep_that_is_running_cannot_be_gone_on_with_and_another_preset_beside_it_can(tmp_path):
    other = small().model_copy(update={"name": "other"})
    refused = []

    def meanwhile(event):
        if event.round is None and not event.over:
            before = contents(tmp_path)
            with pytest.raises(LockedError, match=f"quickstart: {REFUSED}"):
                run_sweep(Sweep([small("grid={'rate.lr'=[0.3]}")], tmp_path), jobs=0)
            assert contents(tmp_path) == before
            refused.append(run_sweep(Sweep([other], tmp_path), jobs=0))

    assert run_sweep(Sweep([small()], tmp_path), jobs=0, on_event=meanwhile) == []
    assert refused == [[]]
    assert [len(read_folder(tmp_path / name)) for name in ("quickstart", "other")] == [1, 1]


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_point_of_a_sweep_and_the_sweep_hold_each_other_off(tmp_path):
    experiment = small("grid={'rate.lr'=[0.1, 0.3]}")
    assert run_sweep(Sweep([experiment], tmp_path), jobs=0) == []
    point = tmp_path / "quickstart" / "rate.lr=0.3"
    more = load_preset(point / "config.json", ["seeds=[0, 1]"])
    refused = []

    def of_the_point(event):
        if event.trial.seed == 1 and event.round is not None:
            with pytest.raises(LockedError, match=REFUSED):
                run_sweep(Sweep([experiment], tmp_path), jobs=0)
            assert run_experiment(small(), tmp_path / "quickstart" / f"beside{event.round.round}", jobs=0) == []
            refused.append("sweep")

    assert run_experiment(more, point, resume=True, jobs=0, on_event=of_the_point) == []

    def of_the_sweep(event):
        with pytest.raises(LockedError, match=REFUSED):
            run_experiment(more, point, resume=True, jobs=0)
        refused.append("point")

    assert run_sweep(Sweep([experiment], tmp_path), jobs=0, on_event=of_the_sweep) == []
    assert set(refused) == {"sweep", "point"}


def test_what_was_added_until_the_folder_was_free_stays(tmp_path, monkeypatch):
    """Another process that adds a seed, and ends, while this one looks for its data."""
    folder = tmp_path / "run"
    assert run_experiment(small(), folder, jobs=0) == []

    def meanwhile(_):
        monkeypatch.undo()
        assert run_experiment(small("seeds=[0, 7]"), folder, resume=True, jobs=0) == []

    monkeypatch.setattr("fedcore.experiment.runner.find_device", meanwhile)
    assert run_experiment(small("seeds=[0, 1]"), folder, resume=True, jobs=0) == []
    assert load_preset(folder / "config.json").seeds == (0, 7, 1)
    assert [record.header.seed for record in read_folder(folder)] == [0, 1, 7]


def test_a_run_that_is_not_there_is_not_begun_by_going_on(tmp_path):
    with pytest.raises(MissingDataError, match=r"missing: expected the folder of a run, found no config\.json in it"):
        run_experiment(small(), tmp_path / "missing", resume=True, jobs=0)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_so_in_a_line(tmp_path, capsys):
    run_experiment(small(), tmp_path / "run", jobs=0)
    with locked([tmp_path / "run"]), pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "run"), "--resume"])
    assert ended.value.code == 2
    assert REFUSED in capsys.readouterr().err


def test_the_lock_ends_with_its_process(tmp_path):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            with locked([tmp_path / "a", tmp_path / "b"]):
                os.write(writing, b"x")
                signal.pause()
        finally:
            os._exit(3)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x"
        for name in ("a", "b"):
            with pytest.raises(LockedError, match=f"{name}: {REFUSED}"), locked([tmp_path / name]):
                pass
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with locked([tmp_path / "a", tmp_path / "b", tmp_path / "a"]):
        pass
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "b"]


def test_a_fork_does_not_keep_the_lock(tmp_path):
    with locked([tmp_path]):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(3)
    try:
        with locked([tmp_path]):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_file_in_a_folder_s_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output folder: cannot write to .*file"), locked([tmp_path / "file"]):
        pass


def test_a_file_system_without_locks_holds_nobody_off(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fedcore.experiment.run_folder.fcntl.flock", none)
    with locked([tmp_path]), locked([tmp_path]):
        pass
