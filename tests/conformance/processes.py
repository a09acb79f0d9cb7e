"""A process of a framework's run, which imports only that framework: FRAMEWORK SIDE FOLDER PORT NUMBER.

The side is the server's aggregation, "theirs" or "ours". Process 0 is the server, or starts all others. One process
writes the last model into the folder. SIDE:STRATEGY names another strategy of Flower than FedAvg.
"""

import sys
from pathlib import Path

import torch

from bench.peers.torchvision_ops import declare
from tests.conformance.clients import BATCH, LR, ROUNDS, SIZES, batches_of, net, trained_tensors

HERE = Path(__file__).parent
KEEP = "model.pt"


def keep(model, folder):
    torch.save({name: tensor.detach() for name, tensor in model.items()}, Path(folder) / KEEP)


def flower(side, folder, port, number):
    from tests.adapters.wire.deployment import Deployment, wait_for

    side, _, strategy = side.partition(":")
    module = "fedcore.adapters.flower" if side == "ours" else "flwr.serverapp.strategy"
    with Deployment(folder) as deployment:
        for client in range(len(SIZES)):
            deployment.start_node(client)
        run = deployment.start_run("run", HERE / "app", module=module, strategy=strategy or "FedAvg", folder=folder)
        wait_for(lambda: run.poll() is not None, 300, "the run")


def nvflare(side, folder, port, number):
    """NVFlare's server and sites as users start them, with tensors of bfloat16 that the server gets as files.

    The simulator of 2.9 accepts the option and passes tensors in memory.
    """
    from nvflare.app_opt.pt.job_config.model import PTModel
    from nvflare.client.config import ExchangeFormat
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import ScriptRunner
    from nvflare.recipe.poc_env import PocEnv

    from fedcore.adapters.nvflare import Aggregator
    from tests.conformance.nvflare_parts import FromDisk

    job = FedJob("conformance", len(SIZES))
    model = {"path": "tests.conformance.clients.net", "args": {"dtype": "bfloat16"}}
    persistor = job.to_server(PTModel(model, allow_numpy_conversion=False))["persistor_id"]
    how = {"persistor_id": persistor, "num_clients": len(SIZES), "num_rounds": ROUNDS}
    how["aggregator"] = Aggregator("FedAvg") if side == "ours" else None
    job.to_server(FromDisk(enable_tensor_disk_offload=True, **how))
    script = str(HERE / "nvflare_parts.py")
    job.to_clients(ScriptRunner(script, server_expected_format=ExchangeFormat.PYTORCH))
    env = PocEnv(num_clients=len(SIZES))
    try:
        result = env.get_job_result(env.deploy(job), timeout=300)
    finally:
        env.stop()
    keep(torch.load(next(Path(result).rglob("FL_global_model.pt")))["model"], folder)


def appfl(side, folder, port, number):
    """APPFL's server, and its clients' communicator around a loop."""
    if number:
        return appfl_client(folder, port, number - 1)
    from appfl.agent import ServerAgent
    from appfl.comm.grpc import GRPCServerCommunicator, serve
    from appfl.config import ServerAgentConfig
    from omegaconf import OmegaConf

    model, weights = (
        {"model_path": str(HERE / "clients.py"), "model_name": "net"},
        {"client_weights_mode": "sample_size"},
    )
    server = {"num_clients": len(SIZES), "num_global_epochs": ROUNDS, "logging_output_dirname": folder}
    server |= {"scheduler": "SyncScheduler", "scheduler_kwargs": {"num_clients": len(SIZES), "same_init_model": True}}
    server |= {"aggregator": "FedAvgAggregator", "aggregator_kwargs": weights}
    if side == "ours":
        server |= {"aggregator": "Aggregator", "aggregator_path": str(HERE / "appfl.py")}
        server["aggregator_kwargs"] = {"algorithm": "FedAvg", "lr": LR, **weights, **model}
    clients = {"train_configs": {}, "model_configs": model}
    agent = ServerAgent(ServerAgentConfig(OmegaConf.create(clients), OmegaConf.create(server)))
    serve(GRPCServerCommunicator(agent, logger=agent.logger), server_uri=f"127.0.0.1:{port}")


def appfl_client(folder, port, client):
    from appfl.comm.grpc import GRPCClientCommunicator

    server = GRPCClientCommunicator(f"client-{client}", server_uri=f"127.0.0.1:{port}")
    server.get_configuration()
    server.invoke_custom_action(action="set_sample_size", sample_size=SIZES[client])
    model, status = server.get_global_model(), "RUNNING"
    while status == "RUNNING":
        model, metadata = server.update_global_model(trained_tensors(model, client))
        status = metadata["status"]
    server.invoke_custom_action(action="close_connection")
    if client == 0:
        keep(model, folder)


def fedlab(side, folder, port, number):
    """FedLab's server and clients' managers; to FedLab all clients weigh the same."""
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.client.manager import PassiveClientManager
    from fedlab.core.network import DistNetwork
    from fedlab.core.server.manager import SynchronousServerManager

    from fedcore.adapters.fedlab import ServerHandler, ServerManager

    class Data:
        def get_dataloader(self, client, batch_size):
            return [[*map(torch.from_numpy, batch)] for batch in batches_of(number - 1)]

    network = DistNetwork(("127.0.0.1", port), 1 + len(SIZES), number)
    if number:
        trainer = SGDSerialClientTrainer(net(), 1)
        trainer.setup_dataset(Data())
        trainer.setup_optim(epochs=1, batch_size=BATCH, lr=LR)
        trainer.criterion = lambda y, targets: torch.nn.functional.mse_loss(y, targets) / 2
        return PassiveClientManager(network, trainer).run()
    handler, manager = SyncServerHandler(net(), ROUNDS, 1.0), SynchronousServerManager
    if side == "ours":
        handler, manager = ServerHandler(net(), ROUNDS, 1.0, "FedAvg", lr=LR), ServerManager
    manager(network, handler).run()
    keep(handler.model.state_dict(), folder)


if __name__ == "__main__":
    declare()  # before anything imports torchvision
    name, side, folder, port, number = sys.argv[1:]
    globals()[name](side, folder, port, int(number))
