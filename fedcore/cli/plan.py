"""``fedcore plan``: the memory, the disk space, the network and the seconds of a server for many clients."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import numpy as np

from fedcore.algorithms import Algorithm, named
from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser
from fedcore.cluster.manifest import BLOCK
from fedcore.errors import ConfigError
from fedcore.files import read_text, write_text
from fedcore.options import Compute, Storage
from fedcore.runtime import set_threads
from fedcore.sampling import without_replacement
from fedcore.server import EdgeAggregator, Server, Update
from fedcore.server.compatibility import combines
from fedcore.server.partial import COLUMNS
from fedcore.store.content import ROW_TABLE
from fedcore.store.slots import Codec, Geometry, RowFormat
from fedcore.validation import expand_home

FILE = "plan.json"
SIZES = ((1_000, 10_000, 1_000, 6), (10_000, 1_000, 100, 40), (100_000, 40, 4, 100), (4_000_000, 10, 2, 6))
"""The sizes of a measured model, two numbers of updates in a round of each, and the rounds with each number."""
CLIENTS, CROWD, OF_CROWD = 500_000, 4_000_000, (1_000, 40_000, 4_000, 6)
"""The clients of the server whose memory and disk space are measured; more than have their ids in the caches, and the
sizes of these, as in SIZES."""
SYNCS = 4
"""How often a round in a folder waits for the disk: for rows, x, sums and the index."""
RESIDENT = 1 << 30
"""The bytes of rows in files that stay in memory by default."""
USUAL = {"memory": 64e9, "disk": 4e12, "network": 1.25e9, "seconds": 1.0}
"""A usual machine: bytes, bytes per second (10 Gbit/s), and seconds of work per second."""

Costs = dict[str, Any]
"""Bytes per client, update or number of the model, and CPU seconds: ``server``, ``edge``, ``sum`` and ``step`` have for
each size n those of a round (of adding a partial sum, of the step after it) without updates, and of each update.
``crowd`` has those of an update in ``sum`` and ``step`` among CROWD ids."""


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("plan", run)
    add, count = parser.add_argument, terminal.whole_number(1)
    add("--clients", type=count, required=True, metavar="N", help="registered clients")
    add("--parameters", type=count, required=True, metavar="n", help="parameters of the model")
    add("--per-round", type=count, required=True, metavar="S", help="updates of a round")
    add("--method", default="FedAvg", metavar="NAME", help="a method (`fedcore list methods`), or module:Name")
    add("--codec", choices=("f32", "bf16", "int8"), default="f32", help="format of the clients' rows (default: f32)")
    add("--in-memory", action="store_true", help="without a folder (default: with one)")
    add("--active", type=count, metavar="M", help="clients that ever send an update and get a row (default: all)")
    add("--numbered", action="store_true", help="the ids are 0..N-1 (default: clients have ids of their own)")
    add("--shards", type=count, default=1, metavar="K", help="shards of the server (default: 1)")
    add("--edges", type=count, default=0, metavar="E", help="edges between clients and server (default: none)")
    add("--deadline", type=terminal.positive, metavar="SECONDS", help="find the shards and edges that a round needs")
    add("--measure", action="store_true", help="measure the unit costs on this machine first, and save them")
    add("--costs", type=expand_home, metavar="DIR", help="folder of the saved unit costs (default: ~/.cache/fedcore)")
    terminal.add_imports(parser)
    terminal.add_json(parser)


def run(options: Options) -> None:
    """Plan a server: memory, disk space, network, and the seconds of a round.

    The plan multiplies unit costs. --measure measures those of the method, the codec and the
    placement on this machine (one to two minutes, 1 GB of disk space in DIR), and later plans use them
    too. Otherwise the plan uses those of a machine with two cores (docs/plan.md), and says so.
    Seconds are those of one core and of the disk, without the network. A round waits for its
    slowest edge.

    Examples:
      fedcore plan --clients 100000000 --parameters 1000000 --per-round 100000 --deadline 600
      fedcore plan --clients 100000000 --parameters 1000000 --per-round 100000 --edges 100
      fedcore plan --clients 1000000 --parameters 100000 --per-round 1000 --method MIFA --codec int8
      fedcore plan --clients 1000000 --parameters 100000 --per-round 1000 --method MIFA --measure
    """
    terminal.load_imports(options.imports)
    method = named(options.method)
    options.codec = options.codec if method.keeps_rows else "f32"
    costs, source = _costs(options, method)
    if options.edges and (options.shards > 1 or "edge" not in costs):
        what = "--shards" if options.shards > 1 else f"{options.method} (see `fedcore list combinations`)"
        raise ConfigError(f"--edges: does not work with {what}; remove one of them")
    most = {"shards": -(-options.parameters // BLOCK)} | ({"edges": options.per_round} if "edge" in costs else {})
    _check(options, most["shards"])
    found: dict[str, Any] = plan(costs, method, options)
    limit, least = options.deadline or 600.0, dict[str, tuple[int, float]]()
    per = {"network": limit, "seconds": limit}
    shares = {part: sum(found[part].values()) / USUAL[part] / per.get(part, 1) for part in USUAL if part in found}
    first = max(shares, key=shares.__getitem__)
    for kind, top in most.items() if options.deadline else ():
        one = vars(options) | {"shards": 1, "edges": 0}
        # Above 1,000, steps are at most 1 %.
        further = np.geomspace(1000, top, 1400).astype(int).tolist() if top >= 1000 else ()
        counts = *range(1, min(top + 1, 1000)), *further
        times = {k: sum(plan(costs, method, Options(**one | {kind: k}))["seconds"].values()) for k in counts}
        found[f"{kind} needed"] = next((k for k, own in times.items() if own <= options.deadline), None)
        least[f"{kind} needed"] = min(times, key=times.__getitem__), min(times.values())
    if options.json:
        terminal.print_json(found | {"unit_costs": costs, "source": source})
        return
    for part, own in found.items():
        name = f"{part} of each shard" if options.shards > 1 and part in ("memory", "disk") else part
        text = terminal.bytes_text if part != "seconds" else "{:,.3f}".format
        if part.endswith("needed"):
            count, seconds = least[part]
            print(f"{part}: {own or f'no number suffices: {count} take {seconds:,.3f} s'} (without the network)")
        else:
            terminal.print_pairs([(name, text(sum(own.values()))), *((f"  {key}", text(own[key])) for key in own)])
    print(f"network for a round in {limit:g} s: {8e-9 * sum(found['network'].values()) / limit:,.2f} Gbit/s")
    print(f"first to break: {first}, {shares[first]:,.2g} times that of a core with 64 GB, 4 TB of disk and 10 Gbit/s")
    print(f"unit costs: {source}")


def plan(costs: Costs, method: Algorithm, sizes: Options) -> dict[str, dict[str, float]]:
    """Return the bytes and seconds of a server, or of each shard, by part and purpose; ``sizes`` are the options."""
    clients, n, S, E, is_file = sizes.clients, sizes.parameters, sizes.per_round, sizes.edges, not sizes.in_memory
    own, listed, kept = -(-n // sizes.shards), 0 if sizes.numbered else clients, min(sizes.active or clients, clients)
    row = Geometry.of(RowFormat(sizes.codec, own).payload).stride * method.keeps_rows
    rows, vectors = row * (kept + S), costs["exact" if E else "vectors"]
    sent = _vectors(method)[0] * n
    memory = {"process": costs["process"], "vectors": vectors * own, "updates": costs["update"] * S}
    memory |= {"clients": costs["client"] * listed + ROW_TABLE * clients * method.keeps_rows}
    disk = {"clients": costs["disk_client"] * listed, "vectors": costs["disk_vectors"] * own}
    disk |= {"rows": rows + costs["disk_row"] * kept * method.keeps_rows}
    network = {"to clients": sent * S, "from clients": 4 * n * method.uploads * S}
    step, update = _at(costs["server"], own)
    found = {"memory": memory, "disk": disk} if is_file else {"memory": memory | {"rows": rows}}
    # The coordinator of shards reads each update.
    seconds = {"updates": (update + (sizes.shards > 1) * _at(costs["server"], 1)[1]) * S, "step": step}
    if E:
        (edge, added), (joined, told), (step, counted) = (_at(costs[key], n) for key in ("edge", "sum", "step"))
        # The look-ups of an update take longer the more ids there are, by as much for each tenfold.
        few, tenfolds = np.array([told, counted]), np.log10([max(1, listed / SIZES[0][1]), CROWD / SIZES[0][1]])
        told, counted = few + np.maximum(0, costs["crowd"] - few) * tenfolds[0] / tenfolds[1]
        each, most = 8 * len(COLUMNS) + len(f"{clients if sizes.numbered else 2**64}, "), -(-S // E)
        network |= {"to edges": sent * E, "from edges": 16 * n * (1 + method.sends_row_change) * E + each * S}
        seconds = {"updates": edge + added * most, "sums": joined * E + told * S, "step": step + counted * S}
        edges = {"process": costs["process"], "vectors": costs["exact"] * n, "updates": costs["update"] * most}
        found["edge memory"] = edges
    if is_file:
        written = row * S + costs["disk_vectors"] * own / 2  # a vector has two places, written in turn
        seconds |= {"writing": written * costs["write"] + SYNCS * costs["sync"]}
        seconds |= {"reading": row * S * costs["read"] if rows > RESIDENT else 0}
    return found | {"network": network, "seconds": seconds}


def _check(sizes: Options, shards: int) -> None:
    """Raise ConfigError for a server that cannot be; ``shards`` is the most that its model has."""
    replying = ("--active", sizes.active) if sizes.active else ("--clients", sizes.clients)
    limits = [("--active", sizes.active or 0, "--clients", sizes.clients), ("--per-round", sizes.per_round, *replying)]
    limits += [("--edges", sizes.edges, "--per-round", sizes.per_round)]
    limits += [("--shards", sizes.shards, f"one for each {BLOCK:,} --parameters", shards)]
    limits += [("--clients", 0 if sizes.numbered else sizes.clients, "own ids; pass --numbered for more", 2**31 - 1)]
    for name, own, other, most in limits:
        if own > most:
            raise ConfigError(f"{name} {own}: must be at most {most} ({other})")


@cache
def _vectors(method: Algorithm) -> tuple[int, int]:
    """Return the bytes that a client gets for each parameter, and how many vectors of the model a server stores."""
    x = np.zeros(1, np.float32)
    claims: Any = {"control": x if method.second_vector else None, "loss": 1.0 if method.needs_loss else None}
    with TemporaryDirectory() as folder, Server(x, method, {0: 1}, lr=1, storage=Storage(folder)) as server:
        sent = server.broadcast([0]).bytes
        server.round([Update(0, x, steps=1, examples=1, **claims)])
        return sent, len(server.store.vector_names())


def _at(points: list[list[float]], n: int) -> list[float]:
    """Return two costs of a model with n numbers: interpolated between measured points, proportional beyond them."""
    sizes, *columns = np.transpose(points)
    return [float(np.interp(n, sizes, column)) * max(1.0, n / sizes[-1]) for column in columns]


def _costs(options: Options, method: Algorithm) -> tuple[Costs, str]:
    """Return the measured, saved or documented unit costs, and their source."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedcore"
    path, place = (options.costs or default) / FILE, "memory" if options.in_memory else "folder"
    key, has_edges = f"{options.method} {options.codec} {place}", bool(combines(method, "edges"))
    documented: dict[str, Costs] = json.loads(read_text(Path(__file__).with_name(FILE)))
    like = "MIFA" if method.keeps_rows else "FedAvg"
    costs = documented[f"{like} {options.codec} {place}"]
    costs = {name: cost for name, cost in costs.items() if has_edges or name in documented["MIFA f32 folder"]}
    try:
        saved: dict[str, Costs] = json.loads(read_text(path)) if path.exists() else {}
        own = costs if options.measure else saved.get(key, costs)
        if wrong := [name for name in costs if np.shape(np.asarray(own[name], float)) != np.shape(costs[name])]:
            raise ValueError(f"{key}: {wrong[0]}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        hint = "measure again (--measure), or delete it"
        raise ConfigError(f"{path}: is damaged, or of an earlier version: {error}; {hint}") from None
    if options.measure:
        path.parent.mkdir(parents=True, exist_ok=True)
        case = options.method, options.codec, path.parent, options.in_memory, has_edges, options.imports
        write_text(path, json.dumps(saved | {key: measured(*case)}, indent=1) + "\n")
        return _costs(Options(**vars(options) | {"measure": False}), method)
    if key in saved:
        return own, f"of this machine ({path}: {key})"
    source = f"those of {like} {options.codec} {place} on the machine of the documentation; --measure measures"
    if options.method == like:
        return costs, f"{source} this machine's"
    more = 8 * (_vectors(method)[1] - _vectors(named(like))[1])  # a vector has two places
    costs |= {name: costs[name] + more for name in ("vectors", "exact", "disk_vectors") if costs.get(name)}
    return costs, f"{source} those of {options.method}, which may need more memory and time"


def measured(
    method: str, codec: Codec, folder: Path, in_memory: bool, has_edges: bool, imports: Sequence[str] = ()
) -> Costs:
    """Measure the unit costs of a method; a new process runs each server."""
    spawn = ProcessPoolExecutor(1, get_context("spawn"), terminal.load_imports, (imports,), max_tasks_per_child=1)
    with TemporaryDirectory(dir=folder) as place, spawn as processes:

        def of(n: int, most: int, few: int, rounds: int = 4, clients: int = 0, **how: Any) -> dict[str, Any]:
            case = method, codec, n, clients or most, [most] * rounds + [few] * rounds, None if in_memory else place
            return processes.submit(probe, *case, **how).result()

        def seconds(runs: Sequence[dict[str, Any]], key: str, sizes: Any = SIZES) -> list[list[float]]:
            points: list[list[float]] = []
            for (n, most, few, rounds), run in zip(sizes, runs, strict=True):
                high, low = min(run[key][:rounds]), min(run[key][rounds:])
                update = max(0.0, high - low) / (most - few)
                update = points[0][2] if points and key != "rounds" else update  # in a sum it has no vector
                points.append([n, max(0.0, low - few * update), update])
            return points

        empty, crowd = (of(8, 8, 8, clients=clients, own_ids=True) for clients in (8, CLIENTS))
        runs, (_, many, *_), (n, *_) = [of(*size) for size in SIZES], SIZES[0], SIZES[-1]
        costs = {"process": empty["process"], "vectors": (runs[-1]["memory"] - runs[-1]["held"]) / n}
        costs |= {f"{at}client": (crowd[key] - empty[key]) / CLIENTS for at, key in (("", "memory"), ("disk_", "disk"))}
        costs |= {"update": (runs[0]["memory"] - runs[0]["held"] - runs[0]["made"]) / many}
        costs |= {"disk_row": runs[0]["index"] / many, "disk_vectors": runs[-1]["vectors"] / n}
        costs |= {"server": seconds(runs, "rounds")} | _disk(Path(place))
        if has_edges:
            runs = [of(*size, edge=True, own_ids=True) for size in SIZES]
            costs |= {"edge": seconds(runs, "rounds"), "sum": seconds(runs, "sums"), "step": seconds(runs, "steps")}
            costs |= {"exact": runs[-1]["memory"] / n / 2}  # of the server, and of the edge
            crowded = [of(*OF_CROWD, CROWD, edge=True, own_ids=True)]
            costs |= {"crowd": [seconds(crowded, key, [OF_CROWD])[0][2] for key in ("sums", "steps")]}
    return costs


def probe(
    method: str, codec: Codec, n: int, clients: int, cohorts: Sequence[int], at: str | None, **how: bool
) -> dict[str, Any]:
    """Run a server on one thread of a new process; return its bytes and CPU seconds.

    Each round has an update of each client of a random cohort. ``rounds`` has the seconds of each round. Memory is this
    process's alone; ``held`` is that of its rows.

    Args:
        at: the folder in which the server's folder is made; None for a server in memory.
        how: ``own_ids``, whether ids are not 0, 1, ...; ``edge``, whether the updates go through an edge to a server in
            memory. ``sums`` and ``steps`` then have the seconds of adding each partial sum, and of the step after it.
    """
    set_threads(1)
    found: dict[str, Any] = dict.fromkeys(("vectors", "index", "disk"), 0) | {"process": _private()}
    found |= {key: [] for key in ("rounds", "sums", "steps")}
    made, x, h, edge = named(method), np.zeros(n, np.float32), np.full(n, 1e-3, np.float32), how.get("edge")
    # A list without freed arrays, whose memory the server would use again.
    known = [i * 0x9E3779B97F4A7C15 % 2**64 for i in range(clients)] if how.get("own_ids") else range(clients)
    listed = dict.fromkeys(known, 1) if made.needs_shares else known if how.get("own_ids") else clients
    claims: Any = {"control": h if made.second_vector else None, "loss": 1.0 if made.needs_loss else None}
    compute = Compute(accumulator="exact" if edge else None)
    folder = None if edge or at is None else f"{at}/{n}-{clients}"
    base = _private()
    server = Server(x, made, listed, lr=0.1, storage=Storage(folder, codec=codec), compute=compute)
    found["made"] = _private() - base
    below = EdgeAggregator(x, made, dict.fromkeys(known, 1) if made.needs_shares else known, lr=0.1) if edge else None
    for t, size in enumerate(cohorts):
        cohort = [known[i] for i in without_replacement(clients, size, seed=0, round=t).tolist()]
        began = process_time()
        with server.open_round() if below is None else below.open_round(server.broadcast(cohort).x, round=t) as round:
            for client in cohort:
                round.add(client, h, steps=1, examples=1, keep=True, **claims)
            message = round.partial_sum().to_bytes() if below else b""
        found["rounds"].append(process_time() - began)
        if below:
            with server.open_round() as round:
                began = process_time()
                round.add_partial_sum(message, "edge", clients=cohort)
                found["sums"].append(process_time() - began)
            found["steps"].append(process_time() - began - found["sums"][-1])
    found |= {"memory": _private() - base, "held": 0 if folder else server.store.info().bytes}
    found["replied"] = len(server.store)
    for file in Path(folder).iterdir() if folder else ():
        for name in ("disk", file.name.partition("-" if "-" in file.name else ".")[0]):
            found[name] = found.get(name, 0) + file.stat().st_blocks * 512
    server.close()
    return found


def _private() -> int:
    """Return the bytes of this process's memory that are not in files."""
    (line,) = (line for line in read_text(Path("/proc/self/status")).splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def _disk(folder: Path) -> Costs:
    """Return the seconds to write and to read a byte of a file, and to wait for the disk once."""
    block, times = os.urandom(1 << 26), [perf_counter()]
    with (folder / "disk").open("w+b", buffering=0) as file:
        for some in (block, *[b"0"] * 8):
            file.write(some)
            os.fsync(file.fileno())
            times.append(perf_counter())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        file.read()
    read = perf_counter() - times[-1]
    return {"write": (times[1] - times[0]) / len(block), "sync": (times[-1] - times[1]) / 8, "read": read / len(block)}
