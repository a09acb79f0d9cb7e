"""SGD steps of many clients at once, and the choice between batched and sequential training."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedcore.algorithms.local_rules import Table
from fedcore.arrays import F32
from fedcore.errors import RangeError, ShapeError
from fedcore.server.broadcast import Instructions
from fedcore.sim import sgd
from fedcore.sim.batching.convolutions import ConvNet
from fedcore.sim.batching.layers import Block, Functional, Net, Perceptron
from fedcore.sim.sgd import CPU, FlatModel, LocalOptions, Work, mean_rate, moved, on_host, repeatable, synchronize

MOST_PARAMETERS = 1_000_000
"""The clients of larger networks are trained one by one. Speedup of batched training for perceptrons, on one thread,
with 1 / 8 / 32 clients (bench/rounds/bench_together.py): 610 parameters 1.8 / 27 / 10-45, 4,810 1.4-8 / 5-20 / 12-14,
50,890 1.1 / 2.3 / 2.1, 159,010 1.1 / 1.4 / 1.5, 199,210 1.1 / 1.7 / 1.5, 656,810 1.1 / 1.3 / 1.1. For convolutional
networks, ``fastest`` measures it; EMNIST's network of 1,690,046 parameters has speedup 1."""
CLIENTS = 64
"""The maximum number of clients in one call."""
INDICES = 1 << 22
"""The maximum number of examples in all steps of one call; each needs 24 bytes."""


def in_groups(
    net: Net, clients: Iterable[tuple[int, Table]], most: int = CLIENTS, device: torch.device = CPU
) -> Iterator[list[tuple[int, Table]]]:
    """Yield groups of one to ``most`` clients with their tables, in the given order. Each group fits into one call."""
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
@np.errstate(over="ignore", invalid="ignore")  # as in ``sgd``
def batched_sgd(
    net: Net,
    models: F32,
    examples: tuple[Tensor, Tensor],
    work: Sequence[tuple[Table, Instructions]],
    *,
    x: F32 | None = None,
    options: LocalOptions | None = None,
) -> list[Work]:
    """Do the work of ``sgd`` for S clients at once, up to rounding: one step for each row of a client's table.

    Internally, clients are sorted by descending number of steps, so that clients with remaining steps come first.

    Args:
        models: float32[S, n] in host memory, x_t in every row, and afterwards the clients' y.
        examples: inputs float32[m, ...] and labels int64[m] on the device of the steps, read-only.
        work: for each client its minibatches as indices of examples, and its instructions, which may differ only in the
            offset. All tables have the same width.
        x: float32[n], x_t; needed if ``mu`` is not 0.

    Returns:
        Each client's work, in the order of the tables.

    Determinism: a client's result does not depend on the others, if torch's batched products do not. On one CPU thread,
        and with tables of at least two columns, it has the same bits in any group. On a GPU, the library's products may
        depend on the number of clients.
    Cost: 8 n bytes per client, 4 n more for each of offsets, second, momentum and mu, 8 n more for b; and 12 bytes for
        each example of each step. All data is copied to a GPU once; the call waits at the end.
    """
    tables, instructions = zip(*work, strict=True)
    inputs, labels = examples
    widths = [table.indices.shape[1] for table in tables]
    if len(tables) != len(models) or len(set(widths)) > 1:
        raise ShapeError(f"tables: must be {len(models)} tables of the same width, got widths {widths}")
    options = options or LocalOptions()
    flat = inputs.reshape(len(inputs), -1), labels.unsqueeze(1)
    order = sorted(range(len(tables)), key=lambda i: -len(tables[i].sizes))
    device = inputs.device
    ys, fixed = torch.from_numpy(models[order]).to(device), {}
    shared, offsets = instructions[0], [instructions[i].offset for i in order]
    if any(offset is not None for offset in offsets):
        none = np.zeros(net.n, np.float32)
        rows = np.stack([none if offset is None else offset for offset in offsets])
        fixed["offset"] = torch.from_numpy(rows).to(device)
    if shared.mu and x is not None:
        fixed["x"] = moved(x, device).expand(ys.shape)
    if shared.b and shared.x_prev is not None:
        fixed["x_prev"] = moved(shared.x_prev, device).expand(ys.shape)
    kept = {"control": shared.second, "velocity": options.momentum}
    carried = {name: torch.zeros_like(ys) for name, is_needed in kept.items() if is_needed}
    steps = [len(tables[i].sizes) for i in order]
    call, done = _Call(net, shared, options, fixed, carried), 0
    for m, last in _phases(steps):
        call.phase(ys[:m], _Minibatches(flat, [tables[i] for i in order[:m]], range(done, last)))
        done = last
    models[order] = on_host(ys)
    controls = on_host(carried["control"]) if shared.second else None
    works = {}
    for row, (i, count) in enumerate(zip(order, steps, strict=True)):
        control: F32 | None = None if controls is None else controls[row]
        if control is not None:
            control /= np.float32(max(1, count))
        works[i] = Work(count, mean_rate(shared, count), control)
    return [works[i] for i in range(len(tables))]


