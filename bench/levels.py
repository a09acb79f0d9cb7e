"""Benchmarks of the kernels at every instruction-set level of this machine: ``python -m bench.levels``.

Each level is a separate run, and times drift between runs; compare the ratios against the same floor and rivals.
Arguments are passed to pytest: benchmarks (default: bench/kernels), --short.
"""

import os
import subprocess
import sys

import fedcore
from bench.alone import ROOT
from bench.table import LEVELS, levels_table, read


def measure(arguments, folder):
    """Run the benchmarks at each level, and return their JSON files."""
    named = any(not argument.startswith("-") for argument in arguments)
    files = []
    for level in LEVELS[: LEVELS.index(fedcore.build_info()["isa_best"]) + 1]:
        file = folder / f"levels-{level}{'-short' * ('--short' in arguments)}.json"
        options = ["--in-turn-only", f"--benchmark-json={file}", *arguments]
        subprocess.run(
            [sys.executable, "-m", "pytest", *([] if named else ["bench/kernels"]), *options],
            cwd=ROOT,
            env=os.environ | {"FEDCORE_ISA": level},
            check=True,
        )
        files.append(file)
    return files


def main():
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    print(levels_table(read(measure(sys.argv[1:], folder))))


if __name__ == "__main__":
    main()
