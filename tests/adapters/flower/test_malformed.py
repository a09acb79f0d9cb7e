"""Replies that no honest node sends: each is rejected by its node, and no other."""

import math
import random

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedcore import Server, Update
from fedcore.adapters import flower
from fedcore.adapters.flower.metrics import ask_sizes
from tests.adapters.drivers.flower import BYTES, Flower, content_of
from tests.adapters.flower.local_grid import LocalGrid
from tests.adapters.malformed import OBJECTS, ODD, assert_only_the_valid_count, malformed

HONEST = [7, 2**63 + 5, 2**40]
LIARS = list(range(1000, 1200))
MODEL = {"w": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32), "steps": np.int64(0)}
INITIAL = ArrayRecord({name: Array(np.asarray(value)) for name, value in MODEL.items()})


def sent(seed):
    rng = np.random.default_rng(seed)
    tensors = {key: rng.normal(size=value.shape).astype(np.float32) for key, value in MODEL.items()}
    return tensors | {"steps": np.array(5, np.int64)}


def valid(seed):
    """The form of an honest reply."""
    return Flower().form(Update(0, sent(seed), steps=5, examples=5), MODEL)


def answers(contents):
    """A grid whose nodes answer every message with these contents, by node."""

    def app_of(node):
        return lambda message, context: Message(contents[node], reply_to=message)

    return LocalGrid({node: (app_of(node), {}) for node in contents})


def replies(seed, odd):
    changed = malformed(valid(9), len(LIARS), seed, odd)
    made = {node: content_of(change) for node, change in zip(LIARS, changed, strict=True)}
    return made | {node: content_of(valid(node)) for node in HONEST}


def test_evaluations_and_sizes_that_are_none_are_left_out_by_node():
    contents = replies(0, [*ODD, *BYTES])
    nodes = [*contents]
    grid = answers(contents)
    sizes = ask_sizes(grid, nodes, None, "config", None, ())
    assert {node: sizes[node] for node in HONEST} == dict.fromkeys(HONEST, 5)
    strategy = flower.FedAvg(min_evaluate_nodes=len(nodes), min_available_nodes=1, fraction_train=0.0)
    asked = strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), grid)
    assert math.isfinite(strategy.aggregate_evaluate(1, grid.send_and_receive(asked))["loss"])
    left_out = {node for node, _ in strategy.left_out}
    assert left_out < {*LIARS}
    assert all(len(reason) <= 500 for _, reason in strategy.left_out)


@pytest.mark.parametrize("odd", OBJECTS)
def test_a_message_that_cannot_be_read_is_left_out(odd):
    grid = answers({node: content_of(valid(node)) for node in HONEST})
    strategy = flower.FedAvg(lr=0.1, fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    came = list(grid.send_and_receive(strategy.configure_train(1, INITIAL, ConfigRecord(), grid)))
    nodes = [message.metadata.src_node_id for message in came]
    came[0].__dict__["_content"] = odd()
    came.append(Message(Error(2, "why"), reply_to=came[1]))
    came[-1].metadata.__dict__["_reply_to_message_id"] = odd()
    came.append(odd())
    came[1].__dict__.update(_content=None, _error=Error(odd(), odd()))
    strategy.aggregate_train(1, came)
    [report] = strategy.reports
    assert report.accepted == (nodes[2],)
    assert nodes[0] in dict(report.rejected)
    assert set(dict(report.rejected)) <= {*nodes[:2]}
    assert [failure.node for failure in strategy.failures] == [nodes[1]]


class InPieces(LocalGrid):
    """Builds replies from pieces, as Flower's own grid does; each liar has changed one piece."""

    rng = random.Random(0)

    def pull_messages(self, message_ids):
        return [self.inflated(reply) for reply in super().pull_messages(message_ids)]

    def inflated(self, reply):
        pieces = {number: piece.deflate() for number, piece in get_all_nested_objects(reply).items()}
        if reply.metadata.src_node_id in LIARS:
            spoil(reply, pieces, self.rng)
        return inflate_object_from_contents(reply.object_id, pieces)


def spoil(reply, pieces, rng):
    """Change a piece as its sender can: Flower's link checks only its form."""
    number = rng.choice([number for number in pieces if number != reply.object_id])
    kind, children, _ = pieces[number].split(b"\x00", 1)[0].decode().split(" ")
    bodies = [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"dtype": 7, "shape": [], "stype": 0, "arraychunk_ids": []}',
        rng.randbytes(40),
    ]
    kinds = ["Array", "ArrayRecord", "MetricRecord", "ConfigRecord", "RecordDict", "Message", "ArrayChunk"]
    body = rng.choice(bodies)
    head = f"{rng.choice([kind, *kinds])} {rng.choice([children, ''])} {len(body)}"
    pieces[number] = head.encode() + b"\x00" + body


def test_replies_that_flower_cannot_put_together_are_rejected_by_node_and_the_others_result_stands():
    contents = {node: content_of(valid(node)) for node in (*HONEST, *LIARS)}
    grid = InPieces(answers(contents).nodes)
    strategy = flower.FedAvg(lr=0.1, fraction_evaluate=0.0, min_train_nodes=len(contents), min_available_nodes=1)
    strategy.start(grid, INITIAL, 2, timeout=30)
    due = Server({**MODEL, "steps": np.array(0)}, "FedAvg", [*contents], lr=0.1)
    for report in strategy.reports:
        assert_only_the_valid_count(report, HONEST, LIARS)
        with due.open_round() as opened:
            for node in report.accepted:
                opened.add(node, sent(node), steps=5, examples=5)
    np.testing.assert_array_equal(strategy.server.x, due.x)


def test_a_node_that_answers_another_s_message_is_rejected_by_its_own_id():
    contents = {node: content_of(valid(node)) for node in HONEST}

    def spoil(node, reply):
        if node == HONEST[0]:
            victim = next(number for _, to, number in grid.sent if to == HONEST[1])
            reply.metadata.__dict__["_reply_to_message_id"] = victim

    nodes = answers(contents).nodes
    grid = LocalGrid({node: nodes[node] for node in (HONEST[1], HONEST[0], HONEST[2])}, spoil)
    strategy = flower.FedAvg(lr=0.1, fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    strategy.choose = lambda round, nodes, k: [HONEST[1], HONEST[0], HONEST[2]]
    strategy.start(grid, INITIAL, 1, timeout=30)
    assert strategy.reports[0].accepted == (HONEST[1], HONEST[2])
    assert [node for node, _ in strategy.reports[0].rejected] == [HONEST[0]]
