"""LoRA adapters in files: their configurations, and averages of their products B A."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcore.arrays import F64, as_array, ieee
from fedcore.errors import ArrayError, RangeError, ShapeError, UnknownNameError
from fedcore.model.files import folder_of, open_model
from fedcore.model.policy import NOT_FINITE, TensorForm, TensorPolicy, cast, in_library, is_finite
from fedcore.model.safetensors import BYTES, Safetensors, StoredTensor, read_json
from fedcore.model.windows import check_model, flat
from fedcore.validation import check_integer, check_number

# Adapters are combined as the average of each tensor, of the products B A, or as the products side by side.
WAYS = ("average", "product", "stack")
# PEFT's files with the configuration and with the tensors of an adapter.
ADAPTER, ADAPTER_MODEL = "adapter_config.json", "adapter_model.safetensors"
# The entries of a configuration that give the rank and the scale of each product, those on which the effect of the
# tensors depends as well, and those that tell to which weights a product is added.
SCALES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
# ORDERED are lists whose order matters.
ORDERED = ("layer_replication", "trainable_token_indices", "alora_invocation_tokens")
FORM = (
    *("peft_type", "alpha", "use_dora", "fan_in_fan_out", "target_modules", "target_parameters", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "scaling", "projection_prng_key", "random_loc_seed", *ORDERED[1:]),
)
BASE = ("base_model_name_or_path", "revision", ORDERED[0])
# The entries with which an adapter is more than a product B A, and the starts that leave the base weights as they are.
VARIANTS = ("use_dora", "use_bdlora", "lora_bias", "kasa_config", "monteclora_config", "arrow_config")
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_FACTOR = re.compile(r"((?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?)[AB]((?:\.weight)?)")
_KEY = re.compile(r"\^?[\w-]+(\.[\w-]+){0,63}")


def equal_adapters(paths: Mapping[str, Any], entries: Sequence[str] = (*SCALES, *FORM)) -> dict[str, Any]:
    """Return PEFT's configurations of adapters as (content, bytes), by label; models without one are left out.

    Args:
        paths: the models by label.
        entries: the entries that must be equal, else the function raises ArrayError.
    """
    found: dict[str, Any] = {}
    for label, path in paths.items():
        folder = folder_of(path)
        if folder is None or not os.path.exists(folder / ADAPTER):
            continue
        found[label] = read_json(folder / ADAPTER)
        of_first = next(iter(found))
        for entry in entries:
            values, is_set = [found[each][0].get(entry) for each in (label, of_first)], entry not in ORDERED
            one, first = [(sorted({*map(str, it)}) if is_set and isinstance(it, list) else it) or None for it in values]
            if one != first:
                differ = f"{entry} is {one!r:.100}, but {first!r:.100} in {of_first}; pass equal entries in {ADAPTER}"
                raise ArrayError(f"{label}: {differ}" + ", or use lora='product', --lora product" * (entry in SCALES))
    return found


def check_way(lora: str, rank: int | None, **others: Any) -> None:
    """Raise an error if adapters cannot be combined in this way, with these other options of ``merge``."""
    if lora not in WAYS:
        raise UnknownNameError.of("lora", lora, WAYS)
    if rank is not None and check_integer("rank", rank, 1) and lora != "product":
        raise RangeError(f"rank={rank}: needs lora='product'; leave the rank out, or combine products")
    for name in [name for name, value in others.items() if value is not None and lora != "average"]:
        raise RangeError(f"{name}: acts on A and B, and not on the products of lora={lora!r}; leave it out")


def _tables_of(where: str, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Return the ranks, the alphas, and the power of r in the scale alpha / r^power, of an adapter.

    The keys are ends of modules' names. The last one, "", fits all modules.
    """
    odd = ["peft_type"] * (config.get("peft_type") != "LORA") + [entry for entry in VARIANTS if config.get(entry)]
    if odd := odd + ["init_lora_weights"] * (config.get("init_lora_weights") not in STARTS):
        reason = f"{odd[0]}={config.get(odd[0])!r:.60}: is not only a product B A on the base weights"
        raise ArrayError(f"{where}, {reason}; average such adapters, or convert them to plain LoRA")
    tables = list[dict[str, Any]]()
    for entry, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        table = config.get(pattern) or {}
        if not isinstance(table, dict) or not all(map(_KEY.fullmatch, table)):
            raise ArrayError(f"{where}, {pattern}: must map names of modules; write out its wildcards")
        tables.append(table | {"": config.get(entry)})
        for key, value in tables[-1].items():
            name = f"{where}, {pattern} {key!r:.99}" if key else f"{where}, {entry}"
            check_integer(name, value, 1, 1 << 31) if entry == "r" else check_number(name, value, "[1e-30, 1e30]")
    return tables[0], tables[1], 0.5 if config.get("use_rslora") else 1.0


