from collections.abc import Callable
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from fedcore.sim.experiment.results import Header, Record, RoundRecord
from tests.sim.reports.kit import write_lines

Make = Callable[..., Record]


@pytest.fixture
def record() -> Make:
    """Makes a record from the accuracies of its rounds; the loss of an evaluated round is 1 - accuracy."""

    def make(algorithm, order, seed, accuracies, rounds=None, window=10):
        lines = []
        for round, accuracy in enumerate(accuracies):
            loss = None if accuracy is None else 1 - accuracy
            lines.append(RoundRecord(round, [0], 1, 0, accuracy, loss, 0.1, 0.1, 5, round + 1, 1.0, 8, {"train": 0.5}))
        header = Header("p", "P", algorithm, order, seed, rounds or len(lines), "0")
        return Record(header, lines, torn=False, window=window)

    return make


@pytest.fixture
def put(tmp_path, record):
    """Writes the record of a trial into the folder of a point, below ``tmp_path``."""

    def put(point, label, order, seed, accuracies, rounds=None, preset="p", pending=None, title="P"):
        folder = tmp_path / preset / point
        one = record(label, order, seed, accuracies, rounds)
        lines = [replace(line, pending=pending) for line in one.rounds]
        one = replace(one, header=replace(one.header, preset=preset, title=title), rounds=lines)
        write_lines(folder / "records" / f"{order}-{label}-seed{seed}.jsonl", one)
        if not (folder / "config.json").exists():
            (folder / "config.json").write_text("{}")
        return folder

    return put


@pytest.fixture
def drawn(monkeypatch):
    """The saved figures, which must not reach past their edges."""
    figures = []
    save = Figure.savefig

    def keep(figure, *arguments, **options):
        if figure not in figures:  # a figure may be saved in several formats
            figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    yield figures
    for figure in figures:
        width, height = figure.get_size_inches()
        box = figure.get_tightbbox(figure.canvas.get_renderer())
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, f"{box} in {width} x {height} inches"
