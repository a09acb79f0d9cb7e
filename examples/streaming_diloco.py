"""Streaming DiLoCo: four workers train a small transformer, and send its five fragments in turn.

Each worker takes AdamW steps on the documentation of different modules of Python. The server keeps a Nesterov momentum
for each fragment. DiLoCo, which sends the whole model at once, takes as many steps and sends as many bytes.
"""

import csv
import importlib
import inspect
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap

import fedcore
from fedcore.algorithms.optimizers import Nesterov

MODULES = "argparse collections csv decimal email fractions gettext http inspect json logging optparse pathlib pickle"
MODULES += " random shutil smtplib socket statistics string subprocess tarfile tempfile threading turtle zipfile"
WORKERS, CONTEXT, WIDTH, LAYERS, BATCH, LR = 4, 48, 48, 3, 8, 3e-3
FRAGMENTS = {"embedding": ("tokens.*", "places.*"), **{f"layer{i}": f"layers.{i}.*" for i in range(LAYERS)}}
FRAGMENTS |= {"head": ("norm.*", "head.*")}


def documentation():
    """The characters of the documentation in each module, as numbers below 128."""
    for name in MODULES.split():
        module, found = importlib.import_module(name), []
        for _, one in sorted(vars(module).items()):
            if (inspect.isclass(one) or inspect.isfunction(one)) and one.__module__ == name:
                members = sorted(vars(one).items()) if inspect.isclass(one) else ()
                found += [one, *(member for _, member in members if inspect.isfunction(member))]
        text = "\n".join(inspect.cleandoc(one.__doc__) for one in [module, *found] if one.__doc__)
        yield np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)


class Layer(nn.Module):
    """Attention to earlier characters with four heads, and two linear layers."""

    def __init__(self):
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, WIDTH // 4)).movedim(-3, 0).transpose(-2, -3)
        scores = q @ k.transpose(-1, -2) / (WIDTH // 4) ** 0.5
        later = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        x = x + self.out((scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(-2, -3).flatten(-2))
        return x + self.down(self.up(self.between(x)).relu())


class Transformer(nn.Module):
    """It predicts the next character."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, text):
        return self.head(self.norm(self.layers(self.tokens(text) + self.places.weight)))


def loss_of(net, tensors, windows):
    """The mean loss of a model with these tensors on windows of text, in nats per character."""
    logits = functional_call(net, tensors, windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Workers:
    """Four workers with a text, a model and an AdamW each. One computation trains all: their tensors are stacked."""

    def __init__(self, net, texts, seed):
        self.net, self.texts, self.rng = net, texts, np.random.default_rng(seed)
        stacked = {name: torch.stack([tensor.detach()] * WORKERS) for name, tensor in net.named_parameters()}
        self.tensors = {name: tensor.requires_grad_() for name, tensor in stacked.items()}
        self.adam = torch.optim.AdamW(self.tensors.values(), lr=LR, weight_decay=0.01)
        self.losses = vmap(partial(loss_of, net))

    def train(self, steps):
        for _ in range(steps):
            self.adam.zero_grad()
            windows = torch.stack([windows_of(text, self.rng, BATCH) for text in self.texts])
            self.losses(self.tensors, windows).sum().backward()
            self.adam.step()

    def take(self, tensors, alpha):
        """Mix the server's tensors in: x = alpha x + (1 - alpha) x_server."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.tensors[name].mul_(alpha).add_(tensor, alpha=1 - alpha)


def windows_of(text, rng, count):
    starts = rng.integers(len(text) - CONTEXT, size=count)
    return torch.from_numpy(text[starts[:, None] + np.arange(CONTEXT + 1)])


def run(*, streaming, delay=0, alpha=0.0, interval=50, syncs=8, seed=0):
    """Train, and return rows of (steps, bytes that a worker has sent, loss of the server's model on other text).

    Each tensor is sent every ``interval`` steps: with ``streaming`` a fragment at a time, else the whole model. The
    workers go on while the server computes, and take its tensors ``delay`` steps later.
    """
    torch.manual_seed(seed)
    texts, net = [*documentation()], Transformer()
    held_out = windows_of(np.concatenate([text[-len(text) // 10 :] for text in texts]), np.random.default_rng(1), 128)
    of_workers = [np.concatenate([text[: -len(text) // 10] for text in texts[i::WORKERS]]) for i in range(WORKERS)]
    model = fedcore.Model(net, partial=FRAGMENTS) if streaming else net
    server = fedcore.Server(model, "FedAvg", WORKERS, lr=LR, optimizer=Nesterov(momentum=0.9, eta=0.7))
    workers, rows, sent, coming = Workers(net, of_workers, seed), [], 0, {}
    parts = [*server.layout.groups.values()] if streaming else [server.layout.names]
    between = interval // len(parts)
    for number in range(syncs * len(parts)):
        part, late = parts[number % len(parts)], delay if coming else 0
        workers.train(late)
        workers.take(coming, alpha)
        workers.train(between - late)
        with server.open_round() as round:
            for client in range(WORKERS):
                round.add(
                    client,
                    {name: workers.tensors[name][client].detach() for name in part},
                    steps=min(interval, (number + 1) * between),
                )
        sent += round.report.bytes // WORKERS
        coming = {name: tensor.clone() for name, tensor in server.tensors().items() if name in part}
        if (number + 1) % len(parts) == 0:
            with torch.no_grad():
                rows.append(((number + 1) * between, sent, float(loss_of(net, server.tensors(), held_out))))
    return rows


METHODS = {
    "DiLoCo": {"streaming": False},
    "Streaming DiLoCo": {"streaming": True},
    "Streaming DiLoCo, 5 steps late": {"streaming": True, "delay": 5, "alpha": 0.5},
}


def main(seeds=1, **sizes):
    """Run the methods, print a table, and write the curves and a figure."""
    import matplotlib.pyplot as plt

    torch.set_num_threads(1)  # threads cost more than they save for matrices of this size
    table, figure = [("method", "seed", "steps", "bytes", "loss")], plt.figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for color, (method, options) in enumerate(METHODS.items()):
        curves = [run(**options, **sizes, seed=seed) for seed in range(seeds)]
        table += [(method, seed, *row) for seed, rows in enumerate(curves) for row in rows]
        for rows in curves:
            _, sent, losses = zip(*rows, strict=True)
            axes.plot(np.divide(sent, 1e6), losses, f"C{color}", label=method if rows is curves[0] else None)
        final = [rows[-1][2] for rows in curves]
        print(f"{method:32} {rows[-1][1] / 1e6:.1f} MB, loss {', '.join(f'{loss:.3f}' for loss in final)}")
    axes.set(xlabel="MB that each worker has sent", ylabel="loss on held-out text (nats per character)")
    axes.legend()
    figure.savefig("streaming-diloco.png", dpi=120)
    with open("streaming-diloco.csv", "w", newline="") as file:
        csv.writer(file).writerows(table)


if __name__ == "__main__":
    main()
