"""Children that commit to a store with keep_previous, or undo, and are killed before or after a system call.

There is a child for each of these moments, or for one of STRIDE that are drawn from a seed. After each kill the folder
is as before or as after, and what it keeps can be taken back, by a child that is killed too.
Run as a program, because it forks: ``undo_killed.py FOLDER DURABILITY=STRIDE ...`` prints how many kills each had.
"""

import json
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

from fedcore import ClientStore
from tests import kills
from tests.kills import calls_of, die_at
from tests.store.kit import assert_is_at, made, play
from tests.store.test_format import FORMATS, values, write_row

CLIENTS = [0, 1, 2, "a"]
# Rows by the rounds that wrote them, and clients, by the round.
STATES = {
    0: ({0: 0, 1: 0, "a": 0}, CLIENTS),
    1: ({0: 0, 1: 1, 2: 1, "a": 0}, CLIENTS),
    2: ({0: 2, 1: 1, 2: 1, "new": 2}, [0, 1, 2, "new"]),
    9: ({0: 9, 1: 1, 2: 1, "a": 0}, CLIENTS),
}


def begin(path):
    """Two rounds; the second can be taken back."""
    store = made(path, n=300)
    play(store, 0, [0, 1, "a"])
    play(store, 1, [1, 2])
    store.close()


def commits(store):
    store.forget("a")
    store.add("new")
    play(store, 2, [0, "new"])
    store.checkpoint()


def compacts(store):
    store.compact()


def undoes(store):
    store.undo()


def closes(store):
    store.close()


# The action of each, whether the writer has keep_previous, and the possible states then: the round, and the previous
# one that an undo restores.
OPERATIONS = {
    "commit": (commits, True, {(1, 0), (2, 1)}),
    "undo": (undoes, True, {(1, 0), (0, None)}),
    "compact": (compacts, True, {(1, 0), (1, None)}),
    "close": (closes, True, {(1, 0)}),
    "commit that keeps nothing": (commits, False, {(1, 0), (2, None)}),
}


def killed(work, call, after):
    """Whether a child that works was killed, at its ``call``-th call into the system, before or after it."""

    def act():
        die_at(call, after=after)
        work()

    return kills.killed(act)


def moments(work, stride, chance):
    """Some of the calls at which working children are killed, and whether after the call."""
    calls = calls_of(work)
    assert 0 < calls < 200, calls
    every = [(call, after) for call in range(1, calls + 1) for after in (False, True)]
    return sorted(chance.sample(every, min(len(every), max(3, len(every) // stride))))


def require(path, round, previous):
    rows, clients = STATES[round]
    with ClientStore.open(path, readonly=True) as store:
        assert_is_at(store, round, rows)
        assert list(store.registry) == clients
        assert previous == (None if store.previous is None else store.previous.round), (round, previous)


def looked_at(path, durability, possible, chance):
    """The state is possible; undone, by children that are killed, it is the previous one, and the store continues."""
    with ClientStore.open(path, readonly=True) as store:
        found = store.round, None if store.previous is None else store.previous.round
    assert found in possible, (found, possible)
    require(path, *found)
    round, previous = found
    end = round if previous is None else previous

    def undo():
        ClientStore.open(path, durability=durability, keep_previous=True).undo()

    for _ in range(chance.randrange(4)):
        killed(undo, chance.randrange(1, 9), chance.random() < 0.5)
    undo()
    require(path, end, None)
    with ClientStore.open(path, durability=durability, keep_previous=True) as store:
        assert not store.undo()
        if end == 1:
            play(store, 9, [0])
            store.checkpoint()
            assert_is_at(store, 9, STATES[9][0])
            assert store.undo()
    require(path, end, None)
    return found


def each_call(folder, durability, stride, name, chance):
    act, keep_previous, possible = OPERATIONS[name]
    path, start, found = folder / "store", folder / "start", set()
    begin(start)

    def work():
        act(ClientStore.open(path, durability=durability, keep_previous=keep_previous))

    shutil.copytree(start, path)
    chosen = moments(work, stride, chance)
    for moment in chosen:
        shutil.rmtree(path)
        shutil.copytree(start, path)
        assert killed(work, *moment)
        found.add(looked_at(path, durability, possible, chance))
    shutil.rmtree(path)
    shutil.rmtree(start)
    assert found == possible or stride > 1, (name, found)
    return len(chosen)


def each_call_of_raising(folder, durability, stride, chance):
    """A folder of the format before is opened so that its commits can be taken back."""
    path = folder / "f32"

    def work():
        store = ClientStore.open(path, durability=durability, keep_previous=True)
        write_row(store, "a", values(99))
        store.commit(3)
        store.checkpoint()

    def begin_again():
        for entry in folder.iterdir():
            shutil.rmtree(entry)
        shutil.unpack_archive(FORMATS / f"{chance.choice([1, 2])}.zip", folder)

    begin_again()
    chosen = moments(work, stride, chance)
    for moment in chosen:
        begin_again()
        killed(work, *moment)  # one format makes fewer calls than the other
        with ClientStore.open(path, keep_previous=True) as store:
            assert store.verify() == []
            committed = store.round == 3
            assert (store.read("a") == values(99 if committed else 20)).all()
            assert store.undo() == committed
            assert store.round == 2
            assert (store.read("a") == values(20)).all()
    return len(chosen)


def main(folder, strides):
    chance, kills = random.Random(1), Counter()
    for durability, stride in strides.items():
        for name in OPERATIONS:
            kills[f"{name}, {durability}"] = each_call(folder, durability, stride, name, chance)
        kills[f"raising, {durability}"] = each_call_of_raising(folder, durability, stride, chance)
    sys.stdout.write(json.dumps(kills))


if __name__ == "__main__":
    main(Path(sys.argv[1]), {way.split("=")[0]: int(way.split("=")[1]) for way in sys.argv[2:]})
