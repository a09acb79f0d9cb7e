"""One round with nothing but numpy beside fedcore; run by `make wheel-check` in an environment of its own."""

import sys

import numpy as np

import fedcore

server = fedcore.Server("FedAvg", np.zeros(3, np.float32), clients=2, lr=0.1)
server.round([fedcore.Update(0, np.float32([1, 2, 3]), steps=1), fedcore.Update(1, np.float32([3, 2, 1]), steps=1)])
np.testing.assert_array_equal(server.x, [2, 2, 2])
loaded = {"torch", "pydantic", "typer", "rich", "matplotlib", "sklearn", "pooch"} & sys.modules.keys()
assert not loaded, f"import fedcore loaded {sorted(loaded)}"
print(f"fedcore {fedcore.__version__} from {fedcore.__file__}: one FedAvg round, {fedcore.isa()}")
