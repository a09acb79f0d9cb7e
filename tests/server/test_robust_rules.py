"""Robust rules: their definitions, rounds with them, and what they cannot be combined with."""

import importlib.util
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcore
from fedcore import Compute, Limits, Server, Storage, Update, combines, kernels
from fedcore.algorithms import REGISTRY
from fedcore.errors import AlgorithmError, RangeError
from fedcore.rules import (
    Bucketing,
    Bulyan,
    CentredClipping,
    Chain,
    ClipNorm,
    ClipToMedian,
    Combination,
    GeometricMedian,
    Krum,
    MeaMed,
    Mean,
    Median,
    MixingRule,
    MultiKrum,
    NearestNeighborMixing,
    PrivateMean,
    RejectLong,
    RobustRule,
    TrimmedMean,
)
from tests.oracle import rules as oracle


def combined(aggregation, h, round=0, previous=None):
    """Return the robust combination of the rows of h."""
    h = [np.float32(row) for row in h]
    more = [] if previous is None else [np.float32(previous)]
    given = [None] * (len(h) + len(more)), [*h, *more], -np.ones(len(h) + len(more))
    found = Chain.of(aggregation).combination(len(h), lambda: kernels.gram_matrix(*given), round)
    out = np.empty(len(h[0]), np.float32)
    found.write(*given, out)
    return out


# Each rule and its definition, of k vectors and f liars.
DEFINITIONS = {
    "median": (lambda f: Median(), lambda h, f: oracle.median(h)),
    "trimmed mean": (TrimmedMean, oracle.trimmed_mean),
    "MeaMed": (MeaMed, lambda h, f: oracle.near_median(h, len(h) - f)),
    "Krum": (Krum, oracle.krum),
    "Multi-Krum": (MultiKrum, lambda h, f: oracle.krum(h, f, len(h) - f)),
    "Multi-Krum of two": (lambda f: MultiKrum(f, 2), lambda h, f: oracle.krum(h, f, 2)),
    "Bulyan": (Bulyan, oracle.bulyan),
    "geometric median": (lambda f: GeometricMedian(8), lambda h, f: oracle.geometric_median(h, 8, 1e-6)),
    "clipping": (lambda f: ClipNorm(), lambda h, f: oracle.clip_norm(h)),
    "NNM and trimmed mean": (
        lambda f: [NearestNeighborMixing(f), TrimmedMean(f)],
        lambda h, f: oracle.trimmed_mean(oracle.nearest_neighbor_mixing(h, f), f),
    ),
    "NNM and Krum": (
        lambda f: [NearestNeighborMixing(f), Krum(f)],
        lambda h, f: oracle.krum(oracle.nearest_neighbor_mixing(h, f), f),
    ),
    "NNM and MeaMed": (
        lambda f: [NearestNeighborMixing(f), MeaMed(f)],
        lambda h, f: oracle.near_median(oracle.nearest_neighbor_mixing(h, f), len(h) - f),
    ),
}
SIZES = {"usual": 1.0, "huge": 1e30, "tiny": 1e-30, "subnormal": 1e-40}


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(max_examples=40)
@given(f=st.integers(0, 2), more=st.integers(0, 8), n=st.integers(1, 70), seed=st.integers(0, 2**32), data=st.data())
def test_a_rule_follows_its_definition(name, f, more, n, seed, data):
    kind = data.draw(st.sampled_from([*SIZES, "ties", "a far liar"]))
    rng, k = np.random.default_rng(seed), 4 * f + 3 + more
    h = rng.normal(size=(k, n)) * SIZES.get(kind, 1.0)
    h = np.round(h) if kind == "ties" else h
    if kind == "a far liar" and f:
        h[0] *= 1e12
    h = np.float32(h).astype(np.float64)
    make, definition = DEFINITIONS[name]
    if "Krum" in name and has_close_scores(h if "NNM" not in name else oracle.nearest_neighbor_mixing(h, f), f):
        return  # the choice hangs on the last bits of the scores
    due = definition(h, f)
    scale = max(abs(due).max(), np.median(abs(h)), 1e-44)
    np.testing.assert_allclose(combined(make(f), h), due, rtol=1e-6, atol=1e-6 * scale + 1e-43)


