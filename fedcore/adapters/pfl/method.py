"""fedcore's averaging methods in the place of pfl's sum over a cohort."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from pfl.aggregate.base import SumAggregator
from pfl.context import CentralContext, UserContext
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics
from pfl.postprocessor.base import Postprocessor
from pfl.stats import MappedVectorStatistics

from fedcore import kernels
from fedcore.adapters.open_server import open_server
from fedcore.adapters.order import with_plain_steps
from fedcore.adapters.refusals import refusal_line
from fedcore.algorithms import Algorithm
from fedcore.errors import RoundError
from fedcore.memory import to_host
from fedcore.server import Round, RoundReport, Server

LOGGER = logging.getLogger("fedcore.adapters.pfl")


class Method(Postprocessor, SumAggregator):
    """FedAvg, MIFA, MimiC, FlexibleFedAvg or LocalDescent under pfl's own FederatedAveraging, in one process.

    It is a postprocessor, which hears of each user by its id, and the aggregator, since its rounds do the summing:
    ``SimulatedBackend(train, val, postprocessors=[method], aggregator=method)``. Each user's update is folded in as it
    comes; one that is not finite is left out by name, in ``reports``. pfl's central optimiser gets x' - x: with SGD of
    rate 1 the step is the method's own.

    Args:
        algorithm: one of ``fedcore.algorithms`` whose clients take plain steps, or its name.
        users: the ids of the whole population.
        lr: the rate of the local steps.
        steps: K, the local steps of every user, or a function of pfl's UserContext.
        options: further arguments of ``fedcore.Server``: ``store``, ``server_lr``, ...

    A user that is drawn twice for one cohort is an error; pfl's sampler "minimize_reuse" draws without replacement.

    Attributes:
        server: the ``fedcore.Server``, once a user was heard. Its x starts at zero: it is the sum of the updates.
        reports: the ``RoundReport`` of each central iteration.

    Raises:
        RangeError: the method's clients take no plain steps, or ``lr`` differs between the steps of a round.
    """

    def __init__(
        self,
        algorithm: Algorithm | str,
        users: Iterable[str],
        *,
        lr: float,
        steps: int | Callable[[UserContext], int],
        **options: Any,
    ) -> None:
        self._algorithm, self._users, self._lr, self._options = (
            with_plain_steps(algorithm, lr),
            list(users),
            lr,
            options,
        )
        self._steps = steps
        self.server: Server | None = None
        self.reports: list[RoundReport] = []
        self._round: Round | None = None

    def postprocess_one_user(self, *, stats: Any, user_context: UserContext) -> tuple[Any, Metrics]:
        """Fold the user's update in."""
        update = dict(stats.items())
        if self.server is None:
            x0 = {name: np.zeros(tuple(tensor.shape), np.float32) for name, tensor in update.items()}
            self.server = open_server(self._algorithm, x0, self._users, lr=self._lr, **self._options)
        if self._round is None:
            self._round = self.server.open_round()
        if stats.weight != 1:
            update = {name: tensor / stats.weight for name, tensor in update.items()}
        steps = self._steps(user_context) if callable(self._steps) else self._steps
        self._round.add(
            user_context.user_id,
            steps=steps,
            examples=user_context.num_datapoints,
            delta=update,
        )
        return stats, Metrics()

    def accumulate(self, *, accumulated: Any, user_stats: Any) -> Any:
        """Keep the tensors' names alone: the sum is the round's."""
        return user_stats if accumulated is None else accumulated

    def postprocess_server(
        self, *, stats: Any, central_context: CentralContext, aggregate_metrics: Metrics
    ) -> tuple[Any, Metrics]:
        """Finish the round, and give pfl x' - x.

        Raises:
            RoundError: no user was heard: this is no postprocessor of the backend.
        """
        if self._round is None or self.server is None:
            raise RoundError("postprocess_server: expected an open round; give the method as postprocessor too")
        opened, self._round = self._round, None
        before = to_host(self.server.x)
        self.reports.append(report := opened.finish())
        if line := refusal_line(report):
            LOGGER.warning(line)
        step = self.server.layout.unflatten(kernels.combine([to_host(self.server.x), before], [1.0, -1.0]))
        to_tensor = get_default_framework_module().to_tensor
        return MappedVectorStatistics({name: to_tensor(view) for name, view in step.items()}, weight=1.0), Metrics()
