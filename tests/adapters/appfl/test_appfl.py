"""fedcore's aggregator in APPFL's real server agent, which loads it by its ``aggregator_path``."""

import runpy

import numpy as np
import pytest

pytest.importorskip("appfl")

import torch

from fedcore import Server, errors
from tests.adapters.appfl.agents import EXAMPLE, load_example
from tests.adapters.orders import OF_STEPS, ORDERS, PLAIN

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # its logger leaves its file open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def example():
    return load_example()


def own_rounds(example, algorithm, x0, rounds):
    """fedcore's server by itself, with the same two honest clients; a third, that is never heard, is none."""
    server = Server(x0, algorithm, ["client-0", "client-1"], lr=example.LR)
    for _ in range(rounds):
        model = {name: torch.from_numpy(array) for name, array in server.tensors(library="numpy").items()}
        with server.open_round() as round:
            for i in range(2):
                round.add(f"client-{i}", example.train(model, i), steps=example.STEPS, examples=10 + i)
    return server.tensors(library="numpy")


@pytest.mark.parametrize("algorithm", ["FedAvg", "MimiC", "MIFA"])
def test_rounds_are_fedcore_s_own_and_the_liar_is_refused_by_name(example, algorithm, tmp_path, caplog):
    agent = example.make_agent(algorithm, tmp_path, rounds=4)
    caplog.set_level("WARNING", "appfl")
    for i in range(3):
        agent.set_sample_size(f"client-{i}", 10 + i)
    x0 = {name: tensor.clone() for name, tensor in agent.get_parameters(init_model=False).items()}
    model = example.run(agent)
    due = own_rounds(example, algorithm, x0, 4)
    assert model.keys() == due.keys()
    for name, array in due.items():
        np.testing.assert_array_equal(model[name].numpy(), array)
    reports = agent.aggregator.reports
    assert [report.accepted for report in reports] == [("client-0", "client-1")] * 4
    for report in reports:
        [(client, reason)] = report.rejected
        assert client == "client-2"
        assert "finite" in reason
    line = "refused 1 ('client-2') and heard 2: 1 x update: a number is NaN"
    assert sum(line in record.message for record in caplog.records) == 4


def test_replies_that_are_no_models_are_refused_and_the_round_goes_on(example, tmp_path):
    agent = example.make_agent("FedAvg", tmp_path, rounds=1, clients=4)
    good = example.train(agent.get_parameters(init_model=False), 0)
    lies = {
        "short": {"weight": good["weight"]},
        "wide": good | {"bias": torch.zeros(3)},
        "steps": good,
    }
    futures = [agent.global_update(client, lie, steps=0 if client == "steps" else 4) for client, lie in lies.items()]
    futures.append(agent.global_update("honest", good, steps=4))
    model = futures[0].result()
    for name, tensor in good.items():
        np.testing.assert_allclose(model[name].numpy(), tensor.numpy(), rtol=1e-6, atol=1e-7)
    [report] = agent.aggregator.reports
    assert report.accepted == ("honest",)
    assert {client for client, _ in report.rejected} == {"short", "wide", "steps"}


@pytest.mark.parametrize("algorithm", ["FedAvg", "MIFA", "MimiC"])
def test_a_client_that_never_sent_a_model_that_counts_is_none(example, algorithm, tmp_path):
    agent = example.make_agent(algorithm, tmp_path, rounds=1, clients=3)
    good = example.train(agent.get_parameters(init_model=False), 0)
    bad = {name: tensor * float("nan") for name, tensor in good.items()}
    for client, model in {"a": good, "b": bad, "\ud800": good}.items():
        agent.global_update(client, model, steps=4)
    assert list(agent.aggregator.server.clients) == ["a"]
    assert {client for client, _ in agent.aggregator.reports[0].rejected} == {"b", "\ud800"}
    assert any(np.abs(array).max() > 0 for array in agent.aggregator.server.tensors(library="numpy").values())


