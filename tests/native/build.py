"""Where the native tests are built for pytest, and how."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent
BUILT = SOURCE.parent.parent / "build" / "native" / "plain"


def tool(name):
    """The path of a build tool, those of this environment first; None if there is none."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@cache
def native_tests():
    """The folder of the native tests, built without a sanitizer."""
    for needed in ("cmake", os.environ.get("CXX", "c++")):
        assert tool(needed) is not None, f"the native tests need {needed}"
    run(tool("cmake"), "-S", SOURCE, "-B", BUILT)
    run(tool("cmake"), "--build", BUILT, "--parallel", len(os.sched_getaffinity(0)))
    return BUILT
