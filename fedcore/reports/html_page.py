"""A report as one HTML page that needs nothing else: no network, no other file."""

from base64 import b64encode
from collections.abc import Collection, Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #333; margin: 2rem auto; padding: 0 1rem; box-sizing: border-box;
  width: fit-content; min-width: min(64rem, 100%); max-width: 100%; }
p, pre, img { max-width: 62rem; box-sizing: border-box; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; white-space: nowrap; }
td, th { padding: .25rem .8rem; text-align: right; }
th { border-bottom: 2px solid #ddd; } td { border-bottom: 1px solid #eee; }
td:first-child, th:first-child { text-align: left; } img { width: 100%; } p.faint { color: #777; }
p.remark { border-left: .3rem solid #D55E00; padding-left: .7rem; font-weight: 600; }
pre { background: #f7f7f7; padding: .8rem; overflow-x: auto; font-size: 13px; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page.

    Args:
        title: its heading, plain text.
        parts: HTML, as the functions below make it.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    """A heading over a part of the page."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, *, faint: bool = False) -> str:
    """A paragraph of plain text.

    >>> paragraph("a < b")
    '<p>a &lt; b</p>'
    """
    return f"<p{' class=faint' if faint else ''}>{escape(text)}</p>"


def remark(text: str) -> str:
    """A paragraph that is not to be overlooked."""
    return f"<p class=remark>{escape(text)}</p>"


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], bold: Collection[tuple[int, int]] = frozenset()
) -> str:
    """A table of plain texts, those at some places (row, column) in bold.

    >>> table(["a"], [["<"]], {(0, 0)})
    '<table><thead><tr><th>a</th></tr></thead><tbody>\\n<tr><td><b>&lt;</b></td></tr>\\n</tbody></table>'
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    body = ""
    for number, row in enumerate(rows):
        texts = [f"<b>{escape(cell)}</b>" if (number, at) in bold else escape(cell) for at, cell in enumerate(row)]
        body += "<tr>" + "".join(f"<td>{text}</td>" for text in texts) + "</tr>\n"
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def picture(path: Path, text: str) -> str:
    """A PNG, within the page itself."""
    data = b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{data}">'


def source(text: str) -> str:
    """A text as it stands, such as a configuration."""
    return f"<pre>{escape(text)}</pre>"
