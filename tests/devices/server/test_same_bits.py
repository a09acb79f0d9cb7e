"""Servers on a device have the CPU's bits, for every method, codec, medium and form of updates."""

import numpy as np
import pytest

from fedcore import Compute, Server, Update, rules
from fedcore.algorithms import optimizers
from fedcore.arrays import empty
from fedcore.store import device_store as pinning
from tests.devices.memory import Stream
from tests.devices.server import kit
from tests.devices.tensors import TorchTensor

SUMS = pytest.mark.parametrize("accumulator", ["float32", "exact"])


def pair(**options):
    """A server of FedAvg on the CPU, and one on the device."""
    return [kit.server("FedAvg", "ram", "f32", device, **options) for device in ("cpu", "cuda")]


@pytest.mark.parametrize("medium", ["ram", "pinned", "mmap", "cuda"])
@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
def test_every_medium_and_codec(cuda_device, tmp_path, monkeypatch, medium, codec):
    if medium == "pinned":
        monkeypatch.setattr(pinning, "LEAST", 1)
        medium = "ram"
    cpu = kit.server("MimiC, short history", "ram", codec, "cpu")
    bounded = {} if medium == "cuda" else {"cached_rows": 2}
    with kit.server("MimiC, short history", medium, codec, "cuda", tmp_path / "rows", batch_size=2, **bounded) as gpu:
        assert kit.run_rounds(gpu, 5) == kit.run_rounds(cpu, 5)
        assert kit.everything(gpu) == kit.everything(cpu)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("method", "codec", "accumulator"),
    [
        ("FedAvg", "f32", "float32"),
        ("SCAFFOLD", "bf16", "float32"),
        ("SCAFFOLD", "bf16", "exact"),
        ("SCAFFOLD, two vectors", "f32", "float32"),
    ],
)
def test_replies_that_lie_on_the_device_go_in_as_they_are(cuda_driver, method, codec, accumulator, whole):
    cpu = kit.server(method, "ram", codec, "cpu", accumulator=accumulator)
    gpu = kit.server(method, "cuda", codec, "cuda", accumulator=accumulator)
    for _ in range(3):
        updates = kit.replies(cpu)
        gpu.broadcast([update.client for update in updates])
        theirs = [kit.on_device(update, whole) for update in updates]
        updates = updates if whole else [kit.by_name(update) for update in updates]
        cuda_driver.calls()
        report = kit.fields_of(gpu.round(theirs))
        names = [call.name for call in cuda_driver.calls()]
        assert report == kit.fields_of(cpu.round(updates))
        # Only float buffers go through the host: twice a round for clipping, and once an update for the check.
        assert names.count("cuMemcpyHtoDAsync") <= 30
        assert kit.everything(gpu) == kit.everything(cpu)


def test_replies_that_are_kept_were_taken_in_under_several_streams(cuda_device, monkeypatch):
    """A fold on another stream sees the work that a library queued on each stream."""
    gpu = Server(np.zeros(3000, np.float32), "FedAvg", clients=4, lr=0.1, compute=Compute(device="cuda", batch_size=4))
    cpu = Server(np.zeros(3000, np.float32), "FedAvg", clients=4, lr=0.1, compute=Compute(batch_size=4))
    ys = np.random.default_rng(0).normal(size=(4, 3000)).astype(np.float32)
    gpu.x.to_host()  # no work is queued that all streams would wait for
    streams = [Stream() for _ in ys]
    with gpu.open_round() as round:
        tensors = []
        for y, stream in zip(ys, streams, strict=True):
            monkeypatch.setattr(TorchTensor, "current", stream.number)
            tensors.append(kit.Tensor(y))
        for i, stream in enumerate(streams):
            monkeypatch.setattr(TorchTensor, "current", stream.number)
            round.add(i, tensors[i], steps=2, keep=True)
    cpu.round([Update(i, y, steps=2) for i, y in enumerate(ys)])
    np.testing.assert_array_equal(kit.host(gpu.x), cpu.x)


def test_replies_by_name_in_host_memory(cuda_device):
    cpu, gpu = pair()
    updates = [kit.by_name(update) for update in kit.replies(cpu)]
    kit.same_round(cpu, gpu, updates)


def test_replies_that_lie_partly_on_the_device(cuda_device):
    cpu, gpu = pair()
    updates = kit.replies(cpu)
    mixed = []
    for update in updates:
        tensors = kit.on_device(update, whole=False).value
        tensors["bias"] = kit.by_name(update).value["bias"]
        mixed.append(update._replace(value=tensors))
    kit.same_round(cpu, gpu, [kit.by_name(update) for update in updates], mixed)


