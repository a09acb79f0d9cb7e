"""The chain of rules: composition, names, folders, and a rule of another package."""

from dataclasses import dataclass

import numpy as np
import pytest

from fedcore import Compute, EdgeAggregator, Limits, Model, RoundPolicy, Server, Update, rules
from fedcore.errors import AlgorithmError, CheckpointError, RangeError, UnknownNameError
from fedcore.rules import OPEN, CapExamples, CapSteps, Chain, ClipToMedian, Filter, Mean, Median, RejectLong, Scale
from fedcore.testing import RuleContract

X = np.zeros(4, np.float32)


@dataclass(frozen=True)
class RejectFew(Filter, Scale):
    """A rule of another package: it rejects clients with few examples, and halves updates of many steps."""

    least: int = 10
    many: int = 100

    def decide(self, group):
        few = {i: examples for i, examples in enumerate(group.examples) if examples < self.least}
        return {i: f"examples={examples:g}: must be at least {self.least}" for i, examples in few.items()}

    def weights(self, group):
        return np.where(group.steps > self.many, 0.5, 1.0)


RULES = {
    "RejectLong": RejectLong(3),
    "ClipToMedian": ClipToMedian(),
    "CapExamples": CapExamples(2),
    "CapSteps": CapSteps(2),
    "Mean": Mean(),
    "Median": rules.Median(),
    "TrimmedMean": rules.TrimmedMean(2),
    "MeaMed": rules.MeaMed(1),
    "MultiKrum": rules.MultiKrum(1),
    "Bulyan": rules.Bulyan(1),
    "GeometricMedian": rules.GeometricMedian(),
    "CentredClipping": rules.CentredClipping(3.0),
    "PrivateMean": rules.PrivateMean(3.0, 1.0, 8, seed=3),
}


class TestEveryRule(RuleContract):
    @pytest.fixture(autouse=True, params=RULES)
    def set_rule(self, request):
        self.rule = RULES[request.param]

    def make_rule(self):
        return self.rule


class TestRejectFew(RuleContract):
    def make_rule(self):
        return RejectFew(least=2, many=2)  # rejects another update too

    def make_rejected(self, update):
        return update._replace(examples=0.5)


class TestRejectLong(RuleContract):
    def make_rule(self):
        return RejectLong(50)

    def make_rejected(self, update):
        return update._replace(value=update.value * np.float32(1e6))


def updates(*examples, steps=5):
    return [Update(k, np.full(4, k + 1, np.float32), steps, examples=n) for k, n in enumerate(examples)]


WHATEVER = pytest.mark.parametrize("need", [None, *sorted(rules.NEEDS.keys() - {"previous", "base"})])
"""Rules act whatever they need, also if it is nothing."""


@WHATEVER
@pytest.mark.parametrize("rule", [RejectFew(), f"{__name__}:RejectFew"], ids=["object", "dotted name"])
def test_a_rule_of_another_package(rule, need, monkeypatch):
    monkeypatch.setattr(RejectFew, "needs", {need} - {None})
    server = Server(X, "FedAvg", 3, lr=0.1, aggregation=[rule])
    report = server.round(updates(20, 5, 60))
    assert report.accepted == (0, 2)
    assert report.rejected == ((1, "examples=5: must be at least 10"),)
    np.testing.assert_array_equal(server.x, np.full(4, np.float32(20 * 1 + 60 * 3) / 80))


@WHATEVER
def test_a_rule_of_another_package_scales(need, monkeypatch):
    monkeypatch.setattr(RejectFew, "needs", {need} - {None})
    server = Server(X, "FedAvg", 2, lr=0.1, aggregation=[RejectFew(least=1)])
    report = server.round([*updates(10, steps=200), Update(1, np.full(4, 3, np.float32), 5, examples=10)])
    assert report.factors.tolist() == [0.5, 1]
    np.testing.assert_array_equal(server.x, np.full(4, np.float32((0.5 * 1 + 3) / 2)))


@dataclass(frozen=True)
class CountHalf(Scale):
    """Client 1 counts with half of its examples."""

    def examples(self, group):
        return group.examples * [0.5 if client == 1 else 1 for client in group.clients]


