"""A saved, copied or killed server continues with the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Limits, Model, RoundPolicy, Server, Storage, Update, algorithms, errors
from fedcore.algorithms import optimizers, rates
from fedcore.errors import CheckpointError, StoreError
from fedcore.options import Settings
from fedcore.rules import CapSteps
from tests.server.rounds import everything, go_on, made

ROOT = Path(__file__).parents[2]


ALWAYS = ["MimiC, short history", "SCAFFOLDM", "Accelerated, an outsider"]
AT_LENGTH = ["FedAU", "MIFA", "MimiC", "FedDyn", "FedAWE", "FedVARP", "FedStale", "FedNova", "FedExP"]


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
@pytest.mark.parametrize("method", [*ALWAYS, *(pytest.param(each, marks=pytest.mark.endurance) for each in AT_LENGTH)])
def test_a_server_killed_at_any_moment_ends_as_the_straight_one(method, tmp_path):
    """Killed repeatedly during its rounds: its last committed round is always complete.

    In memory a round takes about as long as the longest wait here, so that every part of it is met.
    """
    straight = made(method)
    go_on(straight, 150)
    made(method, path=tmp_path / "s").close()
    reached, moments = [0], random.Random(0)
    while reached[-1] < 150:
        command = [sys.executable, "-m", "tests.server.rounds", str(tmp_path / "s"), "150"]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert child.stdout.readline() == "loaded\n"
        if len(reached) < 6:
            for _ in range(moments.randrange(12)):  # rounds, and then a moment of one
                child.stdout.readline()
            time.sleep(moments.uniform(0, 0.006))
            child.send_signal(signal.SIGKILL)
        child.stdout.read()
        child.stdout.close()
        assert child.wait() in (0, -signal.SIGKILL)
        server = Server.load(tmp_path / "s", storage=Storage(medium="ram"))
        at_this_round = made(method)
        go_on(at_this_round, server.round_number)
        assert everything(server) == everything(at_this_round)
        reached.append(server.round_number)
    assert everything(server) == everything(straight)
    assert len(set(reached)) > 3  # it was stopped half-way


def test_methods_and_optimizers_may_be_named(tmp_path):
    options = dict(lr=0.1, optimizer="yogi", storage=tmp_path / "s")
    with Server(np.zeros(2, np.float32), "MIFA", 1, **options) as server:
        assert server.settings.optimizer == optimizers.Yogi()
    with Server.load(tmp_path / "s", algorithm="MIFA", optimizer="yogi") as again:
        assert type(again.algorithm) is algorithms.MIFA


def test_code_of_the_caller_is_needed_again(tmp_path):
    server = made("FedAvg", lr=lambda t: 0.1 / (t + 1))
    server.save(tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"^lr\b"):
        Server.load(tmp_path / "s")
    assert Server.load(tmp_path / "s", lr=lambda t: 0.1 / (t + 1)).broadcast([0]).lr == 0.1
    made("FedAvg").save(tmp_path / "t")
    assert Server.load(tmp_path / "t", lr=rates.Exponential(0.1, 0.9)).round_number == 0
    made("FedAvg", lr=rates.Staircase(0.1, restarts=[3])).save(tmp_path / "u")
    assert Server.load(tmp_path / "u", lr=rates.Staircase(0.1, restarts=[3])).broadcast([0]).lr == 0.1


class Own(algorithms.FedAvg):
    """A custom method, rate or optimizer with options."""

    def __init__(self, alpha=0.1, names=("a", "b"), array=None):
        super().__init__()
        self.alpha, self.names, self.array = alpha, names, np.zeros(2) if array is None else array

    def __call__(self, round):
        return self.alpha / (round + 1)

    def start(self, n):
        return ()

    def turn(self, v, moments, x, *, gamma, moments_out, x_out):
        x_out[:] = x - np.float32(gamma) * v
        return float(np.square(x_out, dtype=np.float64).sum())


class Other(Own):
    pass


@pytest.mark.parametrize("what", ["algorithm", "optimizer"])
def test_code_of_the_caller_must_be_the_same(what, tmp_path):
    options = dict(algorithm="FedAvg", lr=0.5) | {what: Own(np.float32(0.25), ["a", "c"])}
    server = Server(np.zeros(2, np.float32), options.pop("algorithm"), clients=2, **options)
    server.round([Update(0, server.x + 1, 1)])
    server.save(tmp_path / "s")
    for other, message in (
        (Own(0.3, ["a", "c"]), rf"^{what}\b.*alpha=0.25.*0.3"),
        (Own(0.25), rf"^{what}\b.*names=\['a', 'c'\].*\['a', 'b'\]"),
        (Other(0.25, ["a", "c"]), rf"^{what}\b.*Own.*Other"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Server.load(tmp_path / "s", **{what: other})
    again = Server.load(tmp_path / "s", **{what: Own(0.25, ("a", "c"))})
    assert again.round([Update(1, again.x + 1, 1)]).accepted == (1,)


@pytest.mark.parametrize("what", ["lr", "server_lr"])
def test_another_rate_of_the_caller_is_a_change(what, tmp_path):
    options = dict(lr=0.5) | {what: Own(np.float32(0.25), ["a", "c"])}
    server = Server(np.zeros(2, np.float32), "FedAvg", clients=2, **options)
    server.save(tmp_path / "s")
    for other in (Own(0.3, ["a", "c"]), Own(0.25), Other(0.25, ["a", "c"]), 0.25):
        assert what in Server.load(tmp_path / "s", **{what: other}).round([]).changed
    assert Server.load(tmp_path / "s", **{what: Own(0.25, ("a", "c"))}).round([]).changed is None


@pytest.mark.parametrize("what", ["lr", "server_lr"])
def test_a_function_is_compared_by_its_next_rate(what, tmp_path):
    options = {"lr": 0.5, what: lambda t: 0.5 / (t + 1)}
    server = Server(np.zeros(2, np.float32), "FedAvg", clients=2, **options)
    for _ in range(3):
        server.round([])
    server.save(tmp_path / "s")
    for other in (lambda t: 0.5 / (t + 2), 0.125, rates.Exponential(0.5, 0.5)):
        assert what in Server.load(tmp_path / "s", **{what: other}).round([]).changed
    assert Server.load(tmp_path / "s", **{what: lambda t: 0.5 * 2.0 ** -(t - 1)}).round([]).changed is None


def test_a_rate_without_a_next_value_can_be_replaced(tmp_path):
    server = Server(np.zeros(2, np.float32), "FedAvg", clients=2, lr=lambda t: [0.1][t])
    server.round([])
    server.save(tmp_path / "s")
    assert Server.load(tmp_path / "s", lr=lambda t: 0.2).broadcast([0]).lr == 0.2


def test_an_optimizer_cannot_be_added_on_loading(tmp_path):
    made("FedAvg").save(tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"^optimizer\b"):
        Server.load(tmp_path / "s", optimizer=optimizers.Adam())
    with pytest.raises(errors.RangeError, match=r"^server_lr\b"):
        Server.load(tmp_path / "s", server_lr=0.1)


def test_an_inconsistent_method_is_rejected_on_loading(tmp_path):
    server = Server(np.zeros(2, np.float32), Own(), clients=2, lr=0.1)
    server.save(tmp_path / "s")
    contradictory = type("Own", (Own,), {"anchor": "median"})()
    with pytest.raises(errors.UnknownNameError, match=r"^Own\.anchor\b.*'median'"):
        Server.load(tmp_path / "s", algorithm=contradictory)


def test_an_older_folder_has_no_options_of_custom_methods(tmp_path):
    none = dict.fromkeys(("algorithm", "lr", "server_lr", "optimizer"))
    state = Server(np.zeros(2, np.float32), Own(), clients=2, lr=0.1).settings.to_state()
    del state["algorithm"]["class"], state["algorithm"]["options"], state["next_rates"]
    assert Settings.from_state(state, none | {"algorithm": Own(0.7)}).algorithm.alpha == 0.7


X0 = {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}
PLACES = {
    "a folder": {},
    "shards": {"compute": Compute(shards=2), "model": X0 | {"c": np.zeros(20_000, np.float32)}},
    "groups": {"model": Model(X0, partial={"a": "a"})},
    "exact, with a journal": {"compute": Compute(accumulator="exact"), "journal": True},
}


def opened(folder, model=X0, algorithm="MIFA", clients=("p", "q"), *, lr=0.1, journal=None, **options):
    return Server.open(Storage(folder, journal=journal), model, algorithm, clients, lr=lr, **options)


def step(server):
    return server.round([Update("p", {name: x - 1 for name, x in server.tensors().items()}, 5)])


@pytest.mark.parametrize("place", PLACES)
def test_open_creates_a_server_and_later_resumes_it(place, tmp_path):
    for number in range(3):
        with opened(tmp_path / "s", **PLACES[place]) as server:
            assert server.round_number == number
            step(server)
            if number == 0:
                server.add_clients(["r"])
                server.remove_client("q")
    assert [*server.clients] == ["p", "r"]  # those of a resumed server stay


def test_open_without_a_folder_is_a_new_server():
    assert [step(Server.open(None, X0, "MIFA", ["p"], lr=0.1)).round for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("place", PLACES)
def test_other_options_change_a_resumed_server_and_those_left_out_stay(place, tmp_path):
    limits, policy = Limits(max_steps=7), RoundPolicy(min_clients=1)
    opened(tmp_path / "s", limits=limits, policy=policy, **PLACES[place]).close()
    with opened(tmp_path / "s", **PLACES[place]) as server:
        assert (server.limits, server.policy) == (limits, policy)
        assert step(server).changed is None
    others = {"lr": 0.2, "limits": Limits(max_steps=9), "aggregation": [CapSteps(5)]}
    with opened(tmp_path / "s", **others, **PLACES[place]) as server:
        assert step(server).changed.keys() == others.keys()
        assert server.policy == policy


@pytest.mark.parametrize("place", PLACES)
def test_a_rule_that_no_module_has_is_passed_again(place, tmp_path):
    Own = type("Own", (CapSteps,), {})  # as the classes of a notebook and of functions
    opened(tmp_path / "s", aggregation=[Own(6)], **PLACES[place]).close()
    for given in (None, [Own(7)]):
        with pytest.raises(CheckpointError, match=r"^aggregation\b.*Own"):
            Server.load(tmp_path / "s", aggregation=given)
    with opened(tmp_path / "s", aggregation=[Own(6)], **PLACES[place]) as server:
        assert step(server).changed is None


REFUSED = {
    "algorithm": ({"algorithm": "MimiC"}, CheckpointError),
    "optimizer": ({"optimizer": "Adam"}, CheckpointError),
    "a tensor's shape": ({"model": {**X0, "b": np.zeros(4, np.float32)}}, CheckpointError),
    "a tensor's name": ({"model": {"a": X0["a"], "c": X0["b"]}}, CheckpointError),
    "a tensor's dtype": ({"model": {**X0, "b": X0["b"].astype(np.float16)}}, CheckpointError),
    "accumulator": ({"compute": Compute(accumulator="exact")}, errors.FedcoreError),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("saved", [{}, {"optimizer": optimizers.Adam()}], ids=["plain", "with an optimizer"])
def test_another_server_than_the_saved_one_is_refused_and_the_folder_stays(what, saved, tmp_path):
    how, error = REFUSED[what]
    opened(tmp_path / "s", **saved).close()
    how = {"optimizer": None} if saved and what == "optimizer" else saved | how
    with pytest.raises(error):
        opened(tmp_path / "s", lr=0.5, **how)
    with Server.load(tmp_path / "s") as server:
        assert step(server).changed is None


def test_open_may_only_resume(tmp_path):
    ClientStore(["a"], 5, medium="mmap", path=tmp_path / "rows").close()
    for folder, error in (
        (tmp_path / "s", StoreError),
        (tmp_path / "rows", CheckpointError),
        (None, errors.RangeError),
    ):
        with pytest.raises(error):
            opened(folder, create=False)
    assert not (tmp_path / "s").exists()
    opened(tmp_path / "s").close()
    opened(tmp_path / "s", create=False).close()


def test_a_folder_of_an_empty_store_is_as_a_new_one(tmp_path):
    """A kill may leave it; a store with a commit is refused."""
    ClientStore(["a"], 5, medium="mmap", path=tmp_path / "s").close()
    options = dict(codec="bf16", durability="none", keep_previous=True, journal=True, audit_key=bytes(32))
    found = []
    for path in (tmp_path / "s", tmp_path / "new"):
        with Server.open(Storage(path, resident=1 << 30, **options), X0, "MIFA", ["p"], lr=0.1) as server:
            store, settings = server._backend.store, server.settings
            found.append((store.codec, store.durability, store.keep_previous, settings.journal, settings.audit))
            found[-1] += (f"{settings.device}", [*server.clients])
    assert found[0] == found[1] == ("bf16", "none", True, True, True, "cpu", ["p"])
    with ClientStore(["a"], 5, medium="mmap", path=tmp_path / "rows") as rows:
        rows.commit(0)
    with pytest.raises(StoreError, match="not empty"):
        opened(tmp_path / "rows")
