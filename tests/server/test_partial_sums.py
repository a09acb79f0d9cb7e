"""Partial sums: any tree has the bits of single updates, and invalid sums are rejected."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcore
from fedcore import Compute, Limits, Model, PartialSum, Server, Update, algorithms, errors
from fedcore.algorithms import REGISTRY
from fedcore.server.partial import COLUMNS, MAGIC, SPAN
from fedcore.server.report import MOST_OF_CLIENT
from tests.kit import flat

N, CLIENTS = 257, 12
METHODS = [name for name in REGISTRY if algorithms.named(name).only_sums_updates]
OTHERS = [name for name in REGISTRY if name not in METHODS]
AT_CLIENTS = algorithms.SCAFFOLD(placement="client")


GROUPS = {"one": ["u"], "two": ["v", "running_mean"]}  # and the rest, w


def server_of(name="FedAvg", buffers=True, partial=False, **options):
    x0 = {"w": np.linspace(-1, 1, N - 20).astype(np.float32), "b": np.zeros(20, np.float32)}
    if buffers:
        x0["running_mean"] = x0.pop("b")
    if partial:
        w = x0.pop("w")
        x0 = Model({"w": w[:100], "u": w[100:200], "v": w[200:], **x0}, GROUPS)
    algorithm = algorithms.named(name) if isinstance(name, str) else name
    clients = dict.fromkeys(range(CLIENTS), 10) if algorithm.needs_shares else CLIENTS
    options = dict(accumulator="exact", lr=0.1) | options
    return Server(x0, algorithm, clients, **flat(**options))


def updates(server, t):
    """Updates of many magnitudes; one is a gradient, which has no buffers, and one is rejected."""
    found = []
    for client in range(CLIENTS):
        rng = np.random.default_rng([t, client])
        h = (rng.normal(size=N) * 10.0 ** rng.uniform(-9, 0, N)).astype(np.float32)
        work = dict(steps=min(2 + client % 3, server.algorithm.most_steps or 9), examples=10 + 7 * client)
        if server.algorithm.sends_row_change:
            work["control"] = 2 * h[: server.layout.n_parameters]
        if client == 3 and not (server.layout.groups and t == 1):
            found.append(Update(client, value=h[: server.layout.n_parameters], kind="gradient", **work))
        else:
            y = np.full(N, np.nan, np.float32) if client == 5 else server.x - h
            found.append(Update(client, partial_of(server.layout, y, client, t), **work))
    return found


def partial_of(layout, y, client, t):
    """The tensors of some groups; in round 1, no client of ``updates`` sends the last group."""
    if not layout.groups:
        return y
    named, sets = dict(layout.unflatten(y).items()), [("one",), ("two",), ("one", "two"), ("one", "two", "rest")]
    return {
        name: named[name]
        for group in sets[3 if client % 5 == 1 and t != 1 else client % 3]
        for name in layout.groups[group]
    }


def state_of(server):
    reports, states = [server.last, *(server.last.groups or {}).values()], server._backend.states
    vectors = [
        v.tobytes() for s in states for v in (s.snapshot.x, s.snapshot.momentum, s.snapshot.total) if v is not None
    ]
    numbers = [(one.gamma, one.accepted, one.norms.tobytes(), one.diversity) for one in reports]
    return *vectors, *numbers, *((s.snapshot.gamma, s.snapshot.idle) for s in states)


def summed(server, sent):
    """The partial sum of an edge with the server's state."""
    with server.open_round() as round:
        round.add_batch(list(sent))
        return round.partial_sum()


def finish(server, round):
    server.last = round.finish()
    return state_of(server)


@pytest.mark.parametrize("trials", [5, pytest.param(60, marks=pytest.mark.endurance)])
@pytest.mark.parametrize(
    ("name", "partial"), [*((name, False) for name in (*METHODS, AT_CLIENTS)), *((name, True) for name in METHODS)]
)
def test_orders_and_trees_have_the_bits_of_one_server(name, partial, trials):
    rng, due = np.random.default_rng(1), set()
    for trial in range(trials):
        server, edge = server_of(name, partial=partial), server_of(name, partial=partial)
        for t in range(3):
            sent = [updates(server, t)[i] for i in rng.permutation(CLIENTS)]
            with server.open_round() as round:
                if trial == 0:
                    round.add_batch(sent)
                while trial and sent:
                    some, sent = sent[: (size := int(rng.integers(1, 7)))], sent[size:]
                    if rng.random() < 0.3:
                        round.add_batch(some)
                        continue
                    own = summed(edge, some)
                    if rng.random() < 0.5:  # and once more through another
                        with edge.open_round() as between:
                            between.add_partial_sum(own.to_bytes(), "below")
                            own = between.partial_sum()
                    round.add_partial_sum(own if rng.random() < 0.5 else own.to_bytes(), "edge")
                due.add(finish(server, round))
                assert not partial or server._backend.groups["rest"].snapshot.idle == min(t, 1)
                assert [client for client, _ in server.last.rejected] == [5]
            for of, own in zip(server._backend.states, edge._backend.states, strict=True):
                own.snapshot = own.snapshot._replace(ahead=of.snapshot.ahead)
            edge._backend.start_from(server.x, server.round_number)
    assert len(due) == 3


