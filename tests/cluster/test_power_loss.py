"""Power that all machines of a cluster lose at once: whatever each disk keeps of it, all are at one transaction."""

import random
import shutil
from collections import defaultdict

import numpy as np
import pytest

from fedcore import Compute, Server, Storage
from tests.cluster import killed
from tests.cluster.killed import Straight, change, remembering, told
from tests.store.recording import Recorder, put

K, ROUNDS, DISKS = 2, 4, 8


@pytest.mark.parametrize(
    ("method", "pairs", "most"),
    [
        ("MIFA", 4, 1),
        *(pytest.param(method, 60, 6, marks=pytest.mark.endurance) for method in ("MIFA", "MimiC", "SCAFFOLD")),
    ],
)
def test_every_disk_after_a_loss_of_power(tmp_path, monkeypatch, method, pairs, most):
    """The disks of each shard as they can be at some moment of a transaction, drawn and put beside each other.

    Within a transaction shards go on by themselves, so that any two moments of it can come together.
    """
    run, left, straight = tmp_path / "run", tmp_path / "left", Straight(method)
    zeros = np.zeros(killed.n, np.float32)
    Server(
        zeros, remembering(method), killed.N, lr=0.1, storage=Storage(run, audit=True), compute=Compute(shards=K)
    ).close()
    server = Server.load(run)
    recorders = [Recorder(run / f"shard-{k}", monkeypatch) for k in range(K)]
    for t in range(ROUNDS):
        for recorder in recorders:
            recorder.events.append(("mark", t))
            recorder.upcoming = t + 1
        change(server)
    monkeypatch.undo()
    server.close()
    disks = [found(recorder, most) for recorder in recorders]
    chance, seen = random.Random(1), defaultdict(int)
    for t in range(ROUNDS):
        for _ in range(pairs):
            chosen = [chance.choice(disks[k][t][chance.choice(sorted(disks[k][t]))]) for k in range(K)]
            shutil.rmtree(left, ignore_errors=True)
            left.mkdir()
            shutil.copy(run / "cluster.json", left)
            for k, (files, _) in enumerate(chosen):
                put(files, left / f"shard-{k}")
            committed = [at for _, at in chosen]
            with Server.load(left, storage=Storage(durability="none")) as server:
                assert server.transactions == min(committed)
                assert server.verify() == []
                assert told(server) == straight.after(server.transactions)
                change(server)
                assert told(server) == straight.after(server.transactions)
            seen["apart" if len(set(committed)) > 1 else "together"] += 1
    assert min(seen["apart"], seen["together"]) > pairs


def found(recorder, most):
    """Some disks of a shard by transaction: (files, committed transactions) each."""
    disks, met, chance = defaultdict(lambda: defaultdict(list)), defaultdict(int), random.Random(2)
    for files, committed in recorder.crashes(most):
        if recorder.mark is None:
            continue
        key = recorder.mark, committed
        kept, met[key] = disks[recorder.mark][committed or 0], met[key] + 1
        if len(kept) < DISKS:
            kept.append((files, committed or 0))
        elif (place := chance.randrange(met[key])) < DISKS:
            kept[place] = (files, committed or 0)
    return disks
