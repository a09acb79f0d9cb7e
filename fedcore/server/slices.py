"""A vector in slices, one for each shard of a server: arrays, or references to arrays that are elsewhere."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcore.clients import ClientId
from fedcore.errors import RangeError
from fedcore.store.checksum import checksums


@dataclass(frozen=True)
class Slices:
    """A client's vector as shards take it: it stands in an ``Update`` in the place of the whole.

    Attributes:
        parts: for each of ``Server.ranges`` float32[stop - start], or up to ``end`` where there are no buffers in it;
            or references to such (``ray.ObjectRef``).
        digests: ``digest_of`` each part, as whoever had the whole has made them; None where nobody did.
    """

    parts: Sequence[Any]
    digests: Sequence[str] | None = None

    def require(self, name: str, shards: int) -> None:
        """Refuse slices of another server.

        Raises:
            RangeError: they, or their digests, are not as many as there are shards.
        """
        for what, given in (("slice", self.parts), ("digest", self.digests)):
            if given is not None and len(given) != shards:
                raise RangeError(f"{name}: expected a {what} for each of {shards} shards, got {len(given)}")


@dataclass(frozen=True)
class SentSlices:
    """The vectors of a broadcast, for workers that read them where they are: references, one for each shard.

    Attributes:
        ranges: (start, stop, end) of each shard: it has the elements [start, stop) of x, [start, end) of an offset.
        x, x_prev: of the models; x_prev is None where there is none.
        offset: of a client's offset, made when it is asked for.
    """

    ranges: Sequence[tuple[int, int, int]]
    x: Sequence[Any]
    x_prev: Sequence[Any] | None
    offset: Callable[[ClientId], Sequence[Any]]


def digest_of(vector: Any) -> str:
    """The digest of a slice, by which its shard knows that it is of the vector that the others have slices of.

    Cost: reads the slice once, near the speed of a plain sum.
    """
    array = np.ascontiguousarray(vector)
    return hashlib.blake2b(checksums(array).tobytes(), digest_size=16).hexdigest()
