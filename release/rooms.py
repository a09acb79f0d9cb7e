"""Environments that hold one wheel, and all else of this one: what is tested is what would be installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What tests start.
PROGRAMS = ("env", "sh", "bash", "cat", "cp", "sleep", "kill", "mount", "umount", "losetup", "mkfs.ext4", "unshare")


def room(folder: Path, wheel: Path) -> Path:
    """An environment with a wheel in it; the interpreter's path.

    This environment's packages come behind it. Its fedcore does not: the files that lead to a clone are read only in an
    interpreter's own folder of packages.
    """
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-compile",
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    behind = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "behind.pth").write_text("\n".join(behind) + "\n")
    return python


def without_compiler(folder: Path) -> dict[str, str]:
    """The surroundings of a process that finds no compiler: a PATH of the few programs that tests start."""
    programs = folder / "programs"
    shutil.rmtree(programs, ignore_errors=True)
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        if path := shutil.which(name):
            (programs / name).symlink_to(path)
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PYTHONPATH", "VIRTUAL_ENV")}
    return env | {"PATH": str(programs)}


def tree_alone(folder: Path) -> Path:
    """Make a new copy of the tests of this tree, without the package."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("tests", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder
