"""Masked sums in a server's rounds: the encoding, its bounds, and the step."""

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cryptography")

from fedcore import Compute, Limits, Server, algorithms
from fedcore.algorithms import FedNova
from fedcore.errors import ArrayError, RangeError, RoundError
from fedcore.secure import Encoding, SecureServer
from fedcore.secure.encoding import equal_parts
from tests.secure.sessions import Session, encoding_of

N, COUNT = 40, 6
X = np.linspace(-1, 1, N, dtype=np.float32)
EXACT = Compute(accumulator="exact")
LIMITS = Limits(max_norm=50.0, max_examples=500, max_steps=16)


def server_of(algorithm="FedAvg", model=X, clients=COUNT, limits=LIMITS, compute=EXACT, **options):
    return Server(model, algorithm, clients=clients, lr=0.125, limits=limits, compute=compute, **options)


def updates(seed, steps=None):
    """Return (y, steps, examples) of each client; the numbers are short, so that no float operation rounds."""
    rng = np.random.default_rng(seed)
    x = np.round(X * 64) / 64
    ys = (x + rng.integers(-500, 500, (COUNT, N)) / 1024).astype(np.float32)
    ks = rng.choice([1, 2, 4, 8], COUNT) if steps is None else [steps] * COUNT
    return x.astype(np.float32), [(y, int(k), 10 + 7 * i) for i, (y, k) in enumerate(zip(ys, ks, strict=True))]


def masked(server, sent, absent=()):
    """Run a masked sum in place of ``Session``'s random words; return its ``SecureServer``."""
    session = Session(COUNT)
    encoding = Encoding.of(server, clients=COUNT)
    session.server = SecureServer(range(COUNT), encoding)
    broadcast = server.broadcast(range(COUNT))
    x, work = broadcast.x, broadcast.of(0) if broadcast.of(0).vectors() else None
    words = [encoding.encode(x, y, steps=k, examples=n, work=work) for y, k, n in sent]
    session.words = np.array(words).view(np.int64)
    session.until("masked").phase(absent)
    session.phase()
    return session.server


def step(server, secure):
    with server.open_round() as round:
        round.add_partial_sum(secure.partial_sum(server), "masked sum")
    return round.report


@pytest.mark.parametrize("absent", [(), (4,)])
@pytest.mark.parametrize(
    ("algorithm", "steps", "options"),
    [
        ("FedAvg", None, {}),
        (algorithms.FedAvg("uniform"), None, {}),
        ("FedAvg", 4, {"server_lr": 0.5}),
        ("FedProx", None, {}),
        ("LocalDescent", None, {}),
        ("FedAvgM", 4, {}),
        ("FedNova", 4, {}),
    ],
)
def test_a_masked_round_has_the_bits_of_a_plain_round(algorithm, steps, options, absent):
    x, sent = updates(3, steps)
    model = {"w": x[:-3], "running_mean": x[-3:]}
    hidden, plain = (server_of(algorithm, model, **options) for _ in range(2))
    report = step(hidden, masked(hidden, sent, absent))
    with plain.open_round() as round:
        for i, (y, k, n) in enumerate(sent):
            if i not in absent:
                round.add(i, y, steps=k, examples=n)
    assert report.rejected == ()
    assert report.accepted == tuple(i for i in range(COUNT) if i not in absent)
    assert hidden.x.tobytes() == plain.x.tobytes()
    assert (hidden.x != x).all()
    assert report.weights.sum() == round.report.weights.sum()
    assert report.diversity == pytest.approx(1, rel=1e-6)  # the server knows only the mean


@pytest.mark.parametrize("algorithm", ["FedNova", "FedAvgM", "FedAvgMVR"])
def test_different_steps_need_only_their_sums(algorithm):
    """gamma is a mean of eta K_i, so it has the same value up to float64's rounding, and x up to a unit."""
    x, sent = updates(4)
    hidden, plain = server_of(algorithm, x), server_of(algorithm, x)
    if algorithm != "FedNova":
        sent = [(y, k, 1) for y, k, _ in sent]
    gamma = step(hidden, masked(hidden, sent)).gamma
    with plain.open_round() as round:
        for i, (y, k, n) in enumerate(sent):
            round.add(i, y, steps=k, examples=n)
    assert gamma == pytest.approx(round.report.gamma, rel=1e-14)
    np.testing.assert_allclose(hidden.x, plain.x, rtol=3e-7, atol=1e-7)


def test_examples_and_steps_have_their_sums_as_integers():
    rng = np.random.default_rng(0)
    for _ in range(200):
        k = int(rng.integers(2, 9))
        n = rng.integers(1, rng.choice([2, 30, 10**6]), k, endpoint=True)
        steps = rng.integers(1, rng.choice([2, 50]), k, endpoint=True)
        parts, own = equal_parts(int(n.sum()), int((n * steps).sum()), k)
        assert (parts.sum(), (parts * own).sum()) == (n.sum(), (n * steps).sum())
        assert parts.min() >= 1
        assert own.max() - own.min() <= 1
        np.testing.assert_array_equal(np.concatenate([parts, own]) % 1, 0)


