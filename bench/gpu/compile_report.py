"""What nvcc makes of the kernels for GPUs, as tables: ``python -m bench.gpu.compile_report [--into README]``.

It needs nvcc and nvdisasm (of the CUDA toolkit, or of the package nvidia-cuda-nvdisasm), no GPU, and two minutes.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.gpu import compiled
from bench.gpu.compiled import THREADS
from bench.markdown import put_into, table

BEGIN = "<!-- made by python -m bench.gpu.compile_report: begin -->"
SHOWN = 90
LAUNCHED = {"mix": 64} | {f"columns_{rows}": rows for rows in (8, 16, 32, 64)}  # KiB of a launch
LATENCY = 1e-6  # of device memory under load, at most


class Chip(NamedTuple):
    """What a multiprocessor has: threads, bytes of shared memory."""

    threads: int
    shared: int


class Board(NamedTuple):
    """Multiprocessors, and bytes a second of device memory."""

    multiprocessors: int
    bandwidth: float

    @property
    def due(self):
        """Bytes that each multiprocessor must have in flight for the full bandwidth, by Little's law."""
        return self.bandwidth * LATENCY / self.multiprocessors


CHIPS = {
    80: Chip(2048, 164 << 10),
    90: Chip(2048, 228 << 10),
    100: Chip(2048, 228 << 10),
    120: Chip(1536, 100 << 10),
}
BOARDS = {"H100": Board(132, 3.35e12), "H200": Board(132, 4.8e12)}


def shared(kernel):
    """Bytes of a block's shared memory, with the most that a launch takes."""
    return LAUNCHED.get(kernel.name, 0) << 10 or kernel.shared


def blocks(kernel, chip):
    """Blocks of a kernel that a multiprocessor has room for; each takes another KiB of shared memory."""
    registers = THREADS * -(-kernel.registers // 8) * 8
    return min(chip.threads // THREADS, 65536 // registers, chip.shared // (shared(kernel) + 1024))


def kernels_table(kernels, code):
    """One row a kernel, of one architecture."""
    rows = []
    for one in kernels:
        fit, flight = blocks(one, CHIPS[SHOWN]), compiled.in_flight(code[one.name])
        under_way = flight * THREADS * fit
        needs = [under_way / board.due for board in BOARDS.values()]
        rows.append(
            [
                one.name,
                str(one.registers),
                str(one.spilled),
                f"{shared(one) / 1024:.0f}",
                str(fit),
                f"{one.wide} of {one.accesses}",
                str(flight),
                f"{under_way / 1024:.0f}",
                *(f"{min(1, need):.0%} ({need:.1f})" for need in needs),
            ]
        )
    promised = (f"share of an {name}'s bandwidth" for name in BOARDS)
    columns = ("kernel", "registers", "spilled, B", "shared, KiB", "blocks", "16-byte accesses", "loads in flight, B")
    return table((*columns, "per multiprocessor, KiB", *promised), rows)


def architectures_table(found, sizes):
    """One row an architecture."""
    rows = []
    for architecture, kernels in found.items():
        spilling = [f"{one.name} {one.spilled}" for one in kernels if one.spilled]
        registers = max(one.registers for one in kernels)
        rows.append([f"sm_{architecture}", str(len(kernels)), str(registers), ", ".join(spilling) or "none"])
        rows[-1].append(f"{sizes[f'sm_{architecture}'] / 1e6:.2f}")
    rows.append(["compute_75 (PTX)", "", "", "", f"{sizes['compute_75'] / 1e6:.2f}"])
    rows.append(["all of them", "", "", "", f"{sizes['all'] / 1e6:.2f}"])
    return table(("compiled for", "kernels", "most registers", "spilled bytes", "size in the image, MB"), rows)


def made(folder):
    """Kernels by architecture, the code of the one that is shown, and sizes in the image."""
    ptx = folder / "kernels.ptx"
    compiled.compile_ptx(ptx)
    found, packed = {}, {"compute_75": f"kind=ptx,sm=75,file={ptx}"}
    for architecture in CHIPS:
        cubin = folder / f"sm_{architecture}.cubin"
        found[architecture] = [*compiled.kernels(ptx.read_text(), compiled.assemble(ptx, architecture, cubin))]
        packed[f"sm_{architecture}"] = f"kind=elf,sm={architecture},file={cubin}"
    sizes = {name: size_of([part], folder) for name, part in packed.items()}
    sizes["all"] = size_of(packed.values(), folder)
    return found, compiled.machine_code(folder / f"sm_{SHOWN}.cubin"), sizes


def size_of(parts, folder):
    """Bytes of an image that has these parts."""
    image = folder / "part.fatbin"
    options = ["-64", "--compress-mode=size", *(f"--image3={part}" for part in parts)]
    compiled.said(compiled.tool("fatbinary"), f"--create={image}", *options)
    return image.stat().st_size


def markdown():
    with TemporaryDirectory() as folder:
        found, code, sizes = made(Path(folder))
    fused = sorted(name for name, lines in code.items() if any(op.startswith(("FFMA", "DFMA")) for _, op, _ in lines))
    due = ", ".join(f"{board.due / 1024:.0f} KiB on an {name}" for name, board in BOARDS.items())
    words = (
        f"nvcc {compiled.nvcc_version()}, `{' '.join(compiled.FLAGS)}`; of PTX for compute capability 7.5.\n\n"
        f"The table is for sm_{SHOWN}. `blocks` is the number of blocks that fit on a multiprocessor, by registers and "
        f"shared memory. By Little's law, the full bandwidth at a latency of {LATENCY * 1e6:.0f} us needs {due} in "
        "flight per multiprocessor. The last columns show the share of the bandwidth that this allows and, in "
        "brackets, the ratio of the bytes in flight to the required ones. Phases without loads are not counted.",
        f"Only {', '.join(fused)} contain fused machine operations: steps of correctly rounded divisions and square "
        "roots.",
    )
    return "\n\n".join([words[0], kernels_table(found[SHOWN][::-1], code), words[1], architectures_table(found, sizes)])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, metavar="README", help="replace the tables there instead of printing")
    chosen = parser.parse_args()
    missing = [name for name in ("nvcc", "ptxas", "fatbinary", "nvdisasm") if compiled.tool(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)}: not found in PATH or CUDA_HOME")
    if chosen.into:
        put_into(chosen.into, markdown(), BEGIN)
    else:
        print(markdown())


if __name__ == "__main__":
    main()
