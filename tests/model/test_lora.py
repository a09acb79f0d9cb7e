"""Products of LoRA adapters are those of a dense oracle, and PEFT loads them and computes the same."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedcore
from fedcore import Safetensors, errors, merge, write_model
from tests.cli.command import invoke as run
from tests.kit import python
from tests.model.test_merging import PEAK

PREFIX = "base_model.model."
SHAPES = {"emb": (6, 20), "conv": (7, 3, 2, 2), "block.q": (12, 10), "q": (9, 10)}
"""The shapes of A without its rank, and of B before it: (m, *n)."""


def names_of(module):
    middle, end = ("lora_embedding_", "") if module == "emb" else ("lora_", ".weight")
    return [f"{PREFIX}{module}.{middle}{letter}{end}" for letter in "AB"]


def adapter(folder, seed, r=2, alpha=4, *, dtype=torch.float32, head=True, shapes=SHAPES, **config):
    """Write an adapter as PEFT does."""
    folder.mkdir()
    rng, tensors = np.random.default_rng(seed), {}
    for module, (m, *n) in shapes.items():
        rank, (a, b) = config.get("rank_pattern", {}).get(module, r), names_of(module)
        tensors[a] = rng.normal(size=(rank, *n))
        tensors[b] = rng.normal(size=(m, rank, *[1] * (len(n) - 1)))
    if head:
        tensors[f"{PREFIX}head.weight"] = rng.normal(size=(2, 3))
    write_model(
        {name: torch.tensor(one).to(dtype) for name, one in tensors.items()}, folder / "adapter_model.safetensors"
    )
    known = {"peft_type": "LORA", "base_model_name_or_path": "base", "target_modules": list(shapes), "r": r}
    (folder / "adapter_config.json").write_text(json.dumps(known | {"lora_alpha": alpha} | config))
    return folder


def products(folder, named=None):
    """Return s B A of each module as a float64 matrix; patterns name whole modules."""
    config, found = json.loads((folder / "adapter_config.json").read_text()), {}
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    named = load_file(folder / "adapter_model.safetensors") if named is None else named
    for module in {name.removeprefix(PREFIX).partition(".lora_")[0] for name in named if ".lora_" in name}:
        a, b = (torch.as_tensor(named[name]).double().numpy() for name in names_of(module))
        r, alpha = ranks.get(module, config["r"]), alphas.get(f"^{module}", alphas.get(module, config["lora_alpha"]))
        assert r == len(a) == b.shape[1], module
        found[module] = alpha / (math.sqrt(r) if config.get("use_rslora") else r) * b.reshape(-1, r) @ a.reshape(r, -1)
    return found


def averages(folders, weights):
    given = [products(folder) for folder in folders]
    return {one: np.average([each[one] for each in given], axis=0, weights=weights) for one in given[0]}


def three(tmp_path, **options):
    patterns = {"rank_pattern": {"block.q": 5, "q": 1}, "alpha_pattern": {"^q": 7}}
    return [
        adapter(tmp_path / "0", 0, 2, 6, **options),
        adapter(tmp_path / "1", 1, 3, 5, use_rslora=True, **options),
        adapter(tmp_path / "2", 2, 2, 0.3, **patterns, **options),
    ]


EXACT = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""The share of a product's norm that its factors may lose by rounding."""


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(
    ("lora", "rank"), [("stack", None), ("product", None), ("product", 1), ("product", 4), ("product", 99)]
)
def test_products_are_those_of_a_dense_oracle(tmp_path, dtype, lora, rank):
    given, weights = three(tmp_path, dtype=dtype), [3, 0.5, 2]
    report = merge(tmp_path / "out", given, weights, lora=lora, rank=rank)
    due, found = averages(given, weights), products(tmp_path / "out")
    tensors, lost = load_file(tmp_path / "out" / "adapter_model.safetensors"), []
    for module, whole in due.items():
        u, sigma, vt = np.linalg.svd(whole, full_matrices=False)
        ranks = report["products"][module]["ranks"]
        most = sum(ranks) if lora == "stack" else min(rank or max(ranks), sum(ranks), *whole.shape)
        assert report["products"][module]["rank"] == most == len(tensors[names_of(module)[0]])
        best = (u[:, :most] * sigma[:most]) @ vt[:most]
        assert np.linalg.norm(found[module] - best) < EXACT[dtype] * np.linalg.norm(whole), module
        lost.append(np.linalg.norm(sigma[most:]))
        np.testing.assert_allclose(report["products"][module]["error"], lost[-1] / np.linalg.norm(whole), atol=1e-13)
        norms = [np.linalg.norm(products(folder)[module]) for folder in given]
        np.testing.assert_allclose(report["tensors"][module], [*norms, np.linalg.norm(whole)], rtol=1e-9)
    norm = np.linalg.norm([*map(np.linalg.norm, due.values())])
    np.testing.assert_allclose(report["error"], np.linalg.norm(lost) / norm, atol=1e-13)
    head = f"{PREFIX}head.weight"
    heads = [load_file(folder / "adapter_model.safetensors") for folder in given]
    assert torch.equal(tensors[head], fedcore.aggregate([{head: one[head]} for one in heads], weights)[head])
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    again = fedcore.aggregate(given, weights, lora=lora, rank=rank)
    assert list(again) == list(Safetensors(given[0]))
    for name, tensor in again.items():
        assert torch.equal(torch.tensor(np.asarray(tensor, np.float64)).to(dtype), tensors[name])
    copy = merge(tmp_path / "copy", [tmp_path / "out"])
    assert copy["digest"] == copy["inputs"][0]["digest"] == report["digest"]
    assert [one["digest"] for one in report["inputs"]] == [
        merge(tmp_path / f"copy of {k}", [folder])["digest"] for k, folder in enumerate(given)
    ]


