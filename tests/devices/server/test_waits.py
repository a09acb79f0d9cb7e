"""The host's waits for the device in a round: two, none of them for a vector; and no allocation."""

from collections import Counter

import numpy as np
import pytest

from fedcore import Compute, Server, Storage, Update
from fedcore.algorithms import Claims
from fedcore.server.aggregation import UpdateBatch
from fedcore.server.state import Upload
from tests.devices.server.kit import Tensor
from tests.kit import place

WAITS = {"cuStreamSynchronize", "cuCtxSynchronize", "cuMemAlloc", "cuMemFree", "cuMemHostAlloc"}
n = 3000


def round_of(cuda_driver, s, rounds=4):
    """The calls of the last of some rounds that the clients' tensors on the device make."""
    for number in range(rounds):
        s.broadcast(range(4))
        rng = np.random.default_rng(number)
        updates = [Update(i, Tensor(rng.normal(size=n).astype(np.float32)), steps=2) for i in range(4)]
        cuda_driver.calls()
        s.round(updates)
    return cuda_driver.calls()


# The norms of the fold determine the accepted updates, and so the weights; |x'|^2 shows whether the step diverged.
@pytest.mark.parametrize(("method", "kernels"), [("FedAvg", 2), ("MIFA", 2), ("MimiC", 2), ("SCAFFOLD", 3)])
def test_a_round_waits_for_the_norms_of_the_fold_and_of_the_step(cuda_driver, method, kernels):
    s = Server(
        np.zeros(n, np.float32),
        method,
        clients=4,
        lr=0.1,
        storage=Storage(medium="cuda"),
        compute=Compute(device="cuda"),
    )
    calls = round_of(cuda_driver, s)
    assert Counter(call.name for call in calls if call.name in WAITS) == {"cuStreamSynchronize": 2}
    launched = [call.kernel for call in calls if call.kernel is not None]
    assert launched.count("add_squares") == 2
    assert len(launched) == kernels + 2
    read = [call.argument("bytes") for call in calls if call.name == "cuMemcpyDtoHAsync"]
    assert max(read) <= 8 * 4  # only squares come to the host


def test_a_method_that_needs_the_length_of_its_step_waits_for_it(cuda_driver):
    s = Server(np.zeros(n, np.float32), "FedExP", clients=4, lr=0.1, compute=Compute(device="cuda"))
    calls = round_of(cuda_driver, s)
    assert Counter(call.name for call in calls if call.name in WAITS) == {"cuStreamSynchronize": 3}


def test_nonnegative_buffers_are_checked_in_one_wait_per_update(cuda_driver):
    x0 = {"w": np.zeros(n, np.float32)} | {f"{i}.running_var": np.ones(8, np.float32) for i in range(5)}
    s = Server(x0, "FedAvg", clients=4, lr=0.1, compute=Compute(device="cuda"))
    for number in range(4):
        rng = np.random.default_rng(number)
        sent = [{name: Tensor(rng.random(x.shape, np.float32)) for name, x in x0.items()} for _ in range(4)]
        cuda_driver.calls()
        s.round([Update(i, y, steps=2) for i, y in enumerate(sent)])
    counted = Counter(call.name for call in cuda_driver.calls() if call.name in WAITS)
    # One for each update; the norms of fold and step, of parameters and of buffers; the check for negative buffers.
    assert counted == {"cuStreamSynchronize": 4 + 2 + 2 + 1}


def test_rows_in_host_memory_go_back_behind_no_more_waits_of_the_kernels(cuda_driver):
    s = Server(np.zeros(n, np.float32), "MIFA", clients=4, lr=0.1, compute=Compute(device="cuda"))
    calls = round_of(cuda_driver, s)
    assert Counter(call.name for call in calls if call.name in WAITS) == {"cuStreamSynchronize": 2}
    rows = [call for call in calls if call.name == "cuMemcpyDtoHAsync" and call.argument("bytes") == 4 * n]
    assert len(rows) == 4
    uploads = [call for call in calls if call.name == "cuMemcpyHtoDAsync" and call.argument("bytes") >= 4 * n]
    assert uploads == []  # they are hot


def test_vectors_are_copied_whole_through_pinned_memory(cuda_driver, tmp_path):
    before = cuda_driver.pinned_bytes()
    x0, store = np.zeros(n, np.float32), f"mmap:{tmp_path / 's'}"
    with Server(x0, "FedAvg", clients=4, lr=0.1, storage=place(store), compute=Compute(device="cuda")) as s:
        cuda_driver.calls()
        s.round([Update(i, np.full(n, i, np.float32), steps=2) for i in range(4)])
        calls = cuda_driver.calls()
        for way, due in (("cuMemcpyHtoDAsync", 4), ("cuMemcpyDtoHAsync", 1)):  # the replies; x into the folder
            assert [call.argument("bytes") for call in calls if call.name == way].count(4 * n) == due
        assert cuda_driver.pinned_bytes() - before < 1 << 20


@pytest.mark.parametrize(
    ("there", "due"), [([], [2, 2, 1]), ([0], [2, 2, 1]), ([4], [2, 2, 1]), ([0, 1, 2, 3, 4], [5])]
)
def test_updates_are_uploaded_in_portions(cuda_device, there, due):
    ys = [Tensor(np.full(n, i, np.float32)) if i in there else np.full(n, i, np.float32) for i in range(5)]
    ones = np.ones(5)
    replies = UpdateBatch(
        clients=list(range(5)),
        vectors=ys,
        bases=[None] * 5,
        scales=ones,
        claims=Claims(ones, ones, ones),
        eta_steps=ones,
        has_buffers=ones > 0,
        counters=[{}] * 5,
        controls=[None] * 5,
        sources=np.ones(5, np.int8),
        starts=np.zeros(5, np.int64),
        digests=[None] * 5,
        factors=ones,
    )
    portions = Upload("cuda:0", {n}, 2).portions(replies)
    assert [len(portion) for portion in portions] == due
    assert [client for portion in portions for client in portion.clients] == replies.clients


@pytest.mark.parametrize(("method", "medium"), [("FedAvg", "ram"), ("MIFA", "ram"), ("MIFA", "cuda")])
def test_replies_from_host_memory_take_no_more_memory_with_every_round(cuda_driver, method, medium):
    long = 300_000  # enough for copies beside the kernels
    s = Server(
        np.zeros(long, np.float32), method, clients=4, lr=0.1, storage=place(medium), compute=Compute(device="cuda")
    )
    taken = []
    for number in range(5):
        s.broadcast(range(4))
        rng = np.random.default_rng(number)
        updates = [Update(i, rng.normal(size=long).astype(np.float32), steps=2) for i in range(4)]
        cuda_driver.calls()
        s.round(updates)
        taken.append(cuda_driver.live_bytes())
    assert len(set(taken[2:])) == 1
    assert not [call for call in cuda_driver.calls() if "Alloc" in call.name or "Free" in call.name]
