"""Clients that keep their own rows, over any engine: what a method's ``placement="client"`` asks of them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.algorithms import MEAN_GRADIENT, Algorithm
from fedcore.atomic_file import replacing, require_file
from fedcore.clients import ClientId
from fedcore.engines.engine import Engine, Evaluation
from fedcore.local_rules import LocalRule
from fedcore.memory import copy_into, to_host
from fedcore.participation import Active
from fedcore.server import Broadcast, RoundReport, Server, Update
from fedcore.typing import F32


class KeepingClients:
    """The engine whose clients have a row each, float32[n_parameters], that the server never sees.

    MimiC's send the model that they would have reached along h_i + c_i, and have c_i = v - h_i after the round. Those
    of the SCAFFOLDs add their row's part to the offset, send c_i+ - c_i as ``control``, and keep c_i+. A client that
    was not heard keeps what it had.

    Args:
        engine: who trains; it is closed with this one.
        algorithm: the server's, with its rows at the clients.

    Attributes:
        rows: by client; one that is not there is zero.
        bytes_more: what the clients of the last broadcast were sent beside it: nothing.

    Cost: 4 n bytes for each client that was ever heard, and for each of a round's; a checkpoint writes them all.
    """

    def __init__(self, engine: Engine, algorithm: Algorithm) -> None:
        self._engine, self._algorithm = engine, algorithm
        self.rows: dict[ClientId, F32] = {}
        self.bytes_more = 0
        self._next: dict[ClientId, F32] = {}
        """The rows of the open round: c_i+, or h_i until v is known."""

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the clients of a broadcast; see ``Engine.updates``."""
        self._next.clear()
        change = broadcast.second_vector is not None
        for update in self._engine.updates(self._own(broadcast) if change else unkept(broadcast), active):
            yield self._with_change(update) if change else self._with_correction(update, broadcast)

    def _own(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast with each client's own row in its offset, and the gradient as its second vector."""
        from_row = np.float32(broadcast.direction.from_row)

        def offset(client: ClientId, out: Any) -> Any:
            shared = to_host(broadcast.offset(client))
            row = self.rows.get(client)
            own = shared if row is None else shared + from_row * row
            if out is None:
                return own
            copy_into(out, own)
            return out

        return replace(unkept(broadcast).with_offset(offset), second_vector=MEAN_GRADIENT)

    def _with_change(self, update: Update) -> Update:
        client = update.client
        self._next[client] = raw = np.array(update.control)
        return update._replace(control=raw - self.rows[client] if client in self.rows else raw)

    def _with_correction(self, update: Update, broadcast: Broadcast) -> Update:
        """The update with x - eta K (h_i + c_i) in the place of y, the parameters alone."""
        assert update.lr is not None
        unit = np.float32(1 if self._algorithm.averages else update.lr * update.steps)
        client, p = update.client, self._parameters(broadcast)
        y = np.array(update.model, np.float32)
        self._next[client] = (to_host(broadcast.x)[:p] - y[:p]) / unit
        if client in self.rows:
            y[:p] -= unit * self.rows[client]
        return update._replace(model=y, keep=True)

    @staticmethod
    def _parameters(broadcast: Broadcast) -> int:
        """The length of a row, which is that of an offset."""
        return len(broadcast.offset(broadcast.ids[0]))

    def after(self, server: Server, report: RoundReport) -> None:
        """Let the clients heard keep what the round has made of their rows."""
        v = to_host(server.v) if self._algorithm.second_vector is None else None
        for client in report.heard:
            row = self._next[client]
            self.rows[client] = row if v is None else v - row
        self._next.clear()

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, F32]:
        """The gradients from which the server starts, and the clients' rows with it."""
        found = self._engine.gradients(unkept(broadcast), minibatches)
        self.rows = {client: gradient.copy() for client, gradient in found.items()}
        return found

    def save(self, path: Path) -> None:
        """Write all rows into a file, which takes the place of one of that name as a whole."""
        written_whole(path, **{str(client): row for client, row in self.rows.items()})

    def load(self, path: Path) -> None:
        """Take over the rows that ``save`` wrote."""
        with np.load(require_file(path)) as file:
            self.rows = {int(client): file[client] for client in file.files}

    def evaluate(self, x: F32) -> Evaluation:
        """Accuracy and loss of a model; see ``Engine.evaluate``."""
        return self._engine.evaluate(x)

    def most_steps(self, local_rule: LocalRule) -> int:
        """The most local steps of a client's complete work; see ``Engine.most_steps``."""
        return self._engine.most_steps(local_rule)

    @property
    def together(self) -> bool:
        """Tell whether clients are trained together."""
        return self._engine.together

    @property
    def waited(self) -> float:
        """Seconds of waiting for workers; see ``Engine.waited``."""
        return self._engine.waited

    def close(self) -> None:
        """Close the engine below."""
        self._engine.close()


def unkept(broadcast: Broadcast) -> Broadcast:
    """The broadcast to clients that do not know of rows, nor of slices: whoever keeps their rows sees whole vectors."""
    return replace(broadcast.whole(), keeps_row=False)


def written_whole(path: Path, **arrays: Any) -> None:
    """Write arrays into a file, which is there as a whole or as it was."""
    with replacing(path, "wb") as file:
        np.savez(file, **arrays)
