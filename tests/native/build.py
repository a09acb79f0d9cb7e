"""The builds of the native tests for pytest."""

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

SOURCE = Path(__file__).parent
BUILDS = SOURCE.parent.parent / "build"
BUILT = BUILDS / "native" / "plain"
FAKE_CUDA = "libfedcore_fake_cuda.so"
LEVELS = ["baseline", *["avx2", "avx512"] * (platform.machine() in ("x86_64", "AMD64"))]


def tool(name):
    """The path of a build tool, first from this environment; None if it is missing."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def run(*command):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_CUDA_")}  # of other tests
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=1800, env=plain)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def editable_build():
    """Where scikit-build-core built the editable install: build/{wheel_tag}."""
    wheel = metadata.distribution("fedcore-fl").read_text("WHEEL") or ""
    return BUILDS / re.search(r"^Tag: (\S+)$", wheel, re.MULTILINE)[1]


def is_current(build):
    """Whether a Ninja build has the core with every level, up to date with the sources and options."""
    asked = [tool("ninja") or "false", "-C", build, "-n", *(f"fedcore_{level}" for level in LEVELS), "core"]
    output = subprocess.run([str(part) for part in asked], capture_output=True, text=True)
    return output.returncode == 0 and "no work to do" in output.stdout


def build(target):
    """The folder of the native tests after a build of the target; one process builds, the others wait.

    The core is that of the editable install if it is up to date.
    """
    for needed in ("cmake", os.environ.get("CXX", "c++")):
        assert tool(needed) is not None, f"the native tests need {needed}"
    core_of = editable_build() if is_current(editable_build()) else ""
    BUILT.mkdir(parents=True, exist_ok=True)
    with open(BUILT / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(tool("cmake"), "-S", SOURCE, "-B", BUILT, f"-DFEDCORE_CORE_OF={core_of}")
        run(tool("cmake"), "--build", BUILT, "--target", target, "--parallel", len(os.sched_getaffinity(0)))
    return BUILT


@cache
def native_tests():
    """The folder of the native tests, built without a sanitizer."""
    return build("all")


@cache
def fake_cuda():
    """The path of a CUDA driver that runs the kernels on the host: a parent's, or a new build."""
    named = Path(os.environ.get("FEDCORE_CUDA_DRIVER", ""))
    return named if named.name == FAKE_CUDA else build("fedcore_fake_cuda") / FAKE_CUDA
