"""Sums with identities: a server that lies about keys or survivors gets no shares."""

import numpy as np
import pytest

pytest.importorskip("cryptography")

from fedcore.errors import ArrayError, RangeError, RoundError
from fedcore.secure import SecureClient, SecureServer, identity_of
from fedcore.secure import messages as wire
from fedcore.secure.primitives import new_secret, public_key
from tests.secure.sessions import Session, encoding_of

PHASES = ("keys", "shares", "masked", "signed", "opened")


@pytest.mark.parametrize("phase", PHASES)
def test_a_signed_sum_has_the_bits_of_the_plain_sum(phase):
    session = Session(7, is_signed=True)
    for now in PHASES:
        assert session.server.phase == now
        session.phase({2, 5} if now == phase else ())
        session.stored()
    summed = set(range(7)) - ({2, 5} if phase not in ("signed", "opened") else set())
    np.testing.assert_array_equal(session.server.total, session.sum_of(summed))


def roster_with(session, index, **changed):
    """Return client 0's roster with other keys of a client."""
    group = dict(session.server._keys)
    group[index] = group[index]._replace(**changed)
    return wire.write_roster(session.server._session, session.server._threshold, group)


def test_a_server_cannot_replace_a_key():
    session = Session(4, is_signed=True).until("shares")
    own = new_secret()
    stranger = {"identity": identity_of(bytes(32)), "sealing": public_key(own)}
    again = session.server._keys[2]
    twice = {"identity": again.identity, "signature": again.signature}
    for change in ({"sealing": public_key(own)}, {"masking": public_key(own)}, stranger, twice):
        with pytest.raises(ArrayError, match="no known peer signed the keys of client 3"):
            session.clients[0].answer(roster_with(session, 3, **change))
    session.answer(0)  # the honest roster


def test_a_peer_cannot_stand_for_two_clients():
    """A server that runs one known client cannot fill a group with it."""
    session = Session(4, is_signed=True)
    session.clients[3] = SecureClient(identity=bytes([3] * 32), peers=session.identities.values())
    twin = session.answer(3)
    assert not session.server.receive(3, twin)  # the server knows which identity client 3 has
    assert "did not sign" in session.server.rejected[-1][1]
    session.server._identities[3] = session.identities[2]  # this server lies
    for i in range(3):
        session.server.receive(i, session.answer(i))
    assert session.server.receive(3, twin)
    session.server.close_phase()
    with pytest.raises(ArrayError, match="a peer occurs twice"):
        session.answer(0)


def test_keys_of_another_session_are_rejected():
    first, second = Session(3, is_signed=True), Session(3, is_signed=True)
    old = first.answer(1)
    forged = old[:16] + second.server._session + old[32:]
    assert not second.server.receive(1, forged)
    assert "did not sign" in second.server.rejected[-1][1]


def test_clients_that_were_sent_different_survivors_show_nothing():
    """Of 7 clients, 5 must sign the same list; the server tells 4 of them another one."""
    session = Session(7, is_signed=True).until("signed")
    other = wire.write_survivors(session.server._session, range(6))
    signatures = {}
    for i in range(7):
        sent = other if i in (0, 1, 2, 3) else session.server.messages[i]
        signatures[i] = session.clients[i].answer(sent)[wire.HEADER.size :]
    message = wire.write_signatures(session.server._session, signatures)
    for i, count in ((0, 4), (6, 3)):
        with pytest.raises(RoundError, match=f"{count} clients signed the same survivors, but the threshold is 5"):
            session.clients[i].answer(message)


def test_the_server_rejects_a_wrong_signature():
    session = Session(4, is_signed=True).until("signed")
    good = session.answer(2)
    for bad in (good[:-1], good[:-64] + bytes(64), session.answer(1)):
        assert not session.server.receive(2, bad)
    assert "not the client's signature" in session.server.rejected[-1][1]
    assert session.server.receive(2, good)


def test_both_sides_agree_on_identities():
    signed, plain = Session(3, is_signed=True), Session(3)
    with pytest.raises(RoundError, match="uses signatures"):
        plain.clients[0].answer(signed.server.messages[0])
    with pytest.raises(RoundError, match="does not use signatures"):
        signed.clients[0].answer(plain.server.messages[0])
    with pytest.raises(RangeError, match="public key of client 2 is missing"):
        SecureServer(range(3), encoding_of(3), identities={0: b"", 1: b""})
    with pytest.raises(RangeError, match="one group"):
        SecureServer(range(3), encoding_of(3), group=2, identities=signed.identities)
    with pytest.raises(ArrayError, match="32 bytes of an Ed25519 private key"):
        SecureClient(identity=b"short")


def test_a_signed_client_demands_more_than_two_thirds():
    session = Session(6, is_signed=True).until("shares")
    for threshold, is_enough in ((4, False), (5, True)):
        roster = wire.write_roster(session.server._session, threshold, session.server._keys)
        if is_enough:
            session.clients[0].answer(roster)
        else:
            with pytest.raises(RangeError, match="more than two thirds"):
                session.clients[0].answer(roster)
