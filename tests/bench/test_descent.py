"""The command of bench/papers/descent.py, with few steps."""

import csv
import math
from pathlib import Path

import pytest

PAPERS = Path(__file__).parents[2] / "bench" / "papers"


def curves(path):
    """y by curve and x."""
    with path.open(encoding="utf-8") as file:
        return {(row["curve"], float(row["x"])): float(row["y"]) for row in csv.DictReader(file)}


def test_the_command_runs_and_two_of_its_curves_begin_as_committed(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from bench.papers import descent

    descent.main(str(tmp_path / "descent"), shorter=40)
    made, committed = curves(tmp_path / "descent.csv"), curves(PAPERS / "descent.csv")
    assert (tmp_path / "descent.png").stat().st_size > 10_000
    assert {curve for curve, _ in made} == {curve for curve, _ in committed}
    assert all(math.isfinite(y) and y > 0 for y in made.values())
    # the first rounds of a shorter run are those of the longer one
    same = [key for key in made if key[0].startswith("different minimisers") or key == ("eq. 20: f - f*", 0)]
    assert len(same) == 4
    for key in same:
        assert made[key] == pytest.approx(committed[key], rel=1e-4)
    assert capsys.readouterr().out.count("LFSGD: ") == 2
