"""What the server and colluding clients can compute, and what masked words look like."""

import numpy as np
import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedcore.secure import messages as wire
from fedcore.secure import primitives
from tests.secure.sessions import Session


class Attack:
    """The server's bytes of a whole sum, and the secrets and shares of some clients."""

    def __init__(self, session, colluding, absent=(), late=()):
        server, clients = session.until("masked").server, session.clients
        self.masking = {i: clients[i]._masking for i in colluding}
        sent = {i: session.answer(i) for i in server.messages if i not in absent}
        self.masked = {i: message for i, message in sent.items() if i not in late}
        self.held = {i: dict(clients[i]._held) for i in colluding if i in self.masked}
        for i, message in self.masked.items():
            server.receive(i, message)
        server.close_phase()
        self.shown = {}
        for i in list(server.messages):
            answer = session.answer(i)
            server.receive(i, answer)
            self.shown[i] = wire.read_opened(memoryview(answer)[wire.HEADER.size :])
        server.close_phase()
        self.server, self.masked = server, sent

    def shares(self, owner):
        """Return every share of the owner's private key that was sent or that a colluding client holds."""
        shares = {i: held[owner][primitives.SHARE :] for i, held in self.held.items() if owner in held}
        for holder, shown in self.shown.items():
            is_seed, share = shown[owner]
            if not is_seed:
                shares[holder] = share
        return shares

    def private_key(self, owner):
        """Return the owner's private key of masks, if the attacker can compute it."""
        if owner in self.masking:
            return self.masking[owner]
        shares = dict(sorted(self.shares(owner).items())[: self.server._threshold])
        found = primitives.join(shares, primitives.lagrange(list(shares))) if shares else None
        return found if found is not None and primitives.public_key(found) == self.server._keys[owner].masking else None

    def unmasked(self, victim):
        """Return a client's words without all masks that the attacker can compute, as int64."""
        server = self.server
        seeds = {i: held[victim][: primitives.SHARE] for i, held in self.held.items()}
        seeds |= {i: shown[victim][1] for i, shown in self.shown.items() if shown[victim][0]}
        seed = primitives.join(seeds, primitives.lagrange(list(seeds)))
        words = wire.read_masked(memoryview(self.masked[victim])[wire.HEADER.size :], server.encoding.words).copy()
        masks = [] if seed is None else [(primitives.self_mask(seed, server._context), True)]
        own = self.private_key(victim)
        for other in server._groups[victim]:
            if other == victim or other not in server._dealt:
                continue
            secret, key, ends = own, server._keys[other].masking, (victim, other)
            if secret is None:
                secret, key, ends = self.private_key(other), server._keys[victim].masking, (other, victim)
            if secret is not None:
                mask, negative = primitives.pairwise_mask(secret, key, server._context, *ends)
                masks.append((mask, negative != (ends[0] == victim)))
        primitives.add_masks(words, masks)
        return words.view(np.int64)


@pytest.mark.parametrize("absent", [(), (0, 5)])
def test_the_server_and_fewer_clients_than_the_threshold_open_no_update(absent):
    """The server's bytes, all messages, and all secrets of t - 1 = 6 of 10 clients; a seventh would be enough."""
    colluding = {4, 5, 6, 7, 8, 9}
    session = Session(10)
    attack = Attack(session, colluding, absent)
    honest = [i for i in range(4) if i not in absent]
    residuals = {i: attack.unmasked(i) for i in honest}
    for i, residual in residuals.items():
        assert attack.private_key(i) is None
        assert not (residual == session.words[i]).any()
    for i in colluding - set(absent):  # their masks the attacker removes
        np.testing.assert_array_equal(attack.unmasked(i), session.words[i])
    # The masks between honest clients cancel only in the sum of all of them, which the protocol shows.
    np.testing.assert_array_equal(sum(residuals.values()), session.sum_of(honest))
    for left_out in honest:
        part = sum(residual for i, residual in residuals.items() if i != left_out)
        assert not (part == session.sum_of(i for i in honest if i != left_out)).any()


def test_an_update_that_arrives_too_late_stays_hidden():
    """The server has the private key of client 0, which it took for lost, and then its masked words."""
    session = Session(10)
    attack = Attack(session, {4, 5, 6, 7, 8, 9}, late={0})
    assert attack.private_key(0) is not None
    assert not (attack.unmasked(0) == session.words[0]).any()
    for i in range(1, 4):
        assert not (attack.unmasked(i) == session.words[i]).any()


def test_fewer_shares_fit_every_secret():
    """For t - 1 shares and any secret, some value of one more share gives this secret."""
    shares = primitives.split(primitives.new_secret(), [0, 3, 8], threshold=3)
    known = {0: shares[0], 3: shares[3]}
    first, second, third = primitives.lagrange([0, 3, 8])
    for secret in (b"\0" * 32, b"\xff" * 32, primitives.new_secret()):
        rest = int.from_bytes(secret, "little") - sum(
            int.from_bytes(share, "little") * by for share, by in zip(known.values(), (first, second), strict=True)
        )
        share = rest * pow(third, -1, primitives.PRIME) % primitives.PRIME
        assert (
            primitives.join(known | {8: share.to_bytes(primitives.SHARE, "little")}, [first, second, third]) == secret
        )


def test_any_threshold_shares_give_the_secret():
    assert pow(2, primitives.PRIME - 1, primitives.PRIME) == 1
    for secret in (b"\0" * 32, b"\xff" * 32, primitives.new_secret()):
        shares = primitives.split(secret, range(0, 50, 7), threshold=4)
        for holders in ([0, 7, 14, 21], [49, 7, 28, 42], [35, 28, 21, 14]):
            assert primitives.join({i: shares[i] for i in holders}, primitives.lagrange(holders)) == secret
            wrong = {i: shares[i] for i in holders[:3]} | {holders[3]: shares[0 if holders[3] else 7]}
            assert primitives.join(wrong, primitives.lagrange(holders)) != secret


def test_masks_are_the_streams_of_aes_in_counter_mode():
    """Beside AES on single blocks with the counter 0, 1, 2, ..., across the edges of ``add_masks``'s blocks."""
    key, n = bytes(range(32)), primitives.BLOCK // 8 + 5
    words = np.zeros(n, np.uint64)
    primitives.add_masks(words, [(key, False)])
    single = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    for at in (0, 1, primitives.BLOCK // 16 - 1, primitives.BLOCK // 16, primitives.BLOCK // 16 + 1):
        assert words[2 * at : 2 * at + 2].tobytes() == single.update(at.to_bytes(16, "big"))
    primitives.add_masks(words, [(bytes(32), True), (key, True), (bytes(32), False)])
    assert not words.any()


def test_masked_words_look_uniform():
    """The chi-squared statistics of 10^6 masked words' bytes, and of the steps between them, are within 5 sigma."""
    session = Session(3, n=10**6).until("masked")
    message = session.answer(0)
    words = wire.read_masked(memoryview(message)[wire.HEADER.size :], 10**6 + 2)
    for numbers in (words, np.diff(words), words ^ session.words[0].view(np.uint64)):
        columns = numbers.view(np.uint8).reshape(-1, 8)
        for column in columns.T:
            counts = np.bincount(column, minlength=256)
            expected = len(column) / 256
            chi = ((counts - expected) ** 2 / expected).sum()
            assert abs(chi - 255) < 5 * np.sqrt(2 * 255)
    plain = session.words[0].view(np.uint8).reshape(-1, 8)[:, 7]
    assert len(np.unique(plain)) < 256  # unmasked, the same test fails
