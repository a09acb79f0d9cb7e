"""The plan of ``fedcore plan`` beside real servers, and beside a round through edges.

    python -m bench.plan FOLDER --into docs/plan.md                # minutes, 4 GB of disk space

A new process with one thread runs each server, with synthetic updates. The unit costs are those of
FOLDER/plan.json, as ``fedcore plan --costs FOLDER --measure`` writes them; missing ones are measured first, at other
sizes. Memory is the private memory of the process and disk space that of the folder's blocks. The seconds are CPU time,
the least over the rounds after the first, as for the unit costs. FOLDER must be on a local disk.
"""

import argparse
import json
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np

from bench.machine import describe
from bench.markdown import put_into, table
from fedcore import Compute, EdgeAggregator, Server, set_threads
from fedcore.algorithms import named
from fedcore.cli.plan import FILE, measured, plan, probe
from fedcore.cli.plan import _private as private
from fedcore.cli.terminal import bytes_text
from fedcore.sampling import without_replacement
from fedcore.server.compatibility import combines

SERVERS = (
    # clients, parameters, updates of a round, method, codec, in memory, ids 0..N-1, rounds
    (1_000, 10_000_000, 4, "FedAvg", "f32", True, False, 5),
    (1_000, 1_000_000, 20, "MIFA", "f32", False, False, 10),
    (10_000, 1_000_000, 40, "MIFA", "int8", False, False, 10),
    (10_000, 100_000, 100, "MIFA", "bf16", True, False, 10),
    (100_000, 10_000, 1_000, "MIFA", "f32", False, True, 10),
    (1_000_000, 10_000, 1_000, "MIFA", "int8", False, False, 10),
    (1_000_000, 10_000, 2_000, "FedAvg", "f32", False, False, 5),
)
EDGES = {"clients": 10_000_000, "n": 10_000, "per_round": 100_000, "edges": 10, "rounds": 4}


def alone(work, *arguments, **options):
    """Return the result of a function in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(work, *arguments, **options).result()


def costs_of(folder, method, codec, in_memory):
    """Return the unit costs of a method in a folder; measure them if they are missing."""
    path, key = folder / FILE, f"{method} {codec} {'memory' if in_memory else 'folder'}"
    known = json.loads(path.read_text()) if path.exists() else {}
    if key not in known:
        known[key] = measured(method, codec, folder, in_memory, bool(combines(method, "edges")))
        path.write_text(json.dumps(known, indent=1) + "\n")
    return known[key]


def server_lines(folder):
    """Yield a line per server: the plan and the run of its memory, its disk space and its seconds."""
    for clients, n, size, method, codec, in_memory, numbered, rounds in SERVERS:
        with TemporaryDirectory(dir=folder) as place:
            case = method, codec, n, clients, [size] * rounds, None if in_memory else place
            run = alone(probe, *case, own_ids=not numbered)
        sizes = {"clients": clients, "parameters": n, "per_round": size, "codec": codec, "in_memory": in_memory}
        sizes |= {"numbered": numbered, "active": run["replied"], "shards": 1, "edges": 0}
        due = plan(costs_of(folder, method, codec, in_memory), named(method), Namespace(**sizes))
        rows = f" {codec}" if named(method).keeps_rows else ""
        place = "memory" if in_memory else "folder"
        cells = [f"{method}{rows}, {place}", f"{clients:,}{' (0..N-1)' * numbered}", f"{n:,}", f"{size:,}"]
        cells += pair(sum(due["memory"].values()), run["process"] + run["memory"], bytes_text)
        cells += ["", "", ""] if in_memory else pair(sum(due["disk"].values()), run["disk"], bytes_text)
        seconds = due["seconds"]["updates"] + due["seconds"]["step"]
        cells += pair(seconds, min(run["rounds"][1:]), "{:.3g}".format)
        print(*cells, flush=True)
        yield cells


def pair(due, got, text):
    """Return the cells of a planned and a measured number, and of the plan's error."""
    return [text(due), text(got), f"{due / got - 1:+.0%}"]


def rounds_through_edges(clients, n, per_round, edges, rounds):
    """Run rounds of a server with registered clients of which some are at edges; return bytes and seconds.

    The edges run one after another, each with its share of the updates. The seconds are the least over the rounds after
    the first. ``edges`` has the median of a round's edges.
    """
    set_threads(1)
    x, h, found = np.zeros(n, np.float32), np.full(n, 1e-3, np.float32), {"process": private()}
    known = [i * 0x9E3779B97F4A7C15 % 2**64 for i in range(clients)]
    base, began = private(), process_time()
    server = Server(x, "FedAvg", known, lr=0.1, compute=Compute(accumulator="exact"))
    found |= {"register": process_time() - began}
    for t in range(rounds):
        cohorts = np.split(without_replacement(clients, per_round, seed=0, round=t), edges)
        parts, sums, size = [], [], 0
        with server.open_round() as round:
            for cohort in ([known[i] for i in one] for one in cohorts):
                edge = EdgeAggregator(x, "FedAvg", cohort, lr=0.1, population=clients)
                began = process_time()
                with edge.open_round(server.broadcast(cohort).x, round=t) as own:
                    for client in cohort:
                        own.add(client, h, steps=1, examples=1, keep=True)
                    message = own.partial_sum().to_bytes()
                parts.append(process_time() - began)
                began, size = process_time(), size + len(message)
                round.add_partial_sum(message, "edge", clients=cohort)
                sums.append(process_time() - began)
            began = process_time()
        seconds = {"edges": median(parts), "sums": sum(sums), "step": process_time() - began}
        assert len(round.report.accepted) == per_round
        found |= {"sent": size} if t == 0 else {key: min(s, found.get(key, s)) for key, s in seconds.items()}
    return found | {"memory": private() - base}


def edge_lines(folder):
    """Yield the lines of the round through edges."""
    costs, run = costs_of(folder, "FedAvg", "f32", True), alone(rounds_through_edges, **EDGES)
    sizes = {"codec": "f32", "in_memory": True, "numbered": False, "active": None, "shards": 1}
    due = plan(costs, named("FedAvg"), Namespace(parameters=EDGES["n"], **EDGES, **sizes))
    seconds, number = due["seconds"], "{:.3g}".format
    yield ["memory of the server", *pair(sum(due["memory"].values()), run["process"] + run["memory"], bytes_text)]
    yield ["bytes from the edges", *pair(due["network"]["from edges"], run["sent"], bytes_text)]
    yield ["CPU seconds of an edge", *pair(seconds["updates"], run["edges"], number)]
    yield ["CPU seconds of the sums", *pair(seconds["sums"], run["sums"], number)]
    yield ["CPU seconds of the step", *pair(seconds["step"], run["step"], number)]
    print(f"CPU seconds to register {EDGES['clients']:,} clients: {run['register']:.3g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, help="put the tables into this page")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    columns = ["method", "N", "n", "S"]
    for what in ("memory", "disk", "CPU s"):
        columns += [f"{what}: plan", "run", "off"]
    pages = {"servers": table(columns, list(server_lines(options.folder)))}
    pages |= {"edges": table(["line", "plan", "run", "off"], list(edge_lines(options.folder)))}
    machine = describe()
    print(machine["cpu"], machine["date"], "load", machine["load_average"])
    for name, text in pages.items():
        print(text)
        if options.into:
            put_into(options.into, text, f"<!-- plan: {name} -->")


if __name__ == "__main__":
    main()
