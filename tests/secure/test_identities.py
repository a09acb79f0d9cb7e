"""Sums with identities: a server that lies about keys or survivors gets no shares."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cryptography")

from fedcore.errors import ArrayError, RangeError, RoundError
from fedcore.secure import Encoding, SecureClient, SecureServer, identity_of, server
from fedcore.secure import messages as wire
from fedcore.secure.primitives import add_masks, new_secret, public_key, self_mask
from tests.secure.sessions import Session, encoding_of, outcome

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
    return wire.write(wire.ROSTER, session.server._session, group, wire.NUMBER.pack(session.server._threshold))


def test_a_server_cannot_replace_a_key():
    session = Session(4, is_signed=True).until("shares")
    own = new_secret()
    stranger = {"identity": identity_of(bytes(32)), "sealing": public_key(own)}
    again = session.server._keys[2]
    twice = {"identity": again.identity, "signature": again.signature}
    for change in ({"sealing": public_key(own)}, {"masking": public_key(own)}, stranger, twice):
        with pytest.raises(ArrayError, match="no known peer signed the keys of client 3 for"):
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


@pytest.fixture
def lying(monkeypatch):
    """Servers that accept every signature; clients still check them."""
    monkeypatch.setattr(server, "crypto", type("Crypto", (), {**vars(server.crypto), "is_signed": lambda *_: True}))
    monkeypatch.setattr(server, "are_signed", lambda *_: True)


ENCODINGS = [
    {"max_norm": 2.0**30},
    {"max_examples": 10**6},
    {"clients": 6},
    {"round": 1},
    {"eta": 0.5},
    {"max_steps": 9},
]
ENCODINGS += [{"model": "0" * 64}, {"work": "0" * 64}]


@pytest.mark.parametrize("others", [(4,), (0, 1, 2, 3)])
@pytest.mark.parametrize("change", [*({"encoding": one} for one in ENCODINGS), {"min_clients": 3}, {"clients": 6}])
@pytest.mark.parametrize("is_signed", [True, False])
def test_no_sum_opens_whose_clients_got_different_invitations(lying, is_signed, change, others):
    """With another grid or x, the sum would show one client's update (Pasquini et al. 2022)."""
    session = Session(5, is_signed=is_signed)
    for i in others:
        opening = wire.read_open(memoryview(session.server.messages[i])[wire.HEADER.size :])
        more = {"encoding": opening.encoding | change["encoding"]} if "encoding" in change else change
        session.server.messages[i] = wire.write_open(session.server._session, opening._replace(**more))
    session.until("shares")
    if is_signed:
        for i in range(5):
            with pytest.raises(ArrayError, match=r"signed the keys of client \d for this invitation"):
                session.answer(i)
        return
    session.until("masked")
    seeds = [(self_mask(client._seed, client._context), True) for client in session.clients.values()]
    session.phase()
    total = session.server._sum.copy()
    add_masks(total, seeds)
    assert not (total.view(np.int64) == session.sum_of(range(5))).any()  # the masks between clients did not cancel
    for i in range(5):
        session.server.receive(i, session.answer(i))
    with pytest.raises(RoundError, match=r"opened: \d clients showed a share"):
        session.server.close_phase()


@pytest.mark.parametrize("others", [(4,), (1, 2, 3, 4)])
@pytest.mark.parametrize("members", [range(5), range(1, 5)])
def test_no_sum_opens_whose_clients_got_different_rosters(lying, members, others):
    session = Session(5, is_signed=True).until("shares")
    honest, group = session.server, {i: session.server._keys[i] for i in members}
    for i in others:  # another threshold, or no client 0
        threshold = wire.NUMBER.pack(5 if len(group) == 5 else 4)
        honest.messages[i] = wire.write(wire.ROSTER, honest._session, group, threshold)
    if len(group) == 5:
        honest._threshold = 5  # enough shares for either threshold
    else:
        honest._groups = {i: sorted(group) if i in others else [*range(5)] for i in range(5)}
        honest._inbox = lambda i: wire.write(
            *(wire.INBOX, honest._session),
            {j: honest._dealt[j][1].get(i, honest._dealt[0][1][1]) for j in honest._groups[i]},
        )
    assert outcome(lambda: session.until("closed")) in ("ArrayError", "RoundError")
    assert honest.total is None


def test_a_signed_sum_needs_the_digest_of_the_model():
    session = Session(3, is_signed=True)
    plain = SecureServer(range(3), replace(session.encoding, model=""), identities=session.identities)
    with pytest.raises(RoundError, match="no model"):
        session.clients[0].answer(plain.messages[0])
    with pytest.raises(ArrayError, match="model"):
        Encoding.read(session.encoding.to_state() | {"model": "abc"})


@pytest.mark.parametrize(
    "change", [{"max_norm": 100.5}, {"max_examples": 2**40}, {"clients": 2**30, "max_examples": 999}]
)
def test_a_client_has_its_own_limit_on_the_norm_and_the_grid(change):
    form = encoding_of(3)
    for one, is_refused in ((form, False), (replace(form, **change), True)):
        client = SecureClient(max_norm=100.0)
        client = SecureClient.from_state(client.to_state())
        with pytest.raises(RoundError, match="max_norm=100: the server asks") if is_refused else nullcontext():
            client.answer(SecureServer(range(3), one).messages[0])


def test_keys_of_another_session_are_rejected():
    first, second = Session(3, is_signed=True), Session(3, is_signed=True)
    old = first.answer(1)
    forged = old[:16] + second.server._session + old[32:]
    assert not second.server.receive(1, forged)
    assert "did not sign" in second.server.rejected[-1][1]


def test_clients_that_were_sent_different_survivors_show_nothing():
    """Of 7 clients, 5 must sign the same list; the server tells 4 of them another one."""
    session = Session(7, is_signed=True).until("signed")
    other = wire.write(wire.SURVIVORS, session.server._session, dict.fromkeys(range(6), ()))
    signatures = {}
    for i in range(7):
        sent = other if i in (0, 1, 2, 3) else session.server.messages[i]
        signatures[i] = (session.clients[i].answer(sent)[wire.HEADER.size :],)
    message = wire.write(wire.SIGNATURES, session.server._session, signatures)
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
    with pytest.raises(RangeError, match="one group"):
        SecureServer(range(3), encoding_of(3), group=2, identities=signed.identities)
    with pytest.raises(ArrayError, match="32 bytes of an Ed25519 private key"):
        SecureClient(identity=b"short")


@pytest.mark.parametrize("wrong", [None, "ab" * 32, bytes(31), 5])
def test_public_keys_are_checked_when_they_are_given(wrong):
    public = identity_of(bytes(32))
    for identities in ({0: public, 1: wrong, 2: public}, {0: public}):
        with pytest.raises(ArrayError, match=r"^identities\[1\]: must be an Ed25519 public key"):
            SecureServer(range(3), encoding_of(3), identities=identities)
    for peers in ([public, wrong], public, public.hex(), None):
        with pytest.raises((ArrayError, RangeError), match=r"^peers(: must be an Ed25519 public|=.*: must be a list)"):
            SecureClient(peers=peers)


def test_a_signed_client_demands_more_than_two_thirds():
    session = Session(6, is_signed=True).until("shares")
    for threshold, is_enough in ((4, False), (5, True)):
        roster = wire.write(wire.ROSTER, session.server._session, session.server._keys, wire.NUMBER.pack(threshold))
        if is_enough:
            session.clients[0].answer(roster)
        else:
            with pytest.raises(RangeError, match="more than two thirds"):
                session.clients[0].answer(roster)
