"""``Server.replace_x``: x changes between rounds; every other part of the state keeps its meaning."""

import logging

import numpy as np
import pytest
import torch

from fedcore import ClientStore, Compute, Limits, Model, RoundPolicy, Server, Storage, Update, algorithms, rules
from fedcore.algorithms import optimizers
from fedcore.errors import ArrayError, FedcoreError, RangeError, RoundError, StoreError
from fedcore.server.folder import go_back, last_change
from tests.server.invariant import contradictions
from tests.server.rounds import METHODS, N, everything, go_on, made, n

X0 = np.zeros(2, np.float32)


def another(size=n):
    return np.random.default_rng(7).normal(size=size).astype(np.float32)


def test_two_clients_by_hand():
    server = Server(X0, "FedAvg", 2, lr=0.1)
    server.round([Update(0, np.float32([2, 4]), 1, 10), Update(1, np.float32([4, 8]), 1, 30)])
    assert server.x.tolist() == [3.5, 7]
    assert server.replace_x(np.float32([1, -1])) is None
    assert (server.x.tolist(), server.round_number) == ([1, -1], 1)
    assert server.broadcast([0]).x.tolist() == [1, -1]
    updates = [Update(0, np.float32([2, 1]), 1, 10), Update(1, np.float32([4, 5]), 1, 30)]
    report = server.round(updates)
    assert server.x.tolist() == [3.5, 4]
    fresh = Server(np.float32([1, -1]), "FedAvg", 2, lr=0.1)
    own = fresh.round(updates)
    assert (fresh.x.tobytes(), own.norms.tolist()) == (server.x.tobytes(), report.norms.tolist())
    assert (report.replaced, own.replaced, server.round(updates).replaced) == (True, False, False)


def test_the_moments_of_an_optimizer_stay():
    """Momentum beta and rate eta: m' = beta m + h, x' = x - eta m'."""
    eta, beta = 0.5, 0.9
    server = Server(X0, "FedAvg", 2, lr=0.1, optimizer=optimizers.SGD(momentum=beta, eta=eta))
    x, m = X0.astype(np.float64), np.zeros(2)
    for t, ys in enumerate(([[2, 4], [4, 8]], [[1, 1], [3, 1]], [[0, 2], [2, 2]])):
        if t == 1:
            x = np.float64([1, -1])
            server.replace_x(x)
        m = beta * m + (x - np.mean(ys, axis=0))
        x = x - eta * m
        server.round([Update(i, np.float32(y), 1) for i, y in enumerate(ys)])
        np.testing.assert_allclose(server.x, x, rtol=1e-6)


@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sample(1)
def test_every_method_takes_a_model_or_names_the_choice(method, medium, tmp_path):
    """After a load the server is the same; rows, sums and moments are those from before."""
    storage = Storage(tmp_path / "s") if medium == "mmap" else Storage()
    with made(method, storage=storage) as server:
        go_on(server, 3)
        before, rest = server.x, everything(server)[1:3]
        if method == "FedAWE":  # its next model does not depend on x
            with pytest.raises(RangeError, match=rf"^replace_x\b.*{method}"):
                server.replace_x(another())
            assert server.x.tobytes() == before.tobytes()
            return
        v, total = server.v, server.total()
        server.replace_x(another())
        assert server.x.tobytes() == another().tobytes()
        assert (server.round_number, everything(server)[1:3]) == (3, rest)
        assert server.v.tobytes() == v.tobytes()
        assert total is None or server.total().tobytes() == total.tobytes()
        assert contradictions(server) == []
        server.save(tmp_path / "copy")
        copy = Server.load(tmp_path / "copy", algorithm=server.algorithm)
        for one in (server, copy):
            go_on(one, 3)
        assert everything(copy) == everything(server)


def test_clients_that_compute_the_momentum_from_models_are_named():
    server = Server(X0, algorithms.FedAvgM(placement="client"), 2, lr=0.1)
    with pytest.raises(RangeError, match=r"^replace_x\b.*placement='server'"):
        server.replace_x(X0)


