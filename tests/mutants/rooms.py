"""The mutated rooms, and the tests of each."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def of(folder, *names):
    """Some of a folder's tests."""
    return [f"tests/{folder}/test_{name}.py" for name in names]


LEFT_OUT = of("server", "compatibility", "durability", "erasure", "flags", "groups", "memory_and_store", "options")
LEFT_OUT += of("server", "pairs", "replaced_x", "resident", "rules", "update_ids")
FACE = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/server").glob("test_*.py"))]
FACE = [path for path in FACE if path not in LEFT_OUT]
"""Without those that stop, signal or starve processes, and the slow ones."""

PROCESSES = "--deselect=tests/server/test_resume.py::test_a_server_killed_at_any_moment_ends_as_the_straight_one"

DEVICES = [
    *of("devices/server", "device_rows", "moving_between_devices", "same_bits", "server_on_device", "undone", "waits"),
    "--deselect=tests/devices/server/test_moving_between_devices.py::test_a_process_that_is_killed_leaves_the_last_round",
    "--deselect=tests/devices/server/test_server_on_device.py::test_without_a_driver_nothing_is_created",
]
"""A server on the emulated device: seven seconds in a hundred of what all of these take."""

AVERAGES = ["tests/test_averaging.py", "tests/test_layout.py"]
METHODS = of("server", "contract", "papers", "medians", "claims", "diagnostics", "hand_computed")
METHODS += of("server", "newcomers", "resume", "logs")
"""The server's tests over many methods."""

READERS = [
    "tests/test_inputs.py",
    "tests/test_operations.py",
    "tests/test_representation.py",
    *of("server", "bad_input", "buffers", "models_in_and_out", "named_tensors", "odd_tensors", "precision"),
    *DEVICES,
]
"""Inputs of models and updates, also on the emulated device."""

ADAPTERS = [
    "fedcore/adapters",
    "tests/test_inputs.py",
    "tests/conformance",
    "--deselect=tests/conformance/test_conformance.py::test_an_interpreter_runs_the_rows_of_a_framework",
    *of("adapters", "contract", "npy", "session"),
    *(f"tests/adapters/{framework}" for framework in ("fedlab", "flower", "nvflare", "pfl")),
    "--deselect=tests/adapters/flower/test_example.py",
    "--deselect=tests/adapters/flower/test_resume.py::test_after_kill_9_in_the_middle_of_a_round",
    "--deselect=tests/adapters/flower/test_silent_nodes.py::test_phantoms_change_nothing",
]
"""Without those that start processes, or wait a second for silent nodes for each of many methods."""

RULES = [
    "tests/algorithms/test_privacy.py",
    "tests/model/test_robust_models.py",
    *of("server", "rules", "robust_rules", "open_limits", "norm_limits", "examples", "claims", "weights", "privacy"),
]
"""The chain of rules, and the robust rules."""

STORE = of("store", "contract", "damage", "folder", "format", "registry", "slots", "undo")
CLUSTER = of("cluster", "cli", "copies", "folders", "groups", "resharding", "same_bits", "threads")
"""Without those on Ray, and those that kill processes."""

PARTICIPATION = [
    "fedcore/sim/participation.py",
    "fedcore/sim/traces.py",
    *of("sim", "participation", "patterns", "traces"),
    *of("sim/experiment", "build", "loading"),
    "tests/runtime/test_float_mode.py",
    "tests/outsiders/test_registries.py",
]

ROOMS = {
    "fedcore/sim/network/topology.py": [
        "fedcore/sim/network/topology.py",
        "tests/sim/network",
        "tests/runtime/test_float_mode.py",
        "tests/test_representation.py",
    ],
    "fedcore/sim/participation.py": PARTICIPATION,
    "fedcore/sim/traces.py": PARTICIPATION,
    "fedcore/algorithms": [
        "fedcore/algorithms",
        "fedcore/testing/algorithms.py",
        "tests/algorithms",
        "tests/test_testing.py",
        "tests/runtime/test_float_mode.py",
        "tests/outsiders/test_registries.py",
        *METHODS,
        PROCESSES,
    ],
    "fedcore/server": [
        "fedcore/server",
        "tests/test_inputs.py",
        "tests/test_testing.py",
        "tests/runtime/test_float_mode.py",
        "tests/test_representation.py",
        *FACE,
        *DEVICES,
        PROCESSES,
    ],
    "fedcore/store": ["fedcore/store", *STORE],
    "fedcore/store/files": STORE,
    "fedcore/cluster": CLUSTER,
    "fedcore/model": ["fedcore/model", "tests/model", "tests/conformance", *AVERAGES, *READERS],
    "fedcore/rules": RULES,
    "fedcore/kernels/robust.py": ["fedcore/kernels/robust.py", "tests/kernels", *RULES],
    "fedcore/arrays.py": ["fedcore/arrays.py", *AVERAGES, *READERS],
    "fedcore/adapters": ADAPTERS,
    "fedcore/adapters/flower": ADAPTERS,
    "fedcore/adapters/nvflare": ADAPTERS,
    "fedcore/adapters/pfl.py": ADAPTERS,
}
"""A room is the files of a folder, or one file."""

SETTLED = ("fedcore/sim/network/topology.py", "fedcore/sim/participation.py", "fedcore/sim/traces.py")
"""Rooms without other survivors than the accepted ones: a new one fails the command."""

SLOWEST = 2.0
"""The most CPU seconds of a test that runs for each mutant."""


def files(room):
    """The sources of a room."""
    path = ROOT / room
    return sorted(path.glob("*.py")) if path.is_dir() else [path]
