"""Statistics of a run: results, differences, notes and costs."""

from dataclasses import replace
from math import inf

import pytest
from scipy.stats import ttest_rel

from fedcore.sim.experiment.schema import ReportSettings
from fedcore.sim.reports import statistics
from fedcore.sim.reports.report import Drawing, band, curves


def test_result_is_the_mean_over_the_window(record):
    (row,) = statistics.summarise([record("A", 0, 0, [0.9, None, *[0.2, None] * 5, *[0.4] * 5], window=15)]).rows
    assert row.final.mean == pytest.approx(0.3)  # five rounds of .2, five of .4
    assert row.best.mean == 0.9
    assert row.oscillation.mean == pytest.approx(0.1 * (10 / 9) ** 0.5)


def every_fifth(*accuracies):
    return [accuracy for last in accuracies for accuracy in (None, None, None, None, last)]


def test_window_counts_rounds_and_not_evaluations(record):
    """Rounds 4, 9, 14, 19, 24, 29 are evaluated: the window has rounds 24 and 29, and 31 once that is too."""
    values = every_fifth(0.1, 0.1, 0.1, 0.1, 0.5, 0.7)
    one, other = record("A", 0, 0, values), record("B", 1, 0, every_fifth(0.9, 0.9, 0.9, 0.9, 0.4, 0.8))
    begun = record("B", 1, 1, [0.5], rounds=30)  # its window has no gap
    summary = statistics.summarise([one, other, begun])
    first, second = summary.rows
    assert (first.final.mean, first.last_round.mean, first.loss.mean) == pytest.approx((0.6, 0.7, 0.4))
    assert second.difference.mean == pytest.approx(0)
    assert first.oscillation.mean == pytest.approx(0.1 * 2**0.5)
    assert "only 2 of the last 10 rounds were evaluated; set evaluate.last=10" in summary.notes
    (longer,) = statistics.summarise([record("A", 0, 0, [*values, None, 0.9, None])]).rows
    assert (longer.final.mean, longer.last_round.mean) == pytest.approx((0.7, 0.9))
    (whole,) = statistics.summarise([record("A", 0, 0, [*every_fifth(0.1), *[0.2] * 9, 0.4])]).rows
    assert (whole.final.mean, whole.last_round.mean) == pytest.approx((0.22, 0.4))
    assert statistics.summarise([record("A", 0, 0, [*every_fifth(0.1), *[0.2] * 9, 0.4])]).notes == ()
    (short,) = statistics.summarise([record("A", 0, 0, [0.3, 0.5, 0.7], window=2)]).rows
    assert short.final.mean == pytest.approx(0.6)


def test_mean_and_deviation_are_over_seeds(record):
    (row,) = statistics.summarise(
        [record("A", 0, seed, [accuracy] * 3) for seed, accuracy in ((0, 0.2), (5, 0.4))]
    ).rows
    assert row.final == statistics.Statistic(pytest.approx(0.3), pytest.approx(0.2 / 2**0.5))
    assert row.oscillation == statistics.Statistic(0, 0)
    assert row.seeds == (0, 5)
    assert row.seconds.mean == 1.5


def test_differences_are_paired_by_seed(record):
    first, second = statistics.summarise(
        [
            record("A", 0, 0, [0.1] * 3),
            record("A", 0, 1, [0.5] * 3),
            record("B", 1, 0, [0.2] * 3),
            record("B", 1, 1, [0.6] * 3),
            record("B", 1, 2, [0.9] * 3),
        ]
    ).rows
    assert first.difference is None
    assert second.difference == statistics.Statistic(pytest.approx(0.1), pytest.approx(0.0))


@pytest.mark.parametrize(("first", "second"), [([0.1, 0.9, 0.9], [0.3]), ([0.1], [0.3, 0.9])])
def test_differences_are_over_common_rounds(record, first, second):
    _, row = statistics.summarise([record("A", 0, 0, first, 9), record("B", 1, 0, second, 9)]).rows
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(0.2)


def test_notes_on_incomplete_records(record):
    whole, short = record("A", 0, 0, [0.1] * 3), record("B", 1, 0, [0.1], rounds=3)
    summary = statistics.summarise([whole, replace(short, torn=True)])
    assert summary.notes == (
        "B, seed 0: stopped after 1 of 3 rounds",
        "B, seed 0: the last line of its record was cut off and is left out",
    )
    assert summary.rows[1].rounds == 1
    assert summary.rows[1].oscillation == statistics.Statistic(None, None)


def test_notes_on_an_unfinished_extension(record):
    """Seed 1 still has its 3 rounds of 9, of which two were evaluated; a larger evaluate.last would not help."""
    one, other = record("A", 0, 0, [0.1] * 9), record("A", 0, 1, [0.1, None, 0.3], rounds=9)
    assert statistics.summarise([one, other]).notes == (
        "A, seed 1: stopped after 3 of 9 rounds",
        "only 2 of the last 3 rounds were evaluated",
        "A: its row is of trials with 3 to 9 rounds",
    )


