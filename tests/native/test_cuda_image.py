"""The GPU kernels as nvcc compiles them. The emulation tests their results."""

import fcntl
import hashlib
import re
import subprocess

import pytest

from bench.gpu import compiled
from tests.native.build import BUILDS, editable_build, tool

pytestmark = pytest.mark.skipif(compiled.tool("nvcc") is None, reason="needs nvcc, of the CUDA toolkit")

ARCHITECTURE = 90
# Kernels that convert as they load may spill: for updates that are not float32, or old rows of another codec. So may
# exchanges into exact sums, which take twice as many registers, and 64 values of a column.
SPILLING = re.compile(r".*_any|exchange_exact_.*|columns_64")
# Arrays of codes are read eight elements a thread like all others, in fewer bytes; `mix` and robust rules read columns,
# and `add_squares` sums.
COLUMNS = {"columns_8", "columns_16", "columns_32", "columns_64", "columns_any"}
NARROW = {"mix", "add_squares", "gram", *COLUMNS}


@pytest.fixture(scope="module")
def built():
    """PTX and machine code, made once for each state of the sources. The PTX is the image's if it is up to date."""
    folder = BUILDS / "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ptx = ptx_of_build()
        if ptx is None:
            ptx = folder / f"{digest(*sorted(compiled.CSRC.glob('**/*.*')))}.ptx"
            if not ptx.exists():
                compiled.compile_ptx(ptx)
        cubin = folder / f"{digest(ptx)}.sm_{ARCHITECTURE}.cubin"
        words = cubin.with_suffix(".txt")
        if not words.exists():
            words.write_text(compiled.assemble(ptx, ARCHITECTURE, cubin))
    return ptx, cubin, words.read_text()


def ptx_of_build():
    """The PTX of the editable install's image if it is up to date; else None."""
    ptx = editable_build() / "kernels.ptx"
    asked = [tool("ninja") or "ninja", "-C", ptx.parent, "-n", ptx.name]
    if not ptx.exists() or tool("ninja") is None:
        return None
    output = subprocess.run([str(part) for part in asked], capture_output=True, text=True)
    return ptx if output.returncode == 0 and "no work to do" in output.stdout else None


def digest(*files):
    by = " ".join([compiled.nvcc_version(), *compiled.FLAGS]).encode()
    return hashlib.sha256(by + b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()[:16]


@pytest.fixture(scope="module")
def kernels(built):
    ptx, _, words = built
    return list(compiled.kernels(ptx.read_text(), words))


def test_every_kernel_of_the_list_is_compiled(kernels):
    names = [one.name for one in kernels]
    assert len(names) == len(set(names)) > 60
    assert {"exchange_int8", "sums_f32_in_f64_base_norms", "mix"} <= {*names}


def test_the_ptx_forbids_fusing_and_flushing(kernels):
    assert {one.name: one.unsafe for one in kernels if one.unsafe} == {}


def test_only_kernels_with_too_few_registers_spill(kernels):
    assert {one.name: one.spilled for one in kernels if one.spilled and not SPILLING.fullmatch(one.name)} == {}
    assert max(one.spilled for one in kernels if not one.name.startswith("exchange_exact")) <= 64
    assert max(one.spilled for one in kernels) <= 192


def test_two_blocks_fit_a_multiprocessor(kernels):
    """Registers for 512 threads, and the shared memory of every chip."""
    assert {one.name for one in kernels if one.registers > 128 or one.shared > 48 << 10} == set()


def test_arrays_are_read_and_written_by_16_bytes(kernels):
    assert [one.name for one in kernels if one.wide < 2 and one.name not in NARROW] == []
    of_floats = ("sums_f32", "sums_f64", "accumulate", "exchange", "server_step", "optimizer", "direction", "combine")
    assert [one.name for one in kernels if one.name.startswith(of_floats) and one.wide < 6] == []


@pytest.mark.skipif(compiled.tool("nvdisasm") is None, reason="needs nvdisasm, of the CUDA toolkit")
def test_the_machine_code_matches_the_ptx(built, kernels):
    """The same number of 16-byte accesses; only divisions and square roots use fused operations."""
    code = compiled.machine_code(built[1])
    wide = {
        name: sum(op.startswith(("LDG", "STG")) and compiled.width(op) == 16 for _, op, _ in lines)
        for name, lines in code.items()
    }
    assert wide == {one.name: one.wide for one in kernels}
    fused = {name for name, lines in code.items() if any(op.startswith(("FFMA", "DFMA")) for _, op, _ in lines)}
    assert {name for name in fused if "int8" not in name} == {"optimizer_step_decay", "optimizer_step_yogi", *COLUMNS}
