"""A hierarchy of one level has the bits of one server over several rounds, with norms and rejections."""

import numpy as np
import pytest

from fedcore import Compute, EdgeAggregator, Limits, Model, RoundPolicy, Server, Update, errors, rules
from fedcore.algorithms.rates import Exponential, InverseStep, rate_of_steps
from tests.rejections import rejected_arguments

N, CLIENTS, ROUNDS = 200, 9, 4
EXACT = Compute(accumulator="exact")
OWN = [(0, 5, 7), (1, 2), (3, 4, 6, 8)]


def update(x, t, client):
    rng = np.random.default_rng([t, client])
    y = x - (rng.normal(size=N) * 10.0 ** rng.uniform(-9, 0, N)).astype(np.float32)
    return Update(client, y * 1e30 if client == t else y, steps=3, examples=10 + client)


@pytest.mark.parametrize(
    ("name", "server_lr"), [("FedAvg", None), ("FedAvg", 0.5), ("FedProx", None), ("FedAvgM", None), ("FedAvgM", 0.5)]
)
def test_a_hierarchy_has_the_bits_of_one_server(name, server_lr):
    rates = dict(lr=0.1, server_lr=server_lr)
    options = rates | dict(limits=Limits(max_norm=1e6), compute=Compute(accumulator="exact"))
    server, straight = (Server(np.zeros(N, np.float32), name, CLIENTS, **options) for _ in range(2))
    edges = [EdgeAggregator(np.zeros(N, np.float32), name, own, limits=Limits(max_norm=1e6), **rates) for own in OWN]
    for t in range(ROUNDS):
        due = straight.round([update(straight.x, t, client) for client in range(CLIENTS)])
        with server.open_round() as round:
            for edge in edges[t % 3 :] + edges[: t % 3]:
                sent = [update(server.x, t, client) for client in edge.clients]
                round.add_partial_sum(edge.fold(server.x, sent, round=t).to_bytes(), f"edge of {edge.clients[0]}")
            report = round.finish()
        assert server.x.tobytes() == straight.x.tobytes()
        assert report.accepted == due.accepted
        assert report.norms.tobytes() == due.norms.tobytes()
        assert [client for client, _ in report.rejected] == [client for client, _ in due.rejected] == [t]
        assert (report.diversity, report.gamma, report.steps) == (due.diversity, due.gamma, due.steps)


def group_of(name):
    return "head" if name in ("w", "running_var") else "rest"


