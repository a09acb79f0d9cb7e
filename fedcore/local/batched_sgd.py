"""The local work of many clients at once, where the model is a small network: batched products for all of them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fedcore.assignment import Assignment
from fedcore.errors import ShapeError
from fedcore.local.layers import Block, Gradients, Net
from fedcore.local.local_step import LocalOptions, mean_rate, rate, rate_of, steps_of
from fedcore.local.sgd import Work
from fedcore.local.torch_device import CPU, moved, on_host
from fedcore.local_rules import Table
from fedcore.typing import F32

MOST_PARAMETERS = 1_000_000
"""Larger networks are trained one by one. Perceptrons' time one by one over time together, on one thread, 1 / 8 / 32
clients (bench/rounds/bench_together.py): 610 parameters 1.8 / 27 / 10-45, 4,810 1.4-8 / 5-20 / 12-14, 50,890
1.1 / 2.3 / 2.1, 159,010 1.1 / 1.4 / 1.5, 199,210 1.1 / 1.7 / 1.5, 656,810 1.1 / 1.3 / 1.1. Of convolutional networks
``together.fastest`` measures it; EMNIST's, of 1,690,046, takes the same time either way."""
CLIENTS = 64
"""The most clients in one call."""
INDICES = 1 << 22
"""How many examples the steps of one call may visit; each takes 24 bytes."""


def in_groups(
    net: Net, clients: Iterable[tuple[int, Table]], most: int = CLIENTS, device: torch.device = CPU
) -> Iterator[list[tuple[int, Table]]]:
    """Clients and their tables in their order, as many at a time as are to share a call: from one to ``most``."""
    group: list[tuple[int, Table]] = []
    visited = 0
    for client, table in clients:
        width = table.indices.shape[1]
        limit = min(most, CLIENTS, net.most_clients(width, device))
        visited += table.indices.size
        if group and (len(group) >= limit or group[0][1].indices.shape[1] != width or visited > INDICES):
            yield group
            group, visited = [], table.indices.size
        group.append((client, table))
    if group:
        yield group


@torch.no_grad()
@np.errstate(over="ignore", invalid="ignore")  # as in sgd
def batched_sgd(
    net: Net,
    models: F32,
    inputs: Tensor,
    labels: Tensor,
    tables: Sequence[Table],
    assignments: Sequence[Assignment],
    *,
    x: F32 | None = None,
    options: LocalOptions | None = None,
) -> list[Work]:
    """Do what ``sgd`` does for S clients at once, except for rounding: as many steps for each as its table has rows.

    The clients are ordered by their steps, so that those that still have some are always the first.

    Args:
        net: the layers of all their models.
        models: float32[S, n] in host memory, x_t in every row, and afterwards the clients' y.
        inputs: float32[m, ...], on the device on which the steps are taken; read-only.
        labels: int64[m], likewise.
        tables: the minibatches of each client as indices into the two; all of one width.
        assignments: what each client is asked to do: the same, except for the offset.
        x: float32[n], x_t; needed where ``mu`` is not 0.
        options: as for ``sgd``.

    Returns:
        Each client's work, in the order of the tables.

    Raises:
        ShapeError: the tables are not as many as the models, or of several widths.

    Determinism: a client's result does not depend on the others, as far as torch's batched products do not: on one
        thread of the CPU, and with tables of at least two columns, it has the same bits whoever is beside it. On a GPU
        its library's products may depend on how many there are.
    Cost: 8 n bytes a client, 4 n more for each of offsets, second, momentum and mu, 8 n more for b; and 12 bytes for
        each example of each step. A GPU is sent all of that once, and waited for at the end.
    """
    if len(tables) != len(models) or len({table.indices.shape[1] for table in tables}) > 1:
        widths = [table.indices.shape[1] for table in tables]
        raise ShapeError(f"tables: expected {len(models)} of one width, got widths {widths}")
    options = options or LocalOptions()
    examples = inputs.reshape(len(inputs), -1), labels.unsqueeze(1)
    order = sorted(range(len(tables)), key=lambda i: -len(tables[i].sizes))
    tables = [tables[i] for i in order]
    device = inputs.device
    ys, fixed = torch.from_numpy(models[order]).to(device), {}
    shared, offsets = assignments[0], [assignments[i].offset for i in order]
    if any(offset is not None for offset in offsets):
        none = np.zeros(net.n, np.float32)
        rows = np.stack([none if offset is None else offset for offset in offsets])
        fixed["offset"] = torch.from_numpy(rows).to(device)
    if shared.mu and x is not None:
        fixed["x"] = moved(x, device).expand(ys.shape)
    if shared.b and shared.x_prev is not None:
        fixed["x_prev"] = moved(shared.x_prev, device).expand(ys.shape)
    carried, lr = {"control": torch.zeros_like(ys)} if shared.second else {}, rate(shared)
    if options.momentum:
        carried["velocity"] = torch.zeros_like(ys)
    done = 0
    for m, last in _phases([len(table.sizes) for table in tables]):
        minibatches = _Minibatches(examples, tables[:m], done, last)
        rates = [rate_of(lr, step) for step in range(done, last)]
        _phase(net, ys[:m], minibatches, rates, fixed, carried, (shared.a, shared.b, shared.mu), options)
        done = last
    models[order] = on_host(ys)
    controls = on_host(carried["control"]) if shared.second else None
    works: list[Work] = [Work(0, rate_of(lr, 0), None)] * len(tables)
    for row, (i, table) in enumerate(zip(order, tables, strict=True)):
        control: F32 | None = None if controls is None else controls[row]
        if control is not None:
            control /= np.float32(max(1, len(table.sizes)))
        works[i] = Work(len(table.sizes), mean_rate(lr, len(table.sizes)), control)
    return works


