"""Hostile messages: the sender is rejected, and the others' sum opens or the sum ends as the protocol defines."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cryptography")

from fedcore import Server, Totals
from fedcore.errors import ArrayError, CheckpointError, FedcoreError, RoundError
from fedcore.secure import Encoding, SecureClient, SecureServer
from fedcore.secure import messages as wire
from tests.secure.sessions import PHASES, Session, encoding_of, outcome


def mutations(message, others, rng, count):
    """Yield random bytes and changed copies of a message."""
    for _ in range(count):
        changed = bytearray(message)
        kind = rng.integers(6)
        if kind == 0:
            yield rng.bytes(int(rng.integers(0, 2 * wire.HEADER.size)))
        elif kind == 1:
            yield message[: int(rng.integers(0, len(message)))]
        elif kind == 2:
            yield message + rng.bytes(int(rng.integers(1, 300)))
        elif kind == 3:  # the header of this phase, with a random body
            yield message[: wire.HEADER.size] + rng.bytes(int(rng.integers(0, len(message))))
        elif kind == 4:
            changed[int(rng.integers(0, len(changed)))] ^= 1 << int(rng.integers(8))
            yield bytes(changed)
        else:
            yield others[int(rng.integers(len(others)))]


@pytest.mark.parametrize("is_honest_at_first", [True, False])
def test_ten_thousand_hostile_messages_open_nothing_but_the_sum(is_honest_at_first):
    """Clients 0 and 1 of 10 are hostile; the sum opens, or ends with the name of the one that dealt no valid shares."""
    rng, session = np.random.default_rng(5), Session(10)
    server, seen, sent = session.server, [b""], 0
    for phase in PHASES:
        answers = {}
        for i in list(server.messages):
            try:
                answers[i] = session.answer(i)
            except FedcoreError:
                assert i < 2  # it got a roster with other keys than its own, for example
        for hostile in (0, 1):
            if is_honest_at_first and phase in ("keys", "shares"):
                assert server.receive(hostile, answers[hostile])
            for message in mutations(answers.get(hostile, answers[2]), [*seen, answers[2]], rng, 1250):
                sent += 1
                is_words = phase == "masked" and len(message) == len(answers[2])
                if not is_words:  # the server cannot detect a client's wrong words
                    server.receive(hostile, message)
        seen += answers.values()
        for i in range(2, 10):
            assert server.receive(i, answers[i])
            assert not server.receive(i, answers[i])  # only the first counts
        ending = outcome(server.close_phase)
        assert ending == "valid" or (phase == "opened" and not is_honest_at_first)
    assert sent == 10_000
    assert len(server._rejected) > 8000 > len(server.rejected)  # which lists a few of each client
    assert {client for client, _ in server.rejected} == set(range(10))
    if is_honest_at_first:
        np.testing.assert_array_equal(server.total, session.sum_of(range(2, 10)))
    else:  # each shared secrets that do not belong to the keys it sent
        assert ending == "RoundError"
        assert server.total is None


CRAFTED = {
    "keys": [
        (lambda good: good[:72] + bytes(32) + good[104:], "not a valid X25519 public key"),
        (lambda good: good[:72] + good[40:72] + good[104:], "a key occurs twice"),
        (lambda good: good[:-1], "expected 160 bytes"),
    ],
    "shares": [
        (lambda good: good[: -wire.DEALT.size], "exactly the clients of the group"),
        (lambda good: good + good[-wire.DEALT.size :], "must ascend"),
        (lambda good: good[:50], "the digest is missing"),
    ],
    "masked": [(lambda good: good[:-8], "expected 56 bytes"), (lambda good: good + bytes(8), "expected 56 bytes")],
    "opened": [
        (lambda good: good[:-1] + b"\xff", "out of range"),
        (lambda good: good[:-2] + bytes([good[-2] ^ 1]) + good[-1:], "not the one that it dealt"),
        (lambda good: good[: -wire.SHOWN.size + 4] + b"\0" + good[-wire.SHOWN.size + 5 :], "of the wrong secret"),
        (lambda good: good[: -wire.SHOWN.size] + b"\x07" + good[-wire.SHOWN.size + 1 :], "holds no share of client 7"),
    ],
}


@pytest.mark.parametrize("phase", PHASES)
def test_the_reason_names_what_is_wrong(phase):
    session = Session(4).until(phase)
    good = session.answer(3)
    for change, reason in CRAFTED[phase]:
        assert not session.server.receive(3, change(good))
        assert reason in session.server.rejected[-1][1]
    for message in (b"", None, good[:20], Session(2).until(phase).answer(1), bytes(100)):
        assert not session.server.receive(3, message)
    assert session.server.receive(3, good)  # the client may correct its answer


def test_a_message_of_another_version_is_refused_by_name():
    session = Session(3)
    for side, message in ((session.server, session.answer(1)), (session.clients[0], session.server.messages[0])):
        old = message.replace(b"fedcore secure 2", b"fedcore secure 1")
        if side is session.server:
            assert not side.receive(1, old)
            assert "another version" in side.rejected[-1][1]
        else:
            with pytest.raises(ArrayError, match="another version"):
                side.answer(old)


def test_a_client_without_an_earlier_answer_is_rejected():
    session = Session(4)
    late = session.answer(3)
    session.phase({3})
    assert not session.server.receive(3, late)
    assert "not part of the phase 'shares'" in session.server.rejected[-1][1]


def test_a_client_that_deals_wrong_shares_is_named():
    """Its own shares are valid encryptions of another secret's, so the holders cannot notice."""
    session = Session(4).until("shares")
    session.clients[2]._seed, kept = b"\1" * 32, session.clients[2]._seed
    answer = session.answer(2)
    session.clients[2]._seed = kept
    honest = bytearray(answer)
    honest[wire.HEADER.size] ^= 1  # the digest of the seed
    for i in (0, 1, 3):
        session.server.receive(i, session.answer(i))
    session.server.receive(2, bytes(honest))
    session.server.close_phase()
    session.phase()
    with pytest.raises(RoundError, match="client 2 dealt shares of a wrong secret"):
        session.phase()
    assert session.server.total is None
    assert session.server.named == (2,)


