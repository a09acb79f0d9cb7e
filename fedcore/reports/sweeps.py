"""The reports of a sweep's folder: each preset's, with every algorithm's best point, a picture of each family of
presets that vary one thing, an overview with a table of conditions x methods, and every trial.

The best point of an algorithm is the one with the highest accuracy (the mean over the last 10 evaluated rounds, then
over the seeds) among those whose trials are all complete, with each seed that another is complete with. Where
none is, nothing is chosen of it. It is chosen on the test set, as the papers do; what is chosen among many is
a little too good. Where a grid changes the problem, not only choices within a method, each problem is a condition with
a report of its own: nobody chooses among problems.
"""

import csv
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from fedcore.atomic_file import inside, replacing, require_file, write_text
from fedcore.errors import MissingDataError
from fedcore.experiment.records import Record, read_folder
from fedcore.experiment.run_folder import CONFIG, runs_in
from fedcore.experiment.schema.changes import Change, Changes
from fedcore.reports import conditions as table_of
from fedcore.reports import html_page as page
from fedcore.reports.conditions import Condition, condition, setting_of
from fedcore.reports.families import Family, draw_family, families
from fedcore.reports.report import (
    FILES,
    Report,
    changes,
    paper_lines,
    paper_parts,
    picture_parts,
    pictures,
    report_on,
)
from fedcore.reports.summary import Statistic, final, final_loss, waiting
from fedcore.reports.table import cells, code_span, escaped, legend, markdown_lines

MOST = 10
"""Folders that are named."""


@dataclass(frozen=True)
class Overview:
    """The reports of a sweep by condition, the files about all of them, and notes on what is left out.

    A condition is a preset, or ``PRESET, SETTING`` where its grid has several settings of the problem: see
    ``Condition.name``.
    """

    reports: dict[str, Report]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def is_sweep(folder: Path) -> bool:
    """Tell whether a folder holds runs below it, and is none itself."""
    return runs_in(folder) != [folder]


def write_overview(folder: Path) -> Overview:
    """Write the reports of every preset of a sweep, whole or partial, an overview of them, and ``trials.csv``.

    A condition's files lie in PRESET, or in PRESET/reports/SETTING, beside which no point has its folder.

    Presets that vary one thing are drawn over it as well, once two of them have complete trials.

    Raises:
        MissingDataError: there are no records, or one is damaged, or there are runs that are no part of one sweep.
    """
    reports, chosen, changed = {}, [], {}
    all_rows: dict[str, Condition] = {}
    found, others = _presets(folder)
    for preset, runs in found.items():
        settings = _by_setting(runs)
        if len(settings) > 1:
            for name in FILES:  # of when there was one
                (inside(folder, folder / preset) / name).unlink(missing_ok=True)
        for setting, group in settings.items():
            records, notes, points = best(group)
            if not records:
                continue
            config = require_file(group[points[0]][0] / CONFIG).read_text(
                encoding="utf-8"
            )  # of the first method's best point
            drawn, changed[preset] = pictures(preset, config), _changes(preset, [group[point][0] for point in points])
            row = condition(preset, setting, records)
            all_rows[row.name] = row
            place = folder / preset / "reports" / setting if setting else folder / preset
            inside(folder, place).mkdir(parents=True, exist_ok=True)
            reports[row.name] = report_on(records, place, drawn, changed=changed[preset], notes=notes, config=config)
            if not setting:
                chosen.append((preset, drawn.varied, records))
    if not reports and others:
        raise MissingDataError(
            f"{folder}: expected a run or a sweep, got the folder of {_listed(others)}; "
            f"report one of them: fedcore report {others[0]}"
        )
    if not reports:
        raise MissingDataError(f"{folder}: expected records (PRESET/records/*.jsonl), found none")
    related = families(chosen, folder, changed)
    for family in related:
        draw_family(family)
    in_families = {preset for family in related for preset in family.members.values()}
    rows = [row for row in all_rows.values() if row.cells and row.preset not in in_families]
    rows = rows if len(rows) > 1 else []  # of one, its own table says it
    files = tuple(folder / name for name in ("overview.md", "overview.csv", "overview.html", "trials.csv"))
    write_text(files[0], _markdown(reports, related, rows))
    _write_csv(reports, all_rows, rows, files[1])
    write_text(files[2], _html(reports, related, rows))
    _write_trials(found, files[3])
    left_out = (f"left out, since they are no part of this sweep: {_listed(others)}",) if others else ()
    return Overview(reports, (*files, *(family.place for family in related)), left_out)


Runs = dict[str, tuple[Path, list[Record]]]
"""A preset's points by name, each with its folder and its records."""


