"""The reports of a sweep's folder: each preset's, with every algorithm's best point, an overview, and every trial.

The best point of an algorithm is the one with the highest accuracy (the mean over the last 10 evaluated rounds, then
over the seeds) among those whose trials are all complete. Where none is, nothing is chosen of it. It is chosen on the
test set, as the papers do; what is chosen among many is a little too good.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from fedcore.errors import MissingDataError
from fedcore.experiment.folder import CONFIG
from fedcore.experiment.records import Record, read_folder
from fedcore.reports import page
from fedcore.reports.papers import figures
from fedcore.reports.report import PAPER, Report, report_on, rows, sized
from fedcore.reports.summary import final
from fedcore.reports.table import cells, markdown_lines


@dataclass(frozen=True)
class Overview:
    """The reports of a sweep, preset by preset, and the files about all of them."""

    reports: dict[str, Report]
    files: tuple[Path, ...]


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds runs below it, and is none itself."""
    return not (folder / "records").exists() and any(True for _ in folder.rglob(CONFIG))


def write_overview(folder: Path) -> Overview:
    """Write the reports of every preset of a sweep, whole or partial, an overview of them, and ``trials.csv``.

    Raises:
        MissingDataError: there are no records, or one is damaged.
    """
    reports = {}
    found = _presets(folder)
    for preset, runs in found.items():
        records, notes = best(runs)
        if records:
            config = next(iter(runs.values()))[0] / CONFIG
            place = folder / preset
            reports[preset] = report_on(records, place, notes=notes, config=config.read_text(encoding="utf-8"))
    if not reports:
        raise MissingDataError(f"{folder}: expected records (PRESET/records/*.jsonl), found none")
    files = tuple(folder / name for name in ("overview.md", "overview.csv", "overview.html", "trials.csv"))
    files[0].write_text(_markdown(reports), encoding="utf-8")
    _write_csv(reports, files[1])
    files[2].write_text(_html(reports, folder), encoding="utf-8")
    _write_trials(found, files[3])
    return Overview(reports, files)


Runs = dict[str, tuple[Path, list[Record]]]
"""A preset's points by name, each with its folder and its records."""


def best(runs: Runs) -> tuple[list[Record], list[str]]:
    """The records of every algorithm's best point, in the order of the comparison, and notes that name the points."""
    tried: dict[str, dict[str, list[Record]]] = {}
    for point, (_, records) in sorted(runs.items(), key=lambda item: (item[0].count("="), item[0])):
        for record in records:
            tried.setdefault(record.header.algorithm, {}).setdefault(point, []).append(record)
    found, notes = [], []
    for order, (label, by_point) in enumerate(_in_order(tried).items()):
        scores = {point: score for point, records in by_point.items() if (score := _score(records)) is not None}
        if len(by_point) == 1:
            scores = dict.fromkeys(by_point, 0.0)  # nothing to choose from, so a part of it can be shown too
        if not scores:
            notes.append(f"{label}: no point is complete")
            continue
        point = max(scores, key=scores.__getitem__)
        if len(by_point) > 1:
            notes.append(f"{label}: {point}, the best of {len(scores)} complete points of {len(by_point)}")
        found += [replace(record, header=replace(record.header, order=order)) for record in by_point[point]]
    return found, notes


def _in_order(tried: dict[str, dict[str, list[Record]]]) -> dict[str, dict[str, list[Record]]]:
    """Labels by how many keys concern them, then as their experiments have them: the plain methods come first."""

    def place(label: str) -> tuple[int, int]:
        point, records = next(iter(tried[label].items()))
        return point.count("="), records[0].header.order

    return {label: tried[label] for label in sorted(tried, key=place)}


def _score(records: Sequence[Record]) -> float | None:
    if any(len(record.rounds) < record.header.rounds for record in records):
        return None
    values = [value for record in records if (value := final(record)) is not None]
    return fmean(values) if values else None


def _presets(folder: Path) -> dict[str, Runs]:
    found: dict[str, Runs] = {}
    for config in sorted(folder.rglob(CONFIG)):
        run = config.parent
        try:
            records = read_folder(run)
        except MissingDataError:
            if any((run / "records").glob("*.jsonl")):
                raise
            continue  # its turn has not come
        preset = records[0].header.preset
        inside = run.relative_to(folder / preset)
        found.setdefault(preset, {})["" if inside == Path() else str(inside)] = run, records
    return found


def _markdown(reports: dict[str, Report]) -> str:
    lines: list[str] = []
    for preset, report in reports.items():
        lines += [f"## {report.summary.title}", "", f"`{preset}`, {_size(report)}.", ""]
        if report.lines:
            paper = figures(preset)
            lines += [*markdown_lines(PAPER, rows(report.lines)), "", f"{sized(paper)}." if paper else ""]
        else:
            lines += markdown_lines(*cells(report.summary))
        lines += ["", *(f"- {note}" for note in report.summary.notes), ""]
    return "\n".join(lines)


def _html(reports: dict[str, Report], folder: Path) -> str:
    parts = []
    for preset, report in reports.items():
        parts += [page.heading(report.summary.title), page.paragraph(f"{preset}, {_size(report)}", faint=True)]
        parts.append(page.table(PAPER, rows(report.lines)) if report.lines else page.table(*cells(report.summary)))
        parts += [page.picture(folder / preset / "curves.png", report.summary.title)]
        parts += [page.paragraph(note, faint=True) for note in report.summary.notes]
    return page.page("Overview", parts)


def _write_csv(reports: dict[str, Report], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["preset", "figure", "paper", "here", "spread", "seeds", "rounds"])
        for preset, report in reports.items():
            rounds = report.summary.rows[0].rounds
            for line in report.lines:
                here = "" if line.here is None else f"{line.here:.2f}"
                writer.writerow([preset, line.what, line.paper, here, line.spread, line.seeds, rounds])
            for row in report.summary.rows:
                if not report.lines and row.final.mean is not None:
                    spread = "" if row.final.deviation is None else f"± {100 * row.final.deviation:.2f}"
                    here = f"{100 * row.final.mean:.2f}"
                    figure = f"{row.algorithm}, accuracy %"
                    writer.writerow([preset, figure, "", here, spread, len(row.seeds), row.rounds])


def _write_trials(found: dict[str, Runs], path: Path) -> None:
    """A line for each trial, whole or not: its result in full precision, as a fraction."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["preset", "point", "algorithm", "seed", "rounds", "accuracy", "uploads", "seconds"])
        for preset, runs in found.items():
            for point, (_, records) in runs.items():
                for record in records:
                    header, lines = record.header, record.rounds
                    uploads = lines[-1].uploads if lines else 0
                    seconds = round(sum(sum(line.seconds.values()) for line in lines), 1)
                    own = [header.algorithm, header.seed, len(lines), final(record), uploads, seconds]
                    writer.writerow([preset, point, *own])


def _size(report: Report) -> str:
    row = report.summary.rows[0]
    return f"{row.rounds} rounds, seeds {', '.join(map(str, row.seeds))}"
