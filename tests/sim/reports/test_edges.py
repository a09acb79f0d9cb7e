"""Plots with long titles and labels stay within their edges."""

from dataclasses import replace

import numpy as np
import pytest

from fedcore.sim.experiment.schema import Varied
from fedcore.sim.reports.report import draw_curves, draw_holdings
from fedcore.sim.reports.statistics import Comparison
from fedcore.sim.reports.sweeps import families

LONG = "digits, shards (shards_per_client=2, distinct_classes=True), active in one round of ten, as the paper has it"
TITLES = ["short", f"{LONG}, {LONG}", "x" * 300]
LABELS = ["A", "FlexibleFedAvg (scheme=C, reboot=True, local_steps=5)", "SCAFFOLDMVR" * 6]
CHANGED = "participation Bernoulli -> Uniform, partition.shards_per_client 2 -> 3, rate.lr 0.2 -> 0.1, rounds 200 -> 10"


def titled(record, title):
    return replace(record, header=replace(record.header, title=title))


@pytest.mark.sample(1)
@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize("labels", [LABELS, [str(i) for i in range(3)], [f"method number {i}" for i in range(30)]])
def test_curves(tmp_path, record, drawn, title, labels):
    records = [titled(record(label, i, 0, [0.5, 0.5 + i / 100]), title) for i, label in enumerate(labels)]
    paper = Comparison("P", accuracy={labels[0]: 99.0}, short="2 of 200 rounds, 1 of 3 seeds")
    for over in ("rounds", "uploadings"):
        draw_curves(records, tmp_path / "a.png", paper, over=over, changed=CHANGED)
    assert_legend_has(drawn[-1], labels)


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
    replace(family, changed=CHANGED, short="2 of 200 rounds, 1 of 3 seeds").draw()
    assert_legend_has(drawn[-1], LABELS)


@pytest.mark.parametrize(
    ("title", "clients", "classes"),
    [*((title, 30, 10) for title in TITLES), *((title, 1, 1) for title in TITLES), (TITLES[1], 1000, 62)],
)
def test_holdings(tmp_path, drawn, title, clients, classes):
    counts = np.random.default_rng(0).poisson(1000, (clients, classes))
    draw_holdings(counts, tmp_path / "holdings.png", title=title)


def assert_legend_has(figure, labels):
    """The legend has each label, apart from line breaks."""
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert ["".join(name.split()) for name in names] == ["".join(label.split()) for label in labels]


def test_legend_has_labels_with_an_underscore(tmp_path, record, drawn):
    draw_curves([record("_Mine $x", 0, 0, [0.5, 0.6])], tmp_path / "a.png")
    assert_legend_has(drawn[-1], ["_Mine $x"])
