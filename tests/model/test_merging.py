"""A merge of files has the bits of an average in memory, and survives kills; its steps are those of torch."""

import fcntl
import json
import os
import random
import re
import shutil
import signal
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedcore
from fedcore import Safetensors, errors, merge, write_model
from fedcore.algorithms.optimizers import SGD, Adagrad, Adam, Nesterov, Yogi
from fedcore.model import files, merging, windows
from fedcore.rules import GeometricMedian
from tests.cli.command import invoke as run
from tests.kills import calls_of, die_at, killed
from tests.kit import python
from tests.model.kill_merges import CALLS, content, in_child, models, small_steps

WEIGHTS = [3, 1, 2]
OPTIONS = dict(optimizer=Nesterov(), clip_norm=1e3)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(windows, "LARGEST", 1 << 17)


def clients(dtype=torch.float32, n=100_003):
    torch.manual_seed(0)
    return [
        {
            "w": torch.randn(n).to(dtype),
            "v": torch.randn(3, 5).bfloat16(),
            "s": torch.randn(()).to(dtype),
            "mask": torch.tensor([0, -torch.inf]),
            "n": torch.tensor(2**60 + k),
            "codes": torch.arange(6, dtype=torch.uint8),
        }
        for k in range(4)
    ]


def same(one, other):
    assert one.keys() == other.keys()
    for name, due in other.items():
        assert (one[name].dtype, one[name].shape) == (due.dtype, due.shape), name
        assert torch.equal(one[name].reshape(-1).view(torch.uint8), due.reshape(-1).view(torch.uint8)), name


def saved(folder, given, ending="safetensors"):
    for k, model in enumerate(given):
        write_model(model, folder / f"{k}.{ending}")
    return [folder / f"{k}.{ending}" for k in range(len(given))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_it_has_the_bits_of_an_average_in_memory(tmp_path, dtype, ending):
    given = clients(dtype)[:3]
    paths = saved(tmp_path, given, ending)
    report = merge(tmp_path / "out", paths, WEIGHTS)
    due = fedcore.aggregate(given, WEIGHTS)
    same(load_file(tmp_path / "out" / "model.safetensors"), due)
    assert report == json.loads((tmp_path / "out" / "merge.json").read_text())
    assert [one["share"] for one in report["inputs"]] == [3 / 6, 1 / 6, 2 / 6]
    floats = [name for name, tensor in due.items() if tensor.is_floating_point() and name != "mask"]
    for k, one in enumerate([*given, due]):
        norms = [one[name].double().norm().item() for name in floats]
        np.testing.assert_allclose(
            [report["tensors"][name][k] for name in floats], norms, rtol=3e-3 if k == 3 else 1e-5
        )
        whole = report["norm"] if k == 3 else report["inputs"][k]["norm"]
        np.testing.assert_allclose(whole, np.linalg.norm(norms), rtol=1e-3)
    assert sorted(os.listdir(tmp_path / "out")) == ["merge.json", "model.safetensors"]


def shards(folder, model, cuts):
    folder.mkdir()
    named, names = {}, list(model)
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, None], strict=True)):
        part = {name: model[name] for name in names[start:stop]}
        save_file(part, folder / f"part-{number}.safetensors", {"format": "pt", "part": str(number)})
        named |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return folder


def test_the_result_is_sharded_as_the_base_in_its_dtypes(tmp_path):
    given = clients()[:3]
    base = shards(
        tmp_path / "base", {name: t.half() if t.is_floating_point() else t for name, t in given[0].items()}, [2, 3]
    )
    paths = [shards(tmp_path / "a", given[1], [4]), *saved(tmp_path, given[2:])]
    report = merge(tmp_path / "out", paths, base=base)
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*os.listdir(base), "merge.json"])
    found = Safetensors(tmp_path / "out")
    assert [header.text for header in found.headers] == [header.text for header in Safetensors(base).headers]
    due = fedcore.aggregate(given[1:])
    np.testing.assert_allclose(found["w"], due["w"].half(), rtol=1e-3, atol=1e-6)
    write_model({name: np.asarray(tensor) for name, tensor in found.items()}, tmp_path / "one.safetensors")
    # The digest of a model does not depend on its files.
    again = merge(tmp_path / "again", [tmp_path / "one.safetensors"], base=tmp_path / "out")
    assert again["inputs"][0]["digest"] == again["base"]["digest"] == again["digest"] == report["digest"]
    assert again["round"] == 1


def test_two_rounds_of_diloco_by_hand(tmp_path):
    given = [model["w"].double().numpy() for model in clients()]
    paths = saved(tmp_path, clients())
    x, m, base = given[3], 0.0, paths[3]
    for round in range(2):
        gradient = x - np.average(given[:3], axis=0, weights=WEIGHTS)
        m = 0.9 * m + gradient
        x = x - 0.7 * (gradient + 0.9 * m)  # torch.optim.SGD(lr=0.7, momentum=0.9, nesterov=True)
        report = merge(tmp_path / f"r{round}", paths[:3], WEIGHTS, base=base, optimizer=Nesterov())
        base = tmp_path / f"r{round}" / "model.safetensors"
        assert (report["round"], report["server_lr"]) == (round, 0.7)
    np.testing.assert_allclose(Safetensors(base)["w"], x, rtol=1e-5, atol=1e-6)
    with pytest.raises(errors.RangeError, match="optimizer"):
        merge(tmp_path / "r2", paths[:3], base=base, optimizer=Adam())


