"""Tables as Markdown, CSV and on a terminal."""

import csv
import io

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from fedcore.sim.reports.report import Document, escaped, markdown_table, summary_for_terminal
from fedcore.sim.reports.statistics import frame, summarise, summary_csv, summary_table


def test_markdown(record):
    records = [record(name, i, seed, [0.1 * (i + seed + 1)] * 2) for i, name in enumerate("AB") for seed in (0, 1)]
    lines = markdown_table(summary_table(summarise(records))).splitlines()
    assert lines[0].startswith("| algorithm | accuracy % | last round % | vs A |")
    assert lines[2] == "| A | 15.0 ± 7.1 | 15.0 ± 7.1 |  | 0.0 ± 0.0 | 15.0 ± 7.1 | 0.850 ± 0.0707 | 2 | 2 | 1.0 |"
    assert lines[3].startswith("| B | 25.0 ± 7.1 | 25.0 ± 7.1 | +10.0 ± 0.0 | 0.0 ± 0.0 | 25.0 ± 7.1 | 0.750 ±")


def test_markdown_escapes_labels_and_lists_notes(record):
    summary = summarise([record("A|B", 0, 0, [0.5], rounds=2)])
    document = Document("T")
    document.table(summary_table(summary))
    document.notes(summary.notes)
    text = document.markdown()
    assert "| A\\|B | 50.0 |" in text
    assert "- A|B, seed 0: stopped after 1 of 2 rounds" in text


def test_csv_has_full_precision_and_blanks(record):
    text = summary_csv(summarise([record("A, B", 0, 0, [1 / 3])]))
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["algorithm"] == "A, B"
    assert float(row["final_mean"]) == 1 / 3
    assert row["final_std"] == row["difference_mean"] == ""


def test_summary_fits_80_columns(record):
    console = Console(file=io.StringIO(), width=80)
    records = [record(name, i, seed, [0.5, 0.6 - seed / 9]) for i, name in enumerate("AB") for seed in (0, 1)]
    console.print(summary_for_terminal(summarise(records)))
    text = console.file.getvalue()
    assert "…" not in text
    assert "oscillation" in text


LABELS = [
    *("![x](https://a.b/c.png)", "[x](https://a.b)", "[x]: https://a.b", "<https://a.b>", "<img src=x>", "&amp;lt;"),
    *("*a* **b** _c_ __d__ ~~e~~", "`a` ``b``", "a`b", "# a", "a #", "> a", "- a", "+ a", "1. a", "12) a", "---"),
    *("a|b", "a\\|b", "\\", "a\\", "$x_{$", "a\n\n# b", "a\rb", "a\u2028b", "max_norm_ratio", "+1.5 ± 2", "0.5"),
]
BLOCKS = ("paragraph", "heading", "list_item", "bullet_list", "table", "thead", "tbody", "tr", "th", "td")
PLAIN = {"inline", "text", *(f"{block}_{end}" for block in BLOCKS for end in ("open", "close"))}


@pytest.mark.parametrize("label", LABELS)
def test_markdown_shows_every_label_as_text(label):
    table = markdown_table(frame([label, label], [[label, label]]))
    for text in (f"# {escaped(label)}", f"- {escaped(label)}", f"Changed: {escaped(label)}.", table):
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
        parts = [part for token in tokens for part in [token, *(token.children or [])]]
        assert {part.type for part in parts} <= PLAIN
        shown = "".join(part.content for part in parts if part.type == "text")
        assert " ".join(label.split()) in shown


def test_addresses_are_not_links():
    assert escaped("https://a.b www.a.b mailto:a@b") == r"https\://a.b www\.a.b mailto\:a\@b"
