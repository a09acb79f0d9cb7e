"""Wheels as a user installs them: ``python -m release.installed [TESTS]...``.

Each wheel of dist that fits this machine and an interpreter on PATH becomes, with NumPy's wheel, an index in
build/installed/simple. pip installs ``fedcore-fl`` by name from this index only, into an empty environment without a
compiler on PATH. The package then runs a round, with warnings as errors, and tests of a copy of this tree without the
package: with this interpreter, which has torch and the other packages, the tests that are named; with another one,
those that need only pytest and Hypothesis. The wheel's kernels for GPUs run on the emulated driver, which is built in
the clone.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from os import uname
from pathlib import Path

from release.rooms import ROOT, room, tree_alone, without_compiler
from tests.native.build import fake_cuda

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


def index(python: Path, wheel: Path) -> str:
    """The URL of a new package index (PEP 503) with a wheel and the wheels that it needs."""
    folder, files = BUILD / "simple", BUILD / "files"
    for each in (folder, files):
        shutil.rmtree(each, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "download", "-q", "--only-binary", ":all:"]
    subprocess.run([*pip, "-d", str(files), str(wheel)], check=True)
    for file in list(files.iterdir()):
        project = folder / file.name.partition("-")[0].replace("_", "-").lower()
        project.mkdir(parents=True)
        file = file.rename(project / file.name)
        (project / "index.html").write_text(f'<!DOCTYPE html><a href="{file.name}">{file.name}</a>')
    return folder.as_uri()


def alone(python: str, wheel: Path) -> tuple[float, float]:
    """Seconds to install a wheel with NumPy from an index of these two, and to run a first round there."""
    folder = BUILD / "alone"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    inside = folder / "bin" / "python"
    source = ["--index-url", index(inside, wheel), "--only-binary", ":all:"]
    # No other index: neither from the environment and files of settings, nor from the cache.
    env = without_compiler(BUILD) | {"PIP_CONFIG_FILE": os.devnull}
    start = time.monotonic()
    pip = [sys.executable, "-m", "pip", "--python", str(inside), "--isolated", "--no-cache-dir"]
    subprocess.run([*pip, "install", "-q", *source, f"fedcore-fl=={wheel.name.split('-')[1]}"], env=env, check=True)
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
    env = without_compiler(BUILD) | {"FEDCORE_CUDA_DRIVER": str(fake_cuda())}
    done = subprocess.run(pytest, cwd=tree_alone(BUILD / "tree"), env=env, stdout=subprocess.PIPE, text=True)
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
