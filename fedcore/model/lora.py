"""LoRA adapters in files: their configurations, and averages of their products B A."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedcore import kernels
from fedcore.arrays import F64, as_array, dtype_name, empty
from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError, UnknownNameError
from fedcore.model.files import bytes_of, open_model
from fedcore.model.layout import describe_names
from fedcore.model.policy import FLOATS, NOT_FINITE, TensorForm, TensorPolicy, cast, check_form, is_finite, settled
from fedcore.model.safetensors import BYTES, StoredTensor, over, read_json
from fedcore.model.windows import Digest, Part, Windows, flat
from fedcore.validation import absolute, check_integer, check_number

Progress = Callable[[int, int], object]
Way = Literal["average", "product", "stack"]
WAYS = ("average", "product", "stack")
"""How adapters are combined: the average of each tensor, of the products B A, or the products side by side."""
ADAPTER, ADAPTER_MODEL = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's files with the configuration and with the tensors of an adapter."""
SCALES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""The entries that give the rank and the scale of each product."""
EFFECTIVE = (
    *SCALES,
    *("peft_type", "alpha", "use_dora", "fan_in_fan_out", "target_modules", "target_parameters", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "scaling", "projection_prng_key", "random_loc_seed"),
)
"""The entries of an adapter's configuration on which the effect of its tensors depends."""
BASE = ("base_model_name_or_path", "revision", "layer_replication", "init_lora_weights")
"""The entries that tell to which weights a product is added."""
VARIANTS = ("use_dora", "use_bdlora", "lora_bias", "kasa_config", "monteclora_config", "arrow_config")
"""The entries with which an adapter is more than the product B A."""
_FACTOR = re.compile(r"((?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?)([AB])((?:\.weight)?)")
_KEY = re.compile(r"\^?[\w-]+(\.[\w-]+){0,63}")


def adapter_of(path: Any) -> tuple[dict[str, Any], bytes] | None:
    """Return PEFT's configuration of an adapter in a folder, as content and bytes, or None."""
    place = absolute(getattr(path, "path", path))
    folder = place if place.is_dir() else place.parent if place.name.startswith("adapter_model") else None
    config = None if folder is None else folder / ADAPTER
    return None if config is None or not config.exists() else read_json(config)


def require_equal_adapters(paths: Mapping[str, Any], entries: Sequence[str] = EFFECTIVE) -> bytes | None:
    """Raise ArrayError if adapters differ in entries of their configurations, and return the first configuration.

    Args:
        paths: the models' paths by label.
    """
    first: dict[str, Any] = {}
    of_first, text = "", None
    for label, path in paths.items():
        if (found := adapter_of(path)) is None:
            continue
        values = {
            entry: (sorted(set(map(str, value))) if isinstance(value := found[0].get(entry), list) else value) or None
            for entry in entries
        }
        if text is None:
            first, of_first, text = values, label, found[1]
        for entry in entries:
            if values[entry] != first[entry]:
                differ = f"{entry} is {values[entry]!r:.100}, but {first[entry]!r:.100} in {of_first}"
                advice = ", or combine their products with lora='product'" if entry in SCALES else ""
                raise ArrayError(f"{label}: {differ}; pass adapters whose entries in {ADAPTER} are equal{advice}")
    return text


def check_way(lora: Way, rank: int | None, **others: Any) -> None:
    """Raise an error if adapters cannot be combined in this way, with these other options of ``merge``."""
    if lora not in WAYS:
        raise UnknownNameError.of("lora", lora, WAYS)
    if rank is not None:
        check_integer("rank", rank, 1)
        if lora != "product":
            raise RangeError(f"rank={rank}: needs lora='product'; leave the rank out, or combine products")
    if lora != "average" and (given := [name for name, value in others.items() if value is not None]):
        why = "a step, clipping and a rule act on A and B, and not on the product B A"
        raise RangeError(f"{given[0]}: cannot be used with lora={lora!r}: {why}; leave it out")


