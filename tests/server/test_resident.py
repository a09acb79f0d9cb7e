"""A server whose vectors are in files has the bits of one in memory, and needs little memory."""

import errno
import os
import signal
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fedcore import Model, Safetensors, Server, Storage, Update, arrays, write_model
from fedcore.algorithms import optimizers
from fedcore.arrays import FileMemory, core, device_of
from fedcore.errors import StoreError
from fedcore.rules import Bulyan, CentredClipping, Krum, MultiKrum, NearestNeighborMixing
from tests.cluster.pairs import METHODS, SIZES, both, made, one_round, same
from tests.kit import python

ROOT = Path(__file__).parents[2]
X0 = np.linspace(-1, 1, 3 * 16_384 + 1_000, dtype=np.float32)
WINDOWS = {"one block": 1, "three blocks": 4 * 3 * 16_384 * 24, "all": 1 << 40}


@pytest.fixture(autouse=True)
def short_vectors_are_in_files(monkeypatch):
    monkeypatch.setattr(arrays, "FILES_FROM", 1)


CASES = [*product(sorted(METHODS), WINDOWS, [{}]), ("MIFA", "one block", dict(codec="int8"))]
CASES += [("SCAFFOLD", "one block", options) for options in (dict(codec="bf16"), dict(clip=True))]
CASES += [("SCAFFOLD", "one block", dict(optimizer=optimizers.Adam(), server_lr=0.5))]
CASES += [("MimiC", "one block", dict(accumulator="exact", diagnostics=True))]
CASES += [("FedAvg", "one block", dict(reject_long=3.0))]


@pytest.mark.parametrize(("method", "window", "options"), CASES)
@pytest.mark.sample(1)
def test_the_bits_are_those_in_memory(method, window, options, tmp_path):
    options = dict(clients=SIZES) | options
    one = made(method, X0, **options)
    many = made(method, X0, path=tmp_path / "s", resident=WINDOWS[window], **options)
    for _ in range(3):
        both(one, many, one_round)
    same(one, many)
    now = many._backend.snapshot
    assert all(isinstance(device_of(vector), FileMemory) for vector in (now.x, now.momentum))
    many.close()
    loaded = Server.load(tmp_path / "s", storage=Storage(resident=WINDOWS[window]))
    both(one, loaded, one_round)
    same(one, loaded)
    loaded.close()


KILLED = """
import os, signal, sys
import numpy as np
from fedcore import Server, Storage, arrays
arrays.FILES_FROM = 1
x = np.linspace(-1, 1, 50_000, dtype=np.float32)
server = Server(x, "MIFA", 2, lr=0.1, storage=Storage(sys.argv[1], resident=1, journal=True))
for round in range(2):
    opened = server.open_round()
    opened.add(0, x * np.float32(round), steps=2)
    if round == 0:
        opened.add(1, -x, steps=1)
        opened.finish()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_server_continues_and_leaves_no_file(tmp_path):
    python("-c", KILLED, tmp_path / "s", status=-signal.SIGKILL)
    x = np.linspace(-1, 1, 50_000, dtype=np.float32)
    straight = Server(x, "MIFA", 2, lr=0.1, storage=Storage(tmp_path / "straight", journal=True))
    loaded = Server.load(tmp_path / "s", storage=Storage(resident=1))
    with straight.open_round() as round:
        round.add(0, x * np.float32(0), steps=2)
        round.add(1, -x, steps=1)
    with straight.open_round() as round:
        round.add(0, x * np.float32(1), steps=2)
    with loaded.open_round() as round:
        assert round.clients == (0,)
    same(straight, loaded)
    assert {path.name for path in (tmp_path / "s").iterdir()} == {p.name for p in (tmp_path / "straight").iterdir()}
    loaded.close()


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    """Each reservation of disk space fails in turn, for a vector or a row."""
    straight = made("MIFA", X0)
    reserve, failures = os.posix_fallocate, 0
    for call in range(1, 100):
        server = made("MIFA", X0, path=tmp_path / str(call), resident=1)
        calls = []

        def fail(*arguments, call=call, calls=calls):
            calls.append(arguments)
            if len(calls) == call:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            reserve(*arguments)

        monkeypatch.setattr(os, "posix_fallocate", fail)
        try:
            one_round(server)
        except StoreError as error:
            failures += 1
            assert "No space left" in str(error)  # noqa: PT017
            assert server.x.tobytes() == X0.tobytes()
            assert server.round_number == 0
            one_round(server)
        monkeypatch.undo()
        monkeypatch.setattr(arrays, "FILES_FROM", 1)
        if call == 1:
            one_round(straight)
        same(straight, server)
        server.close()
        if len(calls) < call:
            break
    assert failures > 3


PEAK = """
import sys
from itertools import product
from pathlib import Path
import numpy as np
from fedcore import Model, Safetensors, Server, Storage, write_model

def mebibytes(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) >> 10

