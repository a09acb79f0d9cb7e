"""Each framework's extension points, with its own class and with fedcore's under the same subclass body.

A case runs the framework's own loop. For FedAvg the models are equal.
"""

from contextlib import nullcontext
from importlib import import_module

import numpy as np
import pytest

from tests.adapters.drivers import QUIET
from tests.adapters.extensions import CASES

NOISE = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # of pfl
pytestmark = [*QUIET, NOISE]
ALL = [(framework, name, side) for framework, found in CASES.items() for name, sides in found.items() for side in sides]


@pytest.mark.parametrize(("framework", "name", "side"), ALL)
def test_an_extension_has_the_framework_s_own_result(framework, name, side):
    pytest.importorskip(framework)
    run = import_module(f"tests.adapters.extensions.{framework}").RUNS[name]
    theirs, ours = (run(each) for each in ("theirs", side))
    assert len(theirs) == len(ours)
    for first, second in zip(theirs, ours, strict=True):
        assert first.shape == second.shape
        np.testing.assert_allclose(second, first, rtol=1e-6, atol=1e-6)


LOST = [("pfl", "method", "rejected"), ("appfl", "aggregator", "rejected")]
LOST += [("fedlab", "handler", why) for why in ("rejected", "silent")]
LOST += [("nvflare", side, why) for side in ("aggregator", "controller") for why in ("rejected", "silent")]


@pytest.mark.parametrize(("framework", "side", "why"), LOST)
@pytest.mark.parametrize(("abort_after", "rounds", "last"), [(2, 4, 2), (3, 2, 2), (3, 1, 1), (None, 2, None)])
def test_a_run_that_accepts_nothing_ends_with_an_error(framework, side, why, abort_after, rounds, last):
    pytest.importorskip(framework)
    lost = import_module(f"tests.adapters.extensions.{framework}").lost
    with pytest.raises(Exception, match=f"none was accepted in the last {last} rounds") if last else nullcontext():
        lost(side, why, rounds, abort_after=abort_after)
