"""What `make gpu-check` runs on a machine with a GPU: ``python -m bench.gpu.day``.

It needs no network and nothing installed but a CUDA toolkit, a C++ compiler, CMake, and a Python with NumPy, pybind11
and torch; CuPy is used where it is. Steps come in the order of what would be missed most, each with a limit of its own,
and one that fails takes no other with it. All goes into $OUT/gpu-check.json, the tables into $OUT/gpu-check.md. The
exit status is 0 if every step went well.

GPU_CHECK_REHEARSAL=1 has the driver of the tests in the GPU's place, small sizes, and the editable install in place of
a build: it shows that every step runs, and no figure.
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
# Behind torch's cache of memory nobody can see where an array ends.
APART = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


class Day:
    """The steps so far, and the time that is left for others."""

    def __init__(self):
        self.began, self.results = time.monotonic(), {"rehearsal": REHEARSAL, "steps": {}}
        OUT.mkdir(parents=True, exist_ok=True)

    def left(self):
        return SECONDS - (time.monotonic() - self.began)

    def keep(self):
        (OUT / "gpu-check.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def run(self, name, command, limit, **environment):
        """Run a step; whether it went well. Lines of JSON are what it has found, also if it did not come to its end."""
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
                start_new_session=True,  # a step that is too slow ends with all of its children
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
        """What the steps' Python sees: fedcore as it was built here; in a rehearsal what is installed."""
        if REHEARSAL:
            from tests.devices.fake_driver import environment

            fake = environment()
            return {name: fake[name] for name in fake if name.startswith(("FEDCORE_CUDA", "FAKE_CUDA"))}
        packages = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        tools = [os.environ["PATH"], *toolkits()]
        said = {"PYTHONPATH": os.pathsep.join(packages), "PATH": os.pathsep.join(tools)}
        return said | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def sorted_out(said):
    """What a step has found, by the lines of JSON in what it said; the rest as it is, as far as one reads it."""
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
    """The command that builds fedcore for this GPU and this processor alone, beside the sources and not among them."""
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
    """Name, command, limit in seconds and environment of each step behind the build."""
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
