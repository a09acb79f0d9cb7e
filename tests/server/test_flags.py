"""Flags: small constants that training sets, such as a bool that is True after the first batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcore import (
    Compute,
    EdgeAggregator,
    Model,
    Network,
    RoundPolicy,
    Safetensors,
    Server,
    Storage,
    Update,
    write_model,
)
from fedcore.model.files import open_model
from fedcore.rules import PrivateMean

N = 40_000  # enough for two shards


def state(flag=False, value=0.0, **more):
    return {"w": np.full(N, value, np.float32), "initted": np.array(flag), **more}


def server(model=None, clients=3, **more):
    return Server(state() if model is None else model, clients=clients, lr=0.1, **more)


WAYS = {"plain": {}, "shards": {"compute": Compute(shards=2)}, "median": {"aggregation": "median"}}


def flag_after(made, flags, **more):
    with made.open_round() as round:
        for client, flag in enumerate(flags):
            round.add(client, state(flag), steps=1, round=made.round_number, **more)
    assert round.report.accepted == tuple(range(len(flags)))
    return bool(made.tensors()["initted"])


@pytest.mark.parametrize("way", ["plain", "shards", "median"])
@pytest.mark.parametrize(
    ("flags", "after"), [([1, 1, 1], 1), ([1, 1, 0], 1), ([1, 0, 0], 0), ([1, 0], 0), ([1, 1], 1), ([1], 1)]
)
def test_a_flag_becomes_what_more_than_half_sent(way, flags, after):
    if way != "median" or len(flags) == 3:
        assert flag_after(server(**WAYS[way]), [bool(flag) for flag in flags]) == after


def test_a_flag_takes_no_nan_and_no_sign_of_zero(caplog):
    def low(value):
        return {"w": np.zeros(N, np.float32), "min_val": np.float32(value).reshape(())}

    made = server(low(np.inf))
    assert "min_val: has a NaN" in made.round([Update(0, low(np.nan), 1)]).rejected[0][1]
    made.round([Update(0, low(1), 1), Update(1, low(2), 1)])
    assert made.tensors()["min_val"] == np.inf
    assert "min_val: keeps its value" in caplog.text
    made.round([Update(0, low(0.0), 1), Update(1, low(-0.0), 1)])
    assert made.tensors()["min_val"] == 0


def test_a_flag_in_a_buffer_and_in_a_group():
    made = server(policy=RoundPolicy(buffer=3))
    for client in range(3):
        made.push([Update(client, state(True), 1, round=0)])
    assert made.tensors()["initted"]
    net = Model({"w": np.zeros(2), "v": np.zeros(2), "v.initted": np.array(False)}, partial={"v": "v*"})
    made = server(net)
    made.round([Update(client, {"v": np.ones(2), "v.initted": np.array(True)}, 1) for client in range(2)])
    assert made.tensors()["v.initted"]
    assert made.round([Update(2, {"w": np.ones(2)}, 1)]).accepted == (2,)
    assert made.tensors()["v.initted"]


def test_a_flag_in_a_network():
    nodes = Network([state()] * 3, np.full((3, 3), 1 / 3), lr=0.1)
    for sent, after in ((2, True), (1, False)):
        with nodes.open_round() as round:
            for node in range(3):
                round.add(node, state(node < sent), steps=1)
        assert bool(nodes.tensors(0)["initted"]) == after


def test_a_flag_survives_a_load_and_the_journal(tmp_path):
    storage = Storage(path=tmp_path / "a", journal=True)
    made = server(storage=storage)
    opened = made.open_round()
    for client in range(2):
        opened.add(client, state(True), steps=1)
    del opened
    made.close()
    with Server.load(tmp_path / "a") as made:
        with made.open_round() as round:
            pass
        assert round.report.accepted == (0, 1)
    with Server.load(tmp_path / "a") as made:
        assert made.tensors()["initted"]


def test_an_edge_sends_the_flags_of_its_clients():
    """In two rounds, also if the edge was made with another flag, through a relay, and beside a direct update."""
    made = server(clients=6, compute=Compute(accumulator="exact"))
    edge, relay = (EdgeAggregator(state(), "FedAvg", range(5), lr=0.1) for _ in range(2))
    for flags, after in (([1, 1, 1, 1, 0, 0], 1), ([0, 0, 0, 0, 1, 1], 0), ([0, 0, 0, 1, 1, 1], 0)):
        x, number = made.broadcast(range(6)).x, made.round_number
        sent = [Update(i, state(bool(flag), number), 1) for i, flag in enumerate(flags)]
        below = edge.fold(x, [*sent[:4], sent[4]._replace(value=np.ones(N), kind="gradient")], round=number)
        with relay.open_round(x, round=number) as between:
            between.add_partial_sum(below.to_bytes(), "edge")
            partial = between.partial_sum()
        with made.open_round() as round:
            round.add_partial_sum(partial.to_bytes(), "relay")
            round.add_batch([sent[5]])
        assert round.report.accepted == tuple(range(6))
        assert made.tensors()["initted"] == after


WRONG_FLAGS = {
    "another tensor": (0, "w", b"\1"),
    "too long": (0, "initted", b"\1\1"),
    "no bool": (0, "initted", b"\2"),
    "no client": (3, "initted", b"\1"),
    "a negative client": (-1, "initted", b"\1"),
    "a list": (0, ["initted"], b"\1"),
    "a client as text": ("0", "initted", b"\1"),
}


@pytest.mark.parametrize("wrong", WRONG_FLAGS)
def test_a_wrong_flag_of_an_edge_is_rejected(wrong):
    made = server(compute=Compute(accumulator="exact"))
    partial = EdgeAggregator(state(), "FedAvg", range(3), lr=0.1).fold(made.x, [Update(1, state(), 1)], round=0)
    partial = replace(partial, counters=(WRONG_FLAGS[wrong],))
    for sent in (partial, partial.to_bytes()):
        with made.open_round() as round:
            reply = round.add_partial_sum(sent, "edge")
            assert "counters" in reply.reason or "list" in reply.reason
            assert round.rejected == (("edge", reply.reason),)
            round.abort()


def test_a_vector_and_a_difference_do_not_change_a_flag():
    made = server()
    assert not flag_after(made, [True] * 3, kind="delta")
    made.round([Update(0, state(True), 1), *(Update(client, np.zeros(N, np.float32), 1) for client in (1, 2))])
    assert not made.tensors()["initted"]


def test_private_updates_do_not_change_a_flag():
    assert not flag_after(server(aggregation=PrivateMean(2.0, 0.5, 3, seed=3)), [True] * 3)


def test_what_a_module_with_observers_gives_its_server_takes_back():
    """Fake quantisation: its flags, zero points and extrema change with the first batch, and differ by client."""

    def made(batch=None):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.ao.quantization.MinMaxObserver())
        net.append(torch.ao.quantization.FakeQuantize())
        if batch is not None:
            net(batch)
        return net

    one = Server(made(), clients=2, lr=0.1)
    for _ in range(2):
        report = one.round([Update(client, made(torch.randn(8, 4)), 1) for client in range(2)])
        assert report.accepted == (0, 1)
        one.load_into(made())
    same = torch.randn(8, 4)
    torch.manual_seed(0)
    nets = [made(), made()]
    nets[1].load_state_dict(nets[0].state_dict())
    one.round([Update(client, (net(same), net)[1], 1) for client, net in enumerate(nets)])
    assert torch.isfinite(one.tensors()["1.min_val"])


def test_packed_integers_and_large_masks_must_not_change():
    packed, mask = np.uint8([3, 200]), np.zeros((65, 64), bool)
    made = server(state(packed=packed, mask=mask))
    report = made.round(
        [Update(0, state(packed=packed, mask=~mask), 1), Update(1, state(packed=~packed, mask=mask), 1)]
    )
    for (_, reason), name in zip(report.rejected, ("mask", "packed"), strict=True):
        assert reason.startswith(name)
        assert "personal" in reason


FORMS = ["mapping", "array", "file", "torch file", "pieces", "groups", "array in groups", "shards"]


@pytest.mark.parametrize("form", FORMS)
def test_the_log_names_float64_tensors_that_are_rounded_once(form, caplog, tmp_path):
    exact, count = np.zeros(20_000), np.full(20_000, 16_777_217.0)
    made = Server(
        exact if form == "array" else Model({"a": exact, "b": exact}, {"first": "a"} if "groups" in form else {}),
        clients=1,
        lr=0.1,
        compute=Compute(shards=2 if form == "shards" else None),
    )
    for number, value in enumerate((exact + 1, count, count)):
        model = {"a": exact, "b": value}
        if form == "array":
            model = value
        elif form == "array in groups":
            model = np.concatenate([exact, value])
        elif form == "file":
            write_model(model, tmp_path / f"{number}.safetensors")
            model = Safetensors(tmp_path / f"{number}.safetensors")
        elif form == "torch file":
            write_model({name: torch.tensor(x) for name, x in model.items()}, tmp_path / f"{number}.pt")
            model = open_model(tmp_path / f"{number}.pt")
        with made.open_round() as opened:
            if form == "pieces":
                incoming = opened.begin(0, steps=1)
                for name, x in model.items():
                    incoming.write(name, x[:1])
                    incoming.write(name, x[1:], start=1)
                incoming.done()
            else:
                opened.add(0, model, steps=1)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("x: " if form == "array" else "b: ")
    assert "float32" in line
    made.close()
