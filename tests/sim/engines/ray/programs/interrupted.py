"""A task that never returns, on a Ray of this program, until a signal interrupts it."""

import signal
import tempfile
import warnings
from contextlib import closing, suppress
from pathlib import Path

from fedcore.cluster.workers import Pool, Session
from fedcore.sim.ray_engine import Tasks
from tests.sim.engines.ray.light import light


def main(folder):
    begun = Path(folder, "begun")
    with Session(cpus=1) as session, closing(Pool(session, light(), 1, cpus=1, gpus=0, arguments=())) as pool:
        tasks = Tasks(pool, 1, lambda _: (str(begun),), lambda _: "the task")
        pool.complete()
        tasks.start(1)
        while not begun.exists():
            pass
        print("working", flush=True)
        tasks.wait()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as place, suppress(KeyboardInterrupt):
        try:
            main(place)
        finally:
            print("interrupted, and closed", flush=True)
