import importlib
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.lazy_tensor_dict import LazyTensorDict

from fedcore import Server, Update, aggregate, errors
from fedcore.adapters.nvflare import Aggregator, reply
from fedcore.rules import Mean
from tests.adapters.drivers.nvflare import context_of

NAMES = ["site-1", "site-2", "site-3"]


def x0():
    return {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}


def answer(name, seed, steps=5, examples=None):
    rng = np.random.default_rng(seed)
    params = {key: rng.normal(size=array.shape).astype(np.float32) for key, array in x0().items()}
    meta = {"client_name": name, "NUM_STEPS_CURRENT_ROUND": steps}
    return FLModel(params=params, meta=meta if examples is None else {**meta, "fedcore": {"examples": examples}})


def test_the_job_s_model_is_the_first_one_and_its_log_names_rejected_sites(caplog):
    aggregator, server = Aggregator("MIFA", clients=NAMES), Server(x0(), "MIFA", NAMES, lr=0.1)
    aggregator.fl_ctx = FLContext()
    aggregator.fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(x0(), {}))
    aggregator.reset_stats()
    for seed in range(2):
        aggregator.accept_model(answer(NAMES[0], seed))
    aggregator.aggregate_model()
    server.round([Update(NAMES[0], answer(NAMES[0], 0).params, 5)])
    np.testing.assert_array_equal(aggregator.server.x, server.x)
    assert "round 0: rejected 1 ('site-1'), accepted 1" in caplog.text


def test_an_error_of_the_first_round_s_start_ends_the_job_with_its_reason():
    """NVFlare's ScatterAndGather would go on, since NVFlare only logs an exception of an event."""
    aggregator, reasons = Aggregator("MIFA", model=x0(), aggregation="Median"), []
    aggregator.system_panic = lambda reason, fl_ctx: reasons.append(reason[:23])
    with pytest.raises(errors.RangeError, match="Median"):
        aggregator.handle_event(AppEventType.ROUND_STARTED, FLContext())
    assert reasons == ["RangeError: aggregation"]


def test_calls_in_the_wrong_order_are_errors():
    with pytest.raises(errors.RoundError, match="open"):
        Aggregator(model=x0(), clients=NAMES).aggregate_model()
    with pytest.raises(errors.RangeError, match=r"^algorithm\b"):
        Aggregator("SCAFFOLD")
    with pytest.raises(errors.ArrayError, match="first model"):
        Aggregator(clients=NAMES).accept_model(answer(NAMES[0], 0))


def sites(*replies):
    """The model after a round of FedAvg over sites that send these FLModels."""
    names = [f"site-{i}" for i in range(len(replies))]
    aggregator = Aggregator("FedAvg", model=dict.fromkeys(replies[0].params, np.zeros(1, np.float32)), clients=names)
    aggregator.reset_stats()
    for name, model in zip(names, replies, strict=True):
        model.meta["client_name"] = name
        aggregator.accept_model(model)
    return aggregator.aggregate_model(), aggregator.reports[0]


def site(value, steps=None, **more):
    meta = {} if steps is None else {"NUM_STEPS_CURRENT_ROUND": steps}
    return FLModel(params={"w": np.float32([value])}, meta=meta, **more)


NUMBERS = {"int": int, "float": float, "int64": np.int64, "float32": np.float32, "fraction": lambda number: number / 40}


@pytest.mark.parametrize("of", NUMBERS.values(), ids=NUMBERS)
def test_sites_weigh_by_their_steps_as_in_nvflare(of):
    result, report = sites(site(0, of(20)), site(1, of(100)))
    assert result.params["w"] == pytest.approx(100 / 120)
    assert report.weights.tolist() == [of(20), of(100)]


def test_a_site_without_steps_weighs_one_as_in_nvflare():
    result, _ = sites(site(0), site(1, 3))
    assert result.params["w"] == pytest.approx(0.75)


def test_examples_of_fedcore_s_reply_come_before_steps():
    replies = [reply({"w": np.float32([k])}, steps=7, examples=n) for k, n in ((0, 10), (1, 30))]
    assert sites(*replies)[0].params["w"] == pytest.approx(0.75)


def test_the_metrics_of_the_sites_are_averaged_by_their_weights():
    bad = site(np.nan, 50, metrics={"loss": 9.0})
    result, _ = sites(site(0, 1, metrics={"loss": 1.0, "name": "x"}), site(1, 3, metrics={"loss": 2.0, "f1": 0.5}), bad)
    assert result.metrics == {"loss": pytest.approx(1.75), "f1": 0.5}
    assert result.meta["nr_aggregated"] == 2


class OnDisk:
    """NVFlare's reference to a tensor in a file."""

    def __init__(self, value):
        self._value = value

    def materialize(self):
        if self._value is None:
            raise FileNotFoundError("gone")
        return torch.tensor([self._value], dtype=torch.bfloat16)


def test_torch_models_on_a_disk_are_read_whole_before_they_count():
    x0 = {name: torch.zeros(1, dtype=torch.bfloat16) for name in "ab"}
    aggregator = Aggregator("FedAvg", model=x0, clients=["x", "y", "z"])
    aggregator.reset_stats()
    for name, a, b in (("x", 1.0, 2.0), ("y", 100.0, None), ("z", 3.0, 6.0)):
        meta = {"client_name": name, "NUM_STEPS_CURRENT_ROUND": 1}
        accepted = aggregator.accept_model(FLModel(params={"a": OnDisk(a), "b": OnDisk(b)}, meta=meta))
        assert accepted == (name != "y")
    params = aggregator.aggregate_model().params
    assert {name: tensor.dtype for name, tensor in params.items()} == dict.fromkeys("ab", torch.bfloat16)
    assert (params["a"].item(), params["b"].item()) == (2, 4)


