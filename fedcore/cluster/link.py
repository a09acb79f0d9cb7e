"""The link of a shard to the others: the whole of the vectors of which it has slices."""

from typing import Any

import numpy as np

from fedcore.aggregation import Squares
from fedcore.cluster.ranges import BLOCK
from fedcore.cluster.strand import Strand
from fedcore.typing import F64


class Link:
    """A ``fedcore.aggregation.Whole`` that asks the coordinator; see there.

    Args:
        strand: in which the shard's calls run.
        first: the place of the shard's first parameter.
        has_buffers: whether a shard has float buffers.
        place: what the shard's folder says of it.
    """

    def __init__(self, strand: Strand, *, first: int, has_buffers: bool, place: dict[str, Any]) -> None:
        self._strand = strand
        self.first, self.has_buffers = first, has_buffers
        self.place: dict[str, Any] | None = place

    def room(self, n: int, k: int = 1) -> F64 | None:
        """See ``Whole``."""
        return np.empty((-(-n // BLOCK), k))

    def add(self, *squares: Squares) -> list[F64]:
        """See ``Whole``."""
        partials = [one.partials for one in squares]
        assert all(one is not None for one in partials)
        added: list[F64] = self._strand.ask("add", partials)
        return [np.array(one) for one in added]  # others have the same, and what came from Ray is read-only

    def refusals(self, reasons: list[str | None]) -> list[str | None]:
        """See ``Whole``."""
        merged: list[str | None] = self._strand.ask("refusals", reasons)
        return merged

    def agree(self, yes: bool) -> bool:
        """See ``Whole``."""
        return bool(self._strand.ask("agree", yes))

    def ready(self) -> None:
        """See ``Whole``."""
        self._strand.ask("ready", None)