PLACES = {
    "other numbers": ((20, 12, 60), {}),
    "equal numbers": ((20, 20, 20), {}),
    "no numbers": ((None, None, None), {}),
    "sizes": ((None, 10, None), {"clients": {0: 30, 1: 12, 2: 50}}),
    "its size": ((None, None, None), {"clients": {0: 30, 1: 12, 2: 50}}),
    "a cap": ((20, 20, 20), {"aggregation": [CountHalf(), CapExamples(2)]}),
    "a median": ((20, 20, 20), {"aggregation": [RejectLong(10), CountHalf()]}),
    "shards": ((20, 20, 20), {"compute": Compute(shards=2)}),
    "groups": ((20, 20, 20), {"groups": True}),
    "a buffer": ((20, 20, 20), {"policy": RoundPolicy(buffer=3)}),
    "an edge": ((20, 20, 20), {"edge": True, "clients": range(3)}),
    "an edge with sizes": ((None, None, None), {"edge": True, "clients": {0: 30, 1: 12, 2: 50}}),
}


@pytest.mark.sample(1)
@WHATEVER
@pytest.mark.parametrize("place", PLACES)
def test_examples_that_an_own_rule_lowers_count(place, need, caplog, monkeypatch):
    monkeypatch.setattr(CountHalf, "needs", {need} - {None})
    examples, options = PLACES[place]
    options = {"clients": 3, "aggregation": [CountHalf()], **options}
    x0, clients = np.zeros(40_000, np.float32), options.pop("clients")
    x0 = {"a": x0[:30_000], "b": x0[30_000:]}
    ys = [{name: np.full_like(x, k + 1) for name, x in x0.items()} for k in range(3)]
    sent = [Update(k, y, 5, examples=n, round=0) for k, (y, n) in enumerate(zip(ys, examples, strict=True))]
    if options.pop("edge", False):
        edge = EdgeAggregator(x0, "FedAvg", clients, lr=0.1, aggregation=options["aggregation"])
        server = Server(x0, "FedAvg", clients, lr=0.1, compute=Compute(accumulator="exact"))
        with server.open_round() as opened:
            opened.add_partial_sum(edge.fold(server.x, sent, round=0), "edge")
        report = opened.report
    else:
        model = Model(x0, partial={"first": "a"}) if options.pop("groups", False) else x0
        server = Server(model, "FedAvg", clients, lr=0.1, **options)
        report = server.round(sent)
    sizes = [n or (clients[k] if isinstance(clients, dict) else 1) for k, n in enumerate(examples)]
    weights = [sizes[0], sizes[1] / 2, sizes[2]]
    assert (report.accepted, report.rejected) == ((0, 1, 2), ())
    assert report.weights.tolist() == weights
    assert server.x == pytest.approx(np.average([1, 2, 3], weights=weights))
    if place == "equal numbers" and need != "examples":  # a ratio of a median is logged from 10 times on
        assert "10 of 20 from client 1" in caplog.text
    server.close()


def test_an_own_rule_changes_no_weights_before_a_robust_rule():
    server = Server(X, "FedAvg", 3, lr=0.1, aggregation=[CountHalf(), Median()])
    assert server.round(updates(20, 20, 20)).weights.tolist() == [1, 1, 1]


def test_a_folder_keeps_the_chain(tmp_path):
    chain = [CapSteps(3), CapExamples(4), RejectFew(least=7), RejectLong(5), ClipToMedian()]
    with Server(X, "FedAvg", 2, lr=0.1, aggregation=chain, limits=Limits(max_norm=9), storage=tmp_path / "s") as server:
        expected = server.aggregation
    with Server.load(tmp_path / "s") as again:
        assert again.aggregation == expected == (*chain, Mean())
        assert again.limits == Limits(max_norm=9)


def test_names_of_chains_and_rules():
    assert Chain.of("open").rules == OPEN
    assert Chain.of(None) == Chain.of("mean") == Chain.of([]) == Chain((Mean(),))
    assert Chain.of(["CapExamples", "ClipToMedian"]).rules == (CapExamples(), ClipToMedian(), Mean())
    assert Chain.of("clip_to-Median").rules == (ClipToMedian(), Mean())
    assert Chain.of(f"{__name__}:RejectFew").rules == (RejectFew(), Mean())
    weighted = Chain.of(["CapExamples", "ClipToMedian"]).with_weights({0: 1})
    assert weighted.rules == (CapExamples(), ClipToMedian(), Mean({0: 1}))


