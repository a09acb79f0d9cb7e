"""The local work of many clients at once, and the choice between batched and sequential training."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedcore.arrays import F32
from fedcore.errors import RangeError, ShapeError
from fedcore.server.instructions import Instructions as Assignment
from fedcore.simulation.batching.convolutions import ConvNet
from fedcore.simulation.batching.layers import Block, Functional, Gradients, Net, Perceptron
from fedcore.simulation.local_rules import Table
from fedcore.simulation.sgd import Descent, FlatModel, LocalOptions, Work, mean_rate, rate, rate_of, sgd
from fedcore.simulation.torch_device import CPU, moved, on_host, repeatable, synchronize

MOST_PARAMETERS = 1_000_000
"""Larger networks are trained one by one. The time of perceptrons one by one over their time together, on one thread,
for 1 / 8 / 32 clients (bench/rounds/bench_together.py): 610 parameters 1.8 / 27 / 10-45, 4,810 1.4-8 / 5-20 / 12-14,
50,890 1.1 / 2.3 / 2.1, 159,010 1.1 / 1.4 / 1.5, 199,210 1.1 / 1.7 / 1.5, 656,810 1.1 / 1.3 / 1.1. For convolutional
networks ``fastest`` measures it; EMNIST's, of 1,690,046, takes the same time either way."""
CLIENTS = 64
"""The most clients in one call."""
INDICES = 1 << 22
"""The most examples in the steps of one call; each takes 24 bytes."""


def in_groups(
    net: Net, clients: Iterable[tuple[int, Table]], most: int = CLIENTS, device: torch.device = CPU
) -> Iterator[list[tuple[int, Table]]]:
    """Yield groups of clients and their tables, in their order: from one to ``most`` clients for one call."""
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
    """Do the work of ``sgd`` for S clients at once, except for rounding: one step for each row of a client's table.

    The clients are ordered by their number of steps, so that those with steps left are always the first.

    Args:
        net: the layers of all their models.
        models: float32[S, n] in host memory, x_t in every row, and afterwards the clients' y.
        inputs: float32[m, ...], on the device of the steps; read-only.
        labels: int64[m], likewise.
        tables: the minibatches of each client as indices into the two; all of one width.
        assignments: the instructions to each client: the same, except for the offset.
        x: float32[n], x_t; needed if ``mu`` is not 0.
        options: as for ``sgd``.

    Returns:
        Each client's work, in the order of the tables.

    Raises:
        ShapeError: there are not as many tables as models, or they have several widths.

    Determinism: a client's result does not depend on the others, as far as torch's batched products do not: on one
        thread of the CPU, and with tables of at least two columns, it has the same bits in any group. On a GPU the
        products of its library may depend on the number of clients.
    Cost: 8 n bytes a client, 4 n more for each of offsets, second, momentum and mu, 8 n more for b; and 12 bytes for
        each example of each step. All of it is copied to a GPU once; the call waits at the end.
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
    """(m, k): the first m clients take the steps up to step k; ``steps`` descend."""
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
    """Take steps of all m clients: ``ys`` and the first m rows of ``carried`` are changed."""
    m, device = len(ys), ys.device
    y, grad = Block(net, m, device).fill(ys), Block(net, m, device)
    grad_prev = Block(net, m, device) if "x_prev" in fixed else None
    of = {name: Block(net, m, device).fill(rows[:m]) for name, rows in (fixed | carried).items()}
    a, b, mu = numbers
    descent = Descent(
        y.flat,
        grad.flat,
        (a, b if grad_prev is not None else 0.0, mu),
        options,
        grad_prev=None if grad_prev is None else grad_prev.flat,
        **{name: block.flat for name, block in of.items() if name != "x_prev"},
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
    """Shorten each client's gradient to ``options.clip``."""
    if options.clip is not None:
        lengths = torch.stack([part.square().sum(1) for part in grad.parts]).sum(0).sqrt()
        shorter = (options.clip / lengths.clamp(min=1e-30)).clamp(max=1.0).unsqueeze(1)
        for part in grad.parts:
            part *= shorter


Way = bool | Literal["vmap"]
"""The way in which clients are trained: False for one by one, True together by the network's hand-written products,
"vmap" together by torch's batching of functions."""

TURNS = 7
"""The times that each way is timed; the least counts, because other work on the machine disturbs it least."""
STEPS = 4
"""Local steps in a turn."""
COHORT = 16
"""The most clients in a turn, by default."""


