"""A model's tensors as one vector, and files of models."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedcore.arguments import absolute
from fedcore.arrays import (
    CPU,
    NARROW,
    Library,
    as_array,
    as_tensor,
    copy_there,
    device_of,
    dtype_name,
    flat_there,
    has_infinities,
    here,
    is_own_class,
    library_of,
    own_class,
    read_leaf,
    require_dense,
    to_host,
    write_tensor,
    write_there,
)
from fedcore.atomic_file import draft_of
from fedcore.errors import ArrayError, DtypeError, MissingDependencyError, ShapeError, StoreError, UnknownNameError
from fedcore.native import core
from fedcore.representation import Represented

# Named tensors as one flat float32 vector and back: the only place that knows where a tensor lies in it.
#
# A flat vector holds the *parameters* first and the *float buffers* (BatchNorm statistics) behind them. Outside it are
# *counters*, which count steps and are integers, and *constants*, which no method averages: other integers (packed
# weights, codes), bools, and buffers that are not finite (masks of -inf). Corrections and per-client rows cover the
# parameters only, so they have ``n_parameters`` elements where a model has ``n``.


Vector = npt.NDArray[np.float32]
Kind = Literal["parameter", "buffer", "counter", "constant"]
Tree = Any
"""The nesting of a model: a tensor's name, or a list or mapping of trees, as JSON holds them."""

FLOATS = ("float32", "float64", *NARROW)
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
DUE = "float32, float64, bfloat16, float16, an integer dtype or bool"

BUFFERS = ("*running_mean", "*running_var")
"""The names by which a bare mapping's float buffers are told from its parameters."""

COUNTERS = ("*num_batches_tracked",)
"""The names of counters that are no scalars of 32 or 64 bits."""


