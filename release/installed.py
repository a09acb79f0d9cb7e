"""Wheels as a stranger gets them: ``python -m release.installed [TESTS]...``.

Every wheel of dist for this machine and an interpreter on PATH is installed beside NumPy alone in an empty environment,
with warnings as errors and no compiler on PATH, and runs a round. It then runs tests of a copy of this tree that has no
package in it: with this interpreter, which has torch and all else beside it, those that are named; with another, those
that need pytest and Hypothesis alone.
"""

import re
import shutil
import subprocess
import sys
import time
from os import uname
from pathlib import Path

from release.rooms import ROOT, room, tree_alone, without_compiler

BUILD = ROOT / "build" / "installed"
TESTS = ("tests/kernels", "tests/store")
WITHOUT_TORCH = ("tests/runtime/test_threads.py", "tests/store")
NEEDS = ("pytest", "pytest-xdist", "hypothesis")
OWN = f"python{sys.version_info.major}.{sys.version_info.minor}"


def interpreter(wheel: Path) -> str | None:
    """The interpreter that a wheel is for, if it is here."""
    found = re.search(r"-cp3(\d+)-cp3\d+(t?)-", wheel.name)
    if found is None or uname().machine not in wheel.name:
        return None
    name = f"python3.{found[1]}{found[2]}"
    path = sys.executable if name == OWN else shutil.which(name)
    return path if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0 else None


def alone(python: str, wheel: Path) -> tuple[float, float]:
    """Seconds to install a wheel beside NumPy alone, and to run a first round there."""
    folder = BUILD / "alone"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    inside = folder / "bin" / "python"
    env = without_compiler(BUILD)
    start = time.monotonic()
    pip = [sys.executable, "-m", "pip", "--python", str(inside), "install", "-q", "--only-binary", ":all:", str(wheel)]
    subprocess.run(pip, env=env, check=True)
    installed = time.monotonic()
    watched = [inside, "-W", "error", "-X", "dev"]
    subprocess.run([*watched, "-c", "import fedcore"], env=env, cwd=folder, check=True)
    done = subprocess.run(
        [*watched, ROOT / "tests" / "architecture" / "core_alone.py"],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode or str(folder) not in done.stdout:
        raise SystemExit(f"{wheel.name}: expected a round with the installed package, got\n{done.stdout}{done.stderr}")
    return installed - start, time.monotonic() - installed


def with_needs(python: Path) -> Path:
    """The interpreter of an environment that has what tests need which need no torch."""
    constraints = ROOT / "constraints.txt"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--only-binary", ":all:"]
    subprocess.run([*pip, "-c", str(constraints), *NEEDS], check=True)
    return python


def tested(python: Path, wheel: Path, tests: tuple[str, ...]) -> str:
    """pytest's last line over tests that find only the wheel's package."""
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal", *tests]
    done = subprocess.run(
        pytest, cwd=tree_alone(BUILD / "tree"), env=without_compiler(BUILD), stdout=subprocess.PIPE, text=True
    )
    print(done.stdout)
    if done.returncode:
        raise SystemExit(f"{wheel.name}: expected its tests to pass, got status {done.returncode}")
    return done.stdout.strip().splitlines()[-1].strip("= ")


def main():
    """Install and test every wheel that can be."""
    tests = tuple(sys.argv[1:]) or TESTS
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    runs = [(wheel, python) for wheel in wheels if (python := interpreter(wheel))]
    if not runs:
        raise SystemExit("dist: expected a wheel for this machine and a Python on PATH, got none: `make wheels` first")
    rows = []
    for wheel, python in runs:
        installed, first = alone(python, wheel)
        if python == sys.executable:
            chosen, inside = tests, room(BUILD / "room", wheel)
        else:
            chosen, inside = WITHOUT_TORCH, with_needs(BUILD / "alone" / "bin" / "python")
        passed = tested(inside, wheel, chosen)
        rows.append(f"| {wheel.name} | {installed:.1f} | {first:.1f} | {' '.join(chosen)}: {passed} |")
    print(
        "| wheel | installed in, s | first round in, s | tests |\n|---|---:|---:|---|",
        *rows,
        sep="\n",
    )
    for wheel in wheels:
        if wheel not in dict(runs):
            print(f"{wheel.name}: not installed, for its machine or interpreter is not this one")


if __name__ == "__main__":
    main()