def dealt(answer, holders):
    """Return a client's shares, which the holders cannot decrypt."""
    digest, shares = wire.read_shares(memoryview(answer)[wire.HEADER.size :])
    shares |= {i: shares[i]._replace(sealed=bytes(len(shares[i].sealed))) for i in holders}
    return answer[: wire.HEADER.size + len(digest)] + wire.write(wire.SHARES, b"", shares)[wire.HEADER.size :]


def shown(answer, owners):
    """Return a holder's shares, without those of some owners."""
    shares = wire.read_opened(memoryview(answer)[wire.HEADER.size :])
    return wire.write(wire.OPENED, answer[16:32], {k: one for k, one in shares.items() if k not in owners})


@pytest.mark.parametrize(
    ("lies", "absent", "named"),
    [
        ({1: ("shares", range(10))}, (), (1,)),
        ({1: ("shares", range(6, 10))}, (), ()),  # 7 of 10 are needed
        ({1: ("shares", range(10)), 4: ("shares", range(10))}, (), (1, 4)),
        ({1: ("shares", (8, 9))}, (5, 6), ()),
        ({1: ("opened", range(10))}, (4, 5, 6), ()),
        ({1: ("opened", (3,)), 2: ("opened", (3,))}, (4, 5, 6), ()),  # client 3 is honest
    ],
)
def test_only_a_dealer_whose_shares_most_holders_lack_is_named(lies, absent, named):
    session = Session(10).until("shares")
    change = {"shares": dealt, "opened": shown}
    for phase in PHASES[1:]:
        for i in [i for i in session.server.messages if phase != "opened" or i not in absent]:
            answer = session.answer(i)
            if i in lies and lies[i][0] == phase:
                answer = change[phase](answer, lies[i][1])
            assert session.server.receive(i, answer)
        if phase != "opened":
            session.server.close_phase()
    with pytest.raises(RoundError, match="showed a share"):
        session.server.close_phase()
    assert session.server.named == named


