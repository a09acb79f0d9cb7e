"""The pages of the site that lie elsewhere in the tree: hooks of mkdocs.

A page is written once: README, CHANGELOG and the reports of the benchmarks are pages where they lie, and so is every
link in them and in ``docs`` that works in a clone. A link to a file of the tree that is no page becomes its plain text.
A block that is nothing but the path of an example, as a comment, shows that file. The comment RATIOS becomes the last
comparison of two commits that was made in this clone. PAIRS becomes the table of features that do not combine, and
METHODS that of methods and features.
"""

import posixpath
import re
import tomllib
from functools import cache
from pathlib import Path

from mkdocs.structure.files import File

from fedcore import combines
from fedcore.algorithms import REGISTRY
from fedcore.server.compatibility import table

ROOT = Path(__file__).parent.parent
# What lies where, and its place in the site.
MOUNTED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "bench/benchmarks.md",
    "bench/attacks.md": "bench/attacks.md",
    "bench/gpu/README.md": "bench/gpu.md",
    "bench/papers/README.md": "bench/papers.md",
    "bench/peers/wrong_results.md": "bench/wrong-results.md",
    "bench/store/README.md": "bench/store.md",
    **{str(path.relative_to(ROOT)): f"bench/{path.name}" for path in sorted(ROOT.glob("bench/papers/*.png"))},
}
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```python\n# (examples/\S+\.py)\n```$", re.MULTILINE)
RATIOS = "<!-- the last comparison of two commits -->"
PAIRS, METHODS = "<!-- features that do not combine -->", "<!-- methods and features -->"
SHOWN_FEATURES = (
    *("server_lr", "robust rule", "PrivateMean", "exact sums", "edges", "discount", "buffer", "max_staleness"),
    *("shards", "partial updates", "warm_start"),
)
CONDITIONS = {"unbounded sums": "with a bound", "step length of the clients": "with `server_lr`"}
COMPARED = ROOT / "build" / "commits" / "table.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def page_of(path):
    """The place in the site of a file of the tree; None for one that is no part of it."""
    if path.startswith("docs/tutorials/"):
        path = path.removesuffix(".py") + ".md"
    return MOUNTED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


def relinked(text, source, place):
    """A page's text with the links of a clone made links of the site.

    Args:
        text: Markdown.
        source: the file that it is from, relative to the root of the tree.
        place: its place in the site.
    """

    def link(found):
        picture, words, target = found.groups()
        path, mark, anchor = target.partition("#")
        if not path or ":" in path:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = page_of(path)
        if page is not None:
            return f"{picture}[{words}]({posixpath.relpath(page, posixpath.dirname(place))}{mark}{anchor})"
        return words if (ROOT / path).exists() else found[0]

    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in FENCED.split(text))


def compared():
    """What `make bench-commits` wrote last in this clone."""
    return COMPARED.read_text() if COMPARED.exists() else "None was made where this site was built."


def grid(headings, rows):
    """A table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def pairs():
    """The features that do not combine."""
    return grid(("features", "not with", "because", "instead"), table())


def mark(combination):
    """The cell of a method and a feature."""
    conditions = {CONDITIONS.get(row.b, "no") for row in combination.conflicts}
    return "no" if "no" in conditions else ", ".join(sorted(conditions)) or "yes"


@cache
def methods():
    """What methods combine with, and the features that they have."""
    names = sorted(REGISTRY.own)
    features = {method: combines(method).features for method in names}
    has = {name: [method for method in names if name in features[method]] for name in combines().features}
    rows = [(name, *(mark(combines(name, feature)) for feature in SHOWN_FEATURES)) for name in names]
    owners = [(name, ", ".join(found)) for name, found in has.items() if found]
    return "\n\n".join([grid(("method", *SHOWN_FEATURES), rows), grid(("feature", "methods"), owners)])


def on_config(config):
    """Put the package's version into the footer."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    config.copyright = f"fedcore {version}"
    return config


def on_files(files, config):
    """Add what lies elsewhere."""
    for source, place in MOUNTED.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn a clone's links into the site's, and put in the files that a page shows."""
    markdown = SHOWN.sub(lambda found: f"```python\n{(ROOT / found[1]).read_text()}```", markdown)
    markdown = markdown.replace(RATIOS, compared()).replace(PAIRS, pairs()).replace(METHODS, methods())
    place = page.file.src_uri
    source = next((source for source, other in MOUNTED.items() if other == place), f"docs/{place}")
    if source.startswith("docs/tutorials/"):  # its links are to what lies beside it in the site
        return markdown
    return relinked(markdown, source, place)


def on_post_page(output, page, config):
    """Keep the repository link from loading the repository's figures from GitHub."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output, template_name, config):
    """Do the same for 404.html."""
    return on_post_page(output, None, config)
