"""Rows of bf16 and int8 stores are rounded stochastically, by keys of the round, the client and the occasion."""

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Server, Update, algorithms
from fedcore import runtime as randomness
from fedcore.kernels import Codes
from tests import oracle

CODECS = ["bf16", "int8"]
n = 200
IDS = [0, 5, "5", 2**64 - 1, "a client"]


def made(codec, algorithm=algorithms.MIFA(wait=False), ids=IDS, width=n, batch_size=None):  # noqa: B008
    store = ClientStore(ids, width, codec=codec)
    return Server(
        np.zeros(width, np.float32),
        algorithm,
        storage=store,
        lr=0.1,
        server_lr=0.1,
        compute=Compute(batch_size=batch_size),
    )


def gradient(client, turn, width=n):
    return np.random.default_rng([IDS.index(client), turn]).normal(size=width).astype(np.float32)


def accepted(server, clients, turn=0):
    server.round([Update(client, value=gradient(client, turn), kind="gradient", steps=1) for client in clients])


def rows(server):
    return {client: server.store.read(client).tobytes() for client in server.clients}


def due(h, codec, occasion, round, client):
    """The row as the oracle rounds it by that key."""
    [[seed, row]] = randomness.keys(f"row of {occasion}", round=round, clients=[client]).tolist()
    codes = Codes(codec, np.empty(len(h), np.int8 if codec == "int8" else np.uint16))
    if codec == "int8":
        codes = codes._replace(scales=np.empty(-(-len(h) // 64), np.float32))
    oracle.quantise(h, codec, codes.codes, codes.scales, seed, row)
    out = np.empty(len(h), np.float32)
    oracle.dequantise(codes.codes, codes.scales, codec, out)
    return out


@pytest.mark.parametrize("codec", CODECS)
def test_an_update_is_rounded_by_its_round_and_client(codec):
    server = made(codec)
    for turn, cohort in enumerate([IDS, IDS[::2], IDS[1:]]):
        accepted(server, cohort, turn)
        for client in cohort:
            h = gradient(client, turn)
            np.testing.assert_array_equal(server.store.read(client), due(h, codec, "a reply", turn, client))


@pytest.mark.parametrize("codec", CODECS)
def test_warm_starts_and_folded_histories_have_their_own_keys(codec):
    server = made(codec, "SCAFFOLD")
    server.warm_start({client: gradient(client, 0) for client in IDS})
    for client in IDS:
        np.testing.assert_array_equal(
            server.store.read(client), due(gradient(client, 0), codec, "a warm start", 0, client)
        )
    server = made(codec, algorithms.MimiC(history=1))
    accepted(server, IDS[:2], 0)
    v, before = server.v, {client: server.store.read(client) for client in IDS[:2]}
    accepted(server, IDS[2:], 1)
    for client in IDS[:2]:
        correction = due(before[client] - v, codec, "a history that is folded", 1, client)
        np.testing.assert_array_equal(server.store.read(client), correction)


@pytest.mark.parametrize("codec", CODECS)
def test_slots_and_order_do_not_change_the_rounding(codec):
    one, other = made(codec), made(codec, ids=IDS[::-1], batch_size=1)
    accepted(one, IDS, 0)
    for client in IDS[::-1]:  # other slots, other neighbours, one by one
        other._backend.store.stage(client)
    other._backend.store.unstage("5")
    with other.open_round() as round:
        for client in IDS[::-1]:
            round.add(client, value=gradient(client, 0), kind="gradient", steps=1)
    assert rows(one) == rows(other)


@pytest.mark.parametrize("codec", CODECS)
def test_a_repeated_round_has_the_same_bits(codec):
    straight, left = made(codec), made(codec)
    for server in (straight, left):
        accepted(server, IDS[:3], 0)
    with pytest.raises(KeyboardInterrupt), left.open_round() as round:
        round.add(5, value=gradient(5, 7), kind="gradient", steps=1)
        raise KeyboardInterrupt
    bad = gradient("5", 1)
    bad[3] = np.nan
    for server in (straight, left):
        updates = [Update(client, value=gradient(client, 1), kind="gradient", steps=1, keep=True) for client in IDS]
        if server is left:  # rejected, and the others are folded again
            updates.insert(2, Update("5", value=bad, kind="gradient", steps=1, keep=True))
        server.round(updates)
    assert rows(straight) == rows(left)
    np.testing.assert_array_equal(straight.x, left.x)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [0.3, -1.2345])
def test_a_million_roundings_of_a_server_are_unbiased(codec, value):
    """The mean is within 5 sigma of the number, over elements, clients and rounds."""
    width, clients, turns = 5000, 20, 10
    server = made(codec, ids=clients, width=width)
    h = np.full(width, value, np.float32)
    h[::64] = 7.5  # sets int8's scale
    kept = h != np.float32(7.5)
    stored = []
    for _ in range(turns):
        server.round([Update(client, value=h, kind="gradient", steps=1) for client in range(clients)])
        stored += [server.store.read(client)[kept].astype(np.float64) for client in range(clients)]
    stored = np.array(stored)
    assert stored.size > 980_000
    assert len(np.unique(stored)) == 2
    every = stored.std() / np.sqrt(stored.size)
    assert abs(stored.mean() - np.float64(np.float32(value))) < 5 * every
    for axis in (0, 1):  # nor do the rows of one client, or of one element, share their errors
        means = stored.mean(axis=axis)
        assert means.std() < 1.2 * stored.std() / np.sqrt(stored.shape[axis])
    np.testing.assert_allclose(  # and T is the sum of what is stored
        server._backend.snapshot.total, sum(server.store.read(i).astype(np.float64) for i in range(clients)), atol=1e-9
    )


def test_keys_differ_by_client_round_and_purpose():
    clients = [0, 1, 5, "0", "5", "", 2**64 - 1, "\ud800", "i\x05"]
    every = [randomness.keys(p, round=t, clients=clients) for p in ("one", "other") for t in (0, 1, 2**63)]
    assert len({key.tobytes() for one in every for key in one}) == 6 * len(clients)
    np.testing.assert_array_equal(randomness.keys("one", round=0, clients=np.arange(6)[5:]), every[0][2:3])
    assert randomness.keys("one", round=0, clients=[]).shape == (0, 2)


def test_rows_of_float32_are_as_they_were_sent():
    server = made("f32")
    accepted(server, IDS)
    np.testing.assert_array_equal(server.store.read("5"), gradient("5", 0))