@pytest.mark.parametrize("has_groups", [False, True])
def test_a_message_is_read_back(has_groups):
    partial = summed(server_of(partial=has_groups), updates(server_of(partial=has_groups), 0))
    again = PartialSum.from_bytes(partial.to_bytes())
    assert again.to_bytes() == partial.to_bytes()
    assert again.clients == partial.clients == tuple(i for i in range(CLIENTS) if i != 5)
    assert [client for client, _ in again.rejected] == [5]
    assert fedcore.PartialSum is PartialSum
    assert repr(again) == "PartialSum(round=0, clients=11, rejected=1, n=257)"
    assert (again.group_squares is not None) == has_groups
    header = json.loads(partial.to_bytes()[len(MAGIC) + 8 :].partition(b"}")[0] + b"}")
    assert header.get("groups") == (3 if has_groups else None)


def spoilt(**changes):
    return lambda partial: replace(partial, **{k: f(getattr(partial, k).copy()) for k, f in changes.items()})


def with_entry(value, at=0):
    def change(array):
        array[at] = value
        return array

    return change


def tiny(squares):
    return squares * 2.0**-40


def as_long_as_nearly_all(high):
    """Each element is 100; w |h| of the first four of ``updates`` is 133 together."""
    return np.full_like(high, 100 << 10)


class AnyText(str):
    __eq__, __ne__, __hash__ = (lambda *_: True), (lambda *_: False), str.__hash__


