"""The contract of an engine: who does the clients' work of a simulation, and evaluates its models."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import MEAN_GRADIENT, Algorithm, FedAvgM, MimiC, is_made_here
from fedcore.clients import ClientId
from fedcore.errors import RangeError
from fedcore.local_rules import LocalRule
from fedcore.participation import Active
from fedcore.server import Broadcast, Update


@dataclass(frozen=True)
class Evaluation:
    """A model's result on a test set: the share of right answers, and the mean cross entropy."""

    accuracy: float
    loss: float


class Engine(Protocol):
    """Client work, wherever it is done: in this process, or in others."""

    @property
    def together(self) -> bool:
        """Tell whether clients are trained together."""

    @property
    def waited(self) -> float:
        """Seconds so far in which updates were waited for, that other processes make; 0 for an engine without any."""

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast, each when it is asked for.

        Args:
            active: the clients of the broadcast with the share of its steps that each does, and how often it was
                drawn; None is all steps, once.

        Yields:
            An ``Update`` for each id, in their order, unless the engine is asked for another one; ``y`` may be
            overwritten by the next one unless it says ``keep``.
        """

    def gradients(
        self, broadcast: Broadcast, minibatches: int | None = None
    ) -> dict[ClientId, npt.NDArray[np.float32]]:
        """The mean of each client's minibatch gradients at a broadcast's x, float32[n_parameters] by client.

        Args:
            minibatches: how many each takes; None is as many as a round has local steps.
        """

    def evaluate(self, x: npt.NDArray[np.float32]) -> Evaluation:
        """Accuracy and loss of a model, float32[n], on the engine's test set."""

    def most_steps(self, local_rule: LocalRule) -> int:
        """The most local steps that a client's complete work has, of all clients."""

    def close(self) -> None:
        """Give back what the engine holds beside memory, such as other processes."""


def check_method(algorithm: Algorithm) -> None:
    """Refuse a method that asks clients for what those of an engine cannot do.

    Raises:
        RangeError: clients would have to keep what nobody here knows how to make (``KeepingClients`` does the rows of
            MimiC and of the SCAFFOLDs, ``RecoveringClients`` FedAvg-M's momentum), or send such a second vector.
    """
    if not (algorithm.sends_row_change or (algorithm.rows_at_clients and isinstance(algorithm, MimiC | FedAvgM))):
        check_asked(algorithm.rows_at_clients, algorithm.second_vector)


def check_asked(keeps_row: bool, second: str | None) -> None:
    """``check_method``, of what a broadcast says."""
    if keeps_row:
        raise RangeError(
            "placement: expected 'server', or clients that keep rows as MimiC's and SCAFFOLD's do"
            " (engines.KeepingClients), got 'client'"
        )
    if not is_made_here(second):
        raise RangeError(
            f"second_vector: expected None or {MEAN_GRADIENT!r}, all that simulated clients can send beside y, got "
            f"{second!r}: train in a loop of your own"
        )