def test_a_later_run_goes_on_where_the_store_is(example, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    first = example.make_agent("MimiC", tmp_path / "a", rounds=2, storage="rows")
    monkeypatch.chdir("/")
    example.run(first)
    left = first.aggregator.server.x.copy()
    first.aggregator.server.close()
    again = example.make_agent("MimiC", tmp_path / "b", rounds=1, storage="~/rows")
    model = again.get_parameters(init_model=False)
    np.testing.assert_array_equal(np.concatenate([tensor.numpy().reshape(-1) for tensor in model.values()]), left)
    example.run(again)
    assert again.aggregator.server.round_number == 3
    again.aggregator.server.close()


def test_the_example_names_the_liar(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    due = "20 rounds, heard ('client-0', 'client-1') refused ['client-2']"
    assert capsys.readouterr().out.splitlines()[-1] == due


def test_chunks_and_methods_of_other_local_steps_are_refused(example, tmp_path):
    with pytest.raises(errors.RangeError, match=r"^algorithm\b"):
        example.make_agent("SCAFFOLD", tmp_path)
    agent = example.make_agent("FedAvg", tmp_path, clients=1)
    good = example.train(agent.get_parameters(init_model=False), 0)
    with pytest.raises(errors.RangeError, match=r"^model_chunk_size"):
        agent.global_update("client-0", good, _chunk_idx=0, _total_chunks=2)


def told(algorithm, lr=0.1):
    return {"algorithm": algorithm, "lr": lr, "model_path": str(EXAMPLE), "model_name": "Net"}


@pytest.mark.parametrize("name", ORDERS)
def test_a_method_has_plain_steps_or_is_refused_by_name(name, example):
    if name in PLAIN:
        example.Aggregator(told(ORDERS[name]))
    else:
        with pytest.raises(errors.RangeError, match=r"^algorithm\b"):
            example.Aggregator(told(ORDERS[name]))


def test_a_rate_of_each_step_is_refused_by_name(example):
    with pytest.raises(errors.RangeError, match=r"^lr\b"):
        example.Aggregator(told("FedAvg", lr=OF_STEPS))


@pytest.mark.parametrize("algorithm", ["FedAvg", "MIFA", "MimiC"])
def test_a_client_that_scales_its_model_is_refused_by_name_and_the_others_result_stands(example, algorithm, tmp_path):
    agent = example.make_agent(algorithm, tmp_path, rounds=1, aggregation=[{"name": "RejectLong", "ratio": 30}])
    x0 = {name: tensor.clone() for name, tensor in agent.get_parameters(init_model=False).items()}
    models = {f"client-{i}": example.train(x0, i) for i in range(3)}
    for name, x in x0.items():
        models["client-2"][name] = x + 1000 * (models["client-2"][name] - x)
    futures = [agent.global_update(client, model) for client, model in models.items()]
    model, server = futures[0].result(), Server(x0, algorithm, ["client-0", "client-1"], lr=example.LR)
    with server.open_round() as opened:
        for client in ("client-0", "client-1"):
            opened.add(client, models[client], steps=example.STEPS)
    [(client, reason)] = agent.aggregator.reports[0].rejected
    assert (client, "RejectLong" in reason) == ("client-2", True)
    for name, array in server.tensors(library="numpy").items():
        np.testing.assert_array_equal(model[name].numpy(), array)


def test_a_client_says_no_more_steps_than_it_was_asked_for(example, tmp_path):
    agent = example.make_agent("MIFA", tmp_path, rounds=1, clients=2)
    good = example.train(agent.get_parameters(init_model=False), 0)
    for client, steps in {"a": example.STEPS, "b": example.STEPS + 1}.items():
        agent.global_update(client, good, steps=steps)
    due = f"steps: expected an integer in 1..{example.STEPS}, got {example.STEPS + 1}"
    assert agent.aggregator.reports[0].rejected == (("b", due),)
