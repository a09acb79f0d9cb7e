"""A custom method with an inconsistent table or an invalid result is rejected."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from fedcore import Server, Update, algorithms
from fedcore.algorithms import MEAN_GRADIENT, Algorithm, Direction, Linear, Step, Terms
from fedcore.errors import AlgorithmError, UnknownNameError
from tests.kit import flat


def server_of(algorithm, **options):
    return Server(np.zeros(4, np.float32), algorithm, clients=3, lr=0.1, **flat(**options))


def first_round(algorithm, clients=1):
    """Run a server's first round, which calls ``weigh`` and ``step``; x must not change if it fails."""
    server = server_of(algorithm)
    try:
        return server.round([Update(i, np.ones(4, np.float32), steps=1) for i in range(clients)])
    except AlgorithmError:
        assert not server.x.any()
        assert server.round_number == 0
        raise


def method(entries, step=lambda self, cohort: Step(v=Linear(A=1 / cohort.S)), **more):
    """An algorithm with these entries."""
    return type("Mine", (Algorithm,), dict(entries, step=step, **more))()


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        (dict(anchor="v"), UnknownNameError, r"^Mine.anchor\b.*'v'"),
        (dict(unit="models"), UnknownNameError, r"^Mine.unit\b.*'model'"),
        (dict(adds="h - r"), AlgorithmError, r"^Mine.adds\b"),
        (dict(adds=(1, 0, 0, 0)), AlgorithmError, r"^Mine.adds\b"),
        (dict(row=Terms(h=np.nan)), AlgorithmError, r"^Mine.row\b"),
        (dict(row=Terms(h=True)), AlgorithmError, r"^Mine.row\b"),
        (dict(row=Terms(row=1)), AlgorithmError, r"^Mine.row\b"),
        (dict(adds=Terms(h=1, r=-1)), AlgorithmError, r"^Mine.adds\b"),
        (dict(sums_changes=True), AlgorithmError, r"^Mine.sums_changes\b"),
        (dict(placement="nowhere"), UnknownNameError, r"^Mine.placement\b.*'nowhere'"),
        (dict(second_vector=True), AlgorithmError, r"^Mine.second_vector\b"),
        (dict(second_vector=""), AlgorithmError, r"^Mine.second_vector\b"),
        (dict(keeps_total=1), AlgorithmError, r"^Mine.keeps_total\b"),
        (dict(local_rule=None), AlgorithmError, r"^Mine\.local_rule\b"),
        (dict(direction={"a": 1}), AlgorithmError, r"^Mine.direction\b"),
        (dict(direction=Direction(mu=np.nan)), AlgorithmError, r"^Mine.direction\b"),
        (dict(direction=Direction(a="1")), AlgorithmError, r"^Mine.direction\b"),
        (dict(direction=Direction(from_row=-1)), AlgorithmError, r"^Mine.direction\b.*from_row"),
        (dict(direction=Direction(from_mean=1)), AlgorithmError, r"^Mine.direction\b.*from_mean"),
        (dict(row=Terms(h=1), adds=Terms(row=1, q=1), anchor="v[t]"), AlgorithmError, r"^Mine.keeps_total\b.*anchor"),
        (dict(row=Terms(h=1), second_vector=MEAN_GRADIENT), AlgorithmError, r"^Mine.row\b"),
        (dict(row=Terms(h=1), placement="client"), AlgorithmError, r"^Mine.row\b"),
        (dict(sums_changes=0), AlgorithmError, r"^Mine.sums_changes\b"),
        (dict(takes_server_rate=None), AlgorithmError, r"^Mine.takes_server_rate\b"),
        (dict(steps_without_clients=1), AlgorithmError, r"^Mine.steps_without_clients\b"),
        (dict(needs_shares="no"), AlgorithmError, r"^Mine.needs_shares\b"),
        (dict(keeps_models=True), AlgorithmError, r"^Mine.keeps_models\b"),
        (dict(adds=Terms(h=1, q=1)), AlgorithmError, r"^Mine.adds\b"),
        (dict(adds=Terms(h=1, row=1)), AlgorithmError, r"^Mine.adds\b"),
        (dict(row=Terms(h=1j)), AlgorithmError, r"^Mine.row\b"),
        (dict(direction=Direction(b=np.float32(np.inf))), AlgorithmError, r"^Mine.direction\b"),
    ],
)
def test_a_contradiction_is_refused_by_name(entries, error, message):
    with pytest.raises(error, match=message):
        server_of(method(entries))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (0.5, r"^Mine.step\b"),
        (None, r"^Mine.step\b"),
        (Step(v=(1, 0, 0, 0, 0)), r"^Mine.step\b"),
        (Step(v=Linear(A=np.inf)), r"^Mine.step\b"),
        (Step(v=Linear(A="1")), r"^Mine.step\b"),
        (Step(v=Linear(A=1), lookahead=np.nan), r"^Mine.step\b"),
        (Step(v=Linear(A=1), gamma=0.0), r"^Mine.step\b"),
        (Step(v=Linear(v=1)), r"^Mine.step\b"),
        (Step(v=Linear(A=1, T=0.5)), r"^Mine.step\b.*keeps_total"),
        (Step(v=Linear(A=1), T=Linear(T=1, A=1)), r"^Mine.step\b.*keeps_total"),
        (Step(v=Linear(A=1), T=Linear()), r"^Mine.step\b.*keeps_total"),
        (Step(v=Linear(A=1, B=1)), r"^Mine.step\b.*sums_changes"),
        (Step(v=Linear(A=1), T=(1, 0, 0, 0, 0)), r"^Mine.step\b"),
        (Step(v=Linear(A=1), T=Linear(T=np.nan)), r"^Mine.step\b"),
        (Step(v=Linear(A=1), gamma=-0.5), r"^Mine.step\b"),
        (Step(v=Linear(A=1), gamma=np.inf), r"^Mine.step\b"),
        (Step(v=Linear(A=1), gamma=True), r"^Mine.step\b"),
    ],
)
def test_an_invalid_step_is_rejected(step, message):
    with pytest.raises(AlgorithmError, match=message):
        first_round(method({}, step=lambda self, cohort: step))