def first_round(tmp_path):
    """Merge a round with moments, and return its folder and an input of the next one."""
    paths = saved(tmp_path, [{"w": torch.full((3,), k), "mask": torch.tensor([0, -torch.inf])} for k in (0.0, 1.0)])
    merge(tmp_path / "first", paths[1:], base=paths[0], optimizer=Nesterov())
    return tmp_path / "first", paths[1:]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: None,
        lambda m: {"0/w": m[:2], "0/z": m},
        lambda m: {"0/w": np.zeros(5, np.float32)},
        lambda m: {"0/w": m.astype(np.float64)},
        lambda m: {"0/w": m.view(np.int32)},
        lambda m: {"0/z": m},
        lambda m: {"0/w": m, "1/w": m},
        lambda m: {"0/w": m, "w": m},
    ],
    ids=["lost", "shorter", "longer", "float64", "integers", "missing", "more", "another name"],
)
def test_moments_that_are_not_those_of_the_base_are_refused(tmp_path, change):
    (base, inputs), moments = first_round(tmp_path), tmp_path / "first" / "optimizer" / "moments.safetensors"
    tensors = change(np.asarray(Safetensors(moments)["0/w"]))
    moments.unlink()
    if tensors is not None:
        write_model(tensors, moments)
    for path in (base, base / "model.safetensors"):
        with pytest.raises(errors.ArrayError, match=r"moments\.safetensors.*merge\.json"):
            merge(tmp_path / "next", inputs, base=path, optimizer=Nesterov())
    merge(tmp_path / "plain", inputs, base=base)
    (base / "merge.json").unlink()
    moments.unlink(missing_ok=True)
    assert merge(tmp_path / "next", inputs, base=base, optimizer=Nesterov())["round"] == 0


def test_moments_without_their_report_are_refused(tmp_path):
    base, inputs = first_round(tmp_path)
    assert merge(tmp_path / "second", inputs, base=base, optimizer=Nesterov())["round"] == 1
    (base / "merge.json").unlink()
    with pytest.raises(errors.RangeError, match="optimizer"):
        merge(tmp_path / "next", inputs, base=base, optimizer=Nesterov())


@pytest.mark.parametrize(
    "text",
    ["", "[]", "5", "[" * 100_000, "\ud800", *(f'{{"fingerprint": 1, "optimizer": null{rest}' for rest in (
        "}", ', "round": "1"}', ', "round": 1.0}', ', "round": true}', ', "round": -1}', ', "round": 1e400}',
        f', "round": {10**40}}}', f', "round": {"9" * 5000}}}', ', "round": null}', ', "round": 1, "round": 2}',
    ))],
)  # fmt: skip
def test_a_malformed_report_of_the_base_is_refused(tmp_path, text):
    base, inputs = first_round(tmp_path)
    (base / "merge.json").write_text(text, errors="surrogatepass")
    for options in ({}, {"optimizer": Nesterov()}):
        with pytest.raises(errors.ArrayError, match=r"merge\.json"):
            merge(tmp_path / "next", inputs, base=base, **options)
    (base / "merge.json").unlink()
    os.mkfifo(base / "merge.json")
    with pytest.raises(errors.StoreError, match=r"merge\.json"):
        merge(tmp_path / "next", inputs, base=base)


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q", "v"], "lora_dropout": 0.1}