@pytest.mark.parametrize("method", ["FedAvgMVR", "MBSTORM", "SCAFFOLDMVR"])
@pytest.mark.parametrize("first", ["never moved", "warm start", "moved"])
def test_the_previous_model_is_that_of_g(method, first):
    """g estimates the gradient at x_prev, which clients subtract there; without g, x_{-1} = x_0."""
    server = made(method)
    if first == "warm start":
        server.warm_start({i: another() for i in range(N)})
    if first == "moved":
        go_on(server, 2)
    was = server.broadcast([0]).x_prev.copy() if first == "moved" else server.x
    server.round([]) if first == "never moved" else None
    server.replace_x(another())
    due = another() if first == "never moved" else was
    assert server.broadcast([0]).x_prev.tobytes() == due.tobytes()


def test_a_method_that_looks_ahead_sends_the_model_ahead_of_the_new_one():
    server = Server(X0, algorithms.FedACG(lam=0.5), 2, lr=0.1)
    server.round([Update(0, np.float32([2, 4]), 1)])
    assert server.broadcast([0]).x.tolist() == [3, 6]  # x = 2, 4 and lam m = 1, 2
    server.replace_x(np.float32([10, 10]))
    assert (server.x.tolist(), server.broadcast([0]).x.tolist()) == ([10, 10], [11, 12])
    server.round([Update(0, np.float32([11, 14]), 1)])  # m' = lam m + (y - z) = 1, 4
    assert server.x.tolist() == [11, 14]


def test_a_model_ahead_of_the_new_one_must_fit_the_dtype():
    server = Server({"w": X0.astype(np.float16)}, algorithms.FedACG(lam=0.5), 2, lr=0.1)
    server.round([Update(0, X0 + 40_000, 1)])
    with pytest.raises(ArrayError, match="w"):
        server.replace_x(X0 + 60_000)  # 80,000 is beyond float16
    assert server.x.tolist() == [40_000, 40_000]


class Net(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.body, self.norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.fill_(value)
            self.norm.running_mean.fill_(value)
            self.norm.running_var.fill_(value + 10)
            self.norm.num_batches_tracked.fill_(value)


@pytest.mark.parametrize("form", ["module", "state dict", "numpy", "Model", "bytes", "flat", "float64"])
def test_the_forms_of_a_model(form, tmp_path):
    """Named tensors have counters; a flat vector has none, so they stay."""
    server, net = Server(Net(1), "FedAvg", 2, lr=0.1, storage=tmp_path / "s"), Net(5)
    flat = server.layout.flatten(net)
    forms = {"module": net, "state dict": net.state_dict(), "Model": Model(net), "bytes": flat.tobytes(), "flat": flat}
    forms |= {"numpy": {k: v.numpy() for k, v in net.state_dict().items()}, "float64": flat.astype(np.float64)}
    server.replace_x(forms[form])
    flat[:] = 0  # it was copied
    with torch.no_grad():
        net.body.weight.fill_(0)
    server.close()
    with Server.load(tmp_path / "s") as server:
        assert server.x[0] == 5
        tensors = server.tensors()
        assert tensors["norm.running_var"].tolist() == [15, 15]
        assert tensors["norm.num_batches_tracked"] == (1 if form in ("bytes", "flat", "float64") else 5)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (np.zeros(3, np.float32), FedcoreError),
        (np.zeros(8, np.int32), FedcoreError),
        ({"a": X0}, ArrayError),
        ({"a": X0, "b": np.zeros(3, np.float16)}, FedcoreError),
        ({"a": X0, "b": np.float32([1, np.nan])}, ArrayError),
        ({"a": X0, "b": np.float64([1, 1e300])}, ArrayError),
        ({"a": X0, "b": np.float32([1, 1e6])}, ArrayError),  # which clients would get as an infinity
        (np.float32([0, 0, np.inf, 0]), ArrayError),
        ("x", FedcoreError),
        (None, FedcoreError),
    ],
)
def test_another_model_is_an_error(model, error):
    server = Server({"a": X0, "b": np.ones(2, np.float16)}, "FedAvg", 2, lr=0.1)
    before = everything(server, [0, 1])
    with pytest.raises(error):
        server.replace_x(model)
    assert everything(server, [0, 1]) == before