def test_a_step_that_sums_second_vectors_without_any_is_refused():
    with pytest.raises(AlgorithmError, match=r"^Mine.step\b.*sums_changes"):
        first_round(method(dict(keeps_total=True), step=lambda self, cohort: Step(v=Linear(A=1), T=Linear(T=1, B=1))))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (1.0, r"^Mine.weigh\b"),
        ([1.0, 1.0], r"^Mine.weigh\b"),
        (np.ones(3), r"^Mine.weigh\b"),
        (np.ones(2, np.float32), r"^Mine.weigh\b"),
        (np.ones(2, bool), r"^Mine.weigh\b"),
        (np.array([1, np.nan]), r"^Mine.weigh\b"),
        (np.array([1.0, -2.0]), r"^Mine.weigh\b"),
        (np.array([1.0, 9.0, -1.0, 9.0])[::2], r"^Mine.weigh\b"),
    ],
)
def test_invalid_weights_are_rejected(weights, message):
    with pytest.raises(AlgorithmError, match=message):
        first_round(method({}, weigh=lambda self, claims: weights), clients=2)


@pytest.mark.parametrize("moves", [lambda c: c.missing, lambda c: None, lambda c: None if c.rows == 3 else np.False_])
def test_an_answer_of_moves_that_is_no_bool_is_rejected(moves):
    with pytest.raises(AlgorithmError, match=r"^Mine: moves\b"):
        first_round(method(dict(row=Terms(h=1)), moves=lambda self, cohort: moves(cohort)))


def test_numbers_of_any_real_type_and_strided_weights():
    apart = np.array([1.0, 9.0, 3.0, 9.0])[::2]
    mine = method(
        dict(adds=Terms(h=np.float32(2)), sets_gamma=True, direction=Direction(a=Fraction(1, 2), mu=np.int64(0))),
        step=lambda self, cohort: Step(v=Linear(A=Fraction(1, 4)), gamma=np.float64(1)),
        weigh=lambda self, claims: apart[: len(claims.steps)],
    )
    server = server_of(mine)
    server.round([Update(i, server.x - h, steps=1, lr=0.1) for i, h in enumerate(np.float32([0.2, 0.4]))])
    # A = 2 (1 h_0 + 3 h_1), h = (2, 4); x = -A / 4
    np.testing.assert_allclose(server.x, -2 * (2 + 3 * 4) / 4, rtol=1e-6)


def test_a_total_with_momentum_needs_keeps_momentum():
    late = method(
        dict(keeps_total=True), step=lambda self, cohort: Step(v=Linear(A=1), T=Linear(T=1, g=float(cohort.S == 3)))
    )
    server = server_of(late)
    server.round([Update(i, server.x + 1, steps=1) for i in range(2)])
    with pytest.raises(AlgorithmError, match="keeps_momentum"):
        server.round([Update(i, server.x + 1, steps=1) for i in range(3)])


def test_an_error_in_a_later_round_is_reported_then():
    late = method({}, step=lambda self, cohort: Step(v=Linear(A=1, T=float(cohort.S == 3))))
    weigh = method({}, weigh=lambda self, claims: claims.counts / abs(claims.steps - 5))
    for algorithm, message in ((late, r"^Mine.step\b.*total"), (weigh, r"^Mine.weigh\b.*inf")):
        server = server_of(algorithm)
        server.round([Update(i, server.x + 1, steps=6) for i in range(2)])
        x = server.x
        with np.errstate(divide="ignore"), pytest.raises(AlgorithmError, match=message):
            server.round([Update(i, server.x + 1, steps=5) for i in range(3)])
        assert server.x.tobytes() == x.tobytes()
        server.round([Update(0, server.x + 1, steps=6)])  # as if that round had never been
        assert server.round_number == 2


