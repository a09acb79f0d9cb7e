"""The contract of every adapter, over the drivers in ``drivers/``: one set of cases for all frameworks."""

import hashlib
import sys
from dataclasses import asdict
from importlib import import_module
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest

from fedcore import Limits, Update, errors
from fedcore.adapters.session import beyond_plain_steps
from fedcore.algorithms import MIFA, SCAFFOLD, FedAvg
from fedcore.options import ServerOptions
from fedcore.rules import RejectLong
from fedcore.testing import AdapterContract
from fedcore.testing.adapters import honest
from tests.adapters import corrections
from tests.adapters.drivers import PLACES, QUIET, Raw
from tests.adapters.liars import KINDS, ROUNDS, answer, assert_bounded, options
from tests.adapters.malformed import assert_only_the_valid_count, malformed
from tests.adapters.orders import OF_STEPS, ORDERS
from tests.rejections import rejected_arguments
from tests.server import liars

pytestmark = QUIET
RICH = [name for name, place in PLACES.items() if not place.is_plain]
"""Frameworks that carry instructions to clients."""


def made(name):
    pytest.importorskip(PLACES[name].package)
    return PLACES[name].driver()


@pytest.fixture(params=PLACES)
def place(request):
    return made(request.param)


@pytest.fixture(params=RICH)
def rich(request):
    return made(request.param)


class TestEveryFramework(AdapterContract):
    @pytest.fixture(autouse=True)
    def use(self, place):
        self.place, self.kind, self.carries, self.registers_all = place, place.kind, place.carries, place.registers_all
        self.ids, self.run = place.ids, place.run


def due_server(place, algorithm, reports, work=honest, n=3, **how):
    """fedcore's own server, to which the accepted clients of these reports send the same updates."""
    contract = AdapterContract()
    contract.kind, contract.registers_all, contract.ids = place.kind, place.registers_all, place.ids
    return contract.alone(algorithm, reports, n=n, work=work, **how)


def assert_same(server, due, ids):
    assert server.x.tobytes() == due.x.tobytes()
    assert [*server.clients] == [*due.clients]
    for client in server.clients:
        assert server.store.read(client).tobytes() == due.store.read(client).tobytes()


def test_a_scaled_update_is_rejected_by_its_client_and_the_result_is_that_of_the_others(place, caplog):
    def work(t, i, sent, task):
        update = honest(t, i, sent, task)
        if i:
            return update
        return update._replace(value={k: sent[k] + np.float32(1000) * (y - sent[k]) for k, y in update.value.items()})

    server, reports, _ = place.run("MIFA", work, aggregation=[RejectLong(30)])
    [first, *others] = place.ids(3)
    for report in reports:
        [(client, reason)] = report.rejected
        assert (client, report.accepted) == (first, tuple(others))
        assert "RejectLong" in reason
    assert_same(server, due_server(place, "MIFA", reports), others)
    line = f"round 2: rejected 1 ({first!r}), accepted 2: 1 x update"
    assert any(line in message for message in caplog.messages)


def test_a_client_cannot_report_more_steps_than_it_was_asked_for(place):
    how = {"limits": Limits(max_steps=4)} if place.kind == "delta" else {"steps": 4}
    work = lambda t, i, *sent: honest(t, i, *sent)._replace(steps=4 + (i == 1))  # noqa: E731
    _, [report], _ = place.run("MIFA", work, rounds=1, **how)
    assert rejected_arguments(report) == [(place.ids(3)[1], "steps")]


@pytest.mark.parametrize(
    "aggregation", ["median", {"name": "trimmed-mean", "f": 2}, [{"name": "NearestNeighborMixing", "f": 1}, "krum"]]
)
def test_robust_rules_by_name(place, aggregation):
    def work(t, i, sent, task):
        update = honest(t, i, sent, task)
        return update if i else update._replace(value={name: -1e3 * y for name, y in update.value.items()})

    server, reports, _ = place.run("FedAvg", work, n=6, rounds=2, aggregation=aggregation)
    assert [len(report.accepted) for report in reports] == [6, 6]
    rules = ServerOptions.from_mapping({"aggregation": aggregation}).aggregation
    assert_same(server, due_server(place, "FedAvg", reports, work, n=6, aggregation=rules), place.ids(6))
    assert np.abs(server.x).max() < 10
    with pytest.raises(errors.UnknownNameError, match="did you mean 'median'"):
        place.run("FedAvg", honest, rounds=1, aggregation="medain")