def test_equal_adapters_keep_their_configuration_and_product(tmp_path):
    given = [adapter(tmp_path / str(k), 0, 7, 10, task_type="CAUSAL_LM", shapes={"q": (9, 10)}) for k in range(3)]
    report = merge(tmp_path / "out", given, lora="product")
    old, new = (json.loads((one / "adapter_config.json").read_text()) for one in (given[0], tmp_path / "out"))
    assert new == old | {"rank_pattern": {}, "alpha_pattern": {}}
    assert report["error"] < 1e-14
    np.testing.assert_allclose(products(tmp_path / "out")["q"], products(given[0])["q"], atol=1e-5)
    assert merge(tmp_path / "out", given, lora="product") == report  # the same merge is done
    old["lora_alpha"] = 11
    (given[1] / "adapter_config.json").write_text(json.dumps(old))
    with pytest.raises(errors.StoreError, match="exists"):
        merge(tmp_path / "out", given, lora="product")


def rewritten(**changes):
    """Change entries of the configuration."""

    def act(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return act


def replaced(**changes):
    """Replace or delete (None) tensors of q."""

    def act(folder):
        named = {name: tensor.numpy() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
        named |= {f"{PREFIX}q.lora_{end.replace('_', '.')}": tensor for end, tensor in changes.items()}
        left = {name: tensor for name, tensor in named.items() if tensor is not None}
        write_model(left, folder / "adapter_model.safetensors")

    return act


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "object"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config"),
        *[(rewritten(r=r), "adapter_config.json, r=") for r in (0, -1, 2.0, True, None, "2", [2], 10**400)],
        *[(rewritten(lora_alpha=a), "lora_alpha=") for a in (math.nan, 0, -1, None, "1", True, 2e308, 1e-99)],
        (rewritten(r=3), r"q\.lora_A.*shape \(3, 10\)"),
        (rewritten(rank_pattern={"q": 3}), r"lora_A.*shape \(3, 10\)"),
        *[(rewritten(rank_pattern=p), "rank_pattern") for p in ([1], {"(a+)+": 2}, {"q": 0}, {"q": [2]}, {"q": 1e300})],
        *[(rewritten(alpha_pattern=p), "alpha_pattern") for p in ("q", {".*": 2}, {"q": math.nan}, {"q": {}})],
        *[(rewritten(**{key: "x"}), f"{key} is .*'x'") for key in ("base_model_name_or_path", "revision")],
        (rewritten(target_modules=["q"]), "target_modules"),
        *[(rewritten(**{key: True}), key) for key in ("use_dora", "lora_bias", "use_bdlora")],
        *[(rewritten(init_lora_weights=how), "init_lora_weights") for how in ("pissa_niter_4", "olora", ["eva"])],
        (rewritten(peft_type="LOHA"), "peft_type"),
        (replaced(B_weight=None), r"q\.lora_B\.weight"),
        (replaced(A_weight=None), r"q\.lora_A\.weight"),
        (replaced(A_weight=np.zeros((2, 11), np.float32)), r"q\.lora_A\.weight.*shape \(2, 1[01]\)"),
        (replaced(A_weight=np.zeros((2, 0), np.float32), B_weight=np.zeros((0, 2), np.float32)), r"q\.lora_"),
        (replaced(B_weight=np.zeros((9, 2, 3), np.float32)), r"q\.lora_B\.weight"),
        (replaced(A_weight=np.float32(1)), r"q\.lora_"),
        (replaced(A_weight=np.zeros((2, 10), np.int32)), r"q\.lora_"),
        (replaced(magnitude_vector=np.zeros(9, np.float32)), "magnitude"),
        (replaced(A_default_weight=np.zeros((2, 10), np.float32)), "default"),
        (replaced(B_weight=np.full((9, 2), 1e300), A_weight=np.full((2, 10), 1e9)), "q: .*exceeds"),
    ],
)  # fmt: skip
def test_hostile_adapters_are_refused(tmp_path, change, message):
    for first in (0, 1):
        given = [adapter(tmp_path / f"{first}{k}", k) for k in range(2)]
        change(given[first])
        for lora in ("product", "stack"):
            with pytest.raises(errors.FedcoreError, match=message):
                merge(tmp_path / "out", given, lora=lora)
            with pytest.raises(errors.FedcoreError, match=message):
                fedcore.aggregate(given, lora=lora)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00", "01", "10", "11"]


