"""The pages of the documentation and their code blocks."""

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
    """A code block.

    Attributes:
        language: python, sh, toml, yaml or text.
        text: the contents.
        reason: the reason why no test runs the block. None: a test runs it.
        follows: whether only blank lines separate it from the previous block.
    """

    language: str
    text: str
    reason: str | None
    follows: bool

    @property
    def file(self):
        """The file name in the first line, or None if the block is not a file."""
        found = re.match(r"# ([\w/]+\.(?:py|toml))\b", self.text)
        return None if found is None or self.included else found[1]

    @property
    def included(self):
        """The path of the example that the block shows, or None if it has its own code."""
        found = re.fullmatch(r"# (examples/\S+\.py)\n", self.text)
        return found and found[1]


def blocks(page):
    """Yield the blocks of a page in order."""
    text, end = page.read_text(), -1
    for found in FENCE.finditer(text):
        follows = end >= 0 and not text[end : found.start()].strip()
        yield Block(found["language"], found["text"], found["reason"], follows)
        end = found.end()


def named(page):
    """Return the name of a page in test ids."""
    return str(page.relative_to(ROOT))
