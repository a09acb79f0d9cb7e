"""Families: presets that vary one value, plotted over it."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from fedcore.errors import MissingDataError
from fedcore.sim.experiment.schema import Varied
from fedcore.sim.reports import write_overview
from fedcore.sim.reports.report import Config
from fedcore.sim.reports.statistics import ACCURACY, CROSSING, POINTS
from fedcore.sim.reports.sweeps import families
from tests.sim.reports.kit import Page, diamonds, read_csv, write_lines


def varied(value, family="mine/figure", label="p"):
    return Varied(family=family, title="Mine", label=label, value=value)


def lines(family, kind):
    """The rows of each label, by the varied value."""
    figures = family.figures[family.figures["kind"] == kind]
    return {label: rows.set_index("x") for label, rows in figures.groupby("label", sort=False)}


@pytest.fixture
def runs(record):
    """Three presets with two methods and two seeds, the one with the largest value first."""
    return [
        (
            f"mine/figure-{value}",
            varied(value),
            [
                record(label, order, seed, [value / 10 + order / 20 + seed / 50] * 3)
                for order, label in enumerate("AB")
                for seed in (0, 1)
            ],
        )
        for value in (9.0, 1.0, 4.0)
    ]


def test_line_of_each_method(tmp_path, runs):
    (family,) = families(runs, tmp_path)
    assert list(family.members.items()) == [(1, "mine/figure-1.0"), (4, "mine/figure-4.0"), (9, "mine/figure-9.0")]
    assert set(family.figures["kind"]) == {ACCURACY}
    found = lines(family, ACCURACY)
    assert list(found) == ["A", "B"]
    assert found["B"]["low"].to_dict() == pytest.approx({x: 10 * x + 5 for x in (1, 4, 9)})
    assert found["B"]["high"].to_dict() == pytest.approx({x: 10 * x + 7 for x in (1, 4, 9)})
    assert family.place == tmp_path / "mine" / "figure-over-p.png"
    (table,) = family.tables()
    assert list(table.columns) == ["Test accuracy (%) over p", "1", "4", "9"]
    assert table.values.tolist()[1] == ["B", "16.0 ± 1.4", "46.0 ± 1.4", "96.0 ± 1.4"]
    assert family.size == "3 rounds, 2 seeds"


def test_plot_of_a_family(tmp_path, runs, drawn):
    (family,) = families(runs, tmp_path)
    family.place.parent.mkdir()
    family.draw()
    (axes,) = drawn[-1].axes
    for order, container in enumerate(axes.containers):
        line, _, (bars,) = container
        assert line.get_ydata() == pytest.approx([11 + 5 * order, 41 + 5 * order, 91 + 5 * order])
        assert line.get_xdata() == pytest.approx([1, 4, 9], abs=0.1)
        ends = [segment[:, 1] for segment in bars.get_segments()]
        assert ends[0] == pytest.approx([10 + 5 * order, 12 + 5 * order])
    assert axes.get_xscale() == "linear"
    assert axes.get_xlabel() == "p"
    assert axes.get_xticks() == pytest.approx([1, 4, 9])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["A", "B"]


def test_wide_range_has_a_logarithmic_axis(tmp_path, runs, drawn):
    wide = [(preset, varied(value), records) for (preset, _, records), value in zip(runs, (100, 5, 10), strict=True)]
    (family,) = families(wide, tmp_path / "mine")
    (tmp_path / "mine" / "mine").mkdir(parents=True)
    family.draw()
    assert drawn[-1].axes[0].get_xscale() == "log"
    assert drawn[-1].axes[0].containers[0][0].get_xdata() == pytest.approx([5, 10, 100], rel=0.02)


def test_family_needs_two_members(tmp_path, runs):
    assert families(runs[:1], tmp_path) == []
    (preset, _, records), *others = runs
    assert families([(preset, None, records), others[0]], tmp_path) == []
    assert families([(preset, varied(9.0, family="other"), records), others[0]], tmp_path) == []
    assert families([(preset, varied(9.0, label="q"), records), others[0]], tmp_path) == []


def test_incomplete_trials_are_excluded(tmp_path, runs, record):
    preset, value, records = runs[0]
    short = [*records[:3], record("B", 1, 1, [0.1], rounds=3)]
    (family,) = families([(preset, value, short), *runs[1:]], tmp_path)
    own = lines(family, ACCURACY)["B"].loc[9]
    assert (own["mean"], own["seeds"]) == (pytest.approx(95), 1)
    assert family.size == "3 rounds, 2 seeds"
    none = [replace(one, rounds=one.rounds[:1]) for one in records]
    (family,) = families([(preset, value, none), *runs[1:]], tmp_path)
    assert list(family.members) == [1, 4]


def test_figures_of_the_paper(tmp_path, record, drawn):
    runs = []
    for traces, gap in ((1, 0.0), (2, 0.05), (4, 0.2)):
        records = [record(label, order, 0, [0.5 + gap * order] * 3) for order, label in enumerate("ABC")]
        own = varied(traces, "flexible/table3-synthetic-niid", "|T|")
        runs.append((f"flexible/table3-synthetic-niid-t{traces}", own, records))
    (family,) = families(runs, tmp_path)
    assert family.place.name == "table3-synthetic-niid-over-T.png"
    assert list(family.figures["kind"].unique()) == [ACCURACY, POINTS]
    above = lines(family, POINTS)["B - A"]
    assert list(above["order"]) == [1, 1, 1]  # in the colour of B
    assert above["paper"].to_dict() == {1: 0.1, 2: 9.6, 4: 38.2}
    assert above["mean"].to_dict() == pytest.approx({1: 0, 2: 5, 4: 20}, abs=1e-9)
    family.place.parent.mkdir()
    family.draw()
    top, bottom = drawn[-1].axes
    assert top.containers[1][0].get_color() == bottom.containers[0][0].get_color()
    assert list(diamonds(bottom)[0].get_ydata()) == [0.1, 9.6, 38.2]


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.0, 0.6, 0.878, 0.938, 0.949), ["0", "0.6", "0.878"]),  # zeta of NFSGD: the last three are close
        ((1, 2, 4), ["1", "2", "4"]),
    ],
)
def test_labels_of_close_values_do_not_overlap(tmp_path, record, drawn, values, labels):
    runs = [
        (f"mine/figure-{x}", varied(x, "mine/figure", "zeta"), [record("A method of some length", 0, 0, [0.5] * 3)])
        for x in values
    ]
    (family,) = families(runs, tmp_path)
    family.place.parent.mkdir()
    family.draw()
    shown = drawn[-1].axes[0].get_xticklabels()
    assert [label.get_text() for label in shown] == labels
    boxes = [label.get_window_extent() for label in shown]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_no_mean_if_a_seed_never_reaches_the_event(tmp_path, record):
    runs = []
    for at in (10, 15):
        below = [record("include", 0, seed, [0.5] * 30) for seed in (0, 1)]
        above = [record("exclude", 1, seed, [0.4] * 20 + [0.6 if seed or at == 10 else 0.3] * 10) for seed in (0, 1)]
        own = varied(at, "flexible/table5-1", "round of the departure")
        runs.append((f"flexible/table5-1-t{at}", own, below + above))
    (family,) = families(runs, tmp_path)
    line = lines(family, CROSSING)["exclude - include"]
    assert line["mean"].loc[10] == 9
    assert np.isnan(line["mean"].loc[15])
    assert list(line["seeds"]) == [2, 2]
    _, table = family.tables()
    assert table.values.tolist() == [
        ["exclude - include", "9.0 ± 0.0", "–"],
        ["exclude - include, the paper", "10", "9"],
    ]
    family.place.parent.mkdir()
    family.draw()


def test_report_of_a_sweep_has_the_plot(tmp_path, runs):
    for preset, value, records in runs:
        for record in records:
            named = replace(record, header=replace(record.header, preset=preset))
            write_lines(tmp_path / preset / "records" / f"{named.header.algorithm}-{named.header.seed}.jsonl", named)
        config = {"pictures": {"varied": value.model_dump()}}
        (tmp_path / preset / "config.json").write_text(json.dumps(config))
    assert tmp_path / "mine" / "figure-over-p.png" in write_overview(tmp_path).files
    assert (tmp_path / "mine" / "figure-over-p.png").read_bytes().startswith(b"\x89PNG")
    page = Page(tmp_path / "overview.html")
    assert len(page.images) + page.tags.count("svg") == 7
    assert "| Test accuracy (%) over p | 1 | 4 | 9 |" in (tmp_path / "overview.md").read_text()
    assert len(read_csv(tmp_path / "overview.csv")) == 6


def test_older_configuration_has_the_pictures_of_its_preset():
    assert Config.parse("mimic/figure6-p30", "{}").pictures.varied.value == 0.3
    assert Config.parse("mimic/figure6-p30", "").pictures.over == "uploadings"
    assert Config.parse("mimic/figure6-p30", '{"pictures": {}}').pictures.varied is None
    assert Config.parse("mine", "{}").pictures.over == "rounds"
    with pytest.raises(MissingDataError, match=r"mine: its config\.json is damaged"):
        Config.parse("mine", '{"pictures": {"over": "days"}}')
