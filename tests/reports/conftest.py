from collections.abc import Callable, Sequence

import pytest
from matplotlib.figure import Figure

from fedcore.experiment.records import Header, Record, RoundRecord

Make = Callable[..., Record]


@pytest.fixture
def record() -> Make:
    """Makes a record from the accuracies of its rounds."""

    def make(
        algorithm: str, order: int, seed: int, accuracies: Sequence[float | None], rounds: int | None = None
    ) -> Record:
        lines = [
            RoundRecord(round, [0], 1, 0, accuracy, None, 0.1, 0.1, 5, round + 1, 1.0, 8, {"train": 0.5})
            for round, accuracy in enumerate(accuracies)
        ]
        return Record(Header("p", "P", algorithm, order, seed, rounds or len(lines), "0"), lines, torn=False)

    return make


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (figures.append(figure), save(figure, path)))
    return figures
