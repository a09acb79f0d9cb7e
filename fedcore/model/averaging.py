"""Averages of models, without a server."""

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import arrays, kernels
from fedcore.arrays import F32, F64, LINE, NARROW, BufferPool, as_array, dtype_name, empty, ieee, tensor_over
from fedcore.errors import ArrayError, DivergedError, FedcoreError, RangeError, ShapeError, UnknownClientError
from fedcore.kernels import Codes
from fedcore.kernels.robust import GramSum
from fedcore.model import policy
from fedcore.model.files import open_model
from fedcore.model.layout import FLAT, Model, Tree, describe_names, named_tensors, nested, tree_of
from fedcore.model.lora import Adapters, check_way, equal_adapters
from fedcore.model.policy import TensorForm, TensorPolicy, cast, in_library, is_finite, is_mask, settled, why_not_finite
from fedcore.model.safetensors import BYTES, Safetensors, StoredTensor, over
from fedcore.model.windows import Digest, Part, Rows, Windows, add_to, check_model, flat, require_unchanged
from fedcore.profiling import span
from fedcore.rules import Chain, Combination, Rule
from fedcore.validation import LONGEST_REASON, check_number, length, numbers, shorten

# ``aggregate`` averages models tensor by tensor, without a flat vector.


Named = Mapping[str, Any]

MOST_KEPT = 1 << 28
"""The maximum size in bytes of an average whose memory the process keeps for the next average."""


RULES = "float32, in which rules compute"
Plan = dict[str, TensorForm]


