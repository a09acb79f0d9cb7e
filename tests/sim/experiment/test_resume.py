"""An interrupted run resumes, and ends as if nothing had happened."""

import os
import signal
import subprocess
import sys

import pytest

from fedcore import Server, __version__
from fedcore.cli import main
from fedcore.errors import ConfigError
from fedcore.sim.experiment import load_preset, run_experiment
from fedcore.sim.experiment.results import read, read_folder
from fedcore.sim.experiment.runner import prepare
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import run_trial
from tests.sim.experiment.kit import DECAY, LION, assert_resumes, quick, records_in, wait_until

METHODS = ["'FedAvg'", "'MIFA'", "'MimiC'", "'SCAFFOLD'", "'FedAvgMVR'", "'SCAFFOLDMVR'"]
METHODS += ["{name='QFedAvg', q=1.0}", "'FedAWE'", "'FedAU'", "'FedACG'"]
METHODS += [f"{{name='FedAvg', rate={{optimizer={LION}, lr={DECAY}, server_lr={DECAY}}}}}"]
MARKOV = "participation={name='Markov', p_up=0.3, p_down=0.3}"


@pytest.mark.parametrize(("method", "seconds"), [*((method, 0) for method in METHODS), ("'SCAFFOLD'", 1e9)], ids=str)
def test_interrupted_trial_resumes_bit_for_bit(tmp_path, method, seconds):
    pattern = [MARKOV] if METHODS.index(method) > 5 else []
    trial = Trial(quick("rounds=7", f"algorithms=[{method}]", "seeds=[0]", *pattern), 0, 0)
    lines = assert_resumes(trial, tmp_path, (2, 5), seconds)
    assert [line.round for line in lines] == list(range(7))
    assert not list((tmp_path / "interrupted" / "checkpoints").glob("*"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"\n".join(data.split(b"\n")[:4]) + b"\n",
        lambda data: data[:-700] + b"\0" * 700,
        lambda data: data[:1500] + b"\0" * 700 + data[2200:],
        lambda data: b"\0" * len(data),
    ],
    ids=["lost lines", "zeros at the end", "zeros in the middle", "only zeros"],
)
def test_trial_resumes_after_a_power_failure_damaged_its_record(tmp_path, damage):
    trial = Trial(quick("rounds=9", "algorithms=['MimiC']", "seeds=[0]"), 0, 0)
    assert_resumes(trial, tmp_path, [7], before_resume=lambda path: path.write_bytes(damage(path.read_bytes())))
    assert not read(tmp_path / "interrupted" / "records" / trial.file_name).torn


def test_rounds_are_durable_before_their_checkpoint(tmp_path, monkeypatch):
    durable = []  # the rounds of the record at each sync
    trial = Trial(load_preset("quickstart", ["rounds=3", "seeds=[0]"]), 0, 0)
    path, sync, save = tmp_path / "records" / trial.file_name, os.fsync, Server.save

    def synced(descriptor):
        sync(descriptor)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            durable.append(path.read_bytes().count(b"\n") - 1)

    def saved(server, folder):
        assert durable[-1:] == [server.round_number]
        save(server, folder)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Server, "save", saved)
    run_trial(trial, tmp_path, checkpoint_seconds=0)
    assert durable == [1, 2, 3]


def test_record_of_another_trial_or_version_is_rejected(tmp_path, small):
    trial = Trial(small, 0, 0)
    run_trial(trial, tmp_path)
    with pytest.raises(ConfigError, match="rounds"):
        run_trial(Trial(load_preset("quickstart", ["rounds=1", "seeds=[0, 1]"]), 0, 0), tmp_path)
    record = tmp_path / "records" / trial.file_name
    record.write_text(record.read_text().replace(f'"version": "{__version__}"', '"version": "0.0.1"'))
    with pytest.raises(ConfigError, match=f"version is '0.0.1', expected '{__version__}'"):
        run_trial(trial, tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_killed_run_resumes_on_the_command_line(tmp_path, capsys):
    overrides = ["--rounds", "25", "--seeds", "0,", "--set", "algorithms=['MimiC', 'SCAFFOLD']"]
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "fedcore", "run", "quickstart", *overrides, "--workers", "2", "--out", str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet, start_new_session=True) as process:
        files = folder / "records"
        wait_until(lambda: [f.read_bytes().count(b"\n") > 4 for f in files.glob("*.jsonl")] == [True, True])
        os.killpg(process.pid, signal.SIGKILL)
    assert any(len(record.rounds) < 25 for record in read_folder(folder))
    main(resume := ["run", str(folder), "--resume", "--workers", "0"])
    prepare(tmp_path / "straight", experiment := load_preset(str(folder / "config.json"), []))
    run_experiment(experiment, tmp_path / "straight", resume=True, jobs=0)
    assert records_in(folder) == records_in(tmp_path / "straight")
    assert all(record.is_complete for record in read_folder(folder))
    for more, message in (
        (["--out", "elsewhere"], "--resume: does not work with --out"),
        (["--rounds", "24"], "rounds=24: must be at least 25"),
        (["--set", "participation.p=0.3"], "its config.json has different settings (participation.p 0.1 -> 0.3)"),
    ):
        with pytest.raises(SystemExit) as changed:
            main([*resume, *more])
        assert changed.value.code == 2
        assert message in capsys.readouterr().err.replace("\n", " ")


def test_files_of_the_user_stay(tmp_path):
    methods = ["seeds=[0]", "algorithms=['FedAvg', 'MIFA']"]
    run_experiment(quick("rounds=2", *methods), tmp_path / "run", jobs=0)
    records, checkpoints = tmp_path / "run" / "records", tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    mine = [
        records / "0-fedavg-seed0.jsonl",
        records / "1-mifa-seed0.traceback.txt",
        checkpoints / "1-mifa-seed0.rows-7.npz",
    ]
    for file in mine:
        file.write_text("my notes, in one line")
    more = quick("rounds=4", *methods)
    [failed] = run_experiment(more, tmp_path / "run", jobs=0, resume=True)
    assert "is not a record" in failed.error
    assert {file.read_text() for file in mine} == {"my notes, in one line"}
    for torn in (b"", b'{"pre', b'{"preset": "quick', b'{"preset"\0\0\0', b"\0\0"):
        mine[0].write_bytes(torn)
        assert run_experiment(more, tmp_path / "run", jobs=0, resume=True) == []
        assert read(mine[0]).is_complete