def has_close_scores(h, f):
    order = np.sort([np.sort(np.delete(row, i))[: len(h) - f - 2].sum() for i, row in enumerate(oracle.distances(h))])
    gaps = np.diff(order)
    return ((gaps < 1e-9 * order[1:]) & (gaps > 0)).any()


def test_values_computed_by_hand():
    h = [[1.0, 0], [2, 0], [4, 1], [9, 0], [100, -7]]
    np.testing.assert_array_equal(combined("median", h), [4, 0])
    np.testing.assert_array_equal(combined(TrimmedMean(1), h), [5, 0])
    np.testing.assert_array_equal(combined(MeaMed(2), h), np.float32([7 / 3, 0]))  # 1, 2 and 4 are nearest 4
    ties = np.array([[-5.0], [-3], [-1], [1], [3], [5]])
    np.testing.assert_array_equal(combined(MeaMed(1), ties), [0])  # without -5, or without 5
    np.testing.assert_array_equal(combined(MeaMed(2), [[1.0], [2], [2], [3], [9]]), np.float32([2]))  # 1 or 3
    np.testing.assert_array_equal(combined(MeaMed(3), [[0.0], [2], [2], [4], [4], [9], [9]]), np.float32([3]))
    # The two smallest squared distances: 1 + 10, 1 + 5, 5 + 10, 26 + 49, ...
    np.testing.assert_array_equal(combined(Krum(1), h), [2, 0])
    np.testing.assert_array_equal(combined(MultiKrum(1, 2), h), [1.5, 0])
    np.testing.assert_array_equal(combined(CentredClipping(5.0), h[:2], previous=[0, 0]), [1.5, 0])
    np.testing.assert_array_equal(combined(CentredClipping(1.0), h[3:4], previous=[5, 0]), [6, 0])
    np.testing.assert_array_equal(combined(ClipNorm(2.0), [[1, 0], [0, 8]]), [0.5, 1])
    np.testing.assert_array_equal(combined(ClipNorm(), [[1, 0], [0, 8], [0, 2]]), np.float32([1 / 3, 4 / 3]))
    np.testing.assert_array_equal(combined(ClipNorm(), [[0, 0], [0, 0], [1, 0]]), [0, 0])


def test_equal_scores_take_the_first_client():
    np.testing.assert_array_equal(combined(Krum(1), [[5.0], [1], [1], [5], [1], [5]]), [5])
    np.testing.assert_array_equal(combined(Krum(0), [[3.0], [1], [2], [0]]), [1])
    h = np.random.default_rng(0).integers(0, 3, (60, 2)).astype(np.float64)
    due = oracle.median(oracle.nearest_neighbor_mixing(h, 25))
    np.testing.assert_allclose(combined([NearestNeighborMixing(25), Median()], h), due, rtol=1e-6)
    h = np.eye(60) * np.random.default_rng(0).integers(1, 3, 60)  # two different scores
    np.testing.assert_allclose(combined(MultiKrum(20, 3), h), oracle.krum(h, 20, 3), rtol=1e-6)


def test_equal_vectors_are_their_geometric_median():
    np.testing.assert_array_equal(combined(GeometricMedian(), np.full((5, 3), 7.0)), [7, 7, 7])


