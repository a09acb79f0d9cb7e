"""Client training on a GPU: it agrees with the CPU within rounding, repeats bit for bit, and is timed batched or not.

    python -m bench.gpu.clients [--device cpu]

Without a GPU, ``--device cpu`` compares each way of training with sequential training on the CPU.
"""

import argparse
import json
import os

import numpy as np
import torch

from bench.gpu.lines import line, show
from fedcore import Server
from fedcore.sim.batching.batched_sgd import seconds_of_ways
from fedcore.sim.data import Dataset
from fedcore.sim.in_process import InProcess
from fedcore.sim.nets import build
from fedcore.sim.sgd import torch_device

REAL = not os.environ.get("FEDCORE_CUDA_DRIVER")
CLIENTS, EXAMPLES = 6, 20
NEAR = 1e-2
"""The allowed difference of a client's change of x on a GPU, relative to its length."""
# (model, its options, the shape of an example, the ways to train it)
MODELS = {
    "LeNet-5": ("lenet", {}, (1, 28, 28), (False, True, "vmap")),
    "a perceptron": ("mlp", {}, (1, 8, 8), (False, True, "vmap")),
    "EMNIST's network": ("cnn-emnist", {"classes": 10}, (1, 28, 28), (False, True, "vmap")),
    "VGG-11 without dropout": ("vgg11", {"dropout": 0.0}, (3, 32, 32), (False, "vmap")),
    "ResNet-18": ("resnet18", {}, (3, 32, 32), (False,)),
}
NAMES = {True: "products", "vmap": "vmap"}
SHORT = ("LeNet-5",)
"""The models of a rehearsal."""


def dataset(shape):
    rng = np.random.default_rng(0)
    y = np.arange(CLIENTS * EXAMPLES) % 10
    x = (rng.random((10, *shape))[y] + rng.normal(size=(len(y), *shape)) / 4).astype(np.float32)
    return Dataset("noise", x, y, x[:40], y[:40], classes=10)


def trained(what, together, device):
    """Return the models of clients of different sizes, float32[clients, n], x, and the test loss of x."""
    name, options, shape, _ = MODELS[what]
    parts = np.split(np.arange(CLIENTS * EXAMPLES), [15, 40, 57, 80, 97])
    module = build(name, seed=1, **options)
    work = InProcess(module, dataset(shape), parts, batch=8, steps=3, seed=0, together=together, device=device)
    server = Server(build(name, seed=1, **options), "FedAvg", clients=CLIENTS, lr=0.01)
    sent = [np.array(update.value) for update in work.updates(server.broadcast(range(CLIENTS)))]
    return np.stack(sent), work.initial, work.evaluate(work.initial).loss


def check(what, together, device):
    """Return the largest relative difference of the clients' changes of x to sequential training on the CPU.

    Raises:
        AssertionError: the difference is too large, or a repetition has different bits.
    """
    ys, x, loss = trained(what, together, device)
    due, _, due_loss = trained(what, False, "cpu")
    apart = np.linalg.norm(ys - due, axis=1) / np.linalg.norm(due - x, axis=1)
    assert apart.max() <= NEAR, f"{what}, together={together}: {apart.max():.2g} of a client's way from the CPU's"
    assert abs(loss - due_loss) <= 1e-3 * due_loss, f"{what}: a test loss of {loss}, on the CPU {due_loss}"
    again, _, loss_again = trained(what, together, device)
    same = np.array_equal(again, ys) and loss_again == loss
    assert same, f"{what}, together={together}: other bits the second time, {np.abs(again - ys).max():.2g} apart"
    return float(apart.max())


def times(what, batch, cohort, device):
    """Yield a line of a client's local step for each way of training, against sequential training."""
    name, options, shape, _ = MODELS[what]
    module = build(name, seed=0, **options)
    took = seconds_of_ways(module, shape, batch=batch, device=torch_device(device), vmap=True, cohort=cohort)
    alone = took.pop(False)
    for way, seconds in took.items():
        due = {"one by one": 2.0} if device != "cpu" and seconds == min(took.values()) else {}
        output = f"a step of a client of {what}, batch {batch}, up to {cohort} in a call, {NAMES[way]}, {device}"
        yield line(output, seconds if REAL else None, rivals={"one by one": alone}, targets=due)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if REAL else "cpu", metavar="NAME")
    device = parser.parse_args().device
    torch.set_num_threads(1)  # as in processes that run trials
    wrong = 0
    for what in MODELS if device != "cpu" else SHORT:
        for together in MODELS[what][3]:
            try:
                apart = check(what, together, device)
                print(f"{what}, together={together}: {apart:.2g} of a client's way from the CPU's", flush=True)
            except Exception as error:
                wrong += 1
                print(f"{what}, together={together}: {type(error).__name__}: {error}", flush=True)
    for batch, cohort in ((16, 64), (64, 32)) if REAL and device != "cpu" else ((16, 8),):
        for what in ("LeNet-5", "EMNIST's network") if device != "cpu" else SHORT:
            for one in times(what, batch, cohort, device):
                show(one)
    print(json.dumps({"ways that are wrong": wrong}))
    return wrong


if __name__ == "__main__":
    raise SystemExit(1 if main() else 0)
