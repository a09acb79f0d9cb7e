"""Checks of the built site: ``python -m release.site FOLDER [--external]``.

Every link of every page leads to a file of the site, and to a heading in it, and nothing is fetched from elsewhere;
every public name of the package is in the API; llms.txt names every page. With ``--external`` it instead requests every
link to another site, which needs a network.
"""

import ast
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

ROOT = Path(__file__).parent.parent
# Packages whose names need no page of the API, and why.
INNER = {
    "cli": "what is public is the command, and its --help",
    "arrays": "it re-exports the native module for the other modules",
}


class Page(HTMLParser):
    """The links, ids and fetched files of one page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.ids, self.fetched = [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        """Note what the tag points to, and what it is called."""
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.fetched.append(given.get("href"))
        elif given.get("src"):
            self.fetched.append(given["src"])


def broken(folder):
    """What leads nowhere, page by page."""
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for target in page.links + page.fetched:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.fetched and parts.scheme != "data":
                    yield f"{path.relative_to(folder)}: fetches {target}"
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.path.startswith("/"):  # of 404.html, which may be shown at any depth
                to = folder / unquote(parts.path).lstrip("/")
            to = to / "index.html" if to.is_dir() else to
            known = to in pages
            if not to.is_file() or (parts.fragment and known and unquote(parts.fragment) not in pages[to].ids):
                yield f"{path.relative_to(folder)}: {target} leads nowhere"


def public(package):
    """The public names of a package's rooms: those in ``__all__``."""
    for init in sorted([package / "__init__.py", *package.glob("[a-z]*/__init__.py"), *package.glob("[a-z]*.py")]):
        room = ".".join(init.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        if room.rpartition(".")[2] in INNER:
            continue
        for node in ast.parse(init.read_text()).body:
            target = getattr(node, "target", None) or getattr(node, "targets", [None])[0]
            if getattr(target, "id", "") == "__all__" and hasattr(node, "value"):
                yield from (f"{room}.{name}" for name in ast.literal_eval(node.value))


def inventory(folder):
    """What the API documents, by every name that it is known by."""
    lines = (folder / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.partition(" ")[0] for line in zlib.decompress(lines).decode().splitlines()}


def undocumented(folder):
    """Public names that no page of the API has."""
    known = inventory(folder)
    for name in public(ROOT / "fedcore"):
        file = ROOT / Path(*name.split(".")).with_suffix(".py")
        last = name.rpartition(".")[2]
        # A function that is called as its file is known there by its whole path, and a module by what is in it.
        if file.is_file() and f"def {last}(" in file.read_text():
            found = f"{name}.{last}" in known
        else:
            is_module = file.is_file() or file.with_suffix("").is_dir()
            found = name in known or (is_module and any(each.startswith(f"{name}.") for each in known))
            # The top level also exports modules of its packages, such as fedcore.sim.participation.
            if modules := list((ROOT / "fedcore").glob(f"**/{last}.py")):
                inner = ".".join(modules[0].relative_to(ROOT).with_suffix("").parts) + "."
                found = found or any(each.startswith(inner) for each in known)
        room = name.removesuffix(last)
        if not found and not any(each.startswith(room) and each.endswith(f".{last}.{last}") for each in known):
            yield f"{name}: in no page of docs/api, or without a docstring"


def unlisted(folder):
    """Pages that llms.txt lacks."""
    text = (folder / "llms.txt").read_text()
    for path in sorted(folder.rglob("*.html")):
        place = path.relative_to(folder)
        if str(place) != "404.html" and f"({place}.md)" not in text:
            yield f"llms.txt: {place} is missing"


def answer(url):
    """The status of another site's page, or the error."""
    try:
        with urlopen(Request(url, headers={"User-Agent": "Mozilla/5.0 (fedcore)"}), timeout=30) as reply:
            return reply.status
    except HTTPError as error:
        return error.code
    except (OSError, HTTPException) as error:
        return str(error)


def external(folder):
    """Print the links to other sites that do not work; return 1 if a page or a site does not exist, else 0."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        for link in Page(path).links:
            if urlsplit(link).scheme in ("http", "https"):
                pages.setdefault(link.partition("#")[0], path.relative_to(folder))
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(pages, pool.map(answer, pages), strict=True))
    # Many sites answer 403 or 429 to programs, although the page exists.
    wrong = [url for url, status in answers.items() if isinstance(status, str) or status in (404, 410)]
    for url, status in answers.items():
        if status != 200:
            print(f"{pages[url]}: {url}: {status}" + ("" if url in wrong else " (not judged)"))
    print(f"{len(pages)} links to other sites, {len(wrong)} lead nowhere")
    return int(bool(wrong))


def main(folder):
    """Print the problems; return 1 if there are any, else 0."""
    wrong = [*broken(folder), *undocumented(folder), *unlisted(folder)]
    print(*wrong, f"{len(list(folder.rglob('*.html')))} pages, {len(inventory(folder))} names", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    check = external if "--external" in sys.argv else main
    sys.exit(check(Path(sys.argv[1]).resolve()))
