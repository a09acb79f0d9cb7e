"""Averages of models, without a server."""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arrays import (
    CPU,
    F32,
    F64,
    LINE,
    NARROW,
    BufferPool,
    as_array,
    as_tensor,
    core,
    device_of,
    dtype_name,
    empty,
    has_infinities,
    ieee,
    library_of,
    tensor_over,
)
from fedcore.errors import ArrayError, CorruptionError, FedcoreError, RangeError, ShapeError, UnknownClientError
from fedcore.kernels import Codes
from fedcore.kernels.robust import GramSum
from fedcore.model.files import bytes_of, open_model, require_equal_adapters
from fedcore.model.layout import (
    BUFFERS,
    Kind,
    Tree,
    check_dtype,
    check_shape,
    describe_names,
    kind_of,
    named_tensors,
    nested,
    tree_of,
)
from fedcore.model.safetensors import BYTES, Bfloat16, Safetensors, StoredTensor, over
from fedcore.model.windows import UNIT, Part, Windows, cast
from fedcore.profiling import span
from fedcore.rules import Chain, Combination, Rule
from fedcore.validation import LONGEST_REASON, check_number, length, numbers, shorten

# ``aggregate`` averages models tensor by tensor, without a flat vector.


Named = Mapping[str, Any]

NOT_FINITE = "expected finite numbers, got a NaN or an infinity"

MOST_KEPT = 1 << 28
"""The maximum size in bytes of an average whose memory the process keeps for the next average."""


class TensorForm(NamedTuple):
    """The required form of a tensor in all models; ``like`` has the library, dtype and shape of the average."""

    like: Any
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    """"parameter" for all averaged tensors."""
    has_c_export: bool


