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

from fedcore import Compute, Server, Storage, Update
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


def played(scenario, method, accumulate, folder):
    """Return the scenario's folder, the nodes' client numbers, the lines of its rounds, and its server."""
    command = [*LOOPBACK, sys.executable, "-m", "tests.adapters.wire.scenario"]
    subprocess.run([*command, scenario, method, accumulate, str(folder)], cwd=ROOT, check=True, timeout=1200)
    out = folder / "out"
    number = {int(file.name.removeprefix("node-")): int(file.read_text()) for file in out.glob("node-*")}
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return out, number, rounds, Server.load(out / "state", storage=Storage(medium="ram"))


@pytest.mark.parametrize(
    ("method", "accumulate"),
    [("MimiC", "float32"), ("SCAFFOLD", "float32"), ("FedAvg", "exact"), ("MIFA", "exact"), ("SCAFFOLD", "exact")],
)
def test_with_killed_nodes_and_server_the_model_is_that_of_the_same_participation(method, accumulate, tmp_path):
    """With exact sums, to the last bit: replies come in any order, the simulation's in that of the nodes' ids."""
    out, number, rounds, deployed = played("play", method, accumulate, tmp_path)
    assert sorted(number.values()) == list(range(CLIENTS))
    assert [line["round"] for line in rounds] == list(range(6))  # the interrupted one was committed once
    accepted = [sorted(number[node] for node in line["accepted"]) for line in rounds]
    assert accepted[:3] == [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert all({0, 2, 3} <= set(clients) <= {0, 2, 3, 4} for clients in accepted[3:])
    assert accepted[-1] == [0, 2, 3, 4]
    assert [(number[node], code) for node, code in rounds[1]["failed"]] == [(1, 5)]
    assert {line["grid"] for line in rounds} == {"HttpGrid"}

    server = simulated(method, accumulate, out, number, rounds)
    assert deployed.round_number == 6
    assert np.abs(deployed.x).max() > 0.1
    np.testing.assert_allclose(deployed.x, server.x, rtol=1e-5, atol=1e-6)
    assert accumulate != "exact" or deployed.x.tobytes() == server.x.tobytes()


def test_masked_rounds_have_the_model_of_unmasked_ones(tmp_path):
    """One of four nodes is killed between its shares and its masked words, which the others' shares unmask."""
    out, number, rounds, deployed = played("play_masked", "SecureFedAvg", "exact", tmp_path)
    accepted = [sorted(number[node] for node in line["accepted"]) for line in rounds]
    assert accepted == [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert np.abs(deployed.x).max() > 0.1
    np.testing.assert_allclose(deployed.x, simulated("FedAvg", "exact", out, number, rounds).x, rtol=0, atol=1e-6)


def test_a_late_update_counts_in_a_buffer_with_its_age(tmp_path):
    """Two nodes finish three rounds while the third works on its first task; ``Server.push`` gives the same bits."""
    out, number, rounds, deployed = played("play_buffered", "FedAvg", "float32", tmp_path)
    ages = [dict(zip(map(number.get, line["accepted"]), line["ages"], strict=True)) for line in rounds]
    assert ages[:4] == [{0: 0, 1: 0}] * 3 + [{1: 0, 2: 3}]
    assert [len(line["accepted"]) for line in rounds] == [2] * 6

    server, models = Server(initial_model(), "FedAvg", list(number), lr=LR, policy=deployed.policy), []
    assert server.policy.buffer == 2
    for line in rounds:
        server.broadcast(list(number))
        models.append(server.tensors())
        for node, age in zip(line["accepted"], line["ages"], strict=True):
            client, start = number[node], line["round"] - age
            examples, labels = load_part(out, client)
            how = {"round": start, "client": client, "lr": LR, "a": 1, "offset": None}
            y = train_locally(models[start], examples, labels, **how)
            reports = server.push([Update(node, y, STEPS, examples=len(labels), round=start)])
        assert [report.ages.tolist() for report in reports] == [line["ages"]]
    assert np.abs(server.x).max() > 0.1
    assert deployed.x.tobytes() == server.x.tobytes()
