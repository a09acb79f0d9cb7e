"""Errors without a device or with a failing driver, and calls after them."""

import subprocess
import sys

import numpy as np
import pytest

from fedcore import arrays as cuda
from fedcore import errors, kernels
from fedcore.arrays import core
from tests.devices.fake_driver import environment

OUT_OF_MEMORY, NOT_FOUND, ILLEGAL_ADDRESS, LAUNCH_FAILED = 2, 500, 700, 719


def output(program, **changes):
    """The output of another process, with changes of the environment."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(PYTHONPATH=".") | changes,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"FEDCORE_CUDA_DRIVER": "/nowhere/libcuda.so.1"},
            "no NVIDIA driver: /nowhere/libcuda.so.1 was not found; install the driver, or compute on the CPU",
        ),
        ({"FEDCORE_CUDA_DRIVER": "libc.so.6"}, "the NVIDIA driver is older than CUDA 12.0; update it"),
        ({"FAKE_CUDA_VERSION": "11080"}, "the NVIDIA driver is of CUDA 11.8, older than 12.0; update it"),
        ({"FAKE_CUDA_DEVICES": "0"}, "the NVIDIA driver sees no GPU"),
        ({}, "None"),
    ],
    ids=["no driver", "no CUDA 12", "driver of 11.8", "no device", "a device"],
)
def test_the_reason_for_missing_cuda(changes, reason):
    assert output("from fedcore import arrays; print(arrays.reason())", **changes) == reason
    if reason != "None":
        program = "from fedcore import arrays, errors\ntry: arrays.devices()\nexcept errors.DeviceError as e: print(e)"
        assert output(program, **changes) == reason


def test_a_driver_that_is_installed_later_is_found():
    """A missing driver is looked up again, since it may be installed meanwhile."""
    program = """
import os
from fedcore import arrays as cuda
path = os.environ.pop("FEDCORE_CUDA_DRIVER")
os.environ["FEDCORE_CUDA_DRIVER"] = "/nowhere"
assert "was not found" in cuda.reason()
os.environ["FEDCORE_CUDA_DRIVER"] = path
print(cuda.reason())
"""
    assert output(program) == "None"


def test_the_image_is_the_modules_own(tmp_path):
    """With its real name the driver gets the kernels of the module, or the error says that it has none."""
    (tmp_path / "libcuda.so.1").symlink_to(environment()["FEDCORE_CUDA_DRIVER"])
    program = "import os; del os.environ['FEDCORE_CUDA_DRIVER'], os.environ['FAKE_CUDA_ANY_IMAGE']\n"
    found = output(program + "from fedcore import arrays; print(arrays.reason())", LD_LIBRARY_PATH=str(tmp_path))
    if core.cuda_targets:
        assert found == "None"
    else:
        assert found.startswith("fedcore was built without kernels for GPUs, because ")


def test_a_kernel_that_the_image_lacks():
    program = f"""
from fedcore import arrays as cuda
from tests.devices.fake_driver import fake_driver
driver = fake_driver()
driver.fail("cuModuleGetFunction", {NOT_FOUND})
print(cuda.reason())
print(cuda.reason())
"""
    assert output(program).splitlines() == [
        "fedcore_sums_f32_in_f32: CUDA_ERROR_NOT_FOUND (named symbol not found)",
        "None",
    ]


def test_an_image_that_the_driver_does_not_take():
    program = """
from fedcore import arrays as cuda
from tests.devices.fake_driver import fake_driver
fake_driver().fail("cuModuleLoadData", 209)
print(cuda.reason())
"""
    assert output(program).startswith("emulated GPU: no kernels for its capability 9.0 (compiled for: ")


def test_cuda_does_not_survive_a_fork():
    program = """
import os, sys
import numpy as np
from fedcore import arrays as cuda
from fedcore import errors, kernels
from fedcore.arrays import core
array = core.DeviceArray(4, "float32")
def refused():
    try: kernels.squared_norms([array])
    except errors.DeviceError as error: return str(error)
child = os.fork()
if child == 0:
    print(refused(), flush=True)
    print(kernels.squared_norms([np.ones(4, np.float32)])[0], flush=True)
    os._exit(0)
os.waitpid(child, 0)
array.fill_with_zeros()
print(kernels.squared_norms([array])[0])
"""
    refusal, *numbers = output(program).splitlines()
    assert refusal.startswith("CUDA does not survive a fork: start this process with the method 'spawn'")
    assert numbers == ["4.0", "0.0"]


def test_a_fork_before_the_first_use_is_sound():
    program = """
import os
from fedcore import arrays as cuda
child = os.fork()
if child == 0:
    print(cuda.reason(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(cuda.reason())
"""
    assert output(program).splitlines() == ["None", "None"]


def test_a_missing_device(cuda_driver):
    with pytest.raises(errors.DeviceError, match=r"^device\b"):
        core.DeviceArray(4, "float32", device=2)
    with pytest.raises(errors.DeviceError, match=r"^device\b"):
        core.DeviceArray(4, "float32", device=-1)
    assert len(cuda.devices()) == 2


def test_no_memory_is_an_error_and_no_end(cuda_driver):
    core.DeviceArray(1, "float32")
    cuda_driver.set_limit(cuda_driver.live_bytes(0) + 1000)
    with pytest.raises(errors.DeviceMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        core.DeviceArray(1000, "float32")
    assert isinstance(caught.value, MemoryError)
    core.DeviceArray(250, "float32").fill_with_zeros()


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemHostAlloc"])
def test_a_call_without_memory_for_its_tables_writes_nothing(cuda_driver, name):
    rows = [core.DeviceArray(64, "float32") for _ in range(2)]
    for row in rows:
        row.copy_from(np.ones(64, np.float32))
    many = [rows[0]] * 300_000  # whose table is larger than any before
    cuda_driver.fail(name, OUT_OF_MEMORY)
    with pytest.raises(errors.DeviceMemoryError, match="OUT_OF_MEMORY"):
        kernels.weighted_sum(many, np.ones(len(many), np.float32), rows[1])
    np.testing.assert_array_equal(rows[1].to_host(), 1)
    kernels.weighted_sum([rows[0]], [2], rows[1])
    np.testing.assert_array_equal(rows[1].to_host(), 2)


def test_a_failed_kernel_is_an_error_of_the_next_wait(cuda_driver):
    row, out = (core.DeviceArray(10, "float32") for _ in range(2))
    row.copy_from(np.ones(10, np.float32))
    cuda_driver.fail("kernel", ILLEGAL_ADDRESS)
    kernels.weighted_sum([row], [2], out)  # no wait
    with pytest.raises(errors.DeviceError, match=r"ILLEGAL_ADDRESS.*process"):
        out.to_host()
    with pytest.raises(errors.DeviceError, match="ILLEGAL_ADDRESS"):
        core.DeviceArray(10, "float32")
    cuda_driver.mend()
    kernels.weighted_sum([row], [2], out)
    np.testing.assert_array_equal(out.to_host(), 2)


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamSynchronize"])
def test_a_call_of_the_driver_that_fails_is_named(cuda_driver, name):
    row = core.DeviceArray(10, "float32")
    row.copy_from(np.ones(10, np.float32))
    due = kernels.squared_norms([row])
    cuda_driver.fail(name, LAUNCH_FAILED)
    with pytest.raises(errors.DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
        kernels.squared_norms([row])
    cuda_driver.mend()
    np.testing.assert_array_equal(kernels.squared_norms([row]), due)
