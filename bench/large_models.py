"""Peak memory and time of a FedAvg round over models with GPT-2's shapes, in fedcore, Flower and NVFlare.

    python -m bench.large_models FOLDER --size large --dtype float32 [--ways merge windows ...]

FOLDER is on a disk with room for seven models; the clients' updates stay there as safetensors files. Each way runs in a
new process. Its peak is the sum of VmHWM over its processes, and ``anonymous`` the largest sampled sum of RssAnon.
``memory`` and ``windows`` read each update from its file; the three ``windows`` may keep 256 MiB of vectors in memory.
In Flower the six messages exist before the server aggregates them. In NVFlare's simulator one thread trains the six
sites in turns; the simulator of 2.9 accepts the offload of tensors to disk, but passes them in memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import psutil

from fedcore import Safetensors, Server, Storage, merge
from fedcore.model.safetensors import header_of

SIZES = {"small": (768, 12), "medium": (1024, 24), "large": (1280, 36)}
"""The width and the number of layers."""
CLIENTS = 6
RESIDENT = 256 << 20


def shapes(size):
    """Return the shapes of GPT-2's tensors by name."""
    width, layers = SIZES[size]
    found = {"wte.weight": (50257, width), "wpe.weight": (1024, width)}
    for i in range(layers):
        for name, shape in {"attn.c_attn": (3 * width,), "attn.c_proj": (width,), "mlp.c_fc": (4 * width,)}.items():
            found[f"h.{i}.{name}.weight"], found[f"h.{i}.{name}.bias"] = (width, *shape), shape
        found[f"h.{i}.mlp.c_proj.weight"], found[f"h.{i}.mlp.c_proj.bias"] = (4 * width, width), (width,)
        for norm in ("ln_1", "ln_2"):
            found[f"h.{i}.{norm}.weight"] = found[f"h.{i}.{norm}.bias"] = (width,)
    return found | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def write(path, size, dtype, seed):
    """Write a model of random numbers."""
    rng = np.random.default_rng(seed)
    with open(path, "wb") as file:
        file.write(header_of([(name, dtype, shape) for name, shape in shapes(size).items()]))
        for shape in shapes(size).values():
            numbers = rng.random(shape, np.float32) - np.float32(0.5)
            file.write(numbers if dtype == "float32" else (numbers.view(np.uint32) >> 16).astype(np.uint16))


def clients(folder):
    return [str(folder / f"{i}.safetensors") for i in range(1, CLIENTS + 1)]


def as_torch(path):
    from safetensors.torch import load_file

    return load_file(path)


def fedcore_merge(folder, out):
    merge(out / "merged", clients(folder))


def server_round(folder, out, **options):
    server = Server(Safetensors(folder / "0.safetensors"), "FedAvg", CLIENTS, lr=0.1, **options)
    with server.open_round() as round:
        for i, path in enumerate(clients(folder)):
            assert round.add(i, Safetensors(path), steps=1)
    return server


def memory(folder, out):
    server = server_round(folder, out)
    server.write(out / "model")


def windows(folder, out):
    server = server_round(folder, out, storage=Storage(out / "server", resident=RESIDENT))
    server.write(out / "model")