def best(runs: Runs) -> tuple[list[Record], list[str], list[str]]:
    """The records of every algorithm's best point, in the order of the comparison, notes, and the points' names."""
    tried: dict[str, dict[str, list[Record]]] = {}
    for point, (_, records) in sorted(runs.items(), key=lambda item: (item[0].count("="), item[0])):
        for record in records:
            tried.setdefault(record.header.algorithm, {}).setdefault(point, []).append(record)
    found, notes, points = [], [], []
    for order, (label, by_point) in enumerate(_in_order(tried).items()):
        done = [_seeds(record for record in records if record.is_complete) for records in by_point.values()]
        whole = {point: own for point, own in by_point.items() if not any(_seeds(own) < seeds for seeds in done)}
        scores = {point: score for point, records in whole.items() if (score := _score(records)) is not None}
        if len(by_point) == 1:
            scores = dict.fromkeys(by_point, 0.0)  # nothing to choose from, so a part of it can be shown too
        if not scores:
            notes.append(f"{label}: no point is complete")
            continue
        point = max(scores, key=scores.__getitem__)
        points.append(point)
        if len(by_point) > 1:
            of = f"{len(scores)} complete point{'s' * (len(scores) > 1)} of " if len(scores) < len(by_point) else ""
            best_of = f"{label}: {point}, the best of {of}{len(by_point)}{'' if of else ' points'}"
            moved = any(len(waiting(record)) < len(record.rounds) for point in scores for record in by_point[point])
            notes.append(best_of if moved else f"{label}: {point}, but no point is best: no model moved at any")
        found += [replace(record, header=replace(record.header, order=order)) for record in by_point[point]]
    return found, notes, list(dict.fromkeys(points))


def _by_setting(runs: Runs) -> dict[str, Runs]:
    """A preset's points by the settings of the problem that its grid has; all of them by "" if it has but one."""
    groups: dict[str, Runs] = {}
    for point, run in runs.items():
        groups.setdefault(setting_of(point), {})[point] = run
    return {setting: groups[setting] for setting in sorted(groups, key=_natural)} if len(groups) > 1 else {"": runs}


def _in_order(tried: dict[str, dict[str, list[Record]]]) -> dict[str, dict[str, list[Record]]]:
    """Labels by how many keys concern them, then as their experiments have them: the plain methods come first."""

    def place(label: str) -> tuple[int, int]:
        point, records = next(iter(tried[label].items()))
        return point.count("="), records[0].header.order

    return {label: tried[label] for label in sorted(tried, key=place)}


def _seeds(records: Iterable[Record]) -> set[int]:
    return {record.header.seed for record in records}


def _score(records: Sequence[Record]) -> float | None:
    if not all(record.is_complete for record in records):
        return None
    values = [value for record in records if (value := final(record)) is not None]
    return fmean(values) if values else None


def _presets(folder: Path) -> tuple[dict[str, Runs], list[Path]]:
    """The runs of each preset of a sweep; and whatever else lies in its folder, runs and sweeps."""
    found: dict[str, Runs] = {}
    others: list[Path] = []
    for config in sorted(folder.rglob(CONFIG)):
        run = config.parent
        try:
            records = read_folder(run)
        except MissingDataError:
            if any((run / "records").glob("*.jsonl")):
                raise
            continue  # its turn has not come
        preset = records[0].header.preset
        if Path(preset).is_absolute() or ".." in Path(preset).parts:
            others.append(run)
            continue
        if not run.is_relative_to(folder / preset):
            sweeps = [above for above in run.parents if above != folder and run.is_relative_to(above / preset)]
            others.append(sweeps[0] if sweeps and sweeps[0].is_relative_to(folder) else run)
            continue
        inside = run.relative_to(folder / preset)
        found.setdefault(preset, {})["" if inside == Path() else str(inside)] = run, records
    return {preset: found[preset] for preset in sorted(found, key=_natural)}, list(dict.fromkeys(others))


def _changes(preset: str, runs: Sequence[Path]) -> Changes:
    """The changes of these points against their preset, each once."""
    found: list[Change] = []
    for run in runs:
        here = changes(preset, require_file(run / CONFIG).read_text(encoding="utf-8"))
        found += [change for change in here if change not in found]
    return tuple(found)


def _listed(folders: Sequence[Path]) -> str:
    more = f" and {len(folders) - MOST} more" if len(folders) > MOST else ""
    return ", ".join(map(str, folders[:MOST])) + more


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts t10 behind t5."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _markdown(reports: dict[str, Report], related: Sequence[Family], rows: Sequence[Condition]) -> str:
    lines: list[str] = []
    if rows:
        headings, texts, bold = table_of.table(rows)
        lines += ["## Conditions and methods", "", *markdown_lines(headings, texts, bold), "", table_of.NOTE, ""]
    for family in related:
        lines += [f"## {escaped(family.title)}", "", f"{escaped(family.size)}.", ""]
        lines += [line for remark in family.remarks() for line in (f"**{escaped(remark)}**", "")]
        for table in family.tables():
            lines += [*markdown_lines(*table), ""]
    for name, report in reports.items():
        lines += [f"## {escaped(_title(name, report))}", "", f"{code_span(name)}, {escaped(size(report))}.", ""]
        lines += [f"Changed: {escaped(report.summary.changed)}.", ""] if report.summary.changed else []
        lines += [*paper_lines(report.paper), ""] if report.paper else []
        if not report.has_accuracies and name not in _of(rows):
            lines += [*markdown_lines(*cells(report.summary)), ""]
        lines += [*(f"- {escaped(note)}" for note in report.summary.notes), ""]
    return "\n".join(lines)