@pytest.mark.parametrize(
    "chain",
    [
        *("clip", ["Clip"], [3], ["os:path"], 3, Median, [Median]),
        *([type("A", (Scale,), {"needs": {need}})()] for need in ("median", "previous")),
    ],
)
def test_unknown_rules(chain):
    with pytest.raises(UnknownNameError):
        Chain.of(chain)


@pytest.mark.parametrize(
    "chain",
    [
        *([Mean(), ClipToMedian()], [CapExamples(2), CapExamples(3)], [type("Idle", (rules.Rule,), {})()]),
        *([type("Idle", (kind,), {"needs": {"norms"}})()] for kind in (rules.Rule, rules.Combine)),
        *(lambda: [CapExamples(0.5)], lambda: [RejectLong("a")]),
    ],
)
def test_chains_that_contradict_themselves(chain):
    with pytest.raises(RangeError):
        Chain.of(chain() if callable(chain) else chain)


class Faulty(Filter, Scale):
    """A rule of a user; ``faults`` are the methods that replace its own."""

    def decide(self, group):
        return {}


FAULTS = {
    "raises": dict(decide=lambda group: 1 / 0),
    "a factor is NaN": dict(weights=lambda group: np.full(len(group.clients), np.nan)),
    "a factor is negative": dict(weights=lambda group: -np.ones(len(group.clients))),
    "a factor is above 1": dict(weights=lambda group: np.full(len(group.clients), 2.0)),
    "too many factors": dict(weights=lambda group: np.ones(len(group.clients) + 1)),
    "factors are a list": dict(weights=lambda group: [1.0] * len(group.clients)),
    "examples are NaN": dict(examples=lambda group: group.examples * np.nan),
    "examples are negative": dict(examples=lambda group: -group.examples),
    "rejects another update": dict(decide=lambda group: {len(group.clients): "text"}),
    "rejects without a reason": dict(decide=lambda group: {0: None}),
}


@pytest.mark.parametrize("needs", [{"norms"}, {"norms", "medians"}])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_an_own_rule_end_the_round(fault, needs, monkeypatch):
    monkeypatch.setattr(Faulty, "needs", needs)
    server = Server(X, "FedAvg", clients=3, lr=0.1, aggregation=[Faulty()])
    updates = [Update(i, X + 1, steps=1, examples=3) for i in range(3)]
    with monkeypatch.context() as faulty, pytest.raises(AlgorithmError, match="Faulty"):
        for name, method in FAULTS[fault].items():
            faulty.setattr(Faulty, name, staticmethod(method))
        server.round(updates)
    assert (server.round_number, server.x.tolist()) == (0, X.tolist())
    assert server.round(updates).accepted == (0, 1, 2)


@dataclass(frozen=True)
class OwnMean(Mean):
    """A user's rule derived from ``Mean``."""


def test_a_rule_derived_from_the_mean_is_saved_as_itself(tmp_path):
    """It is found by its name; a class without one, and weights, must be passed again."""

    @dataclass(frozen=True)
    class Nameless(Mean):
        pass

    with Server(X, "FedAvg", 3, lr=0.1, aggregation=[CapExamples(2), OwnMean()], storage=tmp_path / "named"):
        pass
    with Server.load(tmp_path / "named") as server:
        assert server.aggregation == (CapExamples(2), OwnMean())
    for name, rule, others in (
        ("nameless", Nameless(), ([Mean()], [Median()])),
        ("weights", OwnMean({0: 1.0, 1: 2.0, 2: 0.0}), ()),
        ("function", OwnMean(lambda claims: claims.steps), ()),
    ):
        with Server(X, "FedAvg", 3, lr=0.1, aggregation=[rule], storage=tmp_path / name) as server:
            server.round([Update(i, X + i, 1) for i in range(3)])
            x = server.x
        with pytest.raises(CheckpointError, match="again"):
            Server.load(tmp_path / name)
        for other in others:
            with pytest.raises(CheckpointError):
                Server.load(tmp_path / name, aggregation=other)
        with Server.load(tmp_path / name, aggregation=[rule]) as server:
            assert server.aggregation == (rule,)
            assert server.x.tobytes() == x.tobytes()
