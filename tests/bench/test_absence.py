"""The comparison of methods for absent clients: differences by hand, and the page has the committed runs."""

from pathlib import Path

import numpy as np
import pandas
import pytest

from bench.absence import COLUMNS, FIRST, cohorts, compared, pages, results, shared_time
from bench.markdown import END

ROOT = Path(__file__).parents[2]


def test_differences_are_paired_by_seed_and_cut_at_the_shared_time():
    def lines(method, seed, accuracies, seconds):
        rows = zip((79, 189, 199), accuracies, seconds, strict=True)
        return [("mnist", "sine", method, 0.1, seed, t, a, 1.0, clock, 0.0, 10 + seed) for t, a, clock in rows]

    rows = [line for seed in (0, 1) for line in lines(FIRST, seed, (0.5, 0.6, 0.7 + 0.1 * seed), (100, 200, 300))]
    rows += [line for seed in (0, 1) for line in lines("FedAU", seed, (0.6, 0.7, 0.8 + 0.06 * seed), (50, 90, 120))]
    frame = pandas.DataFrame(rows, columns=COLUMNS)
    found = results(frame)
    assert found["sine", FIRST].tolist() == pytest.approx([70, 80])  # round 189 is outside the window
    assert shared_time(frame).tolist() == [120, 120]
    # from 50 at 100 s to 60 at 200 s
    assert results(frame, shared_time(frame))["sine", FIRST].tolist() == pytest.approx([52, 52])
    assert "| FedAU | 83.0 (+8.0: -17.4 .. +33.4) |" in compared(found)  # 10 and 6: 8 +- 12.71 * 2
    assert f"| {FIRST} |" in compared(found)
    assert "| sine | 10.5 |" in cohorts(frame)


def test_a_star_needs_more_than_one_interval_of_many():
    """Of ten methods with p = .04, all have a star; one of them alone has none beside nine without a difference."""
    seeds = pandas.MultiIndex.from_product([["sine"], [FIRST, *map(str, range(10))], range(5)])
    for real in (10, 1):
        gaps = [np.array([1, 2, 3, 4, 8]) * 1.0] * real + [np.array([-2, -1, 0, 1, 2.5])] * (10 - real)
        found = pandas.Series(np.concatenate([np.full(5, 50.0), *[50 + gap for gap in gaps]]), seeds)
        found.index.names = ["law", "method", "seed"]
        assert compared(found).count(r"\*)**") == (10 if real == 10 else 0)
        assert compared(found).count("**") == 2 * real


def test_the_committed_tables_are_those_of_the_committed_runs():
    path, page = ROOT / "bench" / "absence.csv.xz", (ROOT / "docs" / "results.md").read_text()
    for data in pandas.read_csv(path)["data"].unique():
        for table in pages(path, data):
            assert f"\n\n{table}\n\n{END}" in page
