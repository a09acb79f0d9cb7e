"""A subclass or wrapper of a strategy of fedcore does what it does with Flower's FedAvg, in Flower's own simulation."""

import csv
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as strategies

from fedcore import RoundPolicy
from fedcore.adapters import flower
from fedcore.errors import CheckpointError, RangeError, RoundError
from tests.adapters.flower.local_grid import LocalGrid
from tests.adapters.flower.overrides import KINDS, MODEL, NODES, OURS, OVERRIDES, RECORD, client, outcome, simulation


@pytest.fixture(scope="module")
def simulate():
    """One simulation for all cases of a process."""
    pytest.importorskip("ray", reason="Flower's simulation needs Ray: pip install 'flwr[simulation]'")
    with simulation() as ask:
        yield ask


def cases():
    """By day, each second override, in turn with FedAvg and with a strategy of another kind."""
    for place, override in enumerate(OVERRIDES):
        other = KINDS[1 + place // 4 % (len(KINDS) - 1)]
        by_day = {0: other, 2: KINDS[0]}.get(place % 4)
        for strategy in OURS:
            yield pytest.param(override, strategy, marks=[] if strategy == by_day else pytest.mark.endurance)


@pytest.mark.parametrize(("override", "strategy"), [*cases()])
def test_an_override_does_what_it_does_in_flower(simulate, override, strategy):
    theirs, ours = simulate(override, None), simulate(override, strategy)
    with RECORD.open() as file:
        [row] = [row for row in csv.DictReader(file) if row["override"] == override]
    assert outcome(theirs, ours) == row[strategy]
    if strategy == "FedAvg":
        np.testing.assert_allclose(ours["models"], theirs["models"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(ours["arrays"], theirs["arrays"], rtol=1e-6, atol=1e-6)
        for number, due in theirs["evaluate"].items():
            assert ours["evaluate"][number] == pytest.approx(due)


# What no override of Flower's class shows, without a simulation.


def make_grid():
    return LocalGrid({10 + i: (client, {"partition-id": i}) for i in range(NODES)})


def start(strategy, rounds=2, config=None, model=MODEL, grid=None, **options):
    arrays = ArrayRecord({name: Array(x) for name, x in model.items()})
    return strategy.start(grid or make_grid(), arrays, rounds, train_config=ConfigRecord(config), **options)


class RepliesAfterSuper:
    def aggregate_train(self, server_round, replies):
        out = super().aggregate_train(server_round, replies)
        self.seen = len([*replies])
        return out


class UsedReplies:
    def aggregate_train(self, server_round, replies):
        replies = iter(replies)
        self.seen = len([*replies])
        return super().aggregate_train(server_round, replies)


class NoMessages:
    def configure_train(self, *args):
        super().configure_train(*args)
        return []


class WrapperThatKeepsReplies:
    def aggregate_train(self, server_round, replies):
        return None, None


@pytest.mark.parametrize("override", [RepliesAfterSuper, UsedReplies, NoMessages, WrapperThatKeepsReplies])
def test_a_run_that_loses_its_replies_ends_with_an_error(override):
    for options in ({"abort_after": 1}, {}):  # a run may be shorter than abort_after
        strategy = type("Strategy", (override, flower.FedAvg), {})(poll=0.001, **options)
        with pytest.raises(RoundError, match=r"list\(replies\)"):
            start(strategy)


@pytest.mark.parametrize("policy", [RoundPolicy(min_clients=2), RoundPolicy(min_clients=2, min_share=0.5, deadline=60)])
def test_own_aggregation_beside_a_policy_is_flower_s(policy, caplog):
    own = OVERRIDES["aggregate_without_super"]
    due = start(own(strategies.FedAvg), 3).arrays
    strategy = own(flower.FedAvg, poll=0.001, policy=policy)
    found = start(strategy, 3).arrays
    for name, array in due.items():
        np.testing.assert_allclose(found[name].numpy(), array.numpy(), rtol=1e-6)
    assert strategy.server.round_number == 3
    assert [record.getMessage() for record in caplog.records if "min_clients=2 is only" in record.getMessage()]


@pytest.mark.parametrize(("abort_after", "rounds"), [(3, 2), (2, 5), (None, 2)])
def test_nodes_that_all_fail_or_are_silent_are_no_finished_run(abort_after, rounds):
    for state in ("dead", "slow"):
        strategy = flower.FedAvg(poll=0.001, abort_after=abort_after, fraction_evaluate=0.0)
        setattr(grid := make_grid(), state, set(grid.nodes))
        with nullcontext() if abort_after is None else pytest.raises(RoundError, match=r"^updates: none"):
            start(strategy, rounds, grid=grid, timeout=0.01)
        assert len(strategy.reports) == 2


@pytest.mark.parametrize(
    ("method", "how", "config", "error"),
    [
        ("MimiC", {"lr": lambda round: 0.1, "steps": "num-batches"}, {"lr": 0.2}, r"^lr\b.*0\.2.*0\.1"),
        ("MimiC", {"lr": 0.1, "steps": "num-batches"}, {"lr": -1.0}, r"=-1\.0"),
        ("FedProx", {"lr": 0.1, "mu": 0.3}, {"proximal-mu": 0.5}, r"^proximal-mu\b.*0\.5.*0\.3"),
    ],
)
def test_a_number_that_contradicts_the_strategy_is_an_error(method, how, config, error):
    with pytest.raises(RangeError, match=error):
        start(getattr(flower, method)(poll=0.001, **how), config=config)


@pytest.mark.parametrize(
    ("method", "how", "config", "sent"),
    [
        ("MimiC", {"lr": 0.1, "steps": "num-batches"}, {"lr": 0.2}, 0.2),
        ("FedProx", {"mu": 0.3}, {"proximal-mu": 0.5}, 0.3),
        ("FedAvg", {}, {"server-round": 9}, 1),
    ],
)
def test_one_warning_names_both_numbers(method, how, config, sent, caplog):
    given = ConfigRecord(config)
    strategy = getattr(flower, method)(poll=0.001, **how)
    start(strategy, config=given, rounds=3)
    (name, value), lines = config.popitem(), [record.getMessage() for record in caplog.records]
    [line] = [line for line in lines if "the configuration has" in line]
    assert all(text in line for text in (name, str(value), str(how.get("lr", sent))))


def test_a_rate_that_changes_after_super_is_an_error():
    class Strategy(flower.MIFA):
        def configure_train(self, server_round, arrays, config, grid):
            messages = super().configure_train(server_round, arrays, config, grid)
            config["lr"] = 0.01
            return messages

    with pytest.raises(RangeError, match=r"^lr\b.*before"):
        start(Strategy(lr=0.1, steps="num-batches", poll=0.001))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_copy_is_no_change_and_a_change_keeps_the_other_numbers(dtype):
    """x has float32 numbers, which the messages round."""

    class Strategy(flower.FedAvg):
        value = None

        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            self.own = self.server.x.copy()
            copies = {name: Array(array.dtype, array.shape, array.stype, array.data) for name, array in arrays.items()}
            if self.value is not None:
                copies["layer.bias"] = Array(np.array([self.value] * 4, np.float32).astype(dtype))
            return ArrayRecord(copies), metrics

    model = {name: x.astype(dtype) for name, x in MODEL.items()}
    strategy = Strategy(poll=0.001, fraction_evaluate=0.0)
    start(strategy, model=model)
    np.testing.assert_array_equal(strategy.server.x, strategy.own)
    assert not any(report.replaced for report in strategy.reports)
    strategy.value = 0.5
    start(strategy, model=model, rounds=4)
    assert [report.replaced for report in strategy.reports] == [False, False, False, True]
    np.testing.assert_array_equal(strategy.server.tensors()["layer.bias"].astype(np.float32), 0.5)
    np.testing.assert_array_equal(strategy.server.x[:-4], strategy.own[:-4])


def test_a_loop_of_its_own_resumes_with_the_saved_model(tmp_path):
    """Such a loop has only the initial arrays, and counts rounds from 1."""
    made = OVERRIDES["loop_of_its_own"]
    xs = []
    for _ in range(2):
        strategy = made(flower.FedAvg, storage=tmp_path, poll=0.001)
        start(strategy, evaluate_fn=lambda *_: None)
        xs.append((strategy.server.round_number, strategy.server.x.copy()))
        strategy.server.close()
    assert [number for number, _ in xs] == [2, 4]
    straight = flower.FedAvg(poll=0.001)
    start(straight, rounds=4)
    np.testing.assert_array_equal(xs[1][1], straight.server.x)


def test_a_strategy_starts_again_after_an_exception():
    class Strategy(flower.MIFA):
        fails = True

        def aggregate_train(self, server_round, replies):
            if self.fails and server_round == 2:
                raise ValueError
            return super().aggregate_train(server_round, replies)

    strategy = Strategy(lr=0.1, steps="num-batches", wait=False, poll=0.001)
    with pytest.raises(ValueError, match=r"^$"):
        start(strategy, rounds=3)
    strategy.fails = False
    start(strategy, rounds=3)
    assert [len(report.accepted) for report in strategy.reports] == [NODES] * 3
    with pytest.raises(CheckpointError):
        start(strategy, rounds=3, model={"other": np.ones(2, np.float32)})


def test_listed_replies_of_a_buffer_are_k():
    strategy = OVERRIDES["list_replies"](flower.FedAvg, policy=RoundPolicy(buffer=3, max_staleness=3), poll=0.001)
    start(strategy, rounds=3)
    assert [(len(report.accepted), report.closed) for report in strategy.reports] == [(3, "buffer")] * 3


@pytest.mark.parametrize(("override", "most"), [("checkpoints", 1), ("list_replies", NODES)])
def test_only_replies_that_a_subclass_reads_are_kept(override, most):
    pytest.importorskip("torch")
    arrived, kept, grid = [], [], make_grid()
    pull = grid.pull_messages

    def pull_messages(numbers):
        kept.append(sum(reply() is not None for reply in arrived))
        replies = pull(numbers)
        arrived.extend(map(weakref.ref, replies))
        return replies

    grid.pull_messages = pull_messages
    strategy = OVERRIDES[override](flower.FedAvg, fraction_evaluate=0.0, poll=0.001)
    start(strategy, grid=grid)
    assert max(kept) in (most, most - 1)
