"""The order of a model's tensors in one vector."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from glob import escape
from hashlib import blake2b
from itertools import accumulate, chain
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from fedcore.arrays import (
    CPU,
    NARROW,
    Library,
    as_array,
    as_narrow,
    as_tensor,
    copy_into,
    core,
    device_of,
    dtype_name,
    empty,
    flatten_on_device,
    is_own_class,
    library_of,
    read_leaf,
    read_tensor_to_device,
    spans,
    to_host,
    write_tensor,
)
from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError, UnknownNameError
from fedcore.kernels import dequantise, quantise
from fedcore.model import policy
from fedcore.model.policy import BUFFERS, COUNTERS, DTYPES, Kind, TensorPolicy, check_form, is_mask, is_rounded, matches
from fedcore.model.safetensors import StoredTensor, read_tensors
from fedcore.validation import Represented

# A flat float32 vector holds a model's *parameters*, followed by its *float buffers* (BatchNorm statistics). It omits
# *counters*, which are integers that count steps, and *constants*, which no method averages: other integers (packed
# weights, codes), bools, and buffers that are not finite (masks of -inf). The vector has ``n`` elements. Corrections
# and clients' rows have ``n_parameters`` elements, since they cover only the parameters.


LOGGER = logging.getLogger("fedcore.model")

Vector = npt.NDArray[np.float32]
Tree = Any
"""The nesting of a model in JSON types: a tensor's name, or a list or mapping of trees."""

FLAT = "x"
"""The name of a model that is one array."""


