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


def referring(to, rows):
    return lambda now: {"history": replace(now.history, references={**now.history.references, to: rows})}


def in_doubles(now):
    directions = {t: np.float64(v) for t, v in now.history.directions.items()}
    return {"history": replace(now.history, directions=directions)}


NUMBERS = {"gamma": (np.inf, np.nan), "round_number": (1, 2**53 + 1), "transactions": (2, 2**54 + 1)}
SHAPES = np.arange(2), np.zeros((2, 2, 9), np.int64), np.zeros((3, 9), np.int64), np.zeros((2, 9))
PARAMETERS = window(1, 0), window(-1), window(np.inf), window(1, np.nan, 1), window(1, dtype=np.float64)
CONTRADICTIONS = [
    *(({name: value}, rf"\b{name.partition('_')[0]}\b") for name, values in NUMBERS.items() for value in values),
    *((population(sizes=sizes), r"\bpopulation/sizes\b") for sizes in SHAPES),
    (population(arrived=np.arange(2)), r"\bpopulation/arrived\b"),
    ({"counters": {"seen": np.ones(1)}}, r"\bcounter/seen\b"),
    *((norms(parameters=one), r"\bnorms/parameters\b") for one in (*PARAMETERS, window(1, length=WINDOW - 1))),
    *((norms(**{name: window(1)}), rf"\bnorms/{name}\b") for name in ("steps", "examples")),  # in float32
    *((referring(to, rows), r"\breferences\b") for to, rows in ((7, 1), (2, 0))),  # a direction, or a row, is missing
    (lambda now: {"x": now.x.astype(np.float64)}, r"\bx\b"),
    ({"ahead": np.zeros(8)}, r"\bahead\b"),
    (in_doubles, r"v/\d: expected float32\[8\], got float64"),
    (lambda now: {"past": {2: now.x[:5]}}, r"\bpast/2\b"),
]


@pytest.mark.parametrize("what", range(len(CONTRADICTIONS)))
def test_values_that_contradict_each_other_are_rejected(what, tmp_path):
    change, told = CONTRADICTIONS[what]
    saved(tmp_path / "run", change if callable(change) else lambda _: change)
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
