import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore import errors, kernels
from fedcore.kernels import reference
from tests.kernels.same_bits import assert_same_bits

# Vector edges, the stretches between two prefetches, tile and block edges, and sizes where a second thread joins.
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 127, 2047, 2048, 2049, 16_383, 16_384, 16_385, 300_001]


def vectors(k, n, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n).astype(np.float32) for _ in range(k)]


def both(y, grad, **arguments):
    """The native result and the reference's, from the same y."""
    names = dict(lr=0.1, a=1.0, b=0.0, mu=0.0, weight_decay=0.0, grad_prev=None, offset=None, x=None) | arguments
    due, out = y.copy(), y.copy()
    with np.errstate(all="ignore"):
        reference.direction_step(due, grad, **names)
    kernels.direction_step(out, grad, **names)
    return out, due


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("present", range(16))
def test_every_combination_of_terms_has_the_bits_of_the_reference(n, present):
    y, grad, grad_prev, offset, x = vectors(5, n)
    arguments = dict(a=0.7)
    arguments |= dict(b=-0.3, grad_prev=grad_prev) if present & 1 else {}
    arguments |= dict(offset=offset) if present & 2 else {}
    arguments |= dict(mu=0.4, x=x) if present & 4 else {}
    arguments |= dict(weight_decay=1e-2) if present & 8 else {}
    out, due = both(y, grad, **arguments)
    assert_same_bits(out, due)


@given(n=st.integers(0, 300), seed=st.integers(0, 99), numbers=st.tuples(*[st.floats(-2, 2, width=32)] * 5))
def test_any_coefficients_and_special_values(n, seed, numbers):
    y, grad, grad_prev, offset, x = vectors(5, n, seed)
    if n:
        for i, vector in enumerate((y, grad, grad_prev, offset, x)):
            vector[(seed + i) % n] = np.float32([np.nan, np.inf, -0.0, 1e-42, 3e38])[(seed + i) % 5]
    names = dict(zip(("lr", "a", "b", "mu", "weight_decay"), numbers, strict=True))
    out, due = both(y, grad, grad_prev=grad_prev, offset=offset, x=x, **names)
    assert_same_bits(out, due)


def test_two_nan_in_one_operation():
    """The sign of their sum follows how NumPy's loop takes them: it is not compared."""
    for n in range(1, 130):
        y, grad, grad_prev, offset, x = vectors(5, n)
        grad[:], offset[:] = np.nan, -np.float32(np.nan)
        grad_prev[::2], x[1::2] = -np.float32(np.nan), np.nan
        terms = dict(a=0.7, b=-0.3, mu=0.4, weight_decay=1e-2, grad_prev=grad_prev, offset=offset, x=x)
        assert_same_bits(*both(y, grad, **terms))


def test_the_local_steps_of_the_papers():
    y, grad, grad_prev, c, c_i, g, x = vectors(7, 50)
    y64, grad64, prev64 = (v.astype(np.float64) for v in (y, grad, grad_prev))
    beta, lr, clients = 0.2, 0.1, 5
    total = c.astype(np.float64) * clients
    scaffold = kernels.combine([total, c_i], [1 / clients, -1])
    momentum = kernels.combine([g], [1 - beta])
    scaffold_m = kernels.combine([total, c_i, g], [beta / clients, -beta, 1 - beta])
    for arguments, direction in [
        (dict(), grad64),
        (dict(mu=0.3, x=x), grad64 + 0.3 * (y64 - x)),
        (dict(offset=scaffold), grad64 - c_i + c),
        (dict(a=beta, offset=momentum), beta * grad64 + (1 - beta) * g),
        (dict(a=beta, offset=scaffold_m), beta * (grad64 - c_i + c) + (1 - beta) * g),
        (dict(b=beta - 1, grad_prev=grad_prev, offset=momentum), grad64 + (1 - beta) * (g - prev64)),
        (
            dict(b=beta - 1, grad_prev=grad_prev, offset=scaffold_m),
            grad64 - beta * (c_i - c) + (1 - beta) * (g - prev64),
        ),
        (dict(a=beta, weight_decay=0.01), beta * (grad64 + 0.01 * y64)),
    ]:
        out = y.copy()
        kernels.direction_step(out, grad, lr=lr, **arguments)
        np.testing.assert_allclose(out, y64 - lr * direction, rtol=1e-5, atol=1e-6)


def test_a_vector_whose_coefficient_is_zero_is_not_read():
    y, grad = vectors(2, 40)
    nan = np.full(40, np.nan, np.float32)
    out, plain = y.copy(), y.copy()
    kernels.direction_step(out, grad, lr=0.5, grad_prev=nan, x=nan)
    kernels.direction_step(plain, grad, lr=0.5)
    np.testing.assert_array_equal(out, plain)


def test_torch_tensors_are_stepped_where_they_lie():
    y, grad, offset = vectors(3, 1001)
    due = y.copy()
    kernels.direction_step(due, grad, lr=0.1, offset=offset)
    tensor = torch.from_numpy(y)
    kernels.direction_step(tensor, torch.from_numpy(grad), lr=0.1, offset=torch.from_numpy(offset))
    np.testing.assert_array_equal(tensor.numpy(), due)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(b=1.0), errors.ArrayError, r"grad_prev: expected float32\[4\] where b != 0, got None"),
        (dict(mu=1.0), errors.ArrayError, r"x: expected float32\[4\] where mu != 0, got None"),
        (dict(offset=np.ones(5, np.float32)), errors.ShapeError, r"offset: expected float32\[4\], got float32\[5\]"),
        (dict(grad=np.ones(4)), errors.DtypeError, r"grad: expected float32\[n\], got float64\[4\]"),
        (dict(y=np.ones(4)), errors.DtypeError, r"y: expected float32\[4\], got float64\[4\]"),
        (dict(y=np.frombuffer(bytes(16), np.float32)), errors.ArrayError, "y: .* read-only"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = dict(y=np.zeros(4, np.float32), grad=np.ones(4, np.float32), lr=0.1) | change
    with pytest.raises(error, match=message):
        kernels.direction_step(**arguments)


def test_an_output_over_an_input_is_refused():
    memory = np.zeros(10, np.float32)
    with pytest.raises(errors.ArrayError, match="y: must not overlap grad"):
        kernels.direction_step(memory[:6], memory[4:], lr=0.1)
