"""The GPU kernels as nvcc compiles them, without a GPU: registers, spills, instructions, bytes in flight.

PTX shows the width of accesses and the operations that a compiler may fuse. ptxas reports the resources of a thread.
nvdisasm, if installed, shows the machine instructions.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
SOURCE = CSRC / "kernels" / "cuda" / "kernels.cu"
FLAGS = re.search(r"set\(FEDCORE_CUDA_FLAGS ([^)]*)\)", (CSRC / "cmake" / "cuda.cmake").read_text())[1].split()
THREADS = 256  # the threads of a block
ROUNDED = re.compile(r"\b(?:add|sub|mul|mad|fma|div|sqrt|rcp)\.\S*f(?:16|32|64)\S*")
SAFE = re.compile(r"(?:add|sub|mul|div|sqrt)\.rn\.f(?:32|64)")
ACCESS = re.compile(r"\b(?:ld|st)\.global\S*")
WIDE = re.compile(r"\.(?:v4\.[buf]32|v2\.[buf]64)$")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class Kernel:
    """The compiled form of a kernel.

    Attributes:
        registers: the registers of a thread.
        spilled: the bytes per thread that did not fit into registers.
        shared: the bytes of a block's shared memory.
        accesses: the instructions that read or write global memory.
        wide: the accesses of 16 bytes.
        unsafe: the floating-point operations that flush subnormal numbers, do not round to nearest, or may be fused by
            a compiler of the PTX.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    accesses: int
    wide: int
    unsafe: tuple[str, ...]


def toolkits():
    """Return the folders with programs of CUDA toolkits, in addition to PATH."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return [f"{home}/bin" for home in homes if home]


def tool(name):
    """Return the path of a tool of the CUDA toolkit, or None."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *toolkits()]))


def said(*command):
    """Return the output of a command; raise RuntimeError with the output if the command fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def nvcc_version():
    return re.search(r"V([\d.]+)", said(tool("nvcc"), "--version"))[1]


def compile_ptx(to):
    """Compile the kernels to PTX with the build's flags, as for the image; warnings are errors."""
    said(tool("nvcc"), *FLAGS, "-I", CSRC, "-arch=compute_75", "-ptx", "-o", to, SOURCE)


def assemble(ptx, architecture, to):
    """Assemble PTX, and return the output of ptxas on the resources of each kernel."""
    return said(tool("ptxas"), "-v", "-warn-spills", f"-arch=sm_{architecture}", "-o", to, ptx)


def kernels(ptx, words):
    """Yield a ``Kernel`` for each kernel of the PTX, with numbers from the output of ptxas."""
    bodies = {part.split("(")[0].strip(): part for part in re.split(r"\.visible \.entry ", ptx)[1:]}
    for part in words.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        accesses = ACCESS.findall(bodies[name])
        yield Kernel(
            name=name.removeprefix("fedcore_"),
            registers=_number(r"Used (\d+) registers", part),
            spilled=_number(r"(\d+) bytes spill stores", part),
            shared=_number(r"(\d+) bytes smem", part),
            accesses=len(accesses),
            wide=sum(1 for access in accesses if WIDE.search(access)),
            unsafe=tuple(sorted({one for one in ROUNDED.findall(bodies[name]) if not SAFE.fullmatch(one)})),
        )


def machine_code(cubin):
    """Return (predicate, instruction, operands) of each kernel's instructions, by name, from nvdisasm."""
    code, name = {}, None
    for line in said(tool("nvdisasm"), "-c", cubin).splitlines():
        if line.startswith(".text.fedcore_"):
            name = line.removeprefix(".text.fedcore_").rstrip(":")
            code[name] = []
        elif found := re.match(r"\s+/\*[0-9a-f]{4,6}\*/\s+(@!?U?P\w+\s+|)([A-Z0-9._]+)\s*([^;]*);", line):
            code[name].append(found.groups())
    return code


def width(opcode):
    """Return the bytes that a load or store moves per thread."""
    return next((WIDTHS[part] for part in opcode.split(".")[1:] if part in WIDTHS), 4)


def in_flight(instructions):
    """Return the most bytes of global loads that a thread has in flight before it waits for one of them.

    The count follows straight-line code, from a first load to the first instruction that reads a loaded register.
    """
    most, loaded = 0, {}
    for predicate, opcode, operands in instructions:
        if opcode.startswith("LDG"):
            target, address = operands.split(",", 1)
            if any(_registers(address) & held for held in loaded.values()):
                loaded = {}
            number, wide = min(_registers(target), default=0), width(opcode)
            loaded[number] = set(range(number, number + max(1, wide // 4)))
            most = max(most, sum(4 * len(held) for held in loaded.values()))
        elif opcode.startswith(("BRA", "EXIT", "RET")):
            loaded = loaded if predicate else {}  # a conditional branch may fall through
        elif any(_registers(operands) & held for held in loaded.values()):
            loaded = {}
    return most


def _registers(text):
    return {int(number) for number in re.findall(r"\bR(\d+)", text)}


def _number(pattern, text):
    found = re.search(pattern, text)
    return int(found[1]) if found else 0