def aggregate(
    models: Any,
    weights: Any = None,
    *,
    key: str | None = None,
    rule: "str | Rule | Sequence[Rule | str] | None" = None,
    lora: str = "average",
    rank: int | None = None,
) -> Any:
    """Return the weighted average of models, sum_i w_i x_i / sum_i w_i, or their robust combination.

    - Float tensors (parameters and BatchNorm statistics) are averaged.
    - A counter (an integer scalar of 32 or 64 bits, or ``num_batches_tracked``) becomes its largest value.
    - Other integers, bools and float tensors with infinities (masks) are constants. They must be equal in all models.

    Numbers of at most 32 bits that are equal in all models keep their bits; float64 numbers may change in the last bit.

    Args:
        models: k models with the same names and shapes: a sequence, a mapping from client ids to models, or an
            iterator, from which each model is freed before the next one is taken. A model is in any form that
            ``Layout.of`` accepts, or the path of safetensors files, of a torch file (.pt, .pth, .bin, .ckpt) or of a
            .npz file, or a ``Safetensors``. A model may lack or repeat names of tied tensors; the average has the
            first model's names, of a module those of its ``state_dict``. LoRA adapters in folders must have the same
            targets, and without ``lora`` the same scale. Tensors are in CPU memory: float32, float64, float16,
            bfloat16, integers or bool. Float tensors are cast to the first model's dtype. Read-only. A tensor that is
            not contiguous is copied first.
        weights: k finite numbers >= 0, not all zero, such as numbers of examples; or a mapping with the ids of
            ``models``. Default: equal weights.
        key: the key of the ``state_dict`` in torch files with several entries.
        rule: a robust rule of ``fedcore.rules`` in place of the average, by name ("median", "krum") or as an object
            (``TrimmedMean(2)``), or a sequence of mixing rules and a robust rule. Each model counts once, so weights
            are not allowed. Distances are over all float tensors except BatchNorm statistics, which are combined like
            the others. Equal scores go to the first model.
        lora: how LoRA adapters of PEFT are combined, as for ``merge``: "average" averages A and B apart; "product" and
            "stack" give the tensors of an adapter of sum_k w_k s_k B_k A_k. All products of it have the first
            adapter's scale s = lora_alpha / r (with ``use_rslora`` lora_alpha / sqrt(r)). The models must be folders or
            files with an ``adapter_config.json``.
        rank: the rank of the result with ``lora="product"``. Default: the largest rank of the adapters.

    Returns:
        The average in the first model's library, dtypes and nesting: a mapping by name, a list, a tree, or an array.
        Its tensors are new. Safetensors files give NumPy arrays, in float32 for bfloat16 unless ml_dtypes is imported.

    Raises:
        ArrayError, ShapeError, DtypeError, RangeError: names or a shape differ, a constant differs, or a tensor is
            sparse, not in CPU memory or not finite, or tied in the first model and not in another. The message names
            the client and the tensor.
        DivergedError: with a rule, the result exceeds float32; or the sum of an iterator exceeds float64.
        RangeError, ShapeError, DtypeError: ``models`` is empty, or the weights are invalid.
        UnknownNameError, RangeError: the rule is unknown, needs more models, or needs the model before the round.
        StoreError: a file cannot be read.
        CorruptionError: a file was changed while it was in use.

    Determinism: float64 products and sums in the order of the models, rounded once; bit-identical on every ISA level
        and thread count, and for files and models in memory. For an iterator without weights, the sum is divided by
        k at the end, which may change the last bit. With a rule, the bits are those of a round of FedAvg with this
        rule from a model of zeros, with numbers rounded to float32 first; distances are between differences from
        the models' median.
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
        check_way(lora, rank, rule=rule)
        chain = None if rule is None else Chain.of_models(rule, has_base=False)
        if chain is not None:
            require_no_weights(weights)
        require_several("models", models)
        if (chain is not None or lora != "average") and isinstance(models, Iterator):
            models = list(models)
        if isinstance(models, Iterator):
            first = [*itertools.islice(models, 1)]
            if first and not _is_file(first[0]):
                return _aggregated_stream(first.pop(), models, weights)
            models = [*first, *models]
        labels = [f"client {i}" for i in range(len(models))]
        if isinstance(models, Mapping):
            labels = [f"client {client!r}" for client in models]
            if isinstance(weights, Mapping):
                if weights.keys() != models.keys():
                    raise UnknownClientError(f"weights: {describe_names([*map(str, models)], [*map(str, weights)])}")
                weights = [weights[client] for client in models]
            models = models.values()
        if lora != "average":
            adapters = Adapters(dict(zip(labels, models, strict=True)), lora, rank, key)
            others = _aggregated(adapters.others, labels, weights, None, None) if adapters.others[0] else {}
            return adapters.tensors(others, shares_of(weights, len(labels)))
        return _aggregated(list(models), labels, weights, key, chain)
    except FedcoreError as error:  # shortened, since clients may send names of any length
        if len(text := str(error)) <= LONGEST_REASON:
            raise
        raise type(error)(shorten(text)) from None


def require_several(option: str, models: Any, *others: type) -> None:
    """Raise an ArrayError for one path, or an object of another type, in place of several models."""
    if _is_file(models) or not isinstance(models, Iterable) or isinstance(models, others):
        got = "one path" if _is_file(models) else type(models).__name__
        raise ArrayError(f"{option}: expected several models, got {got}; pass a list of paths or models")


def _is_file(model: Any) -> bool:
    return isinstance(model, str | os.PathLike | Safetensors)


@ieee
def _aggregated(given: list[Any], labels: list[str], weights: Any, key: str | None, chain: Chain | None) -> Any:
    shares = shares_of(weights, len(given))
    paths = [shorten(os.fspath(getattr(one, "path", one))) if _is_file(one) else None for one in given]
    labels = [label if path is None else f"{label} ({path})" for label, path in zip(labels, paths, strict=True)]
    files = {label: one for label, path, one in zip(labels, paths, given, strict=True) if path is not None}
    equal_adapters(files)
    models = [open_model(one, key=key) if _is_file(one) else one for one in given]
    tree = form_of(given[0])
    is_plain = not files and tree is None and isinstance(given[0], Mapping)

    def named(i: int) -> Named:
        return models[i] if labels[i] in files else named_tensors(models[i], labels[i], f"{labels[i]}, ")

    if not is_plain:
        models = [*map(named, range(len(models)))]
    first = named(0)
    plan = TensorPolicy().plan(labels[0], first)
    if (rows := _plain_rows(models, labels, first, plan)) is not None:
        with suppress(FedcoreError):  # the code below copies tensors or reports the invalid one
            return in_form(tree, plan, _averages(models, rows, labels, dict(plan), shares, chain))
    ties, rows = policy.ties_of(first), []
    for i, label in enumerate(labels):
        models[i] = model = policy.matched(named(i), plan, ties)
        check_model(label, model, plan)
        rows.append([_row(f"{label}, {name}", model[name], form) for name, form in averaged(plan).items()])
    return in_form(tree, plan, _averages(models, rows, labels, plan, shares, chain))


def _averages(
    models: Sequence[Named], rows: list[list[Any]], labels: Sequence[str], plan: Plan, shares: F64, chain: Chain | None
) -> dict[str, Any]:
    """Return the tensors of the average or the robust combination; masks become constants of the plan.

    Args:
        rows: the averaged tensors of each model.
    """
    stream = _Stream(rows, averaged(plan))
    combination, first = (None, []) if chain is None else stream.combination(chain, labels)
    outs, memory = _allocate_outs(stream.forms)
    again, suspects = [Digest() for _ in first], list[str]()
    needs_norms = chain is not None or any(form.result != "float32" for form in stream.forms.values())
    for parts, given, targets in stream.windows(outs):
        with span("aggregate", None, (given, targets)):
            summed = kernels.weighted_sum_segments(given, shares, targets, accumulate="float64", norms=needs_norms)
            suspects += [part.name for part in parts] if needs_norms and not summed.finite.all() else []
            if combination is not None:
                for j, target in enumerate(targets):
                    _combine(combination, [each[j] for each in given], target)
        stream.digest(again, parts, given)
    require_unchanged(labels, first, again)
    # 0 times infinity is NaN, so that an average is not finite for a model of weight 0 either.
    if not needs_norms and not kernels.all_finite([memory.view(np.float32)])[0]:  # cheaper than all rows' norms
        suspects = [name for name, out in outs.items() if not is_finite(out)]
    for name, i in stream.not_finite(suspects).items() if suspects else ():
        if not is_mask(name, models[0][name]):
            raise ArrayError(f"{labels[i]}, {name}: {why_not_finite(models[i][name], plan[name].dtype)}")
        plan[name] = plan[name]._replace(kind="constant")
    for name in averaged(plan) if combination is not None or suspects else ():
        require_finite(name, outs[name], plan[name].dtype, has_rule=combination is not None)
    found = {
        name: _finished(form, outs[name]) if form.is_averaged else _settled(name, form, labels, models)
        for name, form in plan.items()
    }
    policy.require_tied(labels[0], policy.ties_of(models[0]), found)
    return found


def averaged(plan: Plan) -> Plan:
    """Return the forms of the averaged tensors."""
    return {name: form for name, form in plan.items() if form.is_averaged}


def _finished(form: TensorForm, out: Any) -> Any:
    return in_library(form, out) if form.library == "jax" else out


def _settled(name: str, form: TensorForm, labels: Sequence[str], models: Sequence[Named]) -> Any:
    values = ((label, model[name]) for label, model in zip(labels, models, strict=True))
    return in_library(form, settled(name, form, values))


class _Stream:
    """The averaged tensors of models in windows; models in memory are one window.

    Args:
        rows: the tensors of each model, in the order of ``forms``.
    """

    def __init__(self, rows: list[list[Any]], forms: Plan) -> None:
        self.forms, self._rows, self._measured = forms, rows, set[str]()
        self._is_in_memory = StoredTensor not in {type(row) for each in rows for row in each}

    def windows(self, outs: Mapping[str, Any] | None = None, names: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield the parts, the models' rows and the parts of ``outs`` of each window."""
        if self._is_in_memory and names is None:
            parts = [Part(name, 0, math.prod(form.shape)) for name, form in self.forms.items()]
            yield parts, self._rows, [*(outs or {}).values()]
            return
        models = [dict(zip(self.forms, map(flat, each), strict=True)) for each in self._rows]
        for parts, rows in Windows(models, self.forms if names is None else names).read():
            kinds = [self.forms[part.name].dtype for part in parts]
            given = [[*map(cast, each, kinds)] for each in rows]
            yield parts, given, [flat(outs[part.name])[part.start : part.stop] for part in parts if outs]

    def combination(self, chain: Chain, labels: Sequence[str]) -> tuple[Combination, list[str]]:
        """Return the robust combination, and the models' digests of the parameters that were read for distances."""
        digests = list[Digest]()

        def products() -> F64:
            nonlocal digests
            masks: set[str] = set()
            for _ in range(2):
                names = [name for name, form in self.forms.items() if form.kind == "parameter" and name not in masks]
                total, digests = GramSum(len(labels)), [Digest() for _ in labels]
                self._measured = set(names)
                for parts, rows, _ in self.windows(names=names):
                    for j in range(len(parts)):
                        part = [each[j] for each in rows]
                        total.add(center_of(part), part)
                    self.digest(digests, parts, rows)
                found = total.result()
                if np.isfinite(found).all():
                    return found
                masks = {name for name, row in zip(self.forms, self._rows[0], strict=True) if is_mask(name, row)}
            label = labels[int(np.flatnonzero(~np.isfinite(np.diag(found)))[0])]
            raise ArrayError(f"{label}: has a NaN, an infinity, or a number beyond {RULES}, or the first dtype")

        return chain.combination(len(labels), products, 0), [digest.state()[2] for digest in digests]

    def digest(self, digests: Sequence[Digest], parts: list[Part], rows: Rows) -> None:
        """Add the measured parts of files to the digests."""
        if not self._is_in_memory:
            add_to(digests, parts, rows, {name: self.forms[name] for name in self._measured})

    def not_finite(self, names: Sequence[str]) -> dict[str, int]:
        """Return the tensors with a NaN or an infinity, and the first model of each."""
        bad = dict[str, int]()
        for parts, rows, _ in self.windows(names=[*dict.fromkeys(names)]):
            for i, each in reversed([*enumerate(rows)]):
                bad |= {part.name: i for part, row in zip(parts, each, strict=True) if not is_finite(row)}
        return bad