def aggregate(
    models: Any, weights: Any = None, *, key: str | None = None, rule: "str | Rule | Sequence[Rule | str] | None" = None
) -> Any:
    """Return the weighted average of models, sum_i w_i x_i / sum_i w_i, or their robust combination.

    - Float tensors (parameters and BatchNorm statistics) are averaged.
    - A counter (an integer scalar of 32 or 64 bits, or ``num_batches_tracked``) becomes its largest value.
    - Other integers, bools and float tensors with infinities (masks) are constants. They must be equal in all models.

    Numbers that are equal in all models keep their bits.

    Args:
        models: k models with the same names and shapes: a sequence, a mapping from client ids to models, or an
            iterator, from which each model is freed before the next one is taken. A model is in any form that
            ``Layout.of`` accepts, or the path of safetensors files, of a torch file (.pt, .pth, .bin, .ckpt) or of a
            .npz file, or a ``Safetensors``. A model may lack or repeat names of tied tensors; the average has the
            first model's names. LoRA adapters in folders must have the same scale and targets. Tensors are in CPU
            memory: float32, float64, float16, bfloat16, integers or bool. Float tensors are cast to the first model's
            dtype. Read-only. A tensor that is not contiguous is copied first.
        weights: k finite numbers >= 0, not all zero, such as numbers of examples; or a mapping with the ids of
            ``models``. Default: equal weights.
        key: the key of the ``state_dict`` in torch files with several entries.
        rule: a robust rule of ``fedcore.rules`` in place of the average, by name ("median", "krum") or as an object
            (``TrimmedMean(2)``), or a sequence of mixing rules and a robust rule. Each model counts once, so weights
            are not allowed. Distances are over all float tensors except BatchNorm statistics, which are combined like
            the others. Equal scores go to the first model.

    Returns:
        The average in the first model's library, dtypes and nesting: a mapping by name, a list, a tree, or an array.
        Its tensors are new. Safetensors files give NumPy arrays, in float32 for bfloat16 unless ml_dtypes is imported.

    Raises:
        ArrayError, ShapeError, DtypeError, RangeError: names or a shape differ, a constant differs, or a tensor is
            sparse, not in CPU memory or not finite. The message names the client and the tensor.
        RangeError, ShapeError, DtypeError: ``models`` is empty, or the weights are invalid.
        UnknownNameError, RangeError: the rule is unknown, needs more models, or needs the model before the round.
        StoreError: a file cannot be read.
        CorruptionError: a file was changed while it was in use.

    Determinism: float64 products and sums in the order of the models, rounded once; bit-identical on every ISA level
        and thread count, and for files and models in memory. For an iterator without weights, the sum is divided by
        k at the end, which may change the last bit. With a rule, the bits are those of a round of FedAvg with this
        rule from a model of zeros, with numbers rounded to float32 first.
    Cost: reads every model once and writes the average, which is read once more if all floats are float32; no scratch.
        Files are read in windows with four threads; windows need at most 160 MiB beside the average. An iterator needs
        8 n bytes for a sum in float64, and 4 to 8 times the time of a list. A rule reads the models once or twice more,
        and holds all models of an iterator.
        The float tensors of the average share one block of memory. When all of them are freed, the process keeps a
        block of up to 256 MiB for the next average of the same size, and returns a larger block to the system.

    >>> aggregate([{"w": np.float32([1, 2]), "n": np.array(3)}, {"w": np.float32([3, 6]), "n": np.array(5)}], [3, 1])
    {'w': array([1.5, 3. ], dtype=float32), 'n': array(5)}
    >>> aggregate({"hospital": {"w": np.float32([1])}, "clinic": {"w": np.float32([4])}}, {"clinic": 1, "hospital": 2})
    {'w': array([2.], dtype=float32)}
    >>> aggregate([{"w": np.float32([1])}, {"w": np.float32([4])}, {"w": np.float32([-100])}], rule="median")
    {'w': array([1.], dtype=float32)}
    """
    try:
        chain = None if rule is None else Chain.of_models(rule, has_base=False)
        if chain is not None:
            require_no_weights(weights)
        if _is_file(models):
            raise ArrayError("models: expected several models, got one path; pass a list of paths")
        if chain is not None and isinstance(models, Iterator):
            models = list(models)
        if isinstance(models, Iterator):
            first = [*itertools.islice(models, 1)]
            if first and not _is_file(first[0]):
                return _aggregated_stream(first.pop(), models, weights)
            models = [*first, *models]
        labels: list[Any] = list(range(len(models)))
        if isinstance(models, Mapping):
            labels = [repr(client) for client in models]
            if isinstance(weights, Mapping):
                if weights.keys() != models.keys():
                    raise UnknownClientError(f"weights: {describe_names([*map(str, models)], [*map(str, weights)])}")
                weights = [weights[client] for client in models]
            models = models.values()
        given = list(models)
        if any(map(_is_file, given)):
            return _aggregated_files(given, labels, weights, key, chain)
        return _aggregated(given, labels, weights, chain)
    except FedcoreError as error:  # shortened, since clients may send names of any length
        if len(text := str(error)) <= LONGEST_REASON:
            raise
        raise type(error)(shorten(text)) from None


def _is_file(model: Any) -> bool:
    return isinstance(model, str | os.PathLike | Safetensors)


@ieee
def _aggregated(given: list[Any], labels: list[Any], weights: Any, chain: Chain | None) -> Any:
    shares = shares_of(weights, len(given))
    form = ResultForm.of(given[0])
    is_plain = form.tree is None and isinstance(given[0], Mapping)
    models = given if is_plain else [*map(_named, labels, given)]
    plan = plan_of(labels[0], _named(labels[0], models[0]), hold=True)
    outs, rows, finite = _average(models, labels, plan, shares)
    if not finite:
        masks = [name for name in outs if has_infinities(name, _named(labels[0], models[0])[name])]
        plan |= {name: plan[name]._replace(kind="constant") for name in masks}
        if masks:
            outs, rows, finite = _average(models, labels, plan, shares)
    if not finite:
        for client, row in zip(labels, rows, strict=True):  # raises nothing if only a float64 sum overflows
            _require_finite(client, dict(zip(outs, row, strict=True)))
    if chain is not None:
        _combine(chain, plan, rows, outs)
    return form.result(plan, outs | _unaveraged(plan, models, labels))


