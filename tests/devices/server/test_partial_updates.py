"""A server with partial updates on a device has the bits of one on the CPU."""

from dataclasses import replace

import numpy as np
import pytest

from fedcore import Compute, RoundPolicy, Server, Storage, Update
from fedcore.errors import DeviceError, StoreError
from fedcore.rules import PrivateMean
from tests.devices.server.kit import Tensor, everything, fields_of, host
from tests.server.test_groups import METHODS, THREE, N, claims_of, control_of, new_server, sets_of, update_of

OUT_OF_MEMORY = 2


def made(method, device, folder=None, medium=None, codec=None, **options):
    """A server of a method; small batches, so that a cohort comes in several."""
    options = dict(METHODS.get(method, {})) | options
    place, compute = options.pop("storage", Storage(codec=codec)), options.pop("compute", Compute(batch_size=2))
    place = replace(place, path=folder if medium == "mmap" else None, medium=medium)
    return new_server(method, storage=place, compute=replace(compute, device=device, diagnostics=True), **options)


def updates_of(server, sets, kinds=("model",)):
    """The updates of a cohort, a pure function of the round; every fifth one is a flat vector."""
    number, updates = server.round_number, []
    for client in np.flatnonzero(np.random.default_rng(number).random(N) < 0.7).tolist():
        kind = kinds[client % len(kinds)]
        groups = THREE if sets[client] == THREE or client % 5 == 0 or kind == "gradient" else sets[client]
        value = update_of(client, number, groups)
        if client % 5 == 0 or kind == "gradient":
            value = server.layout.flatten(value)[: server.layout.n_parameters if kind == "gradient" else None]
        elif kind == "delta":
            value = {name: tensor for name, tensor in value.items() if name != "text.num_batches_tracked"} | (
                {"text.num_batches_tracked": np.int64(1)} if "text" in groups else {}
            )
        second = server.algorithm.second_vector is not None
        control = control_of(server, client, number, groups) if second else None
        updates.append(Update(client, value, kind=kind, control=control, **claims_of(client)))
    return updates


def lying_on_device(update):
    """The update with its floats on the device; every third client has half of its tensors in host memory."""
    control = None if update.control is None else Tensor(update.control)
    if not isinstance(update.value, dict):
        return update._replace(value=Tensor(update.value), control=control)
    tensors = {}
    for i, (name, tensor) in enumerate(update.value.items()):
        stays = tensor.dtype.kind != "f" or (update.client % 3 == 0 and i % 2)
        tensors[name] = tensor if stays else Tensor(tensor)
    return update._replace(value=tensors, control=control)


def same_rounds(cpu, gpu, rounds, sets, kinds=("model",)):
    """Run rounds on both, on the second with some updates on the device, and compare."""
    for number in range(rounds):
        updates = updates_of(cpu, sets, kinds)
        gpu.broadcast([update.client for update in updates])
        reports = []
        for server, sent in ((cpu, updates), (gpu, updates[:1] + list(map(lying_on_device, updates[1:])))):
            with server.open_round() as opened:
                assert all(opened.add(**update._asdict()) for update in sent)
            reports.append(fields_of(opened.report))
        assert reports[0] == reports[1], number
        assert everything(cpu) == everything(gpu), number
    assert host(gpu.x).tobytes() == cpu.x.tobytes()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_bits_of_the_cpu(cuda_device, tmp_path, method):
    medium = ("ram", "mmap", "cuda")[list(METHODS).index(method) % 3]
    cpu = made(method, "cpu")
    with made(method, "cuda", tmp_path / "run", medium) as gpu:
        same_rounds(cpu, gpu, 4, sets_of(THREE))


@pytest.mark.parametrize(("medium", "codec"), [("ram", "bf16"), ("mmap", "int8"), ("cuda", "int8"), ("mmap", "f32")])
def test_every_medium_and_codec(cuda_device, tmp_path, medium, codec):
    cpu, bounded = made("MimiC", "cpu", codec=codec), {} if medium == "cuda" else {"cached_rows": 2}
    storage = Storage(codec=codec, **bounded)
    with made("MimiC", "cuda", tmp_path / "run", medium, storage=storage) as gpu:
        same_rounds(cpu, gpu, 4, sets_of(THREE))
        for server in (cpu, gpu):
            server.remove_client(2)
            server.add_clients(["new"])
            server.replace_x(update_of(0, 9, ["text", "rest"]))
        gpu.compact(erase=True)
        assert everything(cpu) == everything(gpu)


@pytest.mark.parametrize("medium", ["ram", "mmap", "cuda"])
def test_a_run_moves_between_devices(cuda_device, tmp_path, medium):
    sets, straight = sets_of(THREE), made("SCAFFOLD", "cpu", codec="bf16")
    run, copies = made("SCAFFOLD", "cuda", tmp_path / "run", medium, codec="bf16"), iter(range(9))
    was_on_cpu = False
    for device in (None, "cpu", "cuda:1", None):
        for server in (straight, run):
            server.round(updates_of(server, sets))
        was_on_cpu |= device == "cpu"
        place = tmp_path / "run"
        if medium != "mmap":
            place = tmp_path / f"copy {next(copies)}"
            run.save(place)
        before = run.device
        run.close()
        run = Server.load(place, compute=Compute(device=device))
        assert run.device == (before if device is None else device)
        assert everything(run) == everything(straight)
        held = {state.store.medium for state in run._backend.groups.values()}
        assert held == {"ram" if medium == "cuda" and was_on_cpu else medium}
    run.close()


