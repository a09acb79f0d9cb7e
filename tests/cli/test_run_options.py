"""What ``fedcore run`` refuses, and what its errors advise."""

import pytest

from tests.cli.command import invoke

SMALL = ["--rounds", "1", "--seeds", "1", "--workers", "0", "--set", "local.epochs=1", "--set", "algorithms=['MIFA']"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run", "nosuch", "--resume"], "nosuch: there is no run in this folder"),
        (["run", "quickstart", "--seeds", "-1"], "--seeds: expected at least one seed, got '-1'; only seed 0"),
        (["run", "quickstart", "--seeds", "0"], "--seeds: expected at least one seed, got '0'"),
        (["run", "quickstart", "quickstart", "mine", "--resume"], "--resume: does not go with several PRESETs"),
        (["run", "quickstart", "--resume", "--sweep"], "--resume: does not go with --sweep"),
        (["run", "quickstart", "--resume", "--scale", "quick"], "--resume: does not go with --scale"),
        (["run", "quickstart", "--ray-address", "auto"], "--ray-address: has no effect on the local backend"),
        (["run", "quickstart", "--gpus-per-worker", "1"], "--gpus-per-worker: has no effect on the local backend"),
        (["run", "quickstart", "--backend", "ray", "--workers", "0"], "--workers: expected at least 1 on Ray, got 0"),
        (["run", "quickstart", "--set", "rate.lr"], "expected KEY=VALUE, like rate.lr=0.1, got 'rate.lr'"),
        (["run", "quickstart", "--sweep", "--set", "grid=3"], "quickstart: grid: "),
        (["run", "quickstart", "--sweep", "--set", "pictures=3", "--set", "data.name='x'"], "pictures: "),
    ],
)
def test_what_is_refused(command, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*command)
    assert done.status == 2
    assert said in " ".join(done.errors.split())
    assert not list(tmp_path.iterdir())


def test_a_run_s_folder_without_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("run", "quickstart", *SMALL, "--out", "mine").status == 0
    done = invoke("run", "mine")
    assert done.status == 2
    assert "mine: it is a run's folder: --resume goes on, `fedcore report mine` shows it" in " ".join(
        done.errors.split()
    )


def test_a_folder_of_a_preset_s_name_is_not_in_its_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("quickstart", "again"):
        assert invoke("run", "quickstart", *SMALL, "--out", out).status == 0
