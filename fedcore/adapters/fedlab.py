"""fedcore's averaging methods as the server of FedLab."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fedlab.contrib.algorithm.basic_server import SyncServerHandler

from fedcore.adapters.opening import open_server
from fedcore.adapters.order import with_plain_steps
from fedcore.adapters.refusals import refusal_line, silence
from fedcore.algorithms import Algorithm
from fedcore.errors import ArrayError, FedcoreError, RoundError
from fedcore.server import Round, RoundReport, Server, Update
from fedcore.server.limits import shown


class ServerHandler(SyncServerHandler):  # type: ignore[misc, unused-ignore]
    """FedAvg, MIFA, MimiC, FlexibleFedAvg or LocalDescent under FedLab's pipelines and network managers.

    Each upload is folded in as it comes and forgotten; one that cannot be believed is left out, by client and reason in
    ``reports``, and the round goes on. An upload is ``[parameters]`` of FedLab's own trainers, or
    ``[parameters, claims]`` with claims an integer tensor (client, steps, examples). It answers for a client of
    ``sample_clients`` that has not answered yet; without claims for the first of these, as StandalonePipeline delivers
    them. Over a network, where they come in any order, methods that keep a row per client need the claims. Anything
    else is refused, and answers for nobody: the round ends when each client that was sampled has answered, once, or
    with the next ``sample_clients``. FedLab does not say who sent an upload, so a trainer that claims to be another one
    of the sampled is believed.

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
        self._sampled: tuple[int, ...] = ()
        self._due: dict[int, None] = {}  # of the sampled, in order, those who have not answered
        self._strays: set[int] = set()  # whose names the round has refused already: each once, however often it comes

    @property
    def downlink_package(self) -> list[torch.Tensor]:
        """``[x]``, float32[n]."""
        self._start()
        return [self.model_parameters]

    def sample_clients(self) -> list[int]:
        """FedLab's draw, which also says whose the round's uploads are; a round that is open ends with who answered."""
        self._start()
        if self._round is not None:
            self.global_update([])
        sampled: list[int] = super().sample_clients()
        self._sampled, self._due = tuple(sampled), dict.fromkeys(sampled)
        return sampled

    def load(self, payload: list[torch.Tensor]) -> bool:
        """Fold an upload in; whether it was the round's last, which finishes the round."""
        server = self._start()
        try:
            update = self._update(payload)
            if not self._due:
                raise RoundError(f"client: expected none, since no upload is waited for, got {update.client!r}")
            if self._round is None:
                self._round = server.open_round()
            self._answer(self._round, update)
        except FedcoreError as error:
            self._LOGGER.warning(f"an upload of round {self.round}: {error}")
        if self._due or self._round is None:
            return False
        self.global_update([])
        return True

    def _answer(self, round: Round, update: Update) -> None:
        """Let an upload answer for its client.

        Raises:
            RoundError: the client was not sampled, or has answered already; where there is one, the report has it too.
        """
        client = update.client
        if client in self._due:
            del self._due[int(client)]
            round.add_update(update)
            return
        due = "one that has not answered" if client in self._sampled else "one that was sampled"
        reason = f"client: expected {due}, got an upload that claims to be {client!r}'s"
        if 0 <= int(client) < self.num_clients and client not in self._strays:
            self._strays.add(int(client))
            round.refuse(client, reason)
        raise RoundError(reason)

    def global_update(self, buffer: Any) -> None:
        """Finish the round; the uploads are folded in already."""
        if self._round is not None and self.server is not None:
            opened, self._round, silent = self._round, None, [*self._due]
            self._sampled, self._due, self._strays = (), {}, set()
            self.reports.append(report := opened.finish())
            if silent:
                self._LOGGER.info(f"round {report.round}: {silence(silent)}")
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
        """An upload as a round takes it, whose parameters and numbers are checked there.

        Raises:
            ArrayError: its claims are not three integers.
        """
        y, *rest = payload if isinstance(payload, list | tuple) and payload else [payload]
        if not rest:
            return Update(next(iter(self._due), -1), y, self._steps or 1)
        try:
            claims = np.asarray(rest[0])
            if claims.dtype.kind not in "iu" or claims.size != 3:
                raise ArrayError(f"got {claims.dtype}[{claims.size}]")
            client, steps, examples = claims.reshape(-1).tolist()
        except Exception as error:  # whatever the class of what came says
            due = "three integers (client, steps, examples)"
            raise ArrayError(f"claims: expected {due}, got {type(rest[0]).__name__}: {shown(error)}") from None
        return Update(client, y, steps, examples)
