"""Plots of curves."""

from dataclasses import replace

import pytest

from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.results import read_folder
from fedcore.sim.experiment.schema import ReportSettings, trials
from fedcore.sim.experiment.trial import run_trial
from fedcore.sim.reports.report import AXES, COLOURS, STYLES, band, draw_curves, look
from fedcore.sim.reports.statistics import Comparison, cost_table


def test_band_is_the_range_of_the_seeds(record):
    group = [record("A", 0, 0, [0.1, None, 0.3, 0.5]), record("A", 0, 1, [0.3, None, 0.3])]
    curve = band(group, "rounds")
    assert list(curve.index) == [1, 3]
    assert list(curve["low"]) == pytest.approx([10, 30])
    assert list(curve["mean"]) == pytest.approx([20, 30])
    assert list(curve["high"]) == pytest.approx([30, 30])


def test_band_of_the_mean(record):
    group = [record("A", 0, seed, [value]) for seed, value in enumerate((0.1, 0.2, 0.3))]
    standard_error = 10 / 3**0.5
    for kind, half in (("se", standard_error), ("95%", 4.302652729911275 * standard_error)):  # t with 2 degrees
        curve = band(group, "rounds", settings=ReportSettings(band=kind))
        assert curve.values.tolist() == [pytest.approx([max(0, 20 - half), 20, 20 + half])]
        sure = [record("A", 0, seed, [0.9 + value]) for seed, value in enumerate((0, 0.1))]
        high = band(sure, "rounds", settings=ReportSettings(band=kind))
        assert high["high"].tolist() == [pytest.approx(100)]
        assert band(group[:1], "rounds", settings=ReportSettings(band=kind)).values.tolist() == [[10, 10, 10]]


def test_curves_are_smoothed_over_evaluated_rounds(record):
    curve = band([record("A", 0, 0, [0.1, None, 0.3, 0.8])], "rounds", settings=ReportSettings(smooth=3))
    assert list(curve.index) == [1, 3, 4]
    assert list(curve["mean"]) == pytest.approx([20, 40, 55])


def test_formats_and_notes_of_a_plot(tmp_path, record, drawn):
    records = [record(label, order, seed, [0.1, 0.4]) for order, label in enumerate("AB") for seed in (0, 1)]
    settings = ReportSettings(formats=("pdf", "svg"), band="se", smooth=2)
    svg = draw_curves(records, tmp_path / "a.png", settings=settings)
    note = drawn[-1].axes[0].get_title(loc="left").replace("\n", " ")
    assert "mean of 2 seeds, band: standard error of the mean, smoothed over 2 evaluated rounds" in note
    assert draw_curves(records, tmp_path / "b.png", settings=settings) == svg == (tmp_path / "a.svg").read_text()
    for suffix, begin in ((".pdf", b"%PDF"), (".svg", b"<?xml")):
        one, other = (tmp_path / f"{name}{suffix}" for name in "ab")
        assert one.read_bytes().startswith(begin)
        assert one.read_bytes() == other.read_bytes()
    for part in ("line", "band", "handle-key", "text-key"):
        assert svg.count(f'id="curve-1-{part}"') == 1


def test_wide_range_of_losses_has_a_logarithmic_axis(tmp_path, record, drawn):
    near, far = record("A", 0, 0, [0.1, None, 0.3]), record("B", 1, 0, [0.2, 0.5, 0.99])
    for records, scale in (([near], "linear"), ([near, far], "log")):
        draw_curves(records, tmp_path / "a.png", measure="loss")
        (axes,) = drawn[-1].axes
        assert axes.get_yscale() == scale
        assert all(float(label.get_text().replace("\N{MINUS SIGN}", "-")) >= 0 for label in axes.get_yticklabels())
        assert axes.lines[0].get_ydata() == pytest.approx([0.9, 0.7])
        assert axes.get_title(loc="left").startswith("Test loss (mean cross entropy)")
    curve = band([near], "rounds", "loss")
    assert (list(curve.index), curve.values.tolist()) == ([1, 3], [[0.9, 0.9, 0.9], [0.7, 0.7, 0.7]])


