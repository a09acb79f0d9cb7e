"""The emulated driver of the tests: delayed work, recorded calls and failures."""

import subprocess
import sys

import numpy as np
import pytest

from tests.devices import fake_driver
from tests.devices.memory import CallError, Memory, Stream

OUT_OF_MEMORY = 2


def test_a_stream_runs_nothing_until_a_wait(cuda_driver):
    stream, memory = Stream(), Memory(12)
    memory.write(np.float32([1, 2, 3]), stream.number)
    assert np.isnan(memory.read().view(np.float32)).all()
    stream.wait()
    np.testing.assert_array_equal(memory.read().view(np.float32), [1, 2, 3])


def test_calls_are_recorded_and_fail_on_demand(cuda_driver):
    before = cuda_driver.live_bytes()
    memory = Memory(100)
    assert [(call.name, call.argument("bytes")) for call in cuda_driver.calls()] == [("cuMemAlloc", 100)]
    assert cuda_driver.live_bytes() == before + 100
    del memory
    assert cuda_driver.live_bytes() == before
    cuda_driver.fail("cuMemAlloc", OUT_OF_MEMORY, after=1)
    Memory(1)
    with pytest.raises(CallError, match="cuMemAlloc: 2"):
        Memory(1)
    cuda_driver.set_limit(cuda_driver.live_bytes(0) + 100)
    with pytest.raises(CallError, match="cuMemAlloc: 2"):
        Memory(101)


def test_the_host_that_touches_a_devices_memory_dies():
    program = "import ctypes; from tests.devices.memory import Memory; ctypes.string_at(Memory(1).address, 1)"
    done = subprocess.run([sys.executable, "-c", program], env=fake_driver.environment(PYTHONPATH="."))
    assert done.returncode == -11
