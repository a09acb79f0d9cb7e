"""Every way of delivery has the bits of a list, whatever the batch size, also with rejections and caps."""

import numpy as np
import pytest

from fedcore import Compute, RoundPolicy, Server, Update
from fedcore.algorithms import FedAvg, Linear, Step
from fedcore.rules import CapExamples, ClipToMedian, Mean, RejectLong
from tests.kit import flat
from tests.server.deliveries import DELIVERIES, as_list, outcome
from tests.server.rounds import METHODS, everything, made, n, steps_of
from tests.server.test_examples import replies, server_of
from tests.server.test_norm_limits import N, honest, lying
from tests.server.test_norm_limits import server_of as limited
from tests.server.test_rules import RejectFew


def plain(method, **options):
    def updates(server, t):
        rng = np.random.default_rng(t)
        cohort = rng.permutation(9)[: rng.integers(1, 10)].tolist()
        sent = []
        for i in cohort:
            y, work = (server.x + rng.normal(size=4099)).astype(np.float32), rng.integers(1, 50, size=2).tolist()
            sent.append(Update(i, y, steps_of(server, work[0]), work[1]))
        return sent

    def make(**o):
        x0, more = np.zeros(4099, np.float32), {"clients": 9, **options, **o}
        return made(method, x0, **more) if isinstance(method, str) else Server(x0, method(), lr=0.1, **flat(**more))

    return make, updates


class Uniform(FedAvg):
    """Declares that claims do not count, but weighs by examples."""

    weighs_claims = False


class Twice(FedAvg):
    def step(self, cohort):
        return Step(v=Linear(A=2 / cohort.W))


def unusual(method, **options):
    make, usual = plain(method, **options)
    changes = [{}, {"examples": None}, {"client": 8}, {"steps": 0}, {"round": 0}]
    changes += [{"value": np.full(4099, y, np.float32)} for y in (3e38, 3e29)]

    def updates(server, t):
        return [update._replace(**change) for update, change in zip(usual(server, t + 3), changes, strict=False)]

    return make, updates


def with_lies(method):
    def updates(server, t):
        rng = np.random.default_rng([t, 1])
        sent = honest(server, rng.permutation(N)[: rng.integers(1, N + 1)].tolist(), np.random.default_rng(t))
        for i, lie in enumerate(rng.random(len(sent))):
            if lie < 0.2:
                sent[i] = lying(server, sent[i])
            elif lie < 0.3:
                sent[i] = sent[i]._replace(value=np.full(n, np.nan, np.float32))
        return sent

    return lambda **o: limited(method, **o), updates


def with_claims(method, **options):
    def updates(server, t):
        rng = np.random.default_rng([t, 2])
        claims = [10**9 if lie < 0.2 else int(rng.integers(1, 300)) for lie in rng.random(rng.integers(1, N + 1))]
        sent = replies(server, claims, t)
        if t % 3 == 1:
            sent[0] = sent[0]._replace(value=np.full(n, np.nan, np.float32))
        return sent

    return lambda **o: server_of(method, **options, **o), updates


def with_rules():
    def updates(server, t):
        rng = np.random.default_rng([t, 3])
        ys = [(rng.normal(size=4) * 10.0 ** rng.integers(-1, 2)).astype(np.float32) for _ in range(30)]
        return [Update(k, y, 5, examples=int(rng.integers(1, 50))) for k, y in enumerate(ys)]

    chain = [RejectFew(least=2), CapExamples(2), RejectLong(3), ClipToMedian(), Mean()]

    def make(batch_size=None):
        compute = Compute(batch_size=batch_size)
        return Server(np.zeros(4, np.float32), "FedAvg", 30, lr=0.1, aggregation=chain, compute=compute)

    return make, updates


