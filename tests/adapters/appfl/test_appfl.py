"""fedcore's aggregator in APPFL's real server agent, which loads it by its ``aggregator_path``."""

import importlib.util
import logging
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("appfl")

import torch
from appfl.agent import ServerAgent
from appfl.vsim import ClientProfile, SyncSimDriver
from omegaconf import OmegaConf

from fedcore import Server, algorithms, errors
from fedcore.adapters.appfl import Aggregator
from fedcore.algorithms import optimizers
from tests.adapters.drivers import QUIET

pytestmark = QUIET
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "appfl_mimic.py"


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


def test_the_first_model_is_the_agent_s_own(example, tmp_path):
    agent = example.make_agent("FedAvg", tmp_path)
    after = torch.get_rng_state()
    first = agent.get_parameters(init_model=False)
    for name, tensor in agent.model.state_dict().items():
        assert torch.equal(tensor, first[name])
    torch.manual_seed(42)
    example.Net()
    assert torch.equal(torch.get_rng_state(), after)


def test_a_seed_draws_the_first_model(example):
    options = {"model_path": str(EXAMPLE), "model_name": "Net", "algorithm": "FedAvg", "lr": example.LR}
    torch.manual_seed(3)
    want = example.Net().state_dict()["weight"]
    assert torch.equal(Aggregator({**options, "seed": 3}).get_parameters()["weight"], want)


@pytest.mark.parametrize("fields", [("current_local_steps",), ("steps", "current_local_steps")], ids=str)
def test_steps_are_those_that_appfl_s_trainer_reports(fields, example, tmp_path):
    """Its clients take as many steps as they have minibatches; fedcore's own field has precedence."""
    counts = {"client-0": 2, "client-1": 20}
    agent = example.make_agent("MIFA", tmp_path, clients=2, steps=None, client_weights_mode="equal")
    model = agent.get_parameters(init_model=False)
    server = Server(model, "MIFA", [*counts], lr=example.LR)
    for _ in range(2):
        replies = {client: example.train(model, i) for i, client in enumerate(counts)}
        with server.open_round() as round:
            for client, reply in replies.items():
                round.add(client, reply, steps=counts[client])
        for client, reply in replies.items():
            future = agent.global_update(client, reply, **{fields[-1]: 7} | {fields[0]: counts[client]})
        model = future.result()
    np.testing.assert_array_equal(agent.aggregator.server.x, server.x)


def test_methods_and_optimizers_have_options(example, tmp_path):
    method = {"name": "MIFA", "wait": False}
    agent = example.make_agent(method, tmp_path, clients=1, optimizer={"name": "Adam", "eta": 0.5})
    agent.global_update("client-0", example.train(agent.get_parameters(init_model=False), 0)).result()
    assert agent.aggregator.server.algorithm == algorithms.MIFA(wait=False)
    assert agent.aggregator.server.settings.optimizer == optimizers.Adam(eta=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": None}, "lr: missing"),
        ({"aggregatoin": "median"}, "option: 'aggregatoin' is unknown; did you mean 'aggregation'"),
        ({"client_weights_mode": "size"}, "client_weights_mode: 'size' is unknown"),
        ({"algorithm": {"name": "MIFA", "wate": 1}}, "option of MIFA: 'wate' is unknown"),
        ({"algorithm": {"wait": False}}, "algorithm: '' is unknown"),
        ({"optimizer": {"name": "Adam", "etta": 1}}, "Adam: 'etta' is unknown"),
        ({"algorithm": "MIFA", "aggregation": "median"}, "does not combine with algorithm=MIFA"),
        ({"aggregation": [{"name": "krum", "f": 1}]}, "needs at least 5 updates, got 3 updates; add clients"),
        ({"server_lr": -1}, "must be"),
    ],
    ids=str,
)
def test_options_that_no_round_could_take_are_refused_when_the_agent_starts(options, message, example, tmp_path):
    with pytest.raises(errors.FedcoreError, match=message):
        example.make_agent(**{"algorithm": "FedAvg", "folder": tmp_path, **options})


@pytest.mark.parametrize("name", ["model_path", "algorithm"])
def test_a_missing_option_is_named(name):
    options = {"model_path": str(EXAMPLE), "model_name": "Net", "algorithm": "FedAvg", "lr": 0.1}
    del options[name]
    with pytest.raises(errors.RangeError, match=f"^aggregator_kwargs: {name} is missing"):
        Aggregator(options)


