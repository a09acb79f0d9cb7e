"""fedcore's averaging methods as the server of FedLab."""

import threading
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np

from fedcore.adapters import importing
from fedcore.adapters.session import Job, add_reply, finish, silence, take_model
from fedcore.algorithms import Algorithm
from fedcore.arrays import as_array, own_classes, to_host
from fedcore.errors import ArrayError, RoundError
from fedcore.server import Round, Server, Update
from fedcore.validation import as_integer, check_integer, rejection_reason, short_repr

with importing("fedlab", "fedlab >= 1.3"):
    import torch
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.server.manager import SynchronousServerManager
    from fedlab.utils import MessageCode


def _ends_round(draw: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Let a draw of clients, which may call the draw of a base class, finish the open round and begin the next one."""

    @wraps(draw)
    def sample_clients(self: "ServerHandler", *args: Any, **more: Any) -> list[int]:
        if self._is_drawing:
            return draw(self, *args, **more)
        self._end_round()
        self._start()
        self._is_drawing = True
        try:
            sampled = draw(self, *args, **more)
        finally:
            self._is_drawing = False
        self._sampled = tuple(map(int, sampled))
        if not self._sampled:
            raise RoundError(f"round {self.round}: no client takes part, since sample_clients returned none")
        self._waiting = dict.fromkeys(self._sampled)
        return sampled

    return sample_clients


def _noted(package: Any) -> Any:
    """Let a package whose first tensor is a changed model replace the server's x, since clients start from it."""

    def downlink_package(self: "ServerHandler") -> Any:
        sent = package.fget(self)
        first = sent[0] if sent else None
        if isinstance(first, torch.Tensor) and first.shape == self.model_parameters.shape:
            self._sent = first
        return sent

    return property(downlink_package)


class ServerHandler(Job, SyncServerHandler):  # type: ignore[misc, unused-ignore]
    """FedAvg, MIFA, MimiC, FlexibleFedAvg or LocalDescent for FedLab's pipelines and network managers.

    An upload is ``[parameters]``, as FedLab's trainers send it, or ``[parameters, claims]``. The claims are an integer
    tensor (client, steps, examples). Over FedLab's network they become float32, since an upload has one dtype; they are
    exact up to 2^24. The server does not keep an upload. An invalid upload is rejected, and the round continues;
    ``reports`` lists the client and the reason.

    An upload counts for the sampled client that it claims, or else for the first sampled client without an upload, in
    the order of StandalonePipeline. Any other upload is rejected. A round ends when each sampled client has sent one
    upload, or with the next ``sample_clients``.

    A subclass may override FedLab's methods. Uploads count for the clients that ``sample_clients`` returns, and a model
    that was changed between rounds is the server's next x. If ``global_update`` is overridden, the handler keeps copies
    of the uploads until it is called, as FedLab does; it must pass the uploads that count to ``super``.

    Over a network use ``ServerManager``, which knows the sender of each upload. FedLab's own manager does not: a
    trainer may then claim to be a different sampled client. Methods that keep a row per client need the claims then,
    since uploads arrive in any order.

    Args:
        model: the model whose parameters are federated; FedLab does not send buffers.
        global_round: the rounds of the whole run.
        sample_ratio: the share of the clients that take part in a round.
        algorithm: one of ``fedcore.algorithms`` whose clients take plain steps, or its name.
        lr: the rate of the local steps, the same for all steps of a round.
        evaluate: a function of the model, which ``evaluate()`` calls.
        options: ``steps``: K of an upload without claims (default: 1), and the maximum that claims may report, unless
            ``limits`` set ``max_steps``. ``client_sizes``: n_k by id. ``logger``: FedLab's. ``abort_after``: the run
            ends with an error after this many rounds in a row that accepted no upload (default: 3; None: it continues).
            And further arguments of ``fedcore.Server`` except ``policy``: FedLab waits for all clients. With
            ``storage`` a later run resumes after the last finished round.

    Attributes:
        server: the ``fedcore.Server``, from the first round on.
        reports: the ``Report`` of each round.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        global_round: int,
        sample_ratio: float,
        algorithm: Algorithm | str = "MimiC",
        *,
        lr: float,
        evaluate: Callable[[torch.nn.Module], Any] | None = None,
        **options: Any,
    ) -> None:
        logger = options.pop("logger", None)
        self._prepare("FedLab", algorithm, {**options, "lr": lr})
        super().__init__(model, global_round, sample_ratio, logger=logger)
        self._evaluate = evaluate
        self._round: Round | None = None
        self._sent: torch.Tensor | None = None  # the model of a subclass's package
        self._sampled: tuple[int, ...] = ()
        self._waiting: dict[int, None] = {}  # the sampled clients without an upload, in order
        self._strays: set[int] = set()  # clients whose stray upload the report already lists
        self._is_drawing = False
        self._keeps_uploads = type(self).global_update is not ServerHandler.global_update
        self._uploads: list[Upload] = []
        self.sender: Sender | None = None  # of the upload that a ``ServerManager`` loads

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.sample_clients = _ends_round(cls.sample_clients)  # type: ignore[method-assign]
        cls.downlink_package = _noted(cls.downlink_package)  # type: ignore[method-assign]

    @property
    def round(self) -> int:
        """The number of finished rounds, which the server counts."""
        return 0 if self.server is None else self.server.round_number

    @round.setter
    def round(self, _: int) -> None:
        pass  # FedLab's handlers and their subclasses count too

    @property
    def if_stop(self) -> bool:
        """Whether all rounds are finished, including those before a resume."""
        if self.num_clients:
            self._start()
        self._take_model()
        return bool(super().if_stop)

    @property
    def downlink_package(self) -> list[torch.Tensor]:
        """``[x]``, float32[n]."""
        self._start()
        return [self.model_parameters]

    @_ends_round
    def sample_clients(self) -> list[int]:
        """Finish an open round with the uploads so far, and return FedLab's draw."""
        sampled: list[int] = super().sample_clients()
        return sampled

    def load(self, payload: list[torch.Tensor]) -> bool:
        """Add an upload to the round; return whether it was the last upload, which finishes the round."""
        if (update := self._receive(payload)) is None:
            return False
        if self._keeps_uploads:
            content = deepcopy(payload) if self.sender is None else payload
            self._uploads.append(Upload(content, update.client, self.sender))
        else:
            add_reply(self._opened(), update.client, lambda: update)
        if self._waiting:
            return False
        self._end_round()
        return True

    def _receive(self, payload: Any) -> Update | None:
        """Return the update of a sampled client that has not answered; list any other upload as rejected."""
        self._start()
        sender = self.sender
        try:
            update = self._update(payload, sender, self._waiting)
            if not self._waiting:
                raise RoundError(f"client: unexpected upload of client {update.client!r}; no sampled client is pending")
        except Exception as error:  # a hostile upload can raise any exception
            self._warn(rejection_reason(error), sender)
            return None
        client, opened = update.client, self._opened()
        if client in self._waiting:
            del self._waiting[int(client)]
            return update
        state = "has already answered" if client in self._sampled else "was not sampled"
        reason = f"client: {client!r} {state}"
        self._warn(reason, sender)
        if 0 <= int(client) < self.num_clients and client not in self._strays:
            self._strays.add(int(client))
            opened.reject(client, reason)
        return None

    def _warn(self, reason: str, sender: "Sender | None") -> None:
        process = "" if sender is None else f" from process {sender.rank}"
        self._LOGGER.warning(f"rejected an upload of round {self.round}{process}: {reason}")

    def _opened(self) -> Round:
        if self._round is None:
            self._take_model()
            self._round = self._start().open_round()
        return self._round

    def _take_model(self) -> None:
        """Replace the server's x by the handler's model, if it was changed between rounds."""
        if self.server is not None and self._round is None:
            [name] = self.server.layout.names
            sent, self._sent = self._sent, None
            take_model(self.server, {name: self.model_parameters if sent is None else sent})

    def _end_round(self) -> None:
        """Finish the round of the sampled clients, if there is one."""
        if not self._sampled:
            return
        self._opened()
        self.global_update([upload.content for upload in self._uploads])
        if self._round is not None:
            raise RoundError(
                "global_update: the override did not call super().global_update with the uploads, so "
                f"{type(self._algorithm).__name__} took no step; call it, and then change the model with set_model"
            )

    def global_update(self, buffer: Any) -> None:
        """Add the uploads that a subclass kept, and finish the round."""
        uploads, kept = list(buffer), self._uploads
        if not self._sampled and not uploads:
            return
        opened, self._uploads = self._opened(), []
        for k, content in enumerate(uploads):
            owners = [upload for upload in kept if upload.content is content]
            if not owners and len(kept) == len(uploads):
                owners = kept[k : k + 1]  # the upload was changed
            if owners:
                client, sender = owners[0].client, owners[0].sender
                add_reply(opened, client, partial(self._update, content, sender, [client]))
            elif kept:
                raise RoundError(
                    "global_update: it is unknown whose the uploads are that super().global_update got; pass the lists "
                    "of the buffer, and change their tensors in place, or pass as many lists in the same order"
                )
            elif (update := self._receive(content)) is not None:
                add_reply(opened, update.client, partial(update._replace))
        self._round, silent = None, [*self._waiting]
        self._sampled, self._waiting, self._strays = (), {}, set()
        report = finish(self._start(), opened, self._LOGGER.warning)
        if silent:
            self._LOGGER.info(f"round {report.round}: {silence(silent)}")
        self._show(self._start())
        self._record(report, self._LOGGER.warning, ended=self.round >= self.global_round)

    def setup_optim(self) -> None:
        """Do nothing, since the method's options are arguments of ``__init__``."""

    def evaluate(self) -> Any:
        """Return the result of the argument ``evaluate`` on the model."""
        return None if self._evaluate is None else self._evaluate(self.model)

    def _start(self) -> Server:
        if self.server is None:
            x0 = as_array("model", self.model_parameters.float())
            self._show(self._opened_server(x0, range(self.num_clients)))
        assert self.server is not None
        return self.server

    def _show(self, server: Server) -> None:
        self.set_model(torch.from_numpy(np.array(to_host(server.x))).to(self.model_parameters.dtype))

    def _update(self, payload: Any, sender: "Sender | None", waiting: Iterable[int]) -> Update:
        """Return the update in an upload; the round checks its parameters and numbers."""
        # A message's memory is not shared, but FedLab's pipelines may reuse theirs.
        keep = sender is not None
        try:
            y, *rest = payload if isinstance(payload, list | tuple) else [payload]
        except Exception:  # an empty list, or a list of a hostile class
            y, rest = payload, []
        if not rest:
            own = [client for client in waiting if sender is None or client in sender.clients]
            return Update(next(iter(own), -1), y, self._work.steps or 1, keep=keep)
        try:
            claims = np.asarray(own_classes("claims", rest[0]))
        except Exception as error:  # a hostile class can raise any exception
            raise ArrayError(f"claims: cannot be read: {short_repr(error)}") from None
        if claims.dtype.kind not in "iuf" or claims.size != 3:
            described = f"{str(claims.dtype)[:40]}[{claims.size}]"
            raise ArrayError(f"claims: must be three integers (client, steps, examples), not {described}")
        client, steps, examples = (as_integer(number) for number in claims.reshape(-1).tolist())
        if not isinstance(client, int) or not isinstance(steps, int):
            raise ArrayError(f"claims: the client {client} and the steps {steps} must be integers")
        return Update(client if sender is None else sender.id_of(client), y, steps, examples, keep=keep)


@dataclass(frozen=True)
class Upload:
    """An upload that a handler keeps, with its client and the process that sent it."""

    content: Any
    client: Any
    sender: "Sender | None"


@dataclass(frozen=True)
class Sender:
    """A process that sends uploads, and its clients.

    Attributes:
        rank: the process's number in the group.
        clients: the ids of its clients, as ``sample_clients`` returns them.
        is_local: whether the process numbers its clients 0, 1, ... instead of using their ids.
    """

    rank: int
    clients: range
    is_local: bool

    def id_of(self, number: int) -> int:
        """Return the id of a client from the process's number; raise RoundError if the process lacks this client."""
        client = self.clients.start + number if self.is_local else number
        if client not in self.clients:
            raise RoundError(f"client: process {self.rank} sent an upload of client {number!r}, which it does not have")
        return client


class ServerManager(SynchronousServerManager):  # type: ignore[misc, unused-ignore]
    """FedLab's synchronous manager for a ``ServerHandler``; a process can send uploads only for its own clients.

    An upload without claims counts for the next client of its process. An upload with claims counts for the client that
    it names, by id or by the process's own number (``mode``). The manager rejects an upload that names a client of a
    different process, and a message without an upload; the log lists the rank. FedLab reads each upload from the
    connection of its rank, so a process cannot impersonate a different process.

    FedLab has no timeouts: a round waits for the clients of a process whose uploads were rejected. FedLab's network
    does not authenticate headers, so any process of the group can end the run.

    Args:
        network, mode, logger: as for FedLab's manager.
        handler: a ``ServerHandler``.
        max_clients: the maximum number of clients that a process may report. FedLab itself sets no limit, and a
            process's share of each round grows with this number.
    """

    def __init__(
        self, network: Any, handler: ServerHandler, mode: str = "LOCAL", logger: Any = None, *, max_clients: int = 10**6
    ) -> None:
        super().__init__(network, handler, mode, logger)
        self._max_clients = max_clients

    def setup(self) -> None:
        """Connect to the processes; raise RangeError if a process reports no clients or more than ``max_clients``."""
        super().setup()
        self._senders: dict[int, Sender] = {}
        first = 0
        for rank, number in self.coordinator.map.items():
            number = check_integer(f"clients of process {rank} (max_clients)", as_integer(number), 1, self._max_clients)
            self.coordinator.map[rank] = number
            self._senders[rank] = Sender(rank, range(first, first + number), self.mode == "LOCAL")
            first += number
        self._handler.num_clients = first

    def main_loop(self) -> None:
        """Run rounds until the handler stops; each round waits for all sampled clients."""
        while not self._handler.if_stop:
            threading.Thread(target=self.activate_clients).start()  # as in FedLab, since a process may reply meanwhile
            is_finished = False
            while not is_finished:
                rank, code, payload = self._network.recv()
                sender = self._senders.get(rank)
                if code is MessageCode.ParameterUpdate and payload is not None and sender is not None:
                    self._handler.sender = sender
                    is_finished = self._handler.load(payload)
                else:
                    self._LOGGER.warning(f"process {rank}: sent {short_repr(code)} instead of an upload")
