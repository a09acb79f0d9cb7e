"""Every code block of README and docs runs, or shows a file that a test runs."""

import re

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, blocks, named
from tests.docs.running import Page, restored_registries

# The allowed reasons for a block that no test runs.
REASONS = {
    "it needs APPFL, with which tests/adapters/appfl runs it",
    "it needs a GPU",
    "it needs a Ray cluster",
    "it needs Flower's own processes, which tests/adapters/wire runs",
    "it needs FedML",
    "it needs OpenFL",
    "it needs PEFT",
    "it needs a container runtime",
    "it needs root",
    "it needs transformers",
    "it creates a separate environment",
}
RUN_ELSEWHERE = {DOCS / "operations.md": "tests/test_operations.py"}
LANGUAGES = {"python", "sh", "toml", "yaml", "text"}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_are_well_formed(page):
    text = page.read_text()
    assert text.count("\n```") % 2 == 0
    for block in blocks(page):
        assert block.language in LANGUAGES, block.text
        assert block.reason is None or block.reason in REASONS, block.reason
        assert block.language in ("python", "sh") or block.reason is None, block.text
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    # Four spaces after an empty line make a block without a language, except in lists and options.
    indented = re.findall(r"(?<=\n\n) {4}(?! *[-*:])\S.*", outside)
    assert page.parent.name == "api" or not indented, indented
    assert "<!-- not run" not in re.sub(r"^<!-- not run: [^\n]* -->\n+(?=```)", "", text, flags=re.MULTILINE)


def test_every_reason_is_used():
    assert {block.reason for page in PAGES for block in blocks(page)} - {None} == REASONS


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_test_runs_every_shown_file(page):
    # An example may also be run by another example: NVFlare's job starts its clients.
    tests = "".join(file.read_text() for room in ("tests", "examples") for file in (ROOT / room).rglob("*.py"))
    for block in blocks(page):
        if path := block.included:
            assert (ROOT / path).is_file(), path
            name = path.rpartition("/")[2]
            assert re.search(rf"\b{name.removesuffix('.py')}\b", tests), f"no test mentions {path}"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN_ELSEWHERE and any(blocks(page))], ids=named)
def test_the_blocks_run(page, tmp_path, monkeypatch):
    needs = re.search(r"^<!-- needs: (.*) -->$", page.read_text(), re.MULTILINE)
    for package in needs[1].split() if needs else ():
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    run = Page(page, monkeypatch)
    with restored_registries(*run.files):
        run.run()
