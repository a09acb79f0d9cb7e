"""The vectors of a broadcast, wherever they lie."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedcore.clients import ClientId
from fedcore.memory import copy_into, freeze, to_host
from fedcore.server.slices import SentSlices
from fedcore.typing import F32


class SentVectors(Protocol):
    """The vectors from which clients start. What is not here is brought when it is asked for, and kept."""

    @property
    def x(self) -> F32:
        """float32[n], read-only, and never changed later."""
        ...

    @property
    def x_prev(self) -> F32 | None:
        """The x of the round before, or None where no client needs it."""
        ...

    @property
    def slices(self) -> SentSlices | None:
        """References to their slices; None where there are none."""
        ...

    def offset(self, client: ClientId, out: Any) -> Any:
        """See ``Broadcast.offset``."""
        ...

    def on_host(self) -> "SentVectors":
        """The same in host memory."""
        ...

    def facts(self) -> dict[str, Any]:
        """The facts to show, for which nothing is brought."""
        ...


@dataclass(frozen=True)
class Whole:
    """Vectors of one piece, which are there.

    Attributes:
        x, x_prev: as above.
        make: an offset, as ``offset`` does.
    """

    x: F32
    x_prev: F32 | None
    make: Callable[[ClientId, Any], Any]

    @property
    def slices(self) -> None:
        """None: they are of one piece."""
        return

    def offset(self, client: ClientId, out: Any) -> Any:
        """See ``SentVectors``."""
        return self.make(client, out)

    def on_host(self) -> "Whole":
        """See ``SentVectors``."""
        if isinstance(self.x, np.ndarray):
            return self

        def offset(client: ClientId, out: Any) -> Any:
            here = to_host(self.make(client, None))
            if out is None:
                return here
            copy_into(out, here)
            return out

        x, x_prev = to_host(self.x), None if self.x_prev is None else to_host(self.x_prev)
        for vector in (x, x_prev):
            if vector is not None:
                freeze(vector)
        return Whole(x, x_prev, offset)

    def facts(self) -> dict[str, Any]:
        """See ``SentVectors``."""
        return {"x": self.x, "x_prev": self.x_prev}
