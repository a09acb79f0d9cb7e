"""Conflicting options of ``fedcore run``."""

import pytest

from tests.cli.command import SMALL, invoke, output_of


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run", "nosuch", "--resume"], "nosuch: not the folder of a run"),
        (["run", "quickstart", "--seeds", "-1"], "--seeds '-1': the count"),
        (["run", "quickstart", "--seeds", "0"], "--seeds '0': the count"),
        (["run", "quickstart", "quickstart", "mine", "--resume"], "--resume: does not work with several PRESETs"),
        (["run", "quickstart", "--resume", "--sweep"], "--resume: does not work with --sweep"),
        (["run", "quickstart", "--resume", "--scale", "quick"], "--resume: does not work with --scale"),
        (["run", "quickstart", "--ray-address", "auto"], "--ray-address: needs --backend ray"),
        (["run", "quickstart", "--gpus-per-worker", "1"], "--gpus-per-worker: needs --backend ray"),
        (["run", "quickstart", "--backend", "ray", "--workers", "0"], "--workers 0: must be at least 1 on Ray"),
        (["run", "quickstart", "--set", "rate.lr"], "override 'rate.lr': must be KEY=VALUE"),
        (["run", "quickstart", "--sweep", "--set", "grid=3"], "quickstart: grid: "),
        (["run", "quickstart", "--sweep", "--set", "pictures=3", "--set", "data.name='x'"], "pictures: "),
    ],
)
def test_conflicting_options_are_rejected(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*command)
    assert done.status == 2
    assert message in " ".join(done.errors.split())
    assert not list(tmp_path.iterdir())


def test_folder_of_a_run_needs_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output_of("run", "quickstart", *SMALL, "--out", "earlier")
    done = invoke("run", "earlier")
    assert done.status == 2
    assert "resume it with --resume, or show it with `fedcore report earlier`" in " ".join(done.errors.split())


def test_folder_named_like_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("quickstart", "again"):
        output_of("run", "quickstart", *SMALL, "--out", out)
