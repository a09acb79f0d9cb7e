import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore import errors, kernels
from fedcore.kernels import reference


def problem(k, n, seed):
    rng = np.random.default_rng(seed)
    rows = lambda: [rng.normal(size=n).astype(np.float32) for _ in range(k)]  # noqa: E731
    x = rng.normal(size=n).astype(np.float32)
    old, anchors = rows(), rows()
    for i in range(k):  # every combination that may come: no row, a row, a row and what it refers to
        old[i], anchors[i] = [(None, None), (old[i], None), (old[i], anchors[i])][(i + seed) % 3]
    return (
        rng.normal(size=n),
        [x if i % 2 else None for i in range(k)],
        rows(),
        rng.random(k),
        rng.random(k),
        old,
        anchors,
    )


@settings(deadline=None, max_examples=60)
@given(
    k=st.integers(0, 7),
    n=st.one_of(st.integers(0, 70), st.sampled_from([2049, 16_385, 40_001])),
    seed=st.integers(0, 9),
)
def test_exchange_has_the_bits_of_the_reference(k, n, seed):
    acc, *rest = problem(k, n, seed)
    out, due = np.empty(n), np.empty(n)
    new, due_new = [np.empty(n, np.float32) for _ in range(k)], [np.empty(n, np.float32) for _ in range(k)]
    norms = kernels.exchange(acc, *rest, new, out=out)
    due_norms = reference.exchange(acc, due, *rest, due_new)
    np.testing.assert_array_equal(out, due)
    np.testing.assert_array_equal(new, due_new)
    np.testing.assert_allclose(norms, due_norms, rtol=1e-5)


def test_a_row_may_be_replaced_where_it_lies():
    acc, bases, ys, scales, weights, old, _ = problem(3, 5000, 0)
    old = [np.ones(5000, np.float32) if row is None else row for row in old]
    none = [None] * 3
    out, new = np.empty(5000), [np.empty(5000, np.float32) for _ in range(3)]
    kernels.exchange(acc, bases, ys, scales, weights, old, none, new, out=out)
    kernels.exchange(acc, bases, ys, scales, weights, old, none, old, out=acc)
    np.testing.assert_array_equal(acc, out)
    np.testing.assert_array_equal(old, new)


def test_a_new_row_over_anything_else_is_refused():
    row = np.zeros(8, np.float32)
    one = np.ones(1)
    with pytest.raises(errors.ArrayError, match=r"new_rows\[0\]: must not overlap ys\[0\]"):
        kernels.exchange(np.zeros(8), [None], [row], one, one, [None], [None], [row], out=np.zeros(8))
    with pytest.raises(errors.ArrayError, match=r"new_rows\[1\]: must not overlap new_rows\[0\]"):
        ys = [np.ones(8, np.float32)] * 2
        kernels.exchange(
            np.zeros(8), [None] * 2, ys, np.ones(2), np.ones(2), [None] * 2, [None] * 2, [row] * 2, out=np.zeros(8)
        )
    with pytest.raises(errors.ArrayError, match=r"anchors\[0\]: expected None where old_rows is None"):
        ys = [np.ones(8, np.float32)]
        kernels.exchange(np.zeros(8), [None], ys, one, one, [None], ys, [row], out=np.zeros(8))
    np.testing.assert_array_equal(row, np.zeros(8))


def test_only_the_row_that_is_replaced_may_be_overwritten():
    """A new row over an array that another client still has to read would change that client's gradient."""
    shared = np.ones(8, np.float32)
    ys = [np.zeros(8, np.float32), shared]
    new = [shared, np.empty(8, np.float32)]
    with pytest.raises(errors.ArrayError, match=r"new_rows\[0\]: must not overlap"):
        kernels.exchange(
            np.zeros(8), [None] * 2, ys, np.ones(2), np.ones(2), [shared, None], [None] * 2, new, out=np.zeros(8)
        )
    np.testing.assert_array_equal(shared, np.ones(8))