def test_only_between_rounds():
    server = Server(X0, "FedAvg", 2, lr=0.1)
    with server.open_round() as round:
        with pytest.raises(RoundError):
            server.replace_x(X0 + 1)
        round.add(0, X0 + 2, steps=1)
    assert server.x.tolist() == [2, 2]
    server = Server(X0, "FedAvg", 2, lr=0.1, policy=RoundPolicy(buffer=2, max_staleness=2))
    server.open_buffer(newcomers=["new"])
    server.replace_x(X0 + 1)  # an open buffer without updates begins again
    server.push([Update("new", X0 + 3, 1, round=0)])
    with pytest.raises(RoundError):
        server.replace_x(X0)
    [report] = server.push([Update(1, X0 + 5, 1, round=0)])
    assert (report.replaced, server.x.tolist()) == (True, [4, 4])


@pytest.mark.parametrize("options", [{}, {"compute": Compute(shards=2)}, {"policy": RoundPolicy(buffer=1)}])
def test_a_callback_may_replace_x(options):
    def halve(report):
        server.replace_x(server.x * np.float32(0.5))

    server = Server(np.zeros(40_000, np.float32), "FedAvg", 2, lr=0.1, callbacks=[halve], **options)
    start = server.push if "policy" in options else server.round
    for _ in range(2):
        start([Update(0, server.x + np.float32(2), 1, round=server.round_number)])
    assert (server.x[0], server.round_number) == (1.5, 2)


def test_late_updates_are_measured_from_the_model_that_their_clients_had():
    server = Server(X0, "FedAvg", 2, lr=0.1, policy=RoundPolicy(max_staleness=2))
    server.broadcast([0, 1])
    server.round([Update(0, X0 + 1, 1)])
    server.replace_x(X0 + 10)
    server.broadcast([0])
    report = server.round([Update(0, X0 + 12, 1), Update(1, X0 + 4, 1, round=0)])  # + 2 and + 4
    assert (server.x.tolist(), report.ages.tolist()) == ([13, 13], [0, 1])
    server.broadcast([0])
    with pytest.raises(RoundError, match=r"^replace_x\b.*broadcast"):  # its update of this round could be of either
        server.replace_x(X0)
    server.round([])
    server.replace_x(X0)


def test_the_next_report_the_log_and_the_folder_name_it(tmp_path, caplog):
    with Server(X0, "MIFA", 2, lr=0.1, storage=Storage(tmp_path / "s", keep_previous=True)) as server:
        with caplog.at_level(logging.INFO, "fedcore.server"):
            server.replace_x(X0 + 1)
            server.replace_x(X0 + 2)
        assert len([record for record in caplog.records if "replace" in record.message]) == 1
        assert server.transactions == 2
    with ClientStore.open(tmp_path / "s", keep_previous=True) as rows:
        assert last_change(rows) == "a change of x"
        assert go_back(rows, 1)
    with Server.load(tmp_path / "s") as server:
        assert server.x.tolist() == [1, 1]
        report = server.round([])
        assert (report.replaced, report.changed) == (True, {"x": 1})
        assert not server.round([]).replaced


def test_the_audit_log_has_the_models():
    server = Server(X0, "FedAvg", 2, lr=0.1, storage=Storage(audit=True))
    server.round([Update(0, X0 + 1, 1)])
    server.replace_x(X0 + 5)
    server.round([Update(0, X0 + 1, 1)])
    first, change, second = server.audit_log()
    assert change["what"] == "a replacement of x"
    assert (change["x_before"], change["x_after"]) == (first["x_after"], second["x_before"])
    assert change["x_after"] == server.layout.digest(X0 + 5)


def test_a_replacement_that_fails_changes_nothing(tmp_path, monkeypatch):
    with Server(X0, "MIFA", 2, lr=0.1, storage=tmp_path / "s") as server:

        def full(*_, **__):
            raise StoreError("full")

        before = everything(server, [0, 1])
        with monkeypatch.context() as patch:
            patch.setattr(ClientStore, "commit", full)
            with pytest.raises(StoreError, match="full"):
                server.replace_x(X0 + 1)
        assert everything(server, [0, 1]) == before
        assert contradictions(server) == []


