"""Checks of a reply's float buffers, counters and constants, of which one lie would stay for ever."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import devices, kernels
from fedcore.errors import RangeError
from fedcore.layout import Layout
from fedcore.libraries import dtype_name
from fedcore.memory import Recycled, copy_into, to_host
from fedcore.server.limits import MEDIANS
from fedcore.server.update import Kind, in_float32
from fedcore.typing import F32

Counters = Mapping[str, npt.NDArray[Any]]

SIGNED = ("*mean",)
"""Names of buffers that may become negative, though the first ones are not."""

MOST_GROWTH = 2**53
"""The most that a counter grows by in a round."""

EXACT = 1e-6
"""How far x + (y - x) may be from y, relative to x."""


def never_negative(layout: Layout, x: F32, signed: Sequence[str]) -> tuple[str, ...]:
    """The float buffers that are not negative in a first model, and that are not to become so, such as variances.

    One that is zero throughout says nothing of its sign.

    Args:
        x: float32[n].
        signed: patterns of the names of those that may.
    """
    return tuple(
        piece.name
        for piece in layout.slices
        if piece.kind == "buffer"
        and not any(fnmatch(piece.name, pattern) for pattern in signed)
        and (x[piece.start : piece.stop] >= 0).all()
        and (x[piece.start : piece.stop] > 0).any()
    )


class Buffers:
    """The float buffers of a layout that must not be negative.

    Args:
        names: of ``never_negative``.
        device: where models lie, and the replies that came from there.
    """

    def __init__(self, layout: Layout, names: Sequence[str], device: str = devices.CPU) -> None:
        self._at = [(i, piece) for i, piece in enumerate(layout.slices) if piece.name in names]
        sizes = [piece.stop - piece.start for _, piece in self._at]
        stops = list(accumulate(sizes))
        self._side_by_side = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        self._gathered = None if device == devices.CPU else Recycled(sum(sizes), device=device)

    def check(self, y: Any, base: F32 | None) -> None:
        """Refuse a reply that makes one of them negative.

        Args:
            y: floating[n], or a list of tensors as the layout's slices.
            base: float32[n], the x that y is the difference from; None if y is a model.

        Raises:
            RangeError: it does.
        """
        if not self._at:
            return
        parts = self._on_host(y)
        starts: Sequence[F32 | None] = [None] * len(parts) if base is None else self._on_host(base)
        for (_, piece), part, start in zip(self._at, parts, starts, strict=True):
            least = np.float32(0) if start is None else np.float32(-(1 + EXACT)) * start
            if (part < least).any():
                lowest = part.min() if start is None else (part + start).min()
                raise RangeError(
                    f"{piece.name}: expected numbers >= 0, as they were from the start, got {lowest:g}: a buffer that "
                    "may become negative needs Server(signed_buffers=)"
                )

    def _on_host(self, y: Any) -> list[F32]:
        """Their numbers in a model, or in a difference; of what lies on a device all at once, so that one wait does."""
        parts = [y[i] if isinstance(y, list) else y[piece.start : piece.stop] for i, piece in self._at]
        if self._gathered is None or any(devices.of(part) == devices.CPU for part in parts):
            return [in_float32(part).reshape(-1) for part in parts]
        gathered: Any = self._gathered.take()
        for part, place in zip(parts, self._side_by_side, strict=True):
            if dtype_name(part) == "float32":
                gathered[place].copy_from(part)
            else:
                kernels.weighted_sum_segments([[part]], [1.0], [gathered[place]])
        here = to_host(gathered)
        return [here[place] for place in self._side_by_side]

    def allow(self, ys: Sequence[F32]) -> bool:
        """Tell whether none of some models, float32[n] each, makes one of them negative."""
        return not any((y[piece.start : piece.stop] < 0).any() for _, piece in self._at for y in ys)

    def clip(self, x: F32) -> None:
        """Put zero in the place of what rounding made negative; x is float32[n]."""
        for (_, piece), here in zip(self._at, self._on_host(x) if self._at else [], strict=True):
            if (here < 0).any():
                np.maximum(here, 0, out=here)
                copy_into(x[piece.start : piece.stop], here)  # on a device; elsewhere it is there already


def settle_counters(layout: Layout, sent: Counters, now: Counters, kind: Kind) -> dict[str, npt.NDArray[Any]]:
    """The counters of a reply, those of a difference added to the server's; constants are only checked.

    Args:
        sent: of the reply; none of a flat vector.
        now: the server's.
        kind: what the reply is.

    Raises:
        RangeError: a constant differs from the server's, or a counter grew past every count.
    """
    for piece in layout.constants:
        if piece.name in sent and not _is_constant(sent[piece.name], now[piece.name], kind):
            raise RangeError(
                f"{piece.name}: expected the server's values, since {piece.dtype} is not averaged here, got others"
            )
    counters = {}
    for name in [piece.name for piece in layout.counters if piece.name in sent]:
        now_flat, sent_flat = (one[name].reshape(-1).astype(object) for one in (now, sent))  # Python's do not overflow
        after = now_flat + sent_flat if kind == "delta" else sent_flat
        most = np.minimum(now_flat + MOST_GROWTH, np.iinfo(now[name].dtype).max)
        if (after > most).any():
            raise RangeError(f"{name}: expected a count of at most {most.max()}, got {after.max()}")
        after = np.maximum(after, now_flat)
        counters[name] = after.astype(now[name].dtype).reshape(now[name].shape)
    return counters


def _is_constant(sent: npt.NDArray[Any], now: npt.NDArray[Any], kind: Kind) -> bool:
    """Tell whether a reply leaves a constant as it is: equal, or in a difference zero (a NaN where inf - inf is)."""
    if np.array_equal(sent, now, equal_nan=sent.dtype.kind == "f"):
        return True
    if kind != "delta":
        return False
    return not np.any(np.where(np.isfinite(now), sent, 0)) and bool(np.isnan(sent[~np.isfinite(now)]).all())


def grown(now: Counters, sent: Sequence[Counters]) -> dict[str, npt.NDArray[np.integer[Any]]]:
    """Counters after a round, in their own integer types: each as the largest of those that were sent.

    It grows by 10 times the median of what the cohort's grew by at most (of an even number the lower of the two in the
    middle; those that did not grow say nothing), so that one that claims ever so many steps takes it nowhere.
    """
    return {name: _grown(counter, [others[name] for others in sent if name in others]) for name, counter in now.items()}


def _grown(now: npt.NDArray[np.integer[Any]], sent: Sequence[npt.NDArray[np.integer[Any]]]) -> Any:
    if not sent:
        return now
    wide = np.uint64 if now.dtype == np.uint64 else np.int64  # differences fit: see MOST_GROWTH
    before = now.astype(wide)
    by = np.sort(np.maximum(np.stack(sent).astype(wide), before) - before, axis=0)
    still = (by == 0).sum(axis=0)
    middle = np.minimum(still + (len(by) - 1 - still) // 2, len(by) - 1)
    median = np.take_along_axis(by, middle[np.newaxis], axis=0)[0]
    return np.asarray(before + np.minimum(by[-1], wide(MEDIANS) * median)).astype(now.dtype)
