"""What is installed is ours: the name ``fedcore`` belongs to somebody else on the package index."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import fedcore
from fedcore.errors import DISTRIBUTION

ROOT = Path(fedcore.layout.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOREIGN = [
    re.compile(r"(?<![\w.-])fedcore\["),  # an extra of the foreign distribution
    re.compile(r"\bpip3? +(?:install|download|wheel)\b[^\n`]*?[ \"'](?<![\w./-])fedcore(?![\w./-])"),
]
OURS = re.compile(rf"{DISTRIBUTION}\[([\w, ]+)\]")


def tracked():
    """The texts of the repository's files."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip(f"git does not list the files here: {listing.stderr.strip()}")
    for name in listing.stdout.rstrip("\0").split("\0"):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):  # which says what the search is to find
            yield name, path.read_text(encoding="utf-8", errors="replace")


def test_nothing_leads_to_somebody_else_s_package():
    files = dict(tracked())
    assert len(files) > 100
    found = [f"{name}: {hit[0]}" for name, text in files.items() for form in FOREIGN for hit in form.finditer(text)]
    assert not found


@pytest.mark.parametrize(
    "text",
    ["pip install fedcore", 'pip install "fedcore"', "pip install -U fedcore", "fedcore[sim]", "'fedcore[torch]'"],
)
def test_the_search_finds(text):
    assert any(form.search(text) for form in FOREIGN)


@pytest.mark.parametrize(
    "text", ["pip install fedcore-fl", 'pip install ".[sim]"', "pip install ./fedcore", "fedcore-fl[sim]"]
)
def test_the_search_leaves(text):
    assert not any(form.search(text) for form in FOREIGN)


def test_every_extra_that_is_named_exists():
    named = {extra.strip() for _, text in tracked() for hit in OURS.findall(text) for extra in hit.split(",")}
    assert named
    assert named <= PROJECT["optional-dependencies"].keys()


def test_the_package_is_installed_under_its_name():
    assert PROJECT["name"] == DISTRIBUTION
    assert metadata.version(DISTRIBUTION) == fedcore.__version__ == PROJECT["version"]
    assert {point.value for point in metadata.distribution(DISTRIBUTION).entry_points if point.name == "fedcore"} == {
        "fedcore.cli:main"
    }