def form_of(model: Any) -> Tree:
    """Return the nesting of the first model, which the average has; None for a mapping by name."""
    if isinstance(model, Model):
        return form_of(model.tensors)
    tree = None if _is_file(model) else tree_of(model)
    is_named = tree is not None or _is_file(model) or isinstance(model, Mapping) or hasattr(model, "named_parameters")
    return tree if is_named else FLAT


def in_form(tree: Tree, plan: Iterable[str], named: Named) -> Any:
    """Return tensors in the nesting of the first model and the order of ``plan``."""
    ordered = {name: named[name] for name in plan}
    return ordered if tree is None else nested(tree, ordered)


# A robust rule combines h_i = -y_i, so that the result has the bits of a server's step from x = 0. Distances come from
# inner products of differences from the median, so that close models far from zero keep them. A dishonest model could
# be far from all others, so differences from it would lose their distances.


def center_of(rows: Sequence[Any]) -> F32:
    """Return the median of each element of k vectors, float32[n]; 0 if it is not finite."""
    flat_rows = [*map(flat, rows)]
    center = empty(len(flat_rows[0]))
    if len(center):
        kernels.trimmed_mean([None] * len(rows), flat_rows, -np.ones(len(rows)), (len(rows) - 1) // 2, out=center)
    return np.where(np.isfinite(center), center, np.float32(0))


def require_no_weights(weights: Any) -> None:
    """Raise RangeError for weights beside a robust rule."""
    if weights is not None:
        raise RangeError("weights: a robust rule counts each model once; leave weights or the rule out")


def write_combination(combination: Combination, rows: Sequence[Any], out: F32, base: F32 | None = None) -> None:
    """Write the robust combination of k vectors y_i, or of base - y_i, to ``out``, float32[n]."""
    if len(out):
        combination.write([base] * len(rows), rows, np.ones(len(rows)), out)
        if base is None:
            np.subtract(0, out, out=out)  # a zero stays positive


def require_finite(name: str, result: Any, kind: str, *, has_rule: bool = False) -> Any:
    """Return a result of finite tensors; raise DivergedError if a number is beyond the range of its dtype."""
    if not is_finite(result):
        limit = RULES if has_rule and kind not in NARROW else kind
        raise DivergedError(f"{name}: the result is beyond the range of {limit}; pass smaller numbers or a wider dtype")
    return result


def _combine(combination: Combination, rows: list[Any], target: Any) -> None:
    """Write the robust combination of k tensors to a tensor of NumPy or torch."""
    kind, out = dtype_name(target), flat(target)
    to = np.asarray(out) if kind == "float32" else empty(len(out))
    write_combination(combination, [flat(row) for row in rows], to)
    if kind != "float32":
        _round_into(out, to.astype(np.float64), kind)


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
        self._shares, self._count, self._tree = shares, 0, form_of(first)
        named = named_tensors(first, "client 0", "client 0, ")
        self._plan, self._ties = TensorPolicy().plan("client 0", named), policy.ties_of(named)
        for name, form in averaged(self._plan).items():
            if is_mask(f"client 0, {name}", named[name]):
                self._plan[name] = form._replace(kind="constant")
        self._sums = {name: np.zeros(math.prod(form.shape)) for name, form in averaged(self._plan).items()}
        self._others: list[dict[str, Any]] = []
        self.add(first)

    @ieee
    def add(self, model: Any) -> None:
        """Add a model to the sums."""
        i, label = self._count, f"client {self._count}"
        named = policy.matched(named_tensors(model, label, f"{label}, "), self._plan, self._ties)
        check_model(label, named, self._plan)
        if self._shares is not None and i == len(self._shares):
            raise ShapeError(f"weights: expected one number for each model, got {i} for more models")
        share = 1.0 if self._shares is None else float(self._shares[i])
        others = dict[str, Any]()
        for name, form in self._plan.items():
            if not form.is_averaged:
                others[name] = _settled(name, form, ["client 0", label] if i else [label], [*self._others, named])
                continue
            row = _row(f"{label}, {name}", named[name], form)
            if not is_finite(row):
                raise ArrayError(f"{label}, {name}: {why_not_finite(named[name], form.dtype)}")
            row = cast(flat(row), "float64" if form.dtype == "float64" else "float32")
            kernels.combine([self._sums[name], row], [1.0, share], self._sums[name])
        self._others, self._count = [others], i + 1

    @ieee
    def result(self) -> Any:
        """Return the average."""
        if self._shares is not None and self._count < len(self._shares):
            raise ShapeError(f"weights: expected one number for each of {self._count} models, got {len(self._shares)}")
        forms = averaged(self._plan)
        outs, _ = _allocate_outs(forms)
        for name, form in forms.items():
            total = self._sums.pop(name)
            if self._shares is None:
                total /= self._count
            _round_into(flat(outs[name]), total, form.result)
            outs[name] = _finished(form, require_finite(name, outs[name], form.dtype))
        policy.require_tied("client 0", self._ties, found := self._others[0] | outs)
        return in_form(self._tree, self._plan, found)


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


def _plain_rows(models: Sequence[Any], labels: Sequence[str], first: Named, plan: Plan) -> list[list[Any]] | None:
    """Return the models' float tensors if names and shapes fit, else None; the native kernel checks the rest."""
    floats, others = averaged(plan), {name: form for name, form in plan.items() if not form.is_averaged}
    shapes, types, rows = [form.shape for form in floats.values()], [type(first[name]) for name in floats], []
    if not all(one is np.ndarray or hasattr(one, "__dlpack_c_exchange_api__") for one in types):
        return None
    for label, model in zip(labels, models, strict=True):
        if not isinstance(model, Mapping) or model.keys() != plan.keys():
            return None
        rows.append([model[name] for name in floats])
        try:
            if [*map(type, rows[-1])] != types or [tensor.shape for tensor in rows[-1]] != shapes:
                return None
        except RuntimeError:  # a nested tensor has no shape
            return None
        check_model(label, {name: model[name] for name in others}, others)
    return rows


def _row(name: str, leaf: Any, form: TensorForm) -> Any:
    """Return a tensor in the first model's dtype and in a form that the kernels can read; files are read later."""
    if isinstance(leaf, StoredTensor):
        return leaf
    if dtype_name(leaf) != form.dtype or not hasattr(leaf, "__dlpack__"):
        array = as_array(name, leaf)
        policy.check_form(name, array, form.dtype, form.shape)
        return cast(np.require(array, requirements=["C", "A"]).reshape(-1), form.dtype)
    leaf = arrays.from_dlpack(leaf.contiguous()) if hasattr(leaf, "contiguous") else leaf
    # A message's payload may be unaligned.
    return np.require(leaf, requirements=["C", "A"]) if isinstance(leaf, np.ndarray) else leaf


def _allocate_outs(plan: Plan) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
    """Return new tensors in one block of memory on huge pages, and the block, which is zero between the tensors."""
    sizes = [math.prod(form.shape) * BYTES[form.result] for form in plan.values()]
    starts = [0, *itertools.accumulate(-(-size // LINE) * LINE for size in sizes)]
    memory = _average_memory(starts[-1] // 4).get().view(np.uint8)
    outs = {}
    for (name, form), start, size, stop in zip(plan.items(), starts, sizes, starts[1:], strict=False):
        memory[start + size : stop] = 0
        outs[name] = tensor_over(memory[start : start + size], form.result, form.shape, form.library)
    return outs, memory


@lru_cache(maxsize=1)
def _average_memory(n: int) -> BufferPool:
    """Return the pool of memory for averages of one size."""
    return BufferPool(n, most=int(4 * n <= MOST_KEPT))
