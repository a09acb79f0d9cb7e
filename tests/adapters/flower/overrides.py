"""Subclasses and wrappers of a strategy as public Flower apps write them, for any base class; and a simulation of them.

Each function takes a base class, Flower's or one of fedcore, and the options of its strategy. ``python -m
tests.adapters.flower.overrides`` runs all of them with all strategies and writes ``overrides.csv``.
"""

import csv
import logging
import multiprocessing
import random
import re
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords, sample_nodes

from fedcore.adapters import flower
from fedcore.adapters.flower import Task, examples_reply
from fedcore.adapters.flower.records import METHOD
from fedcore.rules import TrimmedMean

NODES, ROUNDS, LR = 4, 3, 0.25
MODEL = {"layer.weight": np.ones((3, 4), np.float32), "layer.bias": np.zeros(4, np.float32)}
RECORD = Path(__file__).with_name("overrides.csv")

PLAIN, SENT, STEPS = {}, {"lr": LR}, {"lr": LR, "steps": "num-batches"}
OURS = {
    "FedAvg": ("FedAvg", PLAIN),
    "FedAvg, lr": ("FedAvg", STEPS),
    "FedAvg, trimmed": ("FedAvg", {"aggregation": TrimmedMean(1)}),
    "FedAdagrad": ("FedAdagrad", PLAIN),
    "FedAdam": ("FedAdam", PLAIN),
    "FedYogi": ("FedYogi", PLAIN),
    "FedAvgM": ("FedAvgM", {"server_momentum": 0.5}),
    "FedProx": ("FedProx", {"proximal_mu": 0.5}),
    "FedProx, lr": ("FedProx", {"mu": 0.5, **SENT}),
    "MIFA": ("MIFA", {"wait": False, **STEPS}),
    "MimiC": ("MimiC", STEPS),
    "MimiC, updates": ("MimiC", {"units": "update"}),
    "FedAU": ("FedAU", STEPS),
    "FedExP": ("FedExP", STEPS),
    "FedNova": ("FedNova", STEPS),
    "FedStale": ("FedStale", STEPS),
    "FedVARP": ("FedVARP", STEPS),
    "FlexibleFedAvg": ("FlexibleFedAvg", {"local_steps": 3, **STEPS}),
    "LocalDescent": ("LocalDescent", STEPS),
    "FedACG": ("FedACG", SENT),
    "FedAsync": ("FedAsync", SENT),
    "FedAvgLocalM": ("FedAvgLocalM", SENT),
    "FedAvgMVR": ("FedAvgMVR", SENT),
    "FedDyn": ("FedDyn", SENT),
    "MBSTORM": ("MBSTORM", SENT),
    "QFedAvg": ("QFedAvg", SENT),
    "SCAFFOLD": ("SCAFFOLD", SENT),
    "SCAFFOLDM": ("SCAFFOLDM", SENT),
    "SCAFFOLDMVR": ("SCAFFOLDMVR", SENT),
}
KINDS = ["FedAvg", "FedAvg, lr", "FedAdam", "MIFA", "MimiC, updates", "FedAvgLocalM", "SCAFFOLD"]
"""One strategy of each kind: averages with and without a rate, server optimizers, rows, vectors to the clients."""

# The clients: a quadratic loss around a point of each client.

client = ClientApp()


def point(i):
    rng = np.random.default_rng(i)
    return {name: rng.normal(size=x.shape).astype(np.float32) for name, x in MODEL.items()}


def metrics_of(i, config, steps):
    seen = {
        name: float(config.get(name, default)) for name, default in [("lr", LR), ("epochs", 1), ("server-round", 0)]
    }
    return {"num-batches": steps, "partition": float(i), "train_loss": 1.0 + i, **seen}


def trained(message, context):
    i, config = context.node_config["partition-id"], message.content["config"]
    target, lr, steps = point(i), float(config.get("lr", LR)), int(config.get("epochs", 1))
    if METHOD in message.content:
        task = Task.of(message)
        if task.needs_loss or task.mu or task.b or task.second or task.offset is not None or task.a != 1:
            return instructed(task, i, target, 1 if task.local_rule.most_steps else steps, config)
    y = {name: array.numpy() for name, array in message.content["arrays"].items()}
    for _ in range(steps):
        y = {name: x - np.float32(lr) * (x - target[name]) for name, x in y.items()}
    metrics = MetricRecord({"num-examples": 10 * (i + 1), **metrics_of(i, config, steps)})
    records = {"arrays": ArrayRecord({name: Array(x) for name, x in y.items()}), "metrics": metrics}
    return Message(RecordDict({**records, "more": ConfigRecord({"trained": i != 1})}), reply_to=message)


