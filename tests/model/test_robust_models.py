"""Robust rules over models in memory and in files: the bits of a server's round."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore import Safetensors, Server, Update, aggregate, errors, kernels, merge, rules, write_model
from fedcore.algorithms.optimizers import Nesterov
from fedcore.kernels.robust import GramSum
from fedcore.model import windows
from tests.cli.command import invoke as run
from tests.model.test_merging import saved

RULES = {
    "median": "median",
    "trimmed mean": rules.TrimmedMean(2),
    "MeaMed": "mea-med",
    "Krum": "krum",
    "Multi-Krum": rules.MultiKrum(2),
    "Bulyan": rules.Bulyan(1),
    "geometric median": rules.GeometricMedian(8),
    "mixed": [rules.NearestNeighborMixing(2), rules.Bucketing(2), "Median"],
}
K = 8


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(windows, "LARGEST", 1 << 18)


def models(k=K, seed=0):
    """Models whose tensors do not end at the borders of blocks, close to each other far from zero; client 1 lies."""
    rng = np.random.default_rng(seed)
    sizes = {"a": (3, 7), "b": (70_001,), "c": (), "d.running_mean": (5,), "e": (2, 16_384)}
    start = {name: 5 + rng.normal(size=size) for name, size in sizes.items()}
    found = [{name: np.float32(x + 1e-2 * rng.normal(size=np.shape(x))) for name, x in start.items()} for _ in range(k)]
    found[1] = {name: w + np.float32(50) for name, w in found[1].items()}
    return [model | {"n": np.array(i)} for i, model in enumerate(found)], {
        name: np.float32(x) for name, x in start.items()
    } | {"n": np.array(0)}


def ordered(model, like):
    """The tensors in the order of a file, which is that of all sums."""
    return {name: model[name] for name in like}


def after_a_round(x, given, rule):
    server = Server(x, "FedAvg", len(given), lr=0.1, aggregation=rule)
    assert len(server.round([Update(i, model, 5) for i, model in enumerate(given)]).accepted) == len(given)
    return server.tensors(library="numpy")


def same(found, due, but=()):
    assert {name: np.asarray(t).tobytes() for name, t in found.items() if name not in but} == {
        name: np.asarray(t).tobytes() for name, t in due.items() if name not in but
    }


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_door_gives_the_bits_of_a_round(tmp_path, rule):
    given, base = models()
    paths = saved(tmp_path, given)
    order = list(Safetensors(paths[0]))
    given, base = [ordered(model, order) for model in given], ordered(base, order)
    zero = {name: np.zeros_like(x) for name, x in base.items()}
    due = after_a_round(zero, given, rule)
    assert all(np.abs(due[name] - base[name]).max() < 0.1 for name in base if name != "n")
    same(aggregate(given, rule=rule), due)
    same(aggregate(iter(given), rule=rule), due)
    same(aggregate(paths, rule=rule), due)
    merge(tmp_path / "out", paths, rule=rule)
    same(Safetensors(tmp_path / "out"), due)
    write_model(base, tmp_path / "base.safetensors")
    report = merge(tmp_path / "step", paths, base=tmp_path / "base.safetensors", rule=rule)
    same(Safetensors(tmp_path / "step"), after_a_round(base, given, rule), but=["d.running_mean"])
    assert report == json.loads((tmp_path / "step" / "merge.json").read_text())
    norm = np.sqrt(sum(np.sum((np.float64(base[n]) - Safetensors(tmp_path / "step")[n]) ** 2) for n in "abce"))
    found = np.linalg.norm([report["tensors"][name][-1] for name in "abce"])
    np.testing.assert_allclose(found, norm, rtol=1e-3)


@pytest.mark.parametrize(
    "rule",
    [
        rules.Krum(2),
        rules.MultiKrum(2),
        rules.Bulyan(2),
        rules.GeometricMedian(),
        [rules.NearestNeighborMixing(2), "Median"],
    ],
    ids=str,
)
def test_a_model_far_away_does_not_hide_the_distances_of_others(tmp_path, rule):
    """Nine close models far from zero, one at 100 and one at 1e15, in any order: the result is near the nine."""
    rng = np.random.default_rng(0)
    near = [{"w": (1000 + 1e-3 * rng.standard_normal(500)).astype(np.float32)} for _ in range(9)]
    far = [{"w": np.full(500, value, np.float32)} for value in (1e15, 100)]
    for name, models in {"first": far + near, "last": near + far}.items():
        files = saved(tmp_path, models)
        merge(tmp_path / name, files, rule=rule)
        for found in (
            aggregate(models, rule=rule),
            aggregate(list(map(Safetensors, files)), rule=rule),
            Safetensors(tmp_path / name),
        ):
            assert abs(np.asarray(found["w"]) - 1000).max() < 0.05


def test_the_report_names_the_rule_and_its_choice(tmp_path):
    given, base = models()
    paths = [*saved(tmp_path, given), *saved((tmp_path / "b"), [base])] if (tmp_path / "b").mkdir() is None else []
    report = merge(tmp_path / "krum", paths[:K], base=paths[K], rule=rules.Krum(1), optimizer=Nesterov())
    [chosen] = report["chosen"]
    assert report["rule"] == [{"name": "Krum", "f": 1}]
    assert [one["share"] for one in report["inputs"]] == [float(one["path"] == chosen) for one in report["inputs"]]
    y = Safetensors(chosen)
    due = base["b"] - np.float32(0.7) * np.float32(1.9) * (base["b"] - y["b"])
    np.testing.assert_allclose(Safetensors(tmp_path / "krum")["b"], due, rtol=1e-6)
    report = merge(tmp_path / "bulyan", paths[:K], rule=rules.Bulyan(1))
    assert len(report["chosen"]) == K - 2
    assert sum(one["share"] for one in report["inputs"]) == pytest.approx(1)
    assert str(paths[1]) not in report["chosen"]
    assert "chosen" not in merge(tmp_path / "median", paths[:K], rule="median")
    with pytest.raises(errors.StoreError, match="exists"):
        merge(tmp_path / "median", paths[:K], rule=rules.TrimmedMean(2))


def test_the_command(tmp_path):
    given, _ = models()
    paths = saved(tmp_path, given)
    done = run("merge", tmp_path / "out", *paths, "--rule", "trimmed-mean", "--set", "f=2")
    assert done.status == 0, done.errors
    same(Safetensors(tmp_path / "out"), aggregate(paths, rule=rules.TrimmedMean(2)))
    chain = ("--rule", "NearestNeighborMixing", "--rule", "krum", "--set", "f=2")
    assert run("merge", tmp_path / "chain", *paths, *chain).status == 0
    same(Safetensors(tmp_path / "chain"), aggregate(paths, rule=[rules.NearestNeighborMixing(2), rules.Krum(2)]))
    for options, message in [
        (["--rule", "medain"], "did you mean 'Median'?"),
        (["--rule", "median", "--set", "f=2"], "no rule has the option 'f'"),
        (["--rule", "centred-clipping"], "tau"),
    ]:
        done = run("merge", tmp_path / "bad", *paths, *options)
        assert done.status != 0
        assert message in done.errors


@pytest.mark.parametrize("kind", ["float64", "float16", "bfloat16"])
def test_other_dtypes_and_libraries(tmp_path, kind):
    given, _ = models()
    given = [{name: torch.from_numpy(np.array(w)) for name, w in model.items()} for model in given]
    given = [{n: w.to(getattr(torch, kind)) if n != "n" else w for n, w in model.items()} for model in given]
    for model in given:
        model["mask"] = torch.tensor([0, -torch.inf])
    found = aggregate(given, rule="median")
    for name, w in found.items():
        assert w.dtype == given[0][name].dtype
        if name not in ("n", "mask"):
            stacked = np.sort(np.stack([model[name].float().numpy() for model in given]), axis=0)
            due = torch.from_numpy(np.array((stacked[3].astype(np.float64) + stacked[4]) / 2, np.float32))
            assert torch.equal(w, due.to(w.dtype)), name
    assert int(found["n"]) == K - 1
    for rule in ("median", rules.Krum(1)):
        due = aggregate(given, rule=rule)
        files = aggregate(saved(tmp_path, given), rule=rule)
        found = torch.from_numpy(np.array(files["b"], np.float32))  # bfloat16 comes as float32 or ml_dtypes' bfloat16
        assert torch.equal(found.to(due["b"].dtype), due["b"])
        merge(tmp_path / f"{rule}", saved(tmp_path, given), rule=rule)
        np.testing.assert_array_equal(np.float32(Safetensors(tmp_path / f"{rule}")["b"]), due["b"].float().numpy())


def test_models_that_are_not_finite(tmp_path):
    given, _ = models(9)
    given[3]["b"][40_000] = np.nan
    paths = saved(tmp_path, given)
    for rule in ("median", rules.Krum(1)):
        for what in (given, paths):
            with pytest.raises(errors.ArrayError, match="client 3"):
                aggregate(what, rule=rule)
        report = merge(tmp_path / f"{rule}", paths, rule=rule)
        assert [i for i, one in enumerate(report["inputs"]) if "rejected" in one] == [3]
        same(Safetensors(tmp_path / f"{rule}"), aggregate(paths[:3] + paths[4:], rule=rule))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rule="mean"), "must be a robust rule"),
        (dict(rule="medain"), "did you mean"),
        (dict(rule=[rules.RejectLong(9), "median"]), "RejectLong acts on a server's updates"),
        (dict(rule=rules.CentredClipping(1.0)), "starts from the round before"),
        (dict(rule=rules.ClipNorm()), "needs the model before the round"),
        (dict(rule=rules.Krum(3)), "needs at least 9 updates, got 8"),
        (dict(rule="median", weights=[1] * K), "weights: a robust rule counts each model once"),
    ],
)
def test_rules_without_a_meaning_are_refused(tmp_path, options, message):
    given, _ = models()
    with pytest.raises(errors.FedcoreError, match=message):
        aggregate(given, **options)
    with pytest.raises(errors.FedcoreError, match=message):
        merge(tmp_path / "out", saved(tmp_path, given), **options)
    assert not (tmp_path / "out").exists()


def test_clipping_needs_a_base(tmp_path):
    given, base = models()
    paths = saved(tmp_path, [*given, base])
    merge(tmp_path / "out", paths[:K], base=paths[K], rule=rules.ClipNorm())
    order = list(Safetensors(paths[0]))
    due = after_a_round(ordered(base, order), [ordered(model, order) for model in given], rules.ClipNorm())
    same(Safetensors(tmp_path / "out"), due, but=["d.running_mean"])
    with pytest.raises(errors.RangeError, match="clip_norm=1: not supported with a rule"):
        merge(tmp_path / "no", paths[:K], base=paths[K], rule="median", clip_norm=1.0)


@settings(max_examples=30)
@given(k=st.integers(1, 4), with_base=st.booleans(), seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 70_000)))
def test_windows_have_the_inner_products_of_whole_vectors(k, with_base, seed, cuts):
    rng, n = np.random.default_rng(seed), 70_000
    rows = [rng.normal(size=n).astype(dtype) for dtype in (np.float32, np.float16, np.float64, np.float32)[:k]]
    base = rng.normal(size=n).astype(np.float32) if with_base else None
    due = kernels.gram_matrix([base] * k, rows, np.ones(k))
    found, memory = GramSum(k), [row.copy() for row in rows]
    ends = [*sorted(cuts), n]
    for start, end in zip([0, *ends], ends, strict=False):
        for row, whole in zip(memory, rows, strict=True):
            row[: end - start] = whole[start:end]  # one memory for all windows
        found.add(None if base is None else base[start:end], [row[: end - start] for row in memory])
    assert found.result().tobytes() == due.tobytes()
    assert GramSum(k).result().tobytes() == np.zeros((k, k)).tobytes()
