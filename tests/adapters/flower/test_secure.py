"""Masked sums in Flower: the models of unmasked rounds, with nodes that drop out, and nodes that insist on masks."""

from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcore import Compute, Limits, RoundPolicy, Totals
from fedcore.adapters import flower
from fedcore.adapters.flower import Task, secure_mod
from fedcore.adapters.flower.secure import SECURE
from fedcore.errors import RangeError, RoundError
from fedcore.rules import PrivateMean
from fedcore.secure import Encoding, identity_of
from fedcore.secure.messages import MASKED
from tests.adapters.flower.local_grid import LocalGrid
from tests.secure.sessions import LIES, Lie, spoiled_words

X = {"w": np.arange(12, dtype=np.float32).reshape(3, 4) / 8, "running_mean": np.ones(2, np.float32)}
X |= {"num_batches_tracked": np.array(3)}
NODES = [2**64 - 5, 2**63 + 11, 17, 2**40, 123456789]
OPTIONS = dict(
    lr=0.5,
    limits=Limits(max_norm=100.0, max_examples=1000, max_steps=8),
    compute=Compute(accumulator="exact"),
    fraction_evaluate=0.0,
    min_available_nodes=1,
    min_train_nodes=1,
    poll=0.001,
)


def app_of(node, mods=(), *, fails=(), trained=None):
    """Return a ClientApp whose updates are short numbers, so that no float operation rounds in the first round."""
    fails = {*fails}
    app, number = ClientApp(mods=list(mods)), NODES.index(node)

    @app.train()
    def _(message, context):
        task = Task.of(message)
        if node in fails:
            fails.remove(node)  # it fails once
            raise RuntimeError("no answer")
        if trained is not None:
            trained.append(node)
        y = task.x - np.float32([(number + 1) * (i - 5) / 64 for i in range(len(task.x))])
        control = np.full(12, number / 8, np.float32) if task.second else None
        return task.reply(y, steps=2, examples=10 + number, metrics={"loss": 0.5}, control=control)

    @app.evaluate()
    def _(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 3, "loss": 1.0})}), reply_to=message)

    return app


def run(strategy, apps, rounds=1, spoil=None, model=X):
    grid = LocalGrid({node: (app, {}) for node, app in apps.items()}, spoil)
    initial = ArrayRecord({name: Array(x) for name, x in model.items()})
    result = strategy.start(grid, initial, rounds, timeout=1)
    return grid, {name: array.numpy() for name, array in result.arrays.items()}


def signing(**options):
    """Return the apps of nodes with identities, and their public keys."""
    secrets = {node: bytes([i + 1] * 32) for i, node in enumerate(NODES)}
    identities = {node: identity_of(secret) for node, secret in secrets.items()}
    peers = identities.values()
    mods = {node: [secure_mod(identity=secret, peers=peers, **options)] for node, secret in secrets.items()}
    return {node: app_of(node, mods[node]) for node in NODES}, identities


@pytest.mark.parametrize("method", ["FedAvg", "FedNova"])
def test_a_masked_round_gives_the_model_of_an_unmasked_round(method):
    """One node fails in its training."""
    fails = {NODES[1]}
    strategy = getattr(flower, f"Secure{method}")(**OPTIONS)
    apps = {node: app_of(node, [secure_mod()], fails=fails) for node in NODES}
    grid, masked = run(strategy, apps)
    plain = getattr(flower, method)(**OPTIONS)
    _, model = run(plain, {node: app_of(node, fails=fails) for node in NODES})
    assert {name: value.tobytes() for name, value in masked.items()} == {
        name: value.tobytes() for name, value in model.items()
    }
    assert not np.array_equal(masked["w"], X["w"])
    assert set(strategy.reports[0].accepted) == set(NODES) - {NODES[1]}
    assert strategy.reports[0].weights.sum() == plain.reports[0].weights.sum()
    assert [kind for kind, node, _ in grid.sent if node == NODES[0]] == ["train"] * 4
    assert [kind for kind, node, _ in grid.sent if node == NODES[1]] == ["train"] * 3


