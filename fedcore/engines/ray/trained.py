"""The vectors of a task that has been done, on their way from the worker: whole, or each slice an object of its own."""

from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple

from fedcore.server.slices import Slices, digest_of
from fedcore.typing import F32

Ranges = Sequence[tuple[int, int, int]]
"""(start, stop, end) of each shard: see ``SentSlices``."""


class Trained(NamedTuple):
    """The models that the clients of a task made of x, and what they did.

    Attributes:
        ys: float32[n] of each; none where slices come beside this.
        controls: float32[n_parameters] of each, the second vectors, where they were asked for; likewise.
        steps: that each did.
        rates: the mean rate of each.
        digests: of the slices that come beside this: of each client's y, and of its second vector.
    """

    ys: list[F32]
    controls: list[F32]
    steps: list[int]
    rates: list[float]
    digests: Sequence[Sequence[Sequence[str]]] = ()

    def cut(self, ranges: Ranges) -> list[Any]:
        """The same without vectors, and behind it each client's slices: of y, and of its second vector."""
        slices: list[F32] = []
        digests = []
        for i, y in enumerate(self.ys):
            vectors = [[y[start:stop] for start, stop, _ in ranges]]
            vectors += [[control[start:end] for start, _, end in ranges] for control in self.controls[i : i + 1]]
            digests.append([list(map(digest_of, own)) for own in vectors])
            slices += [one for own in vectors for one in own]
        return [self._replace(ys=[], controls=[], digests=digests), *slices]

    def vectors(self, references: Sequence[Any], shards: int) -> Iterator[tuple[Any, Any]]:
        """Each client's y and second vector, or None: themselves, or the slices to which there are references."""
        if not self.digests:
            yield from zip(self.ys, self.controls or repeat(None), strict=False)
            return
        parts = iter(references)
        for digests in self.digests:
            y, *control = [Slices(tuple(islice(parts, shards)), own) for own in digests]
            yield y, control[0] if control else None


def returns(clients: int, shards: int, has_control: bool) -> int:
    """The number of objects that ``cut`` gives."""
    return 1 + clients * shards * (1 + has_control)
