"""MimiC in APPFL's server agent, with three clients, one of which sends invalid updates.

This file is the agent's ``aggregator_path`` and ``model_path``. A deployment sets both in its server's YAML file and
serves the agent with APPFL's gRPC communicator.
"""

import torch
from appfl.agent import ServerAgent
from appfl.config import ServerAgentConfig
from omegaconf import OmegaConf

from fedcore.adapters.appfl import Aggregator  # noqa: F401  # the agent loads it from this file

LR, STEPS, ROUNDS = 0.1, 4, 20


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(5, 2)


def make_agent(algorithm, folder, rounds=ROUNDS, clients=3, **options):
    """Return APPFL's agent with fedcore's aggregator."""
    kwargs = {"algorithm": algorithm, "lr": LR, "steps": STEPS, "model_path": __file__, "model_name": "Net"}
    kwargs |= {"client_weights_mode": "sample_size", **options}
    server = {
        "optimize_memory": False,  # otherwise the agent runs the garbage collector after every reply
        "num_clients": clients,
        "num_global_epochs": rounds,
        "aggregator_path": __file__,
        "aggregator": "Aggregator",
        "aggregator_kwargs": kwargs,
        "scheduler": "SyncScheduler",
        "scheduler_kwargs": {"num_clients": clients, "same_init_model": False, "optimize_memory": False},
        "logging_output_dirname": str(folder),
    }
    clients_get = {"train_configs": {}, "model_configs": {"model_path": __file__, "model_name": "Net"}}
    return ServerAgent(ServerAgentConfig(OmegaConf.create(clients_get), OmegaConf.create(server)))


def train(model, client):
    """Run a client's local steps and return its model."""
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(32, 5, generator=generator)
    labels = (inputs[:, client % 5] > 0).long()
    net = Net()
    net.load_state_dict(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return net.state_dict()


def run(agent):
    """Run all rounds; the third client sends NaNs."""
    model = agent.get_parameters(blocking=True, init_model=False)
    while not agent.training_finished():
        replies = {f"client-{i}": train(model, i) for i in range(3)}
        replies["client-2"]["weight"][0, 0] = torch.nan
        futures = [agent.global_update(client, reply) for client, reply in replies.items()]
        model = futures[0].result()
    return model


if __name__ == "__main__":
    agent = make_agent("MimiC", "output")
    run(agent)
    reports = agent.aggregator.reports
    print(
        len(reports),
        "rounds, accepted",
        reports[-1].accepted,
        "rejected",
        [client for client, _ in reports[-1].rejected],
    )
