"""Masked sums in NVFlare: a workflow whose server cannot read a single update, and the sites' side."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from nvflare.app_common.abstract.fl_model import FLModel

from fedcore.adapters.nvflare.client import KEY
from fedcore.adapters.nvflare.server import Controller, model_of, update_of
from fedcore.adapters.session import SECURE, SUM, require_known
from fedcore.algorithms import Algorithm
from fedcore.arrays import F32, as_array, to_host
from fedcore.errors import ArrayError, RangeError, RoundError
from fedcore.model import Layout
from fedcore.secure import Encoding, SecureClient, SecureServer
from fedcore.secure.primitives import digest_of
from fedcore.server import Report, Server
from fedcore.store.registry import ClientId
from fedcore.validation import as_integer


class SecureController(Controller):
    """A ``Controller`` that adds up masked updates: the server learns their sum, and no single update or size.

    Each site answers with a ``SecureSite``. A round has four tasks for each site, or five with identities. A site that
    fails, or that misses the ``deadline`` of ``policy`` in a phase, drops out.

    If too few sites are left, or a site lies, the sum is lost: the model stays, and the sites train again in the next
    round. A lost sum counts as one of the job's ``num_rounds``. A site that broke the protocol is left out from then on
    (``SecureServer.named``). After ``abort_after`` lost sums in a row, no further round begins, and the job ends with a
    RoundError; a job with the same folder resumes.

    Args:
        algorithm, args, kwargs: as for ``Controller``. Needed are ``limits`` with ``max_norm`` and ``max_examples``,
            ``compute={"accumulator": "exact"}``, and as ``min_clients`` of ``policy`` the smallest number of sites
            whose sum the server may learn.
        identities: the public key of each site, by name, in hexadecimal, if the sites have an ``identity``.
        colluding: with ``PrivateMean``, as for ``Encoding.of``.

    Raises:
        RangeError: as for ``Encoding.of``, in the first round.
    """

    def __init__(
        self,
        algorithm: Algorithm | str = "FedAvg",
        *args: Any,
        identities: Mapping[str, str] | None = None,
        colluding: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(algorithm, *args, **kwargs)
        self.identities, self.colluding, self._lost = identities, colluding, 0
        self._named: set[ClientId] = set()  # the sites that are left out

    def _connected(self) -> list[str]:
        return [name for name in super()._connected() if name not in self._named]

    def _run_round(self, server: Server) -> Report | None:
        while server.round_number + self._lost < self.num_rounds:
            self._rejected_rounds.check()
            names = [name for name in self.sample_clients(self.num_clients) if name not in self._named]
            if secure := self._secure_server(server, names):
                try:
                    part = self._sum(server, secure)
                except (RoundError, RangeError) as error:
                    self._lose([*secure.rejected, (SUM, f"{error}")], secure.named)
                    continue
                if part is None:
                    return None
                with server.open_round() as opened:
                    opened.add_partial_sum(part, SUM)
                return opened.report
            else:
                self._lose([(SUM, f"{len(names)} sites can take part, fewer than min_clients")])
        return None

    def _lose(self, reasons: Sequence[tuple[ClientId, str]], named: Sequence[ClientId] = ()) -> None:
        """Count a lost sum; the model stays."""
        self.error(f"masked sum: the model stays: {reasons[-1][1]}")
        if named:
            self.error(f"masked sum: sites that broke the protocol are left out from now on: {named}")
        self._named.update(named)
        self._lost += 1
        self._rejected_rounds.count((), reasons)

    def _secure_server(self, server: Server, names: Sequence[str]) -> SecureServer | None:
        """Return a new sum, or None if too few sites are left."""
        fewest = max(2, server.policy.min_clients)
        if len(names) < fewest:
            return None
        known = None if self.identities is None else {one: bytes.fromhex(key) for one, key in self.identities.items()}
        _, x, work = _sent(model_of(server, server.broadcast(names, newcomers=names).on_host(), names[0]))
        encoding = Encoding.of(server, clients=len(names), colluding=self.colluding, x=x, work=work)
        return SecureServer(names, encoding, min_clients=fewest, identities=known)

    def _sum(self, server: Server, secure: SecureServer) -> Any:
        """Run the phases of a sum, and return it as a ``PartialSum``; None if the job was aborted."""
        turn = Lock()  # a late answer must not enter a phase while it is closed
        while secure.messages:
            self._exchange(server, secure, turn)
            if self.abort_signal.triggered:
                return None
            with turn:
                secure.close_phase()
        server.add_clients([name for name in secure.survivors if name not in server.clients])
        return secure.partial_sum(server)

    def _exchange(self, server: Server, secure: SecureServer, turn: Any) -> None:
        """Send the messages of the open phase, and read the answers until all tasks end or the deadline is over."""
        sent = server.broadcast([*secure.messages], newcomers=[*secure.messages]).on_host()
        for name, message in secure.messages.items():
            has_model = SecureClient.needs_words(message)
            model = model_of(server, sent, name) if has_model else _message(np.zeros(1, np.uint8), sent.round)
            model.meta[SECURE] = message
            take = partial(_receive, secure, turn)
            self.send_model(task_name=self.task_name, data=model, targets=[str(name)], callback=take)
        end = time.monotonic() + (float("inf") if server.policy.deadline is None else server.policy.deadline)
        while self.get_num_standing_tasks() and not self.abort_signal.triggered:
            if time.monotonic() > end:
                self.cancel_all_tasks()
                break
            time.sleep(self._task_check_period)


def _message(data: npt.NDArray[np.uint8], round: int | None) -> FLModel:
    """Return a model of bytes, since NVFlare sends no FLModel without parameters."""
    return FLModel(params={SECURE: data}, current_round=round, meta={})


def _sent(model: FLModel) -> tuple[Layout, F32, str]:
    """Return the layout and x of a message's model, and the digest of all that fedcore's sites read of the message."""
    layout = Layout.of(model.params)
    names = [[piece.name, piece.kind, piece.shape] for piece in layout.slices]
    constants = {piece.name: as_array(piece.name, to_host(model.params[piece.name])) for piece in layout.constants}
    work = digest_of([names, constants, model.current_round, model.meta.get(KEY)])
    return layout, layout.flatten(model.params).copy(), work  # training may change the tensors


def _receive(secure: SecureServer, turn: Any, answer: FLModel) -> None:
    name = answer.meta["client_name"]  # NVFlare sets it to the name of the task's client
    sent: Any = answer.params.get(SECURE) if isinstance(answer.params, Mapping) else None
    with turn:
        secure.receive(name, sent.tobytes() if isinstance(sent, np.ndarray) and sent.dtype == np.uint8 else None)


class SecureSite:
    """A site's side of ``SecureController``: ``flare.send(site.answer(flare.receive()))`` in a loop.

    The site refuses to train for a server that asks for an update without masks.

    Args:
        train: returns the reply to a received model, as without masks; called once per round.
        options: those of ``SecureClient``: ``min_clients``, ``identity``, ``peers``, ``noise`` and ``max_norm``.
    """

    def __init__(self, train: Callable[[FLModel], FLModel], **options: Any) -> None:
        require_known("SecureSite", options, signature(SecureClient).parameters)
        self._train, self._new = train, partial(SecureClient, **options)
        self._client = self._new()

    def answer(self, received: FLModel) -> FLModel:
        """Return the answer to a received model.

        Raises:
            ArrayError: the message is not from a ``SecureController``, or is malformed.
            RangeError, RoundError: as for ``SecureClient.answer`` and ``Encoding.encode``. So an invitation to a sum of
                ``Totals`` is refused.
        """
        sent = (received.meta or {}).get(SECURE)
        if not isinstance(sent, bytes):
            raise ArrayError("model: the server asks for an update without masks; use a SecureController")
        if SecureClient.opens(sent):
            self._client = self._new()
        words = self._words(received) if SecureClient.needs_words(sent) else None
        return _message(np.frombuffer(self._client.answer(sent, words, form=Encoding), "u1"), received.current_round)

    def _words(self, received: FLModel) -> Any:
        if (encoding := self._client.encoding) is None:
            raise ArrayError("model: the server did not open this sum")
        layout, x, work = _sent(received)
        update = update_of(0, self._train(received), counts_steps=encoding.eta is not None)
        y = layout.flatten(update.value)
        y, examples = x + y if update.kind == "delta" else y, as_integer(update.examples)
        return encoding.encode(x, y, steps=update.steps, examples=examples, change=update.control, work=work)
