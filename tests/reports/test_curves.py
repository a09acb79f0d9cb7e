import pytest

from fedcore.reports.curves import COLOURS, _apart, _band, draw_curves


def test_the_band_runs_from_the_lowest_to_the_highest_seed_and_ends_with_the_first(record):
    rounds, low, mean, high = _band([record("A", 0, 0, [0.1, None, 0.3, 0.5]), record("A", 0, 1, [0.3, None, 0.3])])
    assert rounds == [1, 3]
    assert low == pytest.approx([10, 30])
    assert mean == pytest.approx([20, 30])
    assert high == pytest.approx([30, 30])


def test_more_algorithms_than_colours_can_be_drawn(tmp_path, record):
    draw_curves([record(str(i), i, 0, [0.5, 0.5]) for i in range(len(COLOURS) + 2)], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_labels_are_moved_apart_and_stay_inside():
    assert _apart([1, 1, 5], gap=2, top=10) == [1, 3, 5]
    assert _apart([8, 8, 9], gap=2, top=10) == [5, 7, 9]
    assert _apart([], gap=2, top=10) == []
