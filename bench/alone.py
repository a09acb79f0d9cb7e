"""Timing of an operation in a separate process, without the threads and arrays of other libraries.

The process makes the same arrays from the same seed and waits on its standard input. Each round of a comparison runs it
once, so that the machine's speed drifts equally for all operations.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

from bench.turns import Seconds, turn

ROOT = Path(__file__).parent.parent


class Work:
    """The arrays of ``make(*numbers)``, which are the same in every process.

    Args:
        make: a module's function that returns a sequence of arrays (or lists of arrays).
        numbers: its arguments, which JSON must be able to hold.
    """

    def __init__(self, make, *numbers):
        self.make, self.numbers = make, numbers
        self.arrays = make(*numbers)

    def rival(self, operation):
        """Return a rival's implementation, to be timed both in this process and in its own."""
        return Rival(self, operation)


class Rival:
    """A rival's operation on the arrays of a ``Work``.

    Args:
        operation: a function of a module of ``bench/rivals``, which does not import fedcore. It receives the arrays and
            returns the function to time.
    """

    def __init__(self, work, operation):
        self.work, self.operation = work, operation

    def here(self):
        """Return the function to time in this process."""
        return self.operation(*self.work.arrays)

    def alone(self, threads, calls=1):
        """Return the operation in a separate process with ``threads`` torch threads and ``calls`` calls per turn."""
        return Alone(self.work.make, self.work.numbers, self.operation, threads, calls)


class Alone:
    """A context manager for a process that runs one operation.

    Args:
        make, numbers, operation: as for ``Work`` and ``Rival``. The process imports the two functions.
        threads: the number of torch threads in the process.
        calls: the number of calls per turn.
    """

    def __init__(self, make, numbers, operation, threads, calls=1):
        task = {
            "functions": [(function.__module__, function.__name__) for function in (make, operation)],
            "numbers": numbers,
            "threads": threads,
            "calls": calls,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.alone", json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()  # the process exits at the end of its input
        self._process.stdout.close()
        self._process.wait()

    def turn(self):
        """Return the seconds of a turn. The first turn waits until the arrays are ready."""
        return Seconds(*self._ask("turn"))

    def peak(self):
        """Return by how many bytes one call raises the peak of the resident memory."""
        return self._ask("peak")

    def _ask(self, what):
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the process that times a rival alone ended with status {self._process.wait()}")
        return json.loads(answer)


def serve(task):
    """Run the turns of a task in the separate process."""
    import torch

    torch.set_num_threads(task["threads"])
    make, operation = (getattr(importlib.import_module(module), name) for module, name in task["functions"])
    run = operation(*make(*task["numbers"]))
    answers = {"turn": lambda: turn(run, task["calls"]), "peak": lambda: _peak(run)}
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def _peak(run):
    Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak to the current resident memory
    before = _kib("VmRSS")
    result = run()
    rise = (_kib("VmHWM") - before) * 1024
    del result
    return rise


def _kib(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status: expected {field}, got none")


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