def test_a_round_with_too_few_updates_for_a_robust_rule_is_repeated(place, tmp_path):
    """The first two times, two of three clients send NaN. A journal does not keep the update of the third."""
    tries, [first, *_] = [], place.ids(3)

    def work(t, i, sent, task):
        tries.append(t)
        update = honest(t, i, sent, task)
        bad = {name: np.full_like(y, np.nan) for name, y in update.value.items()}
        return update._replace(value=bad) if i and len(tries) <= 6 else update

    how = {"rounds": 4 if place.has_late_replies else 2, "aggregation": ["trimmed-mean"]}  # Flower counts all rounds
    for storage in ({"path": str(tmp_path / "run"), "journal": True}, None):
        server, (*lost, one, two), _ = place.run("FedAvg", work, storage=storage, **how)
        assert [tries.pop() for _ in tries[:]] == [1] * 3 + [0] * 9
        assert all("needs at least 3 updates, got 1" in dict(report.rejected)[first] for report in lost)
        assert [(it.round, len(it.accepted), it.rejected) for it in (one, two)] == [(0, 3, ()), (1, 3, ())]
    assert_same(server, due_server(place, "FedAvg", [one, two], aggregation=["trimmed-mean"]), place.ids(3))
    with pytest.raises(errors.RoundError, match="needs at least 3 updates, got 1"):
        place.run("FedAvg", work, abort_after=2, **how)


@pytest.mark.parametrize("kind", [errors.RangeError, errors.RoundError])
def test_another_error_of_a_commit_ends_the_run(place, kind, monkeypatch):
    """Only too few updates for a robust rule, and in Flower for the policy, let a round pass without a step."""
    monkeypatch.setattr("fedcore.server.state.State.commit", Mock(side_effect=kind("commit: failed")))
    with pytest.raises(kind, match=r"^commit: failed"):
        place.run("FedAvg", honest, rounds=1)


@pytest.mark.parametrize("name", ["flower", "nvflare", "pfl", "fedlab", "appfl"])
def test_a_missing_framework_is_named_with_what_installs_it(name, monkeypatch):
    package, adapter = PLACES[name].package, f"fedcore.adapters.{name}"
    monkeypatch.setitem(sys.modules, package, None)
    for module in list(sys.modules):
        if module.startswith(f"{package}."):
            monkeypatch.setitem(sys.modules, module, None)
        elif module.startswith(adapter):
            monkeypatch.delitem(sys.modules, module)
    with pytest.raises(errors.MissingDependencyError, match=rf"^{adapter}: needs {package} >= .*fedcore-fl\[{name}\]"):
        import_module(adapter)


@pytest.mark.parametrize("name", ["Aggregator", "Controller", "SecureController", "SecureSite", "secure_mod"])
def test_an_unknown_option_is_named_with_those_that_exist(name):
    place = PLACES["flower" if name == "secure_mod" else "nvflare"]
    pytest.importorskip(place.package)
    kind = getattr(import_module(f"fedcore.adapters.{place.module}"), name)
    with pytest.raises(errors.UnknownNameError, match=rf"^option of {name}: 'max_nrom' .*known: .*\b(limits|noise)\b"):
        kind(max_nrom=1.0, train=print)


@pytest.mark.parametrize("as_one", [False, True], ids=["keywords", "one object"])
def test_options_of_a_configuration_reach_the_server(place, as_one, tmp_path):
    if as_one and "nvflare" in type(place).__module__:
        return  # NVFlare writes its configurations from single attributes
    how = {
        "storage": {"path": str(tmp_path / "my.rows"), "codec": "bf16", "config_type": "dict"},
        "limits": {"max_norm": 40.0, "max_examples": 7},
        "compute": {"accumulator": "exact", "batch_size": 2},
        "aggregation": {"name": "RejectLong", "ratio": 30},
        "server_lr": 0.5,
    }
    given = {"options": ServerOptions.from_mapping(how)} if as_one else how
    server, _, _ = place.run("FedAvg", honest, rounds=1, **given)
    settings = server.settings
    assert (settings.limits.max_norm, settings.limits.max_examples) == (40.0, 7)
    assert (settings.accumulator, settings.batch_size) == ("exact", 2)
    assert [type(rule) for rule in settings.rules][:-1] == [RejectLong]
    assert settings.rules.ratio("received") == 30
    assert (server.store.codec, str(server.store.path)) == ("bf16", str(tmp_path / "my.rows"))
    server.close()
    wrong = {
        "limits": {"max_nrom": 3},
        "storage": {"folder": "rows"},
        "compute": {"acumulator": "exact"},
        "aggregation": [{"name": "RejectLong", "ration": 30}],
    }
    for name, value in wrong.items():
        with pytest.raises(errors.UnknownNameError, match=next(iter(value)) if name != "aggregation" else "ration"):
            place.run("FedAvg", honest, rounds=1, **{name: value})