def instructed(task, i, target, steps, config):
    y, x, target = task.x.copy(), task.x, task.layout.flatten(target)
    gradients = []
    for _ in range(steps):
        gradients.append(y - target)
        direction = task.a * gradients[-1] + task.mu * (y - x)
        direction += task.b * (task.x_prev - target) if task.b else 0
        direction += 0 if task.offset is None else task.offset
        y = (y - task.lr * direction).astype(np.float32)
    control = np.mean(gradients, axis=0, dtype=np.float32) if task.second else None
    loss = float(np.sum((x - target) ** 2) / 2) if task.needs_loss else None
    numbers = {"steps": steps, "examples": 10 * (i + 1), "metrics": metrics_of(i, config, steps)}
    reply = task.reply(y, control=control, loss=loss, **numbers)
    reply.content["more"] = ConfigRecord({"trained": i != 1})
    return reply


@client.train()
def train(message, context):
    clips = "clipping_norm" in message.content["config"]
    return adaptiveclipping_mod(message, context, trained) if clips else trained(message, context)


@client.evaluate()
def evaluate(message, context):
    i, target = context.node_config["partition-id"], point(context.node_config["partition-id"])
    loss = sum(float(np.sum((array.numpy() - target[name]) ** 2)) for name, array in message.content["arrays"].items())
    metrics = {"num-examples": i + 1, "loss": loss, "server-round": message.content["config"]["server-round"]}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


@client.query()
def query(message, context):
    return examples_reply(message, 10 * (context.node_config["partition-id"] + 1))


# The overrides.

OVERRIDES = {}


def override(made):
    """Register a class that stands before a base class, or a function that derives a class from it."""

    def strategy(base, **options):
        kind = type(made.__name__, (made, base), {}) if isinstance(made, type) else made(base)
        return kind(**options)

    OVERRIDES[re.sub(r"(?<!^)(?=[A-Z])", "_", made.__name__).lower()] = strategy
    return made


@override
def nothing(base):
    return base


@override
class LoopOverMessages:
    def configure_train(self, server_round, arrays, config, grid):
        messages = super().configure_train(server_round, arrays, config, grid)
        self.sent = [message.metadata.dst_node_id for message in messages]
        assert len(messages) == NODES
        return messages


@override
class ChangeTheContentOfMessages:
    """Which all messages of Flower's FedAvg share."""

    def configure_train(self, server_round, arrays, config, grid):
        messages = super().configure_train(server_round, arrays, config, grid)
        for message in messages:
            message.content["config"] = ConfigRecord({**message.content["config"], "epochs": 2})
        return messages


@override
class ContentOfEachNode:
    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        messages.sort(key=lambda message: message.metadata.dst_node_id)
        for number, message in enumerate(messages):
            own = ConfigRecord({**message.content["config"], "epochs": 1 + number % 2})
            message.content = RecordDict({**message.content, "config": own})
        return messages


@override
class MessagesOfItsOwn:
    """For every other node; in the second round for all."""

    def configure_train(self, server_round, arrays, config, grid):
        for message in super().configure_train(server_round, arrays, config, grid):
            node = message.metadata.dst_node_id
            is_own = server_round == 2 or node % 2
            yield Message(RecordDict({**message.content}), node, "train") if is_own else message


@override
class FilterMessages:
    def configure_train(self, server_round, arrays, config, grid):
        messages = super().configure_train(server_round, arrays, config, grid)
        return sorted(messages, key=lambda message: message.metadata.dst_node_id)[server_round % 2 :]


@override
class SampleWithoutSuper:
    def configure_train(self, server_round, arrays, config, grid):
        nodes, _ = sample_nodes(grid, self.min_available_nodes, NODES)
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, sorted(nodes)[1:], "train")

    def configure_evaluate(self, server_round, arrays, config, grid):
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, sorted(grid.get_node_ids())[1:], "evaluate")


class Part(Grid):
    """Some nodes of a grid."""

    run = set_run = create_message = push_messages = pull_messages = send_and_receive = None  # abstract in Grid

    def __init__(self, grid, first):
        self.grid, self.send_and_receive, self.first = grid, grid.send_and_receive, first

    def get_node_ids(self):
        return sorted(self.grid.get_node_ids())[self.first :: 3]


