"""README: its length, first example, links and figures; tests/docs runs its other blocks."""

import contextlib
import csv
import io
import re
from pathlib import Path
from statistics import fmean, stdev

from fedcore.reports.papers import figures
from fedcore.reports.statistics import interval_of

README = Path(__file__).parent.parent / "README.md"


def test_the_first_example_prints_true():
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().rstrip().endswith("True")


def test_it_is_short_and_begins_with_two_commands():
    text = README.read_text()
    assert len(text.splitlines()) <= 160
    first = re.search(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    assert re.findall(r"^(make \w+) ", first, re.MULTILINE) == ["make quickstart", "make test"]


def test_every_link_has_a_file():
    targets = re.findall(r"\]\(([^):#\s]+)[^)]*\)", README.read_text())
    assert len(targets) > 30
    assert not [target for target in targets if not (README.parent / target).is_file()]


def test_the_quickstart_table_matches_its_record():
    table = re.findall(r"^\| (\w+) \| ([^|]*± [^|]*) \| ([^|]*)\| ([^|]*± [^|]*) \|$", README.read_text(), re.MULTILINE)
    with (README.parent / "docs" / "quickstart.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def cell(row, figure, sign=""):
        mean, deviation = (row[f"{figure}_{kind}"] for kind in ("mean", "std"))
        return f"{100 * float(mean):{sign}.1f} ± {100 * float(deviation):.1f}" if mean else ""

    assert [(name, *(cells.strip() for cells in others)) for name, *others in table] == [
        (row["algorithm"], cell(row, "final"), cell(row, "difference", "+"), cell(row, "oscillation")) for row in rows
    ]
    assert len(rows) == 3


def test_the_table_of_docs_papers_matches_its_record():
    page = (README.parent / "docs" / "papers.md").read_text()
    name, seeds = re.search(r"^`fedcore run (\S+) .*--seeds (\d+)`", page, re.MULTILINE).groups()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+ ± [\d.]+) \| ([^|]*)\| ([\d.]+)[^|]*\| ([^|]*)\|$", page, re.MULTILINE)
    table = {method: [cell.strip() for cell in cells] for method, *cells in rows}
    with (README.parent / "bench" / "papers" / "mimic-table4-trials.csv").open(encoding="utf-8") as file:
        trials = {
            (row["algorithm"], int(row["seed"])): 100 * float(row["accuracy"])
            for row in csv.DictReader(file)
            if row["preset"] == name
        }
    assert trials.keys() == {(method, seed) for method in table for seed in range(int(seeds))}
    paper = figures(name).accuracy

    def cells(method):
        made, first = ([trials[one, seed] for seed in range(int(seeds))] for one in (method, "FedAvg"))
        apart = [mine - other for mine, other in zip(made, first, strict=True)]
        leads = (
            "{:+.1f} ({:+.1f} .. {:+.1f})".format(fmean(apart), *interval_of(apart)),
            f"{paper[method] - paper['FedAvg']:+.2f}",
        )
        lead, of_paper = ("", "") if method == "FedAvg" else leads
        return [f"{fmean(made):.1f} ± {stdev(made):.1f}", lead, f"{paper[method]:.2f}", of_paper]

    assert table == {method: cells(method) for method in paper}
