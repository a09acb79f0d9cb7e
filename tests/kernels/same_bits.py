"""How arrays of floating-point numbers are compared, wherever a test means their bits."""

import numpy as np
import torch

from fedcore.kernels import reference


def bits(array):
    """Every number as an integer; torch has the bfloat16 that NumPy lacks."""
    if isinstance(array, torch.Tensor):
        return (array.view(torch.int16) if array.dtype == torch.bfloat16 else array).numpy()
    return array.view(f"i{array.itemsize}")


def assert_same_bits(array, due):
    """The same dtype, shape and bits, but that any NaN may stand for another.

    Its sign and payload are nobody's promise: where an operation has two, the processor takes those of its first
    operand, and which one that is NumPy's loops decide by how arrays are aligned.
    """
    assert array.dtype == due.dtype
    number, nan = reference.numbers(due), np.isnan(reference.numbers(due))
    np.testing.assert_array_equal(np.isnan(reference.numbers(array)), nan)
    assert number.shape == tuple(array.shape)
    np.testing.assert_array_equal(bits(array)[~nan], bits(due)[~nan])
