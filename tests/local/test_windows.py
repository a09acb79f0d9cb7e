import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcore.local.windows import Windows

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
KINDS = dict(kernel=pairs, stride=pairs, padding=pairs, dilation=pairs)


@given(**KINDS)
def test_without_pooling_they_are_those_of_torchs_unfold(kernel, stride, padding, dilation):
    windows = Windows.of((2, 7, 6), kernel, stride=stride, padding=padding, dilation=dilation)
    image = torch.rand(1, 2, 7, 6)
    due = torch.nn.functional.unfold(image, kernel, dilation, padding, stride)[0]
    got = np.append(image.numpy().ravel(), 0)[windows.table]
    np.testing.assert_array_equal(got, due.numpy())
    assert windows.height * windows.width == due.shape[1]
    np.testing.assert_array_equal(windows.places, np.arange(len(due))[None])


@given(**KINDS, pool=pairs, pool_stride=pairs)
def test_with_pooling_each_window_holds_those_of_the_outputs_that_are_pooled(
    kernel, stride, padding, dilation, pool, pool_stride
):
    image, how = (2, 7, 6), dict(stride=stride, padding=padding, dilation=dilation)
    one, pooled = Windows.of(image, kernel, **how), Windows.of(image, kernel, **how, pool=pool, pool_stride=pool_stride)
    if one is None or one.height < pool[0] or one.width < pool[1]:
        assert pooled is None
        return
    apart = one.table.reshape(-1, one.height, one.width)
    for y in range(pooled.height):
        for x in range(pooled.width):
            window = pooled.table[:, y * pooled.width + x]
            for k, places in enumerate(pooled.places):
                dy, dx = divmod(k, pool[1])
                due = apart[:, y * pool_stride[0] + dy, x * pool_stride[1] + dx]
                np.testing.assert_array_equal(window[places], due)


@given(**KINDS, pool=pairs)
def test_a_pixels_places_in_the_table(kernel, stride, padding, dilation, pool):
    windows = Windows.of((2, 7, 6), kernel, stride=stride, padding=padding, dilation=dilation, pool=pool)
    if windows is None:
        return
    order, begins = windows.covering
    for pixel, places in enumerate(np.split(order, begins[1:])):
        np.testing.assert_array_equal(places, np.flatnonzero(windows.table.ravel() == pixel))


def test_five_by_five_with_pooling_by_two_looks_at_six_by_six():
    windows = Windows.of((1, 28, 28), (5, 5), pool=(2, 2), pool_stride=(2, 2))
    assert windows.table.shape == (36, 144)
    assert windows.places.shape == (4, 25)
    assert windows.places[3].tolist() == [6 * (1 + a) + 1 + b for a in range(5) for b in range(5)]
