"""Loading a forged folder raises an error that names it; nothing hangs, and nothing is executed."""

import shutil
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from fedcore import ClientStore, RoundPolicy, Server, Storage, Update, errors
from fedcore.algorithms import optimizers
from fedcore.rules import RejectLong
from fedcore.rules.windows import WINDOW
from fedcore.store import inspect as recovery
from tests.server.forgeries import FORGERIES, forge

N = 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "run"
    late = RoundPolicy(max_staleness=1)
    with Server(np.zeros(8, np.float32), "MimiC", N, lr=0.1, policy=late, storage=folder) as server:
        for _ in range(3):
            server.round([Update(i, server.x + 1 + i, 1) for i in range(N)])
    del server  # whose views keep the files from ending behind what they hold, which copies of them would be full of
    ClientStore.open(folder).close()
    return folder


@pytest.fixture(params=FORGERIES)
def forged(request, sound, tmp_path):
    folder = tmp_path / "forged"
    shutil.copytree(sound, folder)
    forge(folder, **FORGERIES[request.param])
    return folder


@pytest.mark.parametrize("medium", ["ram", "mmap", None])
def test_a_forged_folder_is_rejected(forged, medium):
    with pytest.raises(errors.CheckpointError) as rejected:
        Server.load(forged, storage=Storage(medium=medium))
    assert str(forged) in str(rejected.value)


@pytest.mark.parametrize(
    "look",
    [
        lambda path: ClientStore.open(path, readonly=True).close(),
        lambda path: ClientStore.open(path, medium="ram").verify(),
        recovery.look,
    ],
    ids=["reading", "loading", "recovering"],
)
def test_reading_a_forged_store_raises_only_fedcore_errors(forged, look):
    """The state of a server is opaque to its store, which may be valid."""
    with suppress(errors.FedcoreError):
        look(forged)


def test_the_folder_was_valid_before_the_forgery(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "run")
    forge(tmp_path / "run")
    with Server.load(tmp_path / "run") as server:
        assert server.round_number == 3


def saved(path, change):
    """A folder of a server that was changed in memory, with right checksums."""
    model = {"w": np.zeros(8, np.float32), "seen": np.int64([3])}
    server = Server(model, "MimiC", dict.fromkeys(range(N), 1), lr=0.1, aggregation=[RejectLong(10)])
    for t in range(3):
        server.round([Update(i, model | {"w": np.full(8, 1 + i, np.float32)}, 1) for i in range(N) if i != t])
    server.add_clients({"new": 5})
    now = server._backend.snapshot
    server._backend.snapshot = now._replace(**change(now))
    server.save(path)


def population(**columns):
    runs = {name: (column,) for name, column in columns.items()}
    return lambda now: {"population": replace(now.population, **runs)}


def norms(**windows):
    return lambda now: {"norms": {**now.norms, **windows}}


def window(*first, dtype=np.float32, length=WINDOW):
    found = np.full(length, np.nan, dtype)
    found[: len(first)] = first
    return found


