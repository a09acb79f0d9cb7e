"""A cluster whose processes are killed at every place; after each kill all shards are at one round, and go on.

Run as a program, because it forks: ``killed.py FOLDER METHOD STRIDE`` takes every STRIDE-th of its scenarios, and
prints how often shards took something back, and which kinds of death it has seen.
"""

import hashlib
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from fedcore import Compute, Model, Server, Storage, algorithms, cluster, set_threads
from fedcore.cluster import coordinator
from fedcore.errors import ClusterError
from tests.cluster.pairs import audited, cohort
from tests.cluster.processes import Processes
from tests.kills import die_at, kill

K, N, n = 3, 6, 16_384 * 2 + 100
GROUPS = " in groups"
"""The end of the name of a method with partial updates: two shards have a part of one group, the third the other."""


def remembering(method):
    """The algorithm; a short history in MimiC."""
    method = method.removesuffix(GROUPS)
    return algorithms.named(method, **({"history": 2} if method == "MimiC" else {}))


def model_of(method):
    zeros = np.zeros(n, np.float32)
    return Model({"w": zeros[:200], "u": zeros[200:]}, {"U": "u"}) if method.endswith(GROUPS) else zeros


def sent_by(server, client, y):
    """The vector of a client, or the groups that it sends: both or one."""
    if not server.layout.groups:
        return y
    i = int(str(client).split()[-1])
    return {"w": y[:200], "u": y[200:]} if i % 4 < 2 else {"w": y[:200]} if i % 4 == 2 else {"u": y[200:]}


