"""A round whose second client takes for ever, until somebody interrupts it."""

import signal
import tempfile
import warnings
from pathlib import Path

from fedcore import Server
from fedcore.engines import Ray
from tests.engines.ray.models import MARK, Odd
from tests.engines.ray.problems import noise


def main(folder):
    """Say that the second client is being trained, and wait for it."""
    data, parts = noise("mlp", 3, 4)
    data.train_x[parts[1], 0] = MARK
    with Ray(Odd(folder), data, parts, batch=4, steps=1, seed=0, together=False, workers=1) as engine:
        server = Server("FedAvg", engine.initial, clients=3, lr=0.1)
        for _ in engine.updates(server.broadcast(range(3))):
            while not any(Path(folder).iterdir()):
                pass  # the next one has not begun
            print("training", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as place:
        try:
            main(place)
        except KeyboardInterrupt:
            print("interrupted, and closed", flush=True)