def test_notes_on_rejected_updates(record):
    one = record("A", 0, 0, [0.1] * 3)
    lines = [replace(line, rejected=2) for line in one.rounds]
    assert statistics.summarise([replace(one, rounds=lines)]).notes == ("A: 6 of 9 updates were rejected",)


def waiting(record, *pending):
    lines = [replace(line, pending=count) for line, count in zip(record.rounds, pending, strict=True)]
    return replace(record, rounds=lines)


def test_notes_on_models_that_wait(record):
    moving = record("A", 0, 0, [0.1] * 3)  # older records lack the field
    waited = [waiting(record("B", 1, 0, [0.1] * 3), 4, 1, 0), waiting(record("B", 1, 1, [0.1] * 3), 2, 0, 0)]
    stuck = waiting(record("C", 2, 0, [0.1] * 3), 9, 8, 7)
    assert statistics.summarise([moving, *waited, stuck]).notes == (
        "B: the model stayed as it was in 1 to 2 of 3 rounds, waiting for clients without any update so far; "
        "wait=false starts without them",
        "C: the model stayed as it was in 3 of 3 rounds, waiting for clients without any update so far, and is still "
        "waiting for 7; wait=false starts without them",
    )


def test_trial_without_rounds_has_no_values(record):
    (row,) = statistics.summarise([record("A", 0, 0, [], rounds=3)]).rows
    assert (row.seeds, row.rounds, row.final) == ((), 0, statistics.Statistic(None, None))


def test_interval_is_that_of_the_paired_t_test(record):
    first, second = [0.5, 0.7, 0.6, 0.9], [0.4, 0.65, 0.61, 0.7]
    records = [
        record(label, order, seed, [value])
        for order, (label, values) in enumerate((("A", first), ("B", second)))
        for seed, value in enumerate(values)
    ]
    found = statistics.difference(records, "A", "B")
    expected = ttest_rel(first, second).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(0.085)


def test_pairs_with_other_clients_are_excluded(record):
    one, other = record("A", 0, 0, [0.5, 0.5]), record("B", 1, 0, [0.6, 0.6])
    other.rounds[1] = replace(other.rounds[1], active=[3])
    records = [one, other, record("A", 0, 1, [0.5, 0.5]), record("B", 1, 1, [0.7, 0.7])]
    found = statistics.difference(records, "B", "A")
    assert found.values == pytest.approx((0.2,))
    assert found.apart == (0,)
    assert statistics.summarise(records).rows[1].difference.mean == pytest.approx(0.2)


def test_a_seed_without_a_finite_loss_is_not_left_out(record):
    """A trial records such a loss as None: it is infinite in results, and a curve has no point there."""
    one, other = (record("A", 0, seed, [0.5, None, 0.5]) for seed in (0, 1))
    other.rounds[2] = replace(other.rounds[2], loss=None)
    summary = statistics.summarise([one, other])
    assert summary.rows[0].loss == statistics.Statistic(inf, None)
    assert statistics.summary_table(summary)["test loss"].tolist() == ["inf"]
    smooth = ReportSettings(smooth=3)
    assert band([one, other], "rounds", "loss", smooth).values.tolist() == [[0.5, 0.5, 0.5]]
    for last, expected in ((one, False), (other, True)):
        (axes,) = curves([one, last], drawing=Drawing(measure="loss")).axes
        assert ("infinite" in axes.get_title(loc="left")) == expected


def test_seeds_of_one_algorithm_are_excluded(record):
    records = [record("A", 0, 0, [0.5]), record("A", 0, 1, [0.5]), record("B", 1, 1, [0.7])]
    (found,) = statistics.differences_to_first(records)
    assert (found.of, found.over, len(found.values)) == ("B", "A", 1)
    assert found.interval is None
    assert statistics.Difference("A", "B", ()).mean is None


def cells(records, algorithm):
    return statistics.cost_table(records).set_index("algorithm").loc[algorithm].to_dict()


def test_cost_table(record):
    def costly(line):
        seconds, uploadings = {"broadcast": 0.5, "local": 2.0}, 2 * (line.round + 1)
        traffic = {"bytes": 3_000_000, "bytes_down": 500_000, "uploadings": uploadings}
        return replace(line, seconds=seconds, diversity=float(line.round), **traffic)

    trials = [record("A", 0, seed, [0.5] * 3) for seed in (0, 1)]
    trials = [replace(trial, rounds=[costly(line) for line in trial.rounds]) for trial in trials]
    assert cells(trials, "A") == {
        "vectors up": "2",
        "MB up": "9.0",
        "MB down": "1.5",
        "broadcast s": "1.5",
        "local s": "6.0",
        "diversity": "1",
        "correction": "–",
        "staleness": "–",
    }


def test_cost_table_of_older_records(record):
    records = [record("A", 0, 0, [0.5, 0.6]), record("B", 1, 0, [], rounds=2)]
    row = cells(records, "A")
    assert (row["vectors up"], row["MB down"], row["train s"]) == ("–", "–", "1.0")
    assert list(statistics.cost_table(records)["algorithm"]) == ["A"]