class ResultForm(NamedTuple):
    """The form of an average: its nesting, and whether it is a single array."""

    tree: Tree
    is_array: bool

    @classmethod
    def of(cls, model: Any) -> "ResultForm":
        """Return the form of the first model."""
        if _is_file(model):
            return cls(None, False)
        return cls(tree_of(model), not isinstance(model, Mapping) and not hasattr(model, "named_parameters"))

    def result(self, plan: Iterable[str], named: Named) -> Any:
        """Return tensors in this form, in the order of ``plan``."""
        ordered = {name: named[name] for name in plan}
        if self.tree is not None:
            return nested(self.tree, ordered)
        return ordered["x"] if self.is_array else ordered


# A robust rule combines h_i = -y_i, so that the result has the bits of a server's step from x = 0.


def require_no_weights(weights: Any) -> None:
    """Raise RangeError for weights beside a robust rule."""
    if weights is not None:
        raise RangeError("weights: a robust rule counts each model once; leave weights or the rule out")


def is_parameter(name: str, form: TensorForm) -> bool:
    """Whether a tensor is a parameter, and neither a BatchNorm statistic nor a tensor that is not averaged."""
    return form.kind == "parameter" and not any(fnmatch(name, pattern) for pattern in BUFFERS)


def write_combination(combination: Combination, rows: Sequence[Any], out: F32) -> None:
    """Write the robust combination of k vectors y_i to ``out``, float32[n]."""
    if len(out):
        combination.write([None] * len(rows), rows, np.ones(len(rows)), out)
        np.subtract(0, out, out=out)  # a zero stays positive


def _combine(chain: Chain, plan: Mapping[str, TensorForm], rows: list[list[Any]], outs: dict[str, Any]) -> None:
    """Replace the averages by the robust combinations of the models' tensors."""
    names = [name for name, form in plan.items() if form.kind == "parameter"]
    rows = [[_row(name, row, plan[name]) for name, row in zip(names, model, strict=True)] for model in rows]
    where, k = [j for j, name in enumerate(names) if is_parameter(name, plan[name])], len(rows)

    def products() -> F64:
        if not where:
            return np.zeros((k, k))
        return kernels.gram_matrix([None] * k, [[model[j] for j in where] for model in rows], np.ones(k))

    with span("aggregate", None, (rows, list(outs.values()))):
        combination = chain.combination(k, products, 0)
        for j, name in enumerate(names):
            vectors = [_flat(model[j]) for model in rows]
            outs[name] = _combined(combination, vectors, plan[name], outs[name])


def _combined(combination: Combination, rows: Sequence[Any], form: TensorForm, out: Any) -> Any:
    """Return the robust combination of k vectors in the form of ``out``, and in its memory unless it is of JAX."""
    is_jax, kind = library_of([form.like]) == "jax", dtype_name(form.like)
    to = _flat(np.asarray(out)) if kind == "float32" and not is_jax else empty(len(rows[0]))
    write_combination(combination, rows, to)
    if is_jax:
        return as_tensor(to.reshape(form.shape), form.dtype, "jax")
    if kind != "float32":
        _round_into(_flat(out), to.astype(np.float64), kind)
    return out


# Models in files are averaged window by window.