folder, n = Path(sys.argv[1]), 12 << 20
x = np.zeros(n, np.float32)
write_model({"w": x[: n // 2], "v": x[n // 2 :]}, folder / "x.safetensors")
del x
Path("/proc/self/clear_refs").write_text("5")
before = mebibytes("VmHWM")
storage = Storage(folder / "s", resident=8 << 20)
model = Model(Safetensors(folder / "x.safetensors"), {"A": "w"} if "partial" in sys.argv else {})
server = Server(model, "FedAvg", 2, lr=0.1, storage=storage)
for _ in range(2):
    with server.open_round() as round:
        for client in range(2):
            round.add(client, Safetensors(folder / "x.safetensors"), steps=1)
server.write(folder / "out")
print(mebibytes("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of resident memory is Linux's")
@pytest.mark.parametrize("updates", ["whole", "partial"])
def test_memory_stays_below_one_vector(updates, tmp_path):
    """Vectors of 48 MiB, of which a server in memory has five; a limit of 8 MiB, and 32 MiB to read the first model."""
    assert int(python("-c", PEAK, tmp_path, updates).stdout) < 48


@pytest.mark.parametrize("partial", [{}, {"A": ["b", "c"]}], ids=len)
def test_models_and_updates_in_files(partial, tmp_path):
    """Tensors of three dtypes; an update is held in the dtypes of its file."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)

    def model():
        tensor = torch.from_numpy(rng.normal(size=(300, 100)).astype(np.float32))
        return {"a": tensor.bfloat16(), "b": tensor[:7].double(), "c": tensor[:9].half(), "d": tensor[:5].clone()}

    models = [model() for _ in range(4)]
    for i, one in enumerate(models):
        write_model(one, tmp_path / f"{i}.safetensors")
    files = [Safetensors(tmp_path / f"{i}.safetensors") for i in range(4)]
    for method in ("FedAvg", "MIFA"):
        storage = Storage(tmp_path / method, resident=1, journal=method == "MIFA", audit=True)
        x0 = Model(files[0], partial)
        servers = Server(x0, method, 3, lr=0.1), Server(x0, method, 3, lr=0.1, storage=storage)
        for server, sent in zip(servers, (models, files), strict=True):
            with server.open_round() as round:
                assert [round.add(i, sent[i + 1], steps=2) for i in range(3)] == [True] * 3
        assert servers[0].x.tobytes() == servers[1].x.tobytes()
        servers[1].write(tmp_path / f"{method} written")
        written = Safetensors(tmp_path / f"{method} written")
        assert [header.text for header in written.headers] == [header.text for header in files[0].headers]
        for name, tensor in servers[0].tensors(library="torch").items():
            assert torch.equal(torch.as_tensor(written[name].astype(np.float64)), tensor.double())
        servers[1].close()


def test_a_limit_ends_with_its_server(tmp_path):
    server = made("FedAvg", X0, path=tmp_path / "s", resident=7)
    assert core.resident_limit() == 7
    server.close()
    x = server.x
    del server
    assert x.tobytes() == X0.tobytes()
    del x
    assert core.resident_limit() == 0


def updates(server, k=8):
    """Close models of k clients, two of which lie."""
    for i in range(k):
        rng = np.random.default_rng([server.round_number, i])
        y = server.x + rng.normal(size=len(server.x)).astype(np.float32)
        yield Update(i, y * np.float32(40) if i < 2 else y, 1, keep=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rule", ["median", Krum(1), Bulyan(1), CentredClipping(100.0), "mixed"], ids=str)
def test_robust_rules_have_the_bits_in_memory(rule, window, tmp_path):
    rule = [NearestNeighborMixing(1), MultiKrum(1)] if rule == "mixed" else rule
    model = {"a": X0[:-7], "b.running_mean": X0[-7:]}
    options = dict(lr=0.1, aggregation=rule)
    one = Server(model, "FedAvg", 8, **options)
    many = Server(model, "FedAvg", 8, storage=Storage(tmp_path / "s", resident=WINDOWS[window]), **options)
    for _ in range(2):
        both(one, many, lambda server: server.round(updates(server)))
    with many.open_round() as round:
        for update in updates(many):
            round.add(update.client, update.value, steps=1, keep=True)
        for held in [*round._held, *round._folded]:
            assert all(isinstance(device_of(y), FileMemory) for y in held.vectors)
    one.round(updates(one))
    same(one, many)
    many.close()
    both(one, loaded := Server.load(tmp_path / "s", storage=Storage(resident=1)), lambda s: s.round(updates(s)))
    same(one, loaded)
    loaded.close()


COHORT = """
import sys
import numpy as np
from pathlib import Path
from fedcore import Safetensors, Server, Storage, Update, write_model
from fedcore.rules import NAMED, REGISTRY

def mebibytes(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) >> 10

folder, rule, n, k = Path(sys.argv[1]), sys.argv[2], 6 << 20, 9
write_model({"w": np.zeros(n, np.float32)}, folder / "x.safetensors")
storage = Storage(folder / "s", resident=16 << 20)
server = Server(Safetensors(folder / "x.safetensors"), "FedAvg", k, lr=0.1, storage=storage, aggregation=rule)
Path("/proc/self/clear_refs").write_text("5")
before = mebibytes("VmRSS")
with server.open_round() as round:
    for i in range(k):
        round.add(i, np.full(n, 100 if i in (3, 4) else i, np.float32), steps=1, keep=True)
print(mebibytes("VmHWM") - before, float(server.x[0]), float(server.x[-1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of resident memory is Linux's")
@pytest.mark.parametrize(("rule", "due"), [("median", 6.0), ("bulyan", None)])
def test_a_cohort_larger_than_memory(rule, due, tmp_path):
    """Nine updates of 24 MiB with a limit of 16 MiB: one in the caller's memory, and the limit with its windows."""
    peak, first, last = python("-c", COHORT, tmp_path, rule).stdout.split()
    assert int(peak) < 64
    assert first == last
    assert 0 <= float(first) <= 8
    assert due in (None, float(first))