def test_the_sum_of_the_largest_updates_does_not_overflow():
    for clients, max_norm, max_examples in ((2, 1.0, 1), (7, 3.75, 999), (1000, 1e4, 10**6)):
        encoding = replace(encoding_of(2, 1), clients=clients, max_norm=max_norm, max_examples=max_examples, model="")
        words = encoding.encode(np.float32([max_norm]), np.zeros(1, np.float32), steps=10, examples=max_examples)
        assert 2**59 < int(words[0]) * clients < 2**62 or encoding.exponent == 60
        assert int(words[2]) * clients < 2**62
    assert encoding.encode(np.zeros(1, np.float32), np.float32([1]), steps=1, examples=3).view(np.int64).tolist() == [
        -3 * 2**encoding.exponent,
        3,
        3,
    ]


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"y": np.full(5, np.nan, np.float32)}, RangeError, "norm"),
        ({"y": np.full(5, 1e20, np.float32)}, RangeError, "norm"),
        ({"y": np.zeros(4, np.float32)}, ArrayError, r"y: expected float32\[5\]"),
        ({"steps": 11}, RangeError, "steps"),
        ({"examples": 1001}, RangeError, "examples"),
        ({"examples": 2.5}, RangeError, "examples"),
    ],
)
def test_a_client_refuses_to_encode_what_the_limits_forbid(change, error, reason):
    good = {"x": np.zeros(5, np.float32), "y": np.ones(5, np.float32), "steps": 3, "examples": 8}
    encoding_of(3).encode(**good)
    with pytest.raises(error, match=reason) as raised, np.errstate(all="ignore"):
        encoding_of(3).encode(**good | change)
    # A framework may send the text to the server, which must see only its own limits.
    assert error is ArrayError or {*re.findall(r"\d+", f"{raised.value}")} <= {"1", "10", "100", "1000"}


def test_a_client_trains_from_what_the_server_announced_to_all():
    for algorithm, config in (("FedAvg", None), ("FedAvg", {"epochs": 2, "names": ("a", b"b")}), ("FedAvgM", None)):
        server = server_of(algorithm)
        broadcast = server.broadcast(range(COUNT))
        work = broadcast.of(0) if algorithm == "FedAvgM" else config
        encoding, x = Encoding.of(server, clients=COUNT, work=config), broadcast.x
        encoding.encode(x, x, steps=1, work=work)
        others = [{"epochs": 1, "names": ("a", b"b")}, {"epochs": 2.0, "names": ("a", b"b")}]
        others += [replace(broadcast.of(0), lr=1e-9), replace(broadcast.of(0), offset=np.ones(N, np.float32))]
        for other in [None] * (work is not None) + others:
            with pytest.raises(ArrayError, match="work: not what the server announced"):
                encoding.encode(x, x, steps=1, work=other)
        with pytest.raises(ArrayError, match="x: not what the server announced"):
            encoding.encode(x + 1, x, steps=1, work=work)
    assert Encoding.of(server, clients=COUNT, x=x + 1).model != encoding.model


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"algorithm": "FedExP"}, "norms, steps or rates of single clients"),
        ({"algorithm": FedNova(momentum=0.5)}, "norms, steps or rates of single clients"),
        ({"limits": Limits()}, "max_norm"),
        ({"limits": Limits(max_norm=1.0)}, "too wide for the 64-bit sum of 6 clients"),
        ({"clients": dict.fromkeys(range(6), 10)}, "known sizes cannot be checked"),
    ],
)
def test_what_masks_exclude_is_refused_with_the_reason(options, reason):
    with pytest.raises(RangeError, match=reason):
        Encoding.of(server_of(**options), clients=6)


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [(N, 0, "0 examples"), (N + 1, 0, "0 steps"), (N, 5000, "5000 examples"), (0, 1 << 60, "the norm of the mean")],
)
def test_the_sender_of_wrong_words_is_unknown(at, value, reason):
    x, sent = updates(1)
    server = server_of(model=x)
    secure = masked(server, sent)
    secure.total[at] = value
    with pytest.raises(RangeError, match=f"{reason}.*masks hide its sender: to find it"):
        secure.partial_sum(server)


def test_a_total_belongs_to_one_round():
    x, sent = updates(1)
    server = server_of("FedNova", model=x)
    secure = masked(server, sent)
    with pytest.raises(RoundError, match="not open"):
        SecureServer(range(2), secure.encoding).partial_sum(server)
    other = server_of("FedNova", model=x, limits=replace(LIMITS, max_norm=40.0))
    with pytest.raises(RangeError, match="another round or server"):
        secure.partial_sum(other)
    partial = secure.partial_sum(server)
    step(server, secure)
    with server.open_round() as round:
        round.add_partial_sum(partial, "masked sum")
        assert "the open round is 1" in round.rejected[0][1]
        round.abort()


def test_a_sum_counts_in_its_own_round_only():
    server = server_of()
    form, more = (Encoding.of(server, clients=count) for count in (COUNT, COUNT - 1))
    with pytest.raises(RangeError, match=f"{COUNT} ids, but the encoding is for {COUNT - 1}"):
        SecureServer(range(COUNT), more)
    x = server.x.copy()
    total = np.sum([form.encode(x, x + 1, steps=1).view(np.int64) for _ in range(COUNT)], axis=0)
    with server.open_round() as round:
        round.add_partial_sum(form.partial_sum(server, total, range(COUNT)), "masked sum")
    with pytest.raises(RangeError, match="another round"):
        form.partial_sum(server, total, range(COUNT))
