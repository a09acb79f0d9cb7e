"""fedcore's averaging methods as the server of FedLab."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fedlab.contrib.algorithm.basic_server import SyncServerHandler

from fedcore.adapters.opening import open_server
from fedcore.adapters.order import with_plain_steps
from fedcore.adapters.refusals import refusal_line
from fedcore.algorithms import Algorithm
from fedcore.errors import FedcoreError
from fedcore.server import Round, RoundReport, Server, Update


class ServerHandler(SyncServerHandler):  # type: ignore[misc, unused-ignore]
    """FedAvg, MIFA, MimiC, FlexibleFedAvg or LocalDescent under FedLab's pipelines and network managers.

    Each upload is folded in as it comes and forgotten; one that cannot be believed is left out, by client and reason in
    ``reports``, and the round goes on. An upload is ``[parameters]`` of FedLab's own trainers, or
    ``[parameters, claims]`` with claims an integer tensor (client, steps, examples). Without claims the k-th upload of
    a round is that of the k-th client of ``sample_clients``, as StandalonePipeline delivers them; over a network, where
    they come in any order, methods that keep a row per client need the claims.

    Args:
        model: its parameters are the federated model; FedLab leaves buffers alone.
        global_round: rounds of the whole run.
        sample_ratio: the share of the clients that takes part in a round.
        algorithm: one of ``fedcore.algorithms`` whose clients take plain steps, or its name.
        lr: the rate of the local steps.
        steps: K, of an upload without claims (1), and the most that claims may say, unless ``max_steps`` does.
        evaluate: called with the model at each ``evaluate()``.
        store: "ram", or "mmap:PATH" so that a later run goes on after the last finished round.
        options: further arguments of ``fedcore.Server``.

    Attributes:
        server: the ``fedcore.Server``, once FedLab has said how many clients there are.
        reports: the ``RoundReport`` of each round.

    Raises:
        RangeError: the method's clients take no plain steps, or ``lr`` differs between the steps of a round.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        global_round: int,
        sample_ratio: float,
        algorithm: Algorithm | str = "MimiC",
        *,
        lr: float,
        steps: int | None = None,
        evaluate: Callable[[torch.nn.Module], Any] | None = None,
        store: str = "ram",
        logger: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(model, global_round, sample_ratio, logger=logger)
        self._algorithm, self._steps, self._evaluate = with_plain_steps(algorithm, lr), steps, evaluate
        self._options = {"lr": lr, "store": store, "steps": steps, **options}
        self.server: Server | None = None
        self.reports: list[RoundReport] = []
        self._round: Round | None = None
        self._sampled: list[int] = []
        self._uploads = 0

    @property
    def downlink_package(self) -> list[torch.Tensor]:
        """``[x]``, float32[n]."""
        self._start()
        return [self.model_parameters]

    def sample_clients(self) -> list[int]:
        """FedLab's draw, which also says whose the round's uploads are."""
        self._start()
        self._sampled = super().sample_clients()
        return self._sampled

    def load(self, payload: list[torch.Tensor]) -> bool:
        """Fold an upload in; whether it was the round's last, which finishes the round."""
        server = self._start()
        if self._round is None:
            self._round = server.open_round()
        self._uploads += 1
        try:
            self._round.add_update(self._update(payload))
        except FedcoreError as error:  # a client that nobody knows, or one that answers twice
            self._LOGGER.warning(f"upload {self._uploads} of round {self.round}: {error}")
        if self._uploads < self.num_clients_per_round:
            return False
        self.global_update([])
        return True

    def global_update(self, buffer: Any) -> None:
        """Finish the round; the uploads are folded in already."""
        if self._round is not None and self.server is not None:
            opened, self._round, self._uploads = self._round, None, 0
            self.reports.append(report := opened.finish())
            if line := refusal_line(report):
                self._LOGGER.warning(line)
            self.round = self.server.round_number
            self.set_model(torch.from_numpy(self.server.x.copy()))

    def setup_optim(self) -> None:
        """Nothing: the method's options are arguments of ``__init__``."""

    def evaluate(self) -> Any:
        """What the caller's function says of the model."""
        return None if self._evaluate is None else self._evaluate(self.model)

    def _start(self) -> Server:
        if self.server is None:
            x0 = self.model_parameters.numpy()
            self.server = open_server(self._algorithm, x0, range(self.num_clients), **self._options)
            self.round = self.server.round_number
            self.set_model(torch.from_numpy(self.server.x.copy()))
        return self.server

    def _update(self, payload: Any) -> Update:
        y, *rest = payload if isinstance(payload, list | tuple) and payload else [payload]
        if not rest:
            return Update(self._sampled[self._uploads - 1], y, self._steps or 1)
        claims = np.asarray(rest[0]).reshape(-1).tolist()
        client, steps, examples = claims if len(claims) == 3 else (-1, 0, 0)
        return Update(client, y, steps, examples)
