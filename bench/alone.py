"""An operation in a process of its own, where no other library's threads are and no other arrays.

The process makes the same arrays from the same seed and waits on its standard input; each round wakes it when its turn
has come, so that it meets the same drift of the machine's speed as those who run in the process that asks.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

from bench.turns import Seconds, turn

ROOT = Path(__file__).parent.parent


class Work:
    """What there is to do: the arrays that ``make(*numbers)`` gives, the same in every process.

    Args:
        make: a function of a module, returning a sequence of arrays (or lists of arrays).
        numbers: its arguments, plain enough for JSON.
    """

    def __init__(self, make, *numbers):
        self.make, self.numbers = make, numbers
        self.arrays = make(*numbers)

    def rival(self, operation):
        """Somebody else's way to do it, to be timed both in turn with ours and alone."""
        return Rival(self, operation)


class Rival:
    """An operation on the arrays of some work.

    Args:
        operation: a function of a module of ``bench/rivals``, which imports no fedcore: from the work's arrays it
            returns the function that is timed.
    """

    def __init__(self, work, operation):
        self.work, self.operation = work, operation

    def here(self):
        """The function to time, on the arrays of this process."""
        return self.operation(*self.work.arrays)

    def alone(self, threads, calls=1):
        """The same in a process of its own, with torch on so many threads and so many calls a turn."""
        return Alone(self.work.make, self.work.numbers, self.operation, threads, calls)


class Alone:
    """A process with one operation; a context manager.

    Args:
        make, numbers, operation: as for ``Work`` and ``Rival``; the two functions are found by their names.
        threads: torch's threads in that process.
        calls: how many times a turn calls the function.
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
        self._process.stdin.close()  # the process ends when it reads the end of its input
        self._process.stdout.close()
        self._process.wait()

    def turn(self):
        """Seconds of a turn; the first one also waits until the arrays are made."""
        return Seconds(*self._ask("turn"))

    def peak(self):
        """By how many bytes the resident memory rises at most while the function runs once."""
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
    """Be that process."""
    import torch

    torch.set_num_threads(task["threads"])
    make, operation = (getattr(importlib.import_module(module), name) for module, name in task["functions"])
    run = operation(*make(*task["numbers"]))
    answers = {"turn": lambda: turn(run, task["calls"]), "peak": lambda: _peak(run)}
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def _peak(run):
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the resident peak starts anew from what is resident now
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
