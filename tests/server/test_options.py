"""Every option: ``change`` and ``load`` give it the effect that it has in a new server, or refuse it by name."""

import inspect
from dataclasses import fields, replace
from itertools import chain
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from fedcore import (
    ClientStore,
    Compute,
    EdgeAggregator,
    Limits,
    Model,
    RoundPolicy,
    Server,
    Storage,
    algorithms,
    arrays,
)
from fedcore.algorithms import optimizers, rates
from fedcore.cluster.placement import LocalThreads
from fedcore.errors import FedcoreError, RangeError
from fedcore.options import Changes
from fedcore.rules import CapExamples, CentredClipping, ClipToMedian, Median, PrivateMean, RejectLong

N = 6
SMALL = {"w": np.ones(37, np.float32), "u": np.ones(5, np.float32), "bn.running_var": np.ones(2, np.float32)}
MODELS = {
    "plain": SMALL,
    "shards": SMALL | {"w": np.ones(20_000, np.float32)},
    "groups": Model(SMALL, partial={"one": ["w"], "two": ["u", "bn.running_var"]}),
}
BASE = {"lr": 0.1, "limits": Limits(), "policy": RoundPolicy(max_staleness=2)}
PARTS = {"limits": Limits, "policy": RoundPolicy, "storage": Storage, "compute": Compute}
"""The arguments whose fields are options."""
VALUES = {
    "lr": [0.05],
    "server_lr": [0.5, None],
    "aggregation": [
        *("open", "mean", [CapExamples(1)], [RejectLong(2)], [CentredClipping(1)], [ClipToMedian(), Median()]),
        PrivateMean(1, 1, 4),
    ],
    "optimizer": ["Adam"],
    "algorithm": ["MIFA"],
    "max_staleness": [0, 1, 3],
    "signed_buffers": [(), ("*",)],
    "accumulator": ["float64", "exact"],
    "device": ["cpu"],
    "executor": [LocalThreads()],
    "callbacks": [(print,)],
    "audit_key": [bytes(32)],
    "folders": [("one",)],
}
"""Values of options for which ``other_value`` finds none, or for which one value is not enough."""
SEEN = {
    "batch_size": lambda server: server.settings.batch_size,
    "callbacks": lambda server: server.callbacks,
    "device": lambda server: server.device,
    "diagnostics": lambda server: server.settings.diagnostics,
    "durability": lambda server: server._backend.store.durability,
    "executor": lambda server: server._backend.coordinator.placement,
    "journal": lambda server: server._journal is not None,
    "keep_previous": lambda server: server._backend.store.keep_previous,
    "medium": lambda server: server._backend.store.medium,
    "resident": lambda server: arrays._limits[id(server.settings.device)],
}
"""How to see the value of an option that only ``load`` takes."""


def other_value(kind, name):
    """A value of a field that differs from its default."""
    hint = get_type_hints(kind)[name]
    literals = chain(*(get_args(one) for one in (hint, *get_args(hint)) if get_origin(one) is Literal))
    bools = [True] if bool in (hint, *get_args(hint)) else []
    for value in [*bools, *literals, 3, 0.5, "*"]:
        try:
            made = getattr(kind(**{name: value}), name)
        except Exception:
            continue
        if made != getattr(kind(), name):
            return value
    raise AssertionError(f"{name}: add a value to VALUES")


def options(arguments):
    """All (argument, field or None, value) of some arguments of ``Server``."""
    for argument in arguments:
        for name in [one.name for one in fields(PARTS[argument])] if argument in PARTS else [None]:
            option = name or argument
            for value in VALUES[option] if option in VALUES else [other_value(PARTS[argument], name)]:
                shown = type(value).__name__ if "object at" in repr(value) else value  # a name has no address
                yield pytest.param(argument, name, value, id=f"{option}={shown}"[:40])


CHANGED = get_type_hints(Changes)
LOADED = [name for name in inspect.signature(Server.load).parameters if name not in ("path", "model", *CHANGED)]


def given(argument, name, value):
    """Keyword arguments with an option; the others are as in ``BASE``."""
    return {argument: value if name is None else replace(BASE.get(argument, PARTS[argument]()), **{name: value})}


def made(kind, path, **more):
    compute = Compute(shards=2 if kind == "shards" else None)
    return Server(MODELS[kind], "FedAvgM", N, storage=path, compute=compute, **BASE | more)


def played(server, count):
    """Some rounds of usual, late, long, and invalid updates: what they reported, and x."""
    seen = []
    for _ in range(count):
        t, rng = server.round_number, np.random.default_rng(server.round_number)
        with server.open_round() as round:
            for i in range(N):
                y = server.x * np.float32(0.9) + rng.normal(0, 0.3 * (1 + i), server.layout.n).astype(np.float32)
                y[-2:] = -1 if i == t % N else 1
                late, lr = (1 + t % 3 if i == 1 else 0), (0.2 if i == 2 else None)
                round.add(i, y, steps=1 + 2 * (i % 3), examples=1 + i, round=max(0, t - late), lr=lr)
            round.reject(99, "a sixth client")
        report = round.report
        seen.append((report.accepted, report.rejected, report.gamma, repr(report.factors), repr(report.weights)))
    return seen, server.x.tobytes()


def outcome(make, count=4):
    """The rounds of a server, or the error that refuses it; the server is closed."""
    try:
        server = make()
    except FedcoreError as error:
        return error
    with server:
        return played(server, count)