def _scale_of(module: str, ranks: dict[str, Any], alphas: dict[str, Any], power: float) -> tuple[int, float]:
    """Return the rank and the scale of a module. As in PEFT, the first fitting end counts."""
    parts = module.split(".")
    ends = {"", f"^{module}", *(".".join(parts[-count:]) for count in range(1, min(len(parts), 64) + 1))}
    rank, alpha = (next(table[end] for end in table if end in ends) for table in (ranks, alphas))
    return rank, alpha / rank**power


class Adapters:
    """LoRA adapters in files, and the adapter of the sum of their products, sum_k w_k s_k B_k A_k.

    Args:
        paths: the adapters by label.
        way: "product" or "stack".
        rank: the largest rank of a product, or None for that of the adapters.
        key: as for ``open_model``.

    Attributes:
        models: the adapters' tensors.
        others: of each adapter the tensors that are no factors.
        factors: the names of A and B by module.
        bytes: the bytes of all adapters, if their dtypes are those of the first one.
        plans: the forms of the tensors of each adapter, and last those of the result.
        scales: the rank and the scale of each adapter by module.
        scale: the scale of all products of the result, which is that of the first adapter's modules without a pattern.
        rank: the largest rank of the result's products.
        config: the content of the result's configuration.
        products: by module the ranks of the adapters and of the result, and after ``product`` its norm and error.
    """

    def __init__(self, paths: Mapping[str, Any], way: str, rank: int | None, key: str | None) -> None:
        self._labels, self._way = [*paths], way
        files = {label: one for label, one in paths.items() if isinstance(one, str | os.PathLike | Safetensors)}
        configs = equal_adapters(files, (*FORM, *BASE))
        for label in paths.keys() - configs.keys():
            raise ArrayError(f"{label}: has no {ADAPTER}; pass the folder that PEFT's save_pretrained has written")
        tables = [_tables_of(f"{label}: {ADAPTER}", config) for label, (config, _) in configs.items()]
        self.models = [open_model(path, key=key) for path in paths.values()]
        self._plan = TensorPolicy().plan(self._labels[0], self.models[0])
        self.factors, others = self._named()
        self.scales = {module: [_scale_of(module, *each) for each in tables] for module in self.factors}
        ranks = {module: [rank for rank, _ in each] for module, each in self.scales.items()}
        self.plans = [self._ranked({module: own[k] for module, own in ranks.items()}) for k in range(len(paths))]
        for label, model, plan in zip(self._labels, self.models, self.plans, strict=True):
            check_model(f"{label} with its {ADAPTER}", model, plan)
        self.others: list[Mapping[str, Any]] = [{name: model[name] for name in others} for model in self.models]
        self.bytes = sum(math.prod(form.shape) * BYTES[form.dtype] for plan in self.plans for form in plan.values())
        due = dict[str, int]()
        for module, (a, b) in self.factors.items():
            own, sides = ranks[module], (math.prod(self._plan[a].shape[1:]), self._plan[b].shape[0])
            due[module] = sum(own) if way == "stack" else min(sum(own), *sides, rank or max(own))
        self.products: dict[str, dict[str, Any]] = {one: {"ranks": own, "rank": due[one]} for one, own in ranks.items()}
        self.rank, (_, self.scale) = max(due.values()), _scale_of("", *tables[0])
        self.plans.append(self._ranked(due))
        # An end fits all modules whose names have it, so the longest come first.
        due = dict(sorted(due.items(), key=lambda one: -len(one[0]))) if min(due.values()) < self.rank else {}
        final, power = {**due, "": self.rank}, tables[0][2]
        alphas = {module: json.loads(f"{self.scale * own**power:.15g}") for module, own in final.items()}
        scale = {"r": self.rank, "lora_alpha": alphas.pop(""), "rank_pattern": due, "alpha_pattern": alphas}
        self.config = json.dumps(configs[self._labels[0]][0] | scale).encode()

    def _named(self) -> tuple[dict[str, tuple[str, str]], list[str]]:
        """Return the names of A and B by module, and the other names."""
        label, matches = self._labels[0], [found for name in self._plan if (found := _FACTOR.fullmatch(name))]
        pairs = {found[2]: (f"{found[1]}A{found[3]}", f"{found[1]}B{found[3]}") for found in matches}
        names = {name for pair in pairs.values() for name in pair}
        others = [name for name in self._plan if name not in names]
        odd = [*sorted(names - self._plan.keys()), *(name for name in others if "lora_" in name)]
        for name in odd if names else ["lora_A"]:
            raise ArrayError(f"{label}, {name}: is missing, or is no factor A or B of PEFT; copy the folder again")
        for a, b in pairs.values():
            shape = self._plan[b].shape
            if 0 in (*self._plan[a].shape, *shape) or math.prod(shape[2:]) != 1 or not self._plan[a].is_averaged:
                raise ShapeError(f"{label}, {b}: {list(shape)} is no factor of a product; average the adapters")
        return pairs, others

    def _ranked(self, ranks: Mapping[str, int]) -> dict[str, TensorForm]:
        """Return the forms of an adapter whose products have these ranks."""
        plan = dict(self._plan)
        for module, rank in ranks.items():
            a, b = self.factors[module]
            plan[a] = plan[a]._replace(shape=(rank, *plan[a].shape[1:]))
            plan[b] = plan[b]._replace(shape=(*plan[b].shape[:1], rank, *plan[b].shape[2:]))
        return plan

    def read(self, module: str, kept: Sequence[int]) -> tuple[list[list[Any]], dict[str, str]]:
        """Return A and B of the kept adapters as vectors, and the adapters that are not finite."""
        leaves = [[self.models[i][name] for name in self.factors[module]] for i in kept]
        rows = [[one.read() if isinstance(one, StoredTensor) else flat(one) for one in pair] for pair in leaves]
        bad = [str(i) for i, row in zip(kept, rows, strict=True) if not all(map(is_finite, row))]
        return rows, dict.fromkeys(bad, f"{module}: {NOT_FINITE}")

    @ieee
    @np.errstate(over="ignore", invalid="ignore")
    def product(self, module: str, rows: list[list[Any]], kept: Sequence[int], shares: F64) -> tuple[list[Any], F64]:
        """Return A and B of the result as vectors, and the squared norms of the products s_k B_k A_k and of their sum.

        Determinism: LAPACK in float64, whose last bits depend on the machine.
        Cost: about 50 R (m + n) bytes for m by n numbers, where R is the sum of the ranks.
        """
        names, one = self.factors[module], self.products[module]
        ranks, scales = zip(*(self.scales[module][i] for i in kept), strict=True)
        given = [[as_array(module, factor).astype(np.float64) for factor in row] for row in rows]
        rights = [a.reshape(r, -1) for (a, _), r in zip(given, ranks, strict=True)]
        lefts = [b.reshape(-1, r) * scale for (_, b), r, scale in zip(given, ranks, scales, strict=True)]
        left, right = np.hstack([share * b for share, b in zip(shares, lefts, strict=True)]), np.vstack(rights)
        squares = np.array([*map(_squared_norm, [*lefts, left], [*rights, right])])
        if not np.isfinite(squares).all():
            raise ArrayError(f"{module}: a product exceeds the range of float64; lower lora_alpha")
        one |= {"norm": math.sqrt(squares[-1]), "error": 0.0}
        if self._way == "product":
            (q, core), (p, other) = np.linalg.qr(left), np.linalg.qr(right.T)  # the product is q core other' p'
            u, sigma, vt = np.linalg.svd(core @ other.T, full_matrices=False)
            left, right = q @ (u * sigma)[:, : one["rank"]], vt[: one["rank"]] @ p.T
            one["error"] = float(np.linalg.norm(sigma[one["rank"] :]) / (np.linalg.norm(sigma) or 1.0))
        missing = one["rank"] - len(right)  # of models that were rejected
        left = np.pad(left / self.scale, ((0, 0), (0, missing)))
        factors = zip(names, (np.pad(right, ((0, missing), (0, 0))), left), strict=True)
        outs = [cast(factor.reshape(-1), self._plan[name].dtype) for name, factor in factors]
        if not all(map(is_finite, outs)):
            raise ArrayError(f"{module}: exceeds the range of {self._plan[names[1]].dtype}; lower lora_alpha")
        return outs, squares

    def report(self) -> dict[str, Any]:
        """Return what a merge reports of the products."""
        norms, errors = np.array([(one["norm"], one["error"]) for one in self.products.values()]).T
        error = float(np.linalg.norm(norms * errors) / (np.linalg.norm(norms) or 1.0))
        return {"lora": self._way, "rank": self.rank, "scale": self.scale, "error": error, "products": self.products}

    def tensors(self, others: Mapping[str, Any], shares: F64) -> dict[str, Any]:
        """Return the tensors of the result, with those of ``others``."""
        found, kept = dict(others), range(len(self.models))
        for module, names in self.factors.items():
            rows, bad = self.read(module, kept)
            for i, reason in bad.items():
                raise ArrayError(f"{self._labels[int(i)]}, {reason}")
            for name, out in zip(names, self.product(module, rows, kept, shares)[0], strict=True):
                found[name] = in_library(self.plans[-1][name], as_array(name, out))
        return {name: found[name] for name in self._plan}


def _squared_norm(b: F64, a: F64) -> float:
    """Return the squared Frobenius norm of B A; the product itself is formed only if it is smaller than A A'."""
    m, r, n = len(b), len(a), a.shape[1]
    return float(np.sum((b @ a) ** 2)) if m * n < r**2 else max(float(np.vdot(b.T @ b, a @ a.T)), 0.0)
