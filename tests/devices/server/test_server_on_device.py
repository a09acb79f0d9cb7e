"""A server on a device: its vectors, its errors, and its state after a failed round."""

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Server, Storage, Update, combines
from fedcore.arrays import core, to_host
from fedcore.errors import DeviceError, DeviceMemoryError, RangeError, RoundError, UnknownNameError
from tests.devices.server.kit import (
    Tensor,
    by_name,
    everything,
    fields_of,
    host,
    model,
    on_device,
    replies,
    run_rounds,
    server,
)
from tests.kit import python
from tests.server.test_compatibility import USED, make, named

ILLEGAL_ADDRESS = 700
OUT_OF_MEMORY = 2


def test_two_clients_by_hand(cuda_device):
    with Server(np.float32([1, 1]), "MIFA", clients=2, lr=0.5, server_lr=0.5, compute=Compute(device="cuda")) as s:
        assert s.device == "cuda:0"
        with s.open_round() as round:
            round.add(0, Tensor(np.float32([0, 3])), steps=2)  # h = (1 - y) / (0.5 * 2) = (1, -2)
            round.add(1, np.float32([-1, 1]), steps=4)  # (1, 0)
        np.testing.assert_array_equal(host(s.x), [0.5, 1.5])
        np.testing.assert_array_equal(host(s.v), [1, -1])
        np.testing.assert_array_equal(s.store.read(0), [1, -2])
        with s.open_round() as round:
            incoming = round.begin(1, steps=2)
            incoming.write("x", np.float16([1.5]), start=1)
            incoming.write("x", Tensor(np.float32([-0.5])))
            assert incoming.done()  # (1, 0): v stays
        np.testing.assert_array_equal(host(s.x), [0, 2])


def test_vectors_are_returned_on_the_device(cuda_device):
    s = server("SCAFFOLD", "cuda", "f32", "cuda")
    run_rounds(s, 2)
    broadcast = s.broadcast([0, 1])
    for vector in (s.x, s.v, broadcast.x, broadcast.offset(0), s.store.row(1), s.store.read(1), s.correction(0)):
        assert isinstance(vector, core.DeviceArray)
        assert vector.__dlpack_device__() == (2, 0)
    assert not s.x.writeable
    assert s.x.address == s._backend.snapshot.x.address
    cpu = broadcast.on_host()
    np.testing.assert_array_equal(cpu.x, to_host(broadcast.x))
    np.testing.assert_array_equal(cpu.offset(0), to_host(broadcast.offset(0)))
    np.testing.assert_array_equal(cpu.offset(0, out=np.empty(2077, np.float32)), cpu.of(0).offset)
    assert cpu.on_host() is cpu
    assert not cpu.x.flags.writeable
    np.testing.assert_array_equal(s.tensors()["w"].reshape(-1), cpu.x[:2000])


def test_x_is_copied_into_a_model_wherever_it_lies(cuda_device):
    s = server("FedAvg", "ram", "f32", "cuda")
    run_rounds(s, 1)
    due = s.tensors()
    for empty in (np.zeros_like, lambda tensor: Tensor(np.zeros_like(tensor))):
        model = {name: empty(tensor) for name, tensor in due.items()}
        s.load_into(model)
        for name, tensor in model.items():
            np.testing.assert_array_equal(tensor if isinstance(tensor, np.ndarray) else tensor.numpy(), due[name])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_models_on_the_device_in_any_float_dtype(cuda_device, dtype):
    """The first model, and the updates of a small model."""
    cpu, gpu = (
        Server(
            {name: make(x.astype(dtype)) for name, x in model().items()}, "MIFA", 2, lr=0.1, compute=Compute(device=d)
        )
        for make, d in ((np.asarray, "cpu"), (Tensor, "cuda"))
    )
    sent = [{name: (x * np.float32(2 + i)).astype(dtype) for name, x in model().items()} for i in range(2)]
    cpu.round([Update(i, y, steps=1) for i, y in enumerate(sent)])
    gpu.round([Update(i, {name: Tensor(x) for name, x in y.items()}, steps=1) for i, y in enumerate(sent)])
    assert everything(gpu) == everything(cpu)


@pytest.mark.parametrize("accumulator", ["float32", "exact"])
def test_invalid_updates_are_rejected_alike(cuda_device, accumulator):
    made = [server("MIFA", "ram", "bf16", device, accumulator=accumulator) for device in ("cpu", "cuda")]
    reports = []
    for s in made:
        run_rounds(s, 1)
        updates = replies(s)
        nan, negative = updates[0].value.copy(), updates[1].value.copy()
        nan[70], negative[-1] = np.nan, -1
        long = updates[2]._replace(value=updates[2].value * np.float32(1e20))  # beyond an exact sum's range only
        bad = [updates[0]._replace(value=nan), updates[1]._replace(value=negative), long, *updates[3:]]
        reports.append(fields_of(s.round(bad)))
    assert len(reports[0]["rejected"]) == (2 if accumulator == "float32" else 3)
    assert reports[0] == reports[1]
    assert everything(made[0]) == everything(made[1])


def test_a_tensor_of_another_device_is_refused_by_name(cuda_device):
    s = Server(np.zeros(5, np.float32), "FedAvg", clients=2, lr=0.1, compute=Compute(device="cuda"))
    report = s.round([Update(0, Tensor(np.ones(5, np.float32), device=1), steps=1)])
    assert "expected float32[5] in CPU memory or on cuda:0" in report.rejected[0][1]
    on_cpu = Server(np.zeros(5, np.float32), "FedAvg", clients=2, lr=0.1)
    assert "in CPU memory" in on_cpu.round([Update(0, Tensor(np.ones(5, np.float32)), steps=1)]).rejected[0][1]


