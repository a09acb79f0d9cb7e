"""Results in a thread that flushes subnormal numbers have the bits of any other thread."""

import dataclasses
import inspect
import threading

import numpy as np
import pytest
import torch

import fedcore
from bench.papers.theory import departure
from fedcore import ClientStore, Network, Update, _core, kernels, sampling
from fedcore.algorithms import optimizers, rates
from fedcore.arrays import ieee
from fedcore.errors import RangeError
from fedcore.kernels import Linear
from fedcore.sim.network.topology import Topology, second_eigenvalue
from fedcore.sim.participation import Active, Bernoulli, OverSelection, Trace, Weighted
from fedcore.sim.traces import Generated, Recorded, read_traces
from tests import kit
from tests.kernels.arrays import FORMS
from tests.server import rounds

TINY = np.float32([1e-40, 1, 3e-39, -2e-42, 0, 1e-30, -1e-38, 2])
WIDE = TINY.astype(np.float64) * np.float64([1e-280] * 4 + [1] * 4)
SCALES = np.float64([1e-40, 1])
LARGE = np.full(8, 1e30, np.float32)
SMALL = TINY * np.float32(0.5)
DRAW = dict(seed=1, round=2)


def flushed(call):
    """Return the results of call(), once in this thread's mode and once while it flushes subnormal numbers."""
    plain = call()
    assert torch.set_flush_denormal(True)
    try:
        assert np.float32(1e-40) * TINY[1] == 0, "this thread does not flush"
        return plain, call()
    finally:
        torch.set_flush_denormal(False)


def bits(result):
    """Return all bytes of a result."""
    if isinstance(result, np.ndarray | np.generic | float | int | None):
        return np.asarray(result).tobytes()
    if dataclasses.is_dataclass(result):
        return bits([getattr(result, field.name) for field in dataclasses.fields(result)])
    if isinstance(result, dict):
        return bits(list(result.values()))
    return b"".join(bits(part) for part in result)


def written(run, *arrays):
    """Return copies of arrays after run(*copies)."""
    copies = [array.copy() for array in arrays]
    run(*copies)
    return copies


def codes(codec):
    coded = kernels.quantise(TINY, codec, seed=3)
    return [coded.codes, [] if coded.scales is None else coded.scales, kernels.dequantise(coded)]


def accumulated(acc):
    norms = kernels.accumulate(acc, [None, TINY], [TINY, LARGE], SCALES, WIDE[:2], out=acc)
    return [acc, norms]


def exchanged(form):
    total, row = np.zeros(8), TINY.copy()
    norms = kernels.exchange(
        total, [LARGE], [TINY], np.ones(1), np.ones(1), [row], [None], [row], out=total, **FORMS[form]
    )
    return [total, row, norms]


def accumulated_exactly():
    total = kernels.ExactSum.zeros(8)
    norms = kernels.accumulate(total, [None, TINY], [TINY, SHORT], SCALES, np.float64([1e-30, 1]), out=total)
    return [total, norms, kernels.read_exact(total)]


def exchanged_exactly(form):
    total, row = kernels.ExactSum.zeros(8), TINY.copy()
    norms = kernels.exchange(
        total, [SHORT], [TINY], np.ones(1), np.ones(1), [row], [None], [row], out=total, **FORMS[form]
    )
    return [total, row, norms]


def with_noise():
    out = np.empty(8)
    kernels.add_discrete_gaussian(np.full(8, 1e-310), 2.0**-1040, 3, bytes(32), out=out)
    return [out]


def stepped():
    v, total, x = np.empty(8, np.float32), np.empty(8), np.empty(8, np.float32)
    arguments = dict(
        v_of=Linear(A=0.5, T=1e-300), total_of=Linear(T=1, A=0.3), gamma=0.25, v=v, total_out=total, x_out=x
    )
    return [kernels.server_step(WIDE, WIDE, TINY, **arguments), v, total, x]


def mixed(W):
    return written(lambda a, b: kernels.mix([a, b], W), LARGE, TINY)


# Made here, in a thread that does not flush; only lists of numbers are read in the one that does.
SPARSE = dict(indptr=np.int64([0, 2, 3]), indices=np.int64([0, 1, 1]), data=np.float32([1e-40, 1, 1]))
MATRICES = [*(np.array([[1e-40, 1], [0, 1]], dtype) for dtype in ("f4", "f8")), type("Rows", (), SPARSE)()]
SHORT = np.full(8, 1e-22, np.float32)  # its squares are subnormal
SCALE, SUBNORMAL_WEIGHTS = np.float32([1e-40]), np.float64([1e-310, 1, 2e-310, 3e-310, 4e-310])
SHARES, PARTS = np.float64([1e-310, 0.5, 1]), np.float64([1, 1e-310, 1])