def adapter(folder, **changes):
    folder.mkdir()
    tensors = {"q.lora_A.weight": np.ones((4, 8), np.float32), "q.lora_B.weight": np.ones((8, 4), np.float32)}
    write_model(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


OTHER = dict(lora_alpha=32, r=8, use_rslora=True, use_dora=True, fan_in_fan_out=True, peft_type="LOHA")
OTHER |= dict(target_modules=["q"], rank_pattern={"q": 4}, alpha_pattern={"q": 16})


@pytest.mark.parametrize(("entry", "value"), [*OTHER.items(), ("target_modules", "all-linear")])
def test_adapters_of_another_scale_are_refused(tmp_path, entry, value):
    one, other = adapter(tmp_path / "one"), adapter(tmp_path / "other", **{entry: value})
    for call in (
        lambda a, b: merge(tmp_path / "out", [a, b]),
        lambda a, b: merge(tmp_path / "out", [b, b], base=a),
        lambda a, b: fedcore.aggregate([a, b]),
        lambda a, b: fedcore.aggregate({"a": Safetensors(a), "b": str(b / "adapter_model.safetensors")}),
        lambda a, b: fedcore.aggregate(iter([a, b])),
    ):
        for pair in ((one, other), (other, one)):
            with pytest.raises(errors.ArrayError, match=f"{entry}.*adapter_config"):
                call(*pair)


def test_adapters_of_one_scale_are_merged_with_their_configuration(tmp_path):
    one = adapter(tmp_path / "one")
    defaults = dict(use_dora=False, rank_pattern={}, layers_to_transform=[])
    other = adapter(tmp_path / "other", target_modules=["v", "q", "q"], lora_dropout=0, r=4.0, **defaults)
    merge(tmp_path / "out", [one, other])
    assert (tmp_path / "out" / "adapter_config.json").read_bytes() == (one / "adapter_config.json").read_bytes()
    merge(tmp_path / "next", [one, other], base=tmp_path / "out", server_lr=0.5)
    with pytest.raises(errors.ArrayError, match="lora_alpha"):
        merge(tmp_path / "last", [adapter(tmp_path / "third", lora_alpha=1)], base=tmp_path / "out")
    for text in ("[]", "{", "[" * 100_000):
        (other / "adapter_config.json").write_text(text)
        with pytest.raises(errors.ArrayError, match=r"other.adapter_config\.json"):
            fedcore.aggregate([one, other])


def test_the_result_has_the_configurations_and_tokenizers_of_its_inputs(tmp_path, caplog):
    beside = dict.fromkeys(
        ["config.json", "tokenizer.json", "vocab.txt", "chat_template.jinja", "tokenizer.model"], "{}"
    )
    left = dict.fromkeys(
        ["trainer_state.json", "optimizer.pt", "training_args.bin", "own.py", "README.md", "aws_config.json"], ""
    )
    for name, model in zip("abc", clients(n=10), strict=False):
        folder = shards(tmp_path / name, model, [2])
        for file, text in (beside | left).items():
            (folder / file).write_text(text)
    (tmp_path / "b" / "config.json").write_text("{1}")
    (tmp_path / "c" / "generation_config.json").write_text("{2}")
    (tmp_path / "c" / "tokenizer.json").unlink()
    due = {*beside, "merge.json", "model.safetensors.index.json"}  # none that only a later model has
    merge(tmp_path / "new" / "er" / "out", [tmp_path / name for name in "abc"])
    found = {file.name: file for file in (tmp_path / "new" / "er" / "out").iterdir()}
    assert found.keys() == due | {"part-0.safetensors", "part-1.safetensors"}
    assert {name: found[name].read_text() for name in beside} == beside
    (warned,) = caplog.messages
    assert "config.json" in warned
    assert str(tmp_path / "b") in warned
    assert "client 0" in warned
    caplog.clear()
    merge(tmp_path / "out", [tmp_path / "a"], base=tmp_path / "b" / "model.safetensors.index.json")
    assert (tmp_path / "out" / "config.json").read_text() == "{1}"
    assert "base" in caplog.messages[0]
    (tmp_path / "b" / "vocab.txt").write_text("z")  # else the finished merge would be found
    with pytest.raises(errors.StoreError, match="exists"):
        merge(tmp_path / "out", [tmp_path / "a"], base=tmp_path / "b" / "model.safetensors.index.json")


def test_files_beside_a_model_are_its_own(tmp_path, monkeypatch):
    """A link may lead into the folder or the blobs of its cache, not to another place."""
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "hub" / "snapshots").mkdir(parents=True)
    folder = shards(tmp_path / "hub" / "snapshots" / "one", clients(n=10)[0], [2])
    (tmp_path / "hub" / "blobs").mkdir()
    (tmp_path / "hub" / "blobs" / "0f").write_text("{0}")
    (folder / "config.json").symlink_to("../../blobs/0f")
    (tmp_path / "link").symlink_to(folder)
    (shards(folder / "unet", clients(n=10)[0], [2]) / "config.json").symlink_to("../../../blobs/0f")
    for number, path in enumerate((folder, tmp_path / "link", folder / "unet")):
        merge(tmp_path / f"out{number}", [path])
        fedcore.Server(Safetensors(path), "FedAvg", 2, lr=0.1).write(tmp_path / f"written{number}")
        for out in ("out", "written"):
            assert (tmp_path / f"{out}{number}" / "config.json").read_text() == "{0}"
    for target, message in (("../../../secret", "out of the model's folder"), ("nothing", "cannot be read")):
        (folder / "tokenizer.json").unlink(missing_ok=True)
        (folder / "tokenizer.json").symlink_to(target)
        with pytest.raises(errors.StoreError, match=message):
            merge(tmp_path / "other", [folder])
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(files, "LARGEST_BESIDE", 2)
    with pytest.raises(errors.StoreError, match="larger than"):
        merge(tmp_path / "other", [folder])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_transformers_loads_the_result(tmp_path):
    transformers = pytest.importorskip("transformers")
    size = dict(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    nets = []
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        nets.append(transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)))
        nets[-1].save_pretrained(tmp_path / name, max_shard_size="8KB")
    merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], [1, 3])
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in found.items():
        due = (nets[0].state_dict()[name] + 3 * nets[1].state_dict()[name]) / 4
        torch.testing.assert_close(tensor, due)


def test_tensors_in_memory_are_part_of_the_fingerprint(tmp_path):
    for value in (1, 2):
        np.savez_compressed(tmp_path / "a.npz", w=np.full(9, value, np.float32))
        if value == 1:
            merge(tmp_path / "out", [tmp_path / "a.npz"])
    with pytest.raises(errors.StoreError, match="exists"):
        merge(tmp_path / "out", [tmp_path / "a.npz"])


def test_a_step_on_a_16_bit_base_logs_a_warning(tmp_path, caplog):
    torch.save({"w": torch.full((4,), 1.001)}, tmp_path / "client.pt")
    for kind, moved, warnings in ((torch.bfloat16, 1, 1), (torch.float32, 1.00133, 1)):  # 1 + 0.7 (1 + 0.9) 0.001
        torch.save({"w": torch.ones(4, dtype=kind)}, tmp_path / "base.pt")
        out = tmp_path / str(kind)
        merge(out, [tmp_path / "client.pt"], base=tmp_path / "base.pt", optimizer="nesterov")
        np.testing.assert_allclose(np.asarray(Safetensors(out)["w"], np.float32), moved, rtol=1e-6)
        assert len(caplog.messages) == warnings
    assert caplog.messages[0].startswith("base: is bfloat16, so the result loses steps")
    for wrong in (Nesterov, 0.9):
        with pytest.raises(errors.RangeError, match=r"optimizer=.*must be an optimizer"):
            merge(tmp_path / "new", [tmp_path / "client.pt"], base=tmp_path / "base.pt", optimizer=wrong)