def require_refused(error, argument, name):
    assert isinstance(error, FedcoreError)
    assert argument in str(error) or (name or argument) in str(error)
    assert "damaged" not in str(error)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("argument", "name", "value"), [*options(CHANGED)])
@pytest.mark.sample(1)
def test_a_changed_option_has_the_bits_of_a_server_made_with_it(kind, argument, name, value, tmp_path):
    """From the first round on; from the fourth on, in the running server, after a load, and if loading changes it."""
    option = given(argument, name, value)

    def changed(path, **more):
        server = made(kind, path)
        try:
            server.change(**option)
        except BaseException:
            server.close()
            raise
        return server

    new = outcome(lambda: made(kind, tmp_path / "new", **option))
    at_once = outcome(lambda: changed(tmp_path / "changed"))
    made(kind, tmp_path / "first").close()
    loads = argument != "server_lr" or value is not None  # None stands for the saved one
    loaded = outcome(lambda: Server.load(tmp_path / "first", **option)) if loads else at_once
    if isinstance(at_once, FedcoreError):
        require_refused(at_once, argument, name)
        require_refused(loaded, argument, name)
        return
    assert not isinstance(new, FedcoreError)
    assert at_once == loaded == new
    with made(kind, tmp_path / "run") as server:
        played(server, 3)
        server.save(tmp_path / "before")
        server.change(**option)
        server.save(tmp_path / "after")
        running = played(server, 4)
    assert outcome(lambda: Server.load(tmp_path / "after")) == running
    if loads:
        assert outcome(lambda: Server.load(tmp_path / "before", **option)) == running


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("argument", "name", "value"), [*options(LOADED)])
@pytest.mark.sample(1)
def test_an_option_of_load_has_an_effect_or_is_refused(kind, argument, name, value, tmp_path):
    with made(kind, tmp_path / "run") as server:
        played(server, 2)
        server.save(tmp_path / "copy")
        due = played(server, 3)
    option = name or argument
    try:
        server = Server.load(tmp_path / "copy", **given(argument, name, value))
    except FedcoreError as error:
        require_refused(error, argument, name)
        Server.load(tmp_path / "copy").close()  # unlocked, and as before
        return
    with server:
        assert option in SEEN, f"{option}: add to SEEN how to see it, or let load refuse it"
        if kind == "shards" and option == "durability":
            assert server._backend.coordinator._durability == value
        else:
            assert SEEN[option](server) == value
        assert played(server, 3) == due


CLASSES = {
    "lr": [optimizers.Adam, rates.Exponential, float],
    "server_lr": [rates.Constant],
    "optimizer": [optimizers.Adam],
    "algorithm": [algorithms.MIFA],
    "aggregation": [Median, [Median]],
    "limits": [Limits],
    "storage": [Storage, ClientStore],
    "compute": [Compute],
    "policy": [RoundPolicy],
    "callbacks": [[Server]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CLASSES.items() for value in values])
def test_a_class_in_place_of_an_object_is_refused(name, value, tmp_path):
    """When the server is made, changed or loaded; the error says to call the class."""
    server = Server(SMALL, **{"algorithm": "FedAvg", "clients": N} | BASE)
    server.save(tmp_path / "saved")
    kind = value[0] if isinstance(value, list) else value
    for act in (
        lambda: Server(SMALL, **{"algorithm": "FedAvg", "clients": N} | BASE | {name: value}),
        lambda: Server.load(tmp_path / "saved", **{name: value}),
        *([lambda: server.change(**{name: value})] if name in Changes.__annotations__ else []),
    ):
        with pytest.raises(FedcoreError, match=rf"call it: {kind.__name__}\(\.\.\.\)"):
            act()


def test_the_class_of_a_placement_is_refused():
    with pytest.raises(RangeError, match="such as OnRay"):
        Compute(executor=LocalThreads)


TEXTS = {
    "folders": lambda text: Storage(folders=text),
    "callbacks": lambda text: Server(SMALL, clients=N, **BASE, callbacks=text),
    "clients": lambda text: Server(SMALL, clients=text, **BASE),
    "clients of groups": lambda text: Server(MODELS["groups"], clients=text, **BASE),
    "clients of an edge": lambda text: EdgeAggregator(SMALL, "FedAvg", text, lr=0.1),
    "ids": lambda text: Server(SMALL, clients=["a", "b"], **BASE).broadcast(text),
    "newcomers": lambda text: Server(SMALL, clients=N, **BASE).broadcast([], newcomers=text),
    "newcomers of a round": lambda text: Server(SMALL, clients=N, **BASE).open_round(newcomers=text),
    "expected": lambda text: Server(SMALL, clients=["a", "b"], **BASE).open_round(expected=text),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_no_sequence_of_its_letters(name):
    for text in ("ab", b"ab"):
        with pytest.raises(RangeError, match=r"'ab': must be a list"):
            TEXTS[name](text)


@pytest.mark.parametrize("value", [3, [3], b"w", None])
def test_patterns_are_texts(value):
    for make in (
        lambda: Limits(signed_buffers=value if value is not None else [None]),
        lambda: Server(Model(SMALL, personal=value), clients=N, **BASE),
        lambda: Server(Model(SMALL, frozen=value), clients=N, **BASE),
        lambda: Server(Model(SMALL, {"one": value}), clients=N, **BASE),
    ):
        with pytest.raises(RangeError, match="must be name patterns"):
            make()