def flower(folder, out, module="flwr.serverapp.strategy", **options):
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from tests.adapters.flower.local_grid import LocalGrid

    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = ArrayRecord(as_torch(clients(folder)[context.node_id - 1]))
        metrics = MetricRecord({"num-examples": 1, "steps": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    strategy = import_module(module).FedAvg(fraction_evaluate=0.0, **options)
    grid = LocalGrid({i: (app, {}) for i in range(1, CLIENTS + 1)})
    strategy.start(grid, ArrayRecord(as_torch(folder / "0.safetensors")), num_rounds=1)


def flower_ours(folder, out):
    flower(folder, out, "fedcore.adapters.flower")


def flower_windows(folder, out):
    flower(folder, out, "fedcore.adapters.flower", storage=Storage(out / "server", resident=RESIDENT))


def nvflare(folder, out, aggregator=None):
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.app_opt.pt.job_config.model import PTModel
    from nvflare.client.config import ExchangeFormat
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import ScriptRunner

    job = FedJob("large", CLIENTS)
    model = PTModel({"path": "bench.large_models.net", "args": {"folder": str(folder)}}, allow_numpy_conversion=False)
    options = {"persistor_id": job.to_server(model)["persistor_id"], "num_clients": CLIENTS, "num_rounds": 1}
    job.to_server(FedAvg(enable_tensor_disk_offload=True, aggregator=aggregator, **options))
    site = ScriptRunner(__file__, f"--site {folder}", server_expected_format=ExchangeFormat.PYTORCH)
    job.to_clients(site)
    job.simulator_run(str(out / "workspace"), n_clients=CLIENTS, threads=1)


def nvflare_ours(folder, out):
    from fedcore.adapters.nvflare import Aggregator

    nvflare(folder, out, Aggregator("FedAvg"))


def nvflare_windows(folder, out):
    from fedcore.adapters.nvflare import Aggregator

    storage = {"path": str(out / "server"), "resident": RESIDENT}
    nvflare(folder, out, Aggregator("FedAvg", storage=storage))


def net(folder):
    """Return the first model as a torch module."""
    import torch

    module = torch.nn.Module()
    for name, tensor in as_torch(Path(folder) / "0.safetensors").items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
    return module


def site(folder):
    """Send a client's model; the script of NVFlare's sites."""
    import nvflare.client as flare

    flare.init()
    number = int(flare.get_site_name().removeprefix("site-"))
    while flare.is_running() and flare.receive() is not None:
        params = {name.replace(".", "_"): tensor for name, tensor in as_torch(clients(folder)[number - 1]).items()}
        flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))


WAYS = {
    "merge": fedcore_merge,
    "memory": memory,
    "windows": windows,
    "flower": flower,
    "flower-ours": flower_ours,
    "flower-windows": flower_windows,
    "nvflare": nvflare,
    "nvflare-ours": nvflare_ours,
    "nvflare-windows": nvflare_windows,
}


def status(process):
    """Return a process's VmHWM and RssAnon in bytes."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return [int(lines[name].split()[0]) << 10 for name in ("VmHWM", "RssAnon")]


def measured(command, limit):
    """Run a command; return the figures of its processes."""
    peaks, cpu, anonymous, began = {}, {}, 0, time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        while process.poll() is None and anonymous <= limit:
            now = 0
            for one in [process, *process.children(recursive=True)]:
                with suppress(psutil.Error, OSError, KeyError):  # it has just ended
                    peaks[one.pid], own = status(one)
                    cpu[one.pid] = sum(one.cpu_times()[:2])
                    now += own
            anonymous = max(anonymous, now)
            time.sleep(0.02)
        if process.returncode is None:
            for one in [*process.children(recursive=True), process]:
                one.kill()
            return {"error": f"more than {limit / 2**30:.0f} GiB"}
        log.seek(0)
        errors = log.read().strip().splitlines()
    if process.returncode:
        return {"error": errors[-1][:200] if errors else f"status {process.returncode}"}
    seconds = time.perf_counter() - began
    figures = {"peak GiB": sum(peaks.values()) / 2**30, "anonymous GiB": anonymous / 2**30}
    return figures | {"CPU s": sum(cpu.values()), "seconds": seconds, "processes": len(peaks)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--limit", type=float, default=22, help="the most anonymous memory in GiB")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder / f"{options.size}-{options.dtype}"
    if options.way:
        with tempfile.TemporaryDirectory(dir=options.folder) as out:
            WAYS[options.way](folder, Path(out))
        return
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(CLIENTS + 1):
        if not (path := folder / f"{i}.safetensors").exists():
            write(path, options.size, options.dtype, i)
    for way in options.ways:
        command = [sys.executable, "-m", "bench.large_models", *sys.argv[1:], "--way", way]
        print(json.dumps({"way": way, **measured(command, options.limit * 2**30)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--site":
        site(Path(sys.argv[2]))
    else:
        main()