def test_nodes_keep_the_rows_of_scaffold():
    class SecureSCAFFOLD(flower.SecureStrategy, method=flower.SCAFFOLD.method):
        """With ``placement="client"``."""

    servers = []
    for strategy, mods in ((SecureSCAFFOLD, [secure_mod()]), (flower.SCAFFOLD, [])):
        strategy = strategy(placement="client", **OPTIONS)
        run(strategy, {node: app_of(node, mods) for node in NODES})
        servers.append(strategy.server)
    hidden, plain = (server._backend.snapshot for server in servers)
    assert hidden.x.tobytes() == plain.x.tobytes()
    assert hidden.total.tolist() == plain.total.tolist() == [10 / 8] * 12


def test_nodes_add_noise():
    rule = PrivateMean(clip=3.0, noise=1.0, expected=5.0)
    options = OPTIONS | {"limits": Limits(), "aggregation": [rule], "policy": RoundPolicy(min_clients=4)}
    model = {"w": X["w"]}
    apps, identities = signing(noise=1.0)
    strategy = flower.SecureFedAvg(colluding=2, identities=identities, **options)
    grid, arrays = run(strategy, apps, model=model)
    assert len(grid.sent) == 5 * len(NODES)  # one more than without identities
    (report,) = strategy.reports
    assert report.privacy["rounds"] == 1
    assert set(report.accepted) == set(NODES)
    moved = np.linalg.norm(arrays["w"] - X["w"])
    assert 0 < moved < 3 + 12 * 3  # clipped, and the noise of 5 clients: 3 sqrt(5 / 2) / 5 for each number
    plain = flower.SecureFedAvg(identities=identities, abort_after=None, **OPTIONS)
    run(plain, apps)
    assert "noise=1" in plain.failures[0].reason


def test_replies_hold_nothing_but_messages_of_the_protocol():
    seen = []

    def spoil(node, reply):
        seen.append(reply.content)

    run(flower.SecureFedAvg(**OPTIONS), {node: app_of(node, [secure_mod()]) for node in NODES}, rounds=2, spoil=spoil)
    assert len(seen) == 2 * 4 * len(NODES)
    assert all([*content] == [SECURE] and [*content[SECURE]] == ["message"] for content in seen)


def test_the_model_stays_if_too_few_nodes_are_left():
    strategy = flower.SecureFedAvg(policy=RoundPolicy(min_clients=4), **OPTIONS)
    _, model = run(strategy, {node: app_of(node, [secure_mod()], fails=NODES[:2]) for node in NODES}, rounds=2)
    assert [len(report.accepted) for report in strategy.reports] == [5]  # the second round
    assert strategy.server.round_number == 1
    assert not np.array_equal(model["w"], X["w"])


def test_an_error_of_the_step_ends_the_run(monkeypatch):
    monkeypatch.setattr("fedcore.server.state.State.commit", Mock(side_effect=RangeError("commit: failed")))
    with pytest.raises(RangeError, match=r"^commit: failed"):
        run(flower.SecureFedAvg(**OPTIONS), {node: app_of(node, [secure_mod()]) for node in NODES})


@pytest.mark.parametrize("lie", LIES)
def test_a_node_that_lies_loses_a_sum_and_not_the_run(lie):
    """Each node trains once for each masked update; a node that is named is left out."""
    trained, words, change = [], [], Lie(lie)

    def spoil(node, reply):
        data = reply.content[SECURE]["message"]
        words.extend([node] * (data[32] == MASKED))
        reply.content[SECURE] = ConfigRecord({"message": change(data) if node == NODES[0] else data})

    strategy = flower.SecureFedAvg(**OPTIONS)
    run(strategy, {node: app_of(node, [secure_mod()], trained=trained) for node in NODES}, rounds=4, spoil=spoil)
    assert strategy.server.round_number == 3
    assert sorted(trained) == sorted(words)
    assert {len(report.accepted) for report in strategy.reports} == {5 if lie is LIES[0] else 4}


def test_the_run_ends_after_three_lost_sums():
    apps = {node: app_of(node, [secure_mod()]) for node in NODES}

    def spoil(node, reply):
        data = reply.content[SECURE]["message"]
        reply.content[SECURE] = ConfigRecord({"message": spoiled_words(data) if data[32] == MASKED else data})

    for rounds in (3, 4):
        strategy = flower.SecureFedAvg(**OPTIONS)
        with pytest.raises(RoundError, match="in the last 3 rounds"):
            run(strategy, apps, rounds=rounds, spoil=spoil)
        assert strategy.server.round_number == 0


