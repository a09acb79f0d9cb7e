"""The vectors of a cluster's broadcast: put together where somebody asks for the whole of one, and not before."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

from fedcore.clients import ClientId
from fedcore.cluster.coordinator import Coordinator
from fedcore.cluster.ranges import Range
from fedcore.cluster.shard import joined
from fedcore.memory import copy_into
from fedcore.server.slices import SentSlices
from fedcore.typing import F32


class Gathered:
    """A ``SentVectors`` of the slices that shards have given.

    Args:
        x, x_prev: of each shard, as ``Coordinator.fetch`` gives them.
        offset: of each shard, of a client's offset.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        ranges: Sequence[Range],
        x: Sequence[Any],
        x_prev: Sequence[Any] | None,
        offset: Callable[[ClientId], Sequence[Any]],
    ) -> None:
        self._coordinator, self._opening = coordinator, coordinator.openings
        self._sent = SentSlices(ranges, x, x_prev, offset)

    @cached_property
    def x(self) -> F32:
        """See ``SentVectors``. Cost: 4 n bytes, read and written."""
        return self._joined(self._sent.x)

    @cached_property
    def x_prev(self) -> F32 | None:
        """See ``SentVectors``."""
        return None if self._sent.x_prev is None else self._joined(self._sent.x_prev)

    @property
    def slices(self) -> SentSlices | None:
        """See ``SentVectors``: there are some where other processes can read them."""
        return self._sent if self._coordinator.placement.refers else None

    def offset(self, client: ClientId, out: Any) -> Any:
        """See ``SentVectors``."""
        whole = self._joined(self._sent.offset(client))
        if out is None:
            return whole
        copy_into(out, whole)
        return out

    def on_host(self) -> Self:
        """See ``SentVectors``: shards are on CPUs."""
        return self

    def facts(self) -> dict[str, Any]:
        """See ``SentVectors``."""
        return {"n": self._sent.ranges[-1][1], "shards": len(self._sent.ranges)}

    def _joined(self, slices: Sequence[Any]) -> F32:
        whole: F32 = joined(self._coordinator.read(slices, self._opening))
        return whole
