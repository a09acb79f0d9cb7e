"""Properties that follow from a method's table, by hand from each method's paper."""

import numpy as np
import pytest

from fedcore import algorithms
from fedcore.algorithms.base import is_whole_sum
from tests.algorithms.test_by_hand import CLAIMS

METHODS = {name: algorithms.named(name) for name in algorithms.REGISTRY} | {
    "FedAvg, uniform": algorithms.FedAvg("uniform"),
    "FedAvgM, beta 1": algorithms.FedAvgM(1.0),
    "FedAvgM, on clients": algorithms.FedAvgM(placement="client"),
    "FedStale, chances": algorithms.FedStale(chances=0.5),
    "Flexible A": algorithms.FlexibleFedAvg("A", 5),
    "Flexible B": algorithms.FlexibleFedAvg("B", 5),
    "MBSTORM, three steps": algorithms.MBSTORM(steps=3),
    "MIFA, at once": algorithms.MIFA(wait=False),
    "MimiC, on clients": algorithms.MimiC(placement="client"),
    "QFedAvg, q = 2": algorithms.QFedAvg(2.0),
    "MimiC, update units": algorithms.MimiC(units="update"),
    "SCAFFOLD, sent": algorithms.SCAFFOLD(control="sent"),
    "SCAFFOLD, on clients": algorithms.SCAFFOLD(placement="client"),
    "SCAFFOLDM, on clients": algorithms.SCAFFOLDM(placement="client"),
}
STORM = {"MBSTORM", "MBSTORM, three steps"}
MIFAS = {"MIFA", "MIFA, at once"}
STALE = {"FedStale", "FedStale, chances"}
DERIVED = {"SCAFFOLD", "SCAFFOLDM"}
SENT = {"SCAFFOLD, sent", "SCAFFOLDMVR"}
CLIENTS_CONTROLS = {"SCAFFOLD, on clients", "SCAFFOLDM, on clients"}
SCAFFOLDS = DERIVED | SENT | CLIENTS_CONTROLS
MIMICS = {"MimiC", "MimiC, update units"}
FLEXIBLE = {"FlexibleFedAvg", "Flexible A", "Flexible B"}
MODELS = {"FedAvg", "FedAvg, uniform", "FedProx", "LocalDescent", "FedACG", "FedAWE", "FedDyn"} | FLEXIBLE
MODELS |= {"FedAsync", "FedExP", "MimiC, update units", "QFedAvg", "QFedAvg, q = 2"}
ROWS = {"FedDyn", "FedVARP"} | MIFAS | STALE | DERIVED | SENT | MIMICS

DUE = {
    # Rows: the last gradient, correction or control of each client, at the server.
    "keeps_rows": ROWS,
    "rows_at_clients": CLIENTS_CONTROLS | {"MimiC, on clients", "FedAvgM, on clients"},
    "sends_row_change": CLIENTS_CONTROLS,
    "keeps_total": ROWS | CLIENTS_CONTROLS,
    "total_sums_rows": ROWS,  # each sums its rows
    "total_is_whole": ROWS | CLIENTS_CONTROLS | {"MimiC, on clients"},  # wherever there is a total
    "sums_changes": STALE | SENT | CLIENTS_CONTROLS,
    # Only MimiC's corrections refer to past directions, and only v - r can be folded into r.
    "keeps_history": MIMICS,
    "folds_history": MIMICS,
    # g: beta < 1, where the server sends it.
    "keeps_momentum": {"FedACG", "FedAvgM", "FedAvgMVR", "SCAFFOLDM", "SCAFFOLDMVR", "SCAFFOLDM, on clients"} | STORM,
    "sends_offset": {"FedAvgM", "FedAvgMVR", "FedDyn"} | STORM | SCAFFOLDS,
    "reads_offset": DERIVED,
    "needs_plain_steps": DERIVED,
    # A is a sum of changes h - r (or h - beta r), or of h + c, of which the mean of h is no part.
    "hides_mean": {"FedAWE", "FedVARP"} | MIFAS | STALE | MIMICS,
    "updates_once": ROWS | CLIENTS_CONTROLS | FLEXIBLE | {"FedAU", "FedAWE"},
    # A client without an update counts by its row, T, its share or its intervals.
    "counts_absent": ROWS
    | CLIENTS_CONTROLS
    | FLEXIBLE
    | {"MimiC, on clients", "FedAvgM, on clients", "FedAU", "FedAWE"},
    "own_starts": {"FedAWE"},
    "keeps_models": {"FedAWE", "FedAvgM, on clients"},  # whose clients compute g from two models
    "weighs_claims": {"FedAvg", "FedProx", "FedNova"},
    "needs_shares": FLEXIBLE,
    "takes_warm_start": {"FedVARP", "FedAvgMVR"} | MIFAS | STALE | STORM | SCAFFOLDS,
    "sets_gamma": {"FedExP", "FedNova", "MBSTORM, three steps", "QFedAvg", "QFedAvg, q = 2"},
    "needs_loss": {"QFedAvg, q = 2"},
    "looks_ahead": {"FedACG"},
    "steps_without_clients": MIFAS | {"FedStale, chances"},
    "averages": MODELS,
    "takes_server_rate": METHODS.keys() - (MODELS - {"FedAvg", "FedAvg, uniform", "FedProx", "LocalDescent"}),
    "mixes_models": {"FedAsync"},
}


