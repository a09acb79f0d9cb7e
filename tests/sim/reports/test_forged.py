"""Forged records have a report without markup, or raise an error with file and line."""

import csv
import io
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from fedcore.errors import FedcoreError, MissingDataError
from fedcore.sim.experiment.results import read
from fedcore.sim.reports import write_report
from fedcore.sim.reports.report import SCRIPT, Document, summary_for_terminal
from fedcore.sim.reports.statistics import summarise, summary_csv

pytestmark = pytest.mark.filterwarnings("ignore:Glyph:UserWarning")  # the fonts lack some characters


def of_header(**change):
    return lambda header, rounds: ({**header, **change}, rounds)


def of_rounds(**change):
    return lambda header, rounds: (header, [{**line, **change} for line in rounds])


def each(make, **values):
    """A forgery for each of the values of each field."""
    return {f"{name}={value!r}"[:40]: make(**{name: value}) for name, some in values.items() for value in some}


NAN = float("nan")
FORGED = each(
    of_rounds,
    accuracy=["x", NAN, 1e308, 10**400, [1], True],
    round=["a", 10**30, 0],
    seconds=["x", {"local": "x"}, {"local": NAN}],
    **{"active": [None, ["x"]], "uploads": ["x", -5], "norm": ["x"], "loss": [float("inf")]},
)
FORGED |= each(
    of_header,
    algorithm=[[1], "a" * 10**5, "a\0b", "\ud800"],
    **{"seed": ["x", [1]], "order": ["x", None], "rounds": ["x", 10**30], "title": [{}, "a" * 10**5], "preset": [None]},
    x=[1],  # a field too many
)
HTML, IMAGE = "</td><script>alert(1)</script>", "<img src=x onerror=alert(1)>"
ODD = each(
    of_header,
    title=["cost in $ and $\\frac{", IMAGE],
    algorithm=["lr = $5", "$x_{$", HTML, "[/b][link=x]", "\u202e\U0001f600", "a\n| b |"],
    **{"preset": ["../../x"], "rounds": [10**12]},
)
ODD["no rounds"] = lambda header, rounds: (header, [])
TEXTS = {
    "deep": lambda header: "[" * 100_000 + "]" * 100_000 + "\n",
    "a huge integer": lambda header: json.dumps(header)[:-1] + ', "z": ' + "9" * 5000 + "}\n",
    "NULs": lambda header: json.dumps(header) + "\n" + "\0" * 4096 + "\n",
    "another encoding": lambda header: json.dumps(header).encode("utf-16").decode("latin1") + "\n",
}


@pytest.fixture
def lines(record):
    good = record("A", 0, 0, [0.1, 0.2, 0.3])
    return asdict(good.header), [asdict(line) for line in good.rounds]


def forge(folder, lines):
    (folder / "records").mkdir(exist_ok=True)
    (folder / "records" / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("how", FORGED)
def test_forged_record_is_rejected(tmp_path, lines, how):
    header, rounds = FORGED[how](*lines)
    forge(tmp_path, [header, *rounds])
    with pytest.raises(MissingDataError, match=r"0\.jsonl: line \d"):
        write_report(tmp_path)


@pytest.mark.parametrize("how", ODD)
def test_odd_record_has_a_report_without_markup(tmp_path, lines, how):
    header, rounds = ODD[how](*lines)
    forge(tmp_path, [header, *rounds])
    write_report(tmp_path)
    for name in ("report.html", "table.md"):
        text = (tmp_path / name).read_text(encoding="utf-8").replace(f"<script>{SCRIPT}", "")
        assert "<script>" not in text
        assert "<img src=x" not in text
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_for_terminal(summarise([read(tmp_path / "records" / "0.jsonl")])))
    assert header["algorithm"].split("\n")[0] in console.file.getvalue()


@pytest.mark.parametrize("how", TEXTS)
def test_other_file_is_rejected(tmp_path, lines, how):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "0.jsonl").write_text(TEXTS[how](lines[0]))
    if how == "NULs":
        assert write_report(tmp_path).summary.notes
        return
    with pytest.raises(MissingDataError, match="jsonl") as caught:
        write_report(tmp_path)
    assert len(str(caught.value)) < 1000


def test_csv_has_no_formulas(record):
    labels = ["plain", "=HYPERLINK(1)", "+1", "-1", "@x", "\t=1"]
    records = [record(label, i, seed, [0.5 - i / 100]) for i, label in enumerate(labels[:5]) for seed in (0, 1)]
    rows = list(csv.DictReader(io.StringIO(summary_csv(summarise(records)))))
    assert [row["algorithm"] for row in rows] == ["plain", "'=HYPERLINK(1)", "'+1", "'-1", "'@x"]
    assert float(rows[1]["difference_mean"]) == pytest.approx(-0.01)
    assert rows[1]["difference_mean"].startswith("-")


def test_html_in_titles_and_notes_is_escaped(record):
    document = Document("<i>T</i>")
    document.notes(summarise([record("<b>A</b>", 0, 0, [0.5], rounds=2)]).notes)
    text = document.markdown()
    assert "<i>" not in text + document.html()
    assert "<b>" not in document.html()
    assert "<b>" not in text
    assert "- &lt;b>A&lt;/b>, seed 0: stopped" in text


@pytest.mark.parametrize("name", ["config.json", "records", "records/0.jsonl"])
def test_link_in_a_run_is_not_followed(tmp_path, lines, name):
    """It may point to a private file, and the report may be published."""
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    forge(run, [lines[0], *lines[1]])
    (run / "config.json").write_text('{"password": "hunter2"}')
    (run / name).rename(secret)
    (run / name).symlink_to(secret)
    with pytest.raises(FedcoreError, match="link"):
        write_report(run)
    assert {path.name for path in run.iterdir()} == {"config.json", "records"}
