"""A wheel for 64-bit Arm, tested under QEMU: ``python -m release.emulated [PYTEST'S ARGUMENTS]...``.

Debian's Python for that machine, from the sources of packages that this one has, and the tests' needs are unpacked into
build/emulated, without a container and without a change to this system. The wheel of dist for that Python runs a round
beside them with warnings as errors, then tests of a copy of this tree that has no package in it. It takes half a
gigabyte, and most of an hour for TESTS in one process. A test that starts a process, and ``-n 2``, which does, work
where the kernel knows the emulator (binfmt_misc).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from release.rooms import ROOT, tree_alone

BUILD = ROOT / "build" / "emulated"
PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6", "zlib1g")
NEEDS = ("numpy", "pytest", "pytest-xdist", "hypothesis", "ml_dtypes", "scipy", "typing_extensions")
NEEDS += ("sympy", "networkx", "jinja2", "fsspec", "filelock")  # torch's
# The last whose wheel for this machine is of CPUs alone. pip would take what it needs on this machine, which is CUDA's.
TORCH = "torch==2.8.0"
TESTS = ("tests/kernels",)


def run(*command, **how):
    """Run a command, or fail."""
    return subprocess.run([str(part) for part in command], check=True, **how)


def unpacked() -> Path:
    """A folder with Debian's Python for Arm and what that needs, made once."""
    made = BUILD / "root"
    if made.exists():
        return made
    shutil.rmtree(BUILD, ignore_errors=True)
    state, cache, files, half = (BUILD / name for name in ("apt/state", "apt/cache", "debs", "half"))
    for folder in (state / "lists" / "partial", cache / "archives" / "partial", files):
        folder.mkdir(parents=True)
    (state / "status").touch()
    config = {
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": cache,
        "APT::Sandbox::User": "root",
    }
    config |= {"APT::Architecture": "arm64", "APT::Architectures": "arm64"}
    apt = ["apt-get", "-qq", *(part for name, value in config.items() for part in ("-o", f"{name}={value}"))]
    run(*apt, "update")
    asked = run(*apt, "install", "--print-uris", "--no-install-recommends", *PACKAGES, capture_output=True, text=True)
    names = [line.split()[1].partition("_")[0] for line in asked.stdout.splitlines() if line.startswith("'")]
    run(*apt, "download", *names, cwd=files)
    for file in files.glob("*.deb"):
        run("dpkg", "-x", file, half)
    if not (half / "lib").exists():  # newer Debian's packages take for granted that /lib is /usr/lib
        (half / "lib").symlink_to("usr/lib")
    return half.rename(made)


def installed(wheel: Path, version: str) -> Path:
    """A folder of packages for that Python with the wheel and the tests' needs."""
    site = BUILD / "site"
    shutil.rmtree(site, ignore_errors=True)
    platforms = [part for glibc in ("2014", "_2_27", "_2_28") for part in ("--platform", f"manylinux{glibc}_aarch64")]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", site, *platforms, "--only-binary", ":all:"]
    pip += ["--python-version", version, "--implementation", "cp"]
    run(*pip, wheel, *NEEDS)
    run(*pip, "--no-deps", TORCH)
    return site


def main():
    """Install and test the wheel."""
    tests = sys.argv[1:] or TESTS
    root = unpacked()
    interpreter = (root / "usr" / "bin" / "python3").readlink().name
    version = interpreter.removeprefix("python")
    wheels = sorted((ROOT / "dist").glob(f"*-cp{version.replace('.', '')}-*aarch64.whl"))
    if not wheels:
        raise SystemExit(
            f"dist: expected a wheel for aarch64 and Python {version}, got none: make wheels MACHINES=aarch64"
        )
    site = installed(wheels[0], version)
    python = ["qemu-aarch64-static", "-L", root, root / "usr" / "bin" / interpreter]
    env = os.environ | {"PYTHONPATH": str(site), "QEMU_LD_PREFIX": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    run(*python, "-W", "error", ROOT / "tests" / "architecture" / "core_alone.py", env=env, cwd=BUILD)
    run(*python, "-m", "pytest", "-p", "no:cacheprovider", *tests, env=env, cwd=tree_alone(BUILD / "tree"))


if __name__ == "__main__":
    main()
