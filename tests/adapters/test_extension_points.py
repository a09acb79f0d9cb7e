"""Each framework's extension points, with its own class and with fedcore's under the same subclass body.

A case runs the framework's own loop. For FedAvg the models are equal.
"""

from importlib import import_module

import numpy as np
import pytest

from tests.adapters.extensions import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),  # of pfl's noise
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
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
