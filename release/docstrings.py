"""An extension of griffe, the site's reader of docstrings, for this project's style."""

import re

import griffe

# Words that begin a paragraph here, and would begin a box there.
PARAGRAPH = re.compile(r"^( *)(Cost|Determinism|Reference|Raises): +(?=\S)", re.MULTILINE)
# Outside of code: stars, which would be emphasis, and x[i][j], which would be a link.
SIGNS = re.compile(r"(``.*?``)|\*|\](?=\[)", re.DOTALL)


def as_markdown(text):
    """A docstring with its examples in fences, its paragraphs as paragraphs, and its stars as stars."""
    parts = re.split(r"^( *)(>>> .*?(?:\n(?= *$)|\Z))", text, flags=re.MULTILINE | re.DOTALL)
    made = []
    for number, part in enumerate(parts):
        if number % 3 == 0:
            part = PARAGRAPH.sub(r"\1**\2.** ", SIGNS.sub(lambda found: found[1] or "\\" + found[0], part))
        elif number % 3 == 2:
            indent = parts[number - 1]
            part = f"```pycon\n{indent}{part.rstrip()}\n{indent}```\n"
        made.append(part)
    return "".join(made)


def example_first(text):
    """Move the first examples behind the first paragraph, unless a sentence introduces them."""
    paragraphs = text.split("\n\n")
    examples = [number for number, each in enumerate(paragraphs) if each.lstrip().startswith(">>> ")]
    if not examples or examples[0] == 0 or paragraphs[examples[0] - 1].rstrip().endswith(":"):
        return text
    first, last = examples[0], examples[0] + 1
    while last in examples:
        last += 1
    return "\n\n".join([paragraphs[0], *paragraphs[first:last], *paragraphs[1:first], *paragraphs[last:]])


class Docstrings(griffe.Extension):
    """Docstrings as Markdown."""

    def on_object(self, *, obj, **_):
        """Rewrite an object's docstring before it is parsed."""
        if obj.docstring:
            obj.docstring.value = as_markdown(example_first(obj.docstring.value))
