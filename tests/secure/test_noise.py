"""Noise under masks: its law in the sum, also after dropouts, and the private rounds of the server."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cryptography")

from fedcore import Compute, RoundPolicy, Server
from fedcore.errors import RangeError, RoundError
from fedcore.rules import PrivateMean
from fedcore.secure import Encoding, SecureClient, SecureServer, encoding
from tests.secure.sessions import Session

N, COUNT, FEWEST = 20, 6, 4
RULE = PrivateMean(clip=2.0, noise=1.5, expected=4.0, rounds=10)
EXACT = Compute(accumulator="exact")


def server_of(rule=RULE, n=N, min_clients=FEWEST, compute=EXACT, **options):
    policy = RoundPolicy(min_clients=min_clients)
    return Server(
        np.zeros(n, np.float32), clients=COUNT, lr=0.1, aggregation=[rule], compute=compute, policy=policy, **options
    )


def signing(session, i, **options):
    """Return client i of a session with identities."""
    return SecureClient(identity=bytes([i + 1] * 32), peers=session.identities.values(), **options)


def words_of(encoding, y, **work):
    return encoding.encode(np.zeros(encoding.n, np.float32), y, **{"steps": 3} | work).view(np.int64)


@pytest.fixture
def fixed_keys(monkeypatch):
    keys = itertools.count()
    monkeypatch.setattr(encoding.os, "urandom", lambda size: next(keys).to_bytes(size, "little"))


@pytest.mark.parametrize(("colluding", "left"), [(1, 4), (1, 6), (0, 4), (3, 5)])
def test_the_noise_of_a_sum_is_normal_and_never_less_than_that_of_the_rule(fixed_keys, colluding, left):
    """The noise of ``left`` clients, without that of the colluding ones, has at least the deviation z C."""
    n, z, clip = 40_000, RULE.noise, RULE.clip
    form = Encoding.of(server_of(n=n), clients=COUNT, colluding=colluding)
    total = np.sum([words_of(form, np.zeros(n, np.float32)) for _ in range(left - colluding)], axis=0)
    noise = np.sort(total[:n] * 2.0**-form.exponent)
    deviation = z * clip * math.sqrt((left - colluding) / (FEWEST - colluding))
    assert np.sqrt(np.mean(noise**2)) == pytest.approx(deviation, rel=4 / math.sqrt(2 * n))
    assert form.sigma**2 * (FEWEST - colluding) >= (z * (clip * 2**form.exponent + math.sqrt(n))) ** 2
    normal = [0.5 * math.erfc(-value / deviation / math.sqrt(2)) for value in noise]
    ranks = np.arange(n + 1) / n
    assert max(np.max(ranks[1:] - normal), np.max(normal - ranks[:-1])) * math.sqrt(n) < 1.95  # p = .001
    steps = np.diff(np.sort(total[:n] % 64))
    assert steps.max() == 1  # on the grid, no residue is missing


def test_a_client_clips_its_update_and_hides_its_numbers(monkeypatch):
    monkeypatch.setattr(encoding.kernels, "add_discrete_gaussian", lambda *_, out: np.rint(out, out=out))
    form = Encoding.of(server_of(), clients=COUNT)
    for length in (1.0, 2.0, 50.0):
        y = -np.full(N, length / math.sqrt(N), np.float32)
        words = words_of(form, y, examples=77)
        assert np.linalg.norm(words[:N] * 2.0**-form.exponent) == pytest.approx(min(length, 2.0), rel=1e-6)
        assert words[N:].tolist() == [1, 1]
    for bad in (np.nan, np.inf):
        with pytest.raises(RangeError, match="norm"):
            words_of(form, np.full(N, bad, np.float32))


@pytest.mark.parametrize("absent", [set(), {4}])
def test_a_masked_private_round(absent):
    server = server_of()
    form = Encoding.of(server, clients=COUNT)
    session = Session(COUNT, is_signed=True)
    session.server = secure = SecureServer(range(COUNT), form, min_clients=FEWEST, identities=session.identities)
    session.clients = {i: signing(session, i, noise=1.5) for i in range(COUNT)}
    session.words = np.array([words_of(form, np.full(N, i, np.float32)) for i in range(COUNT)])
    session.until("masked").phase(absent)
    session.phase()
    session.phase()
    with server.open_round() as round:
        round.add_partial_sum(secure.partial_sum(server), "masked sum")
    report = round.report
    assert report.rejected == ()
    assert len(report.accepted) == COUNT - len(absent)
    assert server.privacy.entries == ((1, 1.0, 1.5),)  # for the accountant
    assert report.privacy == {"rounds": 1, "of": 10, "rate": 1.0, "noise": 1.5, "clip": 2.0}
    assert len(report.norms) == len(report.weights) == 0
    np.testing.assert_allclose(server.x, secure.total[:N] * -(2.0**-form.exponent) / 4, rtol=1e-6)


def test_a_spent_budget_opens_no_sum():
    server = server_of(replace(RULE, rounds=1))
    form = Encoding.of(server, clients=COUNT)
    total = np.sum([words_of(form, np.zeros(N, np.float32)) for _ in range(FEWEST)], axis=0)
    with server.open_round() as round:
        round.add_partial_sum(form.partial_sum(server, total, range(FEWEST)), "masked sum")
    with pytest.raises(RoundError, match="the budget of 1 rounds is spent"):
        Encoding.of(server, clients=COUNT)


def test_a_private_round_rejects_sums_with_less_noise():
    server = server_of()
    form = Encoding.of(server, clients=COUNT)
    total = np.sum([words_of(form, np.zeros(N, np.float32)) for _ in range(FEWEST)], axis=0)
    partial = form.partial_sum(server, total, range(FEWEST))
    with server.open_round() as round:
        round.add_partial_sum(replace(partial, noise=1.4), "masked sum")
        with pytest.raises(RangeError, match="partial sum"):
            round.add_partial_sum(replace(partial, noise=0.0), "edge")
        with pytest.raises(RangeError, match="partial sum"):
            round.add_partial_sum(partial.to_bytes(), "edge")
        assert [reason.partition("=")[0] for _, reason in round.rejected] == ["noise"]
        round.add_partial_sum(partial, "masked sum")
    assert len(round.report.accepted) == FEWEST


def test_the_sum_of_wrong_words_is_rejected():
    server = server_of()
    form = Encoding.of(server, clients=COUNT)
    total = np.sum([words_of(form, np.full(N, 9, np.float32)) for _ in range(COUNT)], axis=0)
    form.partial_sum(server, total, range(COUNT))
    total[0] += int(100 * RULE.clip * 2**form.exponent)
    with pytest.raises(RangeError, match="masks hide its sender"):
        form.partial_sum(server, total, range(COUNT))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_clients": 1, "colluding": 2}, "^colluding=2: "),
        ({"rule": replace(RULE, clip=1e-30)}, "grid of the noise"),
        ({"rule": replace(RULE, clip=1e30)}, "too wide"),
    ],
)
def test_what_noise_under_masks_excludes(options, reason):
    colluding = options.pop("colluding", 1)
    with pytest.raises(RangeError, match=reason):
        Encoding.of(server_of(**options), clients=COUNT, colluding=colluding)


def test_a_server_cannot_ask_for_numbers_without_noise():
    form = Encoding.of(server_of(), clients=COUNT).to_state()
    for change in ({"weights": "examples", "max_examples": 9}, {"has_changes": True}, {"parameters": N - 1}):
        with pytest.raises(RangeError, match="noise: needs"):
            Encoding.read(form | change)


def test_server_and_clients_agree_on_the_noise():
    form = Encoding.of(server_of(), clients=COUNT)
    with pytest.raises(RangeError, match="min_clients=3: must be 4"):  # one of four clients may collude
        SecureServer(range(COUNT), form, min_clients=3)
    session = Session(COUNT, is_signed=True)
    messages = SecureServer(range(COUNT), form, min_clients=4, identities=session.identities).messages
    strict = signing(session, 0, noise=1.6)
    for client in (strict, SecureClient.from_state(strict.to_state())):
        with pytest.raises(RoundError, match=r"noise=1\.6"):
            client.answer(messages[0])
    signing(session, 0, noise=1.5).answer(messages[0])
    with pytest.raises(RangeError, match="min_clients=5: a sum of 4"):
        signing(session, 0).answer(
            messages[0].replace(b'"honest": 3, "min_clients": 4', b'"honest": 3, "min_clients": 5')
        )


def test_a_client_asks_for_noise_only_among_identities():
    """Otherwise, a server could list survivors that do not exist, and so thin the noise of the others."""
    form = Encoding.of(server_of(), clients=COUNT)
    messages = SecureServer(range(COUNT), form, min_clients=4).messages
    with pytest.raises(RoundError, match="pass identity and peers"):
        SecureClient(noise=1.5).answer(messages[0])
    SecureClient().answer(messages[0])
