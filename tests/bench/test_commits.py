"""What is made of two commits' figures; that a slow-down is found is shown by measuring one."""

import pytest

from bench import commits

QUICK, SLOW = {"bench_a": 1e-6, "bench_b": 2e-6}, {"bench_a": 2e-6, "bench_b": 2e-6}


def test_a_ratio_is_the_median_within_turns():
    turns = [(QUICK, QUICK), (QUICK, SLOW), (QUICK, SLOW)]
    assert {name: ratio for name, *_, ratio in commits.compared(turns)} == {"bench_a": 0.5, "bench_b": 1.0}


def test_what_one_commit_has_not_is_left_out():
    assert [name for name, *_ in commits.compared([({"bench_b": 1e-6}, QUICK)])] == ["bench_b"]


def test_the_table_begins_with_what_became_slowest():
    lines = commits.table(list(commits.compared([(QUICK, SLOW)])), "b" * 40, "h" * 40, 0.85).splitlines()
    assert "`hhhhhhhhhhhh` against `bbbbbbbbbbbb`" in lines[0]
    assert lines[4] == "| a | 1.0 | 2.0 | 0.50 | **slower** |"
    assert lines[5] == "| b | 2.0 | 2.0 | 1.00 |  |"


@pytest.mark.parametrize(("head", "status"), [(SLOW, 1), (QUICK, 0)])
def test_the_status_says_whether_a_call_became_slower(monkeypatch, tmp_path, capsys, head, status):
    monkeypatch.setattr(commits, "BUILD", tmp_path)
    monkeypatch.setattr(commits, "git", lambda *arguments: arguments[-1])
    monkeypatch.setattr(commits, "packaged", lambda commit: commit)
    monkeypatch.setattr(commits, "measured", lambda python, turn: head if python == "HEAD^{commit}" else QUICK)
    assert commits.main(["BASE", "--turns", "2"]) == status
    assert (tmp_path / "table.md").read_text() in capsys.readouterr().out
