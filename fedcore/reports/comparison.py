"""A paper's figures beside a run's, how far the run falls short of the paper's, or why they are not compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedcore.experiment.records import Record
from fedcore.experiment.schema.changes import Change, other_figures, said
from fedcore.reports.papers import ACCURACY, Figures, Line, compare, figures, lacking


@dataclass(frozen=True)
class Comparison:
    """The lines of a report on a paper.

    Attributes:
        source: which paper, and at what size its figures were taken.
        lines: its figures beside ours; none where they are withdrawn.
        accuracy: its accuracies in percent, by algorithm, for pictures; none where they are withdrawn.
        short: of how much of the paper's rounds and seeds ours are, where that is less; else empty.
        withdrawn: why its figures are not set beside ours; else empty.
    """

    source: str
    lines: tuple[Line, ...] = ()
    accuracy: Mapping[str, float] = field(default_factory=dict)
    short: str = ""
    withdrawn: str = ""

    @property
    def has_accuracies(self) -> bool:
        """Tell whether the paper's figures are accuracies, so that ours stand beside them."""
        return any(line.kind == ACCURACY for line in self.lines)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows."""
        here = "here, CUT SHORT" if self.short else "here"
        rows = [
            [line.what, line.paper, "–" if line.here is None else f"{line.here:.1f}", line.spread, str(line.seeds)]
            for line in self.lines
        ]
        return ["figure", "paper", here, "spread", "seeds"], rows

    @property
    def is_loud(self) -> bool:
        """Tell whether its remark is not to be overlooked."""
        return bool(self.short or self.withdrawn)

    def remark(self) -> str:
        """The sentences below the table, or in its place."""
        if self.withdrawn:
            return self.withdrawn
        return f"{self.source}." + (f" CUT SHORT here: {self.short}." if self.short else "")


def comparison(records: Sequence[Record], changed: Iterable[Change]) -> Comparison | None:
    """The figures of a paper beside those of an experiment's records; None where no paper has a figure of theirs.

    Args:
        records: of one experiment, as ``read_folder`` returns them: at least one.
        changed: what the experiment has otherwise than the preset whose name it bears.
    """
    paper = figures(records[0].header.preset)
    if paper is None:
        return None
    source, changed = sized(paper), tuple(changed)
    if others := other_figures(changed):
        why = f"No comparison with {source}: those figures are of another experiment (changed: {said(others)})."
        return Comparison(source, withdrawn=why)
    lines = tuple(compare(records, paper, _due(records, paper, changed)))
    return Comparison(source, lines, paper.accuracy, short(records, paper, changed)) if lines else None


def sized(paper: Figures) -> str:
    """The source of a paper's figures, and their size.

    >>> sized(Figures("A 2020, Table 1", rounds=200, seeds=3))
    'A 2020, Table 1; 200 rounds, 3 seeds'
    """
    size = [f"{paper.rounds} rounds"] if paper.rounds else []
    size += [f"{paper.seeds} seeds"] if paper.seeds else []
    return f"{paper.source}; {', '.join(size)}" if size else paper.source


def short(records: Sequence[Record], paper: Figures, changed: Iterable[Change] = ()) -> str:
    """Of how many of the paper's rounds and seeds the records are, where there are fewer: ``10 of 200 rounds``.

    Where the paper does not say how many it took, the preset's count; of rounds, those that were asked for.
    """
    return lacking(records, _due(records, paper, changed))


def _due(records: Sequence[Record], paper: Figures, changed: Iterable[Change]) -> tuple[int, int]:
    preset = {change.key: change.was for change in changed}
    asked = max((record.header.rounds for record in records), default=0)
    return paper.rounds or preset.get("rounds", asked), paper.seeds or len(preset.get("seeds", ()))
