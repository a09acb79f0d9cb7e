import doctest

import pytest

from bench.papers.theory import departure, local_sgd, momentum


@pytest.mark.parametrize("module", [departure, local_sgd, momentum])
def test_the_doctests_of_the_theory_modules(module):
    assert doctest.testmod(module).failed == 0