class Scale(NamedTuple):
    """The ranks and scales of an adapter; the patterns have those of single modules."""

    r: int
    alpha: float
    is_rank_stabilized: bool
    ranks: dict[str, Any]
    alphas: dict[str, Any]

    @classmethod
    def of(cls, label: str, config: dict[str, Any]) -> "Scale":
        """Return the checked entries of a configuration."""
        where = f"{label}: {ADAPTER}, "
        if config.get("peft_type") != "LORA":
            raise ArrayError(f"{where}peft_type={config.get('peft_type')!r:.60}: only LORA has products; average it")
        if variants := [entry for entry in VARIANTS if config.get(entry)]:
            raise ArrayError(f"{where}{variants[0]}: such an adapter is more than a product B A; average it")
        if isinstance(start := config.get("init_lora_weights"), str) and start not in ("gaussian", "eva", "orthogonal"):
            reason = "changes the base weights, so products of different ranks have different bases"
            raise ArrayError(f"{where}init_lora_weights={start!r:.60}: {reason}; convert it to plain LoRA with PEFT")
        ranks, alphas = patterns = [config.get(entry) or {} for entry in ("rank_pattern", "alpha_pattern")]
        for entry, pattern in zip(("rank_pattern", "alpha_pattern"), patterns, strict=True):
            if not isinstance(pattern, dict) or any(not _KEY.fullmatch(key) for key in pattern):
                raise ArrayError(f"{where}{entry}: must map names of modules, without wildcards; write the names out")
        for name, r in {"r": config.get("r"), **{f"rank_pattern {key!r:.99}": r for key, r in ranks.items()}}.items():
            check_integer(f"{where}{name}", r, 1)
        given = {"lora_alpha": config.get("lora_alpha")}
        for name, alpha in {**given, **{f"alpha_pattern {key!r:.99}": a for key, a in alphas.items()}}.items():
            check_number(f"{where}{name}", alpha, "(0, inf)")
        if not isinstance(is_rank_stabilized := config.get("use_rslora") or False, bool):
            raise ArrayError(f"{where}use_rslora={is_rank_stabilized!r:.60}: must be true or false; correct it")
        return cls(config["r"], float(config["lora_alpha"]), is_rank_stabilized, ranks, alphas)

    def of_module(self, module: str) -> tuple[int, float]:
        """Return the rank and the scale of a module, whose name ends with a key of a pattern, as in PEFT."""
        found, parts = [], module.split(".")
        names = {f"^{module}", *(".".join(parts[-count:]) for count in range(1, min(len(parts), 64) + 1))}
        for pattern, usual in ((self.ranks, self.r), (self.alphas, self.alpha)):
            found.append(next((pattern[key] for key in pattern if key in names), usual))
        return found[0], found[1] / self._divisor(found[0])

    def alpha_of(self, rank: int) -> float:
        """Return the alpha that gives a product of any rank the scale of this adapter."""
        alpha = self.alpha * (self._divisor(rank) / self._divisor(self.r))
        return int(alpha) if alpha.is_integer() else alpha

    def _divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.is_rank_stabilized else rank