def test_what_does_not_combine_with_products_is_refused(tmp_path):
    given = [adapter(tmp_path / str(k), k) for k in range(2)]
    for option in ({"base": given[0]}, {"optimizer": "sgd"}, {"server_lr": 1}, {"clip_norm": 1}, {"rule": "median"}):
        with pytest.raises(errors.RangeError, match=next(iter(option))):
            merge(tmp_path / "out", given, lora="stack", **option)
    for wrong in ({"rank": 2}, {"lora": "stack", "rank": 2}, {"lora": "product", "rank": 0}, {"lora": "produkt"}):
        for call in (fedcore.aggregate, lambda given, **how: merge(tmp_path / "out", given, **how)):
            with pytest.raises((errors.RangeError, errors.UnknownNameError), match=r"rank|product"):
                call(given, **wrong)
    with pytest.raises(errors.RangeError, match="rule"):
        fedcore.aggregate(given, lora="product", rule="median")
    tensors = dict(Safetensors(given[0]))
    for models in ([given[0], tensors], iter([tensors, tensors])):
        with pytest.raises(errors.ArrayError, match="adapter_config"):
            fedcore.aggregate(models, lora="product")


def test_tensors_of_other_tokens_are_not_combined(tmp_path):
    for entry in ("trainable_token_indices", "alora_invocation_tokens"):
        given = [adapter(tmp_path / f"{entry}{k}", k, **{entry: [7 + k, 8 - k]}) for k in range(2)]
        for lora in ("average", "product", "stack"):
            with pytest.raises(errors.ArrayError, match=rf"{entry} is \[8, 7\], but \[7, 8\]"):
                merge(tmp_path / "out", given, lora=lora)


@pytest.mark.parametrize("name", ["q.lora_B.weight", "head.weight"])
def test_an_adapter_that_is_not_finite_is_rejected(tmp_path, name):
    given = three(tmp_path)
    named = load_file(given[1] / "adapter_model.safetensors")
    named[PREFIX + name][-1, -1] = torch.nan
    write_model(named, given[1] / "adapter_model.safetensors")
    for lora, rank in (("stack", None), ("product", 99)):
        report, due = merge(tmp_path / lora, given, [1, 2, 3], lora=lora, rank=rank), averages(given[::2], [1, 3])
        assert ["rejected" in one for one in report["inputs"]] == [False, True, False]
        for module, found in products(tmp_path / lora).items():
            np.testing.assert_allclose(found, due[module], atol=1e-5)
        with pytest.raises(errors.ArrayError, match=f"client 1.*{name.partition('.')[0]}.*finite"):
            fedcore.aggregate(given, lora=lora)


def test_the_memory_of_products_does_not_depend_on_their_number(tmp_path):
    shapes = {f"layers.{i}.q": (4096, 4096) for i in range(80)}
    given = [adapter(tmp_path / str(k), k, r=8, shapes=shapes, head=False) for k in range(2)]
    peak = python("-c", PEAK.replace("rule=RULE", 'lora="stack"'), tmp_path / "out", *given).stdout
    assert int(peak) < 25  # of 42 MB in and 42 MB out