@pytest.mark.parametrize(
    ("make", "name", "low", "high"),
    [
        (TrimmedMean, "f", 0, 2**31),
        (NearestNeighborMixing, "f", 0, 2**31),
        (MultiKrum, "m", 1, None),
        (GeometricMedian, "passes", 1, 10**6),
        (partial(CentredClipping, 1.0), "passes", 1, 10**6),
        (Bucketing, "s", 1, 2**31),
        (Bucketing, "seed", 0, 2**63 - 1),
        (partial(PrivateMean, 1.0, 1.0, 10.0), "rounds", 1, None),
        (partial(PrivateMean, 1.0, 1.0, 10.0), "seed", 0, 2**64 - 1),
    ],
)
def test_options_that_are_integers(make, name, low, high):
    for value in (low, high):
        if value is not None:
            stored = getattr(make(**{name: np.uint64(value)}), name)
            assert (type(stored), stored) == (int, value)
    for value in (low - 1, low + 0.5, *([] if high is None else [high + 1])):
        with pytest.raises(RangeError, match=f"^{name}="):
            make(**{name: value})


@pytest.mark.parametrize(
    ("make", "name", "low", "high", "includes"),
    [
        (GeometricMedian, "nu", 0, 1, (False, True)),
        (CentredClipping, "tau", 0, np.inf, (False, False)),
        (ClipNorm, "most", 0, np.inf, (False, False)),
        (RejectLong, "ratio", 1, np.inf, (True, False)),
        (partial(PrivateMean, 1.0, 1.0, 10.0), "rate", 0, 1, (False, True)),
        (partial(PrivateMean, 1.0, 1.0, 10.0), "quantile", 0, 1, (False, False)),
    ],
)
def test_options_that_are_numbers(make, name, low, high, includes):
    stored = getattr(make(**{name: np.float32((low + min(high, 2)) / 2)}), name)
    assert (type(stored), stored) == (float, (low + min(high, 2)) / 2)
    for value, is_included in zip((low, high), includes, strict=True):
        if is_included:
            assert getattr(make(**{name: value}), name) == value
        else:
            with pytest.raises(RangeError, match=f"^{name}="):
                make(**{name: value})


@pytest.mark.parametrize(
    ("chain", "least"),
    [
        (MeaMed(2), 5),
        (Krum(2), 7),
        (Bulyan(2), 11),
        ([NearestNeighborMixing(2), Median()], 3),
        ([Bucketing(3), Krum(0)], 7),
    ],
)
def test_the_least_number_of_updates(chain, least):
    combined(chain, np.ones((least, 2)))
    with pytest.raises(RangeError, match=f"got ({least - 1} updates|2 mixed vectors of {least - 1} updates|2; add)"):
        combined(chain, np.ones((least - 1, 2)))


@dataclass(frozen=True)
class Doubled(MixingRule):
    """A mixing rule of another package, with as many vectors as updates."""

    def matrix(self, k, products, round):
        return 2 * np.eye(k)


def test_a_mixing_rule_of_another_package():
    np.testing.assert_array_equal(combined([Doubled(), TrimmedMean(1)], [[1.0], [2], [30]]), [4])