@pytest.mark.parametrize("optimizer", [SGD(0.5), Nesterov(0.5), Adagrad(), Adam(corrected_from=1), Yogi()])
def test_windows_do_not_change_the_bits_of_an_optimizer(tmp_path, optimizer):
    given = clients()
    paths, n = saved(tmp_path, given), len(given[0]["w"])
    x, moments = given[3]["w"].numpy(), optimizer.start(n)
    base = paths[3]
    for round in range(2):
        v = fedcore.kernels.weighted_sum(
            [m["w"] for m in given[:3]], np.array([0.5, 1 / 6, 1 / 3]), base=x, accumulate="float64"
        )
        moments_out, x_out = tuple(np.empty(n, np.float32) for _ in moments), np.empty(n, np.float32)
        rate = getattr(optimizer, "rate", lambda round: None)(round) or 1.0
        optimizer.turn(v, moments, x, gamma=rate, moments_out=moments_out, x_out=x_out)
        x, moments = x_out, moments_out
        merge(tmp_path / f"r{round}", paths[:3], WEIGHTS, base=base, optimizer=optimizer)
        base = tmp_path / f"r{round}"
    np.testing.assert_array_equal(Safetensors(base)["w"], x)
    stored = Safetensors(base / "optimizer" / "moments.safetensors")
    for i, moment in enumerate(moments):
        np.testing.assert_array_equal(stored[f"{i}/w"], moment)


def test_rate_and_clipping_by_hand(tmp_path):
    x, ys = np.float32([1, 2]), [np.float32([4, 6]), np.float32([1, 2.5])]  # updates of norms 5 and 0.5
    paths = saved(tmp_path, [{"w": y, "bn.running_mean": y} for y in (x, *ys)])
    report = merge(tmp_path / "out", paths[1:], base=paths[0], server_lr=0.5, clip_norm=1)
    found = Safetensors(tmp_path / "out")
    mean = (np.array([0.6, 0.8]) + np.array([0, 0.5])) / 2
    np.testing.assert_allclose(found["w"], x + 0.5 * mean, rtol=1e-6)
    np.testing.assert_array_equal(found["bn.running_mean"], [2.5, 4.25])  # statistics are averaged
    assert [one["clip_factor"] for one in report["inputs"]] == [0.2, 1.0]
    np.testing.assert_allclose(report["tensors"]["w"], [5, 0.5, np.linalg.norm(mean)], rtol=1e-6)