def net_of(module: nn.Module, shape: tuple[int, ...], way: Way = True, device: torch.device = CPU) -> Net | None:
    """Return the network of a module whose clients can be trained together, or None: they are trained one by one.

    Args:
        module: of float32 tensors, on the CPU or the device.
        shape: an example's.
        way: False gives None. True gives the products of a perceptron or a convolutional network, on the CPU of at
            most ``MOST_PARAMETERS`` parameters; and on a GPU ``Functional`` for others.
        device: the device of the training.

    Raises:
        RangeError: the way is unknown, or "vmap" and torch cannot batch the model.
    """
    if way not in (True, False, "vmap"):
        raise RangeError(f"together: expected True, False or 'vmap', got {way!r}")
    if way is False:
        return None
    if way == "vmap":
        batched = Functional.of(module, shape, device)
        if batched is None:
            raise RangeError(
                "together: expected a model without buffers, dropout and hooks, whose scores of an example do not "
                "depend on the others, for 'vmap', got another one: train it one by one"
            )
        return batched
    net = Perceptron.of(module, shape) or ConvNet.of(module, shape)
    if device.type == "cpu":
        return net if net is not None and net.n <= MOST_PARAMETERS else None
    return net or Functional.of(module, shape, device)


def can_be_measured(module: nn.Module, shape: tuple[int, ...], device: torch.device = CPU) -> bool:
    """Whether ``fastest`` needs to measure: not one by one, and not for perceptrons, which always gain together.

    The gain of convolutions depends on the machine and on torch's libraries. The arguments are those of ``net_of``.
    """
    net = net_of(module, shape, device=device)
    return net is not None and not isinstance(net, Perceptron)


def fastest(module: nn.Module, shape: tuple[int, ...], *, batch: int, device: torch.device = CPU) -> Way:
    """Measure the fastest way to train clients: one by one, by products, and on a GPU also by "vmap".

    Args:
        module: of float32 tensors, on the CPU; not changed.
        shape: an example's.
        batch: the size of a minibatch.
        device: the device of the training.

    Raises:
        RangeError: the model cannot be trained together.

    Determinism: none. Keep the answer, because the ways differ in rounding.
    Cost: a hundred local steps of one client for each way, on as many threads as torch has.
    """
    took = seconds_of_ways(module, shape, batch=batch, device=device)
    if len(took) == 1:
        raise RangeError("module: expected a network of net_of, got one whose clients are trained one by one")
    return min(took, key=took.__getitem__)


def seconds_of_ways(
    module: nn.Module,
    shape: tuple[int, ...],
    *,
    batch: int,
    device: torch.device = CPU,
    vmap: bool | None = None,
    cohort: int = COHORT,
) -> dict[Way, float]:
    """Return the seconds of a client's step in each possible way; the other arguments are those of ``fastest``.

    Args:
        vmap: whether "vmap" is one of the ways. Default: only on a GPU.
        cohort: the most clients in a call.
    """
    nets: dict[Way, Net] = {}
    if (own := net_of(module, shape, device=device)) is not None and not isinstance(own, Functional):
        nets[True] = own
    batched = Functional.of(module, shape, device) if (device.type != "cpu" if vmap is None else vmap) else None
    if batched is not None:
        nets["vmap"] = batched
    model = FlatModel(copy.deepcopy(module), device)
    random = np.random.default_rng(0)
    inputs = torch.from_numpy(random.random((batch, *shape), np.float32)).to(device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    table = Table(np.tile(np.arange(batch), (STEPS, 1)), np.full(STEPS, batch))
    assignment = Assignment(round=0, lr=1e-6)
    x = model.flat.cpu().numpy().copy()

    def one_by_one() -> None:
        sgd(model, inputs, labels, table.indices, assignment)

    def together(net: Net, ys: F32) -> None:
        batched_sgd(net, ys, inputs, labels, [table] * len(ys), [assignment] * len(ys))

    ways: dict[Way, tuple[Callable[[], None], int]] = {False: (one_by_one, 1)}
    for way, net in nets.items():
        clients = min(cohort, net.most_clients(batch, device))
        ways[way] = partial(together, net, np.tile(x, (clients, 1))), clients
    took: dict[Way, float] = dict.fromkeys(ways, float("inf"))
    for turn in range(TURNS + 1):
        for way, (work, clients) in ways.items():
            seconds = _seconds(work, device) / (clients * STEPS)
            took[way] = min(took[way], seconds) if turn else float("inf")  # the first turn warms up
    return took


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    begun = perf_counter()
    with repeatable(device):
        work()
    synchronize(device)
    return perf_counter() - begun
