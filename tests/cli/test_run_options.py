"""What ``fedcore run`` and ``sweep`` refuse, and the way out that they say."""

import pytest

from tests.cli.command import invoke

SMALL = ["--rounds", "1", "--seeds", "1", "--jobs", "0", "--set", "local.epochs=1", "--set", "algorithms=['MIFA']"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run", "nosuch", "--resume"], "nosuch: expected the folder of a run, with config.json in it, found none"),
        (["run", "quickstart", "--seeds", "-1"], "--seeds: expected at least one seed, got '-1'; the seed 0"),
        (["run", "quickstart", "--seeds", "0"], "--seeds: expected at least one seed, got '0'"),
        (["run", "quickstart", "--set", "rate.lr"], "expected KEY=VALUE, like rate.lr=0.1, got 'rate.lr'"),
        (["sweep", "quickstart", "--set", "grid=3"], "quickstart: grid: "),
        (["sweep", "quickstart", "--set", "pictures=3", "--set", "data.name='x'"], "pictures: "),
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
