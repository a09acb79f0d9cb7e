"""The core's native tests without a sanitizer; ``make sanitize`` runs them under ASan, UBSan and TSan."""

import os

import pytest

import fedcore
from tests.native.build import LEVELS, is_current, native_tests, run, tool

OTHERS = "|".join(f"kernels_{level}" for level in LEVELS if level != fedcore.build_info()["isa_best"])


@pytest.mark.parametrize("left_out", [OTHERS, pytest.param("none", marks=pytest.mark.endurance)])
def test_the_core_without_python(left_out):
    """On every level, by day the kernels on the best one; on the package's own build if it is up to date.

    Arrays lie next to unreadable pages.
    """
    options = ["--parallel", len(os.sched_getaffinity(0)), "--output-on-failure", "--no-tests=error"]
    run(tool("ctest"), "--test-dir", native_tests(), *options, "--exclude-regex", left_out or "none")


@pytest.fixture
def build(tmp_path):
    """A build of every level from one source, source.h, and of the core from another, core.h."""
    (tmp_path / "source.h").write_text("")
    (tmp_path / "core.h").write_text("")
    made = [f"build {level}.o: copy source.h\nbuild fedcore_{level}: phony {level}.o\n" for level in LEVELS]
    made.append("build libcore.a: copy core.h\nbuild core: phony libcore.a\n")
    (tmp_path / "build.ninja").write_text("rule copy\n  command = cp $in $out\n" + "".join(made))
    run(tool("ninja"), "-C", tmp_path)
    return tmp_path


@pytest.mark.parametrize("source", ["source.h", "core.h"])
def test_a_build_is_current_until_a_source_changes(build, source):
    assert is_current(build)
    built = (build / "libcore.a").stat().st_mtime
    os.utime(build / source, (built + 1, built + 1))
    assert not is_current(build)


def test_a_build_of_other_levels_is_not_current(build):
    described = (build / "build.ninja").read_text()
    (build / "build.ninja").write_text(described.replace(f"fedcore_{LEVELS[-1]}:", "fedcore_native:"))
    assert not is_current(build)


def test_a_folder_without_a_build_is_not_current(tmp_path):
    assert not is_current(tmp_path)
    assert not is_current(tmp_path / "missing")
