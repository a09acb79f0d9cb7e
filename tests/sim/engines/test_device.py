"""The engine on a simulated GPU: real arithmetic in host memory, which fails like a GPU."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import algorithms
from fedcore.errors import DeviceError, RangeError, UnknownNameError
from fedcore.server import Server
from fedcore.sim import sgd
from fedcore.sim.data import Dataset
from fedcore.sim.in_process import InProcess
from fedcore.sim.nets import build
from fedcore.sim.participation import Active
from fedcore.sim.sgd import LocalOptions, seeded
from tests.sim.simulated_gpu import GPU, SimulatedGpu

CLIENTS = 3
PARTS = [np.arange(0, 30), np.arange(30, 41), np.arange(41, 60)]
OPTIONS = LocalOptions(weight_decay=0.01, clip=0.5)
NEAR = {"rtol": 1e-3, "atol": 2e-6}
"""The tolerance between ways of training."""


@pytest.fixture(scope="module")
def dataset():
    random = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = (random.random((3, 1, 8, 8))[y] + random.normal(size=(90, 1, 8, 8)) / 4).astype(np.float32)
    return Dataset("patterns", x[:60], y[:60], x[60:], y[60:], classes=3)


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU of torch."""
    monkeypatch.setattr(sgd, "_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with SimulatedGpu() as simulated:
        yield simulated


def convolution():
    with seeded(1, "tests"):
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3))


class Nested(nn.Module):
    """A network without hand-written products."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, groups=1), nn.GELU(), nn.AvgPool2d(2))
        self.norm, self.scores = nn.GroupNorm(2, 4), nn.Linear(36, 3)

    def forward(self, images):
        return self.scores(self.norm(self.features(images)).flatten(1))


def nested():
    with seeded(1, "tests"):
        return Nested()


def normed():
    with seeded(1, "tests"):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))


MODULES = {"perceptron": partial(build, "mlp", seed=1), "convolution": convolution, "nested": nested, "normed": normed}


def engine(dataset, module, **options):
    return InProcess(MODULES[module](), dataset, PARTS, **({"batch": 8, "epochs": 2, "seed": 5} | options))


def trained(work, algorithm="FedAvg", rounds=2):
    """The server's model after some rounds with shares of the steps, and its evaluation."""
    sizes = dict(enumerate(map(len, PARTS)))
    server = Server(work.initial, algorithm, clients=sizes, lr=0.1)
    for cohort in ([0, 1, 2], [2, 0], [1])[:rounds]:
        active = Active(np.array(cohort), shares=np.linspace(0.6, 1, len(cohort)))
        report = server.round(work.updates(server.broadcast(cohort), active))
        assert report.accepted == tuple(cohort)
    return server.x.copy(), work.evaluate(server.x)


@pytest.mark.parametrize(
    ("module", "together"),
    [
        ("perceptron", False),
        ("perceptron", True),
        ("convolution", False),
        ("convolution", True),
        ("convolution", "vmap"),
        ("nested", False),
        ("nested", True),  # By vmap.
        ("normed", False),
    ],
)
def test_rounds_on_a_gpu_equal_those_on_the_cpu_except_for_rounding(dataset, gpu, module, together):
    """All ways on a GPU are compared with one by one on the CPU."""
    there = engine(dataset, module, together=together, device="cuda", options=OPTIONS)
    here = engine(dataset, module, together=False, options=OPTIONS)
    assert there.together == bool(together)
    np.testing.assert_array_equal(there.initial, here.initial)
    for rounds in (1, 2):
        (x, result), (expected, expected_result) = trained(there, rounds=rounds), trained(here, rounds=rounds)
        np.testing.assert_allclose(x, expected, **NEAR)
        assert np.abs(expected - here.initial).max() > 1e-2
        assert result.loss == pytest.approx(expected_result.loss, rel=1e-4)
        assert result.accuracy == expected_result.accuracy
    assert gpu.created > 10


@pytest.mark.sample(1)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", sorted({*algorithms.REGISTRY} - {"LocalDescent"}))  # It has no server.
def test_every_method_on_a_gpu(dataset, gpu, name, together):
    algorithm = algorithms.named(name, **({"local_steps": 8} if name == "FlexibleFedAvg" else {}))
    options = LocalOptions(weight_decay=0.01, momentum=0.0 if algorithm.needs_plain_steps else 0.5)
    there = engine(dataset, "convolution", together=together, device="cuda:0", options=options)
    here = engine(dataset, "convolution", together=False, options=options)
    (x, _), (expected, _) = (trained(work, algorithm, rounds=3) for work in (there, here))
    np.testing.assert_allclose(x, expected, rtol=2e-3, atol=1e-5)


def test_first_gradients_on_a_gpu(dataset, gpu):
    there, here = (
        engine(dataset, "convolution", together=way, **on) for way, on in ((True, {"device": "cuda"}), (False, {}))
    )
    server = Server(here.initial, "MIFA", clients=CLIENTS, lr=0.1)
    on_gpu, on_cpu = (work.gradients(server.broadcast([0, 2]), 3) for work in (there, here))
    for client in (0, 2):
        np.testing.assert_allclose(on_gpu[client], on_cpu[client], **NEAR)


def test_updates_from_a_gpu_have_their_own_memory(dataset, gpu):
    work = engine(dataset, "normed", device="cuda", together=False)
    server = Server(work.initial, "FedAvg", clients=CLIENTS, lr=0.1)
    updates = list(work.updates(server.broadcast([0, 1])))
    assert all(update.keep and isinstance(update.value, np.ndarray) for update in updates)
    assert np.abs(updates[0].value - updates[1].value).max() > 1e-3


def test_a_gpu_uses_one_thread(dataset, gpu):
    assert engine(dataset, "convolution", device="cuda", threads=4)._threads == 1
    assert engine(dataset, "convolution", threads=4)._threads == 4


def test_repeatable_restores_torch_s_settings(gpu):
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with sgd.repeatable(GPU):
            assert (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark) == (False, True, False)
            assert torch.backends.cuda.matmul.allow_tf32 is False
        assert torch.backends.cuda.matmul.allow_tf32 is True
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[2]
    assert (cudnn.allow_tf32, cudnn.deterministic) == before[:2]


def test_a_missing_gpu_is_an_error(dataset, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"^device\b"):
        engine(dataset, "convolution", device="cuda")
    with pytest.raises(UnknownNameError, match="device"):
        engine(dataset, "convolution", device="gpu")


def test_a_gpu_number_out_of_range_is_an_error(dataset, gpu):
    with pytest.raises(DeviceError, match=r"^device\b.*'cuda:3'"):
        engine(dataset, "convolution", device="cuda:3")


def test_a_model_that_torch_cannot_batch_is_rejected(dataset):
    with pytest.raises(RangeError, match=r"^together\b"):
        engine(dataset, "normed", together="vmap")
    with pytest.raises(RangeError, match=r"^together\b"):
        engine(dataset, "convolution", together="yes")


FAULTS = {
    "on the CPU": lambda tensor: torch.zeros(3, device=GPU) + torch.ones(3),
    "indices": lambda tensor: tensor.index_select(0, torch.tensor([0])),
    "in place": lambda tensor: torch.ones(3).add_(tensor),
    "a buffer": lambda tensor: torch.bmm(tensor.view(1, 1, 3), tensor.view(1, 3, 1), out=torch.empty(1, 1, 1)),
    "read": lambda tensor: tensor.numpy(),
    "a view": lambda tensor: tensor[1:].numpy(),
}
