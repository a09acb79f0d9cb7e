"""fedcore's aggregator in APPFL's real server agent, which loads it by its ``aggregator_path``."""

import importlib.util
import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("appfl")

import torch

from fedcore import Server, errors

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # its logger leaves its file open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
EXAMPLE = Path(__file__).parents[3] / "examples" / "appfl_mimic.py"


@pytest.fixture(scope="module")
def example():
    """The example's module, whose file is its own ``aggregator_path``."""
    spec = importlib.util.spec_from_file_location("appfl_mimic", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_agent_s_rounds_are_fedcore_s_own(example, tmp_path, caplog):
    """The third client sends NaNs, so that it is never registered."""
    agent = example.make_agent("MimiC", tmp_path, rounds=4)
    caplog.set_level("WARNING", "appfl")
    for i in range(3):
        agent.set_sample_size(f"client-{i}", 10 + i)
    x0 = {name: tensor.clone() for name, tensor in agent.get_parameters(init_model=False).items()}
    model = example.run(agent)
    server = Server(x0, "MimiC", ["client-0", "client-1"], lr=example.LR)
    for _ in range(4):
        sent = {name: torch.from_numpy(array) for name, array in server.tensors(library="numpy").items()}
        with server.open_round() as round:
            for i in range(2):
                round.add(f"client-{i}", example.train(sent, i), steps=example.STEPS, examples=10 + i)
    for name, array in server.tensors(library="numpy").items():
        np.testing.assert_array_equal(model[name].numpy(), array)
    for report in agent.aggregator.reports:
        assert report.accepted == ("client-0", "client-1")
        [(client, reason)] = report.rejected
        assert (client, "finite" in reason) == ("client-2", True)
    line = "rejected 1 ('client-2'), accepted 2: 1 x update: a number is NaN"
    assert sum(line in record.message for record in caplog.records) == 4


def test_the_example_names_the_liar(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "20 rounds" in (line := capsys.readouterr().out.splitlines()[-1])
    assert "('client-0', 'client-1')" in line
    assert "['client-2']" in line


def test_chunks_of_all_clients_end_the_round(example, tmp_path):
    agent = example.make_agent("FedAvg", tmp_path, clients=1)
    good = example.train(agent.get_parameters(init_model=False), 0)
    with pytest.raises(errors.RangeError, match=r"^model_chunk_size"):
        agent.global_update("client-0", good, _chunk_idx=0, _total_chunks=2)


@pytest.mark.parametrize("metadata", [{"_chunk_idx": 0, "_total_chunks": 2}, {"local_models": 1}, {"self": 1}])
def test_one_client_s_metadata_do_not_end_the_round(metadata, example, tmp_path):
    agent = example.make_agent("FedAvg", tmp_path, rounds=1, clients=2)
    good = example.train(agent.get_parameters(init_model=False), 0)
    if "self" in metadata:  # the agent's scheduler takes it for its own
        agent.scheduler.local_models["liar"] = good
        agent.scheduler.aggregation_kwargs["self"] = {"liar": 1}
    else:
        agent.global_update("liar", good, **metadata)
    model = agent.global_update("honest", good, steps=example.STEPS).result()
    report = agent.aggregator.reports[0]
    assert "honest" in report.accepted
    assert ("liar" in report.accepted) is ("_chunk_idx" not in metadata)
    assert model.keys() == good.keys()