@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "FedExP"])
def test_so_has_a_hierarchy_of_partial_updates(name, sizes):
    """Also of servers of single groups; a group without updates has no round, and one client sends a NaN."""
    model = {"w": np.ones((9, 7), np.float32), "b": np.ones(30, np.float32), "seen": np.array([False])}
    model |= {"running_var": np.ones(4, np.float32), "running_mean": np.zeros(5, np.float32)}
    model |= {"batches": np.array(7)}
    clients = {client: 10 + client for client in range(CLIENTS)} if sizes else range(CLIENTS)
    options = dict(lr=Exponential(0.1, 0.5), limits=Limits(max_norm=1e6))
    options |= {} if name == "FedExP" else {"server_lr": Exponential(0.9, 0.8)}
    server, straight = (
        Server(Model(model, {"head": ["w", "running_var"]}), name, clients, compute=EXACT, **options) for _ in range(2)
    )
    plain = {
        group: Server({k: v for k, v in model.items() if group_of(k) == group}, name, clients, compute=EXACT, **options)
        for group in server.layout.groups
    }
    edges = [
        EdgeAggregator(
            Model(model, {"head": ["w", "running_var"]}), name, {i: 10 + i for i in own} if sizes else own, **options
        )
        for own in OWN
    ]
    for t in range(ROUNDS):
        sent = {}
        for client in range(CLIENTS):
            rng = np.random.default_rng([t, client])
            y = {k: v + np.float32(rng.normal(size=v.shape)) for k, v in model.items() if v.dtype == np.float32}
            y["running_var"] = np.abs(y["running_var"])
            y["w" if t == 1 else "b"][..., 0] *= np.float32(np.nan if client == t else 1)
            groups = {"head"} if t == 1 else [{"head"}, {"rest"}, {"head", "rest"}][(client + t) % 3]
            groups = groups | ({"rest"} if client == t != 1 else set())
            y |= {"seen": np.array([t != 3]), "batches": np.array(9 * client + t)}
            y = {k: v for k, v in y.items() if group_of(k) in groups}
            sent[client] = Update(client, y, steps=1 + client % 3, examples=10 + client)
        due = straight.round([sent[client] for client in range(CLIENTS)])
        with server.open_round() as round:
            round.add_batch([sent[client] for client in OWN[t % 3]])  # without an edge
            for edge in edges[t % 3 + 1 :] + edges[: t % 3]:
                own = edge.fold(server.broadcast([]).x, [sent[client] for client in edge.clients], round=t)
                assert round.add_partial_sum(own.to_bytes(), "edge", clients=edge.clients).status == "accepted"
        report = round.report
        assert server.x.tobytes() == straight.x.tobytes()
        for k in ("seen", "batches"):
            assert server.counters[k].tobytes() == straight.counters[k].tobytes()
        assert [client for client, _ in report.rejected] == [client for client, _ in due.rejected] == [t]
        assert report.norms.tobytes() == due.norms.tobytes()
        for group, one in plain.items():
            own = [
                sent[i]._replace(value={k: v for k, v in sent[i].value.items() if group_of(k) == group})
                for i in due.accepted
            ]
            own = [update for update in own if update.value]
            if own:
                one.change(lr=options["lr"](t))
                got, alone = report.groups[group], one.round(own)
                assert (got.accepted, got.gamma, got.diversity) == (alone.accepted, alone.gamma, alone.diversity)
                assert got.norms.tobytes() == alone.norms.tobytes()
                assert got.weights.tobytes() == alone.weights.tobytes()
            assert bool(own) == (t != 1 or group == "head")
            for k, tensor in one.tensors().items():
                assert server.tensors()[k].tobytes() == tensor.tobytes()
        assert server.counters["seen"] == (t != 3)  # also if it equals that of the edge's model


@pytest.mark.parametrize(("kind", "by_name"), [("model", True), ("delta", True), ("model", False)])
def test_tensors_by_name_and_counters_reach_an_edge(kind, by_name):
    """Also if it was made with other counters. One client's flag has a NaN, and another's counter is very large."""
    torch = pytest.importorskip("torch")
    model = {"w": torch.linspace(-1, 1, 60).to(torch.bfloat16), "batches": torch.tensor(2**60)}
    model |= {"low": torch.full((3,), torch.inf, dtype=torch.float64)}
    server, straight = (Server(model, clients=4, lr=0.1, compute=EXACT) for _ in range(2))
    edge = EdgeAggregator(model | {"batches": torch.tensor(10**9)}, "FedAvg", range(3), lr=0.1)
    for number in range(3):
        model |= {"w": model["w"] * 1.5, "low": torch.zeros(3, dtype=torch.float64)}
        x, start = server.tensors() if by_name else server.x, number if kind == "delta" else 2**60 + number
        sent = [Update(i, model | {"batches": torch.tensor(start + 20 + i * 2**49)}, 1, kind=kind) for i in range(4)]
        sent[1].value["low"] = torch.tensor([0.0, torch.nan, 0.0], dtype=torch.float64)
        due = straight.round(sent)
        with server.open_round() as round:
            round.add_partial_sum(edge.fold(x, sent[:3], round=number).to_bytes(), "edge")
            round.add_batch(sent[3:])
        assert server.x.tobytes() == straight.x.tobytes()
        assert str(server.counters) == str(straight.counters)
        assert round.report.rejected == due.rejected
        assert [client for client, _ in due.rejected] == [1] * (kind == "model")
    assert server.counters["batches"] > 2**60
    assert (server.counters["low"] == 0).all() == (kind == "model")


