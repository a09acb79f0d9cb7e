"""The updates of clients as shards get them: slices, or the reason why there are none."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedcore.aggregation import Counters
from fedcore.errors import ArrayError, FedcoreError
from fedcore.server.slices import digest_of
from fedcore.server.update import Update, bytes_of
from fedcore.server.update_reader import UpdateReader


class Said(NamedTuple):
    """An update without its vectors.

    Attributes:
        update: its claims; model, delta, gradient and control are None.
        kind: which of model, delta and gradient came.
        refused: what is wrong with its vector, if somebody has seen the whole of it.
        control: whether a slice of a second vector comes too; an error if that is none.
        counters: the integer counters, for the shard that keeps them; None for the others.
        named: whether it came as a model by names, whose bytes count only once it is read.
        digests: of each shard's slice, as the client has made them of one vector; None where nobody did.
        control_digests: of the second vector, likewise.
    """

    update: Update
    kind: str
    refused: FedcoreError | None = None
    control: bool | FedcoreError = False
    counters: Counters | None = None
    named: bool = False
    digests: Sequence[str] | None = None
    control_digests: Sequence[str] | None = None


@dataclass(slots=True)
class Sent:
    """A shard's slice of what a client sent: it stands in an ``Update`` in the place of a model, or of a control."""

    vector: Any
    counters: Counters = field(default_factory=dict)
    refused: FedcoreError | None = None
    digest: str | None = None
    nbytes: int = 0

    def require(self, name: str, vector: Any) -> None:
        """Refuse a vector, as it has been read, that is not the client's.

        Raises:
            ArrayError: its digest is another one.
        """
        if self.digest is not None and digest_of(vector) != self.digest:
            raise ArrayError(
                f"{name}: expected slices of one vector, got one whose digest is not the client's: send all anew"
            )


def updates_of(said: Sequence[Said], vectors: Sequence[Any], shard: int) -> list[Update]:
    """The updates of a shard.

    Args:
        vectors: its slices, in their order: y, and then the second vector, of each that has them.
    """
    slices, updates = iter(vectors), []
    for one in said:
        refused = one.refused
        vector = None if refused is not None else next(slices)
        control: Any = one.control if isinstance(one.control, FedcoreError) else None
        if one.control is True:
            control = Sent(next(slices), digest=_of(one.control_digests, shard))
        weighs = 0 if one.named else bytes_of(vector)
        sent = Sent(vector, one.counters or {}, refused, _of(one.digests, shard), weighs)
        updates.append(one.update._replace(**{one.kind: sent, "control": control}))
    return updates


def _of(digests: Sequence[str] | None, shard: int) -> str | None:
    return None if digests is None else digests[shard]


class SliceReader(UpdateReader):
    """Reads updates of which slices come."""

    def _read_vector(self, update: Update) -> tuple[Any, bool]:
        kind, sent = update.sent
        assert isinstance(sent, Sent)
        if sent.refused is not None:
            raise sent.refused
        vector, fixed = super()._read_vector(update._replace(**{kind: sent.vector}))
        sent.require(kind, vector)
        return vector, fixed

    def _read_counters(self, update: Update) -> Counters:
        sent: Sent = update.sent[1]
        return sent.counters

    def _read_control(self, control: Any) -> Any:
        if isinstance(control, FedcoreError):
            raise control
        if not isinstance(control, Sent):
            return super()._read_control(control)
        vector = super()._read_control(control.vector)
        control.require("control", vector)
        return vector
