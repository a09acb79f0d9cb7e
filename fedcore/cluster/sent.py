"""The updates of clients as shards get them: slices, or the reason why there are none."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedcore.aggregation import Counters
from fedcore.errors import ArrayError, FedcoreError
from fedcore.server.update import Update, bytes_of
from fedcore.server.update_reader import UpdateReader
from fedcore.store.checksum import checksums


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
    """

    update: Update
    kind: str
    refused: FedcoreError | None = None
    control: bool | FedcoreError = False
    counters: Counters | None = None
    named: bool = False
    digests: tuple[str, ...] | None = None


@dataclass(slots=True)
class Sent:
    """A shard's slice of what a client sent: it stands in an ``Update`` in the place of a model."""

    vector: Any
    counters: Counters = field(default_factory=dict)
    refused: FedcoreError | None = None
    digest: str | None = None
    nbytes: int = 0


def digest_of(vector: Any) -> str:
    """The digest of a slice, by which its shard knows that it is of the vector that the others have slices of.

    Cost: reads the slice once, near the speed of a plain sum.
    """
    array = np.ascontiguousarray(vector)
    return hashlib.blake2b(checksums(array).tobytes(), digest_size=16).hexdigest()


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
            control = next(slices)
        digest = None if one.digests is None else one.digests[shard]
        sent = Sent(vector, one.counters or {}, refused, digest, 0 if one.named else bytes_of(vector))
        updates.append(one.update._replace(**{one.kind: sent, "control": control}))
    return updates


class SliceReader(UpdateReader):
    """Reads updates of which slices come."""

    def _read_vector(self, update: Update) -> tuple[Any, bool]:
        kind, sent = update.sent
        assert isinstance(sent, Sent)
        if sent.refused is not None:
            raise sent.refused
        vector, fixed = super()._read_vector(update._replace(**{kind: sent.vector}))
        if sent.digest is not None and digest_of(vector) != sent.digest:
            raise ArrayError(
                f"{kind}: expected slices of one vector, got one whose digest is not the client's: send all anew"
            )
        return vector, fixed

    def _read_counters(self, update: Update) -> Counters:
        sent: Sent = update.sent[1]
        return sent.counters

    def _read_control(self, control: Any) -> Any:
        if isinstance(control, FedcoreError):
            raise control
        return super()._read_control(control)