def test_a_resumed_run_keeps_a_rate_that_is_left_out(example, tmp_path, caplog):
    caplog.set_level("INFO", "appfl")
    agent = example.make_agent("FedAvg", tmp_path, clients=1, storage=str(tmp_path / "state"))
    agent.global_update("client-0", example.train(agent.get_parameters(init_model=False), 0)).result()
    agent.aggregator.server.close()
    resumed = example.make_agent("FedAvg", tmp_path, clients=1, storage=str(tmp_path / "state"), lr=None)
    resumed.get_parameters(init_model=False)
    assert resumed.aggregator.server.round_number == 1
    assert resumed.aggregator.server.settings.lr(0) == example.LR
    lines = [record.message for record in caplog.records if "starts at round" in record.message]
    assert [line.rpartition(" ")[2] for line in lines] == ["0", "1"]
    resumed.aggregator.server.close()


def test_tensors_keep_the_order_of_the_model(tmp_path):
    """A subclass may read them by position."""
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))\n"
    )
    aggregator = Aggregator({"model_path": str(path), "model_name": "Net", "algorithm": "FedAvg", "lr": 0.1})
    first = aggregator.get_parameters()
    assert list(aggregator.aggregate({"a": first, "b": first})) == list(first)
    assert list(aggregator.get_parameters()) == list(first) == list(aggregator.model.state_dict())


def test_the_page_s_configuration_starts_an_agent(tmp_path, monkeypatch):
    """Beside APPFL's own entries, with a model file where APPFL's examples have theirs."""
    page = (ROOT / "docs" / "fedlab-appfl.md").read_text()
    monkeypatch.chdir(tmp_path)
    for name, block in re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL):
        if name == "yaml":
            config = OmegaConf.create(block)
        elif block.startswith("# fedcore_aggregator.py"):
            Path("fedcore_aggregator.py").write_text(block)
    Path("resources/model").mkdir(parents=True)
    Path("resources/model/cnn.py").write_text(
        "import torch\n"
        "class CNN(torch.nn.Linear):\n"
        "    def __init__(self, num_channel, num_classes, num_pixel):\n"
        "        super().__init__(num_channel * num_pixel, num_classes)\n"
    )
    kwargs = config.server_configs.aggregator_kwargs
    model = {name: value for name, value in kwargs.items() if name.startswith("model_")}
    own = {"server_configs": {"num_clients": 1, "num_global_epochs": 2}, "client_configs": {"model_configs": model}}
    agent = ServerAgent(OmegaConf.merge(config, own))
    model = agent.get_parameters(serial_run=True)
    assert all(torch.equal(tensor, model[name]) for name, tensor in agent.model.state_dict().items())
    moved = {name: tensor + 1 for name, tensor in model.items()}
    agent.global_update("a", moved, current_local_steps=100).result()
    server = agent.aggregator.server
    assert (type(server.algorithm).__name__, server.round_number, server.limits.max_steps) == ("MimiC", 1, 200)
    assert agent.aggregator.reports[0].accepted == ("a",)
    server.close()


class Client:
    """What APPFL's simulation asks of a client."""

    def __init__(self, number, train):
        self.number, self.train_model = number, train

    def get_id(self):
        return f"client-{self.number}"

    def load_parameters(self, model):
        self.model = model

    def train(self):
        self.model = self.train_model(self.model, self.number)

    def get_parameters(self):
        return self.model, {"current_local_steps": 4}


def test_appfl_s_simulation_leaves_clients_out(example, tmp_path):
    agent = example.make_agent("MimiC", tmp_path, rounds=5, clients=5)
    clients = [Client(i, example.train) for i in range(5)]
    profiles = {client.get_id(): ClientProfile() for client in clients}
    logger = logging.getLogger("appfl")
    how = {"participants_per_round": 3, "min_responses": 2, "target_rounds": 5, "base_step_time": 0.01}
    driver = SyncSimDriver(agent, clients, profiles, logger=logger, **how)
    driver.run()
    assert [list(report.accepted) for report in agent.aggregator.reports] == [
        record["accepted_cids"] for record in driver.history
    ]
    assert len(agent.aggregator.server.clients) > 2


def test_the_server_validates_the_model_that_the_agent_loads(example, tmp_path):
    agent = example.make_agent("FedAvg", tmp_path, clients=1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 5), torch.arange(8) % 2)
    agent._val_dataset, agent._val_dataloader = data, torch.utils.data.DataLoader(data, batch_size=8)
    agent.loss_fn, agent.metric = torch.nn.CrossEntropyLoss(), lambda true, predicted: 0.0
    model = agent.global_update("a", example.train(agent.get_parameters(serial_run=True), 0)).result()
    agent.model.load_state_dict(agent.get_parameters(serial_run=True))
    net = example.Net()
    net.load_state_dict(model)
    want = torch.nn.functional.cross_entropy(net(data.tensors[0]), data.tensors[1])
    assert agent.server_validate()[0] == pytest.approx(want.item())
