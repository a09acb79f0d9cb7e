"""Methods whose clients keep their rows, over masked sums: the trajectories of servers with rows, and of the papers."""

import numpy as np
import pytest

pytest.importorskip("cryptography")

from fedcore import Compute, Limits, Server, Update
from fedcore.algorithms import SCAFFOLD, SCAFFOLDM, SCAFFOLDMVR, MimiC
from fedcore.errors import ArrayError, RangeError
from fedcore.secure import Encoding, SecureServer
from tests.secure.sessions import Session

N, COUNT, ROUNDS, ETA = 10, 4, 50, 0.125
RNG = np.random.default_rng(5)
TARGETS, CURVATURES = RNG.normal(size=(COUNT, N)), RNG.uniform(0.5, 1.5, (COUNT, N))
X0 = np.ones(N, np.float32)
LIMITS = Limits(max_norm=100.0, max_examples=1, max_steps=4)


def rounds():
    """Yield (clients that train with their K, clients whose masked words arrive) of each round."""
    rng = np.random.default_rng(8)
    for _ in range(ROUNDS):
        chosen = sorted(rng.permutation(COUNT)[: rng.integers(2, COUNT + 1)].tolist())
        late = chosen[: rng.integers(0, len(chosen) - 1)]  # they train, and then drop out
        yield {i: int(rng.integers(1, 4)) for i in chosen}, [i for i in chosen if i not in late]


def steps(i, k, x, direction, offset, before):
    """Return y after k full gradient steps, and the mean of the gradients at the y's."""
    y, raw = x.astype(np.float64), np.zeros(N)
    for _ in range(k):
        gradient = CURVATURES[i] * (y - TARGETS[i])
        raw += gradient / k
        y = y - ETA * (direction.a * gradient + direction.b * CURVATURES[i] * (before - TARGETS[i]) + offset)
    return y, raw


def transcribed(method):
    """The papers' algorithms in float64."""
    rows, g, xs, d, is_mimic = np.zeros((COUNT, N)), np.zeros(N), [], method.direction, isinstance(method, MimiC)
    x = before = X0.astype(np.float64)
    for trained, arrived in rounds():
        hs, raws, own, c = {}, {}, rows.copy(), rows.mean(axis=0)
        for i in arrived:
            offset = 0 if is_mimic else d.from_mean * c + d.from_row * rows[i] + d.from_momentum * g
            y, raws[i] = steps(i, trained[i], x, d, offset, before)
            hs[i] = (x - y) / (ETA * trained[i])
        v = np.mean([hs[i] + (rows[i] if is_mimic else 0) for i in arrived], axis=0)
        for i in arrived:
            own[i] = v - hs[i] if is_mimic else raws[i]
        gamma = ETA * np.mean([trained[i] for i in arrived])
        rows, before, x, g = own, x, x - gamma * v, v
        xs.append(x)
    return xs


def at_server(method):
    """Plain rounds of a server that keeps the rows."""
    server, xs = Server(X0, method, clients=COUNT, lr=ETA), []
    for trained, arrived in rounds():
        broadcast = server.broadcast([*trained])
        with server.open_round() as round:
            for i in arrived:
                task = broadcast.of(i)
                offset = 0 if task.offset is None else task.offset
                before = 0 if task.x_prev is None else task.x_prev
                y, raw = steps(i, trained[i], server.x, method.direction, offset, before)
                control = raw.astype(np.float32) if task.second else None
                round.add_batch([Update(i, y.astype(np.float32), steps=trained[i], control=control)])
        xs.append(server.x.copy())
    return xs


def masked(method):
    """Sums of encoded updates, once with real masks. A client keeps its old row if its words are late."""
    server = Server(X0, method, clients=COUNT, lr=ETA, limits=LIMITS, compute=Compute(accumulator="exact"))
    rows, xs, is_mimic, were_masked = np.zeros((COUNT, N)), [], isinstance(method, MimiC), False
    for trained, arrived in rounds():
        encoding, words, next_rows = Encoding.of(server, clients=COUNT), {}, {}
        broadcast = server.broadcast([*trained])
        for i, k in trained.items():
            task = broadcast.of(i)
            offset = (0 if task.offset is None else task.offset) + (
                0 if is_mimic else method.direction.from_row * rows[i]
            )
            before = 0 if task.x_prev is None else task.x_prev
            y, raw = steps(i, k, server.x, method.direction, offset, before)
            next_rows[i] = (server.x - y) / (ETA * k) if is_mimic else raw
            y = y - ETA * k * rows[i] if is_mimic else y
            change = None if is_mimic else (raw - rows[i]).astype(np.float32)
            work = task if task.vectors() else None
            words[i] = encoding.encode(server.x, y.astype(np.float32), steps=k, change=change, work=work)
        total = np.sum([words[i] for i in arrived], axis=0).view(np.int64)
        if not were_masked and len(trained) == COUNT > len(arrived) == COUNT - 1:
            np.testing.assert_array_equal(really_masked(encoding, words, arrived), total)
            were_masked = True
        with server.open_round() as round:
            round.add_partial_sum(encoding.partial_sum(server, total, arrived), "masked sum")
        assert round.report.accepted == tuple(arrived)
        for i in arrived:
            rows[i] = server.v - next_rows[i] if is_mimic else next_rows[i]
        xs.append(server.x.copy())
    assert were_masked
    return xs


def really_masked(encoding, words, arrived):
    session = Session(COUNT)
    session.server = SecureServer([*range(COUNT)], encoding, group=COUNT)
    session.words = {i: words.get(i, words[arrived[0]]).view(np.int64) for i in range(COUNT)}
    session.until("masked").phase(set(range(COUNT)) - set(arrived))
    session.phase()
    return session.server.total


@pytest.mark.parametrize("method", [SCAFFOLD, SCAFFOLDM, SCAFFOLDMVR, MimiC])
def test_masked_rounds_follow_a_server_with_rows_and_the_paper(method):
    xs, plain, due = masked(method(placement="client")), at_server(method()), transcribed(method())
    np.testing.assert_allclose(xs, due, rtol=0, atol=1e-5)
    np.testing.assert_allclose(xs, plain, rtol=0, atol=1e-5)
    assert np.abs(xs[-1] - X0).max() > 0.1


def test_a_client_sends_no_wrong_change():
    encoding = Encoding(
        clients=2, n=3, parameters=2, weights="uniform", eta=1.0, max_norm=4, max_examples=1, max_steps=1,
        has_changes=True,
    )  # fmt: skip
    x = np.zeros(3, np.float32)
    words = encoding.encode(x, x + 1, steps=1, change=np.float32([3, -0.5])).view(np.int64) / 2.0**encoding.exponent
    assert words[:5].tolist() == [-1, -1, -1, 3, -0.5]
    for change, error in ((None, ArrayError), (x, ArrayError), (np.float32([3, 3]), RangeError)):
        with pytest.raises(error, match="change"):
            encoding.encode(x, x, steps=1, change=change)
    encoding.encode(x, x, steps=1, change=np.float32([4, 0]))
