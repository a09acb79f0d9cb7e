"""The places of slots: how far one is from the next, where the first begins in a file, how many a map takes."""

from dataclasses import dataclass
from math import gcd

VERSION = 3
"""The version of the files' format that new stores have."""

LINE = 64  # bytes: a cache line, to which every part of a slot is aligned
CHUNK = 64 << 20  # bytes that memory is asked for at a time
BLOCK = 64 << 10  # bytes under one checksum

# What slots are aligned to by the version. Version 1 was made for pages of 4 KiB, and 2 for the largest that processors
# have: chunks then begin on a page of every system, and large slots do. Version 3 changed the index alone.
GRAINS = {1: 4 << 10, 2: 64 << 10, 3: 64 << 10}


@dataclass(frozen=True)
class Geometry:
    """The places of slots of one size.

    Attributes:
        sums_at: bytes from a slot's beginning to the checksums of its blocks, behind the payload.
        blocks: how many checksums there are.
        stride: bytes from one slot to the next.
        begin: where the first slot lies in a file.
        per_chunk: slots in a chunk.
    """

    sums_at: int
    blocks: int
    stride: int
    begin: int
    per_chunk: int

    @classmethod
    def of(cls, payload: int, version: int = VERSION) -> "Geometry":
        """The geometry of slots for so many bytes.

        A slot of 16 grains or more is rounded up to whole ones (of 4 KiB from 64 KiB on, of 64 KiB from 1 MiB on):
        it takes at most a sixteenth more, and shares no page. A chunk is whole grains always.
        """
        grain = GRAINS[version]
        sums_at, blocks = padded(payload, LINE), -(-payload // BLOCK)
        stride = sums_at + padded(8 * blocks, LINE)
        for unit in sorted({grain, 4 << 10}, reverse=True):
            if stride >= 16 * unit:
                stride = padded(stride, unit)
                break
        together = grain // gcd(stride, grain)
        return cls(sums_at, blocks, stride, grain, max(1, CHUNK // stride // together) * together)


def padded(size: int, to: int) -> int:
    """The size rounded up to a multiple."""
    return -(-size // to) * to
