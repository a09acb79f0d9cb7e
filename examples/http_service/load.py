"""A load test on loopback, with clients in threads: `python load.py CLIENTS PARAMETERS [ROUNDS]`."""

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from client import Client

HOME, WELCOME = Path(__file__).parent, "welcome to the rounds"


def started(state, port, parameters, cohort):
    """Start the service in a process, and wait until it answers."""
    words = ["--state", state, "--port", port, "--parameters", parameters, "--cohort", cohort]
    command = [sys.executable, HOME / "service.py", *map(str, words)]
    process = subprocess.Popen(command, env=os.environ | {"ENROLMENT_TOKEN": WELCOME})
    Client("127.0.0.1", port, patience=20).ask("GET", "/metrics", [200])
    return process


def main(clients, parameters, rounds=3, port=8089):
    with tempfile.TemporaryDirectory() as state:
        service = started(state, port, parameters, clients)
        answers, waits = [], []

        def work(number):
            own, first = Client("127.0.0.1", port).register(f"c{number}", WELCOME), 0
            for _ in range(rounds):
                found, x = own.next_round(first)
                y, start = x + number, time.perf_counter()
                answers.append(own.send(found["round"], y, steps=1, examples=10)["status"])
                waits.append(time.perf_counter() - start)
                first = found["round"] + 1

        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as threads:
            list(threads.map(work, range(clients)))
        seconds = time.perf_counter() - start
        peak = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{service.pid}/status").read_text())[1]) / 1e6
        service.terminate()
        service.wait()
    waits.sort()
    size, good = 4e-9 * parameters * len(answers), sum(answer in ("accepted", "held") for answer in answers)
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(f"{model[1] if model else platform.machine()}, {os.cpu_count()} threads; clients on the same processor")
    print(f"{clients} clients, {parameters:,} parameters, {rounds} rounds: {seconds:.1f} s, {good} updates counted")
    print(f"update median {waits[len(waits) // 2]:.2f} s, worst {waits[-1]:.2f} s")
    print(f"{2 * size / seconds:.2f} GB/s in both directions; service at most {peak:.2f} GB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
