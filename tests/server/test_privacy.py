"""Rounds with ``PrivateMean``: the sum with noise, the ledger, and values that are neither reported nor supported."""

import hashlib
import math
import os
import signal

import numpy as np
import pytest

from fedcore import Compute, Limits, Model, Server, Storage, Update, combines
from fedcore.algorithms import REGISTRY, optimizers
from fedcore.algorithms.rates import Exponential
from fedcore.cli import main
from fedcore.errors import CheckpointError, DivergedError, RangeError, RoundError
from fedcore.rules import CapExamples, Mean, Median, PrivateMean
from fedcore.rules.private import Ledger
from fedcore.server.folder import Journal, open_updates
from fedcore.server.report import ROUND
from fedcore.store.inspect import state_of
from tests import oracle
from tests.kills import calls_of, die_at, killed

n, N = 5, 4
RULE = PrivateMean(clip=2.0, noise=1.5, expected=4, rate=0.5, rounds=10)
UPDATES = np.float32([[1, 0, 0, 0, 0], [3, 4, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, -20, 0]])
CLIPPED = [[1, 0, 0, 0, 0], [1.2, 1.6, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, -2, 0]]


def server_of(rule=RULE, x=None, method="FedAvg", **options):
    x = np.zeros(n, np.float32) if x is None else x
    return Server(x, method, clients=options.pop("clients", N), lr=0.1, aggregation=[rule], **options)


def updates(rows=UPDATES, **more):
    """Updates h = x - y from x = 0, as differences y - x, with very unequal claims."""
    return [Update(i, -row, 1 + i, kind="delta", examples=10 ** (i % 8), **more) for i, row in enumerate(rows)]


def noise_of(rule, round, clip, dimension=n):
    """The noise of a seeded round, by the oracle."""
    z = rule.noise if rule.quantile is None else (rule.noise**-2 - (2 * rule.count_noise) ** -2) ** -0.5
    grid = 2.0 ** (math.floor(math.log2(z * clip)) - 24)
    sigma = math.ceil(z * (clip * (1 + 2**-12) + math.sqrt(dimension) * grid) / grid)
    noise, key = np.zeros(dimension), hashlib.blake2b(f"{rule.seed} {round} sum".encode(), digest_size=32).digest()
    oracle.add_discrete_gaussian(noise, grid, sigma, key, out=noise)
    return noise


