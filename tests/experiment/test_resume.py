"""A run that was stopped goes on, and ends as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fedcore import Server, __version__
from fedcore.cli import main
from fedcore.errors import ConfigError
from fedcore.experiment import load_preset, run_experiment
from fedcore.experiment.results import read, read_folder
from fedcore.experiment.run_folder import prepare
from fedcore.experiment.schema import Trial
from fedcore.experiment.trial import run_trial

METHODS = ["FedAvg", "MIFA", "MimiC", "SCAFFOLD", "FedAvgMVR", "SCAFFOLDMVR"]


def timeless(record):
    return [replace(line, seconds={}) for line in record.rounds]


def stopped_after(count):
    def on_round(line):
        if line.round == count:
            raise KeyboardInterrupt

    return on_round


@pytest.mark.parametrize("seconds", [0, 1e9], ids=["checkpoint every round", "none"])
@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_trial_goes_on_bit_for_bit(tmp_path, method, seconds):
    experiment = load_preset("quickstart", ["rounds=9", f"algorithms=['{method}']", "seeds=[0]"])
    trial = Trial(experiment, 0, 0)
    run_trial(trial, tmp_path / "straight")
    for stop in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            run_trial(trial, tmp_path / "stopped", stopped_after(stop), checkpoint_seconds=seconds)
    seen = []
    run_trial(trial, tmp_path / "stopped", seen.append, checkpoint_seconds=seconds)
    straight, stopped = (read(tmp_path / name / "records" / trial.file_name) for name in ("straight", "stopped"))
    assert timeless(stopped) == timeless(straight)
    assert [line.round for line in seen] == list(range(9))
    assert not list((tmp_path / "stopped" / "checkpoints").glob("*"))


def lines_lost(path, bytes):
    path.write_bytes(b"\n".join(bytes.split(b"\n")[:4]) + b"\n")


def zeros_at_the_end(path, bytes):
    path.write_bytes(bytes[:-700] + b"\0" * 700)


def zeros_in_the_middle(path, bytes):
    path.write_bytes(bytes[:1500] + b"\0" * 700 + bytes[2200:])


def nothing_but_zeros(path, bytes):
    path.write_bytes(b"\0" * len(bytes))


@pytest.mark.parametrize("loss", [lines_lost, zeros_at_the_end, zeros_in_the_middle, nothing_but_zeros])
def test_a_record_that_a_loss_of_power_left_behind_its_checkpoint_has_no_hole_afterwards(tmp_path, loss):
    trial = Trial(load_preset("quickstart", ["rounds=9", "algorithms=['MimiC']", "seeds=[0]"]), 0, 0)
    run_trial(trial, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run_trial(trial, tmp_path / "stopped", stopped_after(7), checkpoint_seconds=0)
    path = tmp_path / "stopped" / "records" / trial.file_name
    loss(path, path.read_bytes())
    run_trial(trial, tmp_path / "stopped")
    straight, stopped = (read(tmp_path / name / "records" / trial.file_name) for name in ("straight", "stopped"))
    assert timeless(stopped) == timeless(straight)
    assert not stopped.torn


def test_rounds_are_durable_in_the_record_before_a_checkpoint_rests_on_them(tmp_path, monkeypatch):
    durable = []  # bytes of the record at each sync, and rounds of each checkpoint
    path = tmp_path / "records" / (trial := Trial(load_preset("quickstart", ["rounds=3", "seeds=[0]"]), 0, 0)).file_name
    sync, save = os.fsync, Server.save

    def synced(fd):
        sync(fd)
        if os.path.samestat(os.fstat(fd), path.stat()):
            durable.append(path.read_bytes().count(b"\n") - 1)

    def saved(server, folder):
        assert durable[-1:] == [server.round_number]
        save(server, folder)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Server, "save", saved)
    run_trial(trial, tmp_path, checkpoint_seconds=0)
    assert durable == [1, 2, 3]


def test_another_experiments_record_is_not_gone_on_with(tmp_path, small):
    run_trial(Trial(small, 0, 0), tmp_path)
    with pytest.raises(ConfigError, match="record of another trial, with rounds"):
        run_trial(Trial(load_preset("quickstart", ["rounds=1", "seeds=[0, 1]"]), 0, 0), tmp_path)


def test_what_another_version_began_says_so(tmp_path, small):
    trial = Trial(small, 0, 0)
    run_trial(trial, tmp_path)
    record = tmp_path / "records" / trial.file_name
    record.write_text(record.read_text().replace(f'"version": "{__version__}"', '"version": "0.0.1"'))
    with pytest.raises(ConfigError, match=f"version '0.0.1' and not '{__version__}': take another folder"):
        run_trial(trial, tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_a_killed_run_is_resumed_from_the_command_line(tmp_path, capsys):
    overrides = ["--rounds", "40", "--seeds", "0,", "--set", "algorithms=['MimiC', 'SCAFFOLD']"]
    command = [sys.executable, "-m", "fedcore", "run", "quickstart", *overrides, "--workers", "2"]
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "--out", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 240
    files = []
    while time.monotonic() < deadline and not (
        len(files) == 2 and all(file.read_bytes().count(b"\n") > 4 for file in files)
    ):
        time.sleep(0.02)
        files = list((folder / "records").glob("*.jsonl"))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert any(len(record.rounds) < 40 for record in read_folder(folder))
    main(resume := ["run", str(folder), "--resume", "--workers", "0"])
    prepare(tmp_path / "straight", experiment := load_preset(str(folder / "config.json"), []))
    run_experiment(experiment, tmp_path / "straight", resume=True, jobs=0)
    for killed, straight in zip(read_folder(folder), read_folder(tmp_path / "straight"), strict=True):
        assert timeless(killed) == timeless(straight)
        assert len(killed.rounds) == 40
    for more, said in (
        (["--out", "elsewhere"], "--resume: does not go with --out"),
        (["--rounds", "39"], "rounds=39: must be at least 40"),
        (["--set", "participation.p=0.3"], "its config.json has other settings (participation.p 0.1 -> 0.3)"),
    ):
        with pytest.raises(SystemExit) as changed:
            main([*resume, *more])
        assert changed.value.code == 2
        assert said in capsys.readouterr().err.replace("\n", " ")


def test_files_that_fedcore_did_not_write_stay(tmp_path):
    quick = ["seeds=[0]", "algorithms=['FedAvg', 'MIFA']"]
    run_experiment(load_preset("quickstart", ["rounds=2", *quick]), tmp_path / "run", jobs=0)
    records, checkpoints = tmp_path / "run" / "records", tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    mine = [
        records / "0-fedavg-seed0.jsonl",
        records / "1-mifa-seed0.traceback.txt",
        checkpoints / "1-mifa-seed0.rows-7.npz",
    ]
    for file in mine:
        file.write_text("my notes, in one line")
    more = load_preset("quickstart", ["rounds=4", *quick])
    [failed] = run_experiment(more, tmp_path / "run", jobs=0, resume=True)
    assert "it is not this trial's record: move it" in failed.error
    assert {file.read_text() for file in mine} == {"my notes, in one line"}
    for torn in (b"", b'{"pre', b'{"preset": "quick', b'{"preset"\0\0\0', b"\0\0"):
        mine[0].write_bytes(torn)
        assert run_experiment(more, tmp_path / "run", jobs=0, resume=True) == []
        assert read(mine[0]).is_complete
