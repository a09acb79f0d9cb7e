"""fedcore's averaging methods as the server of FedLab."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.server.manager import SynchronousServerManager
from fedlab.utils import MessageCode

from fedcore.adapters.session import add_reply, open_server, rejection_line, silence, with_plain_steps
from fedcore.algorithms import Algorithm
from fedcore.arguments import integral, reason_of, shown, whole
from fedcore.arrays import to_host
from fedcore.errors import ArrayError, RoundError
from fedcore.options import Storage
from fedcore.server import Report, Round, Server, Update


class ServerHandler(SyncServerHandler):  # type: ignore[misc, unused-ignore]
    """FedAvg, MIFA, MimiC, FlexibleFedAvg or LocalDescent under FedLab's pipelines and network managers.

    Each upload is folded in as it comes and forgotten; one that cannot be believed is left out, by client and reason in
    ``reports``, and the round goes on. An upload is ``[parameters]`` of FedLab's own trainers, or
    ``[parameters, claims]`` with claims an integer tensor (client, steps, examples). It answers for a client of
    ``sample_clients`` that has not answered yet; without claims for the first of these, as StandalonePipeline delivers
    them. Anything else is refused, and answers for nobody: the round ends when each client that was sampled has
    answered, once, or with the next ``sample_clients``. Claims are float32 where they come over FedLab's network, which
    knows one dtype an upload, and so exact up to 2^24.

    Over a network use ``ServerManager``, which ties uploads to the processes that they come from. FedLab's own hands
    them over without a sender: a trainer that claims to be another one of the sampled is then believed, and methods
    that keep a row per client need the claims, since uploads come in any order.

    Args:
        model: its parameters are the federated model; FedLab leaves buffers alone.
        global_round: rounds of the whole run.
        sample_ratio: the share of the clients that takes part in a round.
        algorithm: one of ``fedcore.algorithms`` whose clients take plain steps, or its name.
        lr: the rate of the local steps.
        steps: K, of an upload without claims (1), and the most that claims may say, unless ``limits`` do.
        evaluate: called with the model at each ``evaluate()``.
        storage: as for ``fedcore.Server``; with a folder a later run goes on after the last finished round.
        options: further arguments of ``fedcore.Server``, and ``client_sizes``, n_k by id.

    Attributes:
        server: the ``fedcore.Server``, once FedLab has said how many clients there are.
        reports: the ``Report`` of each round.

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
        storage: Storage | str | None = None,
        logger: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(model, global_round, sample_ratio, logger=logger)
        self._algorithm, self._steps, self._evaluate = with_plain_steps(algorithm, lr), steps, evaluate
        self._options = {**options, "lr": lr, "storage": Storage.of(storage), "steps": steps}
        self.server: Server | None = None
        self.reports: list[Report] = []
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

    def load(self, payload: list[torch.Tensor], sender: "Sender | None" = None) -> bool:
        """Fold an upload in; whether it was the round's last, which finishes the round.

        Args:
            sender: who it came from, where that is known (``ServerManager``).
        """
        server = self._start()
        try:
            update = self._update(payload, sender)
            if not self._due:
                raise RoundError(f"client: expected none, since no upload is waited for, got {update.client!r}")
        except Exception as error:  # whatever reading the upload raises
            self._warn(reason_of(error), sender)
            return False
        if self._round is None:
            self._round = server.open_round()
        if stray := self._answer(self._round, update):
            self._warn(stray, sender)
        if self._due:
            return False
        self.global_update([])
        return True

    def _warn(self, reason: str, sender: "Sender | None") -> None:
        whose = "" if sender is None else f" from process {sender.rank}"
        self._LOGGER.warning(f"an upload of round {self.round}{whose}: {reason}")

    def _answer(self, round: Round, update: Update) -> str | None:
        """Let an upload answer for its client.

        Returns:
            The reason if the client was not sampled, or has answered already; where there is one, the report has it
            too.
        """
        client = update.client
        if client in self._due:
            del self._due[int(client)]
            add_reply(round, client, lambda: update)
            return None
        due = "one that has not answered" if client in self._sampled else "one that was sampled"
        reason = f"client: expected {due}, got an upload that claims to be {client!r}'s"
        if 0 <= int(client) < self.num_clients and client not in self._strays:
            self._strays.add(int(client))
            round.reject(client, reason)
        return reason

    def global_update(self, buffer: Any) -> None:
        """Finish the round; the uploads are folded in already."""
        if self._round is not None and self.server is not None:
            opened, self._round, silent = self._round, None, [*self._due]
            self._sampled, self._due, self._strays = (), {}, set()
            self.reports.append(report := opened.finish())
            if silent:
                self._LOGGER.info(f"round {report.round}: {silence(silent)}")
            if line := rejection_line(report):
                self._LOGGER.warning(line)
            self._show(self.server)

    def setup_optim(self) -> None:
        """Do nothing: the method's options are arguments of ``__init__``."""

    def evaluate(self) -> Any:
        """Return the result of the caller's function on the model."""
        return None if self._evaluate is None else self._evaluate(self.model)

    def _start(self) -> Server:
        if self.server is None:
            x0 = self.model_parameters.float().numpy()
            self.server = open_server(x0, self._algorithm, range(self.num_clients), **self._options)
            self._show(self.server)
        return self.server

    def _show(self, server: Server) -> None:
        """Give FedLab the server's model, and the number of its rounds."""
        self.round = server.round_number
        self.set_model(torch.from_numpy(np.array(to_host(server.x))).to(self.model_parameters.dtype))

    def _update(self, payload: Any, sender: "Sender | None") -> Update:
        """An upload as a round takes it, whose parameters and numbers are checked there.

        Raises:
            ArrayError: its claims are not three integers.
            RoundError: the client is none of the sender's.
        """
        try:
            y, *rest = payload if isinstance(payload, list | tuple) else [payload]
        except Exception:  # an empty list, or one of a class that raises
            y, rest = payload, []
        if not rest:
            own = self._due if sender is None else [client for client in self._due if client in sender.clients]
            return Update(next(iter(own), -1), y, self._steps or 1, keep=sender is not None)
        try:
            claims = np.asarray(rest[0])
            if claims.dtype.kind not in "iuf" or claims.size != 3:
                raise ValueError(f"got {claims.dtype}[{claims.size}]")
            client, steps = (_whole(number) for number in claims.reshape(-1).tolist()[:2])
            examples = integral(claims.reshape(-1).tolist()[2])
        except Exception as error:  # whatever the class of what came says
            due = "three numbers (client, steps, examples)"
            raise ArrayError(f"claims: expected {due}, got {type(rest[0]).__name__}: {shown(error)}") from None
        # No other code has the memory of a message. FedLab's own handler copies any upload that it holds.
        name = client if sender is None else sender.id_of(client)
        return Update(name, y, steps, examples, keep=sender is not None)