@dataclass(frozen=True)
class Slice:
    """One named tensor: its kind, shape and dtype's name, and [start, stop) in the flat vector, if it is in it."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    stop: int = 0


class Layout(Represented):
    """The place of each named tensor in the flat vector.

    Attributes:
        n: elements of the flat vector.
        n_parameters: its first elements, those that are parameters: the width of a client's row.
        slices: the tensors of the flat vector, in its order.
        counters: the tensors that count steps, which lie outside it.
        constants: the tensors that stay as they are in the first model; a reply that differs there is rejected.
        narrow: the tensors of the flat vector whose dtype does not hold every float32.
        aliases: further names of tied parameters, which a ``state_dict`` lists and the vector holds once.
        library: what the model's tensors are of: "numpy", "torch" or "jax".
        tree: the model's nesting, where it is more than a mapping of tensors; else None. Layouts that differ in library
            or tree alone are equal.
    """

    def __init__(
        self,
        tensors: Iterable[Slice],
        aliases: Mapping[str, str] | None = None,
        library: Library = "numpy",
        tree: Tree = None,
    ) -> None:
        listed = list(tensors)
        self.slices: tuple[Slice, ...] = ()
        self.counters = tuple(piece for piece in listed if piece.kind == "counter")
        self.constants = tuple(piece for piece in listed if piece.kind == "constant")
        self.outside = self.counters + self.constants
        self.aliases = dict(aliases or {})
        self.library, self.tree = library, tree
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
        self.narrow = tuple(piece for piece in self.slices if piece.dtype in NARROW)
        self._shapes = [piece.shape for piece in self.slices]
        self._all = {piece.name: piece for piece in self.slices + self.outside}

    @classmethod
    def of(cls, x: Any, *, buffers: Sequence[str] = BUFFERS, counters: Sequence[str] = COUNTERS) -> "Layout":
        """The layout of a model.

        Args:
            x: an ``nn.Module``, a ``state_dict`` or other mapping of arrays, a sequence of arrays (named "0",
                "1", ...), a nested tree of these (named "layers.0.w"), or one array (named "x"). Arrays of NumPy, torch
                or JAX in CPU memory, or objects with DLPack's methods: float32; float64, bfloat16 and float16, which
                the server holds as float32; integers and bools.
            buffers: patterns of the names that are float buffers, for a mapping that cannot say so itself. A
                module knows its own.
            counters: patterns of the names of integer tensors that count steps. A scalar of 32 or 64 bits does in any
                case; every other integer tensor is a constant.

        Raises:
            DtypeError: a tensor is of another dtype.
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
        tensors, named = [], named_tensors(x)
        for name, leaf in named.items():
            dtype = _dtype(name, leaf)
            is_buffer = name in buffer_names or (
                name not in parameters and any(fnmatch(name, pattern) for pattern in buffers)
            )
            if dtype in INTEGERS:
                kind = kind_of_integers(name, dtype, leaf.shape, counters)
            elif dtype == "bool" or (dtype in FLOATS and name not in parameters and has_infinities(leaf)):
                kind = "constant"
            elif dtype in FLOATS:
                kind = "buffer" if is_buffer else "parameter"
            else:
                raise DtypeError(f"{name}: expected {DUE}, got {leaf.dtype}")
            require_dense(name, leaf)
            tensors.append(Slice(name, kind, tuple(leaf.shape), dtype))
        return cls(tensors, aliases, library_of(named.values()), tree_of(x))

    def __eq__(self, other: object) -> bool:
        """Tell whether the tensors and their places are the same."""
        if not isinstance(other, Layout):
            return NotImplemented
        return (self.slices, self.outside, self.aliases) == (other.slices, other.outside, other.aliases)

    def __hash__(self) -> int:
        return hash((self.slices, self.outside))

    def _facts(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "n_parameters": self.n_parameters,
            "tensors": len(self.slices),
            "counters": len(self.counters),
            "constants": len(self.constants),
            "library": self.library,
        }

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for piece in (*self.slices, *self.outside):
            yield piece.name, piece.kind, f"{piece.dtype}{list(piece.shape)}"

    def to_state(self) -> dict[str, Any]:
        """The layout as JSON can hold it."""
        listed = self.slices + self.outside
        pieces = [[piece.name, piece.kind, list(piece.shape), piece.dtype] for piece in listed]
        return {"tensors": pieces, "aliases": self.aliases, "library": self.library, "tree": self.tree}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Layout":
        """The layout that ``to_state`` described.

        Raises:
            LookupError, TypeError, ValueError: it is none.
        """
        pieces = [Slice(name, kind, tuple(shape), dtype) for name, kind, shape, dtype in state["tensors"]]
        for piece in pieces:
            due = {"counter": INTEGERS, "constant": (*INTEGERS, *FLOATS, "bool")}.get(piece.kind, FLOATS)
            if piece.kind not in get_args(Kind) or piece.dtype not in due:
                raise DtypeError(f"{piece.name}: expected a tensor that a layout has, got {piece.kind} {piece.dtype}")
            if any(type(length) is not int or length < 0 for length in piece.shape):
                raise ShapeError(f"{piece.name}: expected lengths, got {list(piece.shape)}")
        library = state.get("library", "numpy")  # older folders do not say
        if library not in get_args(Library):
            raise UnknownNameError.of("library", library, get_args(Library))
        tree = state.get("tree")
        if tree is not None and sorted(_leaves(tree)) != sorted(piece.name for piece in pieces):
            raise ArrayError("tree: expected each tensor once, got others")
        return cls(pieces, state["aliases"], library, tree)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the flat vector's tensors, in its order."""
        return tuple(piece.name for piece in self.slices)

    def flatten(self, x: Any, out: Vector | None = None) -> Vector:
        """Copy a model's parameters and float buffers into one vector.

        Args:
            x: a model with this layout's names, shapes and dtypes (or float32 in place of 16 bits), in any of the forms
                ``Layout.of`` takes.
            out: float32[n], written in place; a new one if None. Where it lies on a device, tensors may lie there too.

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
        device = device_of(out)
        for piece in self.slices:
            part, tensor = out[piece.start : piece.stop], named[piece.name]
            if device == CPU:
                part[...] = _array(piece, tensor).reshape(-1)
            else:
                write_there(piece.name, tensor, part, device)
        return out

    def pieces(self, x: Any, *, device: str = CPU) -> list[Any]:
        """A model's parameters and float buffers as vectors, in the order of ``slices``, without putting them together.

        Args:
            x: as for ``flatten``.
            device: where tensors may lie, if not in host memory.

        Returns:
            Views of the model's memory; copies of tensors that are not contiguous, or lie where no float32 may, or of
            16 bits.

        Raises:
            ShapeError, DtypeError, ArrayError: as for ``flatten``.
        """
        if isinstance(x, Mapping) and x.keys() == self._all.keys():
            plain = core.read_plain_tensors([x[piece.name] for piece in self.slices], self._shapes)
            if plain is not None:  # nearly always
                for piece in self.outside:
                    _check_tensor(piece, x[piece.name])
                return plain
        named = self._check(x)
        pieces: list[Any] = []
        for piece in self.slices:
            if device != CPU and device_of(named[piece.name]) == device:
                pieces.append(flat_there(piece.name, named[piece.name]))
                continue
            with np.errstate(over="ignore"):
                tensor = np.asarray(_array(piece, named[piece.name]), np.float32).reshape(-1)
            pieces.append(tensor if tensor.flags.aligned and tensor.flags.c_contiguous else tensor.copy())
        return pieces

    def unflatten(self, flat: Vector) -> dict[str, Vector]:
        """The named tensors of a flat vector, as views of it: writing to one writes to ``flat``.

        They are float32, whatever the model's own dtypes: ``tensors`` gives these back.

        Args:
            flat: float32[n].

        Raises:
            ShapeError: ``flat`` has another length.
        """
        if flat.shape != (self.n,):
            raise ShapeError(f"flat: expected float32[{self.n}], got shape {flat.shape}")
        return {piece.name: flat[piece.start : piece.stop].reshape(piece.shape) for piece in self.slices}

    def read_counters(self, x: Any) -> dict[str, npt.NDArray[Any]]:
        """Copies of a model's counters and constants, in their own dtypes, bfloat16 and float16 as float32."""
        named = self._check(x) if self.outside else {}
        return {piece.name: _array(piece, here(named[piece.name])).copy() for piece in self.outside}

    def tensors(
        self,
        flat: Vector,
        counters: Mapping[str, npt.NDArray[Any]],
        library: Library | None = None,
        *,
        copy: bool = True,
    ) -> Any:
        """A model as it was given first: by name (aliases included), or as a list or tree, in its own dtypes.

        Floats of 16 bits are rounded to the nearest.

        Args:
            flat: float32[n].
            counters: the tensors outside it, by name.
            library: "numpy", where bfloat16 stays float32 unless ml_dtypes is imported, "torch" or "jax"; None for the
                model's own.
            copy: False gives NumPy's float32 arrays as views of ``flat``; what is of another dtype is copied.

        Raises:
            UnknownNameError: there is no such library.
            MissingDependencyError: torch or JAX is asked for and not installed.
        """
        flat = to_host(flat)
        library = self.library if library is None else library
        if library not in get_args(Library):
            raise UnknownNameError.of("library", library, get_args(Library))
        arrays = self.unflatten(flat.copy() if copy and library == "numpy" else flat)
        named = {piece.name: as_tensor(arrays[piece.name], piece.dtype, library) for piece in self.slices}
        for piece in self.outside:
            named[piece.name] = as_tensor(counters[piece.name].copy(), piece.dtype, library)
        named |= {alias: named[name] for alias, name in self.aliases.items()}
        return named if self.tree is None else nested(self.tree, named)

    def load_into(self, model: Any, flat: Vector, counters: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy a flat vector and counters into a model's tensors, in place, each in its own dtype.

        Args:
            model: an ``nn.Module``, wherever it lies, or a mapping or sequence of tensors, with this layout's names and
                shapes.

        Raises:
            ArrayError, ShapeError, DtypeError: it is not such a model, and is as it was; or a tensor is read-only.
        """
        named, there = self._check(model, to_read=False), device_of(flat)
        if there != CPU and all(device_of(named[name]) == there for name in self.names):
            for piece in self.slices:  # on the device, not by way of the host
                copy_there(piece.name, named[piece.name], flat[piece.start : piece.stop])
        else:
            for name, array in self.unflatten(to_host(flat)).items():
                write_tensor(name, named[name], array)
        for piece in self.outside:
            write_tensor(piece.name, named[piece.name], counters[piece.name])

    def _check(self, x: Any, *, to_read: bool = True) -> dict[str, Any]:
        """The model's tensors by name, each with the shape and kind of dtype that the layout says."""
        named = {name: leaf for name, leaf in named_tensors(x).items() if name not in self.aliases}
        if named.keys() != self._all.keys():
            due, got = names_apart(list(self._all), list(named))
            raise ArrayError(f"model: expected {due}, got {got}")
        if to_read:
            named = {name: own_class(name, leaf) for name, leaf in named.items()}
        for name, leaf in named.items():
            _check_tensor(self._all[name], leaf)
        return named


def _check_tensor(piece: Slice, leaf: Any) -> None:
    """Refuse a tensor of another shape or kind of dtype than a layout says."""
    name, dtype = piece.name, _dtype(piece.name, leaf)
    if dtype != piece.dtype and not (piece.dtype in FLOATS and dtype in FLOATS):
        raise DtypeError(f"{name}: expected {piece.dtype}, got {dtype}")
    require_dense(name, leaf)
    try:
        shape = tuple(leaf.shape)
    except RuntimeError:  # a nested tensor has none
        raise ShapeError(f"{name}: expected shape {piece.shape}, got a tensor without a shape") from None
    if shape != piece.shape:
        raise ShapeError(f"{name}: expected shape {piece.shape}, got {shape}")


def _array(piece: Slice, leaf: Any) -> npt.NDArray[Any]:
    """A tensor that was checked, as NumPy's array, which is checked again where the tensor's class may lie."""
    array = as_array(piece.name, leaf)
    if not is_own_class(leaf):
        _check_tensor(piece, array)
    return array


def named_tensors(x: Any, what: str = "model") -> dict[str, Any]:
    """A model's tensors by name; ``what`` begins messages.

    Raises:
        ArrayError: it is no model.
    """
    if hasattr(x, "named_parameters"):
        # Not state_dict(): it names a tied parameter twice, and detaches what a view must stay attached to.
        persistent = x.state_dict().keys()
        return dict(x.named_parameters()) | {k: v for k, v in x.named_buffers() if k in persistent}
    if isinstance(x, Mapping) or _is_list(x):
        named: dict[str, Any] = {}
        for name, leaf in _items(x):
            leaves = {name: read_leaf(leaf)}
            if isinstance(leaf, Mapping) or _is_list(leaf):
                leaves = {f"{name}.{rest}": one for rest, one in named_tensors(leaf, what).items()}
            if twice := leaves.keys() & named.keys():
                raise ArrayError(
                    f"{what}: expected each name once, got {min(twice)!r} twice: names are compared as str"
                )
            named |= leaves
        return named
    x = read_leaf(x)
    if hasattr(x, "shape"):
        return {"x": x}
    raise ArrayError(f"{what}: expected a module, a mapping or sequence of arrays, or an array, got {type(x).__name__}")


def _items(x: Any) -> Iterable[tuple[str, Any]]:
    pairs = x.items() if isinstance(x, Mapping) else enumerate(x)
    return ((str(name), leaf) for name, leaf in pairs)


def _is_list(x: Any) -> bool:
    if not isinstance(x, Sequence) or isinstance(x, str | bytes | bytearray | memoryview):
        return False  # before its shape is read: a nested tensor has none, and torch raises
    return not hasattr(x, "shape") and not hasattr(x, "__dlpack__")


def tree_of(x: Any, at: str = "") -> Tree:
    """The nesting of a model; None of a module, an array, and a mapping of arrays, which names say all of."""
    if hasattr(x, "named_parameters") or not (isinstance(x, Mapping) or _is_list(x)):
        return None
    if not at and isinstance(x, Mapping) and all(hasattr(leaf, "dtype") for leaf in x.values()):
        return None
    items = [(name, leaf, f"{at}{name}") for name, leaf in _items(x)]
    inner = [tree_of(leaf, f"{path}.") for _, leaf, path in items]
    nests = [isinstance(leaf, Mapping) or _is_list(leaf) for _, leaf, _ in items]
    if not at and isinstance(x, Mapping) and not any(nests):
        return None
    trees = [tree if nest else path for tree, nest, (_, _, path) in zip(inner, nests, items, strict=True)]
    return {name: tree for (name, _, _), tree in zip(items, trees, strict=True)} if isinstance(x, Mapping) else trees


def _leaves(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
        return
    for part in tree.values() if isinstance(tree, Mapping) else tree:
        yield from _leaves(part)


def nested(tree: Tree, named: Mapping[str, Any]) -> Any:
    """Tensors by name in the nesting of ``tree``."""
    if isinstance(tree, str):
        return named[tree]
    if isinstance(tree, Mapping):
        return {name: nested(part, named) for name, part in tree.items()}
    return [nested(part, named) for part in tree]


def kind_of_integers(name: str, dtype: str, shape: Sequence[int], counters: Sequence[str] = COUNTERS) -> Kind:
    """Tell a counter from a constant."""
    is_wide_scalar = len(shape) == 0 and dtype.endswith(("32", "64"))
    return "counter" if is_wide_scalar or any(fnmatch(name, pattern) for pattern in counters) else "constant"


def names_apart(due: Sequence[str], got: Sequence[str]) -> tuple[str, str]:
    """The two halves of a message about names: those expected and those given, with a common part by which they differ.

    Together they have at most 450 characters.
    """
    hint = ""
    for part in ("module.", "_orig_mod.", "model.", ".default"):
        for those, others, fix in ((due, got, "remove it from"), (got, due, "add it to")):
            if {name.replace(part, "") for name in others} == set(those):
                hint = f": the names differ by {part!r}, {fix} the client's"
    missing, extra = [n for n in due if n not in set(got)], [n for n in got if n not in set(due)]
    parts = [
        f"{what} {len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("unexpected", extra))
        if names
    ]
    return f"{len(due)} tensor{'s' * (len(due) != 1)} by name", f"{len(got)}; {'; '.join(parts)}"[:320] + hint


def _dtype(name: str, leaf: Any) -> str:
    try:
        return dtype_name(leaf)
    except AttributeError:
        raise ArrayError(f"{name}: expected an array, got {type(leaf).__name__}") from None


# Models in files that other programs read: safetensors, torch's, NumPy's; each is imported when it is needed.


FORMS: dict[str, tuple[Library, ...]] = {
    ".safetensors": ("numpy", "torch"),
    ".pt": ("torch",),
    ".pth": ("torch",),
    ".npz": ("numpy",),
}
"""The endings of files, and the libraries whose tensors each takes."""


def form_of(path: str | os.PathLike[str]) -> str:
    """The form of a file, by its ending.

    Raises:
        UnknownNameError: it is none of ``FORMS``.
    """
    form = Path(path).suffix.lower()
    if form not in FORMS:
        raise UnknownNameError.of("ending of the file", form, FORMS)
    return form


def write_model(tensors: Any, path: str | os.PathLike[str]) -> None:
    """Write a model by name into a file, at once: another that was there stays until this one is whole and durable.

    Args:
        tensors: what ``Server.tensors()`` gives: NumPy's arrays or torch's tensors, which stay as they are; those of
            lists and trees are named "0" and "layers.0.w". Tied ones are written once for each name.
        path: its ending says the form: .safetensors (needs safetensors), .pt or .pth (torch's, a ``state_dict`` that
            ``torch.load(path, weights_only=True)`` reads), .npz (NumPy's).

    Raises:
        UnknownNameError: the ending is none of these.
        ArrayError: the form does not take tensors of that library.
        MissingDependencyError: it needs a package that is not installed.
        StoreError: the file cannot be written.

    Example, of a model every tenth round:

        server = fedcore.Server(..., callbacks=[lambda report: report.round % 10 or
            write_model(server.tensors(), f"models/round{report.round}.safetensors")])

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_model({"w": np.float32([1, 2])}, f"{folder}/model.npz")
    ...     dict(np.load(f"{folder}/model.npz"))
    {'w': array([1., 2.], dtype=float32)}
    """
    tensors = named_tensors(tensors)
    form, library, place = form_of(path), library_of(tensors.values()), absolute(path)
    if library not in FORMS[form]:
        raise ArrayError(f"tensors: expected {' or '.join(FORMS[form])}'s for {form}, got {library}'s")
    if form == ".safetensors" and find_spec("safetensors") is None:
        raise MissingDependencyError.of(place.name, "safetensors", extra="safetensors", instead="write .npz")
    try:
        with draft_of(place) as draft:
            _write(dict(tensors), form, library, str(draft))
    except OSError as error:
        raise StoreError(f"{place}: the model was not written: {error}") from error


def _write(tensors: dict[str, Any], form: str, library: Library, file: str) -> None:
    if form == ".npz":
        with open(file, "wb") as opened:
            np.savez(opened, allow_pickle=False, **tensors)
    elif form == ".safetensors" and library == "numpy":
        import_module("safetensors.numpy").save_file({name: _plain(leaf) for name, leaf in tensors.items()}, file)
    elif form == ".safetensors":
        separate = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}
        import_module("safetensors.torch").save_file(separate, file)
    else:
        import_module("torch").save({name: leaf.detach() for name, leaf in tensors.items()}, file)


def _plain(leaf: Any) -> Any:
    """An array in a row, as the form wants it."""
    return np.ascontiguousarray(leaf).reshape(leaf.shape)  # of a number too, which the first makes a vector of