def _phases(steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (m, k): the first m clients do the steps up to step k. ``steps`` is descending."""
    for last, group in groupby(reversed(range(len(steps))), key=steps.__getitem__):
        yield next(group) + 1, last


class _Minibatches:
    """The examples of m clients in some steps; ``width`` is the number of each client's in a step."""

    def __init__(self, examples: tuple[Tensor, Tensor], tables: Sequence[Table], steps: range) -> None:
        self.steps, (self._inputs, self._labels), rows = steps, examples, slice(steps.start, steps.stop)
        indices = np.stack([table.indices[rows] for table in tables], axis=1)
        sizes = np.stack([table.sizes[rows] for table in tables], axis=1)[:, :, None]
        counted = np.arange(indices.shape[2]) < sizes
        self._indices = torch.from_numpy(indices).to(self._labels.device)
        self.width = indices.shape[2]
        weights = torch.from_numpy((counted / sizes).astype(np.float32))
        self._weights = weights.to(self._labels.device).unsqueeze(3)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield inputs float32[m, b, features], labels int64[m, b, 1] and weights float32[m, b, 1] of each step."""
        _, m, b = self._indices.shape
        for indices, weights in zip(self._indices.flatten(1), self._weights, strict=True):
            inputs = self._inputs.index_select(0, indices).view(m, b, -1)
            yield inputs, self._labels.index_select(0, indices).view(m, b, 1), weights


@dataclass(frozen=True)
class _Call:
    """What all steps of a call share: the instructions without offsets, and vectors by name with a row per client."""

    net: Net
    shared: Instructions
    options: LocalOptions
    fixed: dict[str, Tensor]
    carried: dict[str, Tensor]

    def phase(self, ys: Tensor, minibatches: _Minibatches) -> None:
        """Do the steps of m clients; ``ys`` and the first m rows of ``carried`` are changed in place."""
        net, shared, options, m, device = self.net, self.shared, self.options, len(ys), ys.device
        y, grad = Block(net, m, device).fill(ys), Block(net, m, device)
        blocks = {name: Block(net, m, device).fill(rows[:m]) for name, rows in (self.fixed | self.carried).items()}
        x_prev = blocks.pop("x_prev", None)
        grad_prev = None if x_prev is None else Block(net, m, device)
        flat = {name: block.flat for name, block in blocks.items()}
        vectors = sgd.Vectors(y.flat, grad.flat, grad_prev=None if grad_prev is None else grad_prev.flat, **flat)
        descent = sgd.Descent(vectors, (shared.a, 0.0 if grad_prev is None else shared.b, shared.mu), options)
        gradients = net.gradients(m, minibatches.width, device)
        for step, minibatch in zip(minibatches.steps, minibatches, strict=True):
            gradients(y, *minibatch, grad)
            _clip(grad, options)
            if x_prev is not None and grad_prev is not None:
                gradients(x_prev, *minibatch, grad_prev)
                _clip(grad_prev, options)
                grad_prev.flat.add_(x_prev.flat, alpha=options.weight_decay)
            descent.step(sgd.rate_of(shared, step))
        y.empty_into(ys)
        for name, rows in self.carried.items():
            blocks[name].empty_into(rows[:m])


def _clip(grad: Block, options: LocalOptions) -> None:
    """Scale each client's gradient down to norm ``options.clip``, if its norm is larger."""
    if options.clip is not None:
        lengths = torch.stack([part.square().sum(1) for part in grad.parts]).sum(0).sqrt()
        shorter = (options.clip / lengths.clamp(min=1e-30)).clamp(max=1.0).unsqueeze(1)
        for part in grad.parts:
            part *= shorter


Way = bool | Literal["vmap"]
"""How clients are trained: False for one by one, True for hand-written batched products, "vmap" for torch's vmap."""

TURNS = 7
"""The number of measurements of each way. The minimum is used, since other work on the machine affects it least."""
STEPS = 4
"""Local steps in a measurement."""
COHORT = 16
"""The default maximum number of clients in a measurement."""


def net_of(module: nn.Module, shape: tuple[int, ...], way: Way = True, device: torch.device = CPU) -> Net | None:
    """Return the network of a module whose clients can be trained together, or None to train them one by one.

    The parameters of ``module`` are float32, ``shape`` is that of an example. ``way=False`` returns None. ``way=True``
    returns the hand-written products of a perceptron or convolutional network: on the CPU with at most
    ``MOST_PARAMETERS`` parameters, on a GPU of any size. For other models on a GPU it returns a ``Functional``, as
    "vmap" always does. If torch cannot batch the model, "vmap" raises a RangeError.
    """
    if way not in (True, False, "vmap"):
        raise RangeError(f"together={way!r}: must be True, False or 'vmap'")
    if way is False:
        return None
    if way == "vmap":
        batched = Functional.of(module, shape, device)
        if batched is None:
            raise RangeError(
                "together='vmap': the model must have no buffers, dropout or hooks, and its scores of an example must "
                "not depend on other examples; train it one by one"
            )
        return batched
    net = Perceptron.of(module, shape) or ConvNet.of(module, shape)
    if device.type == "cpu":
        return net if net is not None and net.n <= MOST_PARAMETERS else None
    return net or Functional.of(module, shape, device)


def can_be_measured(module: nn.Module, shape: tuple[int, ...], device: torch.device = CPU) -> bool:
    """Whether ``fastest`` needs to measure: the model can be batched, and is not a perceptron (which always gains).

    The gain for convolutions depends on the machine and on torch's libraries.
    """
    net = net_of(module, shape, device=device)
    return net is not None and not isinstance(net, Perceptron)


def fastest(module: nn.Module, shape: tuple[int, ...], *, batch: int, device: torch.device = CPU) -> Way:
    """Measure the fastest way to train clients: one by one, by hand-written products, and on a GPU also by "vmap".

    Determinism: the result may differ between calls. Store it, because the ways differ in rounding.
    Cost: a hundred local steps of one client for each way, on torch's current number of threads.
    """
    seconds = seconds_of_ways(module, shape, batch=batch, device=device)
    if len(seconds) == 1:
        raise RangeError("module: its clients can only be trained one by one; see net_of")
    return min(seconds, key=seconds.__getitem__)


def seconds_of_ways(
    module: nn.Module,
    shape: tuple[int, ...],
    *,
    batch: int,
    device: torch.device = CPU,
    vmap: bool | None = None,
    cohort: int = COHORT,
) -> dict[Way, float]:
    """Return the seconds per local step of one client for each possible way.

    ``vmap`` is whether to measure "vmap" (default: only on a GPU), ``cohort`` the maximum number of clients in a call.
    """
    nets: dict[Way, Net] = {}
    if (own := net_of(module, shape, device=device)) is not None and not isinstance(own, Functional):
        nets[True] = own
    if device.type != "cpu" if vmap is None else vmap:
        batched = Functional.of(module, shape, device)
        nets |= {} if batched is None else {"vmap": batched}
    model = FlatModel(sgd.copy_of(module), device)
    inputs = torch.from_numpy(np.random.default_rng(0).random((batch, *shape), np.float32)).to(device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    table = Table(np.tile(np.arange(batch), (STEPS, 1)), np.full(STEPS, batch))
    instructions = Instructions(round=0, lr=1e-6)
    x = model.flat.cpu().numpy().copy()

    def together(net: Net, ys: F32) -> None:
        batched_sgd(net, ys, (inputs, labels), [(table, instructions)] * len(ys))

    ways: dict[Way, tuple[Callable[[], object], int]] = {
        False: (partial(sgd.sgd, model, inputs, labels, table.indices, instructions), 1)
    }
    for way, net in nets.items():
        clients = min(cohort, net.most_clients(batch, device))
        ways[way] = partial(together, net, np.tile(x, (clients, 1))), clients
    best: dict[Way, float] = {}
    for turn in range(TURNS + 1):
        for way, (work, clients) in ways.items():
            seconds = _seconds(work, device) / (clients * STEPS)
            if turn:  # the first measurement is a warm-up
                best[way] = min(best.get(way, seconds), seconds)
    return best


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = perf_counter()
    with repeatable(device):
        work()
    synchronize(device)
    return perf_counter() - began