@dataclass(frozen=True)
class Slice:
    """A named tensor of a model. Tensors of the flat vector have the range [start, stop)."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Model:
    """A model, and the parts of it that clients may leave out of their updates. It is accepted wherever a model is.

    Args:
        tensors: the model, in any form that ``Layout.of`` accepts.
        partial: name patterns of tensors by group, such as ``{"text": "text.*", "image": ("image.*", "pool.*")}``. An
            update by name has all tensors of a group or none of them. The tensors that match no pattern are one more
            group, "rest". Each group behaves like a separate server, in which a client that did not send the group was
            absent. A client may send any groups in any round, unless the method counts absent clients (by rows or
            shares, say): its first accepted update then has all groups that it will send. Default: each update has
            every tensor.
        personal: name patterns of tensors that stay at each client, such as ``("head.*",)``. They are not part of the
            server's model, and the server ignores them in updates.
        frozen: name patterns of tensors that no client trains. They are treated as personal tensors are.

    A pattern of one name of a module's tied tensor counts for all its names. It belongs to the first
    group of ``partial`` that matches.

    >>> model = Model({"a": np.zeros(2), "b": np.zeros(3), "head": np.zeros(4)}, partial={"A": "a"}, personal="head")
    >>> Layout.of(model).groups
    {'A': ('a',), 'rest': ('b',)}
    """

    tensors: Any
    partial: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    personal: str | Sequence[str] = ()
    frozen: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.partial, Mapping):
            raise RangeError(f"partial={self.partial!r:.100}: must map the name of each group to its name patterns")

    @property
    def ignored(self) -> tuple[str, ...]:
        """The patterns of the tensors that are not part of the server's model."""
        return (*patterns_of("personal", self.personal), *patterns_of("frozen", self.frozen))

    def ignores(self, name: str) -> bool:
        """Whether a tensor is personal or frozen."""
        return matches(name, self.ignored)

    def groups(self, names: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Return the first names of each group's tensors; empty if updates have every tensor.

        Args:
            names: all names of each tensor, by its first name.
        """
        groups: dict[str, list[str]] = {str(group): [] for group in self.partial}
        patterns = {str(group): patterns_of("partial", of) for group, of in self.partial.items()}
        for first, every in names.items() if groups else ():
            fits = (group for group, of in patterns.items() if any(matches(name, of) for name in every))
            groups.setdefault(next(fits, REST), []).append(first)
        if empty := [group for group, members in groups.items() if not members]:
            raise UnknownNameError(f"partial[{empty[0]!r}]: no tensor left matches; use some of {shown_names(names)}")
        return {group: tuple(members) for group, members in groups.items()}


REST = "rest"
"""The group of the tensors that match no pattern of ``Model.partial``."""


def patterns_of(name: str, value: Any) -> tuple[str, ...]:
    """Return name patterns, of which a text is one; raise RangeError for other objects."""
    patterns = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise RangeError(f"{name}={value!r:.100}: must be name patterns, such as ('*mean',)")
    return patterns


class Layout(Represented):
    """The layout of a model: the range of each named tensor in the flat vector. Equality ignores library, tree and
    further names.

    Attributes:
        n: the length of the flat vector.
        n_parameters: the number of parameter elements, which come first in the flat vector; the length of a row.
        slices, names: the tensors of the flat vector, in order, and their names.
        counters: the tensors that count steps, outside the flat vector.
        constants: the tensors that no method averages, outside the flat vector. Only small ones, such as flags, may
            change.
        narrow: the tensors of the flat vector whose dtype cannot represent every float32.
        aliases: further names of a module's tied parameters and buffers, and the first name of each. A ``state_dict``
            repeats these; the flat vector holds them once.
        every: the tensors by name, also by further names.
        library: the library of the model's tensors: "numpy", "torch" or "jax".
        tree: the nesting of a model, or None for a flat mapping of tensors.
        groups: the names of the tensors of each group of ``Model.partial``; empty if updates have every tensor.
        ignored: the patterns of ``Model.personal`` and ``Model.frozen``; matching tensors of a client are ignored.
    """

    def __init__(
        self,
        tensors: Iterable[Slice],
        aliases: Mapping[str, str] | None = None,
        library: Library = "numpy",
        tree: Tree = None,
        *,
        groups: Mapping[str, Sequence[str]] | None = None,
        ignored: Sequence[str] = (),
    ) -> None:
        listed = list(tensors)
        self.groups = {group: tuple(names) for group, names in (groups or {}).items()}
        self.ignored = tuple(ignored)
        self.counters = tuple(piece for piece in listed if piece.kind == "counter")
        self.constants = tuple(piece for piece in listed if piece.kind == "constant")
        self.outside = self.counters + self.constants
        self.aliases = dict(aliases or {})
        self.library, self.tree = library, tree
        inside = [piece for kind in ("parameter", "buffer") for piece in listed if piece.kind == kind]
        ends = [0, *accumulate(math.prod(piece.shape) for piece in inside)]
        ranges = zip(inside, ends, ends[1:], strict=False)
        self.slices = tuple(replace(piece, start=start, stop=stop) for piece, start, stop in ranges)
        self.n = ends[-1]
        self.n_parameters = ends[sum(piece.kind == "parameter" for piece in inside)]
        self.narrow = tuple(piece for piece in self.slices if piece.dtype in NARROW)
        self._is_wide = any(piece.dtype == "float64" for piece in self.slices)  # and nothing was logged
        own = [None if piece.dtype in NARROW else np.dtype(piece.dtype) for piece in self.outside]
        floats = [np.dtype(np.float32)] * len(self.slices)
        self._forms = ([one.shape for one in self.outside], own), ([one.shape for one in self.slices], floats)
        self.parts = [(piece.name, piece.shape) for piece in self.slices]
        self.names = tuple(piece.name for piece in self.slices)
        self._all = {piece.name: piece for piece in self.slices + self.outside}
        self.every = self._all | {alias: self._all[first] for alias, first in self.aliases.items()}

    @classmethod
    def of(cls, x: Any, *, buffers: Sequence[str] = BUFFERS, counters: Sequence[str] = COUNTERS) -> "Layout":
        """Return the layout of a model.

        Args:
            x: a ``Model``, an ``nn.Module``, a ``state_dict`` or other mapping of arrays, a sequence of arrays (named
                "0", "1", ...), a nested tree of these (named "layers.0.w"), or one array (named "x"). The arrays are
                NumPy, torch or JAX arrays in CPU memory, or objects with DLPack's methods. Supported dtypes: float32,
                float64, bfloat16, float16 (the server stores float32), integers and bool.
            buffers: name patterns of the float buffers in a mapping. (A module lists its own buffers.)
            counters: name patterns of integer tensors that count steps. Integer scalars of 32 or 64 bits are always
                counters. All other integer tensors are constants.

        >>> layout = Layout.of({"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)})
        >>> layout.n, layout.names
        (8, ('w', 'b'))
        """
        model = x if isinstance(x, Model) else Model(x)
        x, is_module = model.tensors, hasattr(model.tensors, "named_parameters")
        tensors, every, names = [], named_tensors(x), dict[Any, list[str]]()
        for name, tensor in (_tensors_of(x) if is_module else every).items():  # a mapping may share memory by chance
            names.setdefault(id(tensor) if is_module else name, []).append(name)
        kept = {own[0]: own for own in names.values() if not any(map(model.ignores, own))}
        aliases = {name: first for first, own in kept.items() for name in own[1:]}
        named = {first: every[first] for first in kept}
        tied = [escape(name) for own in names.values() if own[0] not in kept for name in own if not model.ignores(name)]
        parameters, kinds = dict(x.named_parameters()) if is_module else {}, TensorPolicy(buffers, counters)
        for name, leaf in named.items():
            try:
                form = kinds.form(name, leaf)
            except ArrayError as error:  # a checkpoint with other entries beside the model
                keys = ("state_dict", "model_state_dict", "model") if isinstance(x, Mapping) else ()
                models = [key for key in keys if isinstance(x.get(key), Mapping)]
                raise ArrayError(f"{error}; pass the entry {models[0]!r}") if models else error from None
            kind = form.kind
            if form.is_averaged:
                if name not in parameters and is_mask(name, leaf):
                    kind = "constant"
                elif is_module:
                    kind = "parameter" if name in parameters else "buffer"
            tensors.append(Slice(name, kind, form.shape, form.dtype))
        tree, groups = tree_of(x), model.groups(kept)
        if tree is not None and (groups or model.ignored):
            raise ArrayError("model: partial, personal and frozen need a module or a flat mapping of tensors by name")
        return cls(tensors, aliases, library_of(named.values()), tree, groups=groups, ignored=(*model.ignored, *tied))

    def __eq__(self, other: object) -> bool:
        """Whether the tensors, their ranges and the groups are equal."""
        if not isinstance(other, Layout):
            return NotImplemented
        own, others = ((one.slices, one.outside, one.groups) for one in (self, other))
        return own == others

    def __hash__(self) -> int:
        return hash((self.slices, self.outside))

    def _facts(self) -> dict[str, Any]:
        counts = {"tensors": len(self.slices), "counters": len(self.counters), "constants": len(self.constants)}
        return {"n": self.n, "n_parameters": self.n_parameters, **counts, "library": self.library}

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for piece in (*self.slices, *self.outside):
            yield piece.name, piece.kind, f"{piece.dtype}{list(piece.shape)}"

    def to_state(self) -> dict[str, Any]:
        """Return the layout in JSON types."""
        pieces = [[piece.name, piece.kind, list(piece.shape), piece.dtype] for piece in self._all.values()]
        state = {"tensors": pieces, "aliases": self.aliases, "library": self.library, "tree": self.tree}
        optional = {"groups": self.groups, "ignored": self.ignored}
        return state | {name: value for name, value in optional.items() if value}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Layout":
        """Return the layout from the result of ``to_state``; raise LookupError, TypeError or ValueError if invalid."""
        pieces = [Slice(name, kind, tuple(shape), dtype) for name, kind, shape, dtype in state["tensors"]]
        for piece in pieces:
            if piece.dtype not in DTYPES.get(piece.kind, ()) or type(piece.name) is not str:
                raise DtypeError(f"{piece.name}: a {piece.kind} cannot be {piece.dtype}")
            if any(type(length) is not int or length < 0 for length in piece.shape):
                raise ShapeError(f"{piece.name}: shape={list(piece.shape)}: must be integers >= 0")
        library = state.get("library", "numpy")  # older folders have no library
        if library not in get_args(Library):
            raise UnknownNameError.of("library", library, get_args(Library))
        tree, groups, ignored = state.get("tree"), state.get("groups", {}), state.get("ignored", ())
        listed = chain(*groups.values()) if groups else None
        for what, names in (("tree", tree and _leaves(tree)), ("groups", listed)):
            if names is not None and sorted(names) != sorted(piece.name for piece in pieces):
                raise ArrayError(f"{what}: must name each tensor once")
        return cls(pieces, state["aliases"], library, tree, groups=groups, ignored=ignored)

    @cached_property
    def of_groups(self) -> dict[str, "Layout"]:
        """The layout of each group's tensors."""
        layouts = {}
        for group, names in self.groups.items():
            aliases = {name: first for name, first in self.aliases.items() if first in names}
            layouts[group] = Layout([self._all[name] for name in names], aliases, self.library)
        return layouts

    @cached_property
    def places(self) -> dict[str, list[int]]:
        """The indices in ``slices`` of each group's tensors, in their order."""
        index = {piece.name: i for i, piece in enumerate(self.slices)}
        return {group: [index[piece.name] for piece in own.slices] for group, own in self.of_groups.items()}

    def cut(self, whole: Vector, group: str) -> Vector:
        """Return a group's elements of a vector, floating[n] or floating[n_parameters], as a new vector."""
        own = self.of_groups[group]
        part: Vector = empty(own.n if len(whole) == self.n else own.n_parameters, whole.dtype, device=device_of(whole))
        for piece, of in [(piece, self._all[piece.name]) for piece in own.slices if piece.stop <= len(part)]:
            copy_into(part[piece.start : piece.stop], whole[of.start : of.stop])
        return part

    def join(self, parts: Mapping[str, Vector], whole: Vector) -> Vector:
        """Write vectors of groups, with or without buffers, to their elements of a whole vector, and return it."""
        for group, part in parts.items():
            for piece in self.of_groups[group].slices:
                if piece.stop <= len(part):
                    of = self._all[piece.name]
                    copy_into(whole[of.start : of.stop], part[piece.start : piece.stop])
        return whole

    def split(self, x: Any) -> dict[str, dict[str, Any]]:
        """Return the tensors of a partial update by group, for the groups that it has.

        Raises:
            ArrayError: a group is incomplete, a name is unknown, or x has no tensor of the model.
        """
        named = self._named(x)
        if unknown := [name for name in named if name not in self.every]:
            raise ArrayError(f"model: tensors are unknown ({shown_names(unknown)}); send names of the model")
        found = {}
        for group, names in self.groups.items():
            missing = [name for name in names if name not in named]
            if missing and len(missing) < len(names):
                raise ArrayError(f"group {group!r}: {shown_names(missing)} missing; send all of its tensors or none")
            if not missing:
                found[group] = {name: named[name] for name in names}
        if not found:
            raise ArrayError(f"model: has no tensors; send at least one of the groups {', '.join(self.groups)}")
        self._check(named, strict=False)
        return found

    def _named(self, x: Any, *, to_write: bool = False, what: str = "model") -> Mapping[str, Any]:
        """Return a model's tensors by name, without ignored tensors. Tied tensors have all of their names."""
        named = named_tensors(x, what, to_write=to_write)
        if self.ignored:
            named = {name: leaf for name, leaf in named.items() if not matches(name, self.ignored)}
        return policy.matched(named, self.every, self.aliases)

    def flatten(self, x: Any, out: Vector | None = None) -> Vector:
        """Return a model's parameters and float buffers as one vector, float32[n], in ``out`` if given.

        Args:
            x: a model in any form that ``Layout.of`` accepts, with this layout's names, shapes and dtypes. Any float
                dtype fits a float tensor.
            out: float32[n], written in place. If it is on a device, tensors may be on that device too. Default: a new
                array.

        Raises:
            ShapeError, DtypeError, ArrayError: a tensor, a name or ``out`` does not fit the layout.

        Cost: reads 4 n bytes, writes 4 n bytes.
        """
        if out is None:
            out = np.empty(self.n, np.float32)
        elif out.dtype != np.float32:
            raise DtypeError(f"out: expected float32[{self.n}], got {out.dtype}")
        elif out.shape != (self.n,):
            raise ShapeError(f"out: expected float32[{self.n}], got shape {out.shape}")
        device = device_of(out)
        if device == CPU and (plain := self._plain(x, self.slices)):  # the common case
            return np.concatenate(plain, out=out)
        self.log_rounded(named := self._check(x))
        for piece in self.slices:
            part, tensor = out[piece.start : piece.stop], named[piece.name]
            if device == CPU:
                _copy(piece, tensor, part)
            else:
                read_tensor_to_device(piece.name, tensor, part, device)
        return out

    def digest(self, x: Any) -> str:
        """Return the digest of a model, or of an update that a client sends, as the audit log of the server has it.

        It is BLAKE2b-256 of ``flatten(x)`` as little-endian float32; of a partial update, without the missing tensors.

        >>> Layout.of({"w": np.zeros(2, np.float32)}).digest({"w": np.float32([1, 2])})[:16]
        '9173c768cb03ffbb'
        """
        if not self.groups:
            flat = self.flatten(x)
        else:
            sent = {name: leaf for named in self.split(x).values() for name, leaf in named.items()}
            layout = Layout([piece for piece in self.slices if piece.name in sent])
            flat = layout.flatten({name: sent[name] for name in layout.names})
        return blake2b(np.ascontiguousarray(flat, "<f4").data, digest_size=32).hexdigest()

    def flatten_all(self, x: Any) -> npt.NDArray[np.float64]:
        """Return all tensors as one new vector, float64: those of the flat vector, then counters and constants.

        Integers above 2^53 are rounded. The errors are those of ``flatten``.
        """
        named = self._check(x, what="values")
        arrays = (_array(piece, to_host(named[piece.name])) for piece in self.slices + self.outside)
        return np.concatenate([array.reshape(-1) for array in arrays], dtype=np.float64)

    def pieces(self, x: Any, *, device: str = CPU) -> list[Any]:
        """Return a model's parameters and float buffers as separate vectors, in the order of ``slices``.

        Arguments and errors are those of ``flatten``.

        Args:
            device: a device on which tensors may be, in addition to host memory.

        Returns:
            Views of the model's memory. A tensor is copied as float32 if it has another dtype than float32 or 16-bit
            floats, or is not contiguous or not aligned. Tensors of files are read into new memory, on a CPU in their
            own dtype.
        """
        if (plain := self._plain(x, self.slices)) is not None:  # the common case
            return plain
        self.log_rounded(named := self._check(x))
        stored = {piece.name: leaf for piece in self.slices if isinstance(leaf := named[piece.name], StoredTensor)}
        vectors = read_tensors(stored, device) if device == CPU else {}
        pieces: list[Any] = []
        for piece in self.slices:
            if piece.name in vectors:
                pieces.append(vectors[piece.name])
            elif device != CPU and device_of(named[piece.name]) == device:
                pieces.append(flatten_on_device(piece.name, named[piece.name]))
            elif (narrow := as_narrow(named[piece.name])) is not None:
                pieces.append(narrow)
            else:
                with np.errstate(over="ignore"):
                    tensor = np.asarray(_array(piece, named[piece.name]), np.float32).reshape(-1)
                pieces.append(tensor if tensor.flags.aligned and tensor.flags.c_contiguous else tensor.copy())
        return pieces

    def changes(
        self,
        x: Any,
        flat: Vector,
        counters: Mapping[str, npt.NDArray[Any]],
        returned: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the tensors of a model that differ from a flat vector and counters, by name, as float32 or integers.

        Numbers of 16 bits are compared with those of ``flat`` in 16 bits. If a tensor differs, only its numbers that
        differ are the model's; the others are those of ``flat``, which may have more digits.

        Args:
            x: a model in any form that ``flatten`` accepts. It may lack groups.
            flat: float32[n], in host memory.
            counters: the tensors outside the flat vector, by name.
            returned: tensors to compare with, by name, in place of those of ``flat``.

        Cost: reads the model and ``flat`` once.
        """
        if self.groups:
            x = {name: leaf for named in self.split(x).values() for name, leaf in named.items()}
        named, found = self._check(x, strict=not self.groups), {}
        for name, own in (self.unflatten(flat) | {piece.name: counters[piece.name] for piece in self.outside}).items():
            if (leaf := named.get(name)) is None:
                continue
            is_float = name not in counters
            with np.errstate(over="ignore"):
                array = np.asarray(as_array(name, to_host(leaf)), np.float32 if is_float else None)
                was = own if returned is None else returned[name]
                if returned is None and own.size and (dtype := dtype_name(leaf)) in NARROW and is_float:
                    was = dequantise(quantise(own.reshape(-1), NARROW[dtype])).reshape(own.shape)
            if not np.array_equal(array, was):
                found[name] = np.where(array == was, own, array)
        return found

    def unflatten(self, flat: Vector) -> dict[str, Vector]:
        """Return the float32 views of a flat vector by tensor name; ``tensors`` converts to the model's dtypes.

        Args:
            flat: float32[n]. Writing to a view writes to ``flat``.
        """
        if flat.shape != (self.n,):
            raise ShapeError(f"flat: expected float32[{self.n}], got shape {flat.shape}")
        return {piece.name: flat[piece.start : piece.stop].reshape(piece.shape) for piece in self.slices}

    def read_counters(self, x: Any) -> dict[str, npt.NDArray[Any]]:
        """Return copies of a model's counters and constants in their dtypes, except bfloat16 and float16 as float32."""
        if not self.outside:
            return {}
        if (plain := self._plain(x, self.outside)) is not None:
            return {piece.name: one.copy().reshape(piece.shape) for piece, one in zip(self.outside, plain, strict=True)}
        named = self._check(x, strict=not self.groups)
        sent = [piece for piece in self.outside if piece.name in named]
        return {piece.name: _array(piece, to_host(named[piece.name])).copy() for piece in sent}

    def _plain(self, x: Any, pieces: Sequence[Slice]) -> list[Any] | None:
        """Return vectors over some tensors of a model, or None unless they are plain ones of a mapping of all names."""
        if not (isinstance(x, Mapping) and x.keys() == self._all.keys()):
            return None
        listed, forms = [x[piece.name] for piece in pieces], self._forms[pieces is self.slices]
        plain: list[Any] | None = core.read_plain_tensors(listed, *forms)
        if plain is not None and pieces is self.slices:
            for piece in self.outside:
                check_form(piece.name, x[piece.name], piece.dtype, piece.shape)
        return plain

    def tensors(
        self,
        flat: Vector,
        counters: Mapping[str, npt.NDArray[Any]],
        library: Library | None = None,
        *,
        copy: bool = True,
    ) -> Any:
        """Return a model in its original form and dtypes: a mapping by name (including aliases), a list or a tree.

        16-bit floats are rounded to nearest.

        Args:
            flat: float32[n].
            counters: the tensors outside the flat vector, by name.
            library: "numpy", "torch" or "jax". NumPy's bfloat16 tensors stay float32 unless ml_dtypes is imported.
                Default: the model's library.
            copy: whether to copy float32 NumPy arrays; if False, they are views of ``flat``. Other tensors are copies.

        Raises:
            MissingDependencyError: torch or JAX is not installed.
        """
        flat, library = to_host(flat), self.library if library is None else library
        if library not in get_args(Library):
            raise UnknownNameError.of("library", library, get_args(Library))
        arrays = self.unflatten(flat.copy() if copy and library == "numpy" else flat)
        arrays |= {piece.name: counters[piece.name].copy() for piece in self.outside}
        named = {name: as_tensor(arrays[name], piece.dtype, library) for name, piece in self._all.items()}
        named |= {alias: named[name] for alias, name in self.aliases.items()}
        return named if self.tree is None else nested(self.tree, named)

    def load_into(
        self, model: Any, flat: Vector, counters: Mapping[str, npt.NDArray[Any]], *, strict: bool = True
    ) -> None:
        """Copy a flat vector and counters into a model's tensors, in place and in the tensors' dtypes.

        Args:
            model: an ``nn.Module`` on any device, or a mapping or sequence of tensors, with this layout's names and
                shapes. Numbers beyond the range of a tensor's dtype become infinite.
            strict: whether names must be equal. If False, only tensors with a name in both are copied.

        Raises:
            ArrayError, ShapeError, DtypeError: the model does not fit the layout, or ties tensors that differ here; no
                tensor was changed.
            ArrayError: a tensor is read-only; tensors before it may have been changed.
        """
        named, device = self._check(model, to_write=True, strict=strict), device_of(flat)
        if device != CPU and all(device_of(named[name]) == device for name in self.names if name in named):
            parts = {piece.name: flat[piece.start : piece.stop] for piece in self.slices}  # avoids a copy to the host
        else:
            parts = self.unflatten(to_host(flat))
        parts |= {piece.name: counters[piece.name] for piece in self.outside}
        values = {name: parts[self.every[name].name] for name in named}
        policy.require_tied("the given model", policy.ties_of(named), values, "the server's")
        for name, leaf in named.items():
            write_tensor(name, leaf, values[name])

    def log_rounded(self, named: Mapping[str, Any]) -> None:
        """Log the first float64 tensors in memory or in files whose numbers float32 does not hold, once."""
        found = (name for name in self.names if name in named and is_rounded(name, named[name]))
        if self._is_wide and (rounded := [*found]):
            self._is_wide = False
            LOGGER.warning(f"{shown_names(rounded)}: rounded from float64 to float32; fedcore.aggregate is in float64")

    def _check(self, x: Any, *, to_write: bool = False, strict: bool = True, what: str = "model") -> Mapping[str, Any]:
        """Return the model's tensors by name after checking names, shapes, dtypes and, unless ``to_write``, ties."""
        named = self._named(x, to_write=to_write, what=what)
        if not strict:
            named = {name: leaf for name, leaf in named.items() if name in self.every}
        elif named.keys() != self.every.keys():
            if list(self._all) == [FLAT]:
                raise ArrayError(f"{what}: the server has one array, without names of tensors; copy server.x")
            raise ArrayError(f"{what}: {describe_names(list(self.every), list(named))}")
        for name, leaf in named.items():
            check_form(name, leaf, self.every[name].dtype, self.every[name].shape)
        if not to_write:
            policy.require_tied("the server's model", self.aliases, named)
        return named


def _copy(piece: Slice, leaf: Any, out: Vector) -> None:
    """Copy a tensor in host memory or in a file into a vector, in windows."""
    if isinstance(leaf, StoredTensor):
        leaf.read_into(out)
    elif (narrow := as_narrow(leaf)) is not None:
        for span in spans(len(out), 6):
            out[span] = as_array(piece.name, narrow[span])
    else:
        copy_into(out, _array(piece, leaf).reshape(-1))


def _array(piece: Slice, leaf: Any) -> npt.NDArray[Any]:
    """Return a tensor as a NumPy array; check the array again if the tensor's class is foreign."""
    array = as_array(piece.name, leaf)
    if not is_own_class(leaf):
        check_form(piece.name, array, piece.dtype, piece.shape)
    return array


def named_tensors(x: Any, what: str = "model", at: str = "", *, to_write: bool = False) -> dict[str, Any]:
    """Return a model's tensors by name, as ``own_class`` returns them; raise ArrayError for other objects.

    Messages start with ``what``, or with ``at`` and the tensor's name.
    """
    if isinstance(x, Model):
        x = x.tensors
    if hasattr(x, "named_parameters") and not isinstance(x, type):
        x = _tensors_of(x)
    if isinstance(x, Mapping) or _is_list(x):
        named: dict[str, Any] = {}
        for name, leaf in _items(x):
            if isinstance(leaf, Mapping) or _is_list(leaf):
                inner = named_tensors(leaf, what, f"{at}{name}.", to_write=to_write)
                leaves = {f"{name}.{rest}": one for rest, one in inner.items()}
            else:
                leaves = {name: read_leaf(f"{at}{name}", leaf, to_write=to_write)}
            if twice := leaves.keys() & named.keys():
                raise ArrayError(f"{what}: two tensors are named {min(twice)!r}; names are compared as str")
            named |= leaves
        return named
    x = read_leaf(what, x, to_write=to_write)
    if hasattr(x, "shape"):
        return {FLAT: x}
    raise ArrayError(f"{what}: expected a module, a mapping or sequence of arrays, or an array, got {type(x).__name__}")


def _tensors_of(module: Any) -> dict[str, Any]:
    """Return a module's parameters and persistent buffers by name; tied ones have several names."""
    found = dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):  # a class may override state_dict()
        own = ((name, one) for name, one in part._buffers.items() if name not in part._non_persistent_buffers_set)
        found |= {f"{path}.{name}".lstrip("."): one for name, one in own if one is not None}
    return found


def _items(x: Any) -> Iterable[tuple[str, Any]]:
    pairs = x.items() if isinstance(x, Mapping) else enumerate(x)
    return ((str(name), leaf) for name, leaf in pairs)


def _is_list(x: Any) -> bool:
    if not isinstance(x, Sequence) or isinstance(x, str | bytes | bytearray | memoryview):
        return False
    return not hasattr(x, "shape") and not hasattr(x, "__dlpack__")


def tree_of(x: Any) -> Tree:
    """Return the nesting of a model, or None for a module, an array or a mapping of arrays."""
    tree = "" if hasattr(x, "named_parameters") else _tree(x)
    is_flat = isinstance(tree, Mapping) and all(isinstance(part, str) for part in tree.values())
    return None if is_flat or isinstance(tree, str) else tree


def _tree(x: Any, at: str = "") -> Tree:
    if isinstance(x, Mapping):
        return {name: _tree(leaf, f"{at}{name}.") for name, leaf in _items(x)}
    return [_tree(leaf, f"{at}{name}.") for name, leaf in _items(x)] if _is_list(x) else at[:-1]


def _leaves(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
        return
    for part in tree.values() if isinstance(tree, Mapping) else tree:
        yield from _leaves(part)


def nested(tree: Tree, named: Mapping[str, Any]) -> Any:
    """Return tensors in the nesting of ``tree``."""
    if isinstance(tree, str):
        return named[tree]
    if isinstance(tree, Mapping):
        return {name: nested(part, named) for name, part in tree.items()}
    return [nested(part, named) for part in tree]


def shown_names(names: Iterable[str], room: int = 130) -> str:
    """Return the names that fit into ``room`` characters, at least one, and the number of the others.

    >>> shown_names(["wide", "deep", "head"], 12)
    'wide, deep and 1 more'
    """
    names = [*names]
    count = max(sum(end <= room for end in accumulate(len(name) + 2 for name in names)), 1)
    shown, more = ", ".join(names[:count]), f" and {len(names) - count} more" if len(names) > count else ""
    return (shown if len(shown) <= room else f"{shown[: room - 3]}...") + more


def describe_names(expected: Sequence[str], actual: Sequence[str]) -> str:
    """Return a message of at most 450 characters about missing and unexpected tensor names."""
    hint = ""
    for part in ("module.", "_orig_mod.", "model.", ".default"):
        for those, others, fix in ((expected, actual, "remove it from"), (actual, expected, "add it to")):
            if {name.replace(part, "") for name in others} == set(those):
                hint = f"; the names differ by {part!r}; {fix} the client's names"
    missing, extra = [n for n in expected if n not in set(actual)], [n for n in actual if n not in set(expected)]
    parts = ("missing", missing), ("unexpected", extra)
    differences = "".join(f"; {what} {len(names)} ({shown_names(names)})" for what, names in parts if names)
    return f"expected {len(expected)} tensor{'s' * (len(expected) != 1)} by name, got {len(actual)}{differences}{hint}"