def test_a_counter_of_one_client_does_not_cost_an_edge_its_sum():
    model = {"w": np.zeros(3, np.float32), "epoch": np.array(-1)}
    server, edge = Server(model, clients=3, lr=0.1, compute=EXACT), EdgeAggregator(model, "FedAvg", range(3), lr=0.1)
    for counts, after in (((-1, -1, -1), -1), ((2**62, 3, 5), 5)):
        sent = [Update(i, model | {"epoch": np.array(count)}, 1) for i, count in enumerate(counts)]
        with server.open_round() as round:
            assert round.add_partial_sum(edge.fold(server.x, sent, round=server.round_number), "edge")
        assert server.counters["epoch"] == after


@pytest.mark.parametrize(("lr", "rejected"), [(0.01, []), (0.5, []), (0.5000001, [("edge", "eta_steps")])])
def test_the_upper_server_limits_client_rates(lr, rejected):
    exact, zeros = Compute(accumulator="exact"), np.zeros(N, np.float32)
    server = Server(zeros, "FedAvg", 2, lr=0.1, limits=Limits(max_client_lr=0.5), compute=exact)
    edge = EdgeAggregator(zeros, "FedAvg", [0, 1], lr=0.1, limits=Limits(max_client_lr=1.0))
    partial = edge.fold(server.x, [update(server.x, 5, 0)._replace(lr=lr)], round=0)
    with server.open_round() as round:
        round.add_partial_sum(partial, "edge")
        assert rejected_arguments(round.finish()) == rejected


@pytest.mark.parametrize(
    ("lr", "most", "reported"),
    [
        (0.1, 0.05, None),
        (0.1, 0.05, 0.02),
        (0.1, 0.05, 0.1),
        (InverseStep(1.0, 9.0, 5), None, None),
        (InverseStep(1.0, 9.0, 5), None, "mean"),
    ],
)
def test_an_edge_accepts_the_rates_that_the_server_accepts(lr, most, reported):
    x0, limits = np.zeros(3, np.float32), Limits(max_client_lr=most)
    mean = np.mean([rate_of_steps(lr, 0)(k) for k in range(2)]) if reported == "mean" else reported
    for server_lr in (None, 0.5):
        sent = [Update(0, x0 + 1, 2, 7, lr=mean), Update(1, x0 + 2, 2, 5)]
        direct, upper = (
            Server(x0, "FedAvg", 2, lr=lr, server_lr=server_lr, compute=EXACT, limits=limits) for _ in range(2)
        )
        edge = EdgeAggregator(x0, "FedAvg", range(2), lr=lr, server_lr=server_lr, limits=limits)
        due = direct.round(sent)
        with upper.open_round() as round:
            round.add_partial_sum(edge.fold(upper.x, sent, round=0), "edge")
        assert (round.report.accepted, round.report.rejected) == (due.accepted, ()) == ((0, 1), ())
        assert upper.x.tobytes() == direct.x.tobytes()


def test_an_edge_takes_no_step():
    x0, sent = np.zeros(N, np.float32), np.ones(N, np.float32)
    edge, fresh = (EdgeAggregator(x0, "FedAvg", [0, 1], lr=0.1) for _ in range(2))
    with pytest.raises(errors.RoundError, match=r"^round\b.*partial_sum\(\)"), edge.open_round(x0, round=0) as round:
        round.add(0, sent, steps=1, examples=11)  # and the sum is never asked for
    assert not round.is_open
    assert round.report is None
    partials = [one.fold(sent, [update(sent, 5, 1)], round=1).to_bytes() for one in (edge, fresh)]
    assert partials[0] == partials[1]