class Adapters:
    """LoRA adapters in files, and the adapter of the sum of their products, sum_k w_k s_k B_k A_k.

    Args:
        paths: the adapters' paths by label.
        shares: w_k.
        way: "product" or "stack".
        rank: the rank of all products, or None for the largest one of the adapters.
        key: as for ``open_model``.

    Attributes:
        models: the adapters' tensors.
        scales: the ranks and scales of the adapters.
        plan: the forms of the result's tensors.
        scale: the scale of all products of the result, which is the first adapter's.
        config: the content of its configuration.
        products: by module, the ranks of the adapters and of the result; with ``parts``, the norm and the error.

    Cost: reads headers. ``parts`` reads all tensors once, and needs about 50 R (m + n) bytes for the largest product
        of m by n numbers; R is the sum of the ranks.
    """

    def __init__(self, paths: Mapping[str, Any], shares: F64, way: Way, rank: int | None, key: str | None) -> None:
        self._labels, self._shares, self._way, configs = [*paths], shares, way, []
        for label, path in paths.items():
            if (found := adapter_of(path)) is None:
                raise ArrayError(f"{label}: has no {ADAPTER}; pass the folder that PEFT's save_pretrained has written")
            configs.append(found[0])
        require_equal_adapters(paths, [entry for entry in (*EFFECTIVE, *BASE) if entry not in SCALES])
        self.scales = [Scale.of(label, config) for label, config in zip(paths, configs, strict=True)]
        self.models = [open_model(path, key=key) for path in paths.values()]
        self.plan = TensorPolicy().plan(self._labels[0], self.models[0])
        self._factors = self._named()
        self.products: dict[str, dict[str, Any]] = {}
        for module, names in self._factors.items():
            own = [scale.of_module(module)[0] for scale in self.scales]
            for label, model, r in zip(self._labels, self.models, own, strict=True):
                self._check(label, model, names, r)
            if rank is not None and rank > sum(own):
                raise RangeError(f"rank={rank}: must be at most {sum(own)}, the sum of the ranks of {module}")
            due = sum(own) if way == "stack" else rank or max(own)
            self.products[module] = {"ranks": own, "rank": due}
            self.plan |= {name: self._form(name, axis, due) for axis, name in enumerate(names)}
        for label, model in zip(self._labels, self.models, strict=True):
            for name in self._others:
                check_form(f"{label}, {name}", model[name], self.plan[name].dtype, self.plan[name].shape)
        ranks = {module: one["rank"] for module, one in self.products.items()}
        first, most = self.scales[0], max(ranks.values())
        # A key fits all modules whose names end with it, so the longest come first.
        ranks = {} if min(ranks.values()) == most else dict(sorted(ranks.items(), key=lambda one: -len(one[0])))
        alphas = {module: first.alpha_of(own) for module, own in ranks.items()}
        entries = {"r": most, "lora_alpha": first.alpha_of(most), "rank_pattern": ranks, "alpha_pattern": alphas}
        self.scale, self.config = first.alpha_of(1), configs[0] | entries

    def _named(self) -> dict[str, tuple[str, str]]:
        """Return the names of A and B by module."""
        label, found = self._labels[0], dict[str, tuple[str, str]]()
        for one, model in zip(self._labels, self.models, strict=True):
            if model.keys() != self.plan.keys():
                raise ArrayError(f"{one}: {describe_names(list(self.plan), list(model))}")
        for name in self.plan:
            factor = _FACTOR.fullmatch(name)
            if factor is None and "lora_" in name:
                raise ArrayError(f"{label}, {name}: is not a factor A or B in a file of PEFT; average the adapters")
            if factor is not None:
                pair = f"{factor[1]}A{factor[4]}", f"{factor[1]}B{factor[4]}"
                if missing := {*pair} - self.plan.keys():
                    raise ArrayError(f"{label}: has {name}, but not {missing.pop()}; copy the folder again")
                found[factor[2]] = pair
        if not found:
            raise ArrayError(f"{label}: has no tensors lora_A and lora_B; pass adapters of PEFT")
        self._others = [name for name in self.plan if _FACTOR.fullmatch(name) is None]
        return found

    def _form(self, name: str, axis: int, rank: int) -> TensorForm:
        """Return the form of A (axis 0) or B (axis 1) with a rank."""
        shape = self.plan[name].shape
        return self.plan[name]._replace(shape=(*shape[:axis], rank, *shape[axis + 1 :]))

    def _check(self, label: str, model: Mapping[str, Any], names: tuple[str, str], rank: int) -> None:
        """Raise an error if the factors of a module are not floats of the right shapes."""
        for axis, name in enumerate(names):
            found, due = tuple(model[name].shape), self._form(name, axis, rank).shape
            if dtype_name(model[name]) not in FLOATS:
                raise DtypeError(f"{label}, {name}: expected floats, got {dtype_name(model[name])}; convert them")
            if found != due or 0 in due or (axis and math.prod(due[2:]) != 1):
                reason = f"expected shape {due} for the rank {rank} of {ADAPTER}, got {found}"
                raise ShapeError(f"{label}, {name}: {reason}; copy the folder again, or average the adapters")

    def parts(self, progress: Progress | None = None, digests: Sequence[Digest] = ()) -> Iterator[tuple[Part, Any]]:
        """Yield the parts of the result. The tensors of the adapters are added to the digests."""
        sizes = {name: sum(_bytes_of(model[name]) for model in self.models) for name in self.plan}
        done, total = 0, sum(sizes.values())
        for module, names in self._factors.items():
            if progress is not None:
                progress(done, total)
            done += sum(sizes[name] for name in names)
            for name, array in zip(names, self._product(module, *names, digests), strict=True):
                vector = cast(array.reshape(-1), self.plan[name].dtype)
                if not is_finite(vector):
                    raise ArrayError(f"{name}: exceeds the range of {self.plan[name].dtype}; lower lora_alpha")
                yield Part(name, 0, array.size), vector
        for parts, rows in Windows(self.models, self._others).read():
            for j, part in enumerate(parts):
                form, given = self.plan[part.name], [each[j] for each in rows]
                for digest, row in zip(digests, given, strict=False):
                    digest.add(part, form._replace(dtype=dtype_name(row)), bytes_of(row))
                if form.is_averaged:
                    out = over(empty((part.stop - part.start) * BYTES[form.dtype], np.uint8), form.dtype)
                    given = [cast(row, form.dtype) for row in given]
                    summed = kernels.weighted_sum(given, self._shares, out, accumulate="float64", norms=True)
                    for label in np.array(self._labels)[~summed.finite][:1]:
                        raise ArrayError(f"{label}, {part.name}: {NOT_FINITE}")
                else:
                    out = cast(settled(part.name, form, zip(self._labels, given, strict=True)), form.dtype)
                yield part, out
        if progress is not None:
            progress(total, total)

    def _product(self, module: str, a: str, b: str, digests: Sequence[Digest]) -> tuple[F64, F64]:
        """Return A and B of a module in the result, as float64 matrices, and note the product's norm and error."""
        rights, lefts = [], []
        for k, share in enumerate(self._shares.tolist()):
            rights.append(self._read(k, a, digests))
            lefts.append(self._read(k, b, digests) * (share * self.scales[k].of_module(module)[1]))
        right, left, product = np.vstack(rights), np.hstack(lefts), self.products[module]
        (q, core), (p, other) = np.linalg.qr(left), np.linalg.qr(right.T)  # the product is q core other' p'
        rank, lost = product["rank"], 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            core = core @ other.T
            norm = float(np.linalg.norm(core))
        if not math.isfinite(norm):
            raise ArrayError(f"{module}: the product exceeds the range of float64; lower lora_alpha")
        if self._way == "product":
            u, sigma, vt = np.linalg.svd(core, full_matrices=False)
            left, right = q @ (u * sigma)[:, :rank], vt[:rank] @ p.T
            lost = float(np.linalg.norm(sigma[rank:]))
            missing = rank - len(right)  # more than the product can have
            left, right = np.pad(left, ((0, 0), (0, missing))), np.pad(right, ((0, missing), (0, 0)))
        product |= {"norm": norm, "error": lost / norm if norm else 0.0}
        return right, left / self.scale

    def _read(self, k: int, name: str, digests: Sequence[Digest]) -> F64:
        """Return a factor of adapter k as a matrix of its rows."""
        leaf = self.models[k][name]
        vector = leaf.read() if isinstance(leaf, StoredTensor) else flat(leaf)
        for digest in digests[k : k + 1]:
            form = self.plan[name]._replace(dtype=dtype_name(vector), shape=tuple(leaf.shape))
            digest.add(Part(name, 0, math.prod(leaf.shape)), form, bytes_of(vector))
        matrix = as_array(f"{self._labels[k]}, {name}", vector).astype(np.float64).reshape(leaf.shape[0], -1)
        if not np.isfinite(matrix).all():
            raise ArrayError(f"{self._labels[k]}, {name}: {NOT_FINITE}")
        return matrix

    def norms(self) -> tuple[float, float]:
        """Return the norm of all products together, and the share of it that the result has lost."""
        norm = math.hypot(*(one["norm"] for one in self.products.values()))
        lost = math.hypot(*(one["norm"] * one["error"] for one in self.products.values()))
        return norm, lost / norm if norm else 0.0


def _bytes_of(leaf: Any) -> int:
    return math.prod(leaf.shape) * BYTES[dtype_name(leaf)]