@pytest.mark.parametrize("medium", ["ram", "mmap", "cuda"])
def test_a_device_out_of_memory_leaves_the_server_unchanged(cuda_driver, tmp_path, medium):
    with server("MIFA, at once", medium, "f32", "cuda", tmp_path / "rows") as s:
        before, updates = everything(s), replies(s)
        cuda_driver.set_limit(cuda_driver.live_bytes(0))
        with pytest.raises(DeviceMemoryError):
            s.round(updates)
        cuda_driver.set_limit()
        assert everything(s) == before
        reference = server("MIFA, at once", "ram", "f32", "cpu")
        assert run_rounds(s, 2) == run_rounds(reference, 2)
        assert everything(s) == everything(reference)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuLaunchKernel", "cuStreamSynchronize", "cuMemcpyHtoDAsync"])
@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_failed_call_leaves_the_server_unchanged(cuda_driver, tmp_path, call, after):
    with server("MIFA, at once", "mmap", "f32", "cuda", tmp_path / "rows") as s:
        run_rounds(s, 1)
        before, updates = everything(s), replies(s)
        cuda_driver.fail(call, OUT_OF_MEMORY, after=after)
        try:
            s.round(updates)
        except DeviceError:
            cuda_driver.mend()
            assert everything(s) == before
            s.round(updates)
        cuda_driver.mend()
        reference = server("MIFA, at once", "ram", "f32", "cpu")
        run_rounds(reference, 2)
        assert everything(s) == everything(reference)


@pytest.mark.parametrize("row", combines("device").conflicts, ids=named)
def test_a_pair_of_the_table_with_a_device_is_refused(row, cuda_device, tmp_path):
    with pytest.raises(RangeError) as error:
        make(USED[row.a] | USED[row.b], tmp_path / "s")
    assert row.because in str(error.value)


def test_invalid_combinations_of_devices_and_stores(cuda_device, tmp_path):
    x0, on_cpu, on_gpu = np.zeros(5, np.float32), Compute(device="cpu"), Compute(device="cuda")
    with pytest.raises(UnknownNameError, match=r"^device\b.*'gpu'"):
        Compute(device="gpu")
    with pytest.raises(RangeError, match=r"^cached_rows\b"):
        Storage(cached_rows=-1)
    with pytest.raises(DeviceError, match=r"^device\b"):
        Server(x0, "MIFA", 2, lr=0.1, storage=f"{tmp_path}/new", compute=Compute(device="cuda:7"))
    for storage, compute, error, match in (
        (ClientStore(2, 5, medium="cuda:0"), on_cpu, RangeError, r"^medium\b"),
        (ClientStore(2, 5, medium="cuda:1"), on_gpu, RangeError, r"^storage\b"),
        (Storage(medium="cuda", cached_rows=3), on_gpu, RangeError, r"^cached_rows\b"),
    ):
        options = {"storage": storage, "compute": compute, "clients": None if isinstance(storage, ClientStore) else 2}
        with pytest.raises(error, match=match):
            Server(x0, "MIFA", lr=0.1, **{name: value for name, value in options.items() if value is not None})
    assert not (tmp_path / "new").exists()
    with pytest.raises(UnknownNameError, match=r"^medium\b.*'ram:1'"):
        ClientStore(2, 5, medium="ram:1")
    s = Server(x0, "MIFA", clients=2, lr=0.1, storage=Storage(medium="cuda"), compute=Compute(device="cuda:1"))
    assert (s.device, s.store.device, s.store.medium, s.x.device) == ("cuda:1", "cuda:1", "cuda", 1)


def test_a_round_too_early_for_a_warm_start(cuda_device):
    s = server("SCAFFOLD", "ram", "f32", "cuda")
    run_rounds(s, 1)
    with pytest.raises(RoundError, match="warm_start"):
        s.warm_start({0: np.ones(2077, np.float32)})


NO_DRIVER = """
import numpy as np, os
from fedcore import ClientStore, Compute, Server
from fedcore.errors import DeviceError
for make in (
    lambda: Server(np.zeros(2, np.float32), "MIFA", 2, lr=0.1, storage="rows", compute=Compute(device="cuda")),
    lambda: ClientStore(2, 2, medium="cuda"),
):
    try:
        make()
    except DeviceError as error:
        assert "no NVIDIA driver: nowhere.so" in str(error), error
    else:
        raise AssertionError
assert os.listdir() == []
server = Server(np.zeros(2, np.float32), "MIFA", 2, lr=0.1)
"""


def test_without_a_driver_nothing_is_created(tmp_path):
    python("-c", NO_DRIVER, cwd=tmp_path, FEDCORE_CUDA_DRIVER="nowhere.so")


@pytest.mark.parametrize("whole", [True, False])
def test_a_journal_takes_tensors_on_the_device(cuda_device, tmp_path, whole):
    cpu = server("SCAFFOLD, two vectors", "ram", "f32", "cpu")
    server("SCAFFOLD, two vectors", "mmap", "f32", "cuda", tmp_path / "s").close()
    gpu, updates = Server.load(tmp_path / "s", storage=Storage(journal=True)), replies(cpu)
    opened = gpu.open_round()
    for update in updates:
        assert opened.add(**on_device(update, whole)._asdict())
    gpu.close()
    with Server.load(tmp_path / "s") as gpu:
        again = gpu.open_round()
        assert set(again.clients) == {update.client for update in updates}
        again.finish()
        cpu.round(updates if whole else list(map(by_name, updates)))
        assert everything(gpu) == everything(cpu)
