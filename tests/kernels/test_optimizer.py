import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore import errors, kernels
from fedcore.kernels import reference
from tests.kernels.same_bits import assert_same_bits

# Every level's vector, 16 lanes, tile and block edges, and sizes where a second thread joins.
LENGTHS = [0, 1, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 2047, 2048, 2049, 16_383, 16_384, 16_385, 150_001]
RULES = {
    "momentum": dict(from_m=0.9, from_v=1.0),
    "adagrad": dict(from_m=0.3, from_v=0.7, from_s=1.0, from_square=1.0, tau=1e-2),
    "adam": dict(from_m=0.9, from_v=0.1, from_s=0.99, from_square=0.01, tau=1e-3),
    "yogi": dict(from_m=0.9, from_v=0.1, from_s=0.99, from_square=0.01, yogi=True, tau=1e-3),
}


def vectors(rule, n, seed=0):
    """v, m, s and x."""
    rng = np.random.default_rng(seed)
    v, m, s, x = (rng.normal(size=n).astype(np.float32) for _ in range(4))
    return v, m, None if rule == "momentum" else s * s, x


def both(rule, arrays, gamma=0.1):
    """The native results and the reference's: m', s', x', |x'|^2."""
    n = len(arrays[0])
    names = dict(from_s=1.0, from_square=1.0, yogi=False, tau=0.0, gamma=gamma) | RULES[rule]
    results = []
    for function in (kernels.optimizer_step, reference.optimizer_step):
        m, x = np.empty(n, np.float32), np.empty(n, np.float32)
        s = None if arrays[2] is None else np.empty(n, np.float32)
        with np.errstate(all="ignore"):
            results.append((m, s, x, function(*arrays, m_out=m, s_out=s, x_out=x, **names)))
    return results


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_has_the_bits_of_the_reference(rule, n):
    (*out, square), (*due, square_due) = both(rule, vectors(rule, n))
    for array, expected in zip(out, due, strict=True):
        if expected is not None:
            assert_same_bits(array, expected)
    assert square == pytest.approx(square_due, rel=1e-5)
    assert square == kernels.squared_norms([out[2]])[0]


@given(rule=st.sampled_from(list(RULES)), n=st.integers(1, 100), seed=st.integers(0, 99))
def test_special_values(rule, n, seed):
    arrays = vectors(rule, n, seed)
    for i, vector in enumerate(arrays):
        if vector is not None:
            vector[(seed + i) % n] = np.float32([np.nan, np.inf, -0.0, 1e-42, 3e38, -1.0])[(seed + i) % 6]
    if arrays[2] is not None:
        with np.errstate(over="ignore"):
            arrays[2][seed % n] = arrays[0][seed % n] ** 2  # Yogi's sign of 0
    (*out, square), (*due, _) = both(rule, arrays)
    for array, expected in zip(out, due, strict=True):
        if expected is not None:
            assert_same_bits(array, expected)
    assert np.isfinite(square) == np.isfinite(due[2]).all()


@pytest.mark.parametrize("rule", RULES)
def test_outputs_may_be_what_they_replace(rule):
    arrays = vectors(rule, 5000)
    (*due, _), _ = both(rule, arrays)
    v, m, s, x = arrays
    kernels.optimizer_step(v, m, s, x, gamma=0.1, m_out=m, s_out=s, x_out=x, **RULES[rule])
    for array, expected in zip((m, s, x), due, strict=True):
        if expected is not None:
            assert_same_bits(array, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(m=np.ones(5, np.float32)), errors.ShapeError, r"m: expected float32\[4\], got float32\[5\]"),
        (dict(s=np.ones(4)), errors.DtypeError, r"s: expected float32\[4\], got float64\[4\]"),
        (dict(v=np.ones(4)), errors.DtypeError, r"v: expected float32\[n\], got float64\[4\]"),
        (dict(s=None), errors.ArrayError, "s_out: expected an array exactly where s is one"),
        (dict(x_out=np.frombuffer(bytes(16), np.float32)), errors.ArrayError, "x_out: .* read-only"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    names = ("v", "m", "s", "x", "m_out", "s_out", "x_out")
    arrays = {name: np.ones(4, np.float32) for name in names} | change
    with pytest.raises(error, match=message):
        kernels.optimizer_step(**arrays, gamma=0.1, **RULES["adam"])


def test_an_output_over_another_input_is_refused():
    v, m, s, x = vectors("adam", 10)
    with pytest.raises(errors.ArrayError, match="x_out: must not overlap v"):
        kernels.optimizer_step(v, m, s, x, gamma=0.1, m_out=m, s_out=s, x_out=v, **RULES["adam"])