@override
class SampleByAGrid:
    """Two groups of nodes; one node is in none."""

    def configure_train(self, server_round, arrays, config, grid):
        self.min_train_nodes = self.min_available_nodes = 1
        configure = partial(super().configure_train, server_round, arrays, config)
        return [*configure(Part(grid, 0)), *configure(Part(grid, 1))]


@override
class DecayTheRate:
    def configure_train(self, server_round, arrays, config, grid):
        if server_round > 1:
            config["lr"] *= 0.5
        return super().configure_train(server_round, arrays, config, grid)


@override
class RateOfEachRound:
    def configure_train(self, server_round, arrays, config, grid):
        return super().configure_train(server_round, arrays, ConfigRecord({"lr": LR / server_round}), grid)


@override
class AddToTheConfiguration:
    def configure_train(self, server_round, arrays, config, grid):
        messages = super().configure_train(server_round, arrays, config, grid)
        config["epochs"] = server_round
        return messages


@override
class ListReplies:
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.received = len(replies)
        return super().aggregate_train(server_round, replies)

    def aggregate_evaluate(self, server_round, replies):
        replies = list(replies)
        return super().aggregate_evaluate(server_round, iter(replies))


@override
class LoopOverReplies:
    def aggregate_train(self, server_round, replies):
        self.losses = [reply.content["metrics"]["train_loss"] for reply in replies if reply.has_content()]
        return super().aggregate_train(server_round, replies)

    def aggregate_evaluate(self, server_round, replies):
        self.left = [reply.content["metrics"]["loss"] for reply in replies if reply.has_content()]
        return super().aggregate_evaluate(server_round, replies)


@override
class CountReplies:
    def aggregate_train(self, server_round, replies):
        assert replies
        assert replies[0].has_content()
        out = super().aggregate_train(server_round, replies)
        assert len(replies) == NODES
        return out


@override
class FilterReplies:
    """As the example whisper-federated-finetuning does."""

    def aggregate_train(self, server_round, replies):
        kept = []
        for reply in replies:
            if reply.has_content() and reply.content["more"]["trained"]:
                kept.append(reply)
        assert len(kept) == len(replies) - 1
        return super().aggregate_train(server_round, kept)


@override
class FilterRepliesAsTheyCome:
    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, (one for one in replies if one.content["more"]["trained"]))


@override
class ValidReplies:
    def aggregate_train(self, server_round, replies):
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        return super().aggregate_train(server_round, valid)


@override
class ChangeWeights:
    def aggregate_train(self, server_round, replies):
        for reply in replies:
            reply.content["metrics"]["num-examples"] = 1.0
        return super().aggregate_train(server_round, replies)


@override
class ChangeReplies:
    """Clip each update."""

    def configure_train(self, server_round, arrays, config, grid):
        self.current = arrays.to_torch_state_dict()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        for reply in replies:
            model = reply.content["arrays"].to_torch_state_dict()
            clipped = {name: x + (model[name] - x).clamp(-0.1, 0.1) for name, x in self.current.items()}
            reply.content["arrays"] = ArrayRecord(clipped)
        return super().aggregate_train(server_round, replies)


@override
class Checkpoints:
    """Before and after ``super()``, as most apps save models."""

    def configure_train(self, server_round, arrays, config, grid):
        self.before = arrays.to_torch_state_dict()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.after = arrays.to_torch_state_dict()
        assert any((self.before[name] != x).any() for name, x in self.after.items())
        return arrays, metrics


def changed(base, change):
    """A subclass that changes the model after ``super()``, by a function of the old and the new state."""

    class Strategy(base):
        def configure_train(self, server_round, arrays, config, grid):
            self.old = arrays.to_torch_state_dict()
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            new = arrays.to_torch_state_dict()
            return ArrayRecord({name: change(name, self.old[name], x) for name, x in new.items()}), metrics

    return Strategy


@override
def moving_average(base):
    return changed(base, lambda name, old, new: 0.5 * old + 0.5 * new)


@override
def pruning(base):
    return changed(base, lambda name, old, new: new * (new.abs() > 0.2))


@override
def frozen_layer(base):
    return changed(base, lambda name, old, new: old if name == "layer.bias" else new)


@override
class ChangeInPlace:
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        arrays["layer.bias"] = Array(arrays["layer.bias"].numpy() / 2)
        return arrays, metrics


@override
class RejectARound:
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return (None if server_round == 2 else arrays), metrics


@override
class AggregateWithoutSuper:
    def aggregate_train(self, server_round, replies):
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        contents = [reply.content for reply in valid]
        for content in contents:  # of fedcore's clients
            for name in [*content.array_records]:
                if name != "arrays":
                    del content[name]
        arrays = aggregate_arrayrecords(contents, self.weighted_by_key)
        return arrays, self.train_metrics_aggr_fn(contents, self.weighted_by_key)


