"""Models that no honest client sends to APPFL's server agent: each is rejected by its client's id, and no other."""

import numpy as np
import pytest

pytest.importorskip("appfl")

import torch

from fedcore import Server
from tests.adapters.appfl.agents import load_example
from tests.adapters.malformed import ODD, assert_only_the_valid_count, malformed

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # its logger leaves its file open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HONEST = ["honest-1", "honest-2", "honest-3"]
LIARS = [f"liar-{i}" for i in range(420)]
ROUNDS = 5


def model_of(client, model):
    generator = torch.Generator().manual_seed(HONEST.index(client) if client in HONEST else 9)
    return {name: x + torch.randn(x.shape, generator=generator) for name, x in model.items()}


def test_models_that_are_none_are_rejected_by_client_and_the_others_result_stands(tmp_path):
    example = load_example()
    agent = example.make_agent("MIFA", tmp_path, rounds=ROUNDS, clients=len(HONEST) + len(LIARS))
    x0 = {name: x.numpy().copy() for name, x in agent.get_parameters(init_model=False).items()}
    server = Server(x0, "MIFA", [], lr=example.LR)
    for round in range(ROUNDS):
        x = agent.get_parameters(init_model=False)
        valid = {"model": model_of("liar", x), "told": {"steps": example.STEPS, "loss": 1.0}, "examples": 5}
        futures = []
        for client, part in zip(LIARS, malformed(valid, len(LIARS), round, ODD), strict=True):
            fields = {str(key): value for key, value in part.items()} if type(part) is dict else {"model": part}
            told = fields.get("told")
            told = {str(key): value for key, value in told.items()} if type(told) is dict else {}
            told = {key: value for key, value in told.items() if key not in ("client_id", "local_model", "blocking")}
            agent.set_sample_size(client, fields.get("examples"))
            model = fields.get("model")
            if isinstance(model, bytes):  # which the agent reads itself, and fails for this client alone
                model = [model]
            futures.append(agent.global_update(client, model, **told))
        futures += [agent.global_update(client, model_of(client, x), steps=example.STEPS) for client in HONEST]
        model = futures[0].result()
        report = agent.aggregator.reports[-1]
        assert_only_the_valid_count(report, HONEST, LIARS)
        new = [client for client in (*LIARS, *HONEST) if client not in server.clients]
        with server.open_round(newcomers=new) as opened:
            for client in report.accepted:
                opened.add(client, model_of(client, x), steps=example.STEPS)
        for name, array in server.tensors(library="numpy").items():
            np.testing.assert_array_equal(model[name].numpy(), array)


@pytest.mark.parametrize("told", [{"_chunk_idx": 0, "_total_chunks": 2}, {"local_models": 1}, {"self": 1}])
def test_what_one_client_sends_beside_its_model_does_not_end_the_round(told, tmp_path):
    example = load_example()
    agent = example.make_agent("FedAvg", tmp_path, rounds=1, clients=2)
    good = example.train(agent.get_parameters(init_model=False), 0)
    if "self" in told:  # the agent's scheduler takes it for its own
        agent.scheduler.local_models["liar"] = good
        agent.scheduler.aggregation_kwargs["self"] = {"liar": 1}
    else:
        agent.global_update("liar", good, **told)
    model = agent.global_update("honest", good, steps=example.STEPS).result()
    report = agent.aggregator.reports[0]
    assert "honest" in report.accepted
    assert ("liar" in report.accepted) is ("_chunk_idx" not in told)
    assert model.keys() == good.keys()
