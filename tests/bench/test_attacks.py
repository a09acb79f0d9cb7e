"""The tables of attacks: losses by hand, and the committed tables are those of the committed runs."""

from pathlib import Path

import pandas
import pytest

from bench.attacks import COLUMNS, costs, pages
from bench.markdown import END

ROOT = Path(__file__).parents[2]


def test_losses_are_paired_by_seed():
    runs = [("mean", "honest", (0.8, 0.9)), ("open", "honest", (0.79, 0.87)), ("open", "flipped", (0.69, 0.81))]
    rows = [("FedAvg", rule, 0.5, 1, attack, seed, own[seed], 0.5, 0) for rule, attack, own in runs for seed in (0, 1)]
    found = costs(pandas.DataFrame(rows, columns=COLUMNS)).set_index(["rule", "attack"])
    flipped = found.loc[("open", "flipped")]
    assert flipped["accuracy"] == pytest.approx(75)
    assert flipped["loss"] == pytest.approx(8)  # of 10 and 6
    assert (flipped["loss_low"], flipped["loss_high"], flipped["seeds"]) == pytest.approx((6, 10, 2))
    assert found.loc[("open", "honest")]["price"] == pytest.approx(2)  # of 1 and 3


def test_what_pages_say_about_the_committed_runs():
    """docs/trust.md: the limits of the losses against honest clients with the same rule, in points."""
    found = costs(pandas.read_csv(ROOT / "bench" / "attacks.csv")).reset_index()
    attacked = found[found["attack"] != "honest"]
    worst = attacked.groupby(["method", "rule", "alpha", "liars"])["loss"].max()
    open_to_one = worst.xs(("open", 0.5, 1), level=("rule", "alpha", "liars"))
    assert set(open_to_one[open_to_one > 4].index) == {"FlexibleFedAvg", "MBSTORM"}
    assert open_to_one["FedAvg, buffer"] < 4 < 70 < worst["FedAvg, buffer", "mean", 0.5, 1]
    assert worst.xs((0.5, 3), level=("alpha", "liars")).min() > 9


def test_the_committed_tables_are_those_of_the_committed_runs():
    everything, *short = pages(ROOT / "bench" / "attacks.csv")
    assert (ROOT / "bench" / "attacks.md").read_text() == everything
    page = (ROOT / "docs" / "results.md").read_text()
    for table in short:
        assert f"\n\n{table}\n\n{END}" in page