@pytest.mark.parametrize("entry", DUE)
def test_entries_that_follow_from_the_tables(entry):
    assert {name for name, method in METHODS.items() if getattr(method, entry)} == DUE[entry]


def test_vectors_that_a_client_sends():
    assert {name for name, method in METHODS.items() if method.uploads == 2} == SENT | CLIENTS_CONTROLS
    assert {method.uploads for method in METHODS.values()} == {1, 2}


def test_the_most_steps_of_a_client():
    assert {name: method.most_steps for name, method in METHODS.items() if method.most_steps is not None} == {
        "FlexibleFedAvg": 1,
        "Flexible A": 5,
        "MBSTORM": 1,
        "MBSTORM, three steps": 1,
    }


def test_the_sum_in_terms_of_h_r_and_q():
    """Of A = sum w (adds.h h + adds.r r + adds.q q + adds.row r'), r' = row.h h + row.r r + row.q q."""

    class Mine(algorithms.Algorithm):
        row = algorithms.Terms(h=2, r=3, q=5)
        adds = algorithms.Terms(h=7, r=11, q=13, row=17)

        def step(self, cohort):
            return algorithms.Step(v=algorithms.Linear(A=1))

    assert Mine().sums == algorithms.Terms(h=7 + 17 * 2, r=11 + 17 * 3, q=13 + 17 * 5)
    assert algorithms.MimiC().sums == algorithms.Terms(h=1, r=-1, q=1)
    assert algorithms.SCAFFOLDM(0.25).sums == algorithms.Terms(h=4, r=0, q=-4)  # raw - c_i = (h - offset) / beta


@pytest.mark.parametrize(
    ("form", "whole"),
    [
        (algorithms.Linear(), True),
        (algorithms.Linear(T=1, A=-3, B=2, v=7), True),
        (algorithms.Linear(T=1, A=2.0**31, B=-(2.0**31)), True),
        (algorithms.Linear(T=1, A=2.0**31 + 1), False),
        (algorithms.Linear(T=1, A=-(2.0**31) - 1), False),
        (algorithms.Linear(T=1, A=0.5), False),
        (algorithms.Linear(T=1, g=1), False),
    ],
)
def test_a_total_that_is_kept_as_integers(form, whole):
    assert is_whole_sum(form) == whole


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_method_is_immutable(method):
    """So properties of its numbers can be cached."""
    options = {name: getattr(method, name) for name in type(method).__dataclass_fields__}
    same = type(method)(**options)
    assert (same, hash(same)) == (method, hash(method))
    for option in options or ["more"]:
        with pytest.raises(AttributeError):
            setattr(method, option, None)


def test_default_weights_are_the_draws():
    np.testing.assert_array_equal(algorithms.named("LocalDescent").weigh(CLAIMS), CLAIMS.counts)
