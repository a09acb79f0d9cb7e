"""One thread against several on small problems, to choose ``kSerialBytes`` of csrc/base/blocks.h.

A native program measures block by block, since the kernels use one thread below that constant. "Hot" means consecutive
calls on the same arrays; "cold" means a call after a pause, with other data in the caches.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import fedcore

BENCH = Path(__file__).parent.parent
BUILT = BENCH.parent / "build" / "bench" / "core"
REPEATS = 150


def built():
    """Return the program, compiled from the current sources."""
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
    subprocess.run([cmake, "-S", BENCH, "-B", BUILT], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", BUILT, "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)
    return BUILT / "serial"


def bench_serial(benchmark):
    threads = max(2, fedcore.threads())
    command = [built(), str(threads), str(REPEATS)]
    measured = benchmark.pedantic(lambda: subprocess.run(command, capture_output=True, check=True, text=True), rounds=1)
    table = Table(title=f"one thread's time / {threads} threads'; {fedcore.isa()}")
    columns = ["", "KiB", "", "alone, us (best)", "shared, us", "ratio of the best", "of the medians"]
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for line in measured.stdout.splitlines():
        kernel, count, state, *numbers = line.split()
        alone, shared, usually_alone, usually_shared = map(float, numbers)
        ratios = f"{alone / shared:.2f}", f"{usually_alone / usually_shared:.2f}"
        benchmark.extra_info[f"{kernel} {count} {state}"] = ratios
        table.add_row(kernel, f"{int(count) >> 10}", state, f"{alone:.1f}", f"{shared:.1f}", *ratios)
    Console(width=100).print(table)
