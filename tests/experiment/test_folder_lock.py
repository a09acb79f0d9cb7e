"""Two processes never run trials in one folder: each would write into the other's records."""

import os
import signal

import pytest

from fedcore.cli.app import main
from fedcore.errors import ConfigError, LockedError
from fedcore.experiment import Sweep, load_preset, run_experiment, run_sweep
from fedcore.experiment.folder_lock import locked
from fedcore.experiment.records import read_folder

REFUSED = "expected no other process that runs trials in it, got one: wait for it, stop it"


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
    refused = []

    def meanwhile(event):
        if event.round is None and not event.over:
            with pytest.raises(LockedError, match=f"quickstart: {REFUSED}"):
                run_sweep(Sweep([small("grid={'rate.lr'=[0.3]}")], tmp_path), jobs=0)
            assert not (tmp_path / "quickstart" / "rate.lr=0.3").exists()
            other = small().model_copy(update={"name": "other"})
            refused.append(run_sweep(Sweep([other], tmp_path), jobs=0))

    assert run_sweep(Sweep([small()], tmp_path), jobs=0, on_event=meanwhile) == []
    assert refused == [[]]
    assert [len(read_folder(tmp_path / name)) for name in ("quickstart", "other")] == [1, 1]


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
            with locked([tmp_path / "a", tmp_path / "b"]):
                os.write(writing, b"x")
                signal.pause()
        finally:
            os._exit(3)
    assert os.read(reading, 1) == b"x"
    for name in ("a", "b"):
        with pytest.raises(LockedError, match=f"{name}: {REFUSED}"), locked([tmp_path / name]):
            pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)
    with locked([tmp_path / "a", tmp_path / "b", tmp_path / "a"]):
        pass
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "b"]


def test_a_file_in_a_folder_s_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output folder: cannot write to .*file"), locked([tmp_path / "file"]):
        pass


def test_a_file_system_without_locks_holds_nobody_off(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fedcore.experiment.folder_lock.fcntl.flock", none)
    with locked([tmp_path]), locked([tmp_path]):
        pass