@pytest.mark.parametrize("accumulator", ["float32", "exact"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_round_by_hand(accumulator, one_by_one):
    rule = PrivateMean(2.0, 0.5, 8, seed=3)
    server = server_of(rule, compute=Compute(accumulator=accumulator))
    assert abs(noise_of(rule, 0, 2.0)).max() > 0.1
    for round in range(2):
        before = server.x
        if one_by_one:
            with server.open_round() as opened:
                for update in updates():
                    assert opened.add_batch([update]) == [True]
        else:
            server.round(updates())
        due = before - (np.sum(CLIPPED, axis=0) + noise_of(rule, round, 2.0)) / 8  # m = 8, though 4 took part
        np.testing.assert_allclose(server.x, due, rtol=0, atol=1e-6)


def test_the_noise_is_new_in_each_round_and_run():
    seen = []
    for _ in range(2):
        server = server_of()
        for _ in range(2):
            before = server.x
            server.round(updates())
            seen.append(tuple(server.x - before))
    assert len(set(seen)) == 4


def test_the_deviation_of_the_noise():
    x = np.zeros(100_000, np.float32)
    server = server_of(PrivateMean(3.0, 2.0, 10), x)
    server.round([Update(0, x, 1)])
    assert server.x.std() == pytest.approx(3.0 * 2.0 / 10, rel=0.01)


def test_an_empty_round_moves_x_by_noise():
    rule = PrivateMean(2.0, 1.0, 4, seed=1)
    server = server_of(rule)
    assert server.round([]).accepted == ()
    np.testing.assert_allclose(server.x, -noise_of(rule, 0, 2.0) / 4, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("FedProx", {}),
        ("FedAvgM", {"server_lr": 0.5}),
        ("FedAvg", {"optimizer": optimizers.Adam(eta=0.1)}),
        ("FedAvg", {"clients": dict(enumerate([5, 6, 7, 8]))}),
    ],
)
def test_methods_that_take_a_mean(method, options):
    server = server_of(method=method, **options)
    assert server.round(updates()).privacy == {"rounds": 1, "of": 10, "rate": 0.5, "noise": 1.5, "clip": 2.0}
    assert (server.x != 0).all()


def test_the_numbers_of_a_client_have_no_effect():
    rule, models = PrivateMean(2.0, 0.5, 8, seed=3), []
    for claims in ({}, {"steps": 9}, {"examples": 1e6}, {"weight": 50}):
        server = server_of(rule)
        server.round([update._replace(**claims) for update in updates()])
        models.append(server.x.tolist())
    assert models == models[:1] * 4
    with pytest.raises(RangeError, match=r"^count"), server.open_round() as round:
        round.add(0, np.zeros(n, np.float32), steps=1, count=2)


PARTS = Model(
    {"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32), "c": np.zeros(2, np.float32)}, {"A": "a", "C": "c"}
)


def test_partial_updates_are_clipped_whole_and_all_groups_have_the_noise_of_one_vector(tmp_path, capsys):
    """Also a group that no client sends, in each round: whether clients took part must not be seen in it."""
    rule = PrivateMean(2.0, 0.5, 8, seed=3)
    server = server_of(rule, PARTS, clients=3, storage=tmp_path / "s")
    for round in range(3):
        before = server.x.copy()
        with server.open_round() as opened:
            assert opened.add(0, {"a": np.float32([-1, 0])}, steps=1, kind="delta", examples=9)
            assert opened.add(1, {"a": np.float32([-3, 0]), "b": np.float32([-4])}, steps=1, kind="delta")
            assert opened.add(2, {"b": np.float32([-2])}, steps=1, kind="delta")
        assert opened.report.privacy["rounds"] == round + 1
        assert {name: one.accepted for name, one in opened.report.groups.items()} == {
            "A": (0, 1),
            "C": (),
            "rest": (1, 2),
        }
        due = before - (np.array([2.2, 0, 3.6, 0, 0]) + noise_of(rule, round, 2.0)) / 8
        np.testing.assert_allclose(server.x, due, rtol=0, atol=1e-6)
        server.close()
        server = Server.load(tmp_path / "s")
    assert [group.snapshot.ledger for group in server._backend.states] == [Ledger(((3, 1.0, 0.5),))] * 4
    server.close()
    with pytest.raises(SystemExit):
        main(["store", "undo", str(tmp_path / "s")])
    assert "private round" in capsys.readouterr().err


def test_whether_a_group_had_an_update_shows_only_in_its_sum():
    """An update of zeros and none lead to the same models in all later rounds, whatever the rates count."""
    models = []
    for sent in ({"c": np.zeros(2, np.float32)}, {"a": np.zeros(2, np.float32)}):
        rule, rates = PrivateMean(2.0, 0.5, 8, seed=3), {"server_lr": Exponential(0.5, 0.5)}
        server = server_of(rule, PARTS, **rates, optimizer=optimizers.Adam(corrected_from=1))
        for round in range(3):
            server.round([Update(0, sent, 1, kind="delta")] if round == 0 else [])
        models.append(server.x.tolist())
    assert models[0] == models[1]


# Adaptive clipping.


def test_the_clip_follows_the_quantile():
    rule = PrivateMean(2.0, 0.5, 4, quantile=0.5, clip_rate=0.4, count_noise=1.0, seed=3)
    server = server_of(rule)
    report = server.round(updates())
    key, count = hashlib.blake2b(b"3 0 count", digest_size=32).digest(), np.zeros(1)
    oracle.add_discrete_gaussian(count, 2.0**-24, 2**24, key, out=count)
    clip = 2.0 * math.exp(-0.4 * ((2 + count[0]) / 4 - 0.5))  # 2 of 4 are not clipped
    assert report.privacy["clip"] == pytest.approx(clip, rel=1e-12)
    z = (0.5**-2 - 2.0**-2) ** -0.5
    np.testing.assert_allclose(server.x, -(np.sum(CLIPPED, axis=0) + noise_of(rule, 0, 2.0)) / 4, atol=1e-6)
    assert abs(noise_of(rule, 0, 2.0)).max() < 5 * 2 * z
    before = server.x
    server.round(updates()[3:])
    due = np.array([0, 0, 0, -clip, 0]) + noise_of(rule, 1, clip)
    np.testing.assert_allclose(server.x, before - due / 4, atol=1e-6)


def test_the_clip_reaches_the_quantile():
    rng, rule = np.random.default_rng(0), PrivateMean(20.0, 0.5, 200, quantile=0.7, clip_rate=1.0, count_noise=5.0)
    server = server_of(rule, clients=200)
    norms = rng.uniform(0, 10, 200)
    for _ in range(20):
        rows = np.zeros((200, n), np.float32)
        rows[:, 0] = norms
        report = server.round(updates(rows))
    assert report.privacy["clip"] == pytest.approx(np.quantile(norms, 0.7), rel=0.1)


@pytest.mark.parametrize(("factor", "due"), [(1.0, 1e-30), (0.5, 1e30)])
def test_the_clip_stays_where_noise_can_be_drawn(factor, due):
    rule, ledger = PrivateMean(1.0, 1.0, 1000, quantile=0.5, clip_rate=1e4), Ledger()
    for _ in range(2):
        ledger = rule.at(ledger).add_noise(np.zeros(2), np.full(1000, factor), ledger, 0)
        assert ledger.clip == due


# The report.


def test_a_report_has_nothing_of_single_clients(tmp_path):
    server = server_of(storage=Storage(tmp_path / "s", audit=True))
    report = server.round(updates())
    assert [len(report.norms), len(report.weights), len(report.factors)] == [0, 0, 0]
    assert report.diversity is report.correction_norm is None
    (document,) = server.audit_log()
    assert all(entry.keys() == {"client", "start"} for entry in document["updates"])


def test_reproducible_noise_is_stated_and_has_no_budget():
    server = server_of(PrivateMean(1.0, 1.0, 4, seed=0))
    assert "not private" in server.round(updates()).privacy["warning"]
    with pytest.raises(RangeError, match=r"^privacy"):
        _ = server.privacy
    with pytest.raises(RangeError, match=r"^seed"):
        PrivateMean(1.0, 1.0, 4, rounds=3, seed=0)


def test_a_step_that_diverges_names_no_client():
    server = server_of(PrivateMean(1e30, 1e3, 1e-9))
    with pytest.raises(DivergedError) as raised:
        server.round(updates())
    assert "client" not in str(raised.value)


# The ledger.


def test_a_spent_budget_opens_no_round(tmp_path):
    rule = PrivateMean(1.0, 1.0, 4, rounds=2)
    server = server_of(rule, storage=tmp_path / "s")
    server.round(updates())
    with server.open_round() as round:
        round.abort()
    server.close()
    with Server.load(tmp_path / "s") as server:
        assert server.privacy.entries == ((1, 1.0, 1.0),)
        server.round(updates())
        for _ in range(2):
            with pytest.raises(RoundError, match="budget of 2 rounds"):
                server.open_round()
        x = server.x
    with Server.load(tmp_path / "s") as server:
        with pytest.raises(RoundError, match="budget of 2 rounds"):
            server.round(updates())
        np.testing.assert_array_equal(server.x, x)
        server.change(aggregation=[PrivateMean(1.0, 3.0, 4, rounds=3)])
        report = server.round(updates())
        assert server.privacy.entries == ((2, 1.0, 1.0), (1, 1.0, 3.0))
        assert report.privacy["rounds"] == 3


def test_an_adapted_clip_is_resumed(tmp_path):
    server = server_of(PrivateMean(2.0, 0.5, 4, quantile=0.5), storage=tmp_path / "s")
    clip = server.round(updates()).privacy["clip"]
    server.close()
    with Server.load(tmp_path / "s") as server:
        assert server.privacy.clip == clip != 2.0


def test_a_folder_whose_ledger_lacks_rounds_is_not_loaded(tmp_path):
    server = server_of(storage=tmp_path / "s")
    server.round(updates())
    backend = server._backend
    state = backend.to_state(backend.snapshot)
    state["numbers"].pop("privacy")
    backend.store.commit(1, backend._vectors(backend.snapshot), state)
    server.close()
    with pytest.raises(CheckpointError, match="privacy"):
        Server.load(tmp_path / "s")


@pytest.mark.parametrize("x", [None, PARTS], ids=["whole", "partial"])
@pytest.mark.parametrize("storage", [{}, {"audit": True}, {"journal": True, "audit": True}])
@pytest.mark.parametrize("kills", [12, pytest.param(800, marks=pytest.mark.endurance)])
def test_a_killed_server_forgets_no_spent_round_and_releases_none_twice(folder_in_memory, kills, storage, x):
    """A child prints each round's number and x once it has them; the folder has them too after any kill.

    Half of the children die at a call into the system: while they load the folder, in the first round or the second.
    The others die of an alarm, a fourth of all after their first round.
    """
    folder, rng = folder_in_memory / "s", np.random.default_rng(0)
    server_of(PrivateMean(1.0, 1.0, 4, rounds=10**6), x, storage=Storage(folder, **storage)).close()
    rows = rng.random((N, n), np.float32)

    def go_on(writing, rounds=10**6, alarm=0.0):
        with Server.load(folder) as server:
            for _ in range(rounds):
                report = server.round(updates(rows))
                os.write(writing, f"{report.round} {server.x.tobytes().hex()}\n".encode())
                if alarm:
                    signal.setitimer(signal.ITIMER_REAL, alarm)
                    alarm = 0.0

    with open(os.devnull, "wb") as nowhere:
        calls = rng.permutation(calls_of(lambda: go_on(nowhere.fileno(), 2)))
    released = dict.fromkeys(range(2))
    for kill in range(kills):
        (reading, writing), chance = os.pipe(), rng.random()

        def dies(writing=writing, kill=kill, chance=chance):
            if kill % 2:
                die_at(1 + calls[kill // 2 % len(calls)], after=chance < 0.5)
            elif kill % 4:
                signal.setitimer(signal.ITIMER_REAL, 0.01 + chance / 10)
            go_on(writing, alarm=(1 + chance) / 99 if kill % 4 == 0 else 0.0)

        assert killed(dies)
        os.close(writing)
        with os.fdopen(reading) as lines:
            for line in lines:
                round, x = line.split()
                assert int(round) not in released
                released[int(round)] = x
        with Server.load(folder) as server:
            spent, x = server.privacy.rounds, server.x.tobytes().hex()
            assert (spent, server.verify()) == (server.round_number, [])
            assert released.setdefault(spent - 1, x) in (x, None)
            assert released.keys() == set(range(spent))
            documents = [one for one in server.audit_log() if one["what"] == ROUND] if "audit" in storage else ()
            assert len(documents) == spent * bool(storage)
            assert all(one["x_after"] == server.layout.digest(server.tensors()) for one in documents[-1:])
        if not open_updates(folder, state_of(folder)):
            left = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
            assert not any((-row).tobytes() in left for row in rows)
    assert len(released) > kills // 4


def test_other_methods_are_refused():
    assert {name for name in REGISTRY.own if combines(name, "PrivateMean")} == {"FedAvg", "FedProx"}
    assert [row.instead for row in combines("FedAvgM", "PrivateMean").conflicts] == ["pass server_lr"]


def test_chains_and_changes():
    for chain in ([CapExamples(2), RULE], [RULE, Mean()]):
        with pytest.raises(RangeError, match="aggregation"):
            Server(np.zeros(n, np.float32), clients=2, lr=0.1, aggregation=chain)
    server = server_of()
    for chain in ([Mean()], [Median()], [PrivateMean(1.0, 1.0, 4, seed=1)], None):
        with pytest.raises(RangeError, match="all rounds or in none"):
            server.change(aggregation=chain)
    with pytest.raises(RangeError, match="all rounds or in none"):
        Server(np.zeros(n, np.float32), clients=2, lr=0.1).change(aggregation=[RULE])


def test_a_limit_of_one_update_stays_possible():
    server = server_of(limits=Limits(max_norm=10.0))
    assert [client for client, _ in server.round(updates()).rejected] == [3]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"clip": 0}, "clip"),
        ({"noise": -1}, "noise"),
        ({"noise": 1001}, "noise"),
        ({"expected": 0}, "expected"),
        *((dict.fromkeys([name], value), name) for name in ("clip", "expected") for value in (9e-31, 1.1e30)),
        ({"noise": 9e-31}, "noise"),
        ({"quantile": 0.5, "count_noise": 1.1e30}, "count_noise"),
        ({"rate": 1.5}, "rate"),
        ({"rounds": 0}, "rounds"),
        ({"quantile": 1}, "quantile"),
        ({"quantile": 0.5, "count_noise": 0.5}, "count_noise"),
        ({"count_noise": 2.0}, "count_noise"),
    ],
)
def test_wrong_options(options, name):
    with pytest.raises(RangeError, match=f"^{name}"):
        PrivateMean(**({"clip": 1.0, "noise": 1.0, "expected": 4.0} | options))


