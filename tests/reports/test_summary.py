from dataclasses import replace

import pytest

from fedcore.reports.statistics import Statistic, summarise


def test_the_result_is_the_mean_over_the_last_ten_evaluated_rounds(record):
    (row,) = summarise([record("A", 0, 0, [0.9, None, *[0.2, None] * 5, *[0.4] * 5])]).rows
    assert row.final.mean == pytest.approx(0.3)
    assert row.best.mean == 0.9
    assert row.oscillation.mean == pytest.approx(0.1 * (10 / 9) ** 0.5)


def test_seeds_first_then_mean_and_sample_deviation(record):
    (row,) = summarise([record("A", 0, seed, [accuracy] * 3) for seed, accuracy in ((0, 0.2), (5, 0.4))]).rows
    assert row.final == Statistic(pytest.approx(0.3), pytest.approx(0.2 / 2**0.5))
    assert row.oscillation == Statistic(0, 0)
    assert row.seeds == (0, 5)
    assert row.seconds.mean == 1.5


def test_differences_are_paired_by_seed(record):
    first, second = summarise(
        [
            record("A", 0, 0, [0.1] * 3),
            record("A", 0, 1, [0.5] * 3),
            record("B", 1, 0, [0.2] * 3),
            record("B", 1, 1, [0.6] * 3),
            record("B", 1, 2, [0.9] * 3),
        ]
    ).rows
    assert first.difference is None
    assert second.difference == Statistic(pytest.approx(0.1), pytest.approx(0.0))


@pytest.mark.parametrize(("first", "second"), [([0.1, 0.9, 0.9], [0.3]), ([0.1], [0.3, 0.9])])
def test_differences_are_over_the_rounds_that_both_did(record, first, second):
    _, row = summarise([record("A", 0, 0, first, 9), record("B", 1, 0, second, 9)]).rows
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(0.2)


def test_partial_records_are_noted(record):
    whole, short = record("A", 0, 0, [0.1] * 3), record("B", 1, 0, [0.1], rounds=3)
    summary = summarise([whole, replace(short, torn=True)])
    assert summary.notes == (
        "B, seed 0: stopped after 1 of 3 rounds",
        "B, seed 0: the last line of its record was cut off and is left out",
    )
    assert summary.rows[1].rounds == 1
    assert summary.rows[1].oscillation == Statistic(None, None)


def waiting(record, *awaited):
    lines = [replace(line, awaited=count) for line, count in zip(record.rounds, awaited, strict=True)]
    return replace(record, rounds=lines)


def test_rounds_in_which_a_model_waits_are_noted(record):
    moving = record("A", 0, 0, [0.1] * 3)  # an older record has no such field
    waited = [waiting(record("B", 1, 0, [0.1] * 3), 4, 1, 0), waiting(record("B", 1, 1, [0.1] * 3), 2, 0, 0)]
    stuck = waiting(record("C", 2, 0, [0.1] * 3), 9, 8, 7)
    assert summarise([moving, *waited, stuck]).notes == (
        "B: the model stayed as it was in 1 to 2 of 3 rounds, waiting for clients without any update so far; "
        "wait=false starts without them",
        "C: the model stayed as it was in 3 of 3 rounds, waiting for clients without any update so far, and is still "
        "waiting for 7; wait=false starts without them",
    )


def test_a_trial_without_rounds_has_no_figures(record):
    (row,) = summarise([record("A", 0, 0, [], rounds=3)]).rows
    assert (row.seeds, row.rounds, row.final) == ((), 0, Statistic(None, None))