def turned():
    made = []
    for numbers in (dict(from_m=1e-40, from_square=1e-40), dict(from_m=0.5, from_square=0.5, yogi=True, tau=1e-40)):
        m, s, x = (np.empty(8, np.float32) for _ in range(3))
        outs = dict(m_out=m, s_out=s, x_out=x)
        square = kernels.optimizer_step(LARGE, TINY, SHORT, TINY, from_v=1e-30, gamma=1e-40, **outs, **numbers)
        made += [square, m, s, x]
    return made


KERNELS = {
    "weighted_sum": lambda: [
        kernels.weighted_sum([LARGE, TINY], [1e-40, 0.5]),
        kernels.weighted_sum([LARGE], TINY[:1]),
        kernels.weighted_sum([LARGE.astype(np.float64)], [1e-320], accumulate="float64"),
        (summed := kernels.weighted_sum([TINY, LARGE], [0.5, 1e-40], norms=True)),
        summed.diversity,
        summed.finite,
    ],
    "weighted_sum_segments": lambda: [
        kernels.weighted_sum_segments([[LARGE, TINY]], [1e-40]),
        kernels.weighted_sum_segments([[LARGE, TINY]], [1e-40], norms=True),
    ],
    "accumulate": lambda: [accumulated(TINY.copy()), accumulated(WIDE.copy())],
    "accumulate: exact": accumulated_exactly,
    "add_discrete_gaussian": with_noise,
    "exchange: exact": lambda: [*map(exchanged_exactly, FORMS)],
    "read_exact": lambda: kernels.read_exact(kernels.ExactSum(np.int64([1, 0]), np.int64([3, 5]))),
    "combine_exact": lambda: kernels.combine_exact(
        [kernels.ExactSum(np.int64([1] * 8), np.int64([3] * 8)), SMALL], [2, -3]
    ),
    "server_step": stepped,
    "exchange": lambda: [*map(exchanged, FORMS)],
    "direction_step": lambda: written(lambda y: kernels.direction_step(y, LARGE, lr=1e-40, offset=TINY), TINY),
    "combine": lambda: kernels.combine([LARGE, TINY, WIDE], [1e-40, 0.5, 1e-320]),
    "combined_square": lambda: kernels.combined_square([WIDE, TINY], [1e-160, 1e-160]),
    "optimizer_step": turned,
    "mix": lambda: [mixed([[1e-40, 1.0], [0.0, 1.0]]), *(mixed(W) for W in MATRICES)],
    "quantise": lambda: [codes(codec) for codec in ("bf16", "f16", "int8")],
    "dequantise": lambda: kernels.dequantise(kernels.Codes("int8", np.int8([3] * 8), SCALE)),
    "gram_matrix": lambda: kernels.gram_matrix([None, LARGE], [TINY, SHORT], SCALES),
    "trimmed_mean": lambda: kernels.trimmed_mean([None] * 2, [TINY, SMALL], SCALES, 0, out=np.empty(8, np.float32)),
    "mean_near_median": lambda: kernels.mean_near_median(
        [None] * 2, [TINY, SMALL], SCALES, 1, out=np.empty(8, np.float32)
    ),
    "squared_norms": lambda: kernels.squared_norms([TINY, SHORT]),
    "all_finite": lambda: kernels.all_finite([TINY]),
    "sum_of_partials": lambda: kernels.sum_of_partials(np.full((3, 2), 1e-310)),
    "sum_of_partials_exact": lambda: kernels.sum_of_partials_exact(np.full((3, 2), 1e-310), np.float64([1, 1e-310])),
}
TINY_WEIGHTS, TINY_CHANCES = WIDE.clip(0) * 1e-30, np.float64([5e-324, 1, 1e-310, 0, 1])
SAMPLING = {
    "without_replacement": lambda: sampling.without_replacement(9, 3, **DRAW),
    "bernoulli": lambda: [sampling.bernoulli(5, p, **DRAW) for p in (TINY_CHANCES, TINY_CHANCES.tolist(), 1e-320)],
    "permutation": lambda: sampling.permutation(9, **DRAW),
    "weighted_without_replacement": lambda: [
        sampling.weighted_without_replacement(weights, 5, **DRAW)
        for weights in ([1e-320, 2e-320, 0, 3e-320, 1e-321, 4e-320], SUBNORMAL_WEIGHTS)
    ],
    "with_replacement": lambda: sampling.with_replacement([1e-320, 2e-320, 0, 3e-320], 9, **DRAW),
}
NEARLY_ALONE = np.random.default_rng(0).random((10, 10)) * 1e-310  # what neighbours hear of each other
NEARLY_ALONE += NEARLY_ALONE.T
np.fill_diagonal(NEARLY_ALONE, 1)
LIMITS = dict(t0=1.0, E=1, D=1e-310, V=2e-310, g=1.0, gap=1e-310)
OTHERS = {
    "aggregate": lambda: fedcore.aggregate([{"w": LARGE}, {"w": TINY}], [1e-40, 1]),
    "aggregate, torch": lambda: {
        name: tensor.numpy()
        for name, tensor in fedcore.aggregate([{"w": torch.from_numpy(TINY)}, {"w": torch.from_numpy(LARGE)}]).items()
    },
    "Topology": lambda: [Topology.named("ring", 24).zeta, Topology.named("erdos-renyi", 9, probability=0.9).W],
    "second_eigenvalue": lambda: second_eigenvalue(NEARLY_ALONE),
    "Weighted": lambda: [Weighted(4, 2, [1e-320, 2e-320, 3e-320, 0]).active(t).clients for t in range(9)],
    "Bernoulli": lambda: [Bernoulli(4, [5e-324, 1.0, 1e-310, 0.5]).p, Bernoulli(4, 1e-310, levels=3).p],
    "OverSelection": lambda: [
        OverSelection(4, 2, policy={"deadline": 1e-310}, spread=1e-310).times(t) for t in range(3)
    ],
    "Generated": lambda: [
        Generated("a", 1e-310, 1e-200).mean,
        Generated("a", 0.1, 0.2, least=1e-310).draw(np.random.default_rng(0), 20),
    ],
    "Trace": lambda: Trace(3, [Recorded("a", (1e-310, 1.0))], draw="replay").active(0).clients,
    "Active": lambda: Active(np.arange(3), SHARES).working(PARTS),
    "departure": lambda: [
        departure.kept_bound(2, **{k: LIMITS[k] for k in ("t0", "E", "D", "V", "g")}),
        departure.excluded_bound(2, **{k: LIMITS[k] for k in ("t0", "E", "V", "g", "gap")}),
        departure.should_exclude(2, **LIMITS),
        departure.should_exclude_by_rate(2, t0=1, gap=1e-310),
        departure.reboot_helps_within(shift=1e-310, share=0.5, gap=1, L=1, mu=1, W=1),
        departure.distance_by_gradient(1e-310, L=1, mu=1),
        departure.error_bound(1, M=0, E=1, D=0, V=1e-310, g=1),
        departure.optimum_shift(share=1, gap=1e-310, L=1, mu=1),
    ],
    "rates": lambda: [
        rates.rate_at(rates.Exponential(1e-300, 0.1), 12),
        rates.as_rate(1e-310)(0),
        rates.InverseRound.of_theorem(mu=1, L=1e-310, E=1, work=1, theta=1e-310).gamma,
        rates.PerCohort.largest(beta=1, N=1, tau_max=1, K=1, lr=1, L=1, nu=1e-310).c,
    ],
}
CASES = KERNELS | SAMPLING | OTHERS


