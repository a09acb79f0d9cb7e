"""What make would do, without doing it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedcore

ROOT = Path(fedcore.layout.__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def run(*words, **options):
    """What make prints, whether or not a make runs these tests."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=True, **options)
    return done.stdout


def commands(target):
    """The commands of a target in a clone that has nothing installed."""
    printed = run("--dry-run", "--always-make", "VENV=nowhere", target)
    return printed.replace("\\\n", "").splitlines()


def installs(target):
    return [line.rpartition(" ")[2] for line in commands(target) if "FEDCORE_LEVELS=" in line]


def test_the_quickstart_installs_the_simulator_alone_and_says_so_first():
    assert installs("quickstart") == ['".[sim]"']
    first, *_ = commands("quickstart")
    assert first.startswith('echo "Installing the simulator')
    assert not any("wheel" in line.split() for line in commands("quickstart"))


def test_the_tests_install_the_rest():
    assert installs("test") == ['".[sim]"', '".[dev]"']


def test_the_quickstart_compiles_one_level_and_the_tests_all():
    assert levels("quickstart") == ["native"]
    assert levels("test") == ["all", "all"]  # also of the simulator's installation, or it would be compiled twice
    assert levels("wheel-check") == ["all", "all", "all"]


def test_the_check_on_a_gpu_installs_nothing():
    assert commands("gpu-check") == ["python3 -m bench.gpu.day"]


def test_bytecode_is_kept_where_an_image_forbids_it():
    names = [
        line.partition("=")[0]
        for line in run("-f", "Makefile", "-f", "-", "shown", input="shown:\n\t@env\n").splitlines()
    ]
    assert "PATH" in names
    assert "PYTHONDONTWRITEBYTECODE" not in names


def levels(target):
    lines = [line for line in commands(target) if "FEDCORE_LEVELS=" in line]
    return [line.partition("FEDCORE_LEVELS=")[2].split()[0] for line in lines]


def locked(name):
    """The packages of a lock."""
    return set(re.findall(r"^([\w.-]+)==", (ROOT / "locks" / name).read_text(), re.MULTILINE))


def test_the_build_tools_are_those_that_the_package_requires():
    """No build is in isolation, in which one that is not said would be missing: the first of a clone would miss it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = project["dependency-groups"]["build"]
    assert set(project["build-system"]["requires"]) == set(tools) - {"cmake", "ninja"}  # from wherever they are
    for lock in ("sim.txt", "dev.txt"):
        assert {tool.partition(">")[0] for tool in tools} <= locked(lock)


def test_the_quickstart_installs_what_the_tutorials_import():
    """Also what `fedcore.read_records` needs, which they call, and the site's build, which runs them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {re.match(r"\w+", line)[0] for line in extras["pandas"]}
    for tutorial in (ROOT / "docs" / "tutorials").glob("*.py"):
        needed |= set(re.findall(r"^ *(?:import|from) (\w+)", tutorial.read_text(), re.MULTILINE))
    needed -= sys.stdlib_module_names | {"fedcore", "torch"}
    assert needed >= {"matplotlib", "pandas"}
    assert needed <= {re.match(r"[\w-]+", line)[0] for line in extras["sim"]} | {"numpy"}
    assert needed <= locked("sim.txt")


def test_what_is_locked_goes_in_first_by_its_hashes_and_alone():
    for target, lock in (("quickstart", "locks/sim.txt"), ("test", "locks/dev.txt")):
        lines = commands(target)
        (held,) = (at for at, line in enumerate(lines) if line.endswith(f"-r {lock}"))
        assert "--require-hashes" in lines[held]
        assert "--no-deps" in lines[held]
        assert held < max(at for at, line in enumerate(lines) if "-e " in line)


def test_a_lock_names_no_index_and_no_file_that_differs_from_machine_to_machine():
    for lock in ("sim.txt", "dev.txt"):
        text = (ROOT / "locks" / lock).read_text()
        assert "//" not in text
        assert "--index" not in text
        assert not [name for name in locked(lock) if re.match("torch(vision)?$|nvidia-(?!ml-py)|triton|cuda", name)]
    assert locked("sim.txt") <= locked("dev.txt")


def test_the_package_s_old_name_goes_before_the_new_one_comes():
    lines = commands("quickstart")
    (gone,) = (at for at, line in enumerate(lines) if line.endswith("pip uninstall -qq -y fedcore"))
    (comes,) = (at for at, line in enumerate(lines) if line.endswith('-e ".[sim]"'))
    assert gone < comes
