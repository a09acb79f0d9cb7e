"""fedcore's averaging methods in the place of pfl's sum over a cohort."""

import logging
from collections.abc import Callable, Iterable
from copy import deepcopy
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
from fedcore.adapters.replies import add_reply
from fedcore.algorithms import Algorithm
from fedcore.arguments import absolute_store, integral, reason_of
from fedcore.errors import ArrayError, RoundError
from fedcore.libraries import own_class
from fedcore.memory import to_host
from fedcore.server import Round, RoundReport, Server, Update

LOGGER = logging.getLogger("fedcore.adapters.pfl")
NOTHING = MappedVectorStatistics({}, weight=1.0)
UNLIKE = "statistics: expected the tensors of another user, got others from each"


class Method(Postprocessor, SumAggregator):
    """FedAvg, MIFA, MimiC, FlexibleFedAvg or LocalDescent under pfl's own FederatedAveraging, in one process.

    It is a postprocessor, which hears of each user by its id, and the aggregator, since its rounds do the summing:
    ``SimulatedBackend(train, val, postprocessors=[method], aggregator=method)``. Each user's update is folded in as it
    comes; one that cannot be read or is not finite is rejected by name, in ``reports``. The model's tensors are those
    that two users agree on first; until then updates wait. pfl's central optimiser gets x' - x: with SGD of rate 1 the
    step is the method's own.

    Args:
        algorithm: one of ``fedcore.algorithms`` whose clients take plain steps, or its name.
        users: the ids of the whole population.
        lr: the rate of the local steps.
        steps: K, the local steps of every user, or a function of pfl's UserContext.
        options: further arguments of ``fedcore.Server``: ``store``, ``server_lr``, ...

    A user that is drawn twice for one cohort is an error; pfl's sampler "minimize_reuse" draws without replacement.

    Attributes:
        server: the ``fedcore.Server``, once two users agreed, or a round was finished. Its x starts at zero: it is the
            sum of the updates.
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
            options | {"store": absolute_store(options.get("store", "ram"))},
        )
        self._steps = steps
        self.server: Server | None = None
        self.reports: list[RoundReport] = []
        self._round: Round | None = None
        self._early: list[Update] = []  # copies, until two users agree on the model's tensors
        self._unreadable: list[tuple[str, str]] = []

    def postprocess_one_user(self, *, stats: Any, user_context: UserContext) -> tuple[Any, Metrics]:
        """Fold the user's update in, or reject it by the user's id."""
        steps = self._steps(user_context) if callable(self._steps) else self._steps
        user = user_context.user_id
        try:  # pfl weighs a user by what its strategies made the statistics' weight: 1, or the number of datapoints
            own = bool(stats.weight != 1)  # a quotient is made here; pfl may use its own tensors' memory again
            update = Update(user, steps=steps, examples=integral(stats.weight), delta=_mean(stats), keep=own)
            shapes = _shapes(update)
            if self.server is None:
                update = deepcopy(update)._replace(keep=True)
        except Exception as error:
            self._unreadable.append((user, reason_of(error)))
            return NOTHING, Metrics()
        if self.server is not None:
            return stats if self._add(self.server, update) else NOTHING, Metrics()
        agreed = any(shapes == _shapes(other) for other in self._early)
        self._early.append(update)
        if agreed:
            self._start(shapes)
        return NOTHING, Metrics()

    def _start(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Make the server, and add the updates that came before it."""
        x0 = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.server = open_server(self._algorithm, x0, self._users, lr=self._lr, **self._options)
        early, self._early = self._early, []
        for update in early:
            self._add(self.server, update)

    def _add(self, server: Server, update: Update) -> bool:
        if self._round is None:
            self._round = server.open_round()
        return add_reply(self._round, update.client, lambda: update)

    def accumulate(self, *, accumulated: Any, user_stats: Any) -> Any:
        """Keep the tensors' names alone: the sum is the round's."""
        return accumulated if accumulated is not None and accumulated.num_parameters else user_stats

    def postprocess_server(
        self, *, stats: Any, central_context: CentralContext, aggregate_metrics: Metrics
    ) -> tuple[Any, Metrics]:
        """Finish the round, and give pfl x' - x.

        Raises:
            RoundError: no user was heard: this is no postprocessor of the backend.
        """
        unreadable, self._unreadable = self._unreadable, []
        if len(self._early) == 1:
            self._start(_shapes(self._early[0]))
        unreadable += [(str(update.client), UNLIKE) for update in self._early]
        self._early = []
        if self._round is None and not unreadable:
            raise RoundError("postprocess_server: expected an open round; give the method as postprocessor too")
        if self.server is None:  # nobody said yet what the model's tensors are
            self._tell(RoundReport(0, refused=tuple(unreadable)))
            return NOTHING, Metrics()
        opened, self._round = self.server.open_round() if self._round is None else self._round, None
        for user, reason in unreadable:
            opened.refuse(user, reason)
        before = to_host(self.server.x)
        self._tell(opened.finish())
        step = self.server.layout.unflatten(kernels.combine([to_host(self.server.x), before], [1.0, -1.0]))
        to_tensor = get_default_framework_module().to_tensor
        return MappedVectorStatistics({name: to_tensor(view) for name, view in step.items()}, weight=1.0), Metrics()

    def _tell(self, report: RoundReport) -> None:
        self.reports.append(report)
        if line := refusal_line(report):
            LOGGER.warning(line)


def _mean(stats: Any) -> dict[str, Any]:
    """A user's mean difference by name."""
    delta = {str(name): own_class(str(name), tensor) for name, tensor in stats.items()}
    if not delta:
        raise ArrayError("statistics: expected tensors by name, got none")
    return delta if stats.weight == 1 else {name: tensor / stats.weight for name, tensor in delta.items()}


def _shapes(update: Update) -> dict[str, tuple[int, ...]]:
    return {name: tuple(int(size) for size in tensor.shape) for name, tensor in update.delta.items()}