def test_a_malformed_answer_names_its_sender_until_it_is_corrected():
    session = Session(4)
    good = session.answer(3)
    session.server.receive(3, Session(4).answer(3))  # of another session: it may be late
    assert session.server.named == ()
    session.server.receive(3, good[:-1])
    assert session.server.named == (3,)
    session.server.receive(3, good)
    assert session.server.named == ()


def test_keys_end_with_their_use():
    session = Session(4, is_signed=True).until("masked")
    for i in range(4):
        assert all(session.clients[i].to_state()["secrets"])
        session.answer(i)
        assert not any(session.clients[i].to_state()["secrets"])
    session = Session(4).until("opened")
    for i in range(4):
        assert session.clients[i].to_state()["held"]
        session.answer(i)
        assert not session.clients[i].to_state()["held"]


@pytest.mark.parametrize("change", [{"sealing": bytes(31) + b"\1"}, {"masking": bytes(31) + b"\1"}])
def test_a_client_refuses_another_key_of_its_own_and_a_key_twice(change):
    session = Session(4).until("shares")
    keys = session.server._keys
    for group, reason in (
        (keys | {0: keys[0]._replace(**change)}, "own keys are missing or differ"),
        (keys | {2: keys[2]._replace(sealing=keys[1].sealing)}, "a key occurs twice"),
    ):
        with pytest.raises(ArrayError, match=reason):
            session.clients[0].answer(wire.write(wire.ROSTER, session.server._session, group, wire.NUMBER.pack(3)))


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_survives_hostile_messages_of_the_server(phase):
    rng, session = np.random.default_rng(6), Session(4).until(phase)
    message, words = session.server.messages[1], session.words[1].view(np.uint64)
    state = session.clients[1].to_state()
    for hostile in mutations(message, list(session.server.messages.values()), rng, 500):
        client = SecureClient.from_state(state)
        try:
            client.answer(hostile, words)
        except FedcoreError:
            assert client.to_state() == state
    assert len(session.answer(1)) > wire.HEADER.size


def test_a_client_never_shows_both_secrets_of_another():
    """A server that asks twice, or leaves the client out, gets no answer; nor does one with a low threshold."""
    session = Session(4).until("opened")
    session.answer(1)
    survivors = wire.write(wire.SURVIVORS, session.server._session, {1: (), 2: (), 3: ()})
    with pytest.raises(ArrayError, match="expected no further message"):
        session.clients[1].answer(survivors)
    with pytest.raises(ArrayError, match="own index is missing"):
        session.clients[0].answer(survivors)
    fresh = Session(4).until("shares")
    roster = wire.write(wire.ROSTER, fresh.server._session, fresh.server._keys, wire.NUMBER.pack(2))
    with pytest.raises(FedcoreError, match="more than half"):
        fresh.clients[0].answer(roster)


def test_a_state_of_something_else_is_refused():
    for wrong in ({"secrets": ["zz"]}, {"numbers": 3}, {"numbers": [np.inf] * 5}, {"encoding": {"n": np.inf}}, None):
        state = {} if wrong is None else SecureClient().to_state() | wrong
        with pytest.raises(CheckpointError, match="did not return it"):
            SecureClient.from_state(state)


def test_only_a_server_has_an_encoding():
    totals = Totals({"rows": np.zeros(3, np.int64)}, 4)
    for other in (totals, Server, np.zeros(3)):
        with pytest.raises(ArrayError, match=r"^server: .*totals\.encoding\(\)"):
            Encoding.of(other, clients=3)
        with pytest.raises(ArrayError, match=r"^encoding: .*totals\.encoding\(\)"):
            SecureServer(range(3), other)


@pytest.mark.parametrize("form", [encoding_of(3), Totals({"a": 0.0}, 3).form])
def test_numbers_of_numpy_are_those_of_python(form):
    numbers = {name: np.array(value)[()] for name, value in vars(form).items() if type(value) in (int, float)}
    assert repr(replace(form, **numbers)) == repr(form)