IMPLAUSIBLE = {
    "gamma infinite": (lambda now: {"gamma": np.inf}, r"\bgamma\b"),
    "gamma NaN": (lambda now: {"gamma": np.nan}, r"\bgamma\b"),
    "a round before the rows'": (lambda now: {"round_number": 1}, r"\bround=1: "),
    "a round past the largest count": (lambda now: {"round_number": 2**53 + 1}, r"\bround=9007199254740993: "),
    "transactions fewer than rounds": (lambda now: {"transactions": 2}, r"\btransactions=2: "),
    "transactions past the largest count": (
        lambda now: {"transactions": 2**54 + 1},
        r"\btransactions=18014398509481985: ",
    ),
    "sizes in a row": (population(sizes=np.arange(2)), r"\bpopulation/sizes\b"),
    "sizes in a cube": (population(sizes=np.zeros((2, 2, 9), np.int64)), r"\bpopulation/sizes\b"),
    "sizes in three": (population(sizes=np.zeros((3, 9), np.int64)), r"\bpopulation/sizes\b"),
    "sizes as floats": (population(sizes=np.zeros((2, 9))), r"\bpopulation/sizes\b"),
    "arrivals in a row": (population(arrived=np.arange(2)), r"\bpopulation/arrived\b"),
    "a counter of floats": (lambda now: {"counters": {"seen": np.ones(1)}}, r"\bcounter/seen\b"),
    "a norm of zero": (norms(parameters=window(1, 0)), r"\bnorms/parameters\b"),
    "a norm below zero": (norms(parameters=window(-1)), r"\bnorms/parameters\b"),
    "a norm that is infinite": (norms(parameters=window(np.inf)), r"\bnorms/parameters\b"),
    "a norm behind the last": (norms(parameters=window(1, np.nan, 1)), r"\bnorms/parameters\b"),
    "norms in doubles": (norms(parameters=window(1, dtype=np.float64)), r"\bnorms/parameters\b"),
    "too few norms": (norms(parameters=window(1, length=WINDOW - 1)), r"\bnorms/parameters\b"),
    "steps in float32": (norms(steps=window(1)), r"\bnorms/steps\b"),
    "examples in float32": (norms(examples=window(1)), r"\bnorms/examples\b"),
    "a reference to no direction": (
        lambda now: {"history": replace(now.history, references={**now.history.references, 7: 1})},
        r"\breferences\b",
    ),
    "a direction that no row refers to": (
        lambda now: {"history": replace(now.history, references={**now.history.references, 2: 0})},
        r"\breferences\b",
    ),
    "x in doubles": (lambda now: {"x": now.x.astype(np.float64)}, r"\bx\b"),
    "an x ahead in doubles": (lambda now: {"ahead": np.zeros(8)}, r"\bahead\b"),
    "a direction in doubles": (
        lambda now: {
            "history": replace(now.history, directions={t: np.float64(v) for t, v in now.history.directions.items()})
        },
        r"v/\d: expected float32\[8\], got float64",
    ),
    "an earlier x that is short": (lambda now: {"past": {2: now.x[:5]}}, r"\bpast/2\b"),
}


@pytest.mark.parametrize("what", IMPLAUSIBLE)
def test_values_that_contradict_each_other_are_rejected(what, tmp_path):
    change, told = IMPLAUSIBLE[what]
    saved(tmp_path / "run", change)
    with pytest.raises(errors.CheckpointError, match=told):
        Server.load(tmp_path / "run", storage=Storage(medium="ram"))


@pytest.mark.parametrize("name", ["x_prev", "momentum", "moments"])
def test_vectors_of_another_dtype_are_rejected(name, tmp_path):
    server = Server(np.zeros(8, np.float32), "FedAvgMVR", 1, lr=0.1, optimizer=optimizers.Adam())
    wrong = (np.zeros(8), np.zeros(8)) if name == "moments" else np.zeros(8)
    server._backend.snapshot = server._backend.snapshot._replace(**{name: wrong})
    server.save(tmp_path / "run")
    told = "moment/0" if name == "moments" else name
    with pytest.raises(errors.CheckpointError, match=rf"{told}\b"):
        Server.load(tmp_path / "run", storage=Storage(medium="ram"))


@pytest.mark.parametrize(
    "change",
    [
        lambda now: {},
        lambda now: {"transactions": 3},
        lambda now: {"transactions": 2**54},
        norms(parameters=window(np.float32(1e-45), np.finfo(np.float32).max)),
        norms(parameters=np.ones(WINDOW, np.float32), steps=np.ones(WINDOW), examples=window(dtype=np.float64)),
    ],
)
def test_extreme_valid_values_are_loaded(change, tmp_path):
    saved(tmp_path / "run", change)
    with Server.load(tmp_path / "run", storage=Storage(medium="ram")) as server:
        assert server.round([Update("new", server.x, 1)]).accepted == ("new",)


@pytest.mark.parametrize("rate", [1e-45, float(np.finfo(np.float32).max)])
def test_rates_that_float32_holds_are_loaded(rate, tmp_path):
    Server(np.zeros(1, np.float32), "FedAvg", 1, lr=rate).save(tmp_path / "run")
    with Server.load(tmp_path / "run", storage=Storage(medium="ram")) as server:
        assert server.broadcast([0]).lr == rate
