"""Comparison of records with the papers."""

from dataclasses import replace
from math import inf

import pytest

from fedcore.sim.experiment import config
from fedcore.sim.reports import statistics as papers
from fedcore.sim.reports.statistics import Difference, Figures, compare, crossing, figures, recovery, verdict
from tests.sim.experiment.kit import preset


def test_figures_and_shifts_belong_to_the_presets():
    for name in papers._papers():
        assert name in config.names()
        experiment, paper = preset(name), figures(name)
        pairs = [*paper.gain, *paper.crossing, *paper.better]
        named = {*paper.accuracy, *paper.recovery, *(label for pair in pairs for label in pair.split(" - "))}
        assert named
        assert named <= {method.label for method in experiment.algorithms}, name
        if paper.shift:
            options = experiment.participation.options
            assert list((options.get("arrivals") or options["departures"]).values()) == [paper.shift]


def test_preset_without_a_paper():
    assert figures("quickstart") is None


def test_recovery_counts_from_the_shift(record):
    trial = record("A", 0, 0, [0.1, 0.5, 0.2, 0.4, 0.5, 0.6])
    assert [recovery(trial, shift) for shift in (2, 1, 9)] == [3, 1, None]
    assert recovery(record("A", 0, 0, [0.5, 0.2, 0.3]), 1) is None


def test_crossing_uses_the_test_losses(record):
    """Ruan et al., Table 5; the accuracies are the other way round here."""
    falling = [0.9 - 0.02 * round for round in range(20)]
    trials = {"include": record("include", 0, 0, [0.5] * 20), "exclude": record("exclude", 1, 0, [0.3] * 20)}
    lines = [replace(line, loss=loss) for line, loss in zip(trials["exclude"].rounds, falling, strict=True)]
    trials["exclude"] = replace(trials["exclude"], rounds=lines)
    (line,) = compare(list(trials.values()), Figures("P", shift=10, crossing={"exclude - include": 27}))
    # .9 - .02 t is below .5 from t = 21 on; nowhere here
    assert line.values == (None,)
    lines = [replace(line, loss=line.loss - 0.2) for line in lines]
    trials["exclude"] = replace(trials["exclude"], rounds=lines)
    (line,) = compare(list(trials.values()), Figures("P", shift=5, crossing={"exclude - include": 27}))
    # .7 - .02 t, over five rounds the mean is that in the middle: below .5 from the middle 11 on, rounds 9 to 13
    assert line.values == (9 - 5 + 1,)
    assert line.name == "exclude - include: rounds until the loss is lower"


def test_crossing_holds_for_five_rounds():
    below = dict.fromkeys(range(20), 0.5)
    above = dict.fromkeys(range(20), 0.4) | {4: 0.9} | dict.fromkeys(range(10, 20), 0.6)
    assert crossing(above, below, 5) == 8 - 5 + 1  # rounds 8 to 12: two of .4, three of .6; 7 to 11 are below .5
    assert crossing(above, dict.fromkeys(range(20), 0.7), 3) is None
    assert crossing(dict.fromkeys(range(20), 0.6), below, 3) == 1
    assert crossing(above | {6: inf}, below, 3) == 1
    assert crossing(above | {6: inf}, below | {5: inf}, 3) == 4  # one infinite mean does not exceed another


def test_comparison_with_a_paper(record):
    records = [
        record(label, order, seed, [0.5 + 0.1 * order + 0.01 * seed * (1 + order)] * 3)
        for order, label in enumerate("AB")
        for seed in (0, 1, 2)
    ]
    paper = Figures("P", accuracy={"A": 48.0, "C": 1.0}, gain={"B - A": 9.0}, better=("A - B",))
    accuracy, gain, claim = compare(records, paper)
    assert (accuracy.name, accuracy.paper, len(accuracy.values)) == ("A, accuracy %", "48.00", 3)
    assert (accuracy.ours, accuracy.spread) == (pytest.approx(51), "± 1.0")
    assert (gain.name, gain.paper) == ("B - A, points", "+9")
    assert (gain.ours, gain.spread) == (pytest.approx(11), "95 %: +8.5 .. +13.5")
    assert claim.spread.endswith(": contradicted")
    assert compare(records, paper, (9, 3))[2].spread.endswith(": contradicted in 3 of 9 rounds")
    shorter = record("C", 2, 0, [0.5])  # records that are not part of the claim
    assert compare([*records, shorter, record("A", 0, 9, [0.5])], paper, (3, 4))[3].spread.endswith(
        ": contradicted in 3 of 4 seeds"
    )


@pytest.mark.parametrize(("before", "after", "expected"), [(0.5, 0.3, (None, "2, never", 2)), (None, 0.6, (2, "2", 1))])
def test_seeds_that_never_recover_or_were_not_evaluated_before_the_shift(record, before, after, expected):
    records = [record("fast", 0, 0, [0.5, 0.2, 0.6]), record("fast", 0, 1, [before, 0.2, after])]
    (line,) = compare(records, Figures("P", shift=1, recovery={"fast": 4}))
    assert (line.ours, line.spread.removeprefix("seeds: "), len(line.values)) == expected


@pytest.mark.parametrize(
    ("values", "text"),
    [((0.1, 0.11), "shown"), ((-0.1, -0.11), "contradicted"), ((0.1, -0.1), "open"), ((0.1,), "open")],
)
def test_verdicts(values, text):
    assert verdict(Difference("A", "B", values)) == text
    assert verdict(Difference("A", "B", values), "2 seeds") == (text if text == "open" else f"{text} in 2 seeds")
    assert Difference("A", "B", (0.1,)).interval_text() == "one seed"
