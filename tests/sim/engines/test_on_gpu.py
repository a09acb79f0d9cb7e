"""The engine on a real GPU: the checks of ``make gpu-check``, and random numbers of GPUs."""

import numpy as np
import pytest
import torch

from bench.gpu.clients import MODELS, check, dataset
from fedcore import Server
from fedcore.sim.in_process import InProcess
from fedcore.sim.nets import build
from fedcore.sim.sgd import seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and a torch that is built for CUDA"),
]


@pytest.mark.parametrize(
    ("model", "together"), [(model, together) for model, (_, _, _, ways) in MODELS.items() for together in ways]
)
def test_clients_equal_those_on_the_cpu_except_for_rounding_and_repeat(model, together):
    check(model, together, "cuda")


def test_dropout_depends_only_on_the_round_and_the_client():
    work = InProcess(
        build("vgg11", seed=0), dataset((3, 32, 32)), [np.array([7])] * 3, batch=1, steps=1, seed=0, device="cuda"
    )
    server = Server(work.initial, "FedAvg", clients=3, lr=0.1)

    def sent(*ids):
        return {update.client: np.array(update.value) for update in work.updates(server.broadcast(ids))}

    torch.manual_seed(1)
    both = sent(0, 1)
    torch.manual_seed(2)
    state = torch.cuda.get_rng_state()
    np.testing.assert_array_equal(sent(1)[1], both[1])
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert not np.array_equal(both[0], both[1])  # Only the masks differ.


def test_random_numbers_on_a_gpu_depend_on_the_seed():
    device = torch.device("cuda", 0)
    drawn = []
    for before in (1, 2):
        torch.manual_seed(before)
        with seeded(5, "tests", round=3, device=device):
            drawn.append((torch.rand(4), torch.rand(4, device=device).cpu()))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
