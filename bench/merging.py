"""``fedcore merge`` against reads and copies of as many bytes, and against safetensors and torch.

    python -m bench.merging FOLDER --gigabytes 4 --models 3 --rounds 3

FOLDER is on the disk to measure, with room for one model more. Each way runs in a separate process, in turns, and the
files are dropped from the page cache before it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

from fedcore import Safetensors, kernels, merge
from fedcore.arrays import Bfloat16Array
from fedcore.model.safetensors import READERS, header_of
from fedcore.model.windows import LARGEST, Windows

PIECE = 8 << 20
FLOORS = {"sum only": "read only", "merge": "copy"}


def write(path, size, seed):
    """Write a bfloat16 model of random numbers in tensors of 64 MB."""
    rng = np.random.default_rng(seed)
    count = max(1, size // (64 << 20))
    n = size // count // 2
    codes = (rng.random(n, np.float32) - 0.5).view(np.uint32) >> 16
    with open(path, "wb") as file:
        file.write(header_of([(f"layer{i}.weight", "bfloat16", (n,)) for i in range(count)]))
        for i in range(count):
            file.write(np.roll(codes, i).astype(np.uint16))


def read_only(paths, out, write_first=False):
    """Read the files with as many threads as a merge; with ``write_first``, copy the first one."""
    target = os.open(out, os.O_WRONLY | os.O_CREAT) if write_first else None

    own = threading.local()

    def read(job):
        fd, start, first = job
        if not hasattr(own, "memory"):
            own.memory = bytearray(PIECE)  # new memory for each piece would take as long as the disk
        count = os.preadv(fd, [own.memory], start)
        if first and target is not None:
            os.pwrite(target, memoryview(own.memory)[:count], start)
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)  # a full page cache would slow down the reads

    fds = [os.open(path, os.O_RDONLY) for path in paths]
    for fd in fds:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    size = os.stat(paths[0]).st_size
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, [(fd, start, fd == fds[0]) for start in range(0, size, PIECE) for fd in fds]))
    if target is not None:
        os.fsync(target)


def copy(paths, out):
    read_only(paths, out, write_first=True)


def sum_only(paths, out):
    """Read windows and sum them, without a result on disk."""
    models = [Safetensors(path) for path in paths]
    shares, memory = np.full(len(models), 1 / len(models)), np.empty(LARGEST, np.uint16)
    for parts, rows in Windows(models, models[0]).read():
        sizes = [part.stop - part.start for part in parts]
        outs = [Bfloat16Array(memory[end - size : end]) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
        kernels.weighted_sum_segments(rows, shares, outs, accumulate="float64", norms=True)


def fedcore_merge(paths, out):
    merge(out, paths)


def safe_open_loop(paths, out):
    """Average tensor by tensor, as merge tools do."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    opened, found = [safe_open(path, "pt") for path in paths], {}
    for name in opened[0].keys():  # noqa: SIM118  # it is no mapping
        total = torch.zeros(opened[0].get_slice(name).get_shape())
        for file in opened:
            total += file.get_tensor(name).float() / len(paths)
        found[name] = total.bfloat16()
    save_file(found, out)


def torch_models(paths, out):
    """Load all models and average them."""
    import torch
    from safetensors.torch import load_file, save_file

    models = [load_file(path) for path in paths]
    save_file({name: torch.stack([m[name] for m in models]).float().mean(0).bfloat16() for name in models[0]}, out)


WAYS = {
    "read only": read_only,
    "sum only": sum_only,
    "copy": copy,
    "merge": fedcore_merge,
    "safe_open loop": safe_open_loop,
    "torch, all models": torch_models,
}


def turn(way, paths, folder):
    """Run a way in a new process and return its figures."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    command = [sys.executable, "-m", "bench.merging", str(folder), "--way", way]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def run(way, paths, out):
    began, cpu = time.perf_counter(), time.process_time()
    WAYS[way](paths, out)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) >> 10  # ru_maxrss would include the parent's memory
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    inputs, out = options.folder / "inputs", options.folder / "out"
    if options.way is not None:
        run(options.way, sorted(inputs.iterdir()), out)
        return
    inputs.mkdir(parents=True)
    try:
        paths = [inputs / f"{i}.safetensors" for i in range(options.models)]
        for seed, path in enumerate(paths):
            write(path, int(options.gigabytes * 1e9), seed)
        os.sync()
        found = {way: [] for way in options.ways}
        for _ in range(options.rounds):
            for way in options.ways:
                found[way].append(turn(way, paths, options.folder))
                shutil.rmtree(out, ignore_errors=True)
                out.unlink(missing_ok=True)
    finally:
        shutil.rmtree(inputs)
    print(f"{options.models} x {options.gigabytes} GB, {options.rounds} rounds; medians\n")
    print("| way | s | CPU s | peak MiB | times its floor |\n|---|---:|---:|---:|---:|")
    for way, turns in found.items():
        floor = found.get(FLOORS.get(way, "copy"), turns)
        ratio = median(one["seconds"] / due["seconds"] for one, due in zip(turns, floor, strict=True))
        cells = (median(one[figure] for one in turns) for figure in ("seconds", "cpu", "peak"))
        seconds, cpu, peak = cells
        print(f"| {way} | {seconds:.2f} | {cpu:.2f} | {peak:,.0f} | {ratio if way not in FLOORS.values() else 1:.2f} |")


if __name__ == "__main__":
    main()
