"""Run a round and the operator's commands with only NumPy and fedcore installed.

`make wheel-check` runs this file in a fresh environment.
"""

import sys
from tempfile import TemporaryDirectory

import numpy as np


def main():
    import fedcore

    server = fedcore.Server(np.zeros(3, np.float32), "FedAvg", clients=2, lr=0.1)
    server.round([fedcore.Update(0, np.float32([1, 2, 3]), steps=1), fedcore.Update(1, np.float32([3, 2, 1]), steps=1)])
    np.testing.assert_array_equal(server.x, [2, 2, 2])
    with TemporaryDirectory() as folder:
        server.save(f"{folder}/state")
        for command in ("doctor", "store info", "store verify", "store compact"):
            fedcore_command(*command.split(), *[f"{folder}/state"] * command.startswith("store"))
    for command in ("", "run", "show-data", "store", "store info"):
        fedcore_command(*command.split(), "--help")
    optional = ("torch", "pydantic", "rich", "matplotlib", "sklearn", "pooch", "networkx")
    loaded = [name for name in optional if sys.modules.get(name)]
    assert not loaded, f"import fedcore loaded {loaded}"
    print(f"fedcore {fedcore.__version__} from {fedcore.__file__}: one FedAvg round, {fedcore.isa()}")


def fedcore_command(*arguments):
    from fedcore.cli import main

    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code:
            raise AssertionError(f"fedcore {' '.join(arguments)}: status {ended.code}") from ended


if __name__ == "__main__":
    main()