@ieee
def _aggregated_files(given: list[Any], labels: list[Any], weights: Any, key: str | None, chain: Chain | None) -> Any:
    shares, models = shares_of(weights, len(given)), []
    labels = [f"{i} ({_path_of(one)})" if _is_file(one) else i for i, one in zip(labels, given, strict=True)]
    require_equal_adapters({f"client {i}": one for i, one in zip(labels, given, strict=True) if _is_file(one)})
    for client, one in zip(labels, given, strict=True):
        models.append(open_model(one, key=key) if _is_file(one) else _named(client, one))
    plan, ties = plan_of(labels[0], models[0]), ties_of(models[0])
    for i, client in enumerate(labels):
        models[i] = matched(models[i], plan, ties)
        check_model(client, models[i], plan)
    floats = {name: form for name, form in plan.items() if form.kind == "parameter"}
    outs, _ = _allocate_outs(floats)
    rows_of = [{name: _window_row(model[name], form) for name, form in floats.items()} for model in models]
    bad: dict[str, Any] = {}
    combination, measured, first = None, dict[str, TensorForm](), list[Digest]()
    if chain is not None:
        combination, measured, first = _combination_of_files(chain, rows_of, floats, labels)
    again = [Digest() for _ in first]
    for parts, rows in Windows(rows_of, floats).read():
        given_rows = [
            [cast(row, floats[part.name].dtype) for part, row in zip(parts, each, strict=True)] for each in rows
        ]
        targets = [_flat(outs[part.name])[part.start : part.stop] for part in parts]
        with span("aggregate", None, (given_rows, targets)):
            summed = kernels.weighted_sum_segments(given_rows, shares, targets, accumulate="float64", norms=True)
        for client in np.flatnonzero(~summed.finite).tolist():
            for part, row in zip(parts, given_rows[client], strict=True):
                if part.name not in bad and not is_finite(row):
                    bad[part.name] = labels[client]
        if combination is not None:
            for j, part in enumerate(parts):
                if part.name not in bad:
                    vectors = [each[j] for each in given_rows]
                    _combined(combination, vectors, floats[part.name], targets[j])
        add_to(again, parts, rows, measured)
    require_unchanged([f"client {label}" for label in labels], [one.state()[2] for one in first], again)
    for name, client in bad.items():
        if not has_infinities(name, models[0][name]):
            raise ArrayError(f"client {client}, {name}: {NOT_FINITE}")
        plan[name] = plan[name]._replace(kind="constant")
    return ResultForm.of(given[0]).result(plan, outs | _unaveraged(plan, models, labels))


def _combination_of_files(
    chain: Chain, rows_of: list[dict[str, Any]], floats: Mapping[str, TensorForm], labels: list[Any]
) -> tuple[Combination, dict[str, TensorForm], list["Digest"]]:
    """Return the robust combination, the parameters that were read for distances, and the models' digests of them."""
    measured, digests = dict[str, TensorForm](), list[Digest]()

    def products() -> F64:
        nonlocal measured, digests
        masks: set[str] = set()
        for _ in range(2):
            measured = {name: form for name, form in floats.items() if is_parameter(name, form) and name not in masks}
            total, digests = GramSum(len(rows_of)), [Digest() for _ in rows_of]
            for parts, rows in Windows(rows_of, measured).read():
                for j, part in enumerate(parts):
                    total.add(None, [cast(each[j], floats[part.name].dtype) for each in rows])
                add_to(digests, parts, rows, measured)
            found = total.result()
            if np.isfinite(found).all():
                return found
            masks = {name for name in measured if has_infinities(name, rows_of[0][name])}
        client = labels[int(np.flatnonzero(~np.isfinite(np.diag(found)))[0])]
        raise ArrayError(f"client {client}: {NOT_FINITE}")

    return chain.combination(len(rows_of), products, 0), measured, digests


# A file may change between two passes, and its times may be set back. So both passes compute a digest of the content.


class Digest:
    """The digest of a model: a sum of the digests of its tensors, each a chain over the checksums of its blocks."""

    def __init__(self, state: Sequence[str] = ("0", "", "0")) -> None:
        self._total, self._chain, self._measured = int(state[0], 16), bytes.fromhex(state[1]), int(state[2], 16)

    def add(self, part: Part, form: TensorForm, memory: npt.NDArray[np.uint8]) -> None:
        """Add the bytes of a part. The parts of a tensor come in order."""
        if part.start == 0:
            head = json.dumps([part.name, form.dtype, form.shape]).encode()
            self._chain = hashlib.blake2b(head, digest_size=16).digest()
        for checksum in core.checksum(memory, UNIT * BYTES[form.dtype]):
            self._chain = hashlib.blake2b(self._chain + checksum.tobytes(), digest_size=16).digest()
        if part.stop == math.prod(form.shape):
            number = int.from_bytes(self._chain, "little")
            self._total = (self._total + number) % 2**128
            if is_parameter(part.name, form):
                self._measured = (self._measured + number) % 2**128

    def state(self) -> list[str]:
        """Return the digest, the chain of the current tensor, and the digest of the parameters alone."""
        return [f"{self._total:032x}", self._chain.hex(), f"{self._measured:032x}"]


