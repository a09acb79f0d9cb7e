"""FEDCORE_CUDA and FEDCORE_CUDA_ARCHITECTURES with nvcc, without it, and with an unusable one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.gpu.compiled import CSRC
from tests.native.build import tool

PROJECT = """
cmake_minimum_required(VERSION 3.21)
project(image LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH ${CMAKE_SOURCE_DIR}/csrc/cmake)
include(cuda)
add_executable(image main.cpp)
target_include_directories(image PRIVATE csrc)
fedcore_add_cuda(image ${CMAKE_SOURCE_DIR}/csrc)
"""
MAIN = """
#include <cstdio>
#include "cuda/image.h"
int main() {
    const fedcore::cuda::Image image = fedcore::cuda::image();
    std::printf("%s|%s|%.*s", image.targets, image.missing, int(image.bytes), static_cast<const char*>(image.begin));
}
"""
# The fake nvcc writes its options to its output, writes a dependency file, and logs each run.
NVCC = """#!/usr/bin/env bash
if [ "$1" = --version ]; then echo "Cuda compilation tools, release {release}, V{release}.1"; exit; fi
[ {works} = yes ] || {{ echo "unsupported GNU version"; exit 1; }}
echo "$@" >> {log}
options="$*"
while [ $# -gt 0 ]; do
    case $1 in
        -o) to=$2 ;;
        -MF) echo "{build}/kernels.ptx: {csrc}/kernels/cuda/kernels.cu {csrc}/kernels/cuda/fold.cuh" > $2 ;;
    esac
    shift
done
case $options in *-fatbin*) printf "image" > "$to" ;; *) printf "ptx" > "$to" ;; esac
"""


class Folder:
    """A copy of the sources, in which only the image is built."""

    def __init__(self, folder):
        self.folder, self.csrc, self.log = folder, folder / "csrc", folder / "nvcc.log"
        shutil.copytree(CSRC, self.csrc)
        (folder / "CMakeLists.txt").write_text(PROJECT)
        (folder / "main.cpp").write_text(MAIN)

    def configure(self, *options, nvcc=None):
        """Run CMake; nvcc is the folder of the only one that it can find."""
        compilers = [shutil.which("nvcc", path=path) for path in os.get_exec_path()]
        hidden = {str(Path(one).parent) for one in compilers if one} | {"/usr/local/cuda/bin", "/usr/local/bin"}
        cmake = [tool("cmake"), "-S", self.folder, "-B", self.folder / "build", "-G", "Ninja", *options]
        cmake += [f"-DCMAKE_IGNORE_PATH={';'.join(sorted(hidden))}", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
        env = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
        env |= {} if nvcc is None else {"CUDA_HOME": str(nvcc)}
        return subprocess.run([str(part) for part in cmake], env=env, capture_output=True, text=True, timeout=100)

    def built(self):
        """The image's targets, the reason if it is missing, and its bytes."""
        build = [tool("cmake"), "--build", str(self.folder / "build")]
        done = subprocess.run(build, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        shown = subprocess.run([self.folder / "build" / "image"], capture_output=True, text=True, check=True).stdout
        return shown.split("|")

    def nvcc(self, release="13.0", works="yes"):
        """The CUDA_HOME of a fake nvcc."""
        path = self.folder / "toolkit" / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        places = {"log": self.log, "csrc": self.csrc, "build": self.folder / "build"}
        path.write_text(NVCC.format(release=release, works=works, **places))
        path.chmod(0o755)
        return path.parent.parent

    def runs(self):
        """The options of each run of nvcc that compiled kernels."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split() for line in lines if "empty.cu" not in line]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_auto_without_nvcc_builds_with_a_message(folder):
    done = folder.configure()
    assert done.returncode == 0
    assert "No kernels for GPUs: nvcc was not found" in done.stdout
    assert folder.built() == ["", "nvcc was not found", ""]


def test_off_does_not_run_nvcc(folder):
    done = folder.configure("-DFEDCORE_CUDA=OFF", nvcc=folder.nvcc())
    assert done.returncode == 0
    assert folder.built() == ["", "FEDCORE_CUDA was OFF", ""]
    assert not folder.log.exists()


@pytest.mark.parametrize(
    ("toolkit", "reason"),
    [
        (None, "nvcc was not found"),
        ({"release": "11.8"}, "is no nvcc of CUDA 12.8 or later"),
        ({"works": "no"}, "could not compile"),
    ],
)
def test_on_without_a_working_nvcc_fails_with_advice(folder, toolkit, reason):
    nvcc = None if toolkit is None else folder.nvcc(**toolkit)
    done = folder.configure("-DFEDCORE_CUDA=ON", nvcc=nvcc)
    assert done.returncode != 0
    shown = " ".join(done.stderr.split())
    for due in ("FEDCORE_CUDA is ON", reason, "CUDA_HOME", "12.8", "FEDCORE_CUDA=OFF"):
        assert due in shown, shown
    assert folder.configure("-DFEDCORE_CUDA=AUTO", nvcc=nvcc).returncode == 0
    targets, missing, image = folder.built()
    assert reason in missing
    assert (targets, image) == ("", "")


def test_the_module_holds_nvccs_image(folder):
    assert folder.configure(nvcc=folder.nvcc()).returncode == 0
    assert folder.built() == ["compute_75", "", "image"]


def test_a_release_has_machine_code_of_one_ptx(folder):
    assert folder.configure("-DFEDCORE_CUDA_ARCHITECTURES=all", nvcc=folder.nvcc()).returncode == 0
    assert folder.built()[0] == "sm_80 sm_90 sm_100 sm_120 compute_75"
    compiled, packed = folder.runs()
    assert "-fmad=false" in compiled
    made = [option.partition("code=")[2] for option in packed if option.startswith("arch=")]
    assert made == ["sm_80", "sm_90", "sm_100", "sm_120", "compute_75"]


@pytest.mark.parametrize(("option", "value"), [("FEDCORE_CUDA", "YES"), ("FEDCORE_CUDA_ARCHITECTURES", "90;hopper")])
def test_an_invalid_option_is_named(folder, option, value):
    done = folder.configure(f"-D{option}={value}", nvcc=folder.nvcc())
    assert done.returncode != 0
    assert f"{option}: expected" in done.stderr
    assert f"got {value.split(';')[-1]}" in " ".join(done.stderr.split())


def test_nvcc_runs_again_when_a_source_of_the_kernels_changes_and_not_before(folder):
    assert folder.configure(nvcc=folder.nvcc()).returncode == 0
    folder.built()
    assert len(folder.runs()) == 2
    for changed, runs in (("base/pool.h", 2), ("cuda/image.cpp", 2), ("kernels/cuda/fold.cuh", 4)):
        with (folder.csrc / changed).open("a") as source:
            source.write("\n")
        folder.built()
        assert len(folder.runs()) == runs, changed
