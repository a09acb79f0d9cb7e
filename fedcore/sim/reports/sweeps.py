"""The report of a sweep: a report per condition, plots of families of presets, an overview, and a table of all trials.

A report shows each algorithm at its best point, the point with the highest accuracy (mean over the last rounds, see
``report.window``, then over seeds). A point can be best only if all its trials are complete and it has every seed that
a different point completed; an algorithm without such a point is omitted. The selection uses the test set, as in the
papers, which slightly overestimates the best of many points. If a grid changes the problem, each problem is a condition
with its own report.
"""

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from pandas import DataFrame, notna

from fedcore.errors import ConfigError, MissingDataError
from fedcore.files import inside, write_text
from fedcore.sim.experiment import changes as made
from fedcore.sim.experiment.changes import NO_RESULT, Change, Changes, differences, incomparable, of_tables, text_of
from fedcore.sim.experiment.config import from_tables
from fedcore.sim.experiment.results import CONFIG, RECORDS, Record, runs_in
from fedcore.sim.experiment.schema import Experiment, Varied
from fedcore.sim.reports import statistics as stats
from fedcore.sim.reports.report import FILES, KINDS, Bold, Config, Document, Report, draw_family, read_run, report_on
from fedcore.sim.reports.statistics import NONE, Statistic, by_algorithm, final

MOST = 10
"""The maximum number of folders that a message lists."""
PROBLEM = frozenset({"attack", "data", "model", "network", "objective", "partition", "participation"})
"""The tables of a configuration that define the problem; other keys of a grid are options of the methods."""
CONDITIONS_NOTE = (
    "Accuracy in %, the mean over the seeds, and its 95 % interval by Student's t; of a method that was tried at "
    "several points, its best. Bold: better than the row's next, seed by seed, beyond the 95 % interval of their "
    "difference."
)
TRIED = "accuracy % (95 % interval)"
"""The heading of the accuracies in the table of ``tried``; the interval is of the mean over the seeds."""
OWN = frozenset({"algorithms", "rate", "local", "limits", "aggregation"})
"""The keys of a configuration that algorithms can have themselves."""
UNITED = frozenset({*NO_RESULT, "seeds", "grid", "report"})
"""The keys that may differ between the points of a sweep although an experiment has only one value."""
COLUMNS = [*("preset", "figure", "paper", "here", "spread", "last_round"), *("seeds", "rounds", "setting")]
COLUMNS += ["low", "high", "best"]

FIGURES = {"kind": str, "label": str, "order": int, "x": float, "mean": float, "text": str}
FIGURES |= {"low": float, "high": float, "seeds": int, "paper": float}
"""The columns of ``Family.figures``."""

Runs = dict[str, tuple[Config, list[Record]]]
"""The configuration and records of each point of a preset, by the point's name."""


@dataclass(frozen=True)
class Overview:
    """The reports of a sweep by condition, the overview's files, and notes on what it leaves out."""

    reports: dict[str, Report]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Condition:
    """A row of the table of conditions x methods.

    Attributes:
        preset, setting: the preset's name, and the values of the grid that define the problem, such as
            ``participation.p=0.3``. The setting may be empty.
        values: the accuracy of each seed as a fraction, by method, in the order of the comparison.
        best: the best method, if the interval of its paired difference to the second best is above zero.
        rounds: the rounds of the shortest trial.
    """

    preset: str
    setting: str
    values: dict[str, tuple[float, ...]]
    best: str | None
    rounds: int

    @property
    def name(self) -> str:
        """The name of the row: ``PRESET`` or ``PRESET, SETTING``."""
        return f"{self.preset}, {self.setting}" if self.setting else self.preset

    def cell(self, label: str) -> str:
        """Return the mean accuracy of a method in percent, and its interval."""
        if label not in self.values:
            return NONE
        ends = stats.interval_of(self.values[label])
        text = f"{100 * fmean(self.values[label]):.1f}"
        text += f" ({100 * max(0, ends[0]):.1f} .. {100 * min(1, ends[1]):.1f})" if ends else ""
        return Bold(text) if label == self.best else text


