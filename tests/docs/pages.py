"""The pages of the documentation, and their blocks of code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*) -->\n+)?^```(?P<language>\w*)(?P<more>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: python, sh, toml or text.
        text: what it says.
        reason: why no test runs it; None where one does.
        follows: whether nothing but blank lines is between it and the block before.
    """

    language: str
    text: str
    reason: str | None
    follows: bool

    @property
    def file(self):
        """The name of the file that it is, told in its first line; None of one that is no file."""
        found = re.match(r"# ([\w/]+\.(?:py|toml))\b", self.text)
        return None if found is None or self.included else found[1]

    @property
    def included(self):
        """The path of the file that it shows as it is; None where it has code of its own."""
        found = re.fullmatch(r"# (examples/\S+\.py)\n", self.text)
        return found and found[1]


def blocks(page):
    """A page's blocks in their order."""
    text, end = page.read_text(), -1
    for found in FENCE.finditer(text):
        follows = end >= 0 and not text[end : found.start()].strip()
        yield Block(found["language"], found["text"], found["reason"], follows)
        end = found.end()


def named(page):
    """What a test calls a page."""
    return str(page.relative_to(ROOT))