def test_a_kill_between_the_commit_and_the_journal_leaves_no_update_after_a_load(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).random((N, n), np.float32)

    def act():
        server = server_of(storage=Storage(tmp_path / "s", journal=True))
        monkeypatch.setattr(Journal, "retain", lambda _, known: known == () and os.kill(os.getpid(), signal.SIGKILL))
        server.round(updates(rows))

    assert killed(act)
    journal = tmp_path / "s" / "round" / "rows.slots"
    assert (-rows[0]).tobytes() in journal.read_bytes()
    with Server.load(tmp_path / "s") as server:
        assert server.round_number == 1
    assert (-rows[0]).tobytes() not in journal.read_bytes()


def test_the_default_noise_of_the_count():
    for expected, due in ((100, 5.0), (10, 1.0)):
        assert PrivateMean(1.0, 1.0, expected, quantile=0.5).count_noise == due


def test_the_most_updates_of_a_private_round():
    rule = PrivateMean(1.0, 1.0, 10, seed=0)
    assert rule.add_noise(np.zeros(2), np.ones(2**19), Ledger(), 0).rounds == 1
    with pytest.raises(RangeError, match="at most 524288, got 524289"):
        rule.add_noise(np.zeros(2), np.ones(2**19 + 1), Ledger(), 0)


def test_without_a_number_of_rounds_epsilon_has_no_bound():
    with pytest.raises(RangeError, match=r"^rounds=None"):
        PrivateMean(1.0, 1.0, 10).epsilon(1e-5)
