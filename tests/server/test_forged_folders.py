"""Whatever a folder from a stranger says, loading it ends in an error that names it; nothing hangs, nothing runs."""

import shutil
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors, optimizers
from fedcore.server.norm_window import WINDOW
from fedcore.store import recovery
from tests.server.forgeries import FORGERIES, forge

N = 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "run"
    with Server("MimiC", np.zeros(8, np.float32), N, lr=0.1, store=f"mmap:{folder}", late_rounds=1) as server:
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
def test_a_forged_folder_is_refused(forged, medium):
    with pytest.raises(errors.CheckpointError) as refused:
        Server.load(forged, medium=medium)
    assert str(forged) in str(refused.value)


@pytest.mark.parametrize(
    "look",
    [
        lambda path: ClientStore.open(path, readonly=True).close(),
        lambda path: ClientStore.open(path, medium="ram").verify(),
        recovery.look,
    ],
    ids=["reading", "loading", "recovering"],
)
def test_who_only_looks_gets_an_error_of_fedcore_if_any(forged, look):
    """What is wrong for a server may be right for a store, whose state is the caller's own."""
    with suppress(errors.FedcoreError):
        look(forged)


def test_the_folder_that_was_forged_was_sound(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "run")
    forge(tmp_path / "run")
    with Server.load(tmp_path / "run") as server:
        assert server.round_number == 3


def saved(path, change):
    """A folder of a server that has been changed in memory: whole and rightly sealed."""
    model = {"w": np.zeros(8, np.float32), "seen": np.int64([3])}
    server = Server("MimiC", model, N, lr=0.1, client_sizes=[1] * N, max_norm_ratio=10)
    for t in range(3):
        server.round([Update(i, model | {"w": np.full(8, 1 + i, np.float32)}, 1) for i in range(N) if i != t])
    server.arrive("new", client_sizes=5)
    now = server._state.snapshot
    server._state.snapshot = now._replace(**change(now))
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
    "gamma infinite": (lambda now: {"gamma": np.inf}, "gamma inf"),
    "gamma NaN": (lambda now: {"gamma": np.nan}, "gamma nan"),
    "a round before the rows'": (lambda now: {"round_number": 1}, "round 1, and a commit of round 3, rows of 2"),
    "a round past what is counted": (lambda now: {"round_number": 2**53 + 1}, "round 9007199254740993, and"),
    "transactions fewer than rounds": (lambda now: {"transactions": 2}, "2 transactions, and 3 rounds"),
    "transactions past what is counted": (lambda now: {"transactions": 2**54 + 1}, "18014398509481985 transactions"),
    "sizes in a row": (population(sizes=np.arange(2)), r"population/sizes: expected int64\[2, m\], got int64\[2\]"),
    "sizes in a cube": (population(sizes=np.zeros((2, 2, 9), np.int64)), r"population/sizes: expected .*\[2, 2, 9\]"),
    "sizes in three": (population(sizes=np.zeros((3, 9), np.int64)), r"population/sizes: expected .*\[3, 9\]"),
    "sizes as floats": (population(sizes=np.zeros((2, 9))), r"population/sizes: expected .* got float64\[2, 9\]"),
    "arrivals in a row": (population(arrived=np.arange(2)), r"population/arrived: expected int64\[2, m\]"),
    "a counter of floats": (lambda now: {"counters": {"seen": np.ones(1)}}, r"counter/seen: expected int64\[1\], got"),
    "a norm of zero": (norms(parameters=window(1, 0)), r"norms/parameters: expected float\[1000\] > 0, NaN behind"),
    "a norm below zero": (norms(parameters=window(-1)), "norms/parameters: expected"),
    "a norm that is infinite": (norms(parameters=window(np.inf)), "norms/parameters: expected"),
    "a norm behind the last": (norms(parameters=window(1, np.nan, 1)), "norms/parameters: expected"),
    "norms in doubles": (norms(parameters=window(1, dtype=np.float64)), "norms/parameters: expected"),
    "too few norms": (norms(parameters=window(1, length=WINDOW - 1)), "norms/parameters: expected"),
    "steps in float32": (norms(steps=window(1)), "norms/steps: expected"),
    "examples in float32": (norms(examples=window(1)), "norms/examples: expected"),
    "a reference to no direction": (
        lambda now: {"history": replace(now.history, references={**now.history.references, 7: 1})},
        "references: expected those of the directions",
    ),
    "a direction that no row refers to": (
        lambda now: {"history": replace(now.history, references={**now.history.references, 2: 0})},
        "references: expected those of the directions",
    ),
    "x in doubles": (lambda now: {"x": now.x.astype(np.float64)}, r"x: expected float32\[8\], got float64\[8\]"),
    "an x ahead in doubles": (lambda now: {"ahead": np.zeros(8)}, r"ahead: expected float32\[8\], got float64"),
    "a direction in doubles": (
        lambda now: {
            "history": replace(now.history, directions={t: np.float64(v) for t, v in now.history.directions.items()})
        },
        r"v/\d: expected float32\[8\], got float64",
    ),
    "an earlier x that is short": (lambda now: {"past": {2: now.x[:5]}}, r"past/2: expected float32\[8\], got .*\[5\]"),
}


@pytest.mark.parametrize("what", IMPLAUSIBLE)
def test_what_does_not_fit_together_is_refused_by_name(what, tmp_path):
    change, told = IMPLAUSIBLE[what]
    saved(tmp_path / "run", change)
    with pytest.raises(errors.CheckpointError, match=told):
        Server.load(tmp_path / "run", medium="ram")


@pytest.mark.parametrize("name", ["x_prev", "momentum", "moments"])
def test_vectors_of_another_dtype_are_refused_by_name(name, tmp_path):
    server = Server("FedAvgMVR", np.zeros(8, np.float32), 1, lr=0.1, optimizer=optimizers.Adam())
    wrong = (np.zeros(8), np.zeros(8)) if name == "moments" else np.zeros(8)
    server._state.snapshot = server._state.snapshot._replace(**{name: wrong})
    server.save(tmp_path / "run")
    told = "moment/0" if name == "moments" else name
    with pytest.raises(errors.CheckpointError, match=rf"{told}: expected float32\[8\], got float64\[8\]"):
        Server.load(tmp_path / "run", medium="ram")


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
def test_what_fits_to_the_last_is_loaded(change, tmp_path):
    saved(tmp_path / "run", change)
    with Server.load(tmp_path / "run", medium="ram") as server:
        assert server.round([Update("new", server.x, 1)]).heard == ("new",)


@pytest.mark.parametrize("rate", [1e-45, float(np.finfo(np.float32).max)])
def test_rates_that_float32_holds_are_loaded(rate, tmp_path):
    Server("FedAvg", np.zeros(1, np.float32), 1, lr=rate).save(tmp_path / "run")
    with Server.load(tmp_path / "run", medium="ram") as server:
        assert server.broadcast([0]).lr == rate
