"""The steps of `make gpu-check` on a machine with a GPU: ``python -m bench.gpu.day``.

The script needs a CUDA toolkit, a C++ compiler, CMake, and a Python with NumPy, pybind11 and torch, but no network. It
uses CuPy if installed. The most important steps run first. Each step has a time limit, and later steps run even if it
fails. The results are written to $OUT/gpu-check.json, and the tables to $OUT/gpu-check.md. The exit status is 0 if all
steps succeed.

GPU_CHECK_REHEARSAL=1 uses the tests' driver instead of a GPU, small sizes, and the editable install instead of a build.
It checks that every step runs, and measures nothing.
"""

import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from bench.gpu.compiled import toolkits
from bench.gpu.report import markdown

ROOT = Path(__file__).parents[2]
OUT = Path(os.environ.get("OUT", ROOT / "build" / "gpu-check"))
BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"
REHEARSAL = bool(os.environ.get("GPU_CHECK_REHEARSAL"))
SECONDS = float(os.environ.get("GPU_CHECK_SECONDS", 520))
PYTHON = sys.executable
SANITIZER = "compute-sanitizer --error-exitcode 9 --launch-timeout 0 --tool"
# With torch's cache of memory, a tool cannot see the end of an array.
APART = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


class Day:
    """The finished steps, and the time left for the others."""

    def __init__(self):
        self.began, self.results = time.monotonic(), {"rehearsal": REHEARSAL, "steps": {}}
        OUT.mkdir(parents=True, exist_ok=True)

    def left(self):
        return SECONDS - (time.monotonic() - self.began)

    def keep(self):
        (OUT / "gpu-check.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def run(self, name, command, limit, **environment):
        """Run a step, keep the JSON lines that it prints (even after a failure), and return whether it succeeded."""
        if self.left() < 10:
            self.results["steps"][name] = {"status": None, "said": ["not reached"]}
            return False
        began, log = time.monotonic(), OUT / f"{name}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # a timeout also ends the step's child processes
                env=os.environ | self.environment() | environment,
            )
            try:
                said, _ = process.communicate(timeout=min(limit, self.left()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                said, _ = process.communicate()
        step = {"status": process.returncode, "seconds": round(time.monotonic() - began, 1)}
        step |= sorted_out(said.splitlines())
        if process.returncode != 0:
            step["log"] = log.read_text(errors="replace").splitlines()[-40:]
        self.results["steps"][name] = step
        self.keep()
        print(f"{name}: status {process.returncode}, {step['seconds']} s, {self.left():.0f} s left", flush=True)
        return process.returncode == 0

    @staticmethod
    @cache
    def environment():
        """Return the environment of the steps, with the fedcore built here, or in a rehearsal the installed one."""
        if REHEARSAL:
            from tests.devices.fake_driver import environment

            fake = environment()
            return {name: fake[name] for name in fake if name.startswith(("FEDCORE_CUDA", "FAKE_CUDA"))}
        packages = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        tools = [os.environ["PATH"], *toolkits()]
        said = {"PYTHONPATH": os.pathsep.join(packages), "PATH": os.pathsep.join(tools)}
        return said | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def sorted_out(said):
    """Split a step's output into its JSON lines and the end of the other text."""
    found, lines, others = {}, [], []
    for text in said:
        try:
            one = json.loads(text) if text.startswith("{") else text
        except json.JSONDecodeError:
            one = text
        if isinstance(one, str):
            others.append(one)
        elif "what" in one:
            lines.append(one)
        else:
            found |= one
    return {"found": found | ({"lines": lines} if lines else {}), "said": others[-60:]}


def building():
    """Return the command that builds fedcore for this GPU and processor only, outside the sources."""
    version = "import tomllib; print(tomllib.load(open('pyproject.toml', 'rb'))['project']['version'])"
    return (
        "set -e; chip=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .); "
        f"rm -rf {BUILD}; cmake -S . -B {BUILD} -DCMAKE_BUILD_TYPE=Release -DFEDCORE_CUDA=ON "
        f'-DFEDCORE_CUDA_ARCHITECTURES="$chip;ptx" -DFEDCORE_LEVELS=native '
        f'-DSKBUILD_PROJECT_VERSION=$({PYTHON} -c "{version}") -DPython_EXECUTABLE={PYTHON} '
        f"-Dpybind11_DIR=$({PYTHON} -m pybind11 --cmakedir); "
        f"cmake --build {BUILD} --parallel; mkdir -p {SITE}; cp -r fedcore {SITE}/; "
        f"cmake --install {BUILD} --prefix {SITE}"
    )


def steps():
    """Return the name, command, limit in seconds and environment of each step after the build."""
    parity, sizes = f"{PYTHON} -m bench.gpu.parity", ("3e6", "2e7", "4e4", "4", 45)
    if REHEARSAL:
        sizes = ("1e4", "3e4", "1e3", "0.0001", 1)
    middle, large, small, gigabytes, long = sizes
    there_is_one = "import fedcore.arrays, sys; sys.exit(fedcore.arrays.reason())"
    yield "devices", f"{PYTHON} -m fedcore doctor && {PYTHON} -c '{there_is_one}'", 60, {}
    yield "parity", f"{parity} --seconds {long} --largest {middle}", 80, {}
    yield "bandwidth", f"{PYTHON} -m bench.gpu.bandwidth --gigabytes {gigabytes}", 110, {}
    yield "rounds", f"{PYTHON} -m bench.gpu.rounds", 100, {}
    yield "clients", f"{PYTHON} -m bench.gpu.clients", 90, {}
    yield "repeats", f"{parity} --repeats", 30, {}
    if not REHEARSAL:
        yield "memcheck", f"{SANITIZER} memcheck {parity} --seconds 8 --largest {small}", 60, APART
        yield "racecheck", f"{SANITIZER} racecheck {parity} --seconds 8 --largest {small}", 70, APART
    yield "parity-large", f"{parity} --seconds {long / 3:.0f} --largest {large}", 60, {}
    if not REHEARSAL:
        yield "synccheck", f"{SANITIZER} synccheck {parity} --seconds 4 --largest {small}", 40, APART
        yield "initcheck", f"{SANITIZER} initcheck {parity} --seconds 4 --largest {small}", 40, APART


def main():
    day = Day()
    tools = "nvidia-smi; nvcc --version; nproc"
    packages = f"{PYTHON} -m pip list 2>/dev/null | grep -iE '^(torch|cupy|triton|numpy|nvidia|pybind11)'"
    day.run("machine", "nproc" if REHEARSAL else f"{tools}; {packages}", 30)
    well = REHEARSAL or day.run("build", building(), 240)
    if well:
        for name, command, limit, environment in steps():
            well = day.run(name, command, limit, **environment) and well
    day.results["well"] = well
    day.keep()
    text = markdown(day.results)
    (OUT / "gpu-check.md").write_text(text + "\n")
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
