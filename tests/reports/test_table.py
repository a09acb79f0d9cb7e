import csv
import io

from rich.console import Console

from fedcore.reports.summary import summarise
from fedcore.reports.table import csv_table, markdown_table, terminal_table


def test_markdown(record):
    records = [record(name, i, seed, [0.1 * (i + seed + 1)] * 2) for i, name in enumerate("AB") for seed in (0, 1)]
    lines = markdown_table(summarise(records)).splitlines()
    assert lines[2].startswith("| algorithm | accuracy % | vs A |")
    assert lines[4] == "| A | 15.0 ± 7.1 |  | 15.0 ± 7.1 | 0.0 ± 0.0 | 0.850 ± 0.0707 | 2 | 2 | 1.0 |"
    assert lines[5] == "| B | 25.0 ± 7.1 | +10.0 ± 0.0 | 25.0 ± 7.1 | 0.0 ± 0.0 | 0.750 ± 0.0707 | 2 | 2 | 1.0 |"


def test_markdown_escapes_labels_and_lists_notes(record):
    text = markdown_table(summarise([record("A|B", 0, 0, [0.5], rounds=2)]))
    assert "| A\\|B | 50.0 |" in text
    assert "- A|B, seed 0: stopped after 1 of 2 rounds" in text


def test_csv_has_full_precision_and_blanks(record):
    text = csv_table(summarise([record("A, B", 0, 0, [1 / 3])]))
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["algorithm"] == "A, B"
    assert float(row["final_mean"]) == 1 / 3
    assert row["final_std"] == row["difference_mean"] == ""


def test_the_terminal_table_fits_80_columns(record):
    console = Console(file=io.StringIO(), width=80)
    records = [record(name, i, seed, [0.5, 0.6 - seed / 9]) for i, name in enumerate("AB") for seed in (0, 1)]
    console.print(terminal_table(summarise(records)))
    text = console.file.getvalue()
    assert "…" not in text
    assert "oscillation" in text
