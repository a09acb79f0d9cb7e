import numpy as np
import pytest

import fedcore
from fedcore.aligned import aligned


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 5000, 100_000])
def test_arrays_start_on_a_cache_line(n, dtype):
    arrays = [aligned(np.zeros, n, dtype) for _ in range(5)]
    for array in arrays:
        assert array.ctypes.data % 64 == 0
        assert array.shape == (n,)
        assert array.dtype == dtype
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert not array.any()


def test_the_sums_of_a_server_are_aligned():
    server = fedcore.Server("MIFA", np.zeros(100_000, np.float32), clients=1, lr=0.1)
    for _ in range(2):
        server.round([fedcore.Update(0, np.ones(100_000, np.float32), steps=1)])
        sums = server._state.sums
        assert sums.parameters.ctypes.data % 64 == 0
