"""The worker of the engine on Ray: what runs in its own process, on whatever machine."""

import os
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedcore.assignment import Assignment
from fedcore.data import Dataset
from fedcore.engines.orders import Orders
from fedcore.engines.ray.trained import Ranges, Trained
from fedcore.registries import load_module
from fedcore.runtime import hide_warnings_of_others, set_threads
from fedcore.typing import F32


class Asked(NamedTuple):
    """A task, without its vectors.

    Attributes:
        common: what all its clients are asked alike.
        clients, steps: who they are, and the steps of each.
        has_x_prev: whether x_prev comes too.
        offsets: vectors that come beside: none, one for all, or one for each.
        ranges: of the slices that each vector comes in, and goes back in; None where all are whole.
    """

    common: Assignment
    clients: Sequence[int]
    steps: Sequence[int]
    has_x_prev: bool
    offsets: int
    ranges: Ranges | None


class Trainer:
    """An object of a worker's process, which trains clients by their orders."""

    def prepare(
        self, imports: Sequence[str], module: bytes, dataset: Dataset, parts: Sequence[Any], options: dict[str, Any]
    ) -> int:
        """Make the engine; returns the number of this process.

        Args:
            imports: modules, or paths of files, that are imported first.
            module: the model, pickled, since its class may come with one of these.
            dataset: the training examples.
            parts, options: as for ``InProcess``.
        """
        import torch

        from fedcore.engines.inprocess import InProcess

        hide_warnings_of_others()
        torch.set_num_threads(1)  # the order of torch's sums depends on it
        set_threads(options.get("threads", 1))
        for name in imports:
            load_module(name)
        with warnings.catch_warnings():
            # Of the object store's memory, which is read-only, as what is trained on is only read.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            self._engine = InProcess(pickle.loads(module), dataset, parts, **options)
        self._room: dict[str, F32] = {}
        return os.getpid()

    def train(self, asked: Asked, *vectors: F32) -> Trained | list[Any]:
        """Train some clients.

        Args:
            vectors: x, x_prev and the offsets, each in as many slices as there are.

        Returns:
            what they did; and each slice behind it, where the vectors came in slices.
        """
        orders = Orders(asked.clients, asked.steps, [1] * len(asked.clients), _Came(asked, vectors, self._room))
        done = Trained([], [], [], [])
        for _, y, work in self._engine.trained(orders):
            done.ys.append(np.array(y))
            if work.control is not None:
                done.controls.append(work.control)
            done.steps.append(work.steps)
            done.rates.append(work.lr)
        return done if asked.ranges is None else done.cut(asked.ranges)


class _Came:
    """A ``Sent`` of the vectors that came; slices are copied into one vector, as into a model.

    Args:
        room: for the vectors that all clients share, kept from task to task.
    """

    def __init__(self, asked: Asked, vectors: Sequence[F32], room: dict[str, F32]) -> None:
        pieces = 1 if asked.ranges is None else len(asked.ranges)
        each = [vectors[start : start + pieces] for start in range(0, len(vectors), pieces)]
        names = ["x", *["x_prev"] * asked.has_x_prev, *["offset"] * (asked.offsets == 1)]
        shared = {name: _whole(parts, room, name) for name, parts in zip(names, each, strict=False)}
        self.x = shared.pop("x")
        self.common = replace(asked.common, x_prev=shared.pop("x_prev", None))
        self._offset = shared.pop("offset", None)
        own = each[len(names) :]
        self._own = dict(zip(asked.clients, own, strict=True)) if own else {}

    def of(self, client: int) -> Assignment:
        """See ``Sent``."""
        own = self._own.get(client)
        return replace(self.common, offset=self._offset if own is None else _whole(own, {}, "offset"))


def _whole(parts: Sequence[F32], room: dict[str, F32], name: str) -> F32:
    """A vector of its slices, in a room of that name; of one slice, that."""
    if len(parts) == 1:
        return parts[0]
    n = sum(map(len, parts))
    if len(room.get(name, ())) != n:
        room[name] = np.empty(n, np.float32)
    return np.concatenate(parts, out=room[name])
