"""What of pfl's extension points fedcore's Method refuses, and its server after the others."""

import numpy as np
import pytest

pytest.importorskip("pfl")

import torch
from pfl.aggregate.base import SumAggregator
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import ArtificialFederatedDataset, FederatedDataset
from pfl.metrics import Metrics
from pfl.postprocessor.base import Postprocessor
from pfl.privacy.adaptive_clipping import AdaptiveClippingGaussianMechanism
from pfl.privacy.gaussian_mechanism import GaussianMechanism

from fedcore import Compute, Limits, Storage, algorithms, errors, rules
from fedcore.adapters.pfl import Method
from fedcore.algorithms import optimizers
from tests.adapters.extensions.pfl import LR, USERS, Clips, Decays, Halves, central, method, restored, run, user

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # of pfl's noise
AFTER = {"users": Clips, "sum": Halves, "local privacy": lambda: GaussianMechanism(0.1, 0.5), "central": central}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", AFTER.values(), ids=AFTER)
def test_a_change_after_the_method_is_an_error_in_its_iteration(kind, first):
    own, after = method("ours"), kind()
    if first:  # the method's server has started
        run("ours", own=own)
    rounds = len(own.reports)
    with pytest.raises(errors.RangeError, match="put Method last in the list"):
        run("ours", own=own, after=[after])
    assert len(own.reports) == rounds


SIZES = {name: len(user(name)) for name in USERS}
OTHER_SUMS = {
    "rows": ("MIFA", {}),
    "a running average": ("FedAU", {}),
    "steps of unequal length": ("FedNova", {}),
    "a rate by norms": ("FedExP", {}),
    "a share": ("FedAsync", {}),
    "other weights": (algorithms.FedAvg("uniform"), {}),
    "weights of a rule": ("FedAvg", {"aggregation": [rules.Mean(SIZES)]}),
    "a median": ("FedAvg", {"aggregation": "median"}),
    "a median norm": ("FedAvg", {"aggregation": [rules.ClipToMedian()]}),
    "a second mechanism": ("FedAvg", {"aggregation": [rules.PrivateMean(clip=1, noise=1, expected=3)]}),
    "an optimizer": ("FedAvg", {"optimizer": optimizers.Adam(eta=0.01)}),
    "a rate": ("FedAvg", {"server_lr": 5.0}),
}
"""Methods and options with which a user can change the result by more than its clipped statistics."""


def adaptive():
    return AdaptiveClippingGaussianMechanism(lambda bound: GaussianMechanism(bound, 0.5), 0.1, 1.0, 0.5)


CASES = [(other, central, 3) for other in OTHER_SUMS] + [("a rate", central, 1), ("a rate", adaptive, 3)]


@pytest.mark.parametrize(("other", "mechanism", "cohort"), CASES)
def test_noise_for_the_sum_protects_only_the_sum(other, mechanism, cohort):
    algorithm, options = OTHER_SUMS[other]
    own = method("ours", algorithm, **options)
    with pytest.raises(errors.RangeError, match="central privacy mechanisms account for the sum"):
        run("ours", own=own, before=[WeightByDatapoints(), mechanism()], cohort=cohort)
    assert own.reports == []  # so pfl's model did not move


def test_options_that_keep_the_sum_combine_with_its_noise():
    theirs = run("theirs", before=[adaptive()])
    for options in ({"limits": Limits(max_norm=1)}, {"compute": Compute(accumulator="exact")}, {"client_sizes": SIZES}):
        ours = run("ours", own=method("ours", **options), before=[adaptive()])
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6, atol=1e-6)


class Weights(Postprocessor):
    def __init__(self, kind):
        self.kind = kind

    def postprocess_one_user(self, *, stats, user_context):
        weight = 1 / (3 + int(user_context.user_id[1:]))
        stats.reweight(weight)
        stats.weight = self.kind(weight)
        return stats, Metrics()


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, torch.tensor])
def test_a_weight_may_be_any_number(kind):
    theirs, ours = (run(side, before=[Weights(kind)]) for side in ("theirs", "ours"))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6, atol=1e-6)