@pytest.fixture
def filters(monkeypatch):
    """NVFlare's filters. They import bitsandbytes, which only other codes need."""
    functional = ModuleType("bitsandbytes.functional")
    for name in ("QuantState", "dequantize_4bit", "dequantize_blockwise", "quantize_4bit", "quantize_blockwise"):
        setattr(functional, name, None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
    quantization = "nvflare.app_opt.pt.quantization"
    yield (
        importlib.import_module(f"{quantization}.quantizer").ModelQuantizer,
        importlib.import_module(f"{quantization}.dequantizer").ModelDequantizer,
    )
    for name in ("quantizer", "dequantizer"):
        del sys.modules[f"{quantization}.{name}"]


@pytest.mark.parametrize("kind", ["float16", "adaquant"])
def test_nvflare_s_filters_decode_a_quantised_result_before_the_aggregator_gets_it(kind, filters, tmp_path):
    quantizer, dequantizer = filters
    rng = np.random.default_rng(0)
    sent = [{"w": torch.from_numpy(rng.normal(size=(20, 30)).astype(np.float32))} for _ in NAMES]

    def quantised(site):
        model = FLModel(params={"w": sent[site]["w"].clone()}, meta={"NUM_STEPS_CURRENT_ROUND": 5})
        return quantizer(kind).process(FLModelUtils.to_shareable(model), FLContext())

    models = {}
    for way in ("filtered", "unfiltered"):
        aggregator = Aggregator("FedAvg", model={"w": torch.zeros(20, 30)}, clients=NAMES)
        aggregator.reset_stats()
        for site, name in enumerate(NAMES):
            result = quantised(site)
            if way == "filtered":
                result = dequantizer().process(result, FLContext())
            accepted = aggregator.accept(result, context_of(name))
            assert accepted == (way == "filtered" or kind == "float16")
        models[way] = aggregator.aggregate_model().params["w"]
    if kind == "float16":
        assert torch.equal(models["filtered"], models["unfiltered"])
        assert torch.equal(models["filtered"], aggregate([{"w": one["w"].half().float()} for one in sent])["w"])
    assert (models["filtered"] - aggregate(sent)["w"]).abs().max() < 0.1
    result, stored = quantised(0), LazyTensorDict({"w": ("file", "w")}, str(tmp_path / "gone"))
    result["DXO"]["data"]["w"] = stored.make_lazy_ref("w")
    with pytest.raises((ValueError, AttributeError), match="_LazyRef"):  # it decodes no tensors on disk
        dequantizer().process(result, FLContext())


POLICIES = {"sites": {"a": 1.0, "b": 3.0}, "claims": lambda claims: 1 + 2 * (claims.steps > 1)}


@pytest.mark.parametrize("weights", POLICIES.values(), ids=POLICIES)
def test_weights_by_policy_also_of_a_job_that_goes_on(weights, tmp_path):
    for _ in range(2):
        storage = str(tmp_path / "state")
        aggregator = Aggregator(
            "FedAvg",
            model={"w": np.zeros(1, np.float32)},
            storage=storage,
            aggregation=[Mean(weights)],
            clients=["a", "b"],
        )
        aggregator.reset_stats()
        for name, value, steps in (("a", 0, 1), ("b", 4, 2)):
            model = site(value, steps)
            model.meta["client_name"] = name
            assert aggregator.accept_model(model)
        assert aggregator.aggregate_model().params["w"] == 3
        aggregator.server.close()


class Raising(dict):
    def items(self):
        raise RuntimeError("of a site's own class")


def test_metrics_of_a_rejected_or_hostile_result_do_not_count():
    """A site's first result is rejected and its second one accepted: the metrics are those of the second."""
    aggregator = Aggregator("FedAvg", model=x0(), clients=NAMES)
    aggregator.reset_stats()
    for examples in ("many", float("nan"), -1):
        wrong = answer("site-1", 0, examples=examples)
        wrong.metrics = {"accuracy": 100.0} | {str(i): 1.0 for i in range(10_000)}
        assert not aggregator.accept_model(wrong)
    for name in NAMES[:2]:
        model = answer(name, 0)
        model.metrics = {"accuracy": 0.5, "huge": 10**400, "far": 1e300, "text": "x", "nan": float("nan"), 7: 1.0}
        assert aggregator.accept_model(model)
    raising = answer("site-3", 0)
    raising.metrics = Raising()
    assert not aggregator.accept_model(raising)
    assert aggregator.aggregate_model().metrics == {"accuracy": 0.5}
    assert aggregator.reports[0].accepted == ("site-1", "site-2")


@pytest.mark.parametrize(
    "steps", [2_000_000, 10**12, 0.75, torch.tensor(3), torch.tensor(2.5), np.array(3), np.int8(3)]
)
def test_a_weight_may_be_any_number(steps):
    ours, theirs = Aggregator("FedAvg", model=x0(), clients=NAMES), WeightedAggregationHelper()
    ours.reset_stats()
    for seed, (name, weight) in enumerate([("site-1", steps), ("site-2", 1)]):
        model = answer(name, seed, steps=weight)
        model.metrics = {"accuracy": torch.tensor(0.25 * seed), "whole": bool(seed)}
        assert ours.accept_model(model)
        theirs.add(model.params, weight=float(weight), contributor_name=name, contribution_round=0)
    result, due = ours.aggregate_model(), theirs.get_result()
    for key in due:
        np.testing.assert_allclose(result.params[key], due[key], rtol=1e-6, atol=1e-6)
    share = 1 / (1 + float(steps))
    assert result.metrics == pytest.approx({"accuracy": 0.25 * share, "whole": share})
