"""Clients that come into an objective and leave it: what the server is told, and on whose examples it is judged."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from torch import nn

from fedcore.algorithms.rates import Rate, Staircase
from fedcore.data import Dataset
from fedcore.engines.inprocess import Evaluation, InProcess
from fedcore.experiment.objective import Objective
from fedcore.participation import Participation, Schedule
from fedcore.server import Server
from fedcore.store import ClientId

F32 = npt.NDArray[np.float32]


@dataclass
class Course:
    """How the objective changes in the course of a trial.

    Args:
        objective: what arrivals and departures mean.
        pattern: the participation, with a ``Schedule`` in its composition, or without.
        sizes: n_k of each client.
    """

    objective: Objective
    pattern: Participation
    sizes: Sequence[int]
    arrivals: dict[int, int] = field(init=False)
    departures: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.arrivals, self.departures = {}, {}
        inner: Participation | None = self.pattern
        while inner is not None:
            if isinstance(inner, Schedule):
                self.arrivals |= {client: round for client, round in inner.arrivals.items() if round > 0}
                self.departures |= inner.departures
            inner = inner.among

    @property
    def excludes(self) -> bool:
        """Whether the objective forgets who departs."""
        return self.objective.departures == "exclude"

    def start(self) -> dict[ClientId, int]:
        """n_k of the clients that are in the objective in round 0."""
        return {client: size for client, size in enumerate(self.sizes) if client not in self.arrivals}

    def begin(self, server: Server, round: int) -> None:
        """Tell the server who comes and who goes before this round."""
        arriving = [client for client, at in self.arrivals.items() if at == round]
        server.arrive_all(arriving, examples=[self.sizes[client] for client in arriving])
        for client in [client for client, at in self.departures.items() if at == round]:
            server.depart(client, from_objective=self.excludes)

    def rate(self, rate: Rate) -> Rate:
        """The rate, which begins anew where the objective changes."""
        if self.objective.restart and isinstance(rate, Staircase):
            for round in {*self.arrivals.values(), *(self.departures.values() if self.excludes else ())}:
                rate = rate.restarted(round)
        return rate

    def judged_by(self, round: int) -> frozenset[int]:
        """The clients on whose test examples the model of this round is judged."""
        gone = self.departures if self.excludes or self.objective.test == "present" else {}
        return frozenset(
            client
            for client in range(len(self.sizes))
            if self.arrivals.get(client, 0) <= round < gone.get(client, round + 1)
        )


class Judges:
    """Evaluates a model on the test examples of the clients that count in a round.

    Args:
        course: who that is.
        module: the model, of which copies are made.
        dataset, parts, batch: as for ``InProcess``.
    """

    def __init__(
        self, course: Course, module: nn.Module, dataset: Dataset, parts: Sequence[npt.NDArray[np.int64]], batch: int
    ) -> None:
        self._course, self._module = course, copy.deepcopy(module)
        self._dataset, self._parts, self._batch = dataset, parts, batch
        self._engines: dict[frozenset[int], InProcess] = {}

    def evaluate(self, round: int, x: F32) -> Evaluation:
        """Accuracy and loss of x, float32[n], on those examples."""
        clients = self._course.judged_by(round)
        if clients not in self._engines:
            chosen = test_examples(self._dataset, self._parts, clients)
            test_x, test_y = self._dataset.test_x[chosen], self._dataset.test_y[chosen]
            judged = replace(self._dataset, test_x=test_x, test_y=test_y, test_parts=None)
            module = copy.deepcopy(self._module)
            self._engines[clients] = InProcess(module, judged, self._parts, batch=self._batch, steps=1, seed=0)
        return self._engines[clients].evaluate(x)


def test_examples(
    dataset: Dataset, parts: Sequence[npt.NDArray[np.int64]], clients: frozenset[int]
) -> npt.NDArray[np.int64]:
    """The test examples of some clients: their own, where the data says so, else those of the classes that they hold.

    Returns:
        Ascending indices into ``dataset.test_y``.
    """
    if dataset.test_parts is not None:
        return np.sort(np.concatenate([dataset.test_parts[client] for client in sorted(clients)]))
    held = np.unique(np.concatenate([dataset.train_y[parts[client]] for client in sorted(clients)]))
    return np.flatnonzero(np.isin(dataset.test_y, held))