@pytest.mark.parametrize("partial", [{}, {"one": "a"}], ids=["whole", "partial"])
@pytest.mark.parametrize(("population", "refused"), [(5_000, "7"), (0, "edge")])
def test_an_edge_with_the_population_rejects_updates_too_long_for_the_sum(population, refused, partial):
    model = Model({name: np.zeros(N // 2, np.float32) for name in "ab"}, partial)
    server, straight = (Server(model, "FedAvg", 5_000, lr=0.1, compute=Compute(accumulator="exact")) for _ in "ab")
    edge = EdgeAggregator(model, "FedAvg", [5, 7], lr=0.1, population=population)
    long = np.zeros(N, np.float32)
    long[0] = 2.0**50 / 4_000  # more than 2^50 / 5,000, less than an edge of two would take
    sent = [update(server.x, 0, 5), Update(7, long, steps=1, examples=1)]
    if partial:  # each group may be as long as a whole update
        ends = np.zeros(N, np.float32)
        ends[[0, -1]] = 2.0**50 / 5_500
        sent[0] = Update(5, ends, steps=1, examples=1)
    due = straight.round(sent)
    with server.open_round() as round:
        round.add_partial_sum(edge.fold(server.x, sent, round=0), "edge")
        report = round.finish()
    assert [str(who) for who, _ in due.rejected] == ["7"]
    assert [str(who) for who, _ in report.rejected] == [refused]
    assert (server.x.tobytes() == straight.x.tobytes()) == bool(population)


def test_arguments_of_the_upper_server_are_rejected():
    x0 = np.zeros(N, np.float32)
    for name in ("storage", "compute", "policy", "optimizer", "callbacks"):
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            EdgeAggregator(x0, "FedAvg", [0], lr=0.1, **{name: None})
    with pytest.raises(errors.RangeError, match=r"MIFA.*partial sums"):
        EdgeAggregator(x0, "MIFA", [0], lr=0.1)
    edge = EdgeAggregator(x0, "FedAvg", [0], lr=0.1)
    with pytest.raises(errors.ArrayError, match=r"^x\b"):
        edge.open_round(np.full(N, np.nan, np.float32), round=0)
    for number in (-1, 2**53 + 1, 0.5):
        with pytest.raises(errors.RangeError, match=r"^round\b"):
            edge.open_round(x0, round=number)
    assert edge.fold(x0, [], round=2**53).round == 2**53
    with edge.open_round(x0, round=0) as round:
        with pytest.raises(errors.RoundError):
            edge.open_round(x0, round=0)
        round.partial_sum()
    assert not round.is_open


def lying_edge(server, clients=range(4)):
    """The sum of an edge for these clients, although none of them sent an update."""
    edge = EdgeAggregator(np.zeros(N, np.float32), "FedAvg", range(4), lr=0.1)
    return edge.fold(server.x, [update(server.x, 9, client) for client in clients], round=server.round_number)


def small_server():
    return Server(np.zeros(N, np.float32), "FedAvg", CLIENTS, lr=0.1, compute=Compute(accumulator="exact"))


@pytest.mark.parametrize("way", ["add", "add_batch", "round of the edge above"])
def test_a_dishonest_edge_does_not_end_the_round(way):
    server = small_server()
    middle = EdgeAggregator(np.zeros(N, np.float32), "FedAvg", range(CLIENTS), lr=0.1)
    honest = [update(server.x, 9, client) for client in (3, 5)]
    own = middle.open_round(server.x, round=0) if way.startswith("round") else server.open_round()
    with own as round:
        round.add_partial_sum(lying_edge(server), "edge")
        if way == "add_batch":
            round.add_batch(honest)
        else:
            for one in honest:
                round.add_batch([one])
        if way.startswith("round"):
            partial = round.partial_sum()
            assert (partial.clients, [who for who, _ in partial.rejected]) == ((0, 1, 2, 3, 5), [3])
            return
    assert (round.report.accepted, [who for who, _ in round.report.rejected]) == ((0, 1, 2, 3, 5), [3])
    assert "partial sum" in round.report.rejected[0][1]


def test_an_edge_sends_only_for_its_own_clients():
    server, straight = small_server(), small_server()
    due = straight.round([update(straight.x, 9, client) for client in (3, 0, 1)])
    refusing = EdgeAggregator(np.zeros(N, np.float32), "FedAvg", range(4), lr=0.1)
    with refusing.open_round(server.x, round=0) as own:
        own.reject(3, "it lies")
        slander = own.partial_sum()
    with server.open_round() as round:
        for partial in (lying_edge(server), lying_edge(server, [0, 3]), slander, lying_edge(server).to_bytes()):
            round.add_partial_sum(partial, "edge", clients=range(2))
        round.add_batch([update(server.x, 9, 3)])
        round.add_partial_sum(lying_edge(server, [0, 1]), "edge", clients=[0, 1])
        with pytest.raises(errors.UnknownClientError):
            round.add_partial_sum(lying_edge(server, [2]), "edge", clients=["unknown"])
        report = round.finish()
    assert set(report.accepted) == set(due.accepted)
    assert server.x.tobytes() == straight.x.tobytes()
    assert [who for who, _ in report.rejected] == ["edge"] * 4
    assert all(reason.startswith("clients") for _, reason in report.rejected)


def both_ways(x0, sent, name, clients, edge_clients, **options):
    """A server that gets the updates, and one that gets the sum of an edge: their models and reports."""
    direct, upper = (Server(x0, name, clients, lr=0.1, compute=EXACT, **options) for _ in range(2))
    edge = EdgeAggregator(x0, name, edge_clients, lr=0.1, **options)
    with upper.open_round() as round:
        round.add_partial_sum(edge.fold(upper.broadcast(edge.clients).x, sent, round=0).to_bytes(), "edge")
    due = direct.round(sent)
    return (direct.x, due), (upper.x, round.report)


@pytest.mark.parametrize("examples", [(None, None), (5, None), (5, 7), (1000, None)])
@pytest.mark.parametrize("has_sizes", [True, False])
@pytest.mark.parametrize("name", ["FedAvg", "LocalDescent", "FedExP"])
def test_examples_and_sizes_count_at_an_edge_as_they_do_directly(name, has_sizes, examples):
    sizes = {0: 10, 1: 90}
    clients = sizes if has_sizes else range(2)
    x0 = np.zeros(3, np.float32)
    sent = [Update(client, x0 + 1 + client, 2, examples[client]) for client in sizes]
    (x, due), (found, report) = both_ways(x0, sent, name, clients, clients)
    assert (report.accepted, report.rejected) == (due.accepted, due.rejected)
    assert report.weights.tolist() == due.weights.tolist()
    assert found.tobytes() == x.tobytes()


@pytest.mark.parametrize(
    ("sizes", "at_edge", "examples", "rejected"),
    [
        ({0: 10, 1: 90}, range(2), None, ["weights"]),
        ({0: 10, 1: 90}, range(2), 1000, ["weights"]),
        ({0: 10, 1: 90}, {0: 10, 1: 91}, None, ["weights"]),
        ({0: 10, 1: 90}, {0: 10, 1: 91}, 5, []),
        (range(2), {0: 10, 1: 90}, None, ["weights"]),
        (range(2), {0: 10, 1: 90}, 5, []),
    ],
)
def test_weights_of_other_sizes_are_rejected(sizes, at_edge, examples, rejected):
    x0 = np.zeros(3, np.float32)
    sent = [Update(client, x0 + 1 + client, 2, examples) for client in range(2)]
    _, (_, report) = both_ways(x0, sent, "FedAvg", sizes, at_edge)
    assert rejected_arguments(report) == [("edge", name) for name in rejected]


def test_an_edge_without_updates_does_not_count_as_one_with_examples():
    server, x0 = Server(np.zeros(3, np.float32), "FedAvg", 3, lr=0.1, compute=EXACT), np.zeros(3, np.float32)
    edge = EdgeAggregator(x0, "FedAvg", [1, 2], lr=0.1)
    with server.open_round() as round:
        round.add(0, x0 + 1, steps=1)
        round.add_partial_sum(edge.fold(x0, [], round=0), "edge")
    assert (round.report.accepted, round.report.rejected) == ((0,), ())


@pytest.mark.parametrize("rule", [rules.RejectLong(10), rules.ClipToMedian(), rules.CapExamples(3)])
def test_rules_at_an_edge_remember_earlier_rounds(rule):
    x0 = np.zeros(4, np.float32)
    direct, upper = (Server(x0, "FedAvg", 3, lr=0.1, compute=EXACT, aggregation=[rule]) for _ in range(2))
    edge = EdgeAggregator(x0, "FedAvg", range(3), lr=0.1, aggregation=[rule])
    for t in range(14):
        far = 1 + 1000 * (t >= 12)
        sent = [Update(client, upper.x + far, 1, 10 * far) for client in ([0, 1, 2] if t == 13 else [t % 3])]
        due = direct.round(sent)
        with edge.open_round(upper.x, round=t) as aborted:
            aborted.add_batch([one._replace(value=upper.x + 1000, examples=10_000) for one in sent])
            (aborted.partial_sum if t % 3 else aborted.abort)()  # the upper server drops both
        with upper.open_round() as round:
            round.add_partial_sum(edge.fold(upper.x, sent, round=t).to_bytes(), "edge")
        report = round.report
        assert (report.accepted, report.rejected) == (due.accepted, due.rejected)
        assert upper.x.tobytes() == direct.x.tobytes()


def test_an_edge_forgets_norms_as_the_server_does():
    options = {"clients": range(9), "lr": 0.1, "aggregation": [rules.RejectLong(2)]}
    direct, upper = (Server(np.zeros(1, np.float32), compute=EXACT, **options) for _ in range(2))
    edge = EdgeAggregator(upper.x, "FedAvg", **options)
    for t, norms in enumerate([[1, 1, 3, 1, 1, 9, 9], [3, 3], [1, 3, 3], [1, 3, 1]]):
        sent = [Update(i, upper.x + np.float32(norm), 1) for i, norm in enumerate(norms)]
        with upper.open_round() as round:
            round.add_partial_sum(edge.fold(upper.x, sent, round=t), "edge")
        assert round.report.rejected == direct.round(sent).rejected


def test_an_edge_refuses_weights_at_once():
    x0 = np.zeros(3, np.float32)
    edge = EdgeAggregator(x0, "FedAvg", range(2), lr=0.1)
    with edge.open_round(x0, round=0) as round:
        for add in (lambda: round.add(0, x0, steps=1, weight=2.0), lambda: round.begin(0, steps=1, weight=2.0)):
            with pytest.raises(errors.RangeError, match=r"^weight"):
                add()
        round.partial_sum()


def test_a_partial_sum_has_no_late_updates():
    x0 = np.zeros(3, np.float32)
    relay = Server(x0, "FedAvg", 2, lr=0.1, compute=EXACT, policy=RoundPolicy(max_staleness=1))
    relay.round([Update(0, x0 + 1, 1)])
    with relay.open_round() as round:
        round.add(1, x0 + 1, steps=1, round=0)
        with pytest.raises(errors.RangeError, match=r"^round"):
            round.partial_sum()
    assert round.report.accepted == (1,)


@pytest.mark.parametrize(
    ("algorithm", "model", "options", "named"),
    [
        ("FedAvg", None, dict(limits=Limits(signed_buffers=("running_var",))), "signed_buffers"),
        ("FedAvg", {"w": np.zeros(3, np.float32), "running_var": np.zeros(2, np.float32)}, {}, "signed_buffers"),
        ("FedAvg", None, dict(server_lr=1.0), "server_lr"),
        ("FedProx", None, {}, "method"),
        ("FedACG", None, {}, "Broadcast.x"),
    ],
)
@pytest.mark.parametrize("partial", [{}, {"one": "*"}], ids=["whole", "partial"])
def test_the_reason_names_what_differs(algorithm, model, options, named, partial):
    x0 = {"w": np.zeros(3, np.float32), "running_var": np.ones(2, np.float32)}
    upper = Server(Model(x0, partial), "FedACG" if algorithm == "FedACG" else "FedAvg", 2, lr=0.1, compute=EXACT)
    upper.round([Update(0, upper.x + 1, 1)])
    edge = EdgeAggregator(Model(model or x0, partial), algorithm, range(2), lr=0.1, **options)
    with upper.open_round() as round:
        round.add_partial_sum(edge.fold(upper.x, [Update(1, upper.x, 1)], round=1), "edge")
    [(_, reason)] = round.report.rejected
    names = "signed_buffers", "server_lr", "method", "layout", "Broadcast.x"
    assert [name for name in names if name in reason] == [named]