def _phases(steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(m, k): up to step k the first m clients are there; ``steps`` descend."""
    for last, group in groupby(reversed(range(len(steps))), key=steps.__getitem__):
        yield next(group) + 1, last


class _Minibatches:
    """The examples of m clients from one step to another."""

    def __init__(self, examples: tuple[Tensor, Tensor], tables: Sequence[Table], first: int, last: int) -> None:
        self._inputs, self._labels = examples
        indices = np.stack([table.indices[first:last] for table in tables], axis=1)
        sizes = np.stack([table.sizes[first:last] for table in tables], axis=1)[:, :, None]
        counted = np.arange(indices.shape[2]) < sizes
        self._indices = torch.from_numpy(indices).to(self._labels.device)
        weights = torch.from_numpy((counted / sizes).astype(np.float32))
        self._weights = weights.to(self._labels.device).unsqueeze(3)

    @property
    def width(self) -> int:
        """The examples of each client in a step."""
        return self._indices.shape[2]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Inputs float32[m, b, features], labels int64[m, b, 1] and weights float32[m, b, 1] of each step."""
        _, m, b = self._indices.shape
        for indices, weights in zip(self._indices.flatten(1), self._weights, strict=True):
            inputs = self._inputs.index_select(0, indices).view(m, b, -1)
            yield inputs, self._labels.index_select(0, indices).view(m, b, 1), weights


def _phase(
    net: Net,
    ys: Tensor,
    minibatches: _Minibatches,
    rates: Sequence[float],
    fixed: dict[str, Tensor],
    carried: dict[str, Tensor],
    numbers: tuple[float, float, float],
    options: LocalOptions,
) -> None:
    """Steps that all of m clients take: ``ys`` and the first m rows of what is ``carried`` are changed."""
    m, device = len(ys), ys.device
    y, grad = Block(net, m, device).fill(ys), Block(net, m, device)
    grad_prev = Block(net, m, device) if "x_prev" in fixed else None
    of = {name: Block(net, m, device).fill(rows[:m]) for name, rows in (fixed | carried).items()}
    flat = {name: block.flat for name, block in of.items()}
    a, b, mu = numbers
    descent = steps_of(
        y.flat,
        grad.flat,
        a=a,
        b=b if grad_prev is not None else 0.0,
        mu=mu,
        offset=flat.get("offset"),
        x=flat.get("x"),
        grad_prev=None if grad_prev is None else grad_prev.flat,
        control=flat.get("control"),
        velocity=flat.get("velocity"),
        options=options,
    )
    gradients: Gradients = net.gradients(m, minibatches.width, device)
    for minibatch, lr in zip(minibatches, rates, strict=True):
        gradients(y, *minibatch, grad)
        _clip(grad, options)
        if grad_prev is not None:
            gradients(of["x_prev"], *minibatch, grad_prev)
            _clip(grad_prev, options)
            grad_prev.flat.add_(of["x_prev"].flat, alpha=options.weight_decay)
        descent.step(lr)
    y.empty_into(ys)
    for name, rows in carried.items():
        of[name].empty_into(rows[:m])


def _clip(grad: Block, options: LocalOptions) -> None:
    """Shorten each client's gradient to the length that is allowed."""
    if options.clip is not None:
        lengths = torch.stack([part.square().sum(1) for part in grad.parts]).sum(0).sqrt()
        shorter = (options.clip / lengths.clamp(min=1e-30)).clamp(max=1.0).unsqueeze(1)
        for part in grad.parts:
            part *= shorter