@given(k=st.integers(3, 9), passes=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_centred_clipping_starts_from_the_last_result(k, passes, seed):
    h, z = np.random.default_rng(seed).normal(size=(k, 20)).astype(np.float32), np.full(20, 0.5, np.float32)
    due = oracle.centred_clipping(h.astype(np.float64), 2.0, passes, z.astype(np.float64))
    np.testing.assert_allclose(combined(CentredClipping(2.0, passes), h, previous=z), due, atol=1e-6)
    mixed = oracle.nearest_neighbor_mixing(h.astype(np.float64), 1)
    due = oracle.centred_clipping(mixed, 2.0, passes, z.astype(np.float64))
    chain = [NearestNeighborMixing(1), CentredClipping(2.0, passes)]
    np.testing.assert_allclose(combined(chain, h, previous=z), due, atol=1e-6)
    mixed = oracle.nearest_neighbor_mixing(Bucketing(2).matrix(k, None, 0) @ h.astype(np.float64), 1)
    due = oracle.centred_clipping(mixed, 2.0, passes, z.astype(np.float64))
    np.testing.assert_allclose(combined([Bucketing(2), *chain], h, previous=z), due, atol=1e-6)


def test_buckets_are_means_of_all_clients():
    h = np.random.default_rng(0).normal(size=(7, 5))
    np.testing.assert_allclose(combined([Bucketing(7), Median()], h), h.mean(axis=0), atol=1e-6)
    found = [combined([Bucketing(3), Median()], h, round) for round in (0, 0, 1)]
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()
    buckets = [np.flatnonzero(row).tolist() for row in Bucketing(2, seed=7).matrix(5, None, 3)]
    assert buckets == [[3, 4], [1, 2], [0]]  # the same in all versions


def test_the_geometric_median_withstands_far_liars():
    h = np.float32([*np.random.default_rng(0).normal(size=(9, 30)), *np.full((4, 30), 1e14)])
    due = oracle.geometric_median(h.astype(np.float64), 100, 1e-6)
    assert np.linalg.norm(due) < 4
    np.testing.assert_allclose(combined(GeometricMedian(), h), due, atol=1e-5)


def test_close_vectors_far_from_zero():
    """In float32, |a|^2 + |b|^2 - 2 ab of these vectors is noise, and the liar, whose vector differs most, may win."""
    rng = np.random.default_rng(3)
    h = np.float32(100 + 1e-3 * rng.normal(size=(7, 1000)))
    h[6] += np.float32(0.05)
    np.testing.assert_array_equal(combined(Krum(1), h), oracle.krum(h.astype(np.float64), 1).astype(np.float32))
    assert (combined(Krum(1), h) != h[6]).any()


def byzfl():
    """Return byzfl's aggregators, without its training code, which needs torchvision."""
    if (found := importlib.util.find_spec("byzfl")) is None:
        pytest.skip("byzfl is not installed")
    package = types.ModuleType("byzfl")
    package.__path__ = [str(Path(found.origin).parent)]
    sys.modules.setdefault("byzfl", package)
    from byzfl.aggregators import aggregators, preaggregators

    return aggregators, preaggregators


def test_byzfl_has_the_same_results():
    theirs, before = byzfl()
    rng = np.random.default_rng(5)
    for k, f in ((7, 1), (11, 2), (30, 6)):
        h = np.float32(rng.normal(size=(k, 200)) + np.arange(k)[:, None] / k)
        wide = h.astype(np.float64)
        pairs = {
            "median": (Median(), theirs.Median()(wide)),
            "trimmed": (TrimmedMean(f), theirs.TrMean(f)(wide)),
            "MeaMed": (MeaMed(f), theirs.Meamed(f)(wide)),
            "Krum": (Krum(f), theirs.Krum(f + 1)(wide)),  # byzfl counts an update among its own neighbors
            "Multi-Krum": (MultiKrum(f, k - f - 1), theirs.MultiKrum(f + 1)(wide)),
            "geometric median": (GeometricMedian(1000), theirs.GeometricMedian(nu=1e-12, T=1000)(wide)),
            "NNM": ([NearestNeighborMixing(f), Median()], theirs.Median()(before.NNM(f)(wide))),
            "clipping": (ClipNorm(12.0), before.Clipping(12.0)(wide.copy()).mean(axis=0)),
        }
        for name, (ours, due) in pairs.items():
            np.testing.assert_allclose(combined(ours, h), due, atol=2e-6, err_msg=name)
        found = combined(CentredClipping(3.0, 3), h, previous=np.zeros(200))
        np.testing.assert_allclose(found, theirs.CenteredClipping(L=3, tau=3.0)(wide), atol=2e-6)


# Rounds.


REFUSED = {"FedAU", "FedAWE", "FedExP", "FlexibleFedAvg"}
BOUNDED = {"FedDyn", "FedStale", "FedVARP", "MIFA", "MimiC", "SCAFFOLD", "SCAFFOLDM", "SCAFFOLDMVR"}
"""Methods that also sum vectors of all clients as sent, so that a chain must bound these."""

RULES = {
    **{name: make(1) for name, (make, _) in DEFINITIONS.items()},
    "median": "median",
    "Krum": Krum(1),
    "Bulyan": [Bulyan(1)],
    "centred clipping": [CentredClipping(0.5)],
    "mixed": [ClipToMedian(), NearestNeighborMixing(1), Bucketing(2), GeometricMedian(8)],
}
X = {"w": np.linspace(-1, 1, 40, dtype=np.float32).reshape(8, 5), "b": np.zeros(3, np.float32)}


def server(aggregation, method="FedAvg", clients=8, **options):
    return Server(X, method, clients, lr=0.1, aggregation=aggregation, **options)


def sent(k=8, seed=0):
    rng = np.random.default_rng(seed)
    models = [{name: w + rng.normal(size=w.shape).astype(np.float32) for name, w in X.items()} for _ in range(k)]
    return [Update(i, model, 5, examples=10 + 90 * (i == 0)) for i, model in enumerate(models)]


def flat(model):
    return np.concatenate([np.float32(w).ravel() for w in model.values()])


def cohort(kind, rng):
    """The vectors of eight clients, float32[8, 5]."""
    h = rng.normal(size=(8, 5)) * min(SIZES.get(kind, 1.0), 1e28)  # a server sums norms up to 1e30
    if kind == "ties":
        h = np.round(h)
    if kind == "a far liar":
        h[3] *= 1e12
    if kind == "equal liars":
        h[:3] = -9 * h.mean(axis=0)
    if kind == "opposite pairs":  # every sum and every score has a tie
        h[4:] = -h[:4]
    return np.float32(h)


KINDS = [*SIZES, "ties", "a far liar", "equal liars", "opposite pairs"]


@pytest.mark.parametrize("orders", [20, pytest.param(10_000 // len(KINDS), marks=pytest.mark.endurance)])
@pytest.mark.parametrize("name", RULES)
def test_the_order_of_arrival_has_no_effect(name, orders):
    rng, x0 = np.random.default_rng(0), np.zeros(5, np.float32)
    one = Server(x0, "FedAvg", 8, lr=0.1, aggregation=RULES[name])
    start = one._backend.snapshot
    for kind in KINDS:
        found, updates = set(), [Update(i, y, 5, 10 + 90 * (i == 0)) for i, y in enumerate(cohort(kind, rng))]
        for _ in range(orders):
            one._backend.snapshot = start  # faster than a new server
            assert not one.round([updates[i] for i in rng.permutation(8)]).rejected
            found.add(one.x.tobytes())
        assert len(found) == 1, kind
        assert (x0.tobytes() not in found) or kind in ("ties", "opposite pairs", "subnormal")


@pytest.mark.parametrize("method", sorted(set(REGISTRY) - REFUSED - BOUNDED))
def test_the_median_moves_x_by_the_median(method):
    models = np.array([flat(update.value) for update in sent()])
    one, start = server("median", method), flat(X)
    steps, share = one.algorithm.most_steps or 5, getattr(one.algorithm, "alpha", 1.0)  # of FedAsync
    assert one.round([update._replace(steps=steps) for update in sent()]).accepted == tuple(range(8))
    np.testing.assert_allclose(one.x, start + share * (np.median(models, axis=0) - start), atol=1e-6)


def test_memory_that_the_caller_reuses():
    whole, again = server("median"), server("median")
    whole.round(sent())
    memory = {name: w.copy() for name, w in X.items()}
    with again.open_round() as round:
        for update in sent():
            for name, w in update.value.items():
                memory[name][...] = w
            round.add(update.client, memory, steps=5, examples=10)
    np.testing.assert_array_equal(again.x, whole.x)
    flats, reused = server("median"), np.empty((8, len(whole.x)), np.float32)
    reused[:] = [flat(update.value) for update in sent()]
    with flats.open_round() as round:
        round.add_batch([Update(i, row, 5, examples=3) for i, row in enumerate(reused)])
        reused[:] = 9
    np.testing.assert_array_equal(flats.x, whole.x)


def test_updates_of_sixteen_bits():
    one = Server({"w": np.zeros(4, np.float16)}, "FedAvg", 5, lr=0.1, aggregation="median")
    one.round([Update(i, {"w": np.full(4, y, np.float16)}, 1) for i, y in enumerate((1, 2, 3, 50, -9))])
    np.testing.assert_array_equal(one.x, np.full(4, 2))


@pytest.mark.parametrize(("rule", "due"), [("median", [4, 3]), (Krum(1), [4, 3]), (CentredClipping(1e9), [10, 5.2])])
def test_buffers_are_combined_as_parameters_are(rule, due):
    start = {"w": np.zeros(4, np.float32), "running_mean": np.ones(3, np.float32)}
    one = Server(start, "FedAvg", 5, lr=0.1, aggregation=rule)
    with one.open_round() as round:
        for i, (w, mean) in enumerate([(1, 1), (3, 2), (4, 3), (5, 6), (37, 14)]):
            round.add(i, {"w": np.full(4, w, np.float32), "running_mean": np.full(3, mean, np.float32)}, steps=2)
    np.testing.assert_allclose(one.x, np.repeat(np.float32(due), [4, 3]), rtol=1e-6)
    with one.open_round() as round:  # gradients have no buffers
        for i in range(5):
            round.add(i, np.ones(4, np.float32), steps=1, kind="gradient")
    np.testing.assert_allclose(one.x[4:], due[1], rtol=1e-6)


def test_a_server_keeps_the_result_of_centred_clipping():
    one = Server(np.zeros(1, np.float32), "FedAvg", 3, lr=0.1, aggregation=[CentredClipping(1.0)])
    for due in (-1, -3):  # of a move by -3: z = -1, then -1 - 1
        one.round([Update(i, one.x - 3, 1) for i in range(3)])
        np.testing.assert_allclose(one.x, due, rtol=1e-6)


def test_rejected_updates_do_not_count():
    one = server([RejectLong(3.0), "TrimmedMean"], clients=10)
    updates = sent(10)
    updates[3] = updates[3]._replace(value={name: w * np.float32(np.nan) for name, w in X.items()})
    updates[4] = updates[4]._replace(value={name: w + 1e6 for name, w in X.items()})
    report = one.round(updates)
    assert [client for client, _ in report.rejected] == [3, 4]
    models = np.array([flat(updates[i].value) for i in range(10) if i not in (3, 4)])
    np.testing.assert_allclose(one.x, np.sort(models, axis=0)[1:-1].mean(axis=0), atol=1e-6)


def test_too_few_updates_leave_the_round_open():
    one, updates = server(Krum(2)), sent()
    with one.open_round() as round:
        for update in updates[:6]:
            round.add(update.client, update.value, steps=5, examples=1)
        with pytest.raises(RangeError, match=r"Krum\(f=2\) needs at least 7 updates, got 6"):
            round.finish()
        assert round.is_open
        round.add(6, updates[6].value, steps=5, examples=1)
    assert one.round_number == 1
    with one.open_round():
        pass
    assert one.round_number == 2  # without updates, x stays


@pytest.mark.parametrize("method", sorted(BOUNDED))
def test_with_equal_weights_a_method_with_rows_is_as_with_the_mean(method):
    pair = [server([ClipToMedian(), last], method) for last in (Mean(), MultiKrum(0))]
    for round in range(5):
        for one in pair:
            updates = sent(seed=round)[round % 3 :]
            if one.algorithm.second_vector is not None:
                controls = np.random.default_rng(round).normal(size=(8, 43)).astype(np.float32)
                updates = [update._replace(control=controls[update.client]) for update in updates]
            assert len(one.round(updates).accepted) == len(updates)
        due, found = ([one.x, one.v, one.total(), *map(one.row, range(8))] for one in pair)
        for number, (a, b) in enumerate(zip(due, found, strict=True)):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4, err_msg=f"{number}")


def test_fedvarp_with_a_median_by_hand():
    one = Server(np.zeros(6, np.float32), "FedVARP", 5, lr=0.1, aggregation="median", limits=Limits(max_norm=1e6))
    rows, rng = np.zeros((5, 6)), np.random.default_rng(0)
    for cohort in ([0, 1, 2, 3, 4], [1, 3, 4], [0, 2, 3]):
        x, total = one.x.astype(np.float64), rows.sum(axis=0)
        h = rng.normal(size=(5, 6)) * np.array([1, 1, 1, 1e3, 1])[:, None]
        one.round([Update(i, np.float32(x - 0.1 * h[i]), 1) for i in cohort])
        v = np.median(h[cohort] - rows[cohort], axis=0) + total / 5
        rows[cohort] = h[cohort]
        np.testing.assert_allclose(one.x, x - 0.1 * v, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(one.total(), rows.sum(axis=0), rtol=1e-4, atol=1e-2)
        np.testing.assert_allclose([one.row(i) for i in range(5)], rows, rtol=1e-4, atol=1e-2)


def test_methods_by_what_they_need():
    conflicts = {name: {one.b for one in combines(name, "Median").conflicts} for name in REGISTRY.own}
    assert {name for name, found in conflicts.items() if found == {"unbounded sums"}} == set(BOUNDED)
    assert {name for name, found in conflicts.items() if found - {"unbounded sums"}} == set(REFUSED)


def test_chains_in_another_order():
    with pytest.raises(RangeError, match="aggregation: NearestNeighborMixing needs a robust rule"):
        Chain.of([NearestNeighborMixing(1), Mean()])
    with pytest.raises(RangeError, match="aggregation: Median must be the last"):
        Chain.of([Median(), Mean()])


@pytest.mark.parametrize("way", ["list", "one by one", "batches", "journal", "shards"])
@pytest.mark.parametrize("method", ["FedAvg", "FedAvgM", *sorted(BOUNDED)])
@pytest.mark.parametrize("rules", [[ClipToMedian(), Median()], [RejectLong(3), TrimmedMean(1)]], ids=repr)
@pytest.mark.sample(1)
def test_a_chain_with_medians_does_not_depend_on_the_order_of_arrival(rules, method, way, tmp_path):
    """The same bits, reports, and windows; in ``journal`` the server is loaded again in the middle of each round."""
    found = []
    for turn in range(3):
        rng, states = np.random.default_rng(turn), []
        place = Storage(tmp_path / f"{turn}", journal=True) if way == "journal" else None
        compute = Compute(shards=2 if way == "shards" else None, batch_size=3)
        x = np.zeros(20_000 if way == "shards" else 43, np.float32)
        one = Server(x, method, 13, lr=0.1, aggregation=rules, storage=place, compute=compute)
        for t in range(3):
            lengths, made = 2.0 ** np.random.default_rng(t).normal(size=(13, 1)), np.random.default_rng(t)
            vectors = np.float32(
                lengths * made.normal(size=(13, len(x))) * np.where(np.arange(13) == 12, 9, 1)[:, None]
            )
            second = one.algorithm.second_vector is not None
            updates = [Update(i, one.x + v, 1 + i % 3, control=v if second else None) for i, v in enumerate(vectors)]
            updates = [updates[i] for i in (rng.permutation(13) if turn else range(13))]
            opened = one.open_round()
            for some in [updates[:4], updates[4:]] if way in ("batches", "journal") else [[u] for u in updates]:
                if way == "list":
                    continue
                opened.add_batch(some)
                if way == "journal" and some[0] is updates[0]:
                    one.close()
                    one = Server.load(place.path)
                    opened = one.open_round()
            if way == "list":
                opened.abort()
            report = one.round(updates) if way == "list" else opened.finish()
            states.append((report.accepted, sorted(report.rejected), report.factors.tobytes(), one.x.tobytes()))
        total = one.total()
        found.append((states, None if total is None else total.tobytes()))
        one.close()
    assert found[0] == found[1] == found[2]


class Faulty(RobustRule):
    """A robust rule of a user; a test replaces its methods."""

    def combine(self, k, products):
        return Combination(trim=0)


class FaultyMixing(MixingRule):
    """A mixing rule of a user."""

    def matrix(self, k, products, round):
        return np.eye(k)


WRONG = {
    "raises": lambda k: 1 / 0,
    "none": lambda k: None,
    "NaN": lambda k: Combination(np.full(k, np.nan)),
    "too few weights": lambda k: Combination(np.full(k - 1, 0.5)),
    "too many weights": lambda k: Combination(np.full(k + 1, 0.5)),
    "a list": lambda k: Combination([1 / k] * k),
    "trims all": lambda k: Combination(trim=k),
    "more than all": lambda k: Combination(nearest=k + 1),
    "an unknown vector": lambda k: Combination(chosen=np.array([k])),
    "a negative vector": lambda k: Combination(chosen=np.array([-1])),
    "no vector": lambda k: Combination(chosen=np.arange(0)),
}
MATRICES = [lambda k: 1 / 0, lambda k: None, lambda k: np.full((k, k), np.nan), lambda k: np.eye(k + 1)]
NUMBERS = [lambda: 1 / 0, lambda: None, lambda: np.nan, lambda: -1, lambda: ""]
FAULTS = [
    *((Faulty, "combine", lambda self, k, products, made=made: made(k)) for made in WRONG.values()),
    *((FaultyMixing, "matrix", lambda self, k, *_, made=made: made(k)) for made in MATRICES),
    *((FaultyMixing, "size", lambda self, k, made=made: made()) for made in NUMBERS),
    *((Faulty, "least", property(lambda self, made=made: made())) for made in NUMBERS),
]


@pytest.mark.parametrize(("kind", "name", "method"), FAULTS)
def test_faults_of_an_own_rule_end_the_round(kind, name, method, monkeypatch):
    monkeypatch.setattr(kind, name, method)
    check_faulty([Faulty()] if kind is Faulty else [FaultyMixing(), Median()])


def test_an_own_rule_may_need_no_updates(monkeypatch):
    monkeypatch.setattr(Faulty, "least", 0)
    server = Server(np.zeros(2, np.float32), "FedAvg", clients=3, lr=0.1, aggregation=[Faulty()])
    server.round([Update(i, np.float32([i, 1]), steps=1) for i in range(3)])
    assert server.x.tolist() == [1, 1]


def check_faulty(chain):
    server = Server(np.zeros(2, np.float32), "FedAvg", clients=3, lr=0.1, aggregation=chain)
    models = [np.full(2, i, np.float32) for i in range(3)]
    with pytest.raises(AlgorithmError, match="Faulty"):
        server.round([Update(i, model, steps=1) for i, model in enumerate(models)])
    assert (server.round_number, server.x.tolist()) == (0, [0, 0])
    with pytest.raises(AlgorithmError, match="Faulty"):
        fedcore.aggregate(models, rule=chain)


def test_too_few_clients_for_the_rule_are_logged(caplog):
    """No error, since clients may join: when the server is made, is changed, or loses a client."""
    server = Server(np.zeros(2, np.float32), "FedAvg", clients=5, lr=0.1, aggregation=[Krum(1)])
    Server(np.zeros(2, np.float32), "FedAvg", clients=[], lr=0.1, aggregation=[Krum(1)])
    assert not caplog.messages
    server.remove_client(4)
    server.change(aggregation=[Krum(2)])
    Server(np.zeros(2, np.float32), "FedAvg", clients=4, lr=0.1, aggregation=[Krum(1)])
    due = [("4", "least 5"), ("4", "least 7"), ("4", "least 5")]
    assert [(text[0], text[text.index("least") :][:7]) for text in caplog.messages] == due
