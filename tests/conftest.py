"""Every test the same on every run: Hypothesis without its clock or a new seed, torch on one thread."""

import gc
import os
import shutil
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if find_spec("torch"):  # else it is a Python beside the clone's own, for which release/installed.py runs some tests
    import torch

    from bench.peers.torchvision_ops import declare

    # Two threads of two libraries on two cores wait for each other more than they work.
    torch.set_num_threads(1)
    declare()  # before anything imports FedLab, the doctests of its adapter included

# Ray ends workers where a machine's memory is nearly full, whoever has it: another program's is no matter of a test.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

# A run is repeatable: what fails in one clone fails in all. `--hypothesis-profile=explore` looks further.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False, max_examples=1000)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays():
    """No collector of cycles looks again through what there was before a module's tests, as many of them ask it to.

    That is a million objects, torch's and the tests' own.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def folder_in_memory(tmp_path_factory):
    """A folder on tmpfs, where there is one with room: the disk has no part in these tests, which often wait for it.

    It is gone behind the test; whoever names a place in PYTEST_DEBUG_TEMPROOT has it there, where pytest keeps it.
    """
    memory = "/dev/shm"
    elsewhere = "PYTEST_DEBUG_TEMPROOT" in os.environ
    if elsewhere or not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 1 << 30:
        yield tmp_path_factory.mktemp("folder")
        return
    with tempfile.TemporaryDirectory(prefix="fedcore-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def interruptible():
    """SIGINT interrupts, this process and those that it starts: in a job in the background a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def cuda_device():
    """Have a CUDA device: one that is emulated, unless FEDCORE_CUDA_DRIVER is set."""
    from tests.devices import fake_driver

    if not fake_driver.REAL:
        fake_driver.fake_driver()


@pytest.fixture
def cuda_driver(cuda_device):
    """The driver of the emulated device, which goes well and has all its memory again behind the test."""
    from tests.devices import fake_driver

    if fake_driver.REAL:
        pytest.skip("needs the emulated driver")
    driver = fake_driver.fake_driver()
    gc.collect()  # whose memory nobody has counts no more
    driver.lines()
    yield driver
    driver.mend()
    driver.set_limit()


@pytest.fixture(scope="session")
def ray_session():
    """One Ray for all tests of a process: six cores, of which some are pretended, as its GPU is."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    from fedcore.simulation.executor import Session

    with Session(cpus=6, num_gpus=1, object_store_memory=200 << 20) as session:
        yield session
