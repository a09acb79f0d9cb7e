"""A machine never runs code of an instruction-set level that it lacks.

If a level's code called an inline function of a shared header, each level's object would contain a weak symbol for it.
The linker keeps one copy for all levels, perhaps the AVX-512 copy.
"""

import re
import shutil
import subprocess

import pytest

import fedcore
from tests.native.build import editable_build, native_tests

ARITHMETIC = {"baseline": "", "avx2": "ymm", "avx512": "zmm"}  # the registers that a level's code must use
FROM_C = {"memcmp", "memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}
AVX512 = re.compile(r"%zmm|%k[1-7]|%[xy]mm(?:1[6-9]|2\d|3[01])")
AVX = re.compile(r"%ymm")


@pytest.fixture(scope="module")
def build():
    """Return the build folder with the levels' objects: the editable install's, or the native tests'."""
    folder = editable_build()
    return folder if level_objects(folder, "baseline") else native_tests()


def level_objects(build, level):
    return sorted((build / "CMakeFiles" / f"fedcore_{level}.dir").rglob("*.o"))


def levels(build):
    return [level for level in ARITHMETIC if level_objects(build, level)]


def output_of(tool, *arguments):
    path = shutil.which(tool)
    assert path is not None, f"{tool} is missing: it comes with the compiler, in binutils"
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def symbols(file):
    """Return (name, type) of each symbol, as nm prints them, without the assembler's labels."""
    lines = [line.split() for line in output_of("nm", "--format=posix", file).splitlines()]
    return [(name, kind) for name, kind, *_ in lines if not name.startswith(".L")]


def namespace(level):
    return re.compile(rf"_ZZ?N7fedcore{len(level)}{level}")


def test_every_level_was_built(build):
    assert "baseline" in levels(build)
    assert fedcore.build_info()["isa_best"] in levels(build)
    for level in levels(build):
        made = {f"{file.parent.name}/{file.name}" for file in level_objects(build, level)}
        assert made == {f"{room}/isa_level.cpp.o" for room in ("base", "kernels", "store")}


def test_a_level_s_objects_define_nothing_outside_its_namespace(build):
    for level in levels(build):
        for file in level_objects(build, level):
            found = symbols(file)
            assert [name for name, kind in found if kind in "TtRrDd"], f"{file}: no symbols at all"
            for name, kind in found:
                assert kind not in "WwVvu", f"{file}: {name} is weak: the linker may take another level's"
                if kind == "U":
                    assert name in FROM_C, f"{file}: {name} is called, which is not of this level"
                else:
                    assert namespace(level).match(name), f"{file}: {name} is defined outside of fedcore::{level}"


def instructions(file):
    """Yield (function, instruction) for each instruction with a register."""
    function = None
    for line in output_of("objdump", "--disassemble", "--no-show-raw-insn", file).splitlines():
        if line.endswith(">:"):
            function = line.split("<", 1)[1][:-2]
        elif "%" in line:
            yield function, line


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump, of binutils")
def test_wide_registers_are_used_only_in_their_levels(build):
    """This test reads the linked module."""
    modules = [*build.glob("_core*.so"), *build.glob("kernels")]
    assert len(modules) == 1
    avx2, avx512 = namespace("avx2"), namespace("avx512")
    seen = set()
    for function, instruction in instructions(modules[0]):
        if AVX512.search(instruction):
            assert avx512.match(function), f"{function}: {instruction}"
            seen.add("avx512")
        elif AVX.search(instruction):
            assert avx2.match(function) or avx512.match(function), f"{function}: {instruction}"
            seen.add("avx2")
    assert seen == set(levels(build)) - {"baseline"}