@pytest.mark.parametrize("name", CASES)
def test_functions_give_the_same_bits_in_a_thread_that_flushes(name):
    plain, result = flushed(CASES[name])
    assert bits(plain) == bits(result)


def test_a_tiny_negative_share_is_rejected():
    def refused():
        with pytest.raises(RangeError, match="share 0"):
            Recorded("a", (-1e-310,))

    flushed(refused)


def test_subnormal_numbers_are_read_from_a_file(tmp_path):
    (tmp_path / "traces.csv").write_text("a\n1e-310\n1\n")
    plain, result = flushed(lambda: read_traces(tmp_path / "traces.csv")[0].shares)
    assert bits(plain) == bits(result) == bits([1e-310, 1.0])


def test_every_kernel_and_draw_is_tested():
    for room, cases in ((kernels, KERNELS), (sampling, SAMPLING)):
        assert {name for name in room.__all__ if inspect.isfunction(getattr(room, name))} == {
            name.partition(": ")[0] for name in cases
        }


def replies(server, cohort):
    """The clients' updates, near subnormal numbers. Clients compute in IEEE mode, for any mode of the server."""
    rng = np.random.default_rng(server.round_number)
    sent = server.broadcast(cohort)
    for i in cohort:
        offset = sent.offset(i)
        y = server.x * np.float32(0.9) + rng.normal(size=rounds.n).astype(np.float32) * np.float32(1e-39)
        y -= 0 if offset is None else offset
        y -= 0 if sent.x_prev is None else np.float32(0.1) * sent.x_prev
        control = rng.normal(size=rounds.n).astype(np.float32) * np.float32(1e-40) if sent.second else None
        yield Update(i, y, steps=1 + i % 3, examples=i + 1, control=control)


