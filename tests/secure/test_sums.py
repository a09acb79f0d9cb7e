"""Masked sums equal the sums of the same integers without masks, also if clients drop out."""

import time
from math import comb

import numpy as np
import pytest

pytest.importorskip("cryptography")

import fedcore
from fedcore.errors import RangeError, RoundError, UnknownClientError
from fedcore.secure.primitives import add_masks
from fedcore.secure.server import SecureServer, choose_groups, least_group
from tests.secure.sessions import PHASES, Session, encoding_of


def run(count, dropping, phase, **options):
    session, absent = Session(count, **options), set()
    for now in PHASES:
        if now == phase:
            left = list(session.server.messages)
            absent = set(np.random.default_rng(count).permutation(left)[: round(dropping * count)].tolist())
        session.phase(absent if now == phase else ())
    return session, absent


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("count", "dropping"), [(2, 0), (10, 0.1), (10, 0.3)])
def test_a_masked_sum_has_the_bits_of_the_plain_sum(count, dropping, phase):
    require_plain_sum(*run(count, dropping, phase), phase)


@pytest.mark.endurance
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dropping", [0.1, 0.3])
def test_so_has_a_sum_of_100_clients(dropping, phase):
    require_plain_sum(*run(100, dropping, phase), phase)


def test_so_has_a_sum_in_groups():
    session, absent = run(40, 0.3, "masked")
    assert {len(group) for group in session.server._groups.values()} == {27}
    require_plain_sum(session, absent, "masked")


def require_plain_sum(session, absent, phase):
    summed = set(range(len(session.clients))) - (absent if phase != "opened" else set())
    assert set(session.server.survivors) == summed
    np.testing.assert_array_equal(session.server.total, session.sum_of(summed))
    assert session.server.phase == "closed"
    assert not session.server.messages


def test_clients_drop_out_in_every_phase_and_restart_from_their_state():
    session = Session(10)
    for absent in (0, 1, 2):
        session.phase({absent})
        session.stored()
    session.phase()
    np.testing.assert_array_equal(session.server.total, session.sum_of(range(3, 10)))
    assert session.server.survivors == tuple(range(3, 10))


def test_words_count_once_wherever_they_are_in_memory(monkeypatch):
    session = Session(5).until("masked")
    frames = [b"size" + session.answer(i) for i in range(5)]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("fedcore.secure.server._memory", lambda words: bytes(2**62))
        for i in range(4):
            session.server.receive(i, memoryview(frames[i])[4:])
    assert (session.server.waiting_for, session.server.named) == ((3, 4), ())
    for i in (4, 3):
        assert session.server.receive(i, memoryview(bytearray(frames[i]) if i == 4 else frames[i])[4:])
    session.server.close_phase()
    session.phase()
    np.testing.assert_array_equal(session.server.total, session.sum_of(range(5)))


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_opens_below_the_threshold(phase):
    """Of 10 clients, 7 are needed once they have shared their secrets; before, ``min_clients``."""
    session = Session(10, min_clients=7)
    session.until(phase)
    with pytest.raises(RoundError, match=r"6 clients .* but the sum needs 7"):
        session.phase({0, 1, 2, 3})
    assert session.server.total is None
    assert session.server.phase == "closed"
    assert not session.server.messages
    with pytest.raises(RoundError, match="closed"):
        session.server.close_phase()


def test_a_client_shows_nothing_for_fewer_clients_than_it_asks_for():
    with pytest.raises(RoundError, match="min_clients=9: the server asks for a sum of 8 clients or more"):
        Session(10, client_min=9, min_clients=8).answer(2)
    session = Session(10, client_min=9, min_clients=9).until("masked")
    session.server._min_clients = 2  # this server lies
    session.phase({0, 1})
    with pytest.raises(RoundError, match="8 clients, but min_clients=9"):
        session.answer(2)


@pytest.mark.parametrize(
    ("ids", "options"),
    [([1], {}), ([1, 1], {}), (range(3), {"min_clients": 4}), (range(3), {"min_clients": 1}), (range(3), {"group": 4})],
)
def test_a_sum_needs_enough_different_clients(ids, options):
    with pytest.raises(RangeError):
        SecureServer(ids, encoding_of(3), **options)


def test_only_invited_clients_can_answer():
    with pytest.raises(UnknownClientError, match="not invited"):
        Session(2).server.receive(2, b"")


def test_groups_are_mutual_and_as_large_as_the_bounds_require():
    groups = choose_groups(range(7, 107), 61)
    assert {len(group) for group in groups.values()} == {61}
    assert all(client in groups[other] for client, group in groups.items() for other in group)
    assert choose_groups([4, 2, 9], 3) == {client: [2, 4, 9] for client in (4, 2, 9)}
    assert [least_group(count) for count in (32, 33, 100, 1000)] == [32, 23, 61, 175]
    for count, size in ((33, 23), (100, 61), (1000, 175)):  # some group has as many colluding clients as its threshold
        ways = [comb(-(-count // 5), k) * comb(count - 1 - -(-count // 5), size - 1 - k) for k in range(size)]
        assert count * sum(ways[size // 2 + 1 :]) / comb(count - 1, size - 1) < 2**-40
    # Of 33 clients, 10 may drop out: 12 others stay in any group of 23, the threshold. 21 would keep 10 of 11.
    assert least_group(1000) < least_group(10_000) < 300


def test_a_client_computes_on_no_more_threads_than_set():
    """The threads of NumPy's BLAS would not obey, and would spin beside the client."""
    n, before = 300_000, fedcore.threads()
    x, y, encoding = np.zeros(n, np.float32), np.full(n, 1e-3, np.float32), encoding_of(3, n)
    fedcore.set_threads(1)
    try:
        others = []
        for _ in range(5):  # threads of other tests may still spin during the first ones
            own, all_threads = time.thread_time(), time.process_time()
            add_masks(encoding.encode(x, y, steps=1), [(bytes(32), False)])
            own, all_threads = time.thread_time() - own, time.process_time() - all_threads
            others.append(all_threads / own - 1)
    finally:
        fedcore.set_threads(before)
    assert np.median(others) < 0.1
