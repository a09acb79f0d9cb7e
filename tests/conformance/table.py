"""Write docs/conformance.md: every set of replies in every framework, each in an environment of its own.

    python -m tests.conformance.table --python appfl=build/appfl/bin/python

An environment that no ``--python`` names is ``build/conformance/EXTRA``, which this command makes if it is missing.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.conformance.cases import CASES
from tests.conformance.rows import DEVIATIONS, FRAMEWORKS, compare, framework

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
BESIDE = ("torch", "numpy", "jax", "keras")
"""Packages of every environment, beside the framework."""

# Some environments have a package named tests, which would hide the folder.
START = """
import runpy, sys, types
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = ["tests"]
sys.path.insert(0, "")
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

TOP = """# The same average as the framework's

`make conformance` runs {sets} sets of replies through the public aggregation of each framework and through fedcore in
its place, and writes this page. The same rows are tests (`tests/conformance`). `make test-deployment` and
`make test-appfl` run the frameworks' real processes too, once with either aggregation, and compare the last models.

- **equal**: both give the same model. Names, shapes and dtypes are the same, and numbers differ by rounding alone: by
  4 x 2^-23 at most, relative plus absolute, where the set is of float32 or float64, since fedcore calculates in
  float32; by 4 x 2^-10 for float16 and 4 x 2^-7 for bfloat16.
- **the name of a deviation**: fedcore does something else on purpose. The reason is below the table.
- **theirs is wrong**: the framework's result is wrong, and fedcore gives the right one. The fault is below the table.
- **none**: the framework has no such replies.
- **not run**: the environment lacks a package.
- **to mend**: fedcore does not give what it should. Each such row is a test that fails.

A set is an entry of `tests/conformance/cases.py`. A framework is a file beside it with `theirs(case)` and `ours(case)`.
"""


def rows_of(name: str) -> dict[str, Any]:
    """The rows of a framework in this environment, and the versions that gave them."""
    import torch

    from bench.peers.torchvision_ops import declare

    torch.set_num_threads(1)
    declare()
    module = framework(name)
    packages = dict.fromkeys((module.PACKAGE, *BESIDE))
    return {
        "name": module.NAME,
        "rows": {case.name: vars(compare(name, case)) for case in CASES},
        "versions": {package: metadata.version(package) for package in packages if find_spec(package)},
    }


def declared(name: str) -> dict[str, str]:
    """The name, package and extra of a framework, read from its file, which only its environment can import."""
    file = Path(__file__).parent / f"{name}.py"
    lines = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign)]
    found = {ast.unparse(node.targets[0]): node.value for node in lines}
    package, extra = ast.literal_eval(found["(PACKAGE, EXTRA)"])
    return {"name": ast.literal_eval(found["NAME"]), "package": package, "extra": extra}


def environment(extra: str) -> Path:
    """The interpreter of an extra's environment, which is made if it is missing."""
    folder = ROOT / "build" / "conformance" / extra
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        what = ["-c", "constraints.txt", "-e", f".[{extra}]", "torch", "jax", "keras"]
        subprocess.run([python, "-m", "pip", "install", "-q", *what], cwd=ROOT, check=True)
        done.touch()
    return python


def run(name: str, python: str | Path) -> dict[str, Any]:
    """The rows of a framework, run by that interpreter."""
    words = [python, "-c", START, "tests.conformance.table", "--rows", name]
    printed = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return rows


def cell(row: Mapping[str, str]) -> str:
    """A row's word in the table."""
    words = {"deviates": row["why"], "cannot": "none", "ours is wrong": "**to mend**"}
    return words.get(row["state"], row["state"])


def page(found: list[dict[str, Any]]) -> str:
    """The page of the frameworks' rows."""
    lines = [
        TOP.format(sets=len(CASES)),
        "| set of replies | " + " | ".join(each["name"] for each in found) + " |",
        "|---" * (1 + len(found)) + "|",
    ]
    for case in CASES:
        lines.append(f"| {case.name} | " + " | ".join(cell(each["rows"][case.name]) for each in found) + " |")
    lines += ["", "## Deviations", "", *(f"- **{name}**: {why}" for name, why in DEVIATIONS.items())]
    titles = {
        "theirs is wrong": "Wrong results of the frameworks",
        "cannot": "Sets that a framework does not have",
        "ours is wrong": "Rows to mend",
    }
    for state, title in titles.items():
        listed: list[str] = []
        for each in found:
            reasons: dict[str, list[str]] = {}
            for case, row in each["rows"].items():
                if row["state"] == state:
                    reasons.setdefault(row["why"], []).append(case)
            listed += [f"- {each['name']}, {'; '.join(cases)}: {why}" for why, cases in reasons.items()]
        lines += ["", f"## {title}", "", *listed] if listed else []
    lines += ["", "## Versions", ""]
    for each in found:
        versions = ", ".join(f"{package} {version}" for package, version in each["versions"].items())
        lines.append(f"- {each['name']}: {versions}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], metavar="EXTRA=INTERPRETER")
    parser.add_argument("--rows", choices=FRAMEWORKS, help="print this framework's rows as JSON")
    given = parser.parse_args()
    if given.rows:
        print(json.dumps(rows_of(given.rows)))
        return
    pythons = dict(each.split("=", 1) for each in given.python)
    found = []
    for name in FRAMEWORKS:
        extra = declared(name)["extra"]
        found.append(run(name, pythons.get(extra) or environment(extra)))
    PAGE.write_text(page(found))
    mended = sum(row["state"] != "ours is wrong" for each in found for row in each["rows"].values())
    print(f"{PAGE.relative_to(ROOT)}: {mended} of {len(found) * len(CASES)} rows are as they should be")


if __name__ == "__main__":
    main()