def run(method, x0, one_by_one=False, **options):
    """A server's whole state and reports after a few rounds, a removal and an addition."""
    server = rounds.made(method, x0=x0, **options)
    results = []
    for t in range(4):
        cohort = [[0, 1, 2], [2, 3], [], [0, 4, 5]][t]
        sent = server.broadcast(cohort)
        results += [sent.lr, sent.a, sent.b, sent.mu, *(sent.offset(i) for i in cohort)]
        updates = list(ieee(list)(replies(server, cohort)))
        report = kit.one_by_one(server, updates) if one_by_one else server.round(updates)
        results += [report.norms, report.diversity, report.correction_norm, report.gamma]
    results += [server.correction(1), server.v, server.x]
    known = rounds.everything(server)
    if server.algorithm.placement == "server":
        server.remove_client(4)
        results += list(server._backend.snapshot.vectors(server.algorithm).values())
    return [known, results]


def flat(result):
    everything, results = result
    vectors, rows, written_in, numbers = everything
    return [*vectors.items(), *rows.items(), *written_in.items(), numbers, bits(results)]


@pytest.fixture
def tiny_x0():
    x = np.linspace(-1, 1, rounds.n, dtype=np.float32)
    x[::3] *= np.float32(1e-39)
    return x


@pytest.mark.parametrize("optimizer", [None, *optimizers.REGISTRY])
@pytest.mark.parametrize("method", rounds.METHODS)
@pytest.mark.sample(1)
def test_rounds_of_every_method_and_optimiser(method, optimizer, tiny_x0):
    options = dict(optimizer=None if optimizer is None else optimizers.named(optimizer), diagnostics=True)
    if optimizer in ("Adagrad", "Adam", "Yogi"):
        options["optimizer"] = optimizers.named(optimizer, tau=1e-20)  # tau^2 is subnormal
    plain, result = flushed(lambda: run(method, tiny_x0, **options))
    assert flat(plain) == flat(result)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("method", ["MIFA", "MimiC", "SCAFFOLD"])
def test_rounds_with_coded_rows_one_by_one(method, codec, tiny_x0):
    def stored():
        store = ClientStore(rounds.N, rounds.n, codec=codec)
        return run(method, tiny_x0, one_by_one=True, storage=store)

    plain, result = flushed(stored)
    assert flat(plain) == flat(result)


def test_rounds_of_a_network():
    W = np.float64([[0.5, 0.5, 1e-41], [0.5, 0.25, 0.25], [1e-41, 0.25, 0.75]])
    backwards = TINY[::-1].copy()

    def mixed_models():
        network = Network([TINY, LARGE, backwards], W, lr=0.1, q=[1e-310, 1.0, 1.0])
        results = []
        for accepted in ([0, 1, 2], [0, 2]):
            report = network.round(
                [Update(i, y, steps=2) for i, y in zip(accepted, (TINY, backwards, TINY), strict=False)]
            )
            results.append([report.zeta, report.consensus, report.diversity, report.norms])
        return [network.models, network.output(), network.tensors(0), network.q, results]

    plain, result = flushed(mixed_models)
    assert bits(plain) == bits(result)


def test_a_warm_start(tiny_x0):
    gradients = {i: tiny_x0 * np.float32(0.1) for i in range(3)}

    def started():
        server = rounds.made("SCAFFOLDMVR", x0=tiny_x0)
        server.warm_start(gradients)
        return [rounds.everything(server), [server.v]]

    plain, result = flushed(started)
    assert flat(plain) == flat(result)


def test_a_call_restores_the_callers_mode():
    for failing in (False, True):
        assert torch.set_flush_denormal(True)
        try:
            if failing:
                with pytest.raises(ValueError, match="weights"):
                    kernels.weighted_sum([TINY], [1, 2])
            else:
                kernels.weighted_sum([TINY], [1])
            still = np.float32(1e-40) * TINY[1] == 0
        finally:
            torch.set_flush_denormal(False)
        assert still


def test_decorated_functions_keep_their_attributes():
    assert list(inspect.signature(kernels.mix).parameters) == ["models", "W"]
    assert kernels.mix.__doc__.startswith("All models at once")
    assert ieee(dict)(a=1) == {"a": 1}
    with pytest.raises(TypeError, match="function"):
        _core.in_ieee_mode()
    with pytest.raises(KeyError):
        ieee({}.__getitem__)("no")


def test_another_thread_keeps_its_mode():
    """Each thread has its own mode, and a call does not change other threads' modes."""
    found = []

    def flush():
        torch.set_flush_denormal(True)
        kernels.weighted_sum([TINY], [1])
        found.append(bool(np.float32(1e-40) * TINY[1] == 0))

    thread = threading.Thread(target=flush)
    thread.start()
    thread.join()
    assert found == [True]
    assert np.float32(1e-40) * TINY[1] != 0