@dataclass(frozen=True)
class Family:
    """Presets that differ in one value.

    Attributes:
        title, label: the title of all members, and the name of the varied value.
        place: the path of the plot.
        members: the presets by the varied value, ascending.
        figures: one row per figure of a member: its kind, the algorithm's label and order, the varied value x, the mean
            over the seeds as number and text, the lowest and highest seed, the number of seeds, and the paper's figure.
            The mean is missing if a seed never reaches the event.
        size: the rounds and seeds as text.
        changed: the changes of the experiments to their presets.
        short: the recorded rounds and seeds if they are fewer than the paper's.
    """

    title: str
    label: str
    place: Path
    members: dict[float, str]
    figures: DataFrame
    size: str
    changed: str = ""
    short: str = ""

    def draw(self) -> None:
        """Write the plot."""
        notes = [self.size, *([f"CUT SHORT beside the paper: {self.short}"] if self.short else [])]
        if self.figures["seeds"].max() > 1:
            notes.append("means, bars from the lowest seed to the highest")
        if self.figures["paper"].notna().any():
            notes.append("diamonds: the paper's")
        if self.figures["mean"].isna().any():
            notes.append("no mean where a seed never gets there")
        text = "; ".join(notes) + (f"\nchanged: {self.changed}" if self.changed else "")
        draw_family(self.place, self.title, text, self.label, self.figures)

    def tables(self) -> Iterator[DataFrame]:
        """Yield a table for each kind of figure; the paper's row is below the row of the recorded figures."""
        for kind, lines in self.figures.groupby("kind"):
            rows = []
            for label, line in lines.groupby("label", sort=False):
                ours, printed = (dict(zip(line["x"], line[column], strict=True)) for column in ("text", "paper"))
                rows.append((label, *(ours.get(x, NONE) for x in self.members)))
                paper = [f"{printed[x]:g}" if notna(printed.get(x)) else NONE for x in self.members]
                if set(paper) != {NONE}:
                    rows.append((f"{label}, the paper", *paper))
            yield stats.frame((f"{KINDS[kind]} over {self.label}", *(f"{x:g}" for x in self.members)), rows)


def is_sweep(folder: Path) -> bool:
    """Whether a folder is not a run itself, but holds runs in its subfolders."""
    return runs_in(folder) != [folder]


def write_overview(folder: Path, **settings: Any) -> Overview:
    """Write a report per condition of a complete or incomplete sweep, an overview, and ``trials.csv``.

    ``settings`` are those of ``write_report``.

    The files of a condition are in PRESET, or in PRESET/reports/SETTING. A family is plotted if at least two of its
    presets have complete trials.

    Raises:
        MissingDataError: the folder has no records, a record is damaged, or the folder holds several runs or sweeps.
    """
    reports, conditions, changed = dict[str, Report](), dict[str, Condition](), dict[str, Changes]()
    chosen, left_out = list[tuple[str, Varied | None, list[Record]]](), list[str]()
    found, others = _presets(folder, settings)
    for preset, runs in found.items():
        by_setting = _by_setting(runs)
        if len(by_setting) > 1:
            for name in FILES:  # files of an earlier report, when the preset had one setting
                (inside(folder, folder / preset) / name).unlink(missing_ok=True)
        for setting, group in by_setting.items():
            records, notes, points = best(group)
            if not records:
                left_out += [f"{', '.join(filter(None, (preset, setting)))}: left out: {note}" for note in notes]
                continue
            configs = {label: group[point][0] for label, point in points.items()}
            changed[preset] = _named({label: config.changes for label, config in configs.items()})
            row = condition(preset, setting, records)
            conditions[row.name] = row
            place = folder / preset / "reports" / setting if setting else folder / preset
            inside(folder, place).mkdir(parents=True, exist_ok=True)
            config = replace(next(iter(configs.values())), changes=changed[preset])  # of the first method's best point
            reports[row.name] = report_on(records, place, config, notes)
            if not setting:
                chosen.append((preset, config.pictures.varied, records))
    if not reports:
        problem = "; ".join(left_out) or "no records found (PRESET/records/*.jsonl)"
        if others:
            command = shlex.join(["fedcore", "report", str(others[0])])
            problem = f"holds several runs or sweeps: {_listed(others)}; report one of them: {command}"
        raise MissingDataError(f"{folder}: {problem}")
    related = families(chosen, folder, changed)
    for family in related:
        family.draw()
    in_families = {preset for family in related for preset in family.members.values()}
    rows = {name: row for name, row in conditions.items() if row.values and row.preset not in in_families}
    rows = rows if len(rows) > 1 else {}  # a single row has its own table
    files = tuple(folder / name for name in ("overview.md", "overview.csv", "overview.html", "trials.csv"))
    for preset, varied, records in chosen:
        if varied and (names := by_algorithm(record for record in records if not record.is_complete)):
            left_out.append(f"{preset}: left out over {varied.label}, as trials are not finished: {', '.join(names)}")
    left_out += [f"left out, since they are no part of this sweep: {_listed(others)}"] if others else []
    document = _document(reports, related, rows)
    document.notes(left_out)
    write_text(files[0], document.markdown())
    write_text(files[1], _overview_csv(reports, conditions, rows))
    write_text(files[2], document.html())
    write_text(files[3], _trials_csv(found))
    return Overview(reports, (*files, *(family.place for family in related)), tuple(left_out))


