"""FedLab's real network: three processes on loopback, one of which claims the others' clients."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fedlab")

import torch

from fedcore import Server
from tests.adapters.fedlab.processes import CLIENTS, EPOCHS, LR, PROCESSES, ROUNDS, net, trainer_of
from tests.adapters.wire.deployment import free_port

pytestmark = pytest.mark.deployment
ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from pathlib import Path
from bench.peers.torchvision_ops import declare
declare()  # before anything imports FedLab
from tests.adapters.fedlab.processes import main
main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
"""


def test_the_model_is_that_of_the_clients_own_uploads(tmp_path):
    port = free_port()
    logs = [(tmp_path / f"log{rank}").open("w") for rank in range(PROCESSES)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port), str(tmp_path)], cwd=ROOT, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.close()
    assert codes == [0] * PROCESSES, (tmp_path / "log0").read_text()[-3000:]
    number = sum(CLIENTS.values())
    reports = json.loads((tmp_path / "reports.json").read_text())
    assert reports == {"accepted": [list(range(number))] * ROUNDS, "rejected": [[]] * ROUNDS}
    log = (tmp_path / "log0").read_text()
    assert log.count("from process 1: client: process 1 sent an upload of client") == 4 * ROUNDS

    trainer = trainer_of(0, number)
    server = Server(trainer.model_parameters.numpy(), "MIFA", number, lr=LR)
    for _ in range(ROUNDS):
        trainer.local_process([torch.from_numpy(server.x.copy())], range(number))
        with server.open_round() as opened:
            for client, [y] in enumerate(trainer.uplink_package):
                opened.add(client, y.numpy(), steps=EPOCHS)
    np.testing.assert_allclose(np.load(tmp_path / "x.npy"), server.x, rtol=1e-5, atol=1e-6)
    assert not np.allclose(server.x, torch.nn.utils.parameters_to_vector(net().parameters()).detach().numpy())