def test_rounds_in_which_a_model_waits_have_crosses(tmp_path, record, drawn):
    lines = record("A", 0, 0, [0.1, 0.1, 0.3, 0.5])
    pending = replace(lines, rounds=[replace(line, pending=max(2 - line.round, 0)) for line in lines.rounds])
    draw_curves([pending, record("B", 1, 0, [0.1, 0.2])], tmp_path / "a.png")
    (axes,) = drawn[-1].axes
    (crosses,) = (line for line in axes.lines if line.get_marker() == "x")
    assert list(crosses.get_xdata()) == [1, 2]
    assert "crosses: the model stays, waiting for clients" in axes.get_title(loc="left").replace("\n", " ")
    draw_curves([lines], tmp_path / "b.png")
    assert "crosses" not in drawn[-1].axes[0].get_title(loc="left")


def test_the_loss_has_no_dotted_lines(tmp_path, record, drawn):
    """The papers print accuracies."""
    paper = Comparison("P", accuracy={"A": 50.0})
    for measure, lines in (("accuracy", 2), ("loss", 1)):
        draw_curves([record("A", 0, 0, [0.4, 0.5])], tmp_path / "a.png", paper, measure=measure)
        assert len(drawn[-1].axes[0].lines) == lines


def test_more_algorithms_than_colours(tmp_path, record):
    draw_curves([record(str(i), i, 0, [0.5, 0.5]) for i in range(len(COLOURS) + 2)], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_similar_colours_have_different_styles():
    for near in ({"#0072B2", "#56B4E9"}, {"#D55E00", "#E69F00"}):  # the blues, the oranges
        one, other = (look(order) for order in range(len(COLOURS)) if COLOURS[order] in near)
        assert one[1] != other[1]
    assert [look(order)[1] for order in range(4)] == list(STYLES)


def test_method_with_two_vectors_has_twice_the_uploadings(tmp_path, drawn):
    changes = ["algorithms=['SCAFFOLD', {name='SCAFFOLD', control='sent', label='sent'}]", "rounds=2", "seeds=[0]"]
    for trial in trials(load_preset("quickstart", [*changes, "local.epochs=1"])):
        run_trial(trial, tmp_path)
    records = read_folder(tmp_path)
    for over, ends in (("rounds", [2, 2]), ("uploadings", [2, 4])):
        draw_curves(records, tmp_path / "a.png", over=over)
        (axes,) = drawn[-1].axes
        assert [max(line.get_xdata()) for line in axes.lines] == ends
        assert axes.get_xlabel() == AXES[over]


def test_curves_over_virtual_seconds(tmp_path, record, drawn):
    """A round is at its mean time over the seeds, also where the model waits."""
    records = []
    for seed, times in ((0, (2.0, 3.0)), (1, (4.0, 9.0))):
        one = record("A", 0, seed, [0.5, 0.6])
        lines = [
            replace(line, clock=time, pending=1 - line.round) for line, time in zip(one.rounds, times, strict=True)
        ]
        records.append(replace(one, rounds=lines))
    draw_curves(records, tmp_path / "a.png", over="seconds")
    (axes,) = drawn[-1].axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [[3, 6], [3]]
    assert axes.get_xlabel() == AXES["seconds"]
    assert cost_table(records)["virtual s"].tolist() == ["6.0"]


def test_older_records_are_drawn_over_rounds(tmp_path, record, drawn):
    old = record("A", 0, 0, [0.5, 0.6])
    new = replace(old, rounds=[replace(line, uploadings=2 * line.round + 2) for line in old.rounds])
    for records, end, label in (([new], 4, "uploadings"), ([old, new], 2, "rounds")):
        draw_curves(records, tmp_path / "a.png", over="uploadings")
        assert max(drawn[-1].axes[0].lines[0].get_xdata()) == end
        assert drawn[-1].axes[0].get_xlabel() == AXES[label]
