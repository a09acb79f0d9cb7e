"""Clients that come into an objective and leave it: what the server is told, and on whose examples it is judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fedcore.clients import ClientId
from fedcore.data import Dataset
from fedcore.engines import Engine, Evaluation
from fedcore.experiment.schema.objective import Objective
from fedcore.participation import Participation, Schedule
from fedcore.rates import InverseRound, Rate, Staircase
from fedcore.server import Server
from fedcore.typing import F32


@dataclass
class ChangingObjective:
    """The changes of the objective in the course of a trial.

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
        """Tell whether the objective forgets who departs."""
        return self.objective.departures == "exclude"

    def start(self) -> dict[ClientId, int]:
        """n_k of the clients that are in the objective in round 0."""
        return {client: size for client, size in enumerate(self.sizes) if client not in self.arrivals}

    def begin(self, server: Server, round: int) -> None:
        """Tell the server who comes and who goes before this round."""
        arriving = [client for client, at in self.arrivals.items() if at == round]
        server.arrive(arriving, client_sizes=[self.sizes[client] for client in arriving])
        for client in [client for client, at in self.departures.items() if at == round]:
            server.depart(client, from_objective=self.excludes)

    def rate(self, rate: Rate) -> Rate:
        """The rate, which begins anew where the objective changes."""
        if self.objective.restart and isinstance(rate, Staircase | InverseRound):
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


class TestSets:
    """Evaluates a model on the test examples of the clients that count in a round.

    Args:
        changing: who that is.
        dataset: the whole test set.
        parts: client i holds the training examples ``parts[i]``, int64[m_i].
        engine_on: an engine of the model on a data set.
    """

    def __init__(
        self,
        changing: ChangingObjective,
        dataset: Dataset,
        parts: Sequence[npt.NDArray[np.int64]],
        engine_on: Callable[[Dataset], Engine],
    ) -> None:
        self._changing, self._dataset, self._parts, self._engine_on = changing, dataset, parts, engine_on
        self._engines: dict[frozenset[int], Engine] = {}

    def evaluate(self, round: int, x: F32) -> Evaluation:
        """Accuracy and loss of x, float32[n], on those examples."""
        clients = self._changing.judged_by(round)
        if clients not in self._engines:
            chosen = test_examples(self._dataset, self._parts, clients)
            test_x, test_y = self._dataset.test_x[chosen], self._dataset.test_y[chosen]
            judged = replace(self._dataset, test_x=test_x, test_y=test_y, test_parts=None)
            self._engines[clients] = self._engine_on(judged)
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
