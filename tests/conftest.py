"""Repeatable tests: Hypothesis without deadlines or random seeds, torch on one thread."""

import gc
import os
import re
import shutil
import signal
import tempfile
import warnings
from collections import Counter, defaultdict
from importlib.util import find_spec
from itertools import combinations, islice
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

if find_spec("torch"):  # release/installed.py runs some tests without torch
    import torch

    from bench.peers.torchvision_ops import declare

    # Threads of two libraries on two cores would mostly wait for each other.
    torch.set_num_threads(1)
    declare()  # before anything imports FedLab, the doctests of its adapter included

# Ray ends workers if a machine's memory is nearly full, even if other programs use it.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # starts no workers that no test uses
os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15, its workers would wait for all other tests to end

# Runs are repeatable: a failure in one clone is a failure in all. `--hypothesis-profile=explore` tries more.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False, max_examples=1000)
settings.load_profile("repeatable")


def encodable(value):
    """Escape the lone surrogates in the strings of a JSON value."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return type(value)(map(encodable, value)) if isinstance(value, (list, tuple)) else value


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Make each report one that pytest-xdist can send, whatever malformed text a test logs or shows."""
    return encodable((yield))


def pytest_configure(config):
    """Close a worker's channel in processes that a test forks: a worker that ends then fails the test that it runs."""
    gc.disable()  # until the first test; collection would look through all objects many times
    channels = [p.channel for p in config.pluginmanager.get_plugins() if hasattr(p, "channel")]
    files = [file for each in channels for file in (each.gateway._io.infile, each.gateway._io.outfile)]
    os.register_at_fork(after_in_child=lambda: [os.close(files.pop().fileno()) for _ in range(len(files))])


# Files with tests of many seconds, which would let the other processes wait if they came last.
FIRST = {"test_blocks.py", "test_cuda_image.py", "test_determinism.py", "test_foreign_tensors.py", "test_native.py"}
ON_RAY = pytest.StashKey[set]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the cases of a test or class marked by ``sample`` that are not in the sample as ``endurance`` tests.

    Files that use the Ray session come first, then those of ``FIRST``.
    """
    on_ray = config.stash[ON_RAY] = {item.path for item in items if "ray_session" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (item.path not in on_ray, item.path.name not in FIRST))
    products = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("endurance"):
            for node, marker in islice(item.iter_markers_with_node("sample"), 1):
                products[node.nodeid.partition("[")[0], marker.args].append(item)
    for (_, arguments), cases in products.items():
        for item in {*cases} - sample(cases, *arguments):
            item.add_marker("endurance")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """End Ray behind the last file that uses it, since its idle processes take a tenth of a core."""
    on_ray = item.config.stash[ON_RAY]
    if item.path in on_ray and (nextitem is None or nextitem.path not in on_ray):
        [ray] = item.session._fixturemanager.getfixturedefs("ray_session", item)
        ray.finish(item._request)


def sample(cases, together, times=1):
    """The cases that meet each combination of ``together`` values at least ``times`` times.

    Values are those of the parameters, and a class's tests.
    """
    cases = sorted(cases, key=lambda item: crc32(item.nodeid.encode()))
    combined = {item: [*combinations(values_of(item), together)] for item in cases}
    kept, met = {}, Counter()
    for least in range(max(map(len, combined.values())), 0, -1):  # first the cases with the most new combinations
        for item in cases:
            new = [each for each in combined[item] if met[each] < times]
            if item not in kept and len(new) >= least:
                kept[item] = met.update(new)
    return kept.keys()


def values_of(item):
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return [("test", item.originalname), *((name, repr(params[name])) for name in sorted(params))]


@pytest.fixture(autouse=True, scope="module")
def freeze_existing_objects():
    """Exclude the objects that exist before a module's tests from garbage collection, which many tests call.

    These are a million objects of torch and the tests.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def folder_in_memory(tmp_path_factory):
    """A folder on tmpfs if there is enough room, because these tests would often wait for a disk.

    The test deletes it. With PYTEST_DEBUG_TEMPROOT it is in that place, where pytest keeps it.
    """
    memory = "/dev/shm"
    elsewhere = "PYTEST_DEBUG_TEMPROOT" in os.environ
    if elsewhere or not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 1 << 30:
        yield tmp_path_factory.mktemp("folder")
        return
    with tempfile.TemporaryDirectory(prefix="fedcore-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# Their tests are about no disk, and would wait for each of its syncs.
IN_MEMORY = r"tests/(adapters|cli|cluster|devices|examples|outsiders|secure|server|sim|store/calls)/"
IN_MEMORY += r"|/test_(hostile_folders|power_loss|slots|damage|folder|undo)\.py"


@pytest.fixture
def tmp_path(request, tmp_path):
    """pytest's folder, or one on tmpfs for some tests; ``tests/store`` has tests on a disk."""
    return request.getfixturevalue("folder_in_memory") if re.search(IN_MEMORY, str(request.path)) else tmp_path


@pytest.fixture
def interruptible():
    """Make SIGINT interrupt this process and its children; shells ignore it for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def cuda_device():
    """Provide a CUDA device: an emulated one, unless FEDCORE_CUDA_DRIVER is set."""
    from tests.devices import fake_driver

    if not fake_driver.REAL:
        fake_driver.fake_driver()


@pytest.fixture
def cuda_driver(cuda_device):
    """The driver of the emulated device; the test's failures and memory limits are reset afterwards."""
    from tests.devices import fake_driver

    if fake_driver.REAL:
        pytest.skip("needs the emulated driver")
    driver = fake_driver.fake_driver()
    gc.collect()  # frees unused memory
    driver.lines()
    yield driver
    driver.mend()
    driver.set_limit()


@pytest.fixture(scope="session")
def ray_session():
    """One Ray session for all files of a process that use it, with six cores and a GPU, some of them simulated."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
    from fedcore.cluster.workers import Session

    with Session(cpus=6, num_gpus=1, object_store_memory=200 << 20) as session:
        collect_quietly()
        yield session
    collect_quietly()


def collect_quietly():
    """Collect what Ray leaves to the collector: open files and ended processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
