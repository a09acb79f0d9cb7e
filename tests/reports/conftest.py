from collections.abc import Callable, Sequence

import pytest
from matplotlib.figure import Figure

from fedcore.experiment.results import Header, Record, RoundRecord

Make = Callable[..., Record]


@pytest.fixture
def record() -> Make:
    """Makes a record from the accuracies of its rounds; where one is evaluated its loss is 1 - accuracy."""

    def make(
        algorithm: str, order: int, seed: int, accuracies: Sequence[float | None], rounds: int | None = None
    ) -> Record:
        lines = [
            RoundRecord(
                round,
                [0],
                1,
                0,
                accuracy,
                None if accuracy is None else 1 - accuracy,
                0.1,
                0.1,
                5,
                round + 1,
                1.0,
                8,
                {"train": 0.5},
            )
            for round, accuracy in enumerate(accuracies)
        ]
        return Record(Header("p", "P", algorithm, order, seed, rounds or len(lines), "0"), lines, torn=False)

    return make


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, all of them whole."""
    figures = []
    save = Figure.savefig

    def keeping(figure, *place, **how):
        figures.append(figure)
        save(figure, *place, **how)

    monkeypatch.setattr(Figure, "savefig", keeping)
    yield figures
    for figure in figures:
        assert_whole(figure)


def assert_whole(figure):
    """Nothing that is drawn reaches past the picture's edges."""
    width, height = figure.get_size_inches()
    taken = figure.get_tightbbox(figure.canvas.get_renderer())
    assert taken.x0 >= 0, f"{-taken.x0:.2f} inches are cut off on the left"
    assert taken.y0 >= 0, f"{-taken.y0:.2f} inches are cut off below"
    assert taken.x1 <= width, f"{taken.x1 - width:.2f} inches are cut off on the right"
    assert taken.y1 <= height, f"{taken.y1 - height:.2f} inches are cut off above"