def test_updates_of_an_interrupted_round_do_not_count(tmp_path):
    server = Server(X0, "FedAvg", 2, lr=0.1, storage=Storage(tmp_path / "s", journal=True))
    server.open_round().add(0, X0 + 1, steps=1)
    server.close()
    with Server.load(tmp_path / "s") as server:
        server.replace_x(X0 + 5)
        with server.open_round() as round:
            round.add(1, X0 + 7, steps=1)
        assert (round.report.accepted, round.report.rejected[0][0], server.x.tolist()) == ((1,), 0, [7, 7])


def test_limits_on_buffers_follow_the_new_model():
    """A buffer that was never negative may be from now on, if the new model's is; no other buffer gets a limit."""

    def named(w, mean, var):
        return {"w": np.full(1, w), "a.running_mean": np.full(1, mean), "a.running_var": np.full(1, var)}

    server = Server(named(1.0, -1.0, 1.0), "FedAvg", 2, lr=0.1)
    server.replace_x(named(2.0, 1.0, 1.0))
    assert server.round([Update(0, named(2.0, -1.0, 1.0), 1)]).accepted == (0,)
    assert server.round([Update(0, named(2.0, 1.0, -1.0), 1)]).accepted == ()
    server.replace_x(named(2.0, 1.0, -1.0))
    assert server.round([Update(0, named(2.0, 1.0, -2.0), 1)]).accepted == (0,)


@pytest.mark.parametrize("method", ["FedAvg", "MIFA"])
def test_groups_are_servers_of_their_tensors(method, tmp_path):
    """A model may lack groups, as an update may; these stay."""

    def model(a, b):
        return {"a": np.full(2, a, np.float32), "b": np.full(3, b, np.float32), "bn.num_batches_tracked": np.int64(a)}

    server = Server(Model(model(0, 0), partial={"A": ("a", "bn*")}), method, 2, lr=0.1, storage=tmp_path / "s")
    alone = [Server({name: model(0, 0)[name]}, method, 2, lr=0.1) for name in "ab"]
    new = [model(3, 4), {"a": np.float32([5, 6]), "bn.num_batches_tracked": np.int64(9)}]
    for t, changed in enumerate(new):
        server.round([Update(i, model(i + t, t - i), 1) for i in (0, 1)])
        server.replace_x(changed)
        for one, name in zip(alone, "ab", strict=True):
            one.round([Update(i, {name: model(i + t, t - i)[name]}, 1) for i in (0, 1)])
            if name in changed:
                one.replace_x({name: changed[name]})
    assert server.tensors()["bn.num_batches_tracked"] == 9
    server.close()
    with Server.load(tmp_path / "s") as server:
        assert server.round([Update(i, model(11, 8), 1) for i in (0, 1)]).replaced
        assert server.tensors()["bn.num_batches_tracked"] == 11
        for one, name in zip(alone, "ab", strict=True):
            one.round([Update(i, {name: model(11, 8)[name]}, 1) for i in (0, 1)])
            assert server.tensors()[name].tobytes() == one.x.tobytes()
        with pytest.raises(ArrayError):
            server.replace_x({"a": X0 * np.nan, "bn.num_batches_tracked": np.int64(9)})


def test_a_private_server_keeps_its_ledger():
    private = rules.PrivateMean(clip=1.0, noise=1.0, expected=2.0, rounds=3)
    server = Server(X0, algorithms.FedAvg(weights="uniform"), 2, lr=0.1, aggregation=[private])
    server.round([Update(0, X0 + 1, 1)])
    spent = server.privacy
    server.replace_x(X0)
    assert server.privacy == spent


def test_limits_and_changes_stay():
    server = Server(X0, "FedAvg", 2, lr=0.1)
    server.change(limits=Limits(max_steps=5))
    server.replace_x(X0 + 1)
    assert server.round([]).changed == {"limits": {"max_steps": 5}, "x": 1}
