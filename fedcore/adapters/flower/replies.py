"""The replies of a round's clients, read without believing any of them."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message

from fedcore.adapters.flower.instructions import METHOD
from fedcore.adapters.flower.metrics import only_record, records_of
from fedcore.adapters.flower.pending import Asked
from fedcore.adapters.flower.records import CONTROL, Wire, read_vector
from fedcore.adapters.order import steps_of
from fedcore.adapters.replies import add_reply
from fedcore.arguments import integral
from fedcore.errors import ArrayError
from fedcore.server import Round, Server, Update
from fedcore.typing import F32


class Reader:
    """Adds the replies of a round to it.

    Args:
        weight: the metric that says how many examples a client used.
        lost: by round and name, what x lost when it was sent: y gets it back, so that x - y is what the client did.
        steps: K of replies that do not say it, or the metric that holds it.
    """

    def __init__(
        self,
        server: Server,
        wire: Wire,
        weight: str,
        lost: Mapping[int, Mapping[str, F32]],
        steps: int | str | None,
    ) -> None:
        self._server, self._wire, self._weight, self._lost, self._steps = server, wire, weight, lost, steps

    def add(self, round: Round, asked: Asked, reply: Message) -> None:
        """Fold a reply in, or reject it."""
        add_reply(round, asked.node, lambda: self._read(asked, reply))

    def _read(self, asked: Asked, reply: Message) -> Update:
        content = reply.content
        controls = records_of(content, ArrayRecord)
        models = [record for name, record in controls.items() if name != CONTROL]
        if len(models) != 1:
            raise ArrayError(f"arrays: expected one record of the model, got {len(models)}")
        metrics = only_record(content)
        done: Mapping[str, Any] = records_of(content, ConfigRecord).get(METHOD, {})
        model = self._wire.read(models[0])
        for name, residue in self._lost.get(asked.round, {}).items():
            model[name] = _moved(model[name], residue)
        return Update(
            asked.node,
            model,
            steps=steps_of(done.get("steps"), metrics, self._steps, self._server, by="answer by Task.reply"),
            examples=self._count(metrics),
            lr=done.get("lr"),
            control=read_vector(CONTROL, controls[CONTROL]) if CONTROL in controls else None,
            count=asked.count,
            round=asked.round,
            keep=True,  # of the message, or made here
        )

    def _count(self, metrics: Mapping[str, Any]) -> Any:
        """The weight of a reply; Flower's own strategy stops where it is missing."""
        if self._weight not in metrics:
            raise ArrayError(f"metrics: expected {self._weight!r}, the reply's weight, got none: see weighted_by_key")
        return integral(metrics.get(self._weight))


def _moved(y: Any, residue: F32) -> Any:
    """y + residue; y as it is where the shapes differ, for which the round will refuse it."""
    return y + residue if y.shape == residue.shape else y