@SUMS
@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_replies_of_other_dtypes(cuda_device, dtype, accumulator):
    torch = pytest.importorskip("torch")
    cpu, gpu = pair(accumulator=accumulator)
    updates = [u._replace(value=torch.from_numpy(u.value).to(getattr(torch, dtype))) for u in kit.replies(cpu)]
    kit.same_round(cpu, gpu, updates)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam", "Yogi"])
def test_every_optimizer(cuda_device, kind):
    cpu, gpu = pair(optimizer=optimizers.named(kind))
    assert kit.run_rounds(cpu, 3) == kit.run_rounds(gpu, 3)
    assert kit.everything(cpu) == kit.everything(gpu)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_of_16_bits(cuda_device, dtype):
    torch = pytest.importorskip("torch")
    x0 = {"w": torch.linspace(-1, 1, 2100).to(getattr(torch, dtype)), "b": torch.ones(5), "steps": torch.tensor(3)}
    made = [Server(x0, "MIFA", clients=6, lr=0.1, compute=Compute(device=device)) for device in ("cpu", "cuda")]
    for _ in range(3):
        sent = [s.broadcast([0, 1]).on_host().x for s in made]
        np.testing.assert_array_equal(*sent)
        updates = [Update(i, sent[0] * np.float32(0.9 - i / 10), steps=2) for i in range(6)]
        assert kit.fields_of(made[0].round(updates)) == kit.fields_of(made[1].round(updates))
        assert kit.everything(made[0]) == kit.everything(made[1])
    for name, tensor in made[0].tensors().items():
        assert torch.equal(tensor, made[1].tensors()[name])


def test_buffered_updates_on_the_device_are_copied(cuda_device):
    """Lengths are compared with the median of all updates; until then the caller may reuse the memory of each."""
    x0 = np.zeros(2100, np.float32)
    made = [
        Server(x0, "FedAvg", 4, lr=0.1, aggregation=[rules.RejectLong(9)], compute=Compute(device=device))
        for device in ("cpu", "cuda")
    ]
    again = empty(2100, device="cuda")
    for s in made:
        with s.open_round() as opened:
            for client in range(4):
                y = x0 + np.float32(client + 1)
                again.copy_from(y)
                opened.add(client, y if s is made[0] else again, steps=2)
    assert made[1].round_number == 1
    assert kit.everything(made[0]) == kit.everything(made[1])


def test_partial_sums_of_either_device_are_added_on_the_other(cuda_device):
    servers = pair(accumulator="exact")
    for _ in range(2):
        updates, partials, reports = kit.replies(servers[0]), [], []
        for s in servers:
            with s.open_round() as round:
                round.add_batch(updates[:2])
                partials.append(round.partial_sum())
        assert partials[0].to_bytes() == partials[1].to_bytes()
        for s, partial in zip(servers, reversed(partials), strict=True):
            with s.open_round() as round:
                round.add_partial_sum(partial, "edge")
                round.add_batch(updates[2:])
            reports.append(kit.fields_of(round.report))
        assert reports[0] == reports[1]
        assert len(reports[0]["accepted"]) == len(updates)
    assert kit.everything(servers[0]) == kit.everything(servers[1])


ROBUST = {
    "median": ("FedAvg", "median"),
    "mixed": ("FedAvg", [rules.NearestNeighborMixing(1), rules.Bucketing(2), rules.TrimmedMean(0)]),
    "Multi-Krum": ("FedAvgM", rules.MultiKrum(0)),
    "Bulyan": ("FedAvg", rules.Bulyan(0)),
    "clipping": ("FedAvg", rules.CentredClipping(0.5)),
    "with rows": ("MimiC, short history", [rules.ClipToMedian(), rules.GeometricMedian()]),
    "with changes": ("SCAFFOLD, two vectors", [rules.ClipToMedian(), "median"]),
}


@pytest.mark.parametrize("name", ROBUST)
def test_robust_rules(cuda_device, name):
    method, rule = ROBUST[name]
    cpu, gpu = (kit.server(method, "ram", "f32", device, aggregation=rule, batch_size=2) for device in ("cpu", "cuda"))
    reused = empty(2100, device="cuda")
    for seed in (3, 10, 1):
        updates = kit.replies(cpu, seed)
        gpu.broadcast([update.client for update in updates])
        with gpu.open_round() as round:
            for i, update in enumerate(updates):
                if i % 3 == 0:
                    reused.copy_from(update.value)
                    update = update._replace(value=reused)
                elif i % 3 == 1:
                    update = kit.on_device(update)._replace(keep=True)
                round.add(**update._asdict())
        assert kit.fields_of(round.report) == kit.fields_of(cpu.round(updates))
        assert kit.everything(gpu) == kit.everything(cpu)