BAD = {
    "another round": (lambda p: replace(p, round=1), "round"),
    "other settings": (lambda p: replace(p, made_under="0" * 64), "made_under"),
    "a short word": (lambda p: replace(p, high=p.high[1:]), "high"),
    "floats": (lambda p: replace(p, low=p.low.astype(float)), "low"),
    "a list": (lambda p: replace(p, steps=[1]), "steps"),
    "low past its form": (spoilt(low=with_entry(1 << 50)), "low"),
    "negative low": (spoilt(low=with_entry(-1)), "low"),
    "a long element": (spoilt(high=with_entry(1 << 40)), "high"),
    "the least integer": (spoilt(high=with_entry(-(1 << 63), 5)), "high"),
    "a long buffer": (spoilt(high=with_entry(1 << 62, -1)), "high of buffers"),
    "an unknown client": (lambda p: replace(p, clients=(99, *p.clients[1:])), "clients: "),
    "an endless id": (lambda p: replace(p, clients=("9" * 5000, *p.clients[1:])), "clients: "),
    "a client twice": (lambda p: replace(p, clients=(p.clients[1], *p.clients[1:])), "clients"),
    "no steps": (spoilt(steps=with_entry(0)), "steps"),
    "half a step": (spoilt(steps=with_entry(1.5)), "steps"),
    "NaN examples": (spoilt(examples=with_entry(np.nan)), "examples"),
    "no draws": (spoilt(counts=with_entry(0)), "counts"),
    "more draws than any": (spoilt(counts=with_entry(2**31 + 1)), "counts"),
    "another distance": (spoilt(eta_steps=with_entry(7)), "eta_steps"),
    "another weight": (spoilt(weights=with_entry(11)), "weights"),
    "a NaN weight": (spoilt(weights=with_entry(np.nan)), "weights"),
    "a norm of zero": (spoilt(squares=with_entry(0, slice(None))), "high"),
    "one unit everywhere": (spoilt(high=lambda high: high + 1, squares=tiny), "high"),
    "all elements as long as all": (spoilt(high=as_long_as_nearly_all), "high"),
    "buffers without a sender": (spoilt(has_buffers=np.zeros_like), "high of buffers"),
    "buffers past what sums take": (spoilt(high=with_entry(2**10 * 3002 * 2**39 // 1000, -1)), "high of buffers"),
    "an infinite norm": (spoilt(squares=with_entry(np.inf)), "squares"),
    "a negative norm": (spoilt(squares=with_entry(-1)), "squares"),
    "a norm past the grid": (spoilt(squares=with_entry(2.0**90)), "weights"),
    "an update of the first length that no sum takes in": (
        spoilt(weights=with_entry(1), squares=with_entry(2.0**78)),
        "weights",
    ),
    "buffers of a half": (spoilt(has_buffers=with_entry(0.5)), "has_buffers"),
    "no partial sum": (lambda _: 7, "partial"),
    "a masked column": (spoilt(squares=np.ma.array), "squares"),
    "no clients": (lambda p: replace(p, clients=None), "update"),
    "a number as rejections": (lambda p: replace(p, rejected=5), "update"),
    "rejections without a client": (lambda p: replace(p, rejected=((None, None),)), "client"),
    "changes of rows": (lambda p: replace(p, changes=p.sum), "changes"),
    "norms of groups": (lambda p: replace(p, group_squares=p.squares[np.newaxis]), "group_squares"),
    "another method's name": (lambda p: replace(p, made_under=AnyText("x")), "made_under"),
    "bytes backwards": (lambda p: memoryview(p.to_bytes())[::-1], "update"),
}


def without_rest(squares):
    """The norms of two groups, and of no third one."""
    return np.vstack([squares[:2], np.full_like(squares[2:], -1)])


def as_if_not_sent(partial):
    """The sum of all groups, and a message that names no sender for the last one."""
    squares = without_rest(partial.group_squares)
    return replace(partial, group_squares=squares, squares=sum(np.maximum(squares, 0)))


BAD_GROUPS = {
    "no norms of groups": (lambda p: replace(p, group_squares=None), "group_squares"),
    "norms of two groups": (spoilt(group_squares=lambda squares: squares[:2]), "group_squares"),
    "a NaN": (spoilt(group_squares=with_entry(np.nan)), "group_squares"),
    "an infinite part": (spoilt(group_squares=with_entry(np.inf)), "group_squares"),
    "a negative part": (spoilt(group_squares=with_entry(-0.5)), "group_squares"),
    "a client without a group": (spoilt(group_squares=lambda squares: 0 * squares - 1), "group_squares: the groups"),
    "a part too few": (spoilt(group_squares=without_rest), "squares"),
    "a sum of a group without senders": (as_if_not_sent, "high"),
    "a long element of a group": (spoilt(high=with_entry(1 << 40, 150)), "high"),
    "a long buffer of a group": (spoilt(high=with_entry(1 << 62, -1)), "high of buffers"),
    "another weight": (spoilt(weights=with_entry(11)), "weights"),
}


@pytest.mark.parametrize("what", [*BAD, *BAD_GROUPS])
def test_an_invalid_sum_is_rejected_and_the_round_continues(what):
    spoil, reason = (BAD | BAD_GROUPS)[what]
    server, straight, edge = (server_of(partial=what in BAD_GROUPS) for _ in range(3))
    sent = updates(server, 0)
    bad = spoil(summed(edge, sent[:4]))
    for one in (server, straight):
        with one.open_round() as round:
            round.add_batch(sent[6:])
            if one is server:
                round.add_partial_sum(bad, "edge-1")
            finish(one, round)
    assert state_of(server) == state_of(straight)
    ((sender, result),) = server.last.rejected
    assert sender == "edge-1"
    assert result.startswith(reason)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda sum: None, "changes: must be an ExactSum"),
        (lambda sum: tuple(sum), "changes: must be an ExactSum"),
        (lambda sum: sum._replace(high=sum.high[1:]), "changes: expected"),
        (lambda sum: sum._replace(low=sum.low | 1 << 50), "low"),
        (lambda sum: sum._replace(high=sum.high + (61 << 10)), "changes: the norm"),
    ],
)
def test_so_is_an_invalid_sum_of_changes(spoil, reason):
    """Four clients with changes up to 40 may add up to 160; every element of 61 is a norm of 938."""
    server, edge = (server_of(AT_CLIENTS, limits=Limits(max_norm=40.0)) for _ in range(2))
    partial = summed(edge, updates(server, 0)[:4])
    with server.open_round() as round:
        round.add_partial_sum(replace(partial, changes=spoil(partial.changes)), "edge")
        assert round.rejected[0][1].startswith(reason)
        round.add_partial_sum(partial, "edge")
    assert round.report.accepted == (0, 1, 2, 3)


