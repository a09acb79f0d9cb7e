"""Lets each system call of a store with keep_previous fail in turn, and checks memory and folder after each.

Run it as ``python -m tests.store.calls.undo_calls FOLDER ERROR STRIDE`` with the library of ``failing_calls.c``
preloaded; it prints, as JSON, how many calls of each operation failed.
"""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

from fedcore import ClientStore, errors
from tests.store.calls.failing import Calls
from tests.store.kit import assert_is_at, died, made, play
from tests.store.test_format import FORMATS, values

CLIENTS = [0, 1, 2, "a"]
# Rows by the rounds that wrote them, clients, and the previous round, by the round.
STATES = {
    0: ({0: 0, "a": 0}, CLIENTS, None),
    1: ({0: 0, 1: 1, "new": 1}, [0, 1, 2, "new"], 0),
    2: ({1: 1, 2: 2, "a": 2, "new": 1}, [1, 2, "new", "a"], 1),
}


def begin(path):
    with made(path, n=300) as store:
        play(store, 0, [0, "a"])
        store.forget("a")
        store.add("new")
        play(store, 1, [1, "new"])


def commits(store):
    if "a" not in store.registry:  # else it is tried again
        store.forget(0)
        store.add("a")
    play(store, 2, [2, "a"])


def undoes(store):
    store.undo()


OPERATIONS = {"commit": (commits, 2), "undo": (undoes, 0)}


def require(store, possible):
    """It is at one of these rounds, in memory as in the folder."""
    round = store.round
    assert round in possible, (round, possible)
    rows, clients, previous = STATES[round]
    with ClientStore.open(store.path, readonly=True) as reader:
        for opened in (store, reader):
            assert_is_at(opened, round, rows)
            assert set(opened.registry) == set(clients)
            assert (None if opened.previous is None else opened.previous.round) == previous


def attempt(act, folder):
    """Whether it was done. An error names the place."""
    try:
        act()
    except errors.StoreError as error:
        output = str(error)
    else:
        return True
    assert str(folder) in output
    return False


def each(calls, folder, name, error, stride):
    act, end = OPERATIONS[name]
    start, path, tried = folder / "start", folder / "store", 0
    begin(start)
    for at in range(1, 10_000, stride):
        shutil.copytree(start, path)
        store = ClientStore.open(path, keep_previous=True)
        with calls.failing(at, error) as failed:
            done = attempt(lambda: act(store), folder)  # noqa: B023  # it is called at once
        assert failed or done
        if store._session.broken is not None:
            died(store)
            store = ClientStore.open(path, keep_previous=True)
        store.rollback()
        require(store, {end} if done else {1, end})
        if store.round == 1:
            act(store)
            require(store, {end})
        assert store.undo() == (end == 2)
        assert store.round == (1 if end == 2 else 0)
        assert store.verify() == []
        store.close()
        shutil.rmtree(path)
        if not failed:
            break
        tried += 1
    shutil.rmtree(start)
    return tried


def each_of_raising(calls, folder, error, stride):
    """A folder of the format before is opened so that its commits can be taken back, or stays as it is."""
    for tried, at in enumerate(range(1, 10_000, stride)):
        shutil.unpack_archive(FORMATS / "2.zip", folder)
        with calls.failing(at, error) as failed:
            attempt(lambda: ClientStore.open(folder / "f32", keep_previous=True).close(), folder)
        with ClientStore.open(folder / "f32") as store:
            assert store.info().format in ((2, 3) if failed else (3,))
            assert (store.round, store.verify()) == (2, [])
            assert (store.read("a") == values(20)).all()
        for entry in folder.iterdir():
            shutil.rmtree(entry)
        if not failed:
            return tried
    raise AssertionError("expected an end")


def main(folder, error, stride):
    calls, tried = Calls(folder), Counter()
    for name in OPERATIONS:
        tried[name] = each(calls, folder, name, error, stride)
    tried["raising"] = each_of_raising(calls, folder, error, stride)
    sys.stdout.write(json.dumps(tried))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