def test_late_replies_are_refused_where_the_framework_has_none(place):
    if place.has_late_replies:
        assert place.run("FedAvg", honest, rounds=1, policy={"max_staleness": 2})[0].settings.policy.max_staleness == 2
    else:
        with pytest.raises((errors.RangeError, TypeError), match="policy"):
            place.run("FedAvg", honest, rounds=1, policy={"max_staleness": 2})


def test_a_method_of_other_than_plain_steps_and_a_rate_of_each_step_are_refused(place):
    if place.is_plain:
        for algorithm in ("SCAFFOLD", "FedAvgM", "FedProx"):
            with pytest.raises(errors.RangeError, match=r"^algorithm\b"):
                place.run(algorithm, honest)
    with pytest.raises(errors.RangeError, match=r"^lr\b.*InverseStep.*lambda round"):
        place.run("FedAvg", honest, lr=OF_STEPS)


@pytest.mark.parametrize("algorithm", ["FedAvg", "MimiC", "SCAFFOLD"])
def test_with_exact_sums_the_order_of_answers_changes_no_bit(place, algorithm):
    if place.is_plain and algorithm == "SCAFFOLD":
        return  # which needs instructions

    def bits(accumulator, runs):
        found = set()
        for seed in range(runs):
            how = {"compute": {"accumulator": accumulator}, "order": np.random.default_rng(seed)}
            server, reports, _ = place.run(algorithm, honest, n=5, rounds=2, **how)
            rows = [server.store.read(i).tobytes() for i in place.ids(5) if server.algorithm.keeps_rows]
            by_id = [np.argsort([str(client) for client in report.accepted]) for report in reports]
            norms = [report.norms[order].tobytes() for report, order in zip(reports, by_id, strict=True)]
            found.add(hashlib.sha256(b"".join([server.x.tobytes(), *rows, *norms])).digest())
        return len(found)

    assert bits("exact", 4) == 1
    if algorithm == "FedAvg":
        assert bits("float32", 8) > 1


@pytest.mark.parametrize("name", ORDERS)
def test_every_field_of_the_instructions_reaches_the_client(rich, name):
    seen = []
    ids = rich.ids(2)

    def work(t, i, sent, task):
        server = rich.strategy.server if hasattr(rich, "strategy") else rich.controller.server
        assert task == server.broadcast([ids[i]], newcomers=[ids[i]]).of(ids[i])
        seen.append(i)
        return honest(t, i, sent)._replace(
            steps=task.local_rule.most_steps or 2,
            control=np.full(10, i, np.float32) if task.second else None,
            loss=1.0 if task.needs_loss else None,
        )

    sizes = [5, 7] if ORDERS[name].needs_shares else None
    _, reports, _ = rich.run(ORDERS[name], work, n=2, client_sizes=sizes)
    assert seen == [0, 1] * 3
    assert [len(report.accepted) for report in reports] == [2, 2, 2]


@pytest.mark.parametrize("algorithm", corrections.METHODS)
def test_corrections_that_the_clients_keep_give_the_same_trajectory(rich, algorithm):
    def trajectory(algorithm, placement):
        workers = [corrections.Client(type(algorithm), placement, target) for target in corrections.TARGETS]
        xs = []

        def work(t, i, sent, task):
            if i in corrections.AWAY.get(t, []):
                return None
            y, control = workers[i].work(sent["w"], task.offset)
            return Update(i, {"w": y}, corrections.STEPS, 1, control=control if task.second else None)

        def after(report):
            server = rich.strategy.server if hasattr(rich, "strategy") else rich.controller.server
            xs.append(server.x.copy())
            for client in report.accepted:
                workers[rich.ids(3).index(client)].accepted(server.v)

        how = {"x0": {"w": np.zeros(3, np.float32)}, "rounds": corrections.ROUNDS, "callbacks": [after]}
        _, reports, _ = rich.run(algorithm, work, lr=corrections.LR, **how)
        assert all(not report.rejected for report in reports)
        assert {len(report.accepted) for report in reports} == {1, 2, 3}
        return xs

    at_server, at_clients = (trajectory(algorithm(placement=place), place) for place in ("server", "client"))
    corrections.assert_same_trajectory(at_server, at_clients, trajectory(FedAvg(), "server"))


CARRIED = {"rate": "rate", "tiny rate": "rate", "variance": "buffers", "counter": "buffers"}


def lies():
    """Each framework with each method and lie that it carries."""
    for name, algorithm, kind in product(PLACES, liars.METHODS, KINDS):
        place, (method, sizes) = PLACES[name], liars.made(algorithm)
        carried = all(claim in place.carries for word, claim in CARRIED.items() if word in kind)
        if name == "pfl" or not carried or (place.is_plain and beyond_plain_steps(method)):
            continue
        if sizes is None or name != "nvflare, aggregator":  # NVFlare's own workflow has no sizes
            yield name, algorithm, kind


