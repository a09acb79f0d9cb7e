"""A summary as a table: for the terminal, as Markdown and as CSV."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedcore.reports.summary import LAST, Row, Statistic, Summary

HEADINGS = (
    "algorithm",
    "accuracy %",
    "vs {first}",
    "best %",
    "oscillation",
    "test loss",
    "seeds",
    "rounds",
    "s / trial",
)
ESSENTIAL = 5
"""How many of these columns a terminal of 80 characters has room for."""


def terminal_table(summary: Summary) -> Group:
    """Title and first columns for a terminal, the best accuracy in bold."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(_headings(summary)[:ESSENTIAL]):
        table.add_column(Text(heading), justify="right" if index else "left", no_wrap=True)
    best = max((row.final.mean for row in summary.rows if row.final.mean is not None), default=None)
    for row in summary.rows:
        texts = map(Text, _cells(row)[:ESSENTIAL])  # and not rich's markup
        table.add_row(*texts, style="bold" if row.final.mean == best is not None else None)
    return Group(*title(summary), table)


def title(summary: Summary) -> list[Text]:
    """The title for a terminal, and below it what was changed."""
    changed = [Text(f"changed: {summary.changed}", style="yellow")] if summary.changed else []
    return [Text(summary.title, style="bold"), *changed]


def markdown_table(summary: Summary) -> str:
    """The table as Markdown, with its notes."""
    lines = [f"# {escaped(summary.title)}", ""]
    lines += [f"Changed: {escaped(summary.changed)}.", ""] if summary.changed else []
    lines += [*markdown_lines(*cells(summary)), "", legend(summary)]
    if summary.notes:
        lines += ["", *(f"- {escaped(note)}" for note in summary.notes)]
    return "\n".join(lines) + "\n"


def legend(*summaries: Summary) -> str:
    """The meaning of the columns of these summaries, as a sentence."""
    fewest, most = min(one.last[0] for one in summaries), max(one.last[1] for one in summaries)
    if fewest == LAST:
        over = f"the last {LAST} evaluated rounds"
    elif fewest < most:
        over = f"the last {LAST} evaluated rounds, or as many as there are (from {fewest} on)"
    else:
        over = "the one evaluated round there is" if fewest == 1 else f"the {fewest} evaluated rounds there are"
    return (
        f"Accuracy: mean over {over}; oscillation: its standard deviation over them; mean ± sample standard deviation "
        "over seeds, in points; vs: paired by seed, same clients in each round; test loss: mean cross entropy, "
        "over the same rounds."
    )


def cells(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """The headings, and the rows as texts."""
    return _headings(summary), [_cells(row) for row in summary.rows]


def markdown_lines(
    headings: Sequence[str], rows: Iterable[Sequence[str]], bold: Iterable[tuple[int, int]] = ()
) -> list[str]:
    """A table as lines of Markdown, its first column flush left.

    Args:
        bold: the row and column of each cell in bold.

    >>> markdown_lines(["a", "b"], [["x|y", "1"]], [(0, 1)])
    ['| a | b |', '| --- | ---: |', '| x\\\\|y | **1** |']
    """
    titles, *cells = [[escaped(cell).replace("|", r"\|") for cell in row] for row in (headings, *rows)]
    for row, column in bold:
        cells[row][column] = f"**{cells[row][column]}**"
    return [_line(titles), _line(["---"] + ["---:"] * (len(headings) - 1)), *map(_line, cells)]


def csv_table(summary: Summary) -> str:
    """The table as CSV: fractions, not points, in full precision; empty where there is no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("final", "best", "oscillation", "loss", "difference", "seconds")
    spread = [f"{name}_{part}" for name in names for part in ("mean", "std")]
    writer.writerow(["algorithm", "seeds", "rounds", *spread])
    for row in summary.rows:
        values = [getattr(row, name) or Statistic(None, None) for name in names]
        numbers = [number for value in values for number in (value.mean, value.deviation)]
        writer.writerow([_guarded(row.algorithm), len(row.seeds), row.rounds, *numbers])
    return text.getvalue()


def _headings(summary: Summary) -> list[str]:
    return [heading.format(first=summary.rows[0].algorithm) for heading in HEADINGS]


def _cells(row: Row) -> list[str]:
    difference = "" if row.difference is None else _points(row.difference, sign="+")
    seconds = "–" if row.seconds.mean is None else f"{row.seconds.mean:.1f}"
    return [
        row.algorithm,
        _points(row.final),
        difference,
        _points(row.best),
        _points(row.oscillation),
        _plain(row.loss),
        str(len(row.seeds)),
        str(row.rounds),
        seconds,
    ]


def _plain(statistic: Statistic) -> str:
    """``0.713 ± 0.020``: three digits behind the point, or as many as it has."""
    if statistic.mean is None:
        return "–"
    mean = f"{statistic.mean:.3f}" if statistic.mean < 1e4 else f"{statistic.mean:.3g}"
    return mean if statistic.deviation is None else f"{mean} ± {statistic.deviation:.3g}"


def _points(statistic: Statistic, sign: str = "") -> str:
    """``71.3 ± 2.0``: a fraction as percentage points."""
    if statistic.mean is None:
        return "–"
    mean = f"{100 * statistic.mean:{sign}.1f}"
    return mean if statistic.deviation is None else f"{mean} ± {100 * statistic.deviation:.1f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


_MARKS = re.compile(
    r"[\\`*\[\]~$]"  # code, emphasis, links, pictures, formulas
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis too, except within a word
    r"|:(?=//)|(?<=mailto):|(?<=xmpp):|(?<=www)\.|@"  # addresses, which some viewers make links of
    r"|^[#>]|#$|^[-+=:](?=[-+=:\s]|$)",  # headings, quotations, lists and rules, at the start; the end of a heading
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")


def escaped(text: str) -> str:
    """A text on one line of Markdown, where every part of it is text: no HTML, link, picture, emphasis or heading.

    >>> escaped("a < b\\n![c](https://d) max_norm *e*")
    'a &lt; b !\\\\[c\\\\](https\\\\://d) max_norm \\\\*e\\\\*'
    """
    plain = _NUMBERED.sub(r"\1\\\2", _MARKS.sub(r"\\\g<0>", " ".join(text.split())))
    return plain.replace("&", "&amp;").replace("<", "&lt;")


def code_span(text: str) -> str:
    """A text on one line of Markdown as code, which ends where the text does.

    >>> code_span("a"), code_span("a`b")
    ('`a`', '`` a`b ``')
    """
    plain = " ".join(text.split())
    runs = [len(run) for run in re.findall("`+", plain)]
    marks = "`" * (max(runs, default=0) + 1)
    return f"{marks} {plain} {marks}" if runs else f"{marks}{plain}{marks}"


def _guarded(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
