"""The whole of a server's vectors, for decisions that a slice of them cannot make: a shard asks the others."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedcore import kernels
from fedcore.typing import F64, Floats


class Squares(NamedTuple):
    """The squared lengths of k vectors, or of the slices of them that lie here."""

    here: F64
    """float64[k], as a kernel has added them up over what lies here."""
    partials: F64 | None = None
    """float64[blocks, k], what each block adds to them, of which the whole's lengths are made; None where this is it.
    """


class Whole(Protocol):
    """The questions of a server, or of a shard of one, about the whole of its vectors.

    Every shard of a cluster makes the same calls in the same order, each with what it knows of its own slice; each of
    them gets the same answer. So all of them decide alike.

    Attributes:
        first: the place of the slice's first parameter in a row.
        has_buffers: whether there are float buffers in the whole: they lie in one of the shards.
        place: what a folder says of the shard; None for a server that has no others.
    """

    first: int
    has_buffers: bool
    place: dict[str, Any] | None

    def room(self, n: int, k: int = 1) -> F64 | None:
        """Memory for a kernel's ``partials=``, over k vectors of n elements; None where nobody needs them."""
        ...

    def add(self, *squares: Squares) -> list[F64]:
        """The squared lengths of the whole vectors, with the bits of one kernel over all of each."""
        ...

    def refusals(self, reasons: list[str | None]) -> list[str | None]:
        """The reasons to refuse some replies, here or elsewhere; None for those that nobody refuses."""
        ...

    def agree(self, yes: bool) -> bool:
        """Tell whether all say yes."""
        ...

    def ready(self) -> None:
        """Wait until all are ready to make a change count. What may fail has been done; only the commit is left.

        Raises:
            ClusterError: one is not; nothing is to change.
        """
        ...


class Alone:
    """The whole of a server that has no shards: what is here is all."""

    def __init__(self, *, has_buffers: bool) -> None:
        self.first, self.has_buffers = 0, has_buffers
        self.place: dict[str, Any] | None = None

    def room(self, n: int, k: int = 1) -> F64 | None:
        """See ``Whole``."""
        return None

    def add(self, *squares: Squares) -> list[F64]:
        """See ``Whole``."""
        return [one.here for one in squares]

    def refusals(self, reasons: list[str | None]) -> list[str | None]:
        """See ``Whole``."""
        return reasons

    def agree(self, yes: bool) -> bool:
        """See ``Whole``."""
        return yes

    def ready(self) -> None:
        """See ``Whole``."""


def combined_square(whole: Whole, terms: Sequence[Floats], coefficients: Sequence[float]) -> float:
    """``kernels.combined_square`` of whole vectors, of which the terms are the slices that lie here."""
    room = whole.room(len(terms[0]))
    square = kernels.combined_square(terms, coefficients, partials=room)
    return float(whole.add(Squares(np.array([square]), room))[0][0])