def told(server):
    """Everything that a server knows, as one number."""
    parts = [server.x.tobytes(), json.dumps([server.round_number, server.transactions, list(server.clients)]).encode()]
    if server.algorithm.keeps_total:
        parts.append(np.asarray(server.total()).tobytes())
    for client in server.clients:
        parts += [server.row(client).tobytes(), server.correction(client).tobytes()]
    parts.append(json.dumps(audited(server)).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def change(server, add=None):
    """The next transaction of a server, which depends only on those before it: mostly a round.

    Args:
        add: gives an open round a client's vector and steps; None for its own ``add``.
    """
    add = add or (lambda opened, client, y, steps: opened.add(client, y, steps=steps))
    t = server.transactions
    if due(t) == "arrive":
        return server.add_clients([f"client {t}", f"neighbour {t}"])
    if due(t) == "depart":
        return server.remove_client(f"client {t - 2}")
    if due(t) == "replace":
        return server.replace_x(server.x + np.float32(t))
    ids = cohort(server, t)
    with server.open_round() as opened:
        for i, client in enumerate(ids):
            y = np.random.default_rng([t, i]).normal(size=n).astype(np.float32)
            add(opened, client, sent_by(server, client, y), 1 + i % 3)
    return opened.report


class Straight:
    """The run without kills, as far as it was requested."""

    def __init__(self, method):
        storage = Storage(audit=True)
        self._server = Server(model_of(method), remembering(method), N, lr=0.1, storage=storage)
        self._told = [told(self._server)]

    def after(self, t):
        while len(self._told) <= t:
            change(self._server)
            self._told.append(told(self._server))
        return self._told[t]


def due(t):
    """The kind of the transaction that ``change`` does next."""
    return {3: "arrive", 4: "replace", 5: "depart"}.get(t % 6, "round")


def scenarios(stores):
    """The killed process, the number of its call, before or after it, and the step; None for any step.

    A shard has that many stores, each with its own calls.
    """
    for what in ("round", "arrive", "depart", "replace"):
        for after in (False, True):
            for call in range(1, 11 * stores + 1):
                for k in range(K):
                    yield "shard", k, call, after, what
            for call in range(1, 33 * stores + 1):
                yield "all together", call % K, 1 + call // K, after, what
            for message in range(1, 46):
                yield "coordinator", None, message, after, what
        for seed in range(24):
            yield "each on its own", None, seed, True, what
    for call in range(1, 70 * stores + 1):
        yield "saved", call % K, call, call % 2 == 0, None
    for call in range(1, 6):
        for after in (False, True):
            yield "saved", None, call, after, None  # by the coordinator
    for call in range(1, 130 * stores + 1):
        for after in (False, True):
            yield "cut anew", None, call, after, None


def noting(file):
    """Have this process note in a file when shards take something back."""
    coordinator.LOGGER.setLevel("INFO")
    coordinator.LOGGER.addHandler(logging.FileHandler(file))


def forked(work):
    """Do something in another process; return its exit status."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        status = 3
        try:
            work()
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def one(folder, kind, name, call, after):
    """A transaction in this process, during which a process is killed."""
    armed, group, accepted = [False], os.getpid(), [0]
    noting(f"{folder}-notes")
    if kind == "cut anew":
        die_at(call, after=after)
        cluster.reshard(folder, 2 + call % 3 % 2)
        return

    def prepare(k):
        chance = random.Random(1000 * (call or 0) + k)
        if kind == "each on its own":
            die_at(chance.randrange(1, 9), after=chance.random() < 0.5)
        elif kind == "saved" and k == name:
            die_at(call, after=after)
        elif kind in ("shard", "all together") and k == name:
            die_at(call, after=after, all_of=group if kind == "all together" else None)

    def hear():
        if armed[0] and kind == "coordinator":
            accepted[0] += 1
            if accepted[0] == call:
                if not after:
                    time.sleep(0.02)  # the shards have ended the call
                kill()

    processes = Processes(prepare, hear)
    server = Server.load(folder, compute=Compute(executor=processes))
    processes.arm()
    armed[0] = True
    before = server.transactions
    try:
        if kind == "saved":
            if name is None:
                die_at(call, after=after)
            server.save(f"{folder}-copy")
        else:
            change(server)
    except ClusterError as error:
        known = server.transactions == before or "change is complete" in str(error)
    else:
        known = server.transactions == before + (kind != "saved")
    assert known, (before, server)
    assert told(server) == STRAIGHT.after(server.transactions)
    server.close()


def recovered(folder, chance):
    """All shards are at one transaction, whichever process is killed while they are opened."""
    for _ in range(3):
        call, after = chance.randrange(1, 8), chance.random() < 0.5

        def stopped(call=call, after=after):
            die_at(call, after=after)
            Server.load(folder).close()

        if chance.random() < 0.7 or forked(stopped) == 0:
            break
    return whole(folder)


def go_on(folder, what):
    """Have a cluster go on until that kind of transaction is due; the number of those before it."""
    with Server.load(folder) as server:
        while what is not None and due(server.transactions) != what:
            change(server)
        return server.transactions


def whole(folder):
    """The transaction at which all shards of a cluster are, undamaged."""
    with Server.load(folder) as server:
        assert server.verify() == [], server.verify()
        assert told(server) == STRAIGHT.after(server.transactions), server
        return server.transactions


def main(folder, method, stride):
    set_threads(1)
    folder = f"{folder}/{method}"
    noting(f"{folder}-notes")
    storage, compute = Storage(folder, audit=True), Compute(shards=K)
    Server(model_of(method), remembering(method), N, lr=0.1, storage=storage, compute=compute).close()
    seen, chance = Counter(), random.Random(1)
    for number, scenario in enumerate(scenarios(3 if method.endswith(GROUPS) else 1)):
        if number % stride:
            continue
        *scenario, what = scenario
        now = go_on(folder, what)
        status = forked(lambda scenario=scenario: one(folder, *scenario))
        assert status in (0, -9), (scenario, status)
        after = recovered(folder, chance)
        assert after in (now, now + 1), (scenario, now, after)
        if scenario[0] == "saved" and Path(f"{folder}-copy/cluster.json").exists():
            assert whole(f"{folder}-copy") <= now, scenario
            seen["copies read"] += 1
        seen.update(["scenarios", scenario[0] if what is None else f"{scenario[0]} in {what}"])
        seen["killed"] += status == -9
        seen["happened"] += after > now
    seen["taken back"] = sum("rolling back" in line for line in Path(f"{folder}-notes").read_text().splitlines())
    print(json.dumps(seen))


if __name__ == "__main__":
    STRAIGHT = Straight(sys.argv[2])
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