@pytest.mark.parametrize(
    ("step", "entry"),
    [
        (Step(v=Linear(A=1, g=1)), "keeps_momentum"),
        (Step(v=Linear(A=1), gamma=0.5), "sets_gamma"),
        (Step(v=Linear(A=1), lookahead=0.5), "looks_ahead"),
    ],
)
def test_a_later_step_needs_its_declaration(step, entry):
    """Only methods that declare it have g saved in folders, and more than x sent to clients."""
    late = method({}, step=lambda self, cohort: step if cohort.S == 3 else Step(v=Linear(A=1)))
    server = server_of(late)
    with pytest.raises(AlgorithmError, match=f"{entry}"):
        server.round([Update(i, server.x + 1, steps=1) for i in range(3)])
    announced = method({entry: True}, step=lambda self, cohort: step if cohort.S == 3 else Step(v=Linear(A=1)))
    server_of(announced).round([Update(i, server.x + 1, steps=1) for i in range(3)])


def test_a_lookahead_may_end():
    fading = method(
        dict(looks_ahead=True),
        step=lambda self, cohort: Step(v=Linear(A=1 / cohort.S), lookahead=0.5 * (cohort.S == 2)),
    )
    server = server_of(fading)
    server.round([Update(i, server.x + 1, steps=1) for i in range(2)])
    assert (server.broadcast([0]).x != server.x).all()
    server.round([Update(0, server.x + 1, steps=1)])
    np.testing.assert_array_equal(server.broadcast([0]).x, server.x)


def test_rows_of_weight_zero_are_part_of_the_total():
    silent = method(
        dict(
            row=Terms(h=1),
            adds=Terms(row=1),
            keeps_total=True,
            sums_changes=True,
            total_sums_rows=True,
            weighs_claims=False,
        ),
        step=lambda self, cohort: Step(v=Linear(A=1, T=1), T=Linear(T=1, B=1)),
        weigh=lambda self, claims: np.zeros(len(claims.steps)),
    )
    server = server_of(silent)
    server.round([Update(0, server.x - 1, steps=1)])
    np.testing.assert_array_equal(server._backend.snapshot.total, server.store.read(0))
    np.testing.assert_array_equal(server.x, np.zeros(4))


def test_an_anchor_counts_from_a_client_s_first_round():
    """The offset also applies to clients without a row."""
    anchored = method(
        dict(row=Terms(h=1), adds=Terms(row=1, r=-1, q=1), anchor="offset", keeps_total=True)
        | dict(direction=Direction(from_mean=1)),
        step=lambda self, cohort: Step(v=Linear(A=1 / cohort.S), T=Linear(T=1, A=1)),
    )
    server = server_of(anchored)
    server.round([Update(0, server.x - 1, steps=1)])
    c = server.broadcast([1]).offset(1)
    server.round([Update(1, server.x - 2, steps=1)])
    np.testing.assert_allclose(server.v, 20 + c)


def test_a_method_that_raises_for_some_cohorts():
    picky = method({}, step=lambda self, cohort: Step(v=Linear(A={1: 1.0}[cohort.S])))
    server = server_of(picky)
    assert server.round([Update(0, server.x + 1, steps=1)]).accepted == (0,)
    with pytest.raises(AlgorithmError, match=r"^Mine: step.*KeyError"):
        server.round([Update(i, server.x + 1, steps=1) for i in range(2)])
    assert server.round([Update(0, server.x + 1, steps=1)]).accepted == (0,)


class Kept(Algorithm):
    def __init__(self, alpha=0.1, *more, beta=1, **others):
        self._alpha, self.beta = alpha, beta

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.S))


@dataclass(frozen=True)
class Frozen(Algorithm):
    alpha: float = 0.1

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.S))


def test_an_option_without_its_attribute_is_rejected():
    with pytest.raises(AlgorithmError, match=r"^Kept\.alpha\b"):
        server_of(Kept())
    server_of(Frozen(0.2))


def test_rows_may_be_subtracted_without_a_total():
    """A sum of differences from rows is float64 even without a total."""
    taken = method(
        dict(row=Terms(h=1), adds=Terms(row=1, r=-1)), step=lambda self, cohort: Step(v=Linear(A=1 / cohort.S))
    )
    server = server_of(taken, max_client_lr=100.0)
    for _ in range(2):
        server.round([Update(0, value=np.full(4, 2, np.float32), kind="gradient", steps=1, lr=1.0)])
    np.testing.assert_array_equal(server.x, [-2] * 4)  # the second time h - r is zero


def test_one_limit_cannot_bound_models_and_gradients():
    class Both(algorithms.FedAvg):
        second_vector = MEAN_GRADIENT

    server_of(Both(), max_norm=5, server_lr=0.1)
    server_of(Both(), reject_long=5)