def test_a_sum_without_updates_is_zero_and_lists_rejections():
    server, straight, sent = server_of(), server_of(), updates(server_of(), 0)
    empty, noise = summed(server_of(), [sent[5]]), np.random.default_rng(0)
    assert empty.clients == ()
    assert not empty.high.any()
    with straight.open_round() as round:
        round.add_batch([sent[0], sent[5]])
        due = finish(straight, round)
    with server.open_round() as round:
        round.add_batch([sent[0]])
        round.add_partial_sum(empty.to_bytes(), "edge")
        round.add_partial_sum(empty, "edge")
        for at in (0, N - 1):  # of the parameters, and of the buffers
            for words in ("high", "low"):
                round.add_partial_sum(spoilt(**{words: with_entry(1, at)})(empty), f"{words} {at}")
        for _ in range(100):
            round.add_partial_sum(replace(empty, high=noise.integers(-1, 1, N)), "noise")
        assert finish(server, round) == due
    assert [client for client, _ in server.last.rejected[:2]] == [5, 5]
    assert len(server.last.rejected) == 6 + MOST_OF_CLIENT
    assert all("its 0 updates allow at most 0" in reason for _, reason in server.last.rejected[2:])


UNIT = 2.0**-60


def exact(n, clients, **options):
    compute = Compute(accumulator="exact")
    return Server(np.zeros(n, np.float32), "FedAvg", clients, lr=0.1, compute=compute, **options)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_honest_sum_is_rejected_for_its_length(seed):
    """Lengths near the grid's unit, where rounding is as large as the values, with ties."""
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(1, 40)), int(rng.integers(1, 12))
    server, edge = (exact(n, k, limits=Limits(max_examples=1 << 30)) for _ in range(2))
    direction = rng.choice([-1, 1], n) if rng.random() < 0.5 else np.ones(n)
    with server.open_round() as round, edge.open_round() as own:
        for client in range(k):
            examples = int(2 ** rng.integers(0, 30))
            near = rng.choice([0.5, 1.5, 2.5, 0.4999, 0.5001, 1.4999, 1.5001, 1e5, 1e9], n if rng.random() < 0.5 else 1)
            h = direction * near * (UNIT / examples)
            own.add(client, -h.astype(np.float32), steps=1, examples=examples)
        partial = own.partial_sum()
        round.add_partial_sum(partial.to_bytes(), "edge")
        assert round.finish().rejected == ()


def test_a_sum_may_be_longer_by_its_rounding_only():
    """One and a half units round to two, which is the most that is allowed."""
    n, h = 100, np.float32(1.5 * UNIT)
    server, edge = (exact(n, 1) for _ in range(2))
    with edge.open_round() as own:
        own.add(0, np.full(n, -h), steps=1)
        partial = own.partial_sum()
    assert (partial.low == 2).all()
    for longer, result in ((replace(partial, low=partial.low + 1), 1), (partial, 0)):
        with server.open_round() as round:
            round.add_partial_sum(longer, "edge")
            assert len(round.rejected) == result
            round.abort()


def test_long_sums_are_measured_to_their_last_element():
    n = 2 * SPAN + 5
    server, edge = (exact(n, 1) for _ in range(2))
    for at in (0, SPAN - 1, SPAN, n - 1):
        with server.open_round() as round, edge.open_round() as own:
            own.add(0, np.zeros(n, np.float32), steps=1)
            partial = own.partial_sum()
            round.add_partial_sum(spoilt(low=with_entry(1, at))(partial), "edge")
            ((_, reason),) = round.rejected
            assert reason.startswith("high")
            round.abort()


def test_a_client_counts_once_a_round():
    server, sent = server_of(), updates(server_of(), 0)
    with server.open_round() as round:
        round.add_batch([sent[0]])
        round.add_partial_sum(summed(server_of(), sent[:2]), "edge")
        round.add_partial_sum(summed(server_of(), sent[1:3]), "edge")
        round.add_batch([sent[1]])
        report = round.finish()
    assert report.accepted == (0, 1, 2)
    assert [who for who, _ in report.rejected] == ["edge", 1]
    assert "clients" in report.rejected[0][1]
    assert "partial sum" in report.rejected[1][1]