@pytest.mark.parametrize("what", ["model", "config", "instructions", "more"])
def test_a_node_leaves_a_sum_for_which_others_got_another_message(what):
    """With other messages, the others' updates could be zero, and the sum the update of one node."""

    class Lying(flower.SecureFedAvg):
        def _with_inboxes(self, messages, inboxes):
            for message in super()._with_inboxes(messages, inboxes):
                if message.metadata.dst_node_id == NODES[2]:
                    content = message.content
                    if what == "model":
                        content["arrays"] = ArrayRecord({name: Array(np.asarray(x * 2)) for name, x in X.items()})
                    else:
                        name = {"config": "config", "instructions": "fedcore", "more": "more"}[what]
                        old = content.get(name, {})
                        content[name] = ConfigRecord({**old, "lr": 1e-9})
                yield message

    strategy = Lying(**OPTIONS)
    run(strategy, {node: app_of(node, [secure_mod()]) for node in NODES})
    assert set(strategy.reports[0].accepted) == set(NODES) - {NODES[2]}
    assert "not what the server announced" in strategy.failures[0].reason


def test_a_malformed_answer_leaves_the_others():
    def spoil(node, reply):
        if node == NODES[0] and not reply.has_error():
            reply.content[SECURE] = ConfigRecord({"message": reply.content[SECURE]["message"][:-1]})

    strategy = flower.SecureFedAvg(**OPTIONS)
    run(strategy, {node: app_of(node, [secure_mod()]) for node in NODES}, spoil=spoil)
    (report,) = strategy.reports
    assert set(report.accepted) == set(NODES[1:])
    assert [node for node, _ in report.rejected] == [NODES[0]]
    assert "keys: expected 160 bytes" in report.rejected[0][1]


def test_a_node_with_the_mod_never_trains_without_masks_for_few_clients_or_for_totals(monkeypatch):
    trained = []
    apps = {node: app_of(node, [secure_mod(min_clients=6)], trained=trained) for node in NODES}
    plain = flower.FedAvg(abort_after=None, **OPTIONS)
    run(plain, apps)
    assert len(plain.failures) == 5
    assert "without masks" in plain.failures[0].reason
    strategy = flower.SecureFedAvg(abort_after=None, **OPTIONS)
    _, model = run(strategy, apps)
    assert "min_clients=6" in strategy.failures[0].reason
    monkeypatch.setattr(Encoding, "of", lambda *_, **__: Totals({"n": 0}, NODES).encoding())
    lying = flower.SecureFedAvg(abort_after=None, **OPTIONS)
    run(lying, {node: app_of(node, [secure_mod()], trained=trained) for node in NODES})
    assert ["TotalsForm" in failure.reason for failure in lying.failures] == [True] * len(NODES)
    np.testing.assert_array_equal(model["w"], X["w"])
    assert trained == []


def test_evaluation_is_not_masked():
    strategy = flower.SecureFedAvg(**OPTIONS | {"fraction_evaluate": 1.0})
    grid, _ = run(strategy, {node: app_of(node, [secure_mod()]) for node in NODES})
    assert [kind for kind, _, _ in grid.sent].count("evaluate") == len(NODES)
    assert strategy.left_out == []


def test_what_masks_exclude_is_refused():
    class SecureMIFA(flower.SecureStrategy, method=flower.MIFA.method):
        """A method with rows."""

    apps = {node: app_of(node, [secure_mod()]) for node in NODES}
    for strategy, reason in (
        (SecureMIFA(**OPTIONS), "needs rows.*masks"),
        (flower.SecureFedAvg(**OPTIONS | {"aggregation": ["median"]}), "masks"),
        (flower.SecureFedAvg(**OPTIONS | {"limits": Limits()}), "max_norm"),
        (flower.SecureFedAvg(**OPTIONS | {"compute": Compute()}), "exact"),
    ):
        with pytest.raises(RangeError, match=reason):
            run(strategy, apps)