def add_to(digests: Sequence[Digest], parts: list[Part], rows: Sequence[Sequence[Any]], plan: Named) -> None:
    """Add the parts of the tensors of ``plan`` to the digests, one for each model."""
    for digest, each in zip(digests, rows, strict=False):
        for part, row in zip(parts, each, strict=True):
            if part.name in plan and len(row):
                digest.add(part, plan[part.name]._replace(dtype=dtype_name(row)), bytes_of(row))


def require_unchanged(names: Sequence[Any], first: Sequence[str], again: Sequence[Digest]) -> None:
    """Raise a CorruptionError if the parameters of a model had different digests in two passes."""
    for name, was, now in zip(names, first, again, strict=False):
        if now.state()[2] != was:
            raise CorruptionError(f"{name}: was changed between two passes; write new models to new files")


def _path_of(model: Any) -> str:
    return shorten(os.fspath(getattr(model, "path", model)))


def _window_row(leaf: Any, form: "TensorForm") -> Any:
    return leaf if isinstance(leaf, StoredTensor) else _row("tensor", leaf, form)


def _flat(tensor: Any) -> Any:
    return tensor.reshape(-1)


# Models from an iterator are added to sums in float64, so that each one can be freed.


def _aggregated_stream(first: Any, rest: Iterator[Any], weights: Any) -> Any:
    sums = Sums(first, None if weights is None else shares_of(weights, length("weights", weights)))
    del first
    for model in rest:
        sums.add(model)
        del model
    return sums.result()


class Sums:
    """The weighted sums of the models of an iterator."""

    @ieee
    def __init__(self, first: Any, shares: npt.NDArray[np.float64] | None) -> None:
        self._shares, self._count, self._form = shares, 0, ResultForm.of(first)
        named = _named(0, first)
        self._plan, self._ties = plan_of(0, named), ties_of(named)
        for name, form in self._plan.items():
            if form.kind == "parameter" and has_infinities(f"client 0, {name}", named[name]):
                self._plan[name] = form._replace(kind="constant")
        self._floats = {name: form for name, form in self._plan.items() if form.kind == "parameter"}
        self._sums = {name: np.zeros(math.prod(form.shape)) for name, form in self._floats.items()}
        self._others: Named = {}
        self.add(first)

    @ieee
    def add(self, model: Any) -> None:
        """Add a model to the sums."""
        client, named = self._count, matched(_named(self._count, model), self._plan, self._ties)
        check_model(client, named, self._plan)
        if self._shares is not None and client == len(self._shares):
            raise ShapeError(f"weights: expected one number for each model, got {client} for more models")
        share = 1.0 if self._shares is None else float(self._shares[client])
        for name, form in self._floats.items():
            row = _row(f"client {client}, {name}", named[name], form)
            if not is_finite(row):
                raise ArrayError(f"client {client}, {name}: {NOT_FINITE}")
            row = cast(_flat(row), "float64" if form.dtype == "float64" else "float32")
            kernels.combine([self._sums[name], row], [1.0, share], self._sums[name])
        others = {name: as_array(name, named[name]) for name in self._plan.keys() - self._floats.keys()}
        earlier = [self._others] if client else []
        self._others = _unaveraged(self._plan, [*earlier, others], [0, client][-len(earlier) - 1 :])
        self._count += 1

    @ieee
    def result(self) -> Any:
        """Return the average."""
        if self._shares is not None and self._count < len(self._shares):
            raise ShapeError(f"weights: expected one number for each of {self._count} models, got {len(self._shares)}")
        outs, _ = _allocate_outs(self._floats)
        for name, form in self._floats.items():
            total = self._sums.pop(name)
            if self._shares is None:
                total /= self._count
            _round_into(_flat(outs[name]), total, dtype_name(form.like))
            if library_of([form.like]) == "jax":
                outs[name] = as_tensor(outs[name], form.dtype, "jax")
        return self._form.result(self._plan, outs | _unaveraged(self._plan, [self._others], [0]))