OPTIONS = [dict(clients=dict.fromkeys(range(9), 5)), dict(server_lr=0.5), dict(weights=dict.fromkeys(range(9), 2.0))]
OPTIONS += [dict(accumulator="float64"), dict(accumulator="exact"), dict(max_staleness=2), dict(max_norm=90.0)]
OPTIONS += [dict(reject_long=1.001), dict(cap_examples=1.5), dict(aggregation="open"), dict(diagnostics=True)]
SCENARIOS = {
    "a chain of rules": with_rules(),
    **{method: plain(method) for method in ("FedAvg", "MIFA", "MimiC")},
    **{kind.__name__: plain(kind) for kind in (Uniform, type("Shy", (FedAvg,), {"hides_mean": True}), Twice)},
    **{f"{method}, unusual": unusual(method) for method in ("FedAvg", "FedProx", "MIFA", "MimiC")},
    **{f"FedAvg, unusual, {options}"[:45]: unusual("FedAvg", **options) for options in OPTIONS},
    **{f"{method}, clipped": plain(method, clip=True, cap_steps=2) for method in ("FedAvgM", "SCAFFOLD", "FedDyn")},
    **{f"{method}, lies": with_lies(method) for method in METHODS},
    **{f"{method}, claims": with_claims(method) for method in ("FedAvg", "FedProx", "one's own")},
    "FedAvg, claims and lengths": with_claims("FedAvg", reject_long=10.0),
}


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.sample(1)
def test_every_delivery_has_the_bits_of_a_list(scenario, batch_size):
    make, updates = SCENARIOS[scenario]

    def run(deliver, **options):
        server = make(**options)
        reports = [outcome(deliver(server, updates(server, t))) for t in range(4)]
        return everything(server, list(server.clients)), reports

    expected = run(as_list)
    assert ("lies" not in scenario) or sum(len(rejected) for _, rejected, *_ in expected[1]) > 3
    for name, deliver in DELIVERIES.items():
        assert run(deliver, batch_size=batch_size) == expected, name


HOSTILE = [None, True, False, 0, -1, 1, 2, 10**30, 2.5, 0.0, -0.0, np.nan, np.inf, -np.inf, "5", b"5", [], [2]]
HOSTILE += [
    object(),
    np.int64(2),
    np.int8(-1),
    np.float32(0.1),
    np.float64("nan"),
    np.array(2),
    np.array([1.0, 2.0]),
    1j,
    0.1,
]


def in_a_round(add):
    def delivered(server, update):
        with server.open_round() as round:
            add(round, update)
        return round.report.accepted, round.report.rejected

    return delivered


def by_round(form):
    def delivered(server, update):
        report = server.round(form([update]))
        return report.accepted, report.rejected

    return delivered


ONE = {
    "add": in_a_round(lambda round, update: round.add(**update._asdict())),
    "a batch": in_a_round(lambda round, update: round.add_batch([update])),
    "a list": by_round(list),
    "a generator": by_round(iter),
}


@pytest.mark.parametrize("field", Update._fields)
@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "SCAFFOLD"])
def test_every_way_of_delivery_decides_alike_on_a_hostile_field(method, field):
    good = Update(0, np.ones(3, np.float32), 5, 2)
    for value in HOSTILE:
        found = {}
        for way, deliver in ONE.items():
            server = Server(np.zeros(3, np.float32), method, clients=2, lr=0.1)
            try:
                found[way] = deliver(server, good._replace(**{field: value}))
            except Exception as error:
                found[way] = type(error)
        assert len({str(one) for one in found.values()}) == 1, (value, found)


@pytest.mark.parametrize("field", Update._fields)
def test_a_buffer_decides_alike_on_a_hostile_field(field):
    good = Update(0, np.ones(3, np.float32), 5, 2, round=0)
    for value in HOSTILE:
        found = []
        for several in (False, True):
            server = Server(np.zeros(3, np.float32), "FedAvg", clients=2, lr=0.1, policy=RoundPolicy(buffer=2))
            updates = [good._replace(client=1), good._replace(**{field: value}), good]
            try:
                reports = [
                    report
                    for part in ([updates] if several else [[one] for one in updates])
                    for report in server.push(part)
                ]
                found.append([(report.accepted, report.rejected) for report in reports])
            except Exception as error:
                found.append(type(error))
        assert str(found[0]) == str(found[1]), value
