"""Clients of FedAvg-M that find the momentum themselves, from the two models that they were sent last."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.algorithms import FedAvgM
from fedcore.atomic_file import require_file
from fedcore.clients import ClientId
from fedcore.engines.engine import Engine
from fedcore.engines.keeping import KeepingClients, unkept, written_whole
from fedcore.memory import copy_into, to_host
from fedcore.participation import Active
from fedcore.server import Broadcast, RoundReport, Server, Update
from fedcore.typing import F32


class RecoveringClients(KeepingClients):
    """The engine whose clients recover g = (x_t - x_{t+1}) / gamma, so that x alone is sent to who was there before.

    A client that was not sent x_t is sent it beside x_{t+1}, or what it was when x moved last: as much as g is.

    Args:
        engine: who trains; it is closed with this one.
        algorithm: FedAvg-M with its momentum at the clients.

    Attributes:
        bytes_more: what the clients of the last broadcast were sent beside x.

    Cost: 8 n bytes, since all clients find the same.
    """

    def __init__(self, engine: Engine, algorithm: FedAvgM) -> None:
        super().__init__(engine, algorithm)
        self._share = np.float32(1 - algorithm.beta)
        self._g: F32 | None = None
        self._know_g: set[ClientId] = set()
        self._sent: tuple[F32, set[ClientId]] | None = None
        """The x of the last round, and the clients that were sent it."""
        self._gamma = 0.0
        """The step from there along g; 0 if x stayed."""

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast; see ``Engine.updates``."""
        here, ids = unkept(broadcast.on_host()), set(broadcast.ids)
        if self._gamma and self._sent is not None:
            x, sent_to = self._sent
            p = len(broadcast.offset(broadcast.ids[0])) if broadcast.ids else len(x)
            self._g, self._know_g, self._gamma = (x[:p] - here.x[:p]) / np.float32(self._gamma), sent_to, 0.0
        self._sent = here.x, ids
        if self._g is None:
            yield from self._engine.updates(here, active)
            return
        self.bytes_more = self._g.nbytes * len(ids - self._know_g)
        self._know_g |= ids
        along = self._share * self._g

        def offset(client: ClientId, out: Any) -> Any:
            if out is None:
                return along
            copy_into(out, along)
            return out

        yield from self._engine.updates(here.with_offset(offset), active)

    def after(self, server: Server, report: RoundReport) -> None:
        """Let the clients know how far x moves along what they are to find."""
        self._gamma = report.gamma

    def save(self, path: Path) -> None:
        """Write what clients know; see ``KeepingClients.save``."""
        x, sent_to = self._sent or (np.empty(0, np.float32), set())
        g = np.empty(0, np.float32) if self._g is None else self._g
        ids = {"sent_to": sorted(sent_to, key=str), "know_g": sorted(self._know_g, key=str)}
        written_whole(
            path, x=to_host(x), g=g, gamma=np.float64(self._gamma), **{k: np.array(v) for k, v in ids.items()}
        )

    def load(self, path: Path) -> None:
        """Take over what ``save`` wrote."""
        with np.load(require_file(path)) as file:
            x, g = file["x"], file["g"]
            self._sent = (x, set(file["sent_to"].tolist())) if len(x) else None
            self._g = g if len(g) else None
            self._know_g, self._gamma = set(file["know_g"].tolist()), float(file["gamma"])
