"""Every picture, with long titles and labels, is drawn within its edges, and its names beside each other."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import fedcore.reports
from fedcore.experiment.schema.pictures import Varied
from fedcore.reports.comparison import Comparison
from fedcore.reports.curves import draw_curves
from fedcore.reports.drawing import COLOURS, STYLES, fitted, look
from fedcore.reports.families import draw_family, families
from fedcore.reports.holdings import draw_holdings

LONG = "digits, shards (shards_per_client=2, distinct_classes=True), active in one round of ten, as the paper has it"
TITLES = ["short", LONG, f"{LONG}, {LONG}", "x" * 300]
LABELS = ["A", "FlexibleFedAvg (scheme=C, reboot=True, local_steps=5)", "SCAFFOLDMVR" * 6]
CHANGED = "participation Bernoulli -> Uniform, partition.shards_per_client 2 -> 3, rate.lr 0.2 -> 0.1, rounds 200 -> 10"


def titled(record, title):
    return replace(record, header=replace(record.header, title=title))


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize("labels", [LABELS, [str(i) for i in range(3)], [f"method number {i}" for i in range(30)]])
def test_curves(tmp_path, record, drawn, title, labels):
    records = [titled(record(label, i, 0, [0.5, 0.5 + i / 100]), title) for i, label in enumerate(labels)]
    paper = Comparison("P", accuracy={labels[0]: 99.0}, short="2 of 200 rounds, 1 of 3 seeds")
    for over in ("rounds", "uploadings"):
        draw_curves(records, tmp_path / "a.png", paper, over=over, changed=CHANGED)
    assert_names_apart(drawn[-1])


@pytest.mark.parametrize("title", TITLES)
def test_families(tmp_path, record, drawn, title):
    presets = [
        (
            f"p-{value}",
            Varied(family="p", title=title, label=LONG * 2, value=value),
            [titled(record(label, i, 0, [value / 100 + i / 50] * 3), title) for i, label in enumerate(LABELS)],
        )
        for value in (1.0, 9.0)
    ]
    (family,) = families(presets, tmp_path)
    draw_family(replace(family, changed=CHANGED, short="2 of 200 rounds, 1 of 3 seeds"))
    assert_names_apart(drawn[-1])


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (30, 10), (1000, 62)])
def test_holdings(tmp_path, drawn, title, clients, classes):
    counts = np.random.default_rng(0).poisson(1000, (clients, classes))
    draw_holdings(counts, tmp_path / "who.png", title=title)


def test_every_picture_is_tried_here():
    files = Path(fedcore.reports.__file__).parent.glob("*.py")
    drawing = {file.stem for file in files if "save_figure(" in file.read_text(encoding="utf-8")}
    assert drawing - {"drawing"} == {"curves", "families", "holdings"}


def test_a_text_that_fits_stays_as_it_is_and_no_word_is_lost():
    assert fitted("a\nb", 3, size=10) == "a\nb"
    assert fitted(LONG, 3, size=10).replace("\n", " ") == LONG
    assert fitted(LONG, 3, size=10).count("\n") >= 2
    assert fitted("x" * 99, 1, size=10).replace("\n", "") == "x" * 99


def test_of_two_methods_none_have_nearly_the_same_look():
    for near in ({"#0072B2", "#56B4E9"}, {"#D55E00", "#E69F00"}):  # the blues, the oranges
        one, other = (look(order) for order in range(len(COLOURS)) if COLOURS[order] in near)
        assert one[1] != other[1]
    assert [look(order)[1] for order in range(4)] == list(STYLES)


def assert_names_apart(figure):
    names = [text for text in figure.axes[0].texts if text.get_fontweight() == "bold"]
    boxes = sorted((name.get_window_extent(figure.canvas.get_renderer()) for name in names), key=lambda box: box.y0)
    assert len(boxes) >= 3
    for below, above in pairwise(boxes):
        assert below.y1 <= above.y0 + 2  # pixels, of 150 an inch