@override
class MetricsOfItsOwn:
    def aggregate_evaluate(self, server_round, replies):
        losses = [reply.content["metrics"]["loss"] for reply in replies]
        metrics = super().aggregate_evaluate(server_round, replies)
        metrics["worst"] = max(losses)
        return metrics

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        metrics["round"] = server_round
        return arrays, metrics


@override
def functions_for_metrics(base):
    def weighted(records, key):
        weights = [record["metrics"][key] for record in records]
        means = zip(weights, (record["metrics"]["partition"] for record in records), strict=True)
        return MetricRecord({"mean": sum(w * i for w, i in means) / sum(weights), "nodes": len(records)})

    class Strategy(base):
        def __init__(self, **options):
            super().__init__(train_metrics_aggr_fn=weighted, **options)

    return Strategy


@override
class Summary:
    def summary(self):
        logging.getLogger("flwr").info("my strategy")
        super().summary()


class StopError(Exception):
    """Ends a run early."""


@override
class StopInAnEvaluation:
    def aggregate_train(self, server_round, replies):
        self.best, metrics = super().aggregate_train(server_round, replies)
        return self.best, metrics

    def aggregate_evaluate(self, server_round, replies):
        metrics = super().aggregate_evaluate(server_round, replies)
        if server_round == 2:
            raise StopError
        return metrics

    def start(self, *args, **options):
        try:
            return super().start(*args, **options)
        except StopError:
            return Result(arrays=self.best)


@override
class StopInEvaluateFn:
    def start(self, *args, evaluate_fn=None, **options):
        def evaluate(server_round, arrays):
            evaluate_fn(server_round, arrays)
            self.best = arrays
            if server_round == 1:
                raise StopError

        try:
            return super().start(*args, evaluate_fn=evaluate, **options)
        except StopError:
            return Result(arrays=self.best)


@override
def continue_from_a_checkpoint(base):
    """A second run, with another strategy, from the model that the first one saved."""

    class Strategy(base):
        def __init__(self, **options):
            super().__init__(**options)
            self.options = options

        def start(self, grid, initial_arrays, num_rounds, **options):
            state = super().start(grid, initial_arrays, 1, **options).arrays.to_torch_state_dict()
            return base(**self.options).start(grid, ArrayRecord(state), num_rounds - 1, **options)

    return Strategy


@override
class MetricsOfStart:
    def start(self, *args, **options):
        result = super().start(*args, **options)
        self.saved = {round: dict(record) for round, record in result.train_metrics_clientapp.items()}
        return result


@override
class LoopOfItsOwn:
    """As the example advanced-pytorch does, which writes Flower's loop again."""

    def start(self, grid, initial_arrays, num_rounds, timeout=3600, train_config=None, evaluate_fn=None):
        result, arrays, evaluate_config = Result(), initial_arrays, ConfigRecord()
        self.summary()
        evaluate_fn(0, arrays)
        for number in range(1, num_rounds + 1):
            replies = grid.send_and_receive(self.configure_train(number, arrays, train_config, grid), timeout=timeout)
            arrays, result.train_metrics_clientapp[number] = self.aggregate_train(number, replies)
            result.arrays = arrays
            messages = self.configure_evaluate(number, arrays, evaluate_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            result.evaluate_metrics_clientapp[number] = self.aggregate_evaluate(number, replies)
            evaluate_fn(number, arrays)
        return result


class Delegating(Strategy):
    """A wrapper as apps write it, which adds up what it sends and receives."""

    def __init__(self, strategy):
        self.strategy, self.count = strategy, 0

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.count += len(messages)
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.count += len(replies)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round, arrays, config, grid):
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round, replies):
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self):
        self.strategy.summary()


OVERRIDES["wrapper of its own"] = lambda base, **options: Delegating(base(**options))


def private(kind, noise):
    def strategy(base, **options):
        how = {"clipped_count_stddev": noise} if "Adaptive" in kind else {"clipping_norm": 0.5}
        wrapper = getattr(strategies, f"DifferentialPrivacy{kind}Clipping")
        return wrapper(base(**options), noise_multiplier=noise, num_sampled_clients=NODES, **how)

    return strategy


for side in ("Server", "Client"):
    for how in ("Fixed", "Adaptive"):
        for noise in (0.0, 1.0):
            OVERRIDES[f"DP {side}Side{how}, noise {noise:g}"] = private(f"{side}Side{how}", noise)


