"""Markdown tables, and their insertion into a README."""

import re

END = "<!-- end -->"
WORDS = ("line", "against", "met", "kernel", "compiled for", "bytes that spill", "step", "went", "words")
WORDS += ("method", "rule")


def table(columns, rows):
    """Return a Markdown table; the columns in ``WORDS`` are left-aligned, others right-aligned."""
    lines = [columns, ["---" if column in WORDS else "---:" for column in columns], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def put_into(readme, text, begin):
    """Replace the text between a mark and the next end.

    Raises:
        SystemExit: the mark does not occur exactly once, or no end follows it.
    """
    before = readme.read_text()
    marked = re.compile(re.escape(begin) + ".*?" + re.escape(END), re.DOTALL)
    if before.count(begin) != 1 or not marked.search(before):
        raise SystemExit(f"{readme}: expected one {begin!r} and a {END!r} after it")
    readme.write_text(marked.sub(lambda _: f"{begin}\n\n{text}\n\n{END}", before))
