"""The comparison of two commits' figures, with a measured slow-down."""

import pytest

from bench import commits

QUICK, SLOW = {"bench_a": 1e-6, "bench_b": 2e-6}, {"bench_a": 2e-6, "bench_b": 2e-6}


def test_a_disturbed_turn_does_not_count():
    assert {name: ratio for name, *_, ratio in commits.compared([(QUICK, SLOW), (SLOW, QUICK)])} == dict.fromkeys(
        QUICK, 1
    )
    assert {name: ratio for name, *_, ratio in commits.compared([(QUICK, SLOW)] * 2)} == {"bench_a": 0.5, "bench_b": 1}


def test_benchmarks_of_only_one_commit_are_left_out():
    assert [name for name, *_ in commits.compared([({"bench_b": 1e-6}, QUICK)])] == ["bench_b"]


@pytest.mark.parametrize(
    ("heads", "status"),
    [([QUICK] * 2, 0), ([SLOW] * 4, 1), ([SLOW, SLOW, SLOW, QUICK], 0)],
    ids=["alike", "slower", "disturbed at first"],
)
def test_a_possible_slow_down_is_measured_again(monkeypatch, tmp_path, capsys, heads, status):
    heads = iter(heads)
    monkeypatch.setattr(commits, "BUILD", tmp_path)
    monkeypatch.setattr(commits, "git", lambda *arguments: arguments[-1])
    monkeypatch.setattr(commits, "packaged", lambda commit: commit)
    monkeypatch.setattr(commits, "measured", lambda python, turn: next(heads) if python == "HEAD^{commit}" else QUICK)
    assert commits.main(["BASE", "--turns", "2"]) == status
    assert not list(heads)
    assert (tmp_path / "table.md").read_text() in capsys.readouterr().out