# One run, in a simulation that runs all of them.


def flat(arrays):
    return np.concatenate([array.ravel() for array in arrays.to_numpy_ndarrays()])


def plain(records):
    return {number: dict(record) for number, record in records.items() if record is not None}


def run(grid, name, ours):
    """Run a strategy of ``OURS``, or Flower's FedAvg for None; return what happened, without Flower's classes."""
    cls, options = OURS[ours] if ours else ("FedAvg", {})
    options = options | {"poll": 0.01} if ours else options
    every = {"min_train_nodes": NODES, "min_evaluate_nodes": NODES, "min_available_nodes": NODES}
    made, models, lines = None, [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("flwr").addHandler(handler)
    random.seed(1)
    np.random.seed(1)  # which Flower's wrappers use

    def keep(_, arrays):
        models.append(flat(arrays))

    try:
        base = getattr(flower, cls) if ours else strategies.FedAvg
        made = OVERRIDES[name](base, **every, **options)
        arrays = ArrayRecord({key: Array(x) for key, x in MODEL.items()})
        config = ConfigRecord({"lr": LR})
        result = made.start(grid, arrays, num_rounds=ROUNDS, timeout=30, train_config=config, evaluate_fn=keep)
        found = {"arrays": flat(result.arrays), "outcome": "works"}
        found |= {"train": plain(result.train_metrics_clientapp), "evaluate": plain(result.evaluate_metrics_clientapp)}
    except Exception as error:
        found = {"outcome": f"{type(error).__name__}: {error}"}
    finally:
        logging.getLogger("flwr").removeHandler(handler)
    strategy = getattr(made, "strategy", made)
    if ours and strategy is not None and strategy._server is not None:
        found |= {"x": strategy.server.x, "accepted": [len(report.accepted) for report in strategy.reports]}
    return found | {"models": np.array(models), "log": lines}


def serve(connection):
    """Run a simulation that answers the runs of a connection, until it gets None."""
    import torch  # noqa: F401  # for to_torch_state_dict, and not in the clients' processes
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid, context):
        while len(run(grid, "nothing", None).get("train", ())) < ROUNDS:
            pass  # Ray is still starting
        while (case := connection.recv()) is not None:
            connection.send(run(grid, *case))

    for handler in logging.getLogger("flwr").handlers:
        handler.setLevel(logging.CRITICAL)
    session = {"num_cpus": 2, "log_to_driver": False, "_node_ip_address": "127.0.0.1"}
    run_simulation(server, client, NODES, backend_config={"init_args": session, "client_resources": {"num_cpus": 1}})


@contextmanager
def simulation():
    """Yield a function that runs one case in the simulation, which starts with the first case."""
    connection, other = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(other,))
    known = {}

    def ask(*case):
        if process.pid is None:
            process.start()
        if case not in known:
            connection.send(case)
            if not connection.poll(120):
                raise TimeoutError(f"{case}")
            known[case] = connection.recv()
        return known[case]

    try:
        yield ask
    finally:
        if process.pid is not None:
            connection.send(None)
            process.join(30)
            process.kill()


def outcome(theirs, ours):
    """Return "works" if a strategy of fedcore did what Flower's did, or else why not, in a few words."""
    if ours["outcome"] != "works":
        kind, _, reason = re.sub(r"updates: none was accepted .*? \d+ x ", "", ours["outcome"]).partition(": ")
        return f"{kind}: {re.split('[,:;=]', reason)[0]}"
    for kind in ("train", "evaluate"):
        if ours[kind].keys() != theirs[kind].keys():
            return f"rounds of {kind}: {[*ours[kind]]}, not {[*theirs[kind]]}"
    for number, due in theirs["train"].items():  # what the clients were sent
        for name in due.keys() - {"train_loss", "num-batches", "norm_bit"}:
            if not np.isclose(ours["train"][number].get(name, np.nan), due[name]):
                return f"{name} in round {number}: {ours['train'][number].get(name)}, not {due[name]}"
    if len(ours["models"]) != len(theirs["models"]) or not np.isfinite(ours["models"]).all():
        return "models"
    first = np.concatenate([x.ravel() for x in MODEL.values()])
    return "the model did not move" if (np.abs(ours["arrays"] - first) < 1e-4).all() else "works"


def main():
    with simulation() as ask, RECORD.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["override", *OURS])
        for name in OVERRIDES:
            theirs = ask(name, None)
            table.writerow([name, *(outcome(theirs, ask(name, ours)) for ours in OURS)])


if __name__ == "__main__":
    sys.exit(main())
