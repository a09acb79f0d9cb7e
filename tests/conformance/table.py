"""Write docs/conformance.md: every set of replies in every framework, each in an environment of its own.

    python -m tests.conformance.table --python appfl=build/appfl/bin/python

Without ``--python`` an environment is ``build/conformance/EXTRA``, which this command makes if it is missing.
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

TOP = """# Conformance

`make conformance` runs {sets} sets of replies through the public aggregation of each framework and through fedcore,
and writes this page. The same rows are tests (`tests/conformance`). `make test-deployment` and `make test-appfl` also
run the frameworks' real processes, once with the framework's aggregation and once with fedcore's, and compare the
final models.

- **equal**: both give the same model. Names, shapes and dtypes are the same, and numbers differ only by rounding. The
  tolerance, relative plus absolute, is 4 x 2^-23 for float32 and float64 (fedcore computes in float32), 4 x 2^-10 for
  float16 and 4 x 2^-7 for bfloat16.
- **the name of a deviation**: fedcore deviates on purpose. The list below the table gives the reason.
- **framework is wrong**: the framework's result is wrong and fedcore's is right. The list below the table describes
  the error.
- **none**: the framework has no such replies.
- **not run**: the environment lacks a package.
- **fedcore is wrong**: fedcore's result is wrong. The row's test fails.

A set is an entry of `tests/conformance/cases.py`. A framework is a file next to it with `theirs(case)` and
`ours(case)`.
"""


def rows_of(name: str) -> dict[str, Any]:
    """The rows of a framework in this environment, and the versions of its packages."""
    import torch

    from bench.peers.torchvision_ops import declare

    torch.set_num_threads(1)
    declare()
    module = framework(name)
    packages = dict.fromkeys((module.PACKAGE, *BESIDE))
    return {
        "name": module.NAME,
        "rows": {case.name: vars(compare(name, case)[0]) for case in CASES},
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
        packages = ["-c", "constraints.txt", "-e", f".[{extra}]", "torch", "jax", "keras"]
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], cwd=ROOT, check=True)
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
    words = {"deviates": row["why"], "cannot": "none", "fedcore is wrong": "**fedcore is wrong**"}
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
        "framework is wrong": "Wrong results of the frameworks",
        "cannot": "Sets that a framework does not have",
        "fedcore is wrong": "Wrong results of fedcore",
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
    mended = sum(row["state"] != "fedcore is wrong" for each in found for row in each["rows"].values())
    print(f"{PAGE.relative_to(ROOT)}: {mended} of {len(found) * len(CASES)} rows are as they should be")


if __name__ == "__main__":
    main()