def _round_into(out: Any, total: npt.NDArray[np.float64], kind: str) -> None:
    """Round a sum once to the dtype of ``out``."""
    if kind not in NARROW:
        kernels.combine([total], [1.0], out)
        return
    # Rounding to odd in float32 first keeps the rounding to 16 bits exact.
    with np.errstate(over="ignore"):
        odd = total.astype(np.float32)
    past = np.abs(odd) > np.abs(total)
    odd[past] = np.nextafter(odd[past], np.float32(0))
    odd.view(np.uint32)[odd != total] |= 1
    codes = np.empty(odd.size, np.uint16)
    kernels.quantise(odd, NARROW[kind], Codes(NARROW[kind], codes, None))
    kernels.weighted_sum([over(codes.view(np.uint8), kind)], [1.0], out)


def _average(
    models: list[Any],
    labels: Sequence[Any],
    plan: Mapping[str, TensorForm],
    shares: npt.NDArray[np.float64],
) -> tuple[dict[str, Any], list[list[Any]], bool]:
    """Return the averages of the float tensors, the models' tensors, and whether all averages are finite."""
    floats = {name: form for name, form in plan.items() if form.kind == "parameter"}
    outs, memory = _allocate_outs(floats)
    rows, finite = _plain_rows(models, labels, plan), None
    if rows is not None:
        with suppress(FedcoreError):  # nothing was written; the code below copies tensors or reports the invalid one
            finite = _sum(rows, shares, outs, memory)
    if rows is None or finite is None:
        rows, ties = [], ties_of(_named(labels[0], models[0]))
        for i, client in enumerate(labels):
            models[i] = model = matched(_named(client, models[i]), plan, ties)
            check_model(client, model, plan)
            rows.append([_row(f"client {client}, {name}", model[name], form) for name, form in floats.items()])
        finite = _sum(rows, shares, outs, memory)
    for name, form in floats.items():
        if library_of([form.like]) == "jax":
            outs[name] = as_tensor(outs[name], form.dtype, "jax")
    return outs, rows, finite


def shares_of(weights: Any, k: int) -> npt.NDArray[np.float64]:
    """Return the weights as float64[k] with a sum of 1."""
    if k == 0:
        raise RangeError("models: must not be empty")
    given = np.ones(k) if weights is None else numbers("weights", weights, np.float64)
    if given.shape != (k,):
        raise ShapeError(f"weights: expected one number for each of {k} models, got shape {given.shape}")
    for client, weight in enumerate(given.tolist()):
        check_number(f"weights[{client}]", weight, "[0, inf)")
    if not given.any():
        raise RangeError("weights: must not all be zero")
    given = given / given.max()  # so that their sum does not overflow
    return np.asarray(given / given.sum())


def _named(client: Any, model: Any) -> Named:
    return named_tensors(model, f"client {client}", f"client {client}, ")


def _place(leaf: Any) -> Any:
    """Return the place of a tensor's bytes, which tied tensors have in common; None if it cannot be tied."""
    if isinstance(leaf, StoredTensor):
        return leaf.place if leaf.size else None
    with suppress(AttributeError, RuntimeError):  # no tensor of torch, or one without memory of its own
        if address := leaf.data_ptr():
            return address, leaf.stride(), leaf.shape, leaf.dtype
    return None


def ties_of(model: Named) -> dict[str, str]:
    """Return the names that share their bytes with an earlier tensor of torch or of a file, and its name."""
    places, first = {name: _place(leaf) for name, leaf in model.items()}, dict[Any, str]()
    found = {name: first.setdefault(place, name) for name, place in places.items() if place is not None}
    return {name: of for name, of in found.items() if of != name}


