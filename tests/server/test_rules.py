"""The chain of rules: composition, names, folders, and a rule of another package."""

from dataclasses import dataclass

import numpy as np
import pytest

from fedcore import Limits, Server, Update, rules
from fedcore.errors import AlgorithmError, RangeError, UnknownNameError
from fedcore.rules import OPEN, CapExamples, CapSteps, Chain, ClipToMedian, Mean, RejectLong, Rule
from fedcore.testing import RuleContract

X = np.zeros(4, np.float32)


@dataclass(frozen=True)
class RejectFew(Rule):
    """A rule of another package: it rejects clients with few examples, and halves updates of many steps."""

    least: int = 10
    many: int = 100

    def decide(self, group):
        assert len(group) == len(group.examples)
        for i, examples in enumerate(group.examples):
            if examples < self.least:
                group.reject(i, f"examples={examples:g}: must be at least {self.least}")
            if group.steps[i] > self.many:
                group.scale(i, 0.5)


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
        return RejectFew(least=1, many=2)

    def make_rejected(self, update):
        return update._replace(examples=0.5)


class TestRejectLong(RuleContract):
    def make_rule(self):
        return RejectLong(50)

    def make_rejected(self, update):
        return update._replace(value=update.value * np.float32(1e6))


def updates(*examples, steps=5):
    return [Update(k, np.full(4, k + 1, np.float32), steps, examples=n) for k, n in enumerate(examples)]


@pytest.mark.parametrize("rule", [RejectFew(), f"{__name__}:RejectFew"], ids=["object", "dotted name"])
def test_a_rule_of_another_package(rule):
    server = Server(X, "FedAvg", 3, lr=0.1, aggregation=[rule])
    report = server.round(updates(20, 5, 60))
    assert report.accepted == (0, 2)
    assert report.rejected == ((1, "examples=5: must be at least 10"),)
    np.testing.assert_array_equal(server.x, np.full(4, np.float32(20 * 1 + 60 * 3) / 80))


def test_a_rule_of_another_package_scales():
    server = Server(X, "FedAvg", 2, lr=0.1, aggregation=[RejectFew(least=1)])
    report = server.round([*updates(10, steps=200), Update(1, np.full(4, 3, np.float32), 5, examples=10)])
    assert report.factors.tolist() == [0.5, 1]
    np.testing.assert_array_equal(server.x, np.full(4, np.float32((0.5 * 1 + 3) / 2)))


def test_a_folder_keeps_the_chain(tmp_path):
    chain = [CapSteps(3), CapExamples(4), RejectFew(least=7), RejectLong(5), ClipToMedian()]
    with Server(X, "FedAvg", 2, lr=0.1, aggregation=chain, limits=Limits(max_norm=9), storage=tmp_path / "s") as server:
        expected = server.aggregation
    with Server.load(tmp_path / "s") as again:
        assert again.aggregation == expected == (*chain, Mean())
        assert again.limits == Limits(max_norm=9)


def test_the_rules_change_between_rounds():
    server = Server(X, "FedAvg", 3, lr=0.1)
    server.change(aggregation=[RejectFew()])
    report = server.round(updates(20, 5, 60))
    assert report.accepted == (0, 2)
    assert report.changed == {"aggregation": ["RejectFew(least=10, many=100)", "Mean(weights=None)"]}


def test_names_of_chains_and_rules():
    assert Chain.of("open").rules == OPEN
    assert Chain.of(None) == Chain.of("mean") == Chain.of([]) == Chain((Mean(),))
    assert Chain.of(["CapExamples", "ClipToMedian"]).rules == (CapExamples(), ClipToMedian(), Mean())
    assert Chain.of("clip_to-Median").rules == (ClipToMedian(), Mean())
    assert Chain.of(f"{__name__}:RejectFew").rules == (RejectFew(), Mean())
    weighted = Chain.of(["CapExamples", "ClipToMedian"]).with_weights({0: 1})
    assert weighted.rules == (CapExamples(), ClipToMedian(), Mean({0: 1}))


@pytest.mark.parametrize("chain", ["clip", ["Clip"], [3], ["os:path"]])
def test_unknown_rules(chain):
    with pytest.raises(UnknownNameError):
        Chain.of(chain)


@pytest.mark.parametrize(
    "chain",
    [[Mean(), ClipToMedian()], [CapExamples(2), CapExamples(3)], lambda: [CapExamples(0.5)], lambda: [RejectLong("a")]],
)
def test_chains_that_contradict_themselves(chain):
    with pytest.raises(RangeError):
        Chain.of(chain() if callable(chain) else chain)


class Faulty(Rule):
    """A rule of a user; ``fault`` is what it does to the group."""

    fault = None

    def decide(self, group):
        self.fault(group)


FAULTS = {
    "raises": lambda group: 1 / 0,
    "a factor is NaN": lambda group: group.scale(0, np.nan),
    "a factor is negative": lambda group: group.scale(0, -1.0),
    "a factor is above 1": lambda group: setattr(group, "factors", np.full(len(group), 2.0)),
    "too many factors": lambda group: setattr(group, "factors", np.ones(len(group) + 1)),
    "factors are a list": lambda group: setattr(group, "factors", [1.0] * len(group)),
    "examples are NaN": lambda group: group.cap_examples(np.nan),
    "examples are negative": lambda group: group.cap_examples(-1),
    "rejects another update": lambda group: group.reject(len(group), "text"),
    "rejects without a reason": lambda group: group.reject(0, None),
}


@pytest.mark.parametrize("needs_medians", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_an_own_rule_end_the_round(fault, needs_medians, monkeypatch):
    monkeypatch.setattr(Faulty, "fault", staticmethod(FAULTS[fault]))
    monkeypatch.setattr(Faulty, "needs_medians", needs_medians)
    server = Server(X, "FedAvg", clients=3, lr=0.1, aggregation=[Faulty()])
    updates = [Update(i, X + 1, steps=1, examples=3) for i in range(3)]
    with pytest.raises(AlgorithmError, match="Faulty"):
        server.round(updates)
    assert (server.round_number, server.x.tolist()) == (0, X.tolist())
    monkeypatch.setattr(Faulty, "fault", lambda self, group: None)
    assert server.round(updates).accepted == (0, 1, 2)
