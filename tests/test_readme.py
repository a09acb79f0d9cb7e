"""README: its length, first example, links and figures; tests/docs runs its other blocks."""

import contextlib
import csv
import io
import re
from pathlib import Path
from statistics import fmean

from fedcore.sim.reports.statistics import interval_of

README = Path(__file__).parent.parent / "README.md"


def test_the_first_example_prints_true():
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert code in (README.parent / "docs" / "getting-started.md").read_text()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().rstrip().endswith("True")


def test_it_is_short_and_begins_with_two_commands():
    text = README.read_text()
    assert len(text.splitlines()) <= 160
    first = re.search(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    assert re.findall(r"^make \w+$", first, re.MULTILINE) == ["make quickstart", "make test"]


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


def test_the_differences_of_docs_papers_are_those_of_the_records():
    folder = README.parent / "bench" / "papers"
    pages = {"accuracy": README.parent / "docs" / "papers.md", "last_round": folder / "README.md"}
    for name in ("figure6", *(f"table{of}{data}" for of in ("3-tau20", "3-tau50", "4") for data in ("", "-classes"))):
        rows = list(csv.DictReader((folder / f"mimic-{name}-trials.csv").read_text().splitlines()))
        for column, page in pages.items():
            found = {(row["algorithm"], row["seed"]): 100 * float(row[column]) for row in rows}
            apart = [found["MimiC", seed] - found["FedAvg", seed] for seed in sorted({row["seed"] for row in rows})]
            text = "{:+.1f} ({:+.1f} .. {:+.1f})".format(fmean(apart), *interval_of(apart))
            assert text.replace("+0.", "+.").replace("-0.", "-.") in page.read_text(), (name, text)
