"""Named tensors as one flat float32 vector and back: the only place that knows where a tensor lies in it.

A flat vector holds the *parameters* first and the *float buffers* (BatchNorm statistics) behind them; integer
*counters* stay outside it, because averaging them would turn them into floats. Corrections and per-client rows
cover the parameters only, so they have ``n_parameters`` elements where a model has ``n``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedcore.errors import ArrayError, DtypeError, ShapeError

Vector = npt.NDArray[np.float32]
Kind = Literal["parameter", "buffer", "counter"]

BUFFERS = ("*running_mean", "*running_var")
"""The names by which a bare mapping's float buffers are told from its parameters."""


@dataclass(frozen=True)
class Slice:
    """One named tensor: its kind, shape and dtype, and [start, stop) in the flat vector (empty for a counter)."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int = 0
    stop: int = 0


class Layout:
    """Where each named tensor lies in the flat vector.

    Attributes:
        n: elements of the flat vector.
        n_parameters: its first elements, those that are parameters: the width of a client's row.
        slices: the tensors of the flat vector, in its order.
        counters: the integer tensors, which lie outside it.
        aliases: further names of tied parameters, which a ``state_dict`` lists and the vector holds once.
    """

    def __init__(self, tensors: Iterable[Slice], aliases: Mapping[str, str] | None = None) -> None:
        listed = list(tensors)
        self.slices: tuple[Slice, ...] = ()
        self.counters = tuple(piece for piece in listed if piece.kind == "counter")
        self.aliases = dict(aliases or {})
        start = 0
        for kind in ("parameter", "buffer"):
            for piece in listed:
                if piece.kind == kind:
                    stop = start + math.prod(piece.shape)
                    self.slices += (replace(piece, start=start, stop=stop),)
                    start = stop
            if kind == "parameter":
                self.n_parameters = start
        self.n = start

    @classmethod
    def of(cls, x: Any, *, buffers: Sequence[str] = BUFFERS) -> "Layout":
        """The layout of a model.

        Args:
            x: an ``nn.Module``, a ``state_dict`` or other mapping of arrays, a sequence of arrays (named "0",
               "1", ...), or one array (named "x"). NumPy arrays or CPU torch tensors; float32, or an integer
               dtype for counters.
            buffers: patterns of the names that are float buffers, for a mapping that cannot say so itself. A
               module knows its own.

        Raises:
            DtypeError: a tensor is neither float32 nor an integer.
            ArrayError: an entry is no array.

        >>> layout = Layout.of({"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)})
        >>> layout.n, layout.names
        (8, ('w', 'b'))
        """
        parameters: set[str] = set()
        buffer_names: set[str] = set()
        aliases: dict[str, str] = {}
        if hasattr(x, "named_parameters"):
            first = {id(tensor): name for name, tensor in x.named_parameters()}
            parameters = set(first.values())
            buffer_names = {name for name, _ in x.named_buffers()}
            for name, tensor in x.named_parameters(remove_duplicate=False):
                if first[id(tensor)] != name:
                    aliases[name] = first[id(tensor)]
        tensors = []
        for name, leaf in _named(x).items():
            dtype = _dtype(name, leaf)
            is_buffer = name in buffer_names or (
                name not in parameters and any(fnmatch(name, pattern) for pattern in buffers)
            )
            if dtype.kind in "iu":
                kind: Kind = "counter"
            elif dtype == np.float32:
                kind = "buffer" if is_buffer else "parameter"
            else:
                raise DtypeError(f"{name}: expected float32 or an integer dtype, got {dtype}")
            tensors.append(Slice(name, kind, tuple(leaf.shape), dtype))
        return cls(tensors, aliases)

    def to_state(self) -> dict[str, Any]:
        """The layout as JSON can hold it."""
        listed = self.slices + self.counters
        pieces = [[piece.name, piece.kind, list(piece.shape), str(piece.dtype)] for piece in listed]
        return {"tensors": pieces, "aliases": self.aliases}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Layout":
        """The layout that ``to_state`` described.

        Raises:
            LookupError, TypeError, ValueError: it is none.
        """
        pieces = [Slice(name, kind, tuple(shape), np.dtype(dtype)) for name, kind, shape, dtype in state["tensors"]]
        for piece in pieces:
            due = "iu" if piece.kind == "counter" else "f"
            if piece.kind not in get_args(Kind) or piece.dtype.kind not in due:
                raise DtypeError(f"{piece.name}: expected a tensor that a layout has, got {piece.kind} {piece.dtype}")
            if any(type(length) is not int or length < 0 for length in piece.shape):
                raise ShapeError(f"{piece.name}: expected lengths, got {list(piece.shape)}")
        return cls(pieces, state["aliases"])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the flat vector's tensors, in its order."""
        return tuple(piece.name for piece in self.slices)

    def flatten(self, x: Any, out: Vector | None = None) -> Vector:
        """Copy a model's parameters and float buffers into one vector.

        Args:
            x: a model with this layout's names, shapes and dtypes, in any of the forms ``Layout.of`` takes.
            out: float32[n], written in place; a new one if None.

        Returns:
            float32[n], ``out`` if it was given.

        Raises:
            ShapeError, DtypeError: a tensor, or ``out``, is not what the layout says.
            ArrayError: a name is missing, or there is one too many.

        Cost: reads 4 n bytes, writes 4 n bytes.
        """
        named = self._check(x)
        if out is None:
            out = np.empty(self.n, np.float32)
        elif out.dtype != np.float32:
            raise DtypeError(f"out: expected float32[{self.n}], got {out.dtype}")
        elif out.shape != (self.n,):
            raise ShapeError(f"out: expected float32[{self.n}], got shape {out.shape}")
        for piece in self.slices:
            out[piece.start : piece.stop] = _array(piece.name, named[piece.name]).reshape(-1)
        return out

    def pieces(self, x: Any) -> list[Vector]:
        """A model's parameters and float buffers as vectors, in the order of ``slices``, without putting them together.

        Args:
            x: as for ``flatten``.

        Returns:
            Views of the model's memory; copies of tensors that are not contiguous, or lie where no float32 may.

        Raises:
            Those of ``flatten``.
        """
        named = self._check(x)
        pieces = []
        for piece in self.slices:
            tensor = _array(piece.name, named[piece.name]).reshape(-1)
            pieces.append(tensor if tensor.flags.aligned else tensor.copy())
        return pieces

    def unflatten(self, flat: Vector) -> dict[str, Vector]:
        """The named tensors of a flat vector, as views of it: writing to one writes to ``flat``.

        Args:
            flat: float32[n].

        Raises:
            ShapeError: ``flat`` has another length.
        """
        if flat.shape != (self.n,):
            raise ShapeError(f"flat: expected float32[{self.n}], got shape {flat.shape}")
        return {piece.name: flat[piece.start : piece.stop].reshape(piece.shape) for piece in self.slices}

    def read_counters(self, x: Any) -> dict[str, npt.NDArray[np.integer[Any]]]:
        """Copies of a model's integer counters, in their own dtypes."""
        named = self._check(x) if self.counters else {}
        return {piece.name: _array(piece.name, named[piece.name]).copy() for piece in self.counters}

    def _check(self, x: Any) -> dict[str, Any]:
        """The model's tensors by name, each with the shape and kind of dtype that the layout says."""
        named = {name: leaf for name, leaf in _named(x).items() if name not in self.aliases}
        pieces = {piece.name: piece for piece in self.slices + self.counters}
        if named.keys() != pieces.keys():
            missing = [name for name in pieces if name not in named]
            extra = [name for name in named if name not in pieces]
            raise ArrayError(f"model: expected the tensors {list(pieces)}; missing {missing}, unexpected {extra}")
        for name, leaf in named.items():
            piece, dtype = pieces[name], _dtype(name, leaf)
            if dtype != piece.dtype:
                raise DtypeError(f"{name}: expected {piece.dtype}, got {dtype}")
            try:
                shape = tuple(leaf.shape)
            except RuntimeError:  # a nested tensor has none
                raise ShapeError(f"{name}: expected shape {piece.shape}, got a tensor without a shape") from None
            if shape != piece.shape:
                raise ShapeError(f"{name}: expected shape {piece.shape}, got {shape}")
        return named


def _named(x: Any) -> dict[str, Any]:
    if hasattr(x, "named_parameters"):
        # Not state_dict(): it names a tied parameter twice, and detaches what a view must stay attached to.
        persistent = x.state_dict().keys()
        return dict(x.named_parameters()) | {k: v for k, v in x.named_buffers() if k in persistent}
    if isinstance(x, Mapping):
        return {str(name): leaf for name, leaf in x.items()}
    if hasattr(x, "shape"):
        return {"x": x}
    if isinstance(x, Sequence) and not isinstance(x, str | bytes):
        return {str(index): leaf for index, leaf in enumerate(x)}
    raise ArrayError(f"model: expected a module, a mapping or sequence of arrays, or an array, got {type(x).__name__}")


def _dtype(name: str, leaf: Any) -> np.dtype[Any]:
    if isinstance(leaf, np.ndarray):
        dtype: np.dtype[Any] = leaf.dtype
        return dtype
    try:
        return np.dtype(str(leaf.dtype).removeprefix("torch."))
    except AttributeError:
        raise ArrayError(f"{name}: expected an array, got {type(leaf).__name__}") from None
    except TypeError:
        raise DtypeError(f"{name}: expected float32 or an integer dtype, got {leaf.dtype}") from None


def _array(name: str, leaf: Any) -> npt.NDArray[Any]:
    """A NumPy view of an array or CPU tensor."""
    if isinstance(leaf, np.ndarray):
        return leaf
    try:
        return np.from_dlpack(leaf.detach()) if hasattr(leaf, "detach") else np.asarray(leaf)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArrayError(f"{name}: expected an array in CPU memory: {error}") from None
