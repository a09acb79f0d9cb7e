"""LoRA adapters in files: their configurations, and averages of their products B A."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedcore.arrays import F64, as_array
from fedcore.errors import ArrayError, RangeError, ShapeError, UnknownNameError
from fedcore.model.files import open_model
from fedcore.model.layout import describe_names
from fedcore.model.policy import NOT_FINITE, TensorForm, TensorPolicy, cast, check_form, in_library, is_finite
from fedcore.model.safetensors import Safetensors, StoredTensor, read_json
from fedcore.model.windows import flat
from fedcore.validation import absolute, check_integer, check_number

Way = Literal["average", "product", "stack"]
WAYS = ("average", "product", "stack")
"""How adapters are combined: the average of each tensor, of the products B A, or the products side by side."""
ADAPTER, ADAPTER_MODEL = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's files with the configuration and with the tensors of an adapter."""
SCALES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""The entries that give the rank and the scale of each product."""
FORM = (
    *("peft_type", "alpha", "use_dora", "fan_in_fan_out", "target_modules", "target_parameters", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "scaling", "projection_prng_key", "random_loc_seed"),
)
"""The other entries of an adapter's configuration on which the effect of its tensors depends."""
BASE = ("base_model_name_or_path", "revision", "layer_replication")
"""The entries that tell to which weights a product is added."""
VARIANTS = ("use_dora", "use_bdlora", "lora_bias", "kasa_config", "monteclora_config", "arrow_config")
"""The entries with which an adapter is more than a product B A."""
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""The starts of an adapter that leave the base weights as they are."""
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
        place = absolute(getattr(path, "path", path))
        folder = place if place.is_dir() else place.parent if place.name.startswith("adapter_model") else None
        if folder is None or not (folder / ADAPTER).exists():
            continue
        found[label] = read_json(folder / ADAPTER)
        of_first = next(iter(found))
        for entry in entries:
            one, first = (_plain(found[each][0].get(entry)) for each in (label, of_first))
            if one != first:
                differ = f"{entry} is {one!r:.100}, but {first!r:.100} in {of_first}"
                advice = ", or combine their products with lora='product'" if entry in SCALES else ""
                raise ArrayError(f"{label}: {differ}; pass adapters whose entries in {ADAPTER} are equal{advice}")
    return found


def _plain(value: Any) -> Any:
    return (sorted(set(map(str, value))) if isinstance(value, list) else value) or None


def check_way(lora: Way, rank: int | None, **others: Any) -> None:
    """Raise an error if adapters cannot be combined in this way, with these other options of ``merge``."""
    if lora not in WAYS:
        raise UnknownNameError.of("lora", lora, WAYS)
    if rank is not None and (check_integer("rank", rank, 1), lora) != (rank, "product"):
        raise RangeError(f"rank={rank}: needs lora='product'; leave the rank out, or combine products")
    if lora != "average" and (given := [name for name, value in others.items() if value is not None]):
        why = "a step, clipping and a rule act on A and B, and not on the product B A"
        raise RangeError(f"{given[0]}: cannot be used with lora={lora!r}: {why}; leave it out")


class Scale(NamedTuple):
    """The ranks and the alphas of an adapter, by ends of modules' names; the end "" fits the modules that are left."""

    ranks: dict[str, int]
    alphas: dict[str, float]
    is_rank_stabilized: bool

    @classmethod
    def of(cls, label: str, config: dict[str, Any]) -> "Scale":
        """Return the checked entries of a configuration."""
        odd = ["peft_type"] * (config.get("peft_type") != "LORA") + [entry for entry in VARIANTS if config.get(entry)]
        odd += ["init_lora_weights"] * (config.get("init_lora_weights") not in STARTS)
        if odd:
            reason = f"{odd[0]}={config.get(odd[0])!r:.60}: such an adapter is more than a product B A on the base weights"
            raise ArrayError(f"{label}: {ADAPTER}, {reason}; average it, or convert it to plain LoRA")
        tables = list[dict[str, Any]]()
        for entry, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
            table = config.get(pattern) or {}
            if not isinstance(table, dict) or not all(map(_KEY.fullmatch, table)):
                raise ArrayError(f"{label}: {ADAPTER}, {pattern}: must map names of modules; write out its wildcards")
            tables.append(table | {"": config.get(entry)})
            for key, value in tables[-1].items():
                name = f"{label}: {ADAPTER}, {pattern} {key!r:.99}" if key else f"{label}: {ADAPTER}, {entry}"
                check_integer(name, value, 1) if entry == "r" else check_number(name, value, "(0, inf)")
        return cls(tables[0], tables[1], bool(config.get("use_rslora")))

    def of_module(self, module: str) -> tuple[int, float]:
        """Return the rank and the scale of a module. As in PEFT, the first fitting end counts."""
        parts = module.split(".")
        ends = {"", f"^{module}", *(".".join(parts[-count:]) for count in range(1, min(len(parts), 64) + 1))}
        rank, alpha = (next(table[end] for end in table if end in ends) for table in (self.ranks, self.alphas))
        return int(rank), alpha / self._divisor(rank)

    def alpha_of(self, rank: int) -> float:
        """Return the alpha that gives a product of any rank the scale of this adapter."""
        alpha = float(self.alphas[""]) * (self._divisor(rank) / self._divisor(self.ranks[""]))
        return int(alpha) if alpha.is_integer() else alpha

    def _divisor(self, rank: float) -> float:
        return math.sqrt(rank) if self.is_rank_stabilized else rank


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
        plans: the forms of the tensors of each adapter.
        plan: the forms of the result's tensors.
        scales: the ranks and scales of the adapters.
        config: the content of the result's configuration. All products have the first adapter's scale.
        products: by module the ranks of the adapters and of the result, and after ``product`` its norm and error.
    """

    def __init__(self, paths: Mapping[str, Any], way: Way, rank: int | None, key: str | None) -> None:
        self._labels, self._way = [*paths], way
        files = {label: one for label, one in paths.items() if isinstance(one, str | os.PathLike | Safetensors)}
        configs = equal_adapters(files, (*FORM, *BASE))
        for label in paths.keys() - configs.keys():
            raise ArrayError(f"{label}: has no {ADAPTER}; pass the folder that PEFT's save_pretrained has written")
        self.scales = [Scale.of(label, config) for label, (config, _) in configs.items()]
        self.models = [open_model(path, key=key) for path in paths.values()]
        self.plan = TensorPolicy().plan(self._labels[0], self.models[0])
        self.factors, others = self._named()
        ranks = {module: [scale.of_module(module)[0] for scale in self.scales] for module in self.factors}
        self.plans = [self._ranked({module: own[k] for module, own in ranks.items()}) for k in range(len(paths))]
        for label, model, plan in zip(self._labels, self.models, self.plans, strict=True):
            if model.keys() != plan.keys():
                raise ArrayError(f"{label}: {describe_names(list(plan), list(model))}")
            for name, form in plan.items():
                check_form(f"{label} with its {ADAPTER}, {name}", model[name], form.dtype, form.shape)
        self.others = [{name: model[name] for name in others} for model in self.models]
        due = {module: sum(own) for module, own in ranks.items()}
        if way == "product":
            for module, (a, b) in self.factors.items():
                sides = math.prod(self.plan[a].shape[1:]), self.plan[b].shape[0]
                due[module] = min(due[module], *sides, rank or max(ranks[module]))
        self.plan, first, r = self._ranked(due), self.scales[0], max(due.values())
        self.products: dict[str, dict[str, Any]] = {one: {"ranks": own, "rank": due[one]} for one, own in ranks.items()}
        # An end fits all modules whose names have it, so the longest come first.
        due = {} if min(due.values()) == r else dict(sorted(due.items(), key=lambda one: -len(one[0])))
        alphas = {module: first.alpha_of(own) for module, own in due.items()}
        scale = {"r": r, "lora_alpha": first.alpha_of(r), "rank_pattern": due, "alpha_pattern": alphas}
        self.config: dict[str, Any] = configs[self._labels[0]][0] | scale

    def _named(self) -> tuple[dict[str, tuple[str, str]], list[str]]:
        """Return the names of A and B by module, and the other names."""
        label, matches = self._labels[0], [found for name in self.plan if (found := _FACTOR.fullmatch(name))]
        pairs = {found[2]: (f"{found[1]}A{found[3]}", f"{found[1]}B{found[3]}") for found in matches}
        names = {name for pair in pairs.values() for name in pair}
        if missing := sorted(names - self.plan.keys()) or ["lora_A"] * (not names):
            raise ArrayError(f"{label}: has no {missing[0]}; copy the folder of the adapter again")
        others = [name for name in self.plan if name not in names]
        if odd := [name for name in others if "lora_" in name]:
            raise ArrayError(f"{label}, {odd[0]}: is no factor in a file of PEFT; average the adapters")
        for a, b in pairs.values():
            rows, columns = self.plan[a].shape, self.plan[b].shape
            is_product = min(len(rows), len(columns)) > 1 and 0 not in (*rows, *columns) and math.prod(columns[2:]) == 1
            if not is_product or not (self.plan[a].is_averaged and self.plan[b].is_averaged):
                raise ShapeError(f"{label}, {b}: {columns} and {rows} are no factors of a product; average the adapters")
        return pairs, others

    def _ranked(self, ranks: Mapping[str, int]) -> dict[str, TensorForm]:
        """Return the forms of an adapter whose products have these ranks."""
        plan = dict(self.plan)
        for module, rank in ranks.items():
            (a, rows), (b, columns) = ((name, plan[name].shape) for name in self.factors[module])
            plan[a] = plan[a]._replace(shape=(rank, *rows[1:]))
            plan[b] = plan[b]._replace(shape=(columns[0], rank, *columns[2:]))
        return plan

    def read(self, module: str, kept: Sequence[int]) -> tuple[list[list[Any]], dict[str, str]]:
        """Return A and B of the kept adapters as vectors, and the adapters that are not finite."""
        leaves = [[self.models[i][name] for name in self.factors[module]] for i in kept]
        rows = [[one.read() if isinstance(one, StoredTensor) else flat(one) for one in pair] for pair in leaves]
        bad = [str(i) for i, row in zip(kept, rows, strict=True) if not all(map(is_finite, row))]
        return rows, dict.fromkeys(bad, f"{module}: {NOT_FINITE}")

    def product(self, module: str, rows: list[list[Any]], kept: Sequence[int], shares: F64) -> tuple[list[Any], F64]:
        """Return A and B of the result as vectors, and the squared norms of the products s_k B_k A_k and of their sum.

        Determinism: LAPACK in float64, whose last bits depend on the machine.
        Cost: about 50 R (m + n) bytes for m by n numbers, where R is the sum of the ranks.
        """
        names, one, lefts, rights = self.factors[module], self.products[module], [], []
        for i, (a, b) in zip(kept, rows, strict=True):
            r, scale = self.scales[i].of_module(module)
            rights.append(as_array(module, a).astype(np.float64).reshape(r, -1))
            lefts.append(as_array(module, b).astype(np.float64).reshape(-1, r) * scale)
        left, right = np.hstack([share * b for share, b in zip(shares, lefts, strict=True)]), np.vstack(rights)
        with np.errstate(over="ignore", invalid="ignore"):
            pairs = zip([*lefts, left], [*rights, right], strict=True)
            squares = np.maximum([np.vdot(b.T @ b, a @ a.T) for b, a in pairs], 0.0)
        if not np.isfinite(squares).all():
            raise ArrayError(f"{module}: a product exceeds the range of float64; lower lora_alpha")
        norm, lost = math.sqrt(squares[-1]), 0.0
        if self._way == "product":
            (q, core), (p, other) = np.linalg.qr(left), np.linalg.qr(right.T)  # the product is q core other' p'
            u, sigma, vt = np.linalg.svd(core @ other.T, full_matrices=False)
            left, right = q @ (u * sigma)[:, : one["rank"]], vt[: one["rank"]] @ p.T
            norm, lost = float(np.linalg.norm(sigma)), float(np.linalg.norm(sigma[one["rank"] :]))
        one |= {"norm": norm, "error": lost / (norm or 1.0)}
        missing = one["rank"] - len(right)  # of models that were rejected
        left, right = np.pad(left / self.scales[0].alpha_of(1), ((0, 0), (0, missing))), np.pad(right, ((0, missing), (0, 0)))
        outs = [cast(factor.reshape(-1), self.plan[name].dtype) for name, factor in zip(names, (right, left), strict=True)]
        if not all(map(is_finite, outs)):
            raise ArrayError(f"{module}: the product exceeds the range of {self.plan[names[1]].dtype}; lower lora_alpha")
        return outs, squares

    def report(self) -> dict[str, Any]:
        """Return what a merge reports of the products."""
        norm = math.hypot(*(one["norm"] for one in self.products.values()))
        error = math.hypot(*(one["norm"] * one["error"] for one in self.products.values())) / (norm or 1.0)
        facts = {"lora": self._way, "rank": self.config["r"], "scale": self.scales[0].alpha_of(1), "error": error}
        return facts | {"products": self.products}

    def tensors(self, shares: F64) -> dict[str, Any]:
        """Return the factors of the result."""
        found, kept = dict[str, Any](), range(len(self.models))
        for module, names in self.factors.items():
            rows, bad = self.read(module, kept)
            for i, reason in bad.items():
                raise ArrayError(f"{self._labels[int(i)]}, {reason}")
            outs, _ = self.product(module, rows, kept, shares)
            found |= {name: in_library(self.plan[name], as_array(name, out)) for name, out in zip(names, outs, strict=True)}
        return found