def matched(model: Named, plan: Mapping[str, Any], ties: Mapping[str, str]) -> Named:
    """Return a model with the names of the plan, as far as further names of tied tensors are missing or unexpected.

    Args:
        ties: the further names of tied tensors in the plan's model; see ``ties_of``.
    """
    if model.keys() == plan.keys():
        return model
    own, found = ties_of(model), {name: leaf for name, leaf in model.items() if name in plan}
    tied = {own.get(name, name) for name in found}
    unexpected = {name: leaf for name, leaf in model.items() if name not in plan and own.get(name, name) not in tied}
    known = {ties.get(name, name): leaf for name, leaf in found.items()}
    found |= {name: known[of] for name in plan if name not in found and (of := ties.get(name, name)) in known}
    return found | unexpected


def plan_of(client: Any, model: Named, *, hold: bool = False) -> dict[str, TensorForm]:
    """Return the required form of each tensor, from the first model; ``hold``: whether ``like`` is its tensor."""
    plan = {}
    for name, leaf in model.items():
        where = f"client {client}, {name}"
        kind = kind_of(where, leaf)
        like = leaf if hold else _placeholder(leaf)  # placeholders cost 3 us per tensor
        has_c_export = hasattr(type(leaf), "__dlpack_c_exchange_api__")
        plan[name] = TensorForm(like, dtype_name(leaf), tuple(leaf.shape), kind, has_c_export)
    return plan


def _placeholder(leaf: Any) -> Any:
    """Return a tensor of the same library, dtype and shape without memory; for JAX the tensor itself."""
    library = leaf.library if isinstance(leaf, StoredTensor) else library_of([leaf])
    if library == "torch":
        torch = import_module("torch")
        return torch.empty(leaf.shape, dtype=getattr(torch, dtype_name(leaf)), device="meta")
    if library == "jax":
        return leaf
    dtype = np.float32 if isinstance(leaf.dtype, Bfloat16) else leaf.dtype
    return np.broadcast_to(np.empty((), dtype), leaf.shape)


def check_model(client: Any, model: Named, plan: Mapping[str, TensorForm]) -> None:
    """Raise an error if a model's names, shapes or dtypes differ from the plan."""
    if model.keys() != plan.keys():
        raise ArrayError(f"client {client}: {describe_names(list(plan), list(model))}")
    for name, form in plan.items():
        _check_averaged(client, name, model[name], form)


def _check_averaged(client: Any, name: str, leaf: Any, form: TensorForm) -> None:
    where = f"client {client}, {name}"
    if type(leaf) is not type(form.like) or leaf.dtype != form.like.dtype:
        check_dtype(where, leaf, form.dtype)
    check_shape(where, leaf, form.shape)
    if not getattr(leaf, "is_cpu", False) and (device := device_of(leaf)) != CPU:
        raise ArrayError(f"{where}: must be in CPU memory, is on {getattr(leaf, 'device', device)}")


def _plain_rows(models: Sequence[Any], labels: Sequence[Any], plan: Mapping[str, TensorForm]) -> list[list[Any]] | None:
    """Return the models' float tensors if names and shapes fit, else None; the native kernel checks the rest."""
    floats = {name: form for name, form in plan.items() if form.kind == "parameter"}
    others = {name: form for name, form in plan.items() if form.kind != "parameter"}
    if not all(form.has_c_export or isinstance(form.like, np.ndarray) for form in floats.values()):
        return None
    shapes, types, rows = [form.shape for form in floats.values()], [type(form.like) for form in floats.values()], []
    for client, model in zip(labels, models, strict=True):
        if not isinstance(model, Mapping) or model.keys() != plan.keys():
            return None
        rows.append([model[name] for name in floats])
        try:
            if [*map(type, rows[-1])] != types or [tensor.shape for tensor in rows[-1]] != shapes:
                return None
        except RuntimeError:  # a nested tensor has no shape
            return None
        for name, form in others.items():
            _check_averaged(client, name, model[name], form)
    return rows