def tuned(folder: Path) -> list[Experiment]:
    """Return an experiment per preset of a sweep, in which each algorithm has the settings of its best point.

    Different rates, local work, limits and rules become those of the algorithms. Other settings must be equal. The
    experiments have no validation data. Their notes name the tried values, the seeds and the data.

    Raises:
        MissingDataError: the sweep has no records, or an algorithm has no complete point.
        ConfigError: the best points differ in another setting, or the sweep has several conditions.
    """
    experiments = []
    for preset, runs in _presets(folder)[0].items():
        if len(_by_setting(runs)) > 1:
            raise ConfigError(f"{folder / preset}: has several conditions; sweep each of them in a separate folder")
        records, notes, points = best(runs)
        if incomplete := [note for note in notes if note.endswith("no point is complete")]:
            raise MissingDataError(f"{folder / preset}: {incomplete[0]}; complete the sweep first")
        tables = {label: json.loads(runs[point][0].text) for label, point in points.items()}
        seeds, first = [*map(str, sorted(_seeds(records)))], next(iter(tables.values()))
        share = first.get("validation")
        data = f"{100 * share:g} % of each client's training examples" if share else "the test set"
        grids, varied = dict[str, list[str]](), {"validation."}
        for label in points:
            own = [point for point, (_, some) in runs.items() if label in by_algorithm(some)]
            grids.setdefault(grid_of(own), []).append(label)
            keys = {f"{part.partition('=')[0]}." for point in own for part in point.split(",")}
            varied |= keys | {f"algorithms.{label}.{key}" for key in keys}
        over = ", ".join(f"{one} ({', '.join(own)})" if len(grids) > 1 else one for one, own in grids.items())
        changed = [one for one in made.incomparable(of_tables(first)) if not f"{one.key}.".startswith((*varied,))]
        note = f"tuned: only these methods, over {over}, for {records[0].header.rounds} rounds"
        if changed:
            note += f" (with {text_of(changed)})"
        note += f", on seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"
        note += f" and on {data} ({folder / preset}). {'. '.join(notes)}."
        experiments.append(from_tables(str(folder / preset), _united(tables) | {"note": note[:1000]}))
    if not experiments:
        raise MissingDataError(f"{folder}: no records found (PRESET/records/*.jsonl)")
    return experiments


