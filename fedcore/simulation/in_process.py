"""Client work in this process, on the CPU or a GPU: one client after another, or many models at once."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore.arguments import whole
from fedcore.arrays import to_host
from fedcore.profiling import span, timed
from fedcore.server import Broadcast, Update
from fedcore.server.instructions import Instructions
from fedcore.simulation.batching.batched_sgd import Way, batched_sgd, in_groups, net_of
from fedcore.simulation.batching.layers import Net
from fedcore.simulation.data import Dataset
from fedcore.simulation.engines import Evaluation, Parts, Plan, standing
from fedcore.simulation.local_rules import LocalRule, Table
from fedcore.simulation.participation import Active
from fedcore.simulation.sgd import FlatModel, LocalOptions, Work, sgd
from fedcore.simulation.torch_device import on_host, repeatable, seeded, torch_device
from fedcore.store.registry import ClientId

EVALUATION_BATCH = 500
"""Test examples at a time: enough to hide the cost of a call, few enough for LeNet's activations to stay in cache
(10,000 images on one core: 0.33 s; with 1,000 at a time 0.54 s)."""

Trained = tuple[int, npt.NDArray[np.float32], Work]
"""A client, its y, and its work."""
Group = list[tuple[int, Table, Instructions]]
"""Clients that share a call, with their minibatches and instructions."""
A = TypeVar("A")
B = TypeVar("B")

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class InProcess:
    """The engine that trains the clients of a round in this process, on their parts of a data set.

    Clients of a perceptron or a convolutional network (``local.perceptron.Perceptron.of`` and
    ``local.convnet.ConvNet.of`` say what is one) of at most ``local.batched_sgd.MOST_PARAMETERS`` parameters are
    trained together, many in one call; of any other model one by one. On a GPU all are trained together whose model
    can be, also by torch's own batching of functions (``local.functional.Functional.of`` says what else that is).

    Args:
        module: the model, on the CPU; it is taken over (see ``FlatModel``).
        dataset: its training examples are the clients', its test examples are for ``evaluate``.
        parts: client i holds the training examples ``parts[i]``, int64[m_i].
        batch: the size of a minibatch.
        epochs: local passes over the client's examples, or
        steps: local steps. One of the two.
        seed: the run's seed, on which the minibatches depend.
        options: weight decay, momentum and clipping of the local steps.
        together: False trains one by one whatever the model is, "vmap" by torch's batching also where the network has
            products of its own, or on the CPU. (``local.together.fastest`` measures which is faster.)
        threads: how many calls of clients that are trained together may run at once. Torch's own threads come on top of
            these, and are best set to 1. On a GPU it is one call at a time.
        device: where the model, the data set and all work lie: "cpu", or a GPU's "cuda" or "cuda:1". What comes from
            the server, and goes to it, lies in host memory: x, offsets and y are moved once for each client.

    Attributes:
        initial: float32[n], a copy of the module's values as they came: x_0.
        together: whether clients are trained together.
        parts: the clients' examples and minibatches.

    Raises:
        RangeError: there is no part, one is empty or points outside the training examples, or a number is out
            of range; or "vmap" is asked of a model that torch cannot batch.
        DtypeError, ArrayError: the module is none that ``FlatModel`` takes.
        UnknownNameError, DeviceError: torch has no such device.

    Determinism: on one thread of torch's an update depends on the seed, the broadcast and the client, not on those
    trained before or beside it, nor on ``threads``, as long as the module has no integer counters and draws random
    numbers in its dropout layers only. On several, torch adds up clients that are trained together in an order that
    depends on how many there are. The way depends only on the model, the device and ``together``,
    and the ways differ in rounding. So do kinds of device: participants and minibatches are the same on each, masks of
    dropout are not. On a GPU, clients that share a call may have other bits in another company; a run that is
    repeated on the same kind of GPU, by the same torch, is due to have the same.
    """

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        parts: Sequence[npt.NDArray[np.int64]],
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
        self.parts = Parts(
            parts,
            len(dataset.train_y),
            batch=batch,
            epochs=epochs,
            steps=steps,
            seed=seed,
            options=options or LocalOptions(),
        )
        self._net = net_of(module, dataset.train_x.shape[1:], together, self._device)
        self._model = FlatModel(module, self._device)
        threads = whole("threads", threads, 1)
        self._threads = threads if self._device.type == "cpu" else 1
        self._drops_out = any(isinstance(layer, DROPOUT) for layer in module.modules())
        self._train = self._there(dataset.train_x), self._there(dataset.train_y)
        self._test = self._there(dataset.test_x), self._there(dataset.test_y)
        self._previous: FlatModel | None = None
        self.initial: npt.NDArray[np.float32] = self._model.flat.cpu().numpy().copy()

    def _there(self, examples: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(examples).to(self._device)

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast, each (or each group that is trained together) when it is asked for.

        One by one, all updates share one buffer: ``y`` is a view of the model itself, and the next client's training
        overwrites it. It is writable, so the server folds it at once; copy ``y`` to keep it longer.
        Together, or from a GPU, each has its own memory, and ``keep`` is true.

        Args:
            broadcast: what the server sent; its ids are indices into ``parts``.
            active: the clients of the broadcast with the share of its steps that each does, and how often it was
                drawn; Default: all steps, once.

        Yields:
            An ``Update`` for each id, in their order: y float32[n], the steps done, the examples that the
            client holds, the mean of its rates, and how often the client was drawn.

        Raises:
            UnknownClientError: an id is no index into ``parts``.
            RangeError: ``active`` is of other clients than the broadcast; or the method asks for clients that keep
                rows, as these do not, for a second vector that they do not know, or for plain steps beside local
                momentum or clipping.
        """
        yield from timed("train", self._updates(self.parts.plan(broadcast.on_host(), active)))

    def _updates(self, plan: Plan) -> Iterator[Update]:
        for (client, y, work), count in zip(self.trained(plan), plan.counts, strict=True):
            yield Update(
                client,
                y,
                work.steps,
                examples=len(self.parts[client]),
                lr=work.lr,
                control=work.control,
                count=count,
                keep=self.together or self._device.type != "cpu",
            )

    def trained(self, plan: Plan) -> Iterator[Trained]:
        """Train clients by a plan, as ``updates`` does: each one's y, and its work."""
        return self._one_by_one(plan) if self._net is None else self._in_groups(self._net, plan)

    def gradients(
        self, broadcast: Broadcast, minibatches: int | None = None
    ) -> dict[ClientId, npt.NDArray[np.float32]]:
        """The mean of each client's minibatch gradients at a broadcast's x, for a warm start.

        Of other minibatches than any round's.

        Args:
            minibatches: how many each takes; Default: as many as a round has local steps. Where the method takes a
                client's minibatches as one, there is one gradient over all of them.

        Returns:
            float32[n_parameters] by client.

        Raises: what ``updates`` does, and
            RangeError: ``minibatches`` is below 1.
        """
        plan = self.parts.plan(standing(broadcast.on_host()), None, minibatches=minibatches)
        return {update.client: np.array(update.control) for update in self._updates(plan)}

    def evaluate(self, x: npt.NDArray[np.float32]) -> Evaluation:
        """Accuracy and loss of a model on the test set.

        Args:
            x: float32[n], read-only, in host memory or of a server on a device.

        Raises:
            DtypeError, ShapeError: ``x`` is not float32[n].

        Determinism: the same bits for the same x and number of torch threads, on one kind of device.
        """
        all_inputs, all_labels = self._test
        right, loss = 0, 0.0
        with span("evaluate"), torch.inference_mode(), repeatable(self._device):
            self._model.load(to_host(x))
            self._model.module.eval()
            for start in range(0, len(all_labels), EVALUATION_BATCH):
                labels = all_labels[start : start + EVALUATION_BATCH]
                scores = self._model.module(all_inputs[start : start + EVALUATION_BATCH])
                right += int((scores.argmax(1) == labels).sum())
                loss += float(cross_entropy(scores, labels, reduction="sum"))
        return Evaluation(right / len(all_labels), loss / len(all_labels))

    def close(self) -> None:
        """Do nothing: this engine holds only memory."""

    @property
    def waited(self) -> float:
        """Zero seconds: see ``Engine``."""
        return 0.0

    @property
    def together(self) -> bool:
        """Whether clients are trained together."""
        return self._net is not None

    def _one_by_one(self, plan: Plan) -> Iterator[Trained]:
        sent, x, common = plan.sent, plan.sent.x, plan.sent.common
        rule, round, seed = common.local_rule, common.round, self.parts.seed
        previous = self._at(common.x_prev)
        for client, most in zip(plan.clients, plan.steps, strict=True):
            self._model.load(x)
            self._model.module.train()
            part = self.parts[client]
            batches = rule.along(islice(self.parts.minibatches(round, client, rule, max(1, most)), most), len(part))
            masks = seeded(seed, "local: dropout", round=round, client=client, device=self._device)
            with masks if self._drops_out else nullcontext(), repeatable(self._device):
                work = sgd(
                    self._model,
                    *self._train,
                    (part[chosen] for chosen in batches),
                    sent.of(client),
                    x=x[: self._model.layout.n_parameters],
                    previous=previous,
                    options=self.parts.options,
                )
            yield client, on_host(self._model.flat), work

    def _in_groups(self, net: Net, plan: Plan) -> Iterator[Trained]:
        sent, common, clients = plan.sent, plan.sent.common, plan.clients
        rule, round = common.local_rule, common.round
        work = zip(clients, plan.steps, strict=True)
        pairs = ((client, self.parts.table(round, client, rule, most)) for client, most in work)
        share = max(1, -(-len(clients) // self._threads))  # so that no thread has a call less than another
        calls = -(-share // net.most_clients(min(self.parts.batch(rule), self.parts.largest), self._device))
        groups = (
            [(client, table, sent.of(client)) for client, table in group]
            for group in in_groups(net, pairs, -(-share // calls), self._device)
        )
        for trained in _ahead(partial(self._train_group, net, sent.x), groups, self._threads):
            yield from trained

    def _train_group(self, net: Net, x: npt.NDArray[np.float32], group: Group) -> list[Trained]:
        clients, tables, assignments = zip(*group, strict=True)
        ys = np.tile(x, (len(group), 1))
        with repeatable(self._device):
            works = batched_sgd(net, ys, *self._train, tables, assignments, x=x, options=self.parts.options)
        return list(zip(clients, ys, works, strict=True))

    def most_steps(self, local_rule: LocalRule) -> int:
        """The most local steps that a client's complete work has, of all clients."""
        return self.parts.most_steps(local_rule)

    def _at(self, x_prev: npt.NDArray[np.float32] | None) -> FlatModel | None:
        """A second model that holds x_{t-1}, for the methods that take a gradient there."""
        if x_prev is None:
            return None
        if self._previous is None:
            self._previous = FlatModel(copy.deepcopy(self._model.module), self._device)
        self._previous.load(x_prev)
        self._previous.module.train()
        return self._previous


def _ahead(function: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """``map``, by so many threads; the items come from the caller's own, each when a thread is about to need it."""
    if threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[B]] = deque()
    # torch gives a thread its number of threads when it first asks for it; until then MKL takes all cores.
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