def test_limits_apply_to_sums_of_edges():
    partial = summed(server_of(), updates(server_of(), 0))
    norm = np.sqrt(partial.squares).astype(np.float32).max()
    below = np.nextafter(norm, np.float32(0))
    for name, most, less in (
        ("max_norm", float(norm), float(below)),
        ("max_examples", 10 + 7 * (CLIENTS - 1), 9 + 7 * (CLIENTS - 1)),
        ("max_steps", 4, 3),
    ):
        for limit, refused in ((most, [5]), (less, ["edge"])):
            with server_of(**{name: limit}).open_round() as round:
                round.add_partial_sum(partial, "edge")
                assert [sender for sender, _ in round.finish().rejected] == refused


class Own(algorithms.FedAvg):
    """A custom method whose repr differs in each process."""

    def __init__(self, alpha=1):
        super().__init__()
        self.alpha = alpha

    def __repr__(self):
        return f"<Own at {id(self)}>"


class Other(Own):
    pass


@pytest.mark.parametrize(
    ("other", "module", "refused"),
    [(Own(1), __name__, []), (Own(1), "__main__", []), (Own(2), __name__, ["edge"]), (Other(1), __name__, ["edge"])],
)
def test_sums_of_a_custom_method_need_the_same_class_and_options(other, module, refused, monkeypatch):
    """An edge may define the class in ``__main__``, which the server imports from a module."""
    server = Server(np.zeros(3, np.float32), Own(1), 1, lr=0.1, compute=Compute(accumulator="exact"))
    with monkeypatch.context() as patch:
        patch.setattr(type(other), "__module__", module)
        edge = Server(np.zeros(3, np.float32), other, 1, lr=0.1, compute=Compute(accumulator="exact"))
        partial = summed(edge, [Update(0, np.ones(3, np.float32), steps=1)])
    with server.open_round() as round:
        round.add_partial_sum(partial, "edge")
        assert [sender for sender, _ in round.finish().rejected] == refused


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_random_bytes_are_rejected(noise, at, byte):
    good = bytearray(summed(server_of(), updates(server_of(), 0)[:2]).to_bytes())
    good[at] = byte
    for message in (noise, MAGIC + noise, bytes(good), bytes(good[: len(good) - 1 - at])):
        server = server_of()
        with server.open_round() as round:
            round.add_partial_sum(message, "edge")
            report = round.finish()
        assert np.isfinite(server.x).all()
        assert len(report.accepted) in (0, 2)


def test_forged_headers_are_rejected():
    good = summed(server_of(), updates(server_of(), 0)[:2]).to_bytes()
    start = len(MAGIC) + 8
    size = int.from_bytes(good[len(MAGIC) : start], "little")
    header, rest = json.loads(good[start : start + size]), good[start + size :]
    for change in (
        dict(n=1 << 60),
        dict(n=-1),
        dict(n=2.0),
        dict(clients=7),
        dict(clients=[[1]]),
        dict(clients=[1] * 1000),
        dict(refused=[7]),
        dict(refused=[["\ud800", "a lone surrogate"]]),
        dict(refused=[[-1, "no id"]]),
        dict(refused=[[10**100, "no id"]]),
        dict(round=True),
        dict(received=None),
    ):
        result = json.dumps(header | change).encode()
        with pytest.raises(errors.ArrayError, match=r"^partial\b"):
            PartialSum.from_bytes(MAGIC + len(result).to_bytes(8, "little") + result + rest)
    with pytest.raises(errors.ArrayError, match="NoneType"):
        PartialSum.from_bytes(None)
    with pytest.raises(errors.ArrayError):
        PartialSum.from_bytes(MAGIC + (1 << 62).to_bytes(8, "little") + rest)
    result = json.dumps(header | {"refused": [["a", "x" * 10**6]]}).encode()
    [(_, reason)] = PartialSum.from_bytes(MAGIC + len(result).to_bytes(8, "little") + result + rest).rejected
    assert len(reason) <= 500
    assert len(COLUMNS) == 7


@pytest.mark.parametrize("name", OTHERS)
def test_methods_that_do_more_than_add_h_raise(name):
    server = server_of(name)
    with server.open_round() as round, pytest.raises(errors.RangeError, match="partial sums"):
        round.partial_sum()
    server = server_of(name)
    with server.open_round() as round, pytest.raises(errors.RangeError, match="partial sums"):
        round.add_partial_sum(b"", "edge")


def test_other_sums_and_closed_rounds_raise():
    with server_of(accumulator="float64").open_round() as round, pytest.raises(errors.RangeError, match="exact"):
        round.partial_sum()
    server = server_of()
    with server.open_round() as round:
        round.partial_sum()
    assert not round.is_open
    assert server.round_number == 0
    with pytest.raises(errors.RoundError):
        round.add_partial_sum(b"", "edge")