def _united(tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return one configuration for algorithms whose configurations, by label, differ in ``OWN``."""
    first, *others = tables.values()
    plain, *rest = ({key: value for key, value in one.items() if key not in (*OWN, *UNITED)} for one in tables.values())
    if unequal := [change.key for one in rest for change in differences(plain, one)]:
        raise ConfigError(f"{unequal[0]}: differs between the best points; an algorithm cannot have its own value")
    # A key that a point lacks cannot be removed by an algorithm, so it must not be shared.
    shared = dict(first) | {
        table: {key: value for key, value in first[table].items() if all(key in one[table] for one in others)}
        for table in ("rate", "local")
    }
    shared["local"] |= {key: first["local"][key] for key in ("epochs", "steps") if key in first["local"]}
    for key in ("limits", "aggregation"):
        if any(one.get(key) != first.get(key) for one in others):
            del shared[key]
    methods = []
    for label, own in tables.items():
        method = next(one for one in own["algorithms"] if one["label"] == label)
        for table in ("rate", "local"):
            more = {key: value for key, value in own[table].items() if shared[table].get(key) != value}
            method |= {table: more | method.get(table, {})} if more else {}
        unshared = {key: own[key] for key in ("limits", "aggregation") if key in own and key not in shared}
        methods.append(unshared | method)
    listed = made.combined(of_tables(first), made.changes(first, shared | {"algorithms": methods}))
    shared |= {"algorithms": methods, "grid": {}, "validation": None}
    return shared | {"changes": [change.model_dump() for change in listed]}


def best(runs: Runs) -> tuple[list[Record], list[str], dict[str, str]]:
    """Return the records of each algorithm's best point in the order of the comparison, notes, and the points."""
    tried: dict[str, dict[str, list[Record]]] = {}
    for point, (_, records) in sorted(runs.items(), key=lambda item: (item[0].count("="), item[0])):
        for label, own in by_algorithm(records).items():
            tried.setdefault(label, {})[point] = own
    # Sort algorithms by the number of grid keys that affect them, then by their own order.
    order = {label: (next(iter(points)).count("="), next(iter(points.values()))) for label, points in tried.items()}
    labels = sorted(tried, key=lambda label: (order[label][0], order[label][1][0].header.order))
    found, notes, chosen = [], [], dict[str, str]()
    for place, label in enumerate(labels):
        points = tried[label]
        done = [_seeds(record for record in records if record.is_complete) for records in points.values()]
        whole = {point: own for point, own in points.items() if not any(_seeds(own) < seeds for seeds in done)}
        scores = {point: score for point, records in whole.items() if (score := _score(records)) is not None}
        if len(points) == 1:
            scores = dict.fromkeys(points, 0.0)  # a single point is shown even if incomplete
        if not scores:
            notes.append(f"{label}: no point is complete")
            continue
        point = chosen[label] = max(scores, key=scores.__getitem__)
        ends = _ends(point, scores)
        if len(points) > 1:
            of = f"{len(scores)} complete point{'s' * (len(scores) > 1)} of " if len(scores) < len(points) else ""
            best_of = f"{label}: {point}, the best of {of}{len(points)}{'' if of else ' points'}"
            moved = any(len(stats.waiting(record)) < len(record.rounds) for point in scores for record in points[point])
            if ends and len(scores) > 2:
                best_of += f", at an end of the values of {' and '.join(ends)}: try further ones"
            notes.append(best_of if moved else f"{label}: {point}, but no point is best: no model moved at any")
        found += [replace(one, header=replace(one.header, order=place), ends=ends) for one in points[point]]
    return found, notes, chosen


def tried(folder: Path, preset: str) -> DataFrame:
    """Return a table of each algorithm's accuracy at each point of a sweep's preset, with the best point in bold."""
    runs = _presets(folder)[0][preset]
    chosen = best(runs)[2]
    rows = []
    for label in chosen:
        for point in runs:
            if own := by_algorithm(runs[point][1]).get(label):
                text = condition(preset, point, own).cell(label)
                rows.append((label, point, Bold(text) if point == chosen[label] else text, str(len(_seeds(own)))))
    return stats.frame(("method", "setting", TRIED, "seeds"), rows)


def grid_of(points: Iterable[str]) -> str:
    """Return the values of each key in the names of points.

    >>> grid_of(["rate.lr=0.003,beta=0.5", "rate.lr=0.03,beta=0.5", "rate.lr=0.1,beta=0.5"])
    'rate.lr=0.003, 0.03, 0.1; beta=0.5'
    """
    values: dict[str, dict[str, None]] = {}
    for key, _, value in (part.partition("=") for point in points for part in point.split(",")):
        values.setdefault(key, {})[value] = None
    return "; ".join(f"{key}={', '.join(own)}" for key, own in values.items())


def _ends(point: str, points: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of a point whose value is the least or the greatest of several numbers in the points."""
    tried: dict[str, dict[str, float]] = {}
    for part in chain.from_iterable(one.split(",") for one in points):
        key, _, value = part.partition("=")
        with suppress(ValueError):
            tried.setdefault(key, {})[part] = float(value)
    ranked = {key: sorted(own, key=own.__getitem__) for key, own in tried.items() if len(own) > 1}
    return tuple(key for key, own in ranked.items() if not {own[0], own[-1]}.isdisjoint(point.split(",")))


def setting_of(point: str) -> str:
    """Return the part of a point's name that defines the problem, sorted by key.

    >>> setting_of("rate.lr=0.1,participation.p=0.3,beta=0.2,data.name=mnist")
    'data.name=mnist,participation.p=0.3'
    """
    return ",".join(sorted(part for part in point.split(",") if re.split("[=.]", part)[0] in PROBLEM))


def condition(preset: str, setting: str, records: Sequence[Record]) -> Condition:
    """Return the row of a condition from the records of one point per method."""
    groups = {label: tuple(v for v in map(final, own) if v is not None) for label, own in by_algorithm(records).items()}
    values = {label: own for label, own in groups.items() if own}
    ranked = sorted(values, key=lambda label: -fmean(values[label]))
    lead = stats.difference(records, *ranked[:2]).interval if len(ranked) > 1 else None
    leader = ranked[0] if lead is not None and lead[0] > 0 else None
    return Condition(preset, setting, values, leader, min(len(record.rounds) for record in records))


def conditions_table(conditions: Iterable[Condition]) -> DataFrame:
    """Return a table with a row per condition and a column per method."""
    rows = list(conditions)
    labels = list(dict.fromkeys(label for one in rows for label in one.values))
    return stats.frame(("accuracy %", *labels), [(one.name, *map(one.cell, labels)) for one in rows])


def families(
    presets: Iterable[tuple[str, Varied | None, Sequence[Record]]],
    folder: Path,
    changes: Mapping[str, Changes] = MappingProxyType({}),
) -> list[Family]:
    """Return the families with at least two members that have complete trials.

    ``presets`` has the name, varied value and records of each preset, ``changes`` the changes to each preset.
    """
    found: dict[tuple[str, str], dict[float, tuple[str, Varied, list[Record]]]] = {}
    for preset, varied, records in presets:
        whole = [record for record in records if record.is_complete]
        if varied and whole:
            found.setdefault((varied.family, varied.label), {})[varied.value] = preset, varied, whole
    several = [dict(sorted(members.items())) for members in found.values() if len(members) > 1]
    return [_family(members, folder, changes) for members in several]


def _family(
    members: Mapping[float, tuple[str, Varied, list[Record]]], folder: Path, changes: Mapping[str, Changes]
) -> Family:
    rows: list[tuple[object, ...]] = []
    short, changed = list[str](), list[Change]()
    for x, (preset, _, records) in members.items():
        own, groups = changes.get(preset, ()), by_algorithm(records)
        paper = stats.figures(preset)
        lines = []
        if paper and not incomparable(own):
            lines = stats.compare(records, paper)
            short.append(stats.lacking(records, paper.expected(records, own)))
        accuracy = {line.label: line.expected for line in lines if line.kind == stats.ACCURACY}
        figures: list[tuple[str, str, float | None, tuple[float | None, ...]]]
        figures = [(stats.ACCURACY, label, accuracy.get(label), stats.percents(groups[label])) for label in groups]
        figures += [(one.kind, one.label, one.expected, one.values) for one in lines if one.kind != stats.ACCURACY]
        for kind, label, expected, values in figures:
            known = [value for value in values if value is not None]
            ours = Statistic.of(known if len(known) == len(values) else ())
            ends = (min(known, default=None), max(known, default=None))
            order = groups[label.partition(" - ")[0]][0].header.order
            rows.append((kind, label, order, x, ours.mean, ours.text(), *ends, len(values), expected))
        changed += own
    preset, varied, _ = next(iter(members.values()))
    slug = re.sub(r"[^\w.]+", "-", varied.label).strip("-")
    table = DataFrame(rows, columns=list(FIGURES)).astype(FIGURES).groupby(["kind", "label"])
    return Family(
        title=varied.title,
        label=varied.label,
        place=inside(folder, folder / preset).parent / f"{Path(varied.family).name}-over-{slug}.png",
        members={x: preset for x, (preset, _, _) in members.items()},
        figures=table.filter(lambda line: line["seeds"].any()),
        size=_family_size([records for _, _, records in members.values()]),
        changed=text_of(changed),
        short=" / ".join(dict.fromkeys(filter(None, short))),
    )


def _family_size(members: Sequence[Sequence[Record]]) -> str:
    """Return a family's size, such as ``60 rounds, 2 to 3 seeds``, with each member's rounds if they differ."""
    rounds = [records[0].header.rounds for records in members]
    seeds = sorted({len({record.header.seed for record in records}) for records in members})
    counts = " / ".join(map(str, rounds if len(set(rounds)) > 1 else rounds[:1]))
    many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    return f"{counts} rounds, {many} seed{'s' if seeds[-1] > 1 else ''}"


def _by_setting(runs: Runs) -> dict[str, Runs]:
    """Return the points of a preset by problem setting, or by "" if all have the same setting."""
    groups: dict[str, Runs] = {}
    for point, run in runs.items():
        groups.setdefault(setting_of(point), {})[point] = run
    return {setting: groups[setting] for setting in sorted(groups, key=_natural)} if len(groups) > 1 else {"": runs}


def _seeds(records: Iterable[Record]) -> set[int]:
    return {record.header.seed for record in records}


def _score(records: Sequence[Record]) -> float | None:
    return Statistic.of(map(final, records)).mean if all(record.is_complete for record in records) else None


def _named(changes: Mapping[str, Changes]) -> Changes:
    """Return each change to the configurations of the methods, by label, once; those that differ name their method."""
    found: list[Change] = []
    for label, own in changes.items():
        for one in own:
            if one.key.partition(".")[0] in OWN - {"algorithms"} and any(one not in all for all in changes.values()):
                one = one.model_copy(update={"key": f"algorithms.{label}.{one.key}"})
            found += [] if one in found else [one]
    return tuple(found)


def _presets(folder: Path, report: Mapping[str, Any] = MappingProxyType({})) -> tuple[dict[str, Runs], list[Path]]:
    """Return the runs of each preset of a sweep, and the folders of other runs and sweeps."""
    found: dict[str, Runs] = {}
    others: list[Path] = []
    for config in sorted(folder.rglob(CONFIG)):
        if not any(((run := config.parent) / RECORDS).glob("*.jsonl")):
            continue  # not begun yet
        records, own = read_run(run, report)
        preset = records[0].header.preset
        if Path(preset).is_absolute() or ".." in Path(preset).parts:
            others.append(run)
        elif run.is_relative_to(folder / preset):
            point = run.relative_to(folder / preset)
            found.setdefault(preset, {})["" if point == Path() else str(point)] = own, records
        else:
            sweeps = [above for above in run.parents if above != folder and run.is_relative_to(above / preset)]
            others.append(sweeps[0] if sweeps and sweeps[0].is_relative_to(folder) else run)
    return {preset: found[preset] for preset in sorted(found, key=_natural)}, list(dict.fromkeys(others))


def _listed(folders: Sequence[Path]) -> str:
    more = f" and {len(folders) - MOST} more" if len(folders) > MOST else ""
    return ", ".join(map(str, folders[:MOST])) + more


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts t10 after t5."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _document(reports: dict[str, Report], related: Sequence[Family], rows: Mapping[str, Condition]) -> Document:
    document = Document("Overview")
    if rows:
        document.heading("Conditions and methods")
        document.table(conditions_table(rows.values()))
        document.paragraph(CONDITIONS_NOTE, "faint")
    for family in related:
        document.heading(family.title)
        document.paragraph(f"{family.size}.", "faint")
        if family.changed:
            document.paragraph(f"Changed: {family.changed}.", "remark")
        if family.short:
            document.paragraph(f"CUT SHORT beside the paper: {family.short}.", "remark")
        document.picture(family.place, f"{family.title} over {family.label}")
        for table in family.tables():
            document.table(table)
    for name, report in reports.items():
        _, comma, setting = name.partition(", ")
        document.heading(f"{report.summary.title}{comma}{setting}")
        document.paragraph(f"{name}, {size(report)}.", "faint")
        document.origin(report.summary)
        document.comparison(report.paper)
        if not report.has_accuracies and name not in rows:
            document.table(stats.summary_table(report.summary))
        document.pictures(report.drawings, report.summary.title)
        document.notes(report.summary.notes)
    document.paragraph(stats.legend(*(report.summary for report in reports.values())), "faint")
    return document


def _overview_csv(reports: Mapping[str, Report], conditions: Mapping[str, Condition], shown: Collection[str]) -> str:
    """Return one line per compared figure, and one per cell of the table of conditions."""
    lines: list[tuple[object, ...]] = []
    for name, report in reports.items():
        preset, setting, rows = conditions[name].preset, conditions[name].setting, report.summary.rows
        if report.paper and report.paper.lines:
            for line in report.paper.lines:
                numbers = (line.paper, _number(line.ours), line.spread, _number(line.last_round))
                lines.append((preset, line.name, *numbers, len(line.values), rows[0].rounds, setting))
        elif name not in shown:
            for row in rows:
                if row.final.mean is not None:
                    lines.append((preset, *_accuracy(row), len(row.seeds), row.rounds, setting))
    for name in shown:
        one, found = conditions[name], {row.algorithm: row for row in reports[name].summary.rows}
        for label, values in one.values.items():
            ends = [f"{100 * end:.2f}" for end in stats.interval_of(values) or ()] or ["", ""]
            own = (*_accuracy(found[label]), len(values), one.rounds, one.setting, *ends, int(label == one.best))
            lines.append((one.preset, *own))
    return stats.csv_text(stats.frame(COLUMNS, [(*line, "", "", "")[: len(COLUMNS)] for line in lines]))


def _accuracy(row: stats.Row) -> tuple[str, ...]:
    spread = "" if row.final.deviation is None else f"± {100 * row.final.deviation:.2f}"
    here, last = (_number(100 * (one.mean or 0)) for one in (row.final, row.last_round))
    return f"{row.algorithm}, accuracy %", "", here, spread, last


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _trials_csv(found: dict[str, Runs]) -> str:
    """Return a line per complete or incomplete trial, with its result as a fraction in full precision."""
    rows = []
    for preset, runs in found.items():
        for point, (_, records) in runs.items():
            for record in records:
                uploads = record.rounds[-1].uploads if record.rounds else 0
                seconds = round(sum(sum(line.seconds.values()) for line in record.rounds), 1)
                (end,) = map(final, stats.at_the_end([record]))
                results = (len(record.rounds), final(record), end, final(record, stats.losses), uploads, seconds)
                rows.append((preset, point, record.header.algorithm, record.header.seed, *results))
    headings = ("preset", "point", "algorithm", "seed", "rounds", "accuracy", "last_round", "loss")
    return stats.csv_text(stats.frame((*headings, "uploads", "seconds"), rows))


def size(report: Report) -> str:
    """Return the rounds and seeds of a report's first algorithm, such as ``60 rounds, seeds 0 to 9``."""
    row = report.summary.rows[0]
    low, high = min(row.seeds, default=0), max(row.seeds, default=0)
    many = len(row.seeds) > 2 and len(row.seeds) == high - low + 1
    seeds = f"{low} to {high}" if many else ", ".join(map(str, row.seeds)) or "none"
    return f"{row.rounds} rounds, seed{'s' * (len(row.seeds) != 1)} {seeds}"
