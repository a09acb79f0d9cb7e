"""The notebook's server in Flower, with its state on disk."""

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from fedcore.adapters.flower import MimiC

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = MimiC(lr=0.1, steps=1, fraction_train=0.3, fraction_evaluate=0.0, storage="state")
    strategy.start(grid, ArrayRecord({"x": Array(np.zeros(1000, np.float32))}), num_rounds=context.run_config["rounds"])
    np.save("model.npy", strategy.server.tensors()["x"])
