"""The worker of the engine on Ray: what runs in its own process, on whatever machine."""

import os
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore.assignment import Assignment
from fedcore.data import Dataset
from fedcore.engines.orders import Orders
from fedcore.registries import load_module
from fedcore.runtime import hide_warnings_of_others, set_threads
from fedcore.typing import F32


class Trained(NamedTuple):
    """The models that the clients of a task made of x.

    Attributes:
        ys: float32[k, n].
        controls: float32[k, n_parameters], the second vectors, or None where none was asked for.
        steps: that each did.
        rates: the mean rate of each.
    """

    ys: npt.NDArray[np.float32]
    controls: npt.NDArray[np.float32] | None
    steps: list[int]
    rates: list[float]


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
        return os.getpid()

    def train(
        self,
        common: Assignment,
        clients: Sequence[int],
        steps: Sequence[int],
        x: F32,
        x_prev: F32 | None,
        shared: F32 | None,
        *own: F32,
    ) -> Trained:
        """Train some clients.

        Args:
            common: what all are asked alike, without vectors.
            clients, steps: who they are, and the steps of each.
            x, x_prev: the models that were sent.
            shared: the offset that all have, or None.
            own: the offset of each, where each has its own.
        """
        common = replace(common, x_prev=x_prev)
        offsets = dict(zip(clients, own, strict=True)) if own else {}

        def of(client: int) -> Assignment:
            return replace(common, offset=offsets.get(client, shared))

        done = Trained(np.empty((len(clients), len(x)), np.float32), None, [], [])
        orders = Orders(clients, steps, [1] * len(clients), x, common, of)
        for place, (_, y, work) in enumerate(self._engine.trained(orders)):
            done.ys[place] = y
            if work.control is not None:
                if done.controls is None:
                    done = done._replace(controls=np.empty((len(clients), len(work.control)), np.float32))
                assert done.controls is not None
                done.controls[place] = work.control
            done.steps.append(work.steps)
            done.rates.append(work.lr)
        return done
