"""For every method of plain steps: one liar of ten, each kind of lie that APPFL's server agent is told, within
``BOUNDS``. Clients say no rate there."""

import pytest

pytest.importorskip("appfl")

from dataclasses import asdict

import numpy as np
import torch

from tests.adapters.appfl.agents import load_example
from tests.adapters.liars import KINDS, PLAIN, ROUNDS, assert_bounded, options, plain, said
from tests.server.liars import LIAR, LR, METHODS, MODEL, SIZES, N, made

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # its logger leaves its file open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NAMES = [f"client-{i}" for i in range(N)]
NAMED = [method for method in PLAIN if METHODS[method].keys() <= {"client_sizes"}]
"""The agent's configuration says a method by its name alone."""


class Net(torch.nn.Module):
    """The model of the table, which the aggregator loads from this file."""

    def __init__(self):
        super().__init__()
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in MODEL.items()}
        self.w = torch.nn.Parameter(tensors.pop("w"))
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "rate" not in kind])
@pytest.mark.parametrize("method", NAMED)
def test_one_liar_of_ten_clients_moves_the_result_by_its_bound_at_most(method, kind, tmp_path):
    _, sizes = made(method)
    told = options(kind)
    if told:  # as a configuration can hold them
        told = {"aggregation": [{"name": type(rule).__name__, **asdict(rule)} for rule in told["aggregation"]]}
    known = {"client_sizes": dict(zip(NAMES, sizes, strict=True))} if sizes else {}
    agent = load_example().make_agent(
        method.partition(",")[0],
        tmp_path,
        rounds=ROUNDS,
        clients=N,
        lr=LR,
        model_path=__file__,
        model_name="Net",
        **known,
        **{"steps": None, **told},
    )
    for i, name in enumerate(NAMES):
        agent.set_sample_size(name, 10**9 if kind == "examples" and i == LIAR else SIZES[i])
    model = agent.get_parameters(blocking=True, init_model=False)
    for t in range(ROUNDS):
        sent = {name: tensor.numpy() for name, tensor in model.items()}
        futures = []
        for i, name in enumerate(NAMES):
            update = said(method, kind, plain(t), sent, None, i)
            y = {key: torch.from_numpy(np.array(array)) for key, array in update.value.items()}
            futures.append(agent.global_update(name, y, steps=update.steps))
        model = futures[0].result()
    reports = agent.aggregator.reports
    assert_bounded(method, kind, {name: tensor.numpy() for name, tensor in model.items()}, reports, NAMES)