def test_users_need_ids():
    data = ArtificialFederatedDataset(lambda _: Dataset(user("u1").raw_data), lambda size: [], lambda: 4)
    with pytest.raises(errors.RangeError, match=r"user_id is None.*FederatedDataset"):
        run("ours", users=data)


@pytest.mark.parametrize("kind", ["pair", "data set", "fraction"])
def test_the_users_are_ids(kind):
    users = {"pair": [("a", 1)], "data set": FederatedDataset(user, lambda: "u0"), "fraction": [1.5]}[kind]
    with pytest.raises(errors.UnknownClientError, match="must be an int"):
        Method("FedAvg", users, lr=LR, steps=1)


@pytest.mark.parametrize("place", ["aggregator", "postprocessor", "neither"])
def test_one_object_is_the_postprocessor_and_the_aggregator(place):
    own, other = method("ours"), method("ours")
    postprocessors = [] if place == "aggregator" else [other]
    aggregator = SumAggregator() if place == "postprocessor" else own
    with pytest.raises(errors.RangeError, match="as aggregator too"):
        run("ours", own=own, postprocessors=postprocessors, aggregator=aggregator)


def test_the_rate_of_the_users_is_that_of_the_method():
    schedule = Decays(LR)
    with pytest.raises(errors.RangeError, match=r"local_learning_rate=0.025, and MIFA has lr=0.05 in round 1"):
        run("ours", own=method("ours", "MIFA"), lr=schedule, callbacks=[schedule])
    schedule = Decays(LR)
    own = Method("MIFA", USERS, lr=lambda t: LR / 2**t, steps=2)
    run("ours", own=own, lr=schedule, callbacks=[schedule])
    assert [len(report.accepted) for report in own.reports] == [3] * 4


def test_rows_of_a_restored_run_are_in_its_storage_or_a_warning_says_that_they_are_missing(tmp_path, caplog):
    whole = run("ours", own=method("ours", "MIFA"), cohort=6)
    restored("ours", lambda side: method(side, "MIFA"))
    assert "pfl continues with iteration 2, and the method's server with round 0" in caplog.text
    caplog.clear()
    found = restored("ours", lambda side: method(side, "MIFA", storage=Storage(tmp_path / "rows")))
    assert "continues" not in caplog.text
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-5, atol=1e-6)


STATES = {
    "rows": ("MimiC", {}),
    "moments": ("FedAvg", {"optimizer": optimizers.Adam(eta=0.01)}),
    "norms": ("FedAvg", {"aggregation": "open"}),
    "the last result": ("FedAvg", {"aggregation": [rules.CentredClipping(1)]}),
    "a schedule": ("FedAvg", {"server_lr": lambda t: 0.1 / (1 + t)}),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_warning_says_that_a_state_is_not_that_of_the_run(state, tmp_path, caplog):
    def make(side="ours", **how):
        return method(side, state[0], **state[1], **how)

    restored("ours", make)
    assert "pfl continues with iteration 2, and the method's server with round 0" in caplog.text
    caplog.clear()
    restored("ours", lambda side: make(storage=Storage(tmp_path / "state")))
    assert "continues" not in caplog.text
    run("ours", own=(own := make()))
    assert "continues" not in caplog.text
    run("ours", own=own)
    assert "pfl continues with iteration 0, and the method's server with round 4" in caplog.text
    caplog.clear()
    run("ours", own=(again := make(storage=Storage(tmp_path / "state"))))
    again.server.close()
    assert "pfl continues with iteration 0, and the method's server with round 4" in caplog.text


def test_a_method_without_a_state_needs_no_warning(caplog):
    restored("ours")
    own = method("ours")
    for _ in range(2):
        run("ours", own=own)
    assert "continues" not in caplog.text


def test_more_than_one_process_is_an_error():
    with pytest.raises(errors.RangeError, match="one process"):
        method("ours").worker_reduce(aggregated_worker_stats=None, central_context=None, aggregated_worker_metrics=None)
