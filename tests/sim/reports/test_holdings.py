"""Tables and plots of the clients' examples."""

import io

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from fedcore.sim.reports.report import draw_holdings, holdings_table

COUNTS = np.array([[8, 0, 4], [0, 1000, 0], [0, 0, 0], [1, 2, 16]])


def shown(width=120, **options):
    console = Console(width=width, file=io.StringIO())
    console.print(holdings_table(COUNTS, title="title", **options))
    return console.file.getvalue().splitlines()


def test_line_per_client_and_bar_per_class():
    lines = shown()
    assert lines[0] == "title"
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert rows[:4] == [
        ["0", "12", "2", "█·▄"],
        ["1", "1,000", "1", "·█·"],
        ["2", "0", "0", "···"],
        ["3", "19", "3", "▁▁█"],
    ]


def test_summary_below_the_table():
    assert "1,031 examples at 4 clients: 0 to 1,000 each (median 16), 0 to 3 of 3 classes each" in " ".join(shown())


def test_long_table_is_cut():
    lines = shown(most=2)
    assert sum(line.strip()[:1].isdigit() and "examples" not in line for line in lines) == 2
    named = shown(most=2, names=["site [1]", "b", "c", "d"])
    assert [line.strip().split("  ")[0] for line in named if ": " in line[:20]] == ["0: site [1]", "1: b"]
    assert "... and 2 more clients" in lines
    assert "1,031 examples at 4 clients" in " ".join(lines)


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (4, 3), (300, 62)])
def test_sizes_of_the_plot(tmp_path, clients, classes):
    counts = np.random.default_rng(0).poisson(0.5, (clients, classes))
    draw_holdings(counts, tmp_path / "holdings.png", title="title")
    assert imread(tmp_path / "holdings.png").shape[2] == 4


def test_plot_without_examples(tmp_path):
    draw_holdings(np.zeros((3, 2), np.int64), tmp_path / "holdings.png", title="nothing")
    assert (tmp_path / "holdings.png").stat().st_size > 5_000


def test_plot_is_dark_for_large_counts(tmp_path):
    one, other = np.zeros((2, 6, 6), np.int64)
    one[0, :3], other[5, 3:] = 9, 9
    pictures = []
    for number, counts in enumerate((one, other)):
        draw_holdings(counts, tmp_path / f"{number}.png", title="title")
        image = imread(tmp_path / f"{number}.png")[..., :3]
        blue = (image[..., 2] - image[..., 0] > 0.15) & (np.abs(image - np.array([0, 0.447, 0.698])).max(axis=2) > 0.05)
        rows, columns = np.nonzero(blue[:, : int(0.85 * blue.shape[1])])
        pictures.append((rows.mean(), columns.mean()))
    assert pictures[0][0] < pictures[1][0]  # low classes above
    assert pictures[0][1] < pictures[1][1]  # the first client on the left