def _whole(number: float) -> int:
    """An integer, as a float too: FedLab's network makes all tensors of an upload of one dtype.

    Raises:
        ValueError, OverflowError: it is none.
    """
    if number != int(number):
        raise ValueError(f"got {number}")
    return int(number)


@dataclass(frozen=True)
class Sender:
    """A process, and its clients.

    Attributes:
        rank: its number in the group.
        clients: the ids of its clients, which ``sample_clients`` draws.
        is_local: whether it calls them 0, 1, ... and not by their ids.
    """

    rank: int
    clients: range
    is_local: bool

    def id_of(self, said: int) -> int:
        """The id of what the process calls a client.

        Raises:
            RoundError: it has no such client.
        """
        client = self.clients.start + said if self.is_local else said
        if client not in self.clients:
            raise RoundError(f"client: expected one of its own, got an upload that claims to be {said!r}'s")
        return client


class ServerManager(SynchronousServerManager):  # type: ignore[misc, unused-ignore]
    """FedLab's synchronous manager around a ``ServerHandler``, but that a process answers for its own clients alone.

    An upload without claims answers for the next client of the process that it came from; one with claims for the
    client that it names, as the process was told it (by ``mode``). One that names a client of another process is
    refused, in the log by the process's rank, and so is a message without an upload. The rank is what FedLab says; the
    upload itself is read from that process's connection, so that nobody speaks in another's name. FedLab knows no
    timeouts: the round waits for the clients of a process whose uploads were refused so. Everybody in the
    group can still end the run of all: FedLab's network takes a header for what it says.

    Args:
        network, handler, mode, logger: FedLab's, the handler a ``ServerHandler``.
        max_clients: the most clients that a process may say that it has; FedLab believes any number, and a share of
            each round goes by it.

    Raises (at ``setup``):
        RangeError: a process says that it has none, or too many.
    """

    def __init__(
        self, network: Any, handler: ServerHandler, mode: str = "LOCAL", logger: Any = None, *, max_clients: int = 10**6
    ) -> None:
        super().__init__(network, handler, mode, logger)
        self._most = max_clients

    def setup(self) -> None:
        """Connect to everybody, who say how many clients they have."""
        super().setup()
        self._senders: dict[int, Sender] = {}
        first = 0
        for rank, number in self.coordinator.map.items():
            number = whole(f"clients of process {rank} (max_clients)", integral(number), 1, self._most)
            self.coordinator.map[rank] = number
            self._senders[rank] = Sender(rank, range(first, first + number), self.mode == "LOCAL")
            first += number
        self._handler.num_clients = first

    def main_loop(self) -> None:
        """Rounds until the handler has had enough; in each everybody sampled answers."""
        while not self._handler.if_stop:
            threading.Thread(target=self.activate_clients).start()  # FedLab's way: a process may answer meanwhile
            ended = False
            while not ended:
                rank, code, payload = self._network.recv()
                sender = self._senders.get(rank)
                if code is MessageCode.ParameterUpdate and payload is not None and sender is not None:
                    ended = self._handler.load(payload, sender)
                else:
                    self._LOGGER.warning(f"process {rank}: expected an upload, got {shown(code)}")