@pytest.mark.parametrize(("name", "algorithm", "kind"), [*lies()])
@pytest.mark.sample(1, 2)
def test_one_liar_of_ten_clients_moves_the_result_by_at_most_its_bound(name, algorithm, kind):
    place, (method, sizes) = made(name), liars.made(algorithm)

    def work(t, i, sent, task):
        update = answer(algorithm, kind, task, {**liars.MODEL, **sent}, task.offset, i)
        return update if name != "fedlab" else update._replace(value={"w": update.value["w"]})

    how = options(kind)
    if how and name != "flower":  # as a configuration holds them
        how = {"aggregation": [{"name": type(rule).__name__, **asdict(rule)} for rule in how["aggregation"]]}
    how |= {"client_sizes": sizes} if sizes else {}
    how |= {"n": liars.N, "rounds": ROUNDS, "x0": liars.MODEL, "lr": liars.LR}
    _, reports, model = place.run(method, work, **how)
    x = {key: np.asarray(value) for key, value in model.items()}
    assert_bounded(algorithm, kind, x, reports, place.ids(liars.N))


def test_malformed_messages_are_rejected_by_client_and_the_result_is_that_of_the_others(place):
    """Each changed at a random level; SCAFFOLD's have a second vector."""
    algorithm = MIFA() if place.is_plain else SCAFFOLD(control="sent")
    n, rounds = 303, 4
    trusted = [0, 150, n - 1]
    forms = {}

    def update_of(t, i, sent, task):
        """Untrusted clients' valid messages are all alike: the changes of one message."""
        return honest(0, i if i in trusted else 1, sent, task)

    def work(t, i, sent, task):
        if i in trusted:
            return update_of(t, i, sent, task)
        if t not in forms:
            valid = place.form(update_of(t, 1, sent, task)._replace(client=None), sent)
            forms[t] = malformed(valid, n, t, place.odd)
        return Raw(next(forms[t]))

    how = {"steps": 5} if place.is_plain and place.kind == "model" else {}  # of messages that lost their own
    server, reports, _ = place.run(algorithm, work, n=n, rounds=rounds, **how)
    ids = place.ids(n)
    for report in reports:
        assert_only_the_valid_count(
            report, [ids[i] for i in trusted], [i for k, i in enumerate(ids) if k not in trusted]
        )
    due = due_server(place, algorithm, reports, update_of, n)
    np.testing.assert_array_equal(server.x, due.x)
    for i in trusted:
        np.testing.assert_array_equal(server.store.read(ids[i]), due.store.read(ids[i]))


X = {name: np.full(2, i, np.float32) for i, name in enumerate(["text.w", "image.w", "image.b", "body", "head", "base"])}
PARTS = {"partial": {"text": "text.*", "image": ["image.*"]}, "personal": ["head"], "frozen": ["base"]}
OF_GROUPS = [["text.w", "body"], ["image.w", "image.b"], ["image.w"]]  # the last one lacks a tensor of its group


def require_groups(report, model, ids, rounds):
    """Client i moves its tensors by i + 2 in each round."""
    accepted = {"text": (ids[0],), "image": (ids[1],), "rest": (ids[0],)}
    assert {group: one.accepted for group, one in report.groups.items()} == accepted
    [(client, reason)] = report.rejected
    assert (client, "image.b" in reason) == (ids[2], True)
    moved = [(name, i + 2) for i, names in enumerate(OF_GROUPS[:2]) for name in names]
    assert {name: model[name].tolist() for name, _ in moved} == {n: (X[n] + rounds * by).tolist() for n, by in moved}


@pytest.mark.parametrize("name", ["flower", "nvflare", "nvflare, aggregator"])
def test_replies_with_some_of_the_groups(name, tmp_path):
    """And with a personal tensor, which does not count; the second run resumes."""
    place, seen = made(name), set()

    def work(t, i, sent, task):
        seen.add((*sent,))
        own = {name: sent[name] + np.float32(i + 2) for name in OF_GROUPS[i]}
        return Update(i, own | {"head": np.full(2, np.nan, np.float32)}, steps=2, examples=3)

    for rounds in (1, 2):
        how = {"rounds": rounds, "x0": X, "parts": PARTS, "storage": str(tmp_path / "run")}
        server, reports, model = place.run("FedAvg", work, **how)
        server.close()
    assert seen == {("text.w", "image.w", "image.b", "body")}
    require_groups(reports[-1], model, place.ids(3), rounds=2)
