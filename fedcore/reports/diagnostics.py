"""The cost and the course of a run's rounds: traffic, seconds by part, and the diagnostics of the reports."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

from fedcore.experiment.records import Record, RoundRecord
from fedcore.reports.table import markdown_lines

DIAGNOSTICS = ("diversity", "correction_norm", "staleness")
NOTE = (
    "Means over trials: model vectors that one client sends in a round, MB up and down (float32, the active clients), "
    "and seconds by what they went to. Medians over rounds and trials: gradient diversity, the correction's length, "
    "and the rounds since the clients heard were heard last; – where a method has none."
)


def diagnostics_table(records: Sequence[Record]) -> str:
    """The table as Markdown, under a heading of its own.

    Args:
        records: of one experiment, as ``read_folder`` returns them: at least one.
    """
    return "\n".join(["## What it took", "", *markdown_lines(*diagnostics(records)), "", NOTE]) + "\n"


def diagnostics(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each algorithm.

    Args:
        records: of one experiment, as ``read_folder`` returns them: at least one.
    """
    by_algorithm: dict[str, list[Record]] = {}
    for record in records:
        if record.rounds:
            by_algorithm.setdefault(record.header.algorithm, []).append(record)
    parts = list(dict.fromkeys(part for record in records for line in record.rounds for part in line.seconds))
    headings = ["algorithm", "vectors up", "MB up", "MB down", *(f"{part} s" for part in parts), *DIAGNOSTICS]
    rows = []
    for label, group in by_algorithm.items():
        cells = [label, *_traffic(group)]
        cells += [f"{_mean(group, _seconds(part)):.1f}" for part in parts]
        cells += [_middle(getattr(line, name) for record in group for line in record.rounds) for name in DIAGNOSTICS]
        rows.append(cells)
    return headings, rows


def _traffic(group: Sequence[Record]) -> list[str]:
    ends = [record.rounds[-1] for record in group]
    vectors = [end.uploadings / (end.round + 1) for end in ends if end.uploadings is not None]
    down = all(line.bytes_down is not None for record in group for line in record.rounds)
    return [
        f"{fmean(vectors):g}" if vectors else "–",
        f"{_mean(group, lambda line: line.bytes) / 1e6:.1f}",
        f"{_mean(group, lambda line: line.bytes_down or 0) / 1e6:.1f}" if down else "–",
    ]


def _mean(group: Sequence[Record], of: Callable[[RoundRecord], float]) -> float:
    """The mean over trials of a sum over rounds."""
    return fmean(sum(of(line) for line in record.rounds) for record in group)


def _seconds(part: str) -> Callable[[RoundRecord], float]:
    return lambda line: line.seconds.get(part, 0.0)


def _middle(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.3g}" if known else "–"
