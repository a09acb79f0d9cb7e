"""Children that write rounds to a store and are killed; after each kill the store is checked, and the next continues.

Run as a program, because it forks: ``killed.py FOLDER DURABILITY KILLS SEED [undoable]`` prints how often it killed
where. With undoable, every third round is undone and repeated.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from itertools import cycle
from pathlib import Path

import numpy as np

from fedcore import ClientStore
from tests.kills import die_at, kill
from tests.store.kit import content, write

N, CLIENTS, COHORT = 300, 20, 6
PLACES = b"csupw"
"""Where every third child dies in turn, however fast the machine: as it commits, saves, takes back, compacts, and
between two rows."""


def cohort(round):
    return random.Random(round).sample(range(CLIENTS), COHORT)


def departing(round):
    """The client that leaves in this round; it comes back two rounds later."""
    return round // 6 % CLIENTS if round % 6 == 3 else None


def model(last):
    """The rounds of the clients' rows, and the clients, after round ``last``."""
    rows, clients = {}, set(range(CLIENTS))
    for round in range(1, last + 1):  # round 0 writes no rows
        if departing(round) is not None:
            clients.remove(departing(round))
            rows.pop(departing(round), None)
        if departing(round - 2) is not None:
            clients.add(departing(round - 2))
        rows |= {client: round for client in cohort(round) if client in clients}
    return rows, clients


def assert_whole(store):
    """The store is just as its last committed round left it."""
    assert store.verify() == []
    rows, clients = model(store.round)
    assert set(store.registry) == clients
    for client in clients:
        assert store.round_of(client) == rows.get(client), (client, store.round, store.round_of(client))
        expected = content(N, client, rows[client]) if client in rows else np.zeros(N, np.float32)
        np.testing.assert_array_equal(store.read(client), expected)
    assert store.state == {"round": store.round}
    np.testing.assert_array_equal(store.vector("x"), content(N, store.round))
    np.testing.assert_array_equal(store.vector("total"), content(N, store.round).astype(np.float64))


def work(path, durability, keep_previous, say, last=10**6):
    """Rounds, up to the last."""
    with ClientStore.open(path, durability=durability, keep_previous=keep_previous) as store:
        say(b"o", store.round)
        undone = 0
        while store.round < last:
            round = store.round + 1
            if round % 5 == 0:
                say(b"p", round)
                store.compact()
            if departing(round) is not None:
                store.forget(departing(round))
            if departing(round - 2) is not None:
                store.add(departing(round - 2))
            for client in cohort(round):
                if client in store.registry:
                    write(store, client, content(N, client, round))
                say(b"w", round)
            say(b"c", round)
            x = content(N, round)
            store.commit(round, {"x": x, "total": x.astype(np.float64)}, {"round": round})
            if durability == "checkpoint" and round % 2 == 0:
                say(b"k", round)
                store.checkpoint()
            if round % 7 == 0:
                say(b"s", round)
                store.save(path.with_name("copy"))
            say(b"d", round)
            if keep_previous and round % 3 == 0 and round > undone:
                undone = round
                say(b"u", round - 1)
                assert store.undo()
                assert store.round == round - 1
                say(b"d", round - 1)


def child(path, durability, keep_previous, writing, call, place, after):
    def say(what, round):
        nonlocal place
        os.write(writing, what + round.to_bytes(7, "little"))
        if what == place:
            place = None
            die_at(1, after=after) if what != b"w" else kill()  # a row is in mapped memory, so no call is made

    if call is not None:
        die_at(call, after=after)
    try:
        work(path, durability, keep_previous, say)
    finally:
        os._exit(3)  # unreachable


def kill_one(path, durability, keep_previous, chance, place):
    """Let a child work and die, at the place if one is given; return its last step."""
    reading, writing = os.pipe()
    call = chance.randrange(1, 40) if place is None and chance.random() < 0.6 else None
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        child(path, durability, keep_previous, writing, call, place, chance.random() < 0.5)
    os.close(writing)
    if call is None and place is None:
        os.read(reading, 8)  # it has opened the store
        time.sleep(chance.random() ** 2 * 0.15)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the child ended with {status}"
    output = b""
    while part := os.read(reading, 1 << 16):
        output += part
    os.close(reading)
    notes = [
        (output[i : i + 1].decode(), int.from_bytes(output[i + 1 : i + 8], "little")) for i in range(0, len(output), 8)
    ]
    return notes


def possible(notes, before):
    """The possible last rounds: the last one that was certainly committed, or one in progress."""
    sure = on_its_way = before
    for what, round in notes:
        if what in "cu":
            on_its_way = round
        elif what in "sdpwk":
            sure = on_its_way
    return {sure, on_its_way}


def take_back(path):
    """Take the last round back where that can be done; the round that is left."""
    with ClientStore.open(path, keep_previous=True) as store:
        expected = store.round if store.previous is None else store.previous.round
        store.undo()
        assert store.round == expected
        assert_whole(store)
        return store.round


def main(folder, durability, kills, seed, keep_previous):
    path, chance, places = Path(folder) / "store", random.Random(seed), Counter()
    with ClientStore(CLIENTS, N, medium="mmap", codec="int8", path=path, keep_previous=keep_previous) as store:
        store.commit(0, {"x": content(N, 0), "total": content(N, 0).astype(np.float64)}, {"round": 0})
    before = 0
    turns = cycle(place.to_bytes() for place in PLACES if keep_previous or place != ord("u"))
    for i in range(kills):
        notes = kill_one(path, durability, keep_previous, chance, next(turns) if i % 3 == 0 else None)
        with ClientStore.open(path, readonly=True) as store:
            assert store.round in possible(notes, before), (store.round, notes[-6:], before)
            assert_whole(store)
            before = store.round
        copy = path.with_name("copy")
        if copy.exists():
            with ClientStore.open(copy, medium="ram") as saved:
                assert_whole(saved)
        if keep_previous and before > 1 and chance.random() < 0.3:
            before = take_back(path)
        places[notes[-1][0] if notes else "opening"] += 1
    work(path, durability, keep_previous, lambda *_: None, last=before + 10)
    with ClientStore.open(path) as store:
        assert store.round == before + 10
        assert_whole(store)
        store.save(path.with_name("copy"))
    # A kill may leave a draft that is empty, or holds an empty lock: nothing proves that it is the store's to delete.
    left = sorted(entry.name for entry in path.parent.iterdir() if holds_anything(entry))
    print(json.dumps({"places": places, "rounds": before, "left": left}))


def holds_anything(folder):
    return any(entry.name != "lock" or entry.stat().st_size for entry in folder.iterdir())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), "undoable" in sys.argv[5:])
