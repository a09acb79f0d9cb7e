"""llms.txt and llms-full.txt, and each page as Markdown beside its HTML: hooks of mkdocs.

The Markdown is made of the pages' HTML, so that it holds what the pages show: included files, outputs of tutorials, and
the API's docstrings.
"""

from pathlib import Path

from bs4 import BeautifulSoup
from markdownify import MarkdownConverter

_texts = {}


def as_markdown(html):
    """A page's HTML as Markdown, without marks that only a browser needs."""
    soup = BeautifulSoup(html, "html.parser")
    for each in soup.select("a.headerlink, .doc-labels, button, script, style"):
        each.decompose()
    for table in soup.select("table.highlighttable"):
        table.replace_with(table.select_one("td.code").extract())

    def language(block):
        around = block.find_parent("div", class_="highlight")
        found = [name for name in around.get("class", ()) if name.startswith("language-")] if around else []
        return found[0].removeprefix("language-") if found else ""

    text = MarkdownConverter(heading_style="ATX", code_language_callback=language).convert_soup(soup)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def about(text):
    """The first sentence of a page that is no heading, list or table."""
    for paragraph in text.split("\n\n"):
        if paragraph[:1].isalpha() or paragraph[:1] in "*`[":
            return " ".join(paragraph.split()).partition(". ")[0].rstrip(".").replace("**", "")
    return ""


def on_pre_build(config):
    """Forget the build before, which `make docs-serve` may have made."""
    _texts.clear()


def on_page_content(html, page, config, files):
    """Keep what the page shows."""
    _texts[page.file.dest_uri] = page.title, as_markdown(html)


def on_post_build(config):
    """Write the files."""
    folder = Path(config.site_dir)
    listed, whole = [f"# {config.site_name}\n\n> {config.site_description}\n"], []

    def walk(items, heading):
        for item in items:
            if item.children:
                listed.append(f"\n## {item.title}\n")
                walk(item.children, item.title)
            elif item.is_page:
                title, text = _texts[item.file.dest_uri]
                (folder / f"{item.file.dest_uri}.md").write_text(text)
                listed.append(f"- [{title}]({item.file.dest_uri}.md): {about(text)}")
                whole.append(text)

    walk(config.nav_of_site.items, "")
    (folder / "llms.txt").write_text("\n".join(listed) + "\n")
    (folder / "llms-full.txt").write_text("\n\n".join(whole))


def on_nav(nav, config, files):
    """Keep the order of the pages."""
    config.nav_of_site = nav
