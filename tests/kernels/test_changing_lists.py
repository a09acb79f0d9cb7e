"""Callers' lists that change during a call: the call uses their first contents."""

import gc
import sys
import threading

import numpy as np
import pytest
import torch

from fedcore import _core, errors, kernels
from tests.kernels.calls import CALLS

LISTED = [(name, key) for name in sorted(CALLS) for key in CALLS[name].arrays(4) if "[" in key]
CHANGES = {
    "grows": lambda held, array: held.extend([array] * 10_000),
    "is emptied": lambda held, array: held.clear(),
    "holds others": lambda held, array: held.__setitem__(slice(None), [np.zeros(3)] * len(held)),
}


def lists_around(item):
    """The lists that contain an object, directly or in a list or tuple."""
    holders = [holder for holder in gc.get_referrers(item) if type(holder) in (list, tuple)]
    outer = [holder for holder in gc.get_referrers(*holders) if type(holder) is list and holder is not holders]
    return [holder for holder in holders if type(holder) is list] + outer


class Meddler:
    """An array whose export changes every list that contains it, as Python exporters may."""

    def __init__(self, array, change):
        self.array, self.change, self.changed = array, change, 0

    def __len__(self):
        return len(self.array)

    def __dlpack__(self, **options):
        for held in lists_around(self):
            self.change(held, self.array)
            self.changed += 1
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "key"), LISTED)
def test_a_list_that_an_exporter_changes(name, key, change):
    call = CALLS[name]
    due, arrays = call.arrays(40), call.arrays(40)
    due_result = call.run(due)
    meddler = Meddler(arrays[key], CHANGES[change])
    result = call.run(arrays | {key: meddler})
    assert meddler.changed > 0
    assert {k: array.tobytes() for k, array in arrays.items()} == {k: array.tobytes() for k, array in due.items()}
    if call.returns_more(due, due_result):
        np.testing.assert_array_equal(result, due_result)


def test_a_list_that_another_thread_appends_to():
    """Torch's export is Python code, during which other threads run."""
    n, k = 64, 64
    ys, stop, interval = [], threading.Event(), sys.getswitchinterval()

    def append():
        while not stop.is_set():
            if len(ys) == k:
                ys.append(torch.full((n,), 1e9))

    thread = threading.Thread(target=append)
    sys.setswitchinterval(1e-6)
    thread.start()
    bases, ones, out = [np.zeros(n, np.float32)] * (k + 1), np.ones(k + 1), np.zeros(n)
    try:
        for _ in range(300):
            ys[:] = [torch.ones(n) for _ in range(k)]
            held = len(ys)  # perhaps one more already
            try:
                norms = kernels.accumulate(None, bases[:held], ys, ones[:held], ones[:held], out=out)
            except ValueError:
                continue  # it was appended to before the call began
            assert len(norms) == held
            assert (norms[:k] == n).all()
            assert (out == (-k if held == k else -k - 1e9)).all()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_a_list_that_changes_during_registration():
    class Id:
        pass

    clients = [Id(), Id()]
    names = iter("ab")

    def canonical(_):
        clients.extend([Id()] * 10)
        return next(names)

    index = _core.ClientIndex(bytes(16), 0)
    numbers, twice = index.add_all(clients, canonical)
    assert numbers.tolist() == [0, 1]
    assert twice is None
    assert len(index) == 2


def test_ids_from_canonical_are_checked():
    """It is Python code; an invalid id would count as client 0."""
    index = _core.ClientIndex(bytes(16), 0)
    with pytest.raises(errors.UnknownClientError, match=r"^clients\[1\]"):
        index.add_all(["a", object()], lambda _: None)
    assert len(index) == 0
