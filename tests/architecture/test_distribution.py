"""The package ``fedcore`` on the index is unrelated; no file of this repository may install it."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import fedcore
from fedcore.errors import DISTRIBUTION

ROOT = Path(fedcore.errors.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOREIGN = [
    re.compile(r"(?<![\w.-])fedcore\["),  # an extra of the unrelated package
    re.compile(r"\bpip3? +(?:install|download|wheel)\b[^\n`]*?[ \"'](?<![\w./-])fedcore(?![\w./-])"),
]
OURS = re.compile(rf"{DISTRIBUTION}\[([\w, ]+)\]")


def tracked():
    """Return the text of each file of the repository, by path."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip(f"git does not list the files here: {listing.stderr.strip()}")
    paths = [ROOT / name for name in listing.stdout.rstrip("\0").split("\0")]
    return {path: path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()}


def test_no_file_installs_the_foreign_package():
    assert all(any(form.search(text) for form in FOREIGN) for text in ("pip install -U fedcore", "fedcore[sim]"))
    files = {path: text for path, text in tracked().items() if path != Path(__file__)}
    assert [(path, hit[0]) for path, text in files.items() for form in FOREIGN for hit in form.finditer(text)] == []


def test_every_extra_in_the_text_exists():
    extras = {extra.strip() for text in tracked().values() for hit in OURS.findall(text) for extra in hit.split(",")}
    assert extras
    assert extras <= PROJECT["optional-dependencies"].keys()


def test_the_package_is_installed_under_its_name():
    assert PROJECT["name"] == DISTRIBUTION
    assert metadata.version(DISTRIBUTION) == fedcore.__version__ == PROJECT["version"]
    assert {point.value for point in metadata.distribution(DISTRIBUTION).entry_points if point.name == "fedcore"} == {
        "fedcore.cli:main"
    }


def test_the_locks_hold_the_build_tools_and_nothing_of_one_machine():
    """Builds run without isolation, so a clone's first build lacks every tool that a lock lacks."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["build"]
    for lock in ("sim.txt", "dev.txt"):
        text = (ROOT / "locks" / lock).read_text()
        packages = set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
        assert {tool.partition(">")[0] for tool in tools} <= packages
        assert "//" not in text
        assert not [name for name in packages if re.match("torch(vision)?$|nvidia-(?!ml-py)|triton|cuda", name)]
