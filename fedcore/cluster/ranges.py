"""The ranges of a model's elements that shards have, and the layout of each."""

from dataclasses import replace
from typing import NamedTuple

from fedcore.arguments import whole
from fedcore.errors import RangeError
from fedcore.layout import Layout, Slice
from fedcore.optimizers import Optimizer

BLOCK = 16_384
"""Elements of a block of the kernels: where ranges may be cut, so that lengths and rows have the bits of one server."""


class Range(NamedTuple):
    """The elements [start, stop) of the flat vector, float buffers included; its parameters end at ``end``."""

    start: int
    stop: int
    end: int


def ranges_of(layout: Layout, shards: int) -> tuple[Range, ...]:
    """Ranges of about as many parameters each; the last has all float buffers too.

    Raises:
        RangeError: there are more shards than blocks of 16,384 parameters, or none.
    """
    p, blocks = layout.n_parameters, -(-layout.n_parameters // BLOCK)
    most = max(1, blocks)
    if whole("shards", shards, 1) > most:
        raise RangeError(
            f"shards: expected at most {most}, one for {BLOCK:,} of {p:,} parameters, got {shards}: small models need "
            "no cluster"
        )
    at = [BLOCK * (blocks * k // shards) for k in range(shards)] + [p]
    ends = at[1:]
    stops = [*ends[:-1], layout.n]
    return tuple(Range(start, stop, end) for start, stop, end in zip(at, stops, ends, strict=False))


def cut(layout: Layout, span: Range, *, counters: bool) -> Layout:
    """The layout of a range: the tensors in it, flat, as far as they are in it.

    Args:
        counters: whether the shard keeps the counters and constants.
    """
    pieces = []
    for piece in layout.slices:
        start, stop = max(piece.start, span.start), min(piece.stop, span.stop)
        if start < stop:
            pieces.append(Slice(piece.name, piece.kind, (stop - start,), piece.dtype))
    kept = [replace(piece) for piece in layout.outside] if counters else []
    return Layout([*pieces, *kept], library="numpy")


def require_elementwise(optimizer: Optimizer | None) -> None:
    """Refuse an optimiser that may need the whole of a vector.

    Raises:
        RangeError: it does not say that it needs none.
    """
    if optimizer is not None and getattr(optimizer, "elementwise", False) is not True:
        raise RangeError(
            f"optimizer: expected one whose step is made element by element, since each shard has a range of them, got "
            f"{optimizer}: a class of one's own that is says so by elementwise = True"
        )
