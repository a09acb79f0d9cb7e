"""fedcore neither links nor packs CUDA libraries, and loads the driver only when CUDA is used."""

import shutil
import subprocess
from pathlib import Path

import pytest

import fedcore
from fedcore import arrays as native
from tests.kit import compiled, python
from tests.native.build import editable_build, tool

# A fake libcuda, which creates a file when it is loaded.
MARKER = r"""
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void opened(void) {
    FILE* marker = fopen(getenv("OPENED"), "w");
    fclose(marker);
}
"""
COMPUTE = """
import numpy as np
import fedcore, fedcore.arrays
from fedcore import kernels
server = fedcore.Server(np.zeros(3, np.float32), "FedAvg", clients=2, lr=0.1)
server.round([fedcore.Update(0, np.ones(3, np.float32), steps=1)])
kernels.squared_norms([np.ones(3, np.float32)])
fedcore.build_info()
"""


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf, of binutils")
def test_the_module_links_nothing_of_cuda():
    module = native.core.__file__
    output = subprocess.run(["readelf", "--dynamic", module], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in output.splitlines() if "(NEEDED)" in line]
    assert needed
    assert [name for name in needed if "cuda" in name or "nv" in name] == []


def test_only_the_module_is_installed_beside_python(tmp_path):
    """A wheel has no other CUDA file, since the module contains the GPU code."""
    install = [tool("cmake"), "--install", editable_build(), "--prefix", tmp_path]
    subprocess.run([str(part) for part in install], check=True, capture_output=True)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(native.core.__file__).name]
    sources = Path(fedcore.__file__).parent
    assert [path.name for path in sources.rglob("*.*") if path.suffix in (".cu", ".ptx", ".cubin", ".fatbin")] == []


@pytest.fixture
def opened(tmp_path):
    """Return a function that returns whether a program loads the fake libcuda."""
    (tmp_path / "marker.c").write_text(MARKER)
    marker = tmp_path / "opened"
    library = compiled(tmp_path / "marker.c", tmp_path / "libcuda.so.1", "-shared", "-fPIC")

    def run(program):
        python("-c", program, FEDCORE_CUDA_DRIVER=str(library), OPENED=str(marker))
        return marker.exists()

    return run


def test_the_driver_is_opened_at_the_first_use_of_a_device(opened):
    assert not opened(COMPUTE)
    assert opened("import fedcore.arrays; fedcore.arrays.reason()")