def test_a_model_that_is_not_finite_is_rejected(tmp_path):
    given = clients(torch.bfloat16)
    given[1]["w"][-1] = torch.nan
    paths = saved(tmp_path, given)
    report = merge(tmp_path / "out", paths, [1, 2, 3, 4])
    same(load_file(tmp_path / "out" / "model.safetensors"), fedcore.aggregate([given[0], *given[2:]], [1, 3, 4]))
    assert "w: " in report["inputs"][1].pop("rejected")
    assert report["inputs"][1] == {"path": str(paths[1]), "weight": 2, "share": 0}
    clipped = merge(tmp_path / "clipped", paths[1:], base=paths[0], clip_norm=1e6, server_lr=1.0)
    assert ["rejected" in one for one in clipped["inputs"]] == [True, False, False]
    for inputs, weights in ((paths[1:2], None), (paths, [0, 1, 0, 0])):
        with pytest.raises(errors.ArrayError, match=r"rejected \(w: .*NaN"):
            merge(tmp_path / "none", inputs, weights)
    with pytest.raises(errors.ArrayError, match=r"^base, w\b"):
        merge(tmp_path / "none", [paths[0]], base=paths[1], server_lr=1.0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["clipped", "out"]


def test_a_model_beyond_the_first_is_rejected_for_its_own_reason(tmp_path):
    paths = saved(tmp_path, given := [{"w": one} for one in (np.float16([1]), np.float32([7e4]), np.float32([np.inf]))])
    assert "float16" in merge(tmp_path / "out", paths[:2])["inputs"][1]["rejected"]
    for inputs in (given, paths, iter(given)):
        with pytest.raises(errors.ArrayError, match=r"client 1\b.*float16"):
            fedcore.aggregate(inputs)
    for call in (fedcore.aggregate, lambda inputs: merge(tmp_path / "mask", inputs)):
        with pytest.raises(errors.RangeError, match=r"client 1\b.*mask"):
            call([paths[2], paths[0]])


@pytest.mark.parametrize(
    ("base", "options"),
    [("f2", {}), ("f4", {}), ("f2", OPTIONS), ("f8", dict(rule="median")), (None, dict(rule="trimmed-mean"))],
)
def test_a_result_beyond_the_range_of_its_dtype_is_an_error(tmp_path, base, options):
    given = [{"running_var": np.float64([1, 1e200])}] * 3
    paths = saved(tmp_path, [*given, {"running_var": np.ones(2, base)}])
    with pytest.raises(errors.DivergedError, match="running_var"):
        merge(tmp_path / "out", paths[:3], base=base and paths[3], **options)
    with pytest.raises(errors.DivergedError, match="running_var") if base is None else nullcontext():
        fedcore.aggregate(given, **options if base is None else {})


def fragments(folder, k):
    """Two fragments with a float buffer and a counter each."""
    rng = np.random.default_rng(k)
    folder.mkdir(exist_ok=True)
    shapes = {"w": (50_003,), "b": (3, 5), "running_var": (3,)}
    model = {f"{of}.{name}": rng.normal(size=shape).astype(np.float32) for of in "ab" for name, shape in shapes.items()}
    model |= {f"{of}.num_batches_tracked": np.int64(k) for of in "ab"}
    write_model(model, folder / f"{k}.safetensors")
    return folder / f"{k}.safetensors"


def fragment_of(path, of):
    folder = path.parent / of
    folder.mkdir(exist_ok=True)
    tensors = {name: np.array(tensor) for name, tensor in Safetensors(path).items() if name.startswith(of)}
    write_model(tensors, folder / path.name)
    return folder / path.name


def bytes_in(folder, of, file="model.safetensors"):
    stored = Safetensors(folder / file) if (folder / file).exists() else {}
    return {
        name: np.asarray(one).tobytes()
        for name, one in stored.items()
        if name.partition("/")[2].startswith(of) or name.startswith(of)
    }


@pytest.mark.parametrize(
    "options",
    [
        dict(optimizer=Adam(corrected_from=1)),
        dict(optimizer=Nesterov(), clip_norm=99),
        dict(optimizer=Yogi(), rule="median"),
        {},
    ],
)
def test_fragments_in_turn_are_merges_of_their_own(tmp_path, options):
    """Inputs are whole models, whose other fragment may have any numbers, or only the fragment."""
    paths, base = [fragments(tmp_path / "in", k) for k in range(8)], fragments(tmp_path / "in", 9)
    own = {of: fragment_of(base, of) for of in "ab"}
    for number, of in enumerate("abbab"):
        inputs, parts = paths[number : number + 3], [fragment_of(path, of) for path in paths[number : number + 3]]
        report = merge(tmp_path / f"{number}", parts if number % 2 else inputs, base=base, only=f"{of}.*", **options)
        alone = merge(tmp_path / f"{of}{number}", parts, base=own[of], **options)
        base, own[of] = tmp_path / f"{number}", tmp_path / f"{of}{number}"
        for one in "ab" if number else "a":
            for file in ("model.safetensors", merging.MOMENTS):
                assert bytes_in(base, one, file) == bytes_in(own[one], one, file)
        assert report["norm"] == alone["norm"]
        assert [one["digest"] for one in report["inputs"]] == [one["digest"] for one in alone["inputs"]]
    assert (report["round"], report["idle"]["a.w"], report["idle"]["b.b"]) == (4, 3, 2)
    if options.get("optimizer") == Adam(corrected_from=1):
        with pytest.raises(errors.RangeError, match="two rates"):
            merge(tmp_path / "whole", paths[:3], base=base, **options)
    elif options:
        merge(tmp_path / "whole", paths[:3], base=base, **options)
        with pytest.raises(errors.RangeError, match="optimizer"):  # its moments would be lost
            merge(tmp_path / "none", paths[:3], base=base, only="a.*")


def test_a_round_without_a_step_leaves_a_base(tmp_path):
    paths, only = [fragments(tmp_path, k) for k in range(2)], "*running_var"
    merge(tmp_path / "first", paths[1:], base=paths[0], only=only, optimizer=Nesterov())
    for number, patterns in enumerate((only, "a.w", None)):
        out = tmp_path / f"next{number}"
        assert merge(out, paths[1:], base=tmp_path / "first", only=patterns, optimizer=Nesterov())["round"] == 1


def test_tensors_that_are_not_merged_need_a_base_or_are_equal(tmp_path):
    given = [{"a": np.full(3, k, np.float32), "b": np.float16([np.nan, 1])} for k in (1, 3)]
    merge(tmp_path / "out", saved(tmp_path, given), only=["a"])
    found = Safetensors(tmp_path / "out")
    assert np.asarray(found["a"]).tolist() == [2, 2, 2]
    assert np.asarray(found["b"]).tobytes() == given[0]["b"].tobytes()
    heads = [given[1] | {"a": np.ones(2, np.float32)}, {"b": given[1]["b"]}]
    for other in (given[1], *heads):
        with pytest.raises(errors.FedcoreError, match=r"\ba\b.*only.*--base.*with the model whose tensors to keep"):
            merge(tmp_path / "other", saved(tmp_path, [given[0], other]), only=["b"])


def test_ignored_tensors_are_not_merged(tmp_path):
    paths, base = [fragments(tmp_path, k) for k in (1, 2)], fragments(tmp_path, 9)
    merge(tmp_path / "due", paths, base=base, only=["a.[bw]"])
    report = merge(tmp_path / "out", paths, base=base, only="a.*", ignore=["*num*", "*running*"])
    assert (report["only"], report["ignore"]) == (["a.*"], ["*num*", "*running*"])
    ignored = [word for pattern in ("b.*", "*num*", "*running*") for word in ("--ignore", pattern)]
    assert run("merge", tmp_path / "two", *paths, "--base", base, *ignored).status == 0
    for name in ("out", "two"):
        same(load_file(tmp_path / name / merging.MODEL), load_file(tmp_path / "due" / merging.MODEL))
    for ignore, kind in {"x*": errors.UnknownNameError, "*": errors.RangeError}.items():
        with pytest.raises(kind, match="ignore"):
            merge(tmp_path / "other", paths, base=base, ignore=ignore)


@pytest.mark.parametrize("change", [lambda name: f"{name}_more", lambda name: "x" * 999])
def test_lists_of_names_end_between_names(tmp_path, change):
    names = [f"base_model.model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in range(9)]
    paths = saved(tmp_path, [dict.fromkeys(them, np.ones(1, "f4")) for them in (names, map(change, names))])
    for merged in (lambda: merge(tmp_path / "out", paths), lambda: merge(tmp_path / "out", paths, only="v")):
        with pytest.raises(errors.FedcoreError) as e:
            merged()
        lists = re.findall(r"missing \d \((.*?)\)|unexpected \d \((.*?)\)|tensors are (.*)", str(e.value))
        for text in filter(None, (text for one in lists for text in one)):
            shown, _, more = text.partition(" and ")
            assert set(shown.split(", ")) <= {*names, *map(change, names)} or shown.endswith("xxx...")
            assert more == f"{9 - len(shown.split(', '))} more" or shown.endswith("xxx...")


def test_patterns_that_choose_nothing_are_refused(tmp_path):
    paths = saved(tmp_path, clients(n=9))
    for only in ("x*", ["w", "W"], "", "*" * 999 + "?" * 999, "[", "w\0"):
        with pytest.raises(errors.UnknownNameError, match=r"the 6 tensors are .*\bmask\b"):
            merge(tmp_path / "out", paths, only=only)
    for only in ([], [3], [None, "w"]):
        with pytest.raises(errors.RangeError, match="only"):
            merge(tmp_path / "out", paths, only=only)
    for k, name in enumerate(("only", "ignore")):
        with pytest.raises(errors.RangeError, match=name):
            merge(tmp_path / "out", [adapter(tmp_path / f"adapter{k}")], **{name: "*A*"}, lora="product")
    with pytest.raises(errors.ArrayError, match="missing 1"):
        write_model({"v": np.ones((3, 5), np.float32)}, tmp_path / "part.safetensors")
        merge(tmp_path / "out", [tmp_path / "part.safetensors"], base=paths[0], only=["v", "w"])


@pytest.mark.parametrize(
    "change",
    [{"idle": {"b.w": 9}}, {"idle": ["a.w"]}, {"moments": ["a.w", "b.w"]}, {"moments": 1}]
    + [{"ties": ties} for ties in (["a.w"], {"a.w": []}, {"a.w": "z"}, {"z": "y"}, {"a.w": "a.b"})],
)
def test_a_report_that_does_not_fit_its_moments_is_refused(tmp_path, change):
    base, path = fragments(tmp_path / "in", 0), fragments(tmp_path / "in", 1)
    merge(tmp_path / "first", [path], base=base, optimizer=Nesterov(), only="a.*")
    report = json.loads((tmp_path / "first" / "merge.json").read_text())
    (tmp_path / "first" / "merge.json").write_text(json.dumps(report | change))
    with pytest.raises(errors.ArrayError, match=r"merge\.json|moments"):
        merge(tmp_path / "out", [path], base=tmp_path / "first", optimizer=Nesterov(), only="b.*")


class Tied(torch.nn.Module):
    def __init__(self, seed, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = torch.nn.Embedding(30, 4), torch.nn.Linear(4, 30, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_tensors_stay_tied_however_they_are_stored(tmp_path):
    nets = [Tied(k) for k in range(3)]
    for k, net in enumerate(nets):
        torch.save({"model": net.state_dict()}, tmp_path / f"{k}.{'bin' if k == 2 else 'pt'}")
    write_model(nets[2].state_dict(), tmp_path / "both.safetensors")
    write_model({"embed.weight": nets[2].embed.weight}, tmp_path / "one.safetensors")
    due = fedcore.aggregate(nets)["embed.weight"]
    for third in ("2.bin", "both.safetensors", "one.safetensors"):
        merge(tmp_path / third[:3], [tmp_path / "0.pt", tmp_path / "1.pt", tmp_path / third], key="model")
        found = load_file(tmp_path / third[:3] / "model.safetensors")
        assert torch.equal(found["embed.weight"], due)
        assert torch.equal(found["head.weight"], due)
    merge(tmp_path / "first", [tmp_path / "one.safetensors", tmp_path / "1.pt"], key="model")
    assert list(Safetensors(tmp_path / "first")) == ["embed.weight"]
    write_model(Tied(3, tied=False).state_dict(), tmp_path / "untied.safetensors")
    with pytest.raises(errors.ArrayError, match=r"head.weight: is tied to embed.weight"):
        merge(tmp_path / "untied", [tmp_path / "0.pt", tmp_path / "untied.safetensors"], key="model")
    base = tmp_path / "0.pt"
    for name in ("both", "one", "untied"):  # the result has both names, and is the next base
        path, out, options = tmp_path / f"{name}.safetensors", tmp_path / f"of {name}", dict(base=base, key="model")
        with pytest.raises(errors.ArrayError, match="is tied to") if name == "untied" else nullcontext():
            assert merge(out, [path], **options)["ties"] == {"head.weight": "embed.weight"}
        base = out


def test_models_that_do_not_fit_are_named(tmp_path):
    given = clients(n=5)
    paths = saved(tmp_path, given)
    for message, bad in {
        r"client 1 .*bad.*, codes\b.*equal": given[0] | {"codes": torch.zeros(6, dtype=torch.uint8)},
        r"client 1 .*bad.*, w\b.*shape": given[0] | {"w": torch.zeros(4)},
        r"client 1 .*bad.*missing 1 \(n\)": {name: tensor for name, tensor in given[0].items() if name != "n"},
        r"client 1 .*bad.*unexpected 5 \(x0, x1, x2, x3, x4\)": given[0] | {f"x{k}": torch.zeros(1) for k in range(5)},
    }.items():
        write_model(bad, tmp_path / "bad.safetensors")
        with pytest.raises(errors.FedcoreError, match=message):
            merge(tmp_path / "out", [paths[0], tmp_path / "bad.safetensors"])
    for options in ({"optimizer": SGD()}, {"server_lr": 1.0}, {"clip_norm": 1.0}):
        with pytest.raises(errors.RangeError, match="base"):
            merge(tmp_path / "out", paths, **options)
    with pytest.raises(errors.DivergedError, match=r"^[a-z]+: "):
        merge(tmp_path / "out", paths[1:], base=paths[0], server_lr=3e38)
    with pytest.raises(errors.StoreError, match="folder"):
        merge(tmp_path / "out.safetensors", paths)
    with pytest.raises(errors.StoreError, match="exists"):
        merge(tmp_path, paths)
    assert not list(tmp_path.glob(".*"))


def test_only_one_process_merges_into_a_folder(tmp_path):
    paths = saved(tmp_path, clients(n=5))
    (tmp_path / ".out.part").mkdir()
    fd = os.open(tmp_path / ".out.part", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(errors.LockedError, match="out"):
        merge(tmp_path / "out", paths)
    os.close(fd)
    (tmp_path / ".out.part" / "mine").touch()
    with pytest.raises(errors.StoreError, match="not the folder of a merge"):
        merge(tmp_path / "out", paths)
    (tmp_path / ".out.part" / "mine").unlink()
    report = merge(tmp_path / "out", paths)
    assert merge(tmp_path / "out", paths) == report  # the same merge is done
    with pytest.raises(errors.StoreError, match="exists"):
        merge(tmp_path / "out", paths, [1, 2, 3, 4])


def killed_merge(tmp_path, paths, at, **options):
    """Kill a merge when the bytes read reach a share of their total."""

    def fatal(done, total):
        if done >= at * total:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: merge(tmp_path / "out", paths[1:], base=paths[0], progress=fatal, **options))


@pytest.mark.parametrize("options", [OPTIONS, dict(optimizer=Nesterov(), rule=GeometricMedian())])
def test_a_killed_merge_continues(tmp_path, monkeypatch, options):
    monkeypatch.setattr(merging, "SAFE", 1 << 19)
    paths = models(tmp_path)
    merge(tmp_path / "due", paths[1:], base=paths[0], **options)
    for at in (0.2, 0.6, 0.7, 0.95):  # clipping and distances need one half first
        killed_merge(tmp_path, paths, at, **options)
        assert not (tmp_path / "out").exists()
    shares = []
    merge(
        tmp_path / "out", paths[1:], base=paths[0], progress=lambda done, total: shares.append(done / total), **options
    )
    assert 0.7 < shares[0] < 0.95
    assert content(tmp_path / "out") == content(tmp_path / "due")


@pytest.mark.parametrize("change", ["a byte of the result", "a record cut short", "an input", "the weights"])
def test_a_killed_merge_starts_again_where_it_cannot_continue(tmp_path, monkeypatch, change):
    monkeypatch.setattr(merging, "SAFE", 1 << 19)
    paths, weights, part = models(tmp_path), None, tmp_path / ".out.part"
    killed_merge(tmp_path, paths, 0.9, **OPTIONS)
    if change == "a byte of the result":
        with open(part / "model.safetensors", "r+b") as file:
            file.seek(500_000)
            file.write(bytes([file.read(1)[0] ^ 1]))
    elif change == "a record cut short":
        (part / "progress.json").write_text((part / "progress.json").read_text()[:100])
    elif change == "an input":
        write_model({name: np.asarray(t) for name, t in Safetensors(paths[2]).items()}, paths[1])
    else:
        weights = [1, 3]
    merge(tmp_path / "due", paths[1:], weights, base=paths[0], **OPTIONS)
    merge(tmp_path / "out", paths[1:], weights, base=paths[0], **OPTIONS)
    assert content(tmp_path / "out") == content(tmp_path / "due")


@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("kind", ["mean", "clip", "rule", "index", "rejected", "lora", "only"])
def test_a_merge_that_is_killed_at_any_call(folder_in_memory, kind, stride):
    """And the merge that continues it, at another call."""
    folder = folder_in_memory
    (folder / "in").mkdir()
    base, *inputs = models(folder / "in", 4, n=300_000)
    options = {"clip": OPTIONS, "rule": dict(optimizer=Nesterov(), rule=GeometricMedian())}.get(kind, {})
    if kind == "index":
        base, options = shards(folder / "in" / "base", load_file(base), [1, 3]), dict(optimizer=Nesterov())
    if kind == "only":
        merge(folder / "in" / "first", inputs, base=base, optimizer=Nesterov(), only=["b", "s"])
        base, options = folder / "in" / "first", dict(optimizer=Nesterov(), only=["w", "n"])
    if kind == "rejected":  # in the last window
        tensors = {name: np.array(tensor) for name, tensor in Safetensors(inputs[1]).items()}
        tensors["w"][-1] = np.nan
        write_model(tensors, inputs[1])
    if kind == "lora":
        base, inputs = None, [adapter(folder / "in" / f"adapter{k}", r=4, lora_alpha=k + 1) for k in range(2)]
        options = dict(lora="product")
    before = content(folder / "in")

    def act(out):
        small_steps()
        merge(out, inputs, base=base, **options)

    def dies_at(call, after):
        die_at(call, after=after, calls=CALLS)
        act(folder / "out")

    count, rng = calls_of(lambda: act(folder / "due"), CALLS), random.Random(0)
    due = content(folder / "due")
    for call in range(1, count + 1, stride):
        assert killed(lambda call=call: dies_at(call, after=call % 2 == 0))
        killed(lambda: dies_at(rng.randrange(1, count), after=rng.random() < 0.5))  # if that many calls are left
        assert not killed(lambda: act(folder / "out"))
        assert content(folder / "out") == due
        shutil.rmtree(folder / "out")
        assert sorted(path.name for path in folder.iterdir()) == ["due", "in"]
    assert content(folder / "in") == before


def hollow(path, n, kind):
    """Write a model of zeros whose holes take no disk."""
    head = fedcore.model.safetensors.header_of([("w", kind, (n,))])
    path.write_bytes(head)
    os.truncate(path, len(head) + n * (2 if kind == "bfloat16" else 4))
    return path


PEAK = """
import sys, fedcore
from fedcore.model import merging, windows
windows.MEMORY, merging.SAFE = 20 << 20, 20 << 20
peak = lambda: int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) >> 10
before = peak()
fedcore.merge(sys.argv[1], sys.argv[2:], rule=RULE)
print(peak() - before)
"""


@pytest.mark.parametrize("rule", ["None", "fedcore.rules.MultiKrum(0)"])
def test_the_memory_of_a_merge_does_not_depend_on_the_size_of_the_models(tmp_path, rule):
    paths = [hollow(tmp_path / f"{k}.safetensors", 25_000_000, "bfloat16") for k in range(3)]
    peak = python("-c", PEAK.replace("RULE", rule), tmp_path / "out", *paths).stdout
    assert int(peak) < 20 + 5 * 7 + 15  # of 150 MB


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = clients(n=9)
    given[2]["w"][0] = torch.inf
    saved(tmp_path, given)
    done = run("merge", "out", "0.safetensors", "1.safetensors", "2.safetensors", "--weights", "1,3,5")
    assert done.status == 0
    assert "rejected" in done.errors
    assert "wrote out: 2 of 3 models" in done.output
    same(load_file("out/model.safetensors"), fedcore.aggregate(given[:2], [1, 3]))
    options = ("--server-optimizer", "Nesterov", "--set", "momentum=0.5", "--json")
    done = run("merge", "next", "0.safetensors", "--base", "out", *options)
    assert json.loads(done.output)["optimizer"] == {"name": "Nesterov", "momentum": 0.5, "eta": 0.7}
    write_model({"w": np.float64([1e200])}, "large.safetensors")  # the square of its norm is no float64
    for words in (("--json",), ()):  # the second finds the result of the first
        done = run("merge", "large", "large.safetensors", *words)
        assert ("norm inf" in done.output) if not words else json.loads(done.output, parse_constant=pytest.fail)
    for arguments, message in {
        ("--weights", "1,x"): "--weights",
        ("--server-optimizer", "nestrov", "--base", "out"): "did you mean 'Nesterov'",
        ("--server-optimizer", "adam", "--set", "momentum=1", "--base", "out"): "momentum",
        ("--server-optimizer", "adam", "--set", "tau=a", "--base", "out"): "tau=a",
        ("--server-optimizer", "adam", "--set", f"tau={'(' * 999}", "--base", "out"): "tau=",
        ("--set", "tau=1"): "--server-optimizer",
        ("--server-optimizer", "adam"): "base",
        ("--only", "v", "--only", "x"): "the 6 tensors are",
    }.items():
        done = run("merge", "other", "0.safetensors", *arguments)
        assert (done.status, message in done.errors) == (2, True), done.errors


class Own(SGD):
    """An optimizer of a user whose last element is NaN, and that returns a finite norm; idle, it leaves x' as it is."""

    idle = False

    def turn(self, v, moments, x, *, gamma, moments_out, x_out):
        if self.idle:
            moments_out[0][:] = 0
            return 1.0
        super().turn(v, moments, x, gamma=gamma, moments_out=moments_out, x_out=x_out)
        (moments_out[0] if self.momentum else x_out)[-1] = np.nan
        return 1.0


@pytest.mark.parametrize(("momentum", "idle"), [(0.5, False), (0.0, False), (0.5, True)])
def test_faults_of_an_own_optimizer_end_the_merge(tmp_path, momentum, idle, monkeypatch):
    monkeypatch.setattr(Own, "idle", idle)
    paths = saved(tmp_path, clients())
    with pytest.raises(errors.DivergedError, match="Own"):
        merge(tmp_path / "out", paths[:3], base=paths[3], optimizer=Own(momentum))
    assert not (tmp_path / "out").exists()
