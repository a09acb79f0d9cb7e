"""Client training in this process, on the CPU or a GPU: one client after another, or many at once."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fedcore.algorithms.local_rules import LocalRule, Table, along
from fedcore.arrays import F32, I64, Vector, to_host
from fedcore.errors import RangeError
from fedcore.profiling import span, timed
from fedcore.server import Broadcast, Update
from fedcore.server.broadcast import Instructions
from fedcore.sim import sgd
from fedcore.sim.batching.batched_sgd import Way, batched_sgd, in_groups, net_of
from fedcore.sim.batching.layers import Net
from fedcore.sim.data import Dataset
from fedcore.sim.engines import Engine, Evaluation, Minibatches, Parts, Plan, standing
from fedcore.sim.participation import Active
from fedcore.sim.sgd import FlatModel, LocalOptions, Work, on_host, repeatable, seeded, torch_device
from fedcore.store.registry import ClientId
from fedcore.validation import check_integer

Trained = tuple[int, F32, Work]
"""A client, its y, and its ``Work``."""
Group = list[tuple[int, Table, Instructions]]
"""The clients of one call, with their minibatches and instructions."""
A = TypeVar("A")
B = TypeVar("B")


class InProcess(Engine):
    """The engine that trains the clients of a round in this process.

    On the CPU, one call trains many clients together if the model is a perceptron (``layers.Perceptron.of``) or a
    convolutional network (``convolutions.ConvNet.of``) of at most ``batched_sgd.MOST_PARAMETERS`` parameters. Clients
    of other models are trained one by one. On a GPU, clients are trained together if the model can be batched, possibly
    by torch's own batching (``layers.Functional.of``).

    Args:
        module: the model, on the CPU. The engine copies it and does not change it.
        dataset: clients have its training examples; ``evaluate`` uses its test examples.
        parts: client i has the training examples ``parts[i]``, int64[m_i].
        batch: the size of a minibatch.
        epochs, steps: the number of local passes over the client's examples, or of local steps. Exactly one of the two.
        seed: the run's seed, on which the minibatches depend.
        options: weight decay, momentum and clipping of the local steps.
        together: whether to train clients together if possible. "vmap" uses torch's batching, even on the CPU and for
            networks with hand-written products. ``batched_sgd.fastest`` measures the fastest way.
        threads: the maximum number of concurrent calls that train clients together. Torch's own threads are additional,
            and are best set to 1. A GPU runs one call at a time.
        device: the device of the model, the data set and all work: "cpu", or a GPU such as "cuda" or "cuda:1". Vectors
            from and to the server are in host memory: x, offsets and y are copied once for each client.

    Attributes:
        initial: float32[n], a copy of the module's initial values: x_0.
        parts: the clients' examples and minibatches.

    Raises:
        RangeError: an argument is out of range; ``together`` is "vmap" and torch cannot batch the model; or a copy of
            the module would compute something else (``sgd.copy_of``).
        DtypeError, ArrayError: ``FlatModel`` does not support the module.
        UnknownNameError, DeviceError: torch has no such device.

    Determinism: on one torch thread of the CPU, an update depends only on the seed, the broadcast and the client. The
        module must draw random numbers from torch only, and keep its state in parameters and buffers: each client
        starts with the counters and non-persistent buffers of the given module. Rounding may depend on:

        - the number of torch threads; with several, also on the number of clients that are trained together;
        - the way of training, which depends only on the model, the device and ``together``;
        - the kind of device, on which dropout masks depend too, but not participants or minibatches;
        - on a GPU, the other clients in the same call. A repeated run has the same bits with the same torch on the same
          kind of GPU.
    """

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        parts: Sequence[I64],
        *,
        batch: int,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int,
        options: LocalOptions | None = None,
        together: Way = True,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        self._device = torch_device(device)
        sizes = Minibatches(batch, epochs, steps, seed)
        self.parts = Parts(parts, len(dataset.train_y), sizes, options or LocalOptions())
        module = sgd.copy_of(module)  # ``FlatModel`` changes it
        self._net = net_of(module, dataset.train_x.shape[1:], together, self._device)
        self._model = FlatModel(module, self._device)
        threads = check_integer("threads", threads, 1)
        self._threads = threads if self._device.type == "cpu" else 1
        self._train = self._on_device(dataset.train_x), self._on_device(dataset.train_y)
        self._test = self._on_device(dataset.test_x), self._on_device(dataset.test_y)
        self._previous: FlatModel | None = None
        self.initial: F32 = self._model.flat.cpu().numpy().copy()

    def _on_device(self, examples: Vector) -> torch.Tensor:
        return torch.from_numpy(examples).to(self._device)

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast: each client, or each group in one call, when its update is read.

        One by one on the CPU, all updates share one buffer: ``value`` is a writable view of the model. The server folds
        it at once, and the next client overwrites it; copy it to keep it. Otherwise each update has its own memory, and
        ``keep`` is true.

        Args:
            broadcast: the server's broadcast; its ids are indices into ``parts``.
            active: as for ``Engine.updates``.

        Yields:
            An ``Update`` for each id, in the order of the ids: y float32[n], the number of steps and of the client's
            examples, the mean of its rates, and how often the client was drawn.

        Raises:
            UnknownClientError: an id is not an index into ``parts``.
            RangeError: ``active`` has other clients than the broadcast; or the method needs clients that keep rows, an
                unknown second vector, or plain steps although there is local momentum or clipping.
        """
        yield from timed("train", self._updates(self.parts.plan(broadcast.on_host(), active)))

    def _updates(self, plan: Plan) -> Iterator[Update]:
        keep = self.together or self._device.type != "cpu"
        for (client, y, work), count in zip(self.trained(plan), plan.counts, strict=True):
            sent: dict[str, Any] = {"count": count, "control": work.control, "loss": work.loss, "keep": keep}
            yield Update(client, y, work.steps, len(self.parts[client]), work.lr, **sent)

    def trained(self, plan: Plan) -> Iterator[Trained]:
        """Train clients by a plan, as ``updates`` does; yield the y and the work of each."""
        trained = self._one_by_one(plan) if self._net is None else self._in_groups(self._net, plan)
        return self._with_losses(plan, trained) if plan.sent.common.needs_loss else trained

    def _with_losses(self, plan: Plan, trained: Iterator[Trained]) -> Iterator[Trained]:
        """Add each client's loss at x, which is computed before the first client is trained."""
        self._model.load(plan.sent.x)
        losses = dict[int, float]()
        for client in plan.clients:
            with self._fixed("local: loss", round=plan.sent.common.round, client=client):
                losses[client] = sgd.mean_loss(self._model, *self._train, self.parts[client])
        for client, y, work in trained:
            yield client, y, replace(work, loss=losses[client])

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, F32]:
        """Return the mean of each client's minibatch gradients at a broadcast's x, for a warm start.

        The result is float32[n_parameters] by client. The minibatches differ from those of every round; ``minibatches``
        is their number for each client (default: the number of local steps in a round). A local rule that combines all
        minibatches into one gives one gradient over all of them.
        """
        plan = self.parts.plan(standing(broadcast.on_host()), None, minibatches=minibatches)
        return {update.client: np.array(update.control) for update in self._updates(plan)}

    def evaluate(self, x: F32) -> Evaluation:
        """Return accuracy and loss of a model on the test set.

        ``x`` is float32[n], read-only, in host memory or on a server's device. The result has the same bits for the
        same x and number of torch threads, on one kind of device.
        """
        with span("evaluate"), self._fixed("evaluation"):
            self._model.load(to_host(x))
            return Evaluation(*sgd.scored(self._model, *self._test))

    @contextmanager
    def _fixed(self, purpose: str, **of: int) -> Iterator[None]:
        """Compute with random numbers that depend only on the arguments, and with reproducible bits."""
        with seeded(self.parts.seed, purpose, device=self._device, **of), repeatable(self._device):
            yield

    @property
    def together(self) -> bool:
        """Whether clients are trained together."""
        return self._net is not None

    def _one_by_one(self, plan: Plan) -> Iterator[Trained]:
        sent, x, common = plan.sent, plan.sent.x, plan.sent.common
        rule, round = common.local_rule, common.round
        previous = None if common.x_prev is None else self._model_at(common.x_prev)
        for client, steps in zip(plan.clients, plan.steps, strict=True):
            told = sent.of(client)
            self._model.load(x if told.start is None else told.start)
            self._model.module.train()
            part = self.parts[client]
            own = islice(self.parts.minibatches(round, client, rule, max(1, steps)), steps)
            batches = along(rule, own, len(part))
            with self._fixed("local: dropout", round=round, client=client):
                options: dict[str, Any] = {"x": x[: self._model.layout.n_parameters], "options": self.parts.options}
                own_batches = (part[indices] for indices in batches)
                try:
                    work = sgd.sgd(self._model, *self._train, own_batches, told, previous=previous, **options)
                except ValueError as error:
                    if "per channel" not in str(error):
                        raise
                    raise RangeError(f"client {client}: {error}; choose another local.batch or local.steps") from error
            yield client, on_host(self._model.flat), work

    def _in_groups(self, net: Net, plan: Plan) -> Iterator[Trained]:
        sent, common, clients = plan.sent, plan.sent.common, plan.clients
        rule, round = common.local_rule, common.round
        work = zip(clients, plan.steps, strict=True)
        pairs = ((client, self.parts.table(round, client, rule, steps)) for client, steps in work)
        share = max(1, -(-len(clients) // self._threads))  # so that all threads get the same number of calls
        calls = -(-share // net.most_clients(min(self.parts.batch(rule), self.parts.largest), self._device))
        groups = (
            [(client, table, sent.of(client)) for client, table in group]
            for group in in_groups(net, pairs, -(-share // calls), self._device)
        )
        for trained in _map_ahead(partial(self._train_group, net, sent.x), groups, self._threads):
            yield from trained

    def _train_group(self, net: Net, x: F32, group: Group) -> list[Trained]:
        ys, work = np.tile(x, (len(group), 1)), [(table, told) for _, table, told in group]
        for y, (_, told) in zip(ys, work, strict=True):
            if told.start is not None:
                y[:] = told.start
        with repeatable(self._device):
            works = batched_sgd(net, ys, self._train, work, x=x, options=self.parts.options)
        return [(client, y, own) for (client, _, _), y, own in zip(group, ys, works, strict=True)]

    def most_steps(self, local_rule: LocalRule) -> int:
        """Return the maximum of E over all clients; see ``Engine``."""
        return self.parts.most_steps(local_rule)

    def _model_at(self, x_prev: F32) -> FlatModel:
        """Return a second model that holds x_{t-1}, for methods that need a gradient there."""
        if self._previous is None:
            self._model.load(x_prev)  # resets the other buffers
            self._previous = FlatModel(sgd.copy_of(self._model.module), self._device)
        self._previous.load(x_prev)
        self._previous.module.train()
        return self._previous


def _map_ahead(function: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """Yield the results of ``map`` on threads. The caller's thread makes each item shortly before a thread needs it."""
    if threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[B]] = deque()
    # A new thread uses torch's number of threads only after it has read the number; until then MKL uses all cores.
    with ThreadPoolExecutor(threads, "fedcore clients", initializer=torch.get_num_threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
