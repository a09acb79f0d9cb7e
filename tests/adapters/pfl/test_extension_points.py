"""What of pfl's extension points fedcore's Method refuses, and its server after the others."""

import numpy as np
import pytest

pytest.importorskip("pfl")

from pfl.privacy.gaussian_mechanism import GaussianMechanism

from fedcore import Storage, errors
from fedcore.adapters.pfl import Method
from tests.adapters.extensions.pfl import LR, USERS, Clips, Decays, Halves, central, method, restored, run

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


def test_noise_of_one_iteration_does_not_protect_rows():
    with pytest.raises(errors.RangeError, match="algorithm: MIFA keeps a row of each user"):
        run("ours", own=method("ours", "MIFA"), before=[central()])


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


def test_more_than_one_process_is_an_error():
    with pytest.raises(errors.RangeError, match="one process"):
        method("ours").worker_reduce(aggregated_worker_stats=None, central_context=None, aggregated_worker_metrics=None)