def test_the_command(tmp_path):
    given = three(tmp_path)
    done = run("merge", tmp_path / "out", *given, "--lora", "product", "--rank", "2")
    report = json.loads((tmp_path / "out" / "merge.json").read_text())
    for module, one in report["products"].items():
        assert f"error {one['error']:.2e}, rank {one['rank']} of {one['ranks']}: {module}\n" in done.output
    assert f"3 of 3 models, round 0, rank 2, error {report['error']:.2e}" in done.output
    done = run("merge", tmp_path / "stack", *given, "--lora", "stack", "--json")
    assert json.loads(done.output)["products"]["emb"] == report["products"]["emb"] | {"rank": 7, "error": 0}
    done = run("merge", tmp_path / "none", *given, "--lora", "sum")
    assert (done.status, "product" in done.errors) == (2, True)


def test_products_in_rounds_of_a_server(tmp_path):
    given = [adapter(tmp_path / str(k), k, head=False) for k in range(2)]
    tensors = [fedcore.read_model(folder) for folder in given]
    server = fedcore.Server(tensors[0], "FedAvg", clients=2, lr=0.1)
    server.replace_x(fedcore.aggregate(given, [3, 1], lora="product", rank=2))
    merge(tmp_path / "out", given, [3, 1], lora="product", rank=2)
    found = products(tmp_path / "out", server.tensors())
    for module, due in products(tmp_path / "out").items():
        np.testing.assert_array_equal(found[module], due)
    # With A frozen, the average of B is that of the products.
    tensors[1] |= {name: tensor for name, tensor in tensors[0].items() if "_A" in name}
    server = fedcore.Server(fedcore.Model(tensors[0], frozen="*lora*_A*"), "FedAvg", clients=2, lr=0.1)
    with server.open_round() as round:
        for client in range(2):
            round.add(client, tensors[client], steps=1)
    found, one, other = (products(given[0], named) for named in (tensors[0] | server.tensors(), *tensors))
    for module, product in found.items():
        np.testing.assert_allclose(product, (one[module] + other[module]) / 2, atol=1e-5)


class Net(torch.nn.Module):
    """A model with the layers of the adapters."""

    def __init__(self):
        super().__init__()
        self.emb, self.conv, self.q = torch.nn.Embedding(20, 6), torch.nn.Conv2d(3, 7, 2), torch.nn.Linear(10, 9)
        self.block = torch.nn.ModuleDict({"q": torch.nn.Linear(10, 12)})


def of_peft(tmp_path, kind):
    """Return two adapters, their weights in PEFT's ``add_weighted_adapter``, and the same result of fedcore."""
    other = {"use_rslora": True, "rank_pattern": {"block.q": 4}} if kind != "linear" else {}
    given = [adapter(tmp_path / "0", 0, head=False), adapter(tmp_path / "1", 1, head=False, **other)]
    how = {"svd": {"lora": "product", "rank": 3}, "cat": {"lora": "stack"}, "linear": {}}[kind]
    merge(tmp_path / "out", given, [3, 1], **how)
    # PEFT multiplies A and B by the roots of the weights.
    return given, [0.75**2, 0.25**2] if kind == "linear" else [0.75, 0.25], tmp_path / "out"


RECORD = json.loads(Path(__file__).with_name("peft_record.json").read_text())
"""By kind and module, the product that PEFT 0.21.2 has computed from these adapters, in C order."""


@pytest.mark.parametrize("kind", RECORD)
def test_peft_has_computed_the_same(tmp_path, kind):
    for module, product in products(of_peft(tmp_path, kind)[2]).items():
        np.testing.assert_allclose(product.ravel(), RECORD[kind][module], atol=2e-5)


@pytest.mark.parametrize("kind", RECORD)
def test_peft_computes_its_record_and_loads_the_result(tmp_path, kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    given, weights, out = of_peft(tmp_path, kind)
    model, loaded = (peft.PeftModel.from_pretrained(Net(), path, "0") for path in (given[0], out))
    model.load_adapter(given[1], "1")
    model.add_weighted_adapter(["0", "1"], weights, kind, kind, svd_rank=3)
    for module, product in RECORD[kind].items():
        for one, name in ((model, kind), (loaded, "0")):
            found = one.base_model.model.get_submodule(module).get_delta_weight(name).detach()
            found = (found.T if module == "emb" else found).ravel()
            np.testing.assert_allclose(found, product, atol=2e-5)