@pytest.mark.parametrize("method", ["FedAvg", "FedAWE", "MIFA", "SCAFFOLD"])
def test_a_journal_and_an_audit(cuda_device, tmp_path, method):
    """Models, differences and gradients, in host memory and on the device, come back after a restart."""
    options = {} if method == "FedAWE" else {"server_lr": 1.0}
    kinds = ("model", "gradient", "delta") if options else ("model",)
    runs, storage = {}, Storage(journal=True, audit=True)
    for device in ("cpu", "cuda"):
        folder, sets = tmp_path / device, sets_of(THREE)
        run = made(method, device, folder, "mmap", storage=storage, **options)
        for _ in range(2):
            sent = updates_of(run, sets, kinds)
            opened = run.open_round()
            assert all(opened.add(**one._asdict()) for one in (sent if device == "cpu" else map(lying_on_device, sent)))
            run.close()
            run = Server.load(folder)
            again = run.open_round()
            assert again.clients == tuple(one.client for one in sent)
            again.finish()
        runs[device] = everything(run), [document | {"time": None} for document in run.audit_log()]
        run.close()
    (cpu, cpu_log), (gpu, gpu_log) = runs.values()
    changing = {"audited": None}  # the digest has the time
    assert [(*one[:3], one[3] | changing) for one in cpu] == [(*one[:3], one[3] | changing) for one in gpu]
    for a, b in zip(cpu_log, gpu_log, strict=True):
        assert {k for k in a if a[k] != b[k]} <= {"previous", "finished"}


def test_a_buffer(cuda_device):
    policy = RoundPolicy(buffer=3, max_staleness=2, discount=0.5)
    servers, sets = [made("FedAvgM", device, policy=policy) for device in ("cpu", "cuda")], sets_of(THREE)
    for number in range(5):
        start = max(0, number - 1)
        sent = [one._replace(round=start) for one in updates_of(servers[0], sets)]
        some = [servers[0].push(sent), servers[1].push(map(lying_on_device, sent))]
        assert [*map(fields_of, some[0])] == [*map(fields_of, some[1])]
        assert everything(servers[0]) == everything(servers[1])
    assert servers[0].round_number > 3


@pytest.mark.parametrize("accumulator", ["float32", "exact"])
def test_noise(cuda_device, accumulator):
    shapes = {"text": (5,), "body": (40, 50)}
    rng = np.random.default_rng(1)
    model = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    from fedcore import Model

    servers = [
        Server(
            Model(model, {"text": "text"}) if is_partial else model,
            *("FedAvg", N),
            lr=0.1,
            aggregation=[PrivateMean(8.0, 0.5, 5, quantile=0.5, seed=3)],
            compute=Compute(device=device, accumulator=accumulator),
        )
        for is_partial in (False, True)
        for device in ("cpu", "cuda")
    ]
    for number in range(3):
        sent = [Update(i, {k: v * (i + 1) / (number + 2) for k, v in model.items()}, 2) for i in range(4)]
        reports = [fields_of(server.round(sent)) for server in servers]
        assert reports[0] == reports[1]
        assert reports[2] == reports[3]
        assert everything(servers[0]) == everything(servers[1])
        assert everything(servers[2]) == everything(servers[3])


def test_partial_sums_of_either_device_are_added_on_the_other(cuda_device):
    exact, two = Compute(accumulator="exact"), ("image", "rest")  # without counters
    servers = [made("FedAvgM", d, compute=exact, server_lr=1.0, groups=two) for d in ("cpu", "cuda")]
    for number in range(2):
        updates = [Update(i, update_of(i, number, two[i % 2 :]), **claims_of(i)) for i in range(5)]
        partials = []
        for server in servers:
            with server.open_round() as opened:
                opened.add_batch(updates[:2])
                partials.append(opened.partial_sum())
        assert partials[0].to_bytes() == partials[1].to_bytes()
        reports = []
        for server, partial in zip(servers, reversed(partials), strict=True):
            with server.open_round() as opened:
                opened.add_partial_sum(partial, "edge")
                opened.add_batch(updates[2:])
            reports.append(fields_of(opened.report))
        assert reports[0] == reports[1]
        assert everything(servers[0]) == everything(servers[1])


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuLaunchKernel", "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync"])
def test_a_failed_call_changes_no_group(cuda_driver, tmp_path, call):
    """If a copy to the host fails between the commits of two groups, the server closes, and its folder goes back."""
    sets, straight = sets_of(THREE), made("MIFA", "cpu")
    gpu = made("MIFA", "cuda", tmp_path / "run", "mmap")
    same_rounds(straight, gpu, 1, sets)
    failed = closed = 0
    for after in range(0, 200, 7):
        before, updates = everything(straight), updates_of(straight, sets)
        cuda_driver.fail(call, OUT_OF_MEMORY, after=after)
        try:
            gpu.round(updates)
        except (DeviceError, StoreError):
            cuda_driver.mend()
            failed += 1
            try:
                found = everything(gpu)
            except StoreError:
                closed += 1
                gpu.close()
                gpu = Server.load(tmp_path / "run")
                found = everything(gpu)
            assert found == before
            continue
        finally:
            cuda_driver.mend()
        straight.round(updates)
        assert everything(gpu) == everything(straight)
        break
    assert failed
    assert closed or call != "cuMemcpyDtoHAsync"
    gpu.close()