def _html(reports: dict[str, Report], related: Sequence[Family], rows: Sequence[Condition]) -> str:
    parts = []
    if rows:
        parts += [page.heading("Conditions and methods"), page.table(*table_of.table(rows))]
        parts.append(page.paragraph(table_of.NOTE, faint=True))
    for family in related:
        parts += [page.heading(family.title), page.paragraph(f"{family.size}.", faint=True)]
        parts += [page.remark(remark) for remark in family.remarks()]
        parts.append(page.picture(family.place, f"{family.title} over {family.label}"))
        parts += [page.table(*table) for table in family.tables()]
    for name, report in reports.items():
        parts += [page.heading(_title(name, report)), page.paragraph(f"{name}, {size(report)}.", faint=True)]
        parts += [page.remark(f"Changed: {report.summary.changed}.")] if report.summary.changed else []
        parts += paper_parts(report.paper) if report.paper else []
        if not report.has_accuracies and name not in _of(rows):
            parts.append(page.table(*cells(report.summary)))
        parts += picture_parts(report)
        parts += [page.paragraph(note, faint=True) for note in report.summary.notes]
    summaries = [report.summary for report in reports.values()]
    return page.page("Overview", [*parts, page.paragraph(legend(*summaries), faint=True)])


def _title(name: str, report: Report) -> str:
    """The experiment's title, with the setting of the problem where there are several."""
    _, comma, setting = name.partition(", ")
    return f"{report.summary.title}{comma}{setting}"


def _of(rows: Sequence[Condition]) -> Collection[str]:
    """The names in the table of conditions."""
    return {row.name for row in rows}


def _write_csv(
    reports: dict[str, Report], all_rows: dict[str, Condition], conditions: Sequence[Condition], path: Path
) -> None:
    """The figures of papers beside ours, and the table of conditions, a line for each cell."""
    with replacing(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        besides = ["setting", "low", "high", "best"]
        writer.writerow(["preset", "figure", "paper", "here", "spread", "seeds", "rounds", *besides])
        for name, report in reports.items():
            preset, setting = all_rows[name].preset, [all_rows[name].setting, "", "", ""]
            rounds = report.summary.rows[0].rounds
            lines = report.paper.lines if report.paper else ()
            for line in lines:
                here = "" if line.here is None else f"{line.here:.2f}"
                writer.writerow([preset, line.what, line.paper, here, line.spread, line.seeds, rounds, *setting])
            for row in report.summary.rows:
                if not lines and name not in _of(conditions) and row.final.mean is not None:
                    spread = "" if row.final.deviation is None else f"± {100 * row.final.deviation:.2f}"
                    here = f"{100 * row.final.mean:.2f}"
                    figure = f"{row.algorithm}, accuracy %"
                    writer.writerow([preset, figure, "", here, spread, len(row.seeds), row.rounds, *setting])
        for one in conditions:
            for label, cell in one.cells.items():
                deviation = Statistic.of(cell.values).deviation
                spread = "" if deviation is None else f"± {100 * deviation:.2f}"
                ends = ["", ""] if cell.interval is None else [f"{100 * end:.2f}" for end in cell.interval]
                figures = ["", f"{100 * cell.mean:.2f}", spread, len(cell.values), one.rounds]
                writer.writerow([one.preset, f"{label}, accuracy %", *figures, one.setting, *ends, int(cell.best)])


def _write_trials(found: dict[str, Runs], path: Path) -> None:
    """A line for each trial, whole or not: its result in full precision, as a fraction."""
    with replacing(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["preset", "point", "algorithm", "seed", "rounds", "accuracy", "loss", "uploads", "seconds"])
        for preset, runs in found.items():
            for point, (_, records) in runs.items():
                for record in records:
                    header, lines = record.header, record.rounds
                    uploads = lines[-1].uploads if lines else 0
                    seconds = round(sum(sum(line.seconds.values()) for line in lines), 1)
                    own = [
                        header.algorithm,
                        header.seed,
                        len(lines),
                        final(record),
                        final_loss(record),
                        uploads,
                        seconds,
                    ]
                    writer.writerow([preset, point, *own])


def size(report: Report) -> str:
    """At what size a report's first algorithm was run: ``60 rounds, seeds 0 to 9``."""
    row = report.summary.rows[0]
    low, high = min(row.seeds, default=0), max(row.seeds, default=0)
    many = len(row.seeds) > 2 and len(row.seeds) == high - low + 1
    return f"{row.rounds} rounds, seeds {f'{low} to {high}' if many else ', '.join(map(str, row.seeds)) or 'none'}"
