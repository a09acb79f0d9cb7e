"""A real SuperLink and SuperNodes with TLS and keys, killed and resumed, against fedcore's own simulation.

It takes minutes and is left out unless asked for: ``pytest -m deployment tests/adapters/wire``. As root it runs in a
network namespace that has only loopback.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcore import Compute, Server, Storage
from tests.adapters.wire.app.fedapp.task import CLIENTS, LR, STEPS, initial_model, load_part, train_locally
from tests.adapters.wire.deployment import LOOPBACK

pytestmark = pytest.mark.deployment
ROOT = Path(__file__).parents[3]


def simulated(method, accumulate, out, number, rounds):
    """Return a server after plain rounds of the clients that were accepted."""
    server = Server(initial_model(), method, [], lr=LR, compute=Compute(accumulator=accumulate))
    for line in rounds:
        new = [node for node in line["accepted"] if node not in server.clients]
        sent = server.broadcast(line["accepted"], newcomers=new)
        how = {"round": sent.round, "lr": sent.lr, "a": sent.a}
        with server.open_round(newcomers=new) as opened:
            for node in sent.ids:
                client = number[node]
                y = train_locally(
                    server.tensors(), *load_part(out, client), client=client, offset=sent.offset(node), **how
                )
                opened.add(node, y, steps=STEPS, examples=len(load_part(out, client)[1]))
    return server


@pytest.mark.parametrize(
    ("method", "accumulate"),
    [("MimiC", "float32"), ("SCAFFOLD", "float32"), ("FedAvg", "exact"), ("MIFA", "exact"), ("SCAFFOLD", "exact")],
)
def test_with_killed_nodes_and_server_the_model_is_that_of_the_same_participation(method, accumulate, tmp_path):
    """With exact sums, to the last bit: replies come in any order, the simulation's in that of the nodes' ids."""
    command = [*LOOPBACK, sys.executable, "-m", "tests.adapters.wire.scenario", method, accumulate, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200)
    out = tmp_path / "out"
    number = {int(file.name.removeprefix("node-")): int(file.read_text()) for file in out.glob("node-*")}
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]

    assert sorted(number.values()) == list(range(CLIENTS))
    assert [line["round"] for line in rounds] == list(range(6))  # the interrupted one was committed once
    accepted = [sorted(number[node] for node in line["accepted"]) for line in rounds]
    assert accepted[:3] == [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert all({0, 2, 3} <= set(clients) <= {0, 2, 3, 4} for clients in accepted[3:])
    assert accepted[-1] == [0, 2, 3, 4]
    assert [(number[node], code) for node, code in rounds[1]["failed"]] == [(1, 5)]
    assert {line["grid"] for line in rounds} == {"HttpGrid"}

    server = simulated(method, accumulate, out, number, rounds)
    deployed = Server.load(out / "state", storage=Storage(medium="ram"))
    assert deployed.round_number == 6
    assert np.abs(deployed.x).max() > 0.1
    np.testing.assert_allclose(deployed.x, server.x, rtol=1e-5, atol=1e-6)
    assert accumulate != "exact" or deployed.x.tobytes() == server.x.tobytes()


def test_masked_rounds_have_the_model_of_unmasked_ones(tmp_path):
    """One of four nodes is killed between its shares and its masked words, which the others' shares unmask."""
    command = [*LOOPBACK, sys.executable, "-m", "tests.adapters.wire.scenario", "SecureFedAvg", "exact", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200)
    out = tmp_path / "out"
    number = {int(file.name.removeprefix("node-")): int(file.read_text()) for file in out.glob("node-*")}
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    accepted = [sorted(number[node] for node in line["accepted"]) for line in rounds]
    assert accepted == [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3]]
    deployed = Server.load(out / "state", storage=Storage(medium="ram"))
    assert np.abs(deployed.x).max() > 0.1
    np.testing.assert_allclose(deployed.x, simulated("FedAvg", "exact", out, number, rounds).x, rtol=0, atol=1e-6)