def _sum(rows: list[list[Any]], shares: npt.NDArray[np.float64], outs: Named, memory: npt.NDArray[np.uint8]) -> bool:
    """Write the averages and return whether all models are finite, even those of weight 0 (0 times infinity is NaN)."""
    tensors = list(outs.values())
    with span("aggregate", None, (rows, tensors)):
        if any(dtype_name(tensor) != "float32" for tensor in tensors):
            summed = kernels.weighted_sum_segments(rows, shares, tensors, accumulate="float64", norms=True)
            return bool(np.isfinite(summed.squared_norm_of_sum)) or all(map(is_finite, tensors))
        kernels.weighted_sum_segments(rows, shares, tensors, accumulate="float64")
        return bool(kernels.all_finite([memory.view(np.float32)])[0])  # cheaper than all rows' norms


def _row(name: str, leaf: Any, form: TensorForm) -> Any:
    """Return a tensor in the first model's dtype and in a form that the kernels can read."""
    if dtype_name(leaf) != form.dtype or library_of([leaf]) != library_of([form.like]):
        leaf = as_tensor(as_array(name, leaf), form.dtype, "numpy" if library_of([form.like]) == "numpy" else "torch")
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.flags.c_contiguous else np.ascontiguousarray(leaf)
    if not hasattr(leaf, "requires_grad"):
        return leaf
    leaf = leaf.detach() if leaf.requires_grad else leaf
    leaf = leaf if leaf.is_contiguous() else leaf.contiguous()
    # With older versions of torch, numpy() needs 8 us less per tensor than DLPack; bfloat16 requires DLPack.
    return leaf if form.has_c_export or form.dtype == "bfloat16" or not hasattr(leaf, "numpy") else leaf.numpy()


def _allocate_outs(plan: Mapping[str, TensorForm]) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
    """Return new tensors in one block of memory on huge pages, and the block, which is zero between the tensors."""
    sizes = [math.prod(form.shape) * BYTES[form.dtype] for form in plan.values()]
    starts = [0, *itertools.accumulate(-(-size // LINE) * LINE for size in sizes)]
    memory = _average_memory(starts[-1] // 4).get().view(np.uint8)
    pieces = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    for start, size, stop in zip(starts, sizes, starts[1:], strict=False):
        memory[start + size : stop] = 0
    outs = {name: tensor_over(piece, form.like) for (name, form), piece in zip(plan.items(), pieces, strict=True)}
    return outs, memory


@lru_cache(maxsize=1)
def _average_memory(n: int) -> BufferPool:
    """Return the pool of memory for averages of one size."""
    return BufferPool(n, most=int(4 * n <= MOST_KEPT))


def _require_finite(client: Any, rows: Named) -> None:
    for name, row in rows.items():
        if not is_finite(row):
            raise ArrayError(f"client {client}, {name}: {NOT_FINITE}")


def is_finite(tensor: Any) -> bool:
    """Whether a tensor has neither NaN nor infinities."""
    return bool((tensor.isfinite() if hasattr(tensor, "isfinite") else np.isfinite(tensor)).all())


def _unaveraged(plan: Mapping[str, TensorForm], models: Sequence[Named], labels: Sequence[Any]) -> dict[str, Any]:
    """Return the largest value of each counter, and the common value of each constant."""
    outs = {}
    for name, form in plan.items():
        if form.kind == "parameter":
            continue
        first = largest = as_array(f"client {labels[0]}, {name}", models[0][name])
        for client, model in zip(labels[1:], models[1:], strict=True):
            array = as_array(f"client {client}, {name}", model[name])
            if form.kind == "counter":
                largest = np.maximum(largest, array)
            elif not np.array_equal(array, first, equal_nan=first.dtype.kind == "f"):
                must = f"must be equal in all models, because {form.dtype} tensors are not averaged"
                must += "; convert counts to float64" if first.dtype.kind in "iu" else ""
                raise RangeError(f"client {client}, {name}: {must}")
        outs[name] = as_tensor(np.array(largest), form.dtype, library_of([form.like]))
    return outs
