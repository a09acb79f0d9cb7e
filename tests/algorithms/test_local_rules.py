"""Local rules and minibatches."""

import ast
import sys
from dataclasses import FrozenInstanceError, fields
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest

import fedcore
from fedcore.algorithms import local_rules
from fedcore.algorithms.local_rules import (
    REGISTRY,
    FullGradient,
    LocalRule,
    OneMinibatch,
    Sgd,
    minibatch_table,
    minibatches,
)
from fedcore.errors import ConfigError, RangeError, UnknownNameError
from tests.sim.outsider import Share, Unsendable


def taken(examples=10, batch=4, **options):
    options = {"seed": 0, "round": 0, "client": 0} | options
    return [indices.tolist() for indices in minibatches(examples, batch, **options)]


def test_each_epoch_is_a_new_permutation_with_a_short_last_batch():
    batches = taken(epochs=3)
    assert [len(indices) for indices in batches] == [4, 4, 2] * 3
    orders = [list(chain(*batches[start : start + 3])) for start in (0, 3, 6)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_steps_span_as_many_epochs_as_needed():
    longer = taken(epochs=3)
    for steps in range(1, 10):
        assert taken(steps=steps) == longer[:steps]
    assert [len(indices) for indices in taken(3, 100, steps=2)] == [3, 3]
    assert next(minibatches(3, 2, steps=1, seed=0, round=0, client=0)).dtype == np.int64


def test_minibatches_depend_on_seed_round_and_client():
    streams = [taken(50, 50, epochs=1, seed=s, round=r, client=c)[0] for s, r, c in product(range(3), repeat=3)]
    assert len({tuple(order) for order in streams}) == 27


def test_minibatches_do_not_depend_on_other_draws():
    expected = taken(epochs=2, round=4, client=7)
    first = minibatches(10, 4, epochs=2, seed=0, round=4, client=7)
    second = minibatches(10, 4, epochs=2, seed=0, round=4, client=8)
    interleaved = [a.tolist() for a, _ in zip(first, second, strict=True)]
    assert interleaved == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "epochs=None, steps=None"),
        ({"epochs": 1, "steps": 1}, "epochs=1, steps=1"),
        ({"epochs": 0}, "epochs"),
        ({"steps": 0}, "steps"),
        ({"steps": 1, "examples": 0}, "examples"),
        ({"steps": 1, "batch": 0}, "batch"),
    ],
)
def test_wrong_numbers_are_rejected_at_the_call(options, message):
    with pytest.raises(RangeError, match=rf"^{message}"):
        minibatches(**({"examples": 3, "batch": 2, "seed": 0, "round": 0, "client": 0} | options))


RULES = [*(rule() for rule in REGISTRY.values()), Share(0.3)]
SAMPLE = {"seed": 1, "round": 2, "client": 3}


def lists(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_message_has_a_rule_s_name_and_options(rule):
    fields = local_rules.written(rule)
    assert all(isinstance(value, str) for value in fields.values())
    assert local_rules.read(fields["local_rule"], fields["rule_options"]) == rule
    assert local_rules.named(local_rules.name_of(rule)) == type(rule)()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_is_a_frozen_value_with_full_steps(rule):
    options = {field.name: getattr(rule, field.name) for field in fields(rule)}
    assert rule == type(rule)(**options)
    assert hash(rule) == hash(type(rule)(**options))
    with pytest.raises((FrozenInstanceError, TypeError)):
        rule.most_steps = 3
    per_epoch = len(list(minibatches(7, rule.batch(2), epochs=1, **SAMPLE)))
    assert rule.full_steps(7, 2, epochs=3) == 3 * per_epoch
    assert rule.full_steps(7, 2, steps=5) == 5


def test_names_of_rules():
    assert {name: local_rules.name_of(rule()) for name, rule in REGISTRY.items()} == {name: name for name in REGISTRY}
    assert local_rules.name_of(Share()) == "tests.sim.outsider:Share"
    assert Share(0.25) != Share()


@pytest.mark.parametrize(
    "name",
    [
        *("sdg", "no.such.module:Rule", "os:system", "", ":", "os:", "..a:B", "tests.sim.outsider"),
        *("tests.sim.outsider:NoRule", "tests.sim.outsider:Missing"),
    ],
)
def test_an_unknown_rule_is_rejected_by_name(name):
    with pytest.raises(UnknownNameError, match=r"^local_rule: "):
        local_rules.read(name, "{}")


def test_a_message_cannot_cause_an_import(monkeypatch):
    monkeypatch.delitem(sys.modules, "tests.sim.outsider")
    name = "tests.sim.outsider:Share"
    with pytest.raises(UnknownNameError, match=r"^local_rule: .*module 'tests.sim.outsider'"):
        local_rules.read(name, "{}")
    assert "tests.sim.outsider" not in sys.modules
    assert local_rules.written(local_rules.named(name, of_examples=0.25))["local_rule"] == name


def test_a_local_class_cannot_be_sent():
    class Mine(Sgd):
        pass

    with pytest.raises(ConfigError, match=r"^local_rule: .*Mine"):
        local_rules.written(Mine())


def test_wrong_options_are_rejected_by_name():
    share = local_rules.name_of(Share())
    with pytest.raises(UnknownNameError, match="local_rule 'sgd': 'rho'"):
        local_rules.read("sgd", '{"rho": 0.1}')
    with pytest.raises(UnknownNameError, match="'of_exmaples' is unknown; did you mean 'of_examples'"):
        local_rules.read(share, '{"of_exmaples": 0.1}')
    with pytest.raises(RangeError, match="of_examples"):
        local_rules.read(share, '{"of_examples": 2}')
    for options in ("", "[]", "1", "{", None, {}, "[" * 100_000):
        with pytest.raises(ConfigError, match="rule_options"):
            local_rules.read("sgd", options)
    for kept in (object(), np.zeros(2), float("nan")):
        with pytest.raises(ConfigError, match="local_rule"):
            local_rules.written(Unsendable(kept))


def test_the_full_gradient_takes_all_examples():
    rule = FullGradient()
    batches = lists(rule.along(minibatches(7, rule.batch(2), epochs=2, **SAMPLE), 7))
    assert [sorted(batch) for batch in batches] == 2 * [list(range(7))]
    with pytest.raises(RangeError, match="batches: "):
        list(rule.along([np.arange(2)], 7))


def test_one_minibatch_joins_all_minibatches():
    expected = np.concatenate(list(minibatches(7, 2, epochs=2, **SAMPLE)))
    rule = OneMinibatch()
    assert lists(rule.along(minibatches(7, rule.batch(2), epochs=2, **SAMPLE), 7)) == [expected.tolist()]
    assert rule.most_steps == 1
    assert Sgd().most_steps is None


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(("examples", "batch", "steps"), [(7, 2, 5), (7, 2, 1), (4, 4, 3), (3, 8, 2), (9, 4, 7)])
def test_a_rule_in_a_table_gives_the_same_minibatches(rule, examples, batch, steps):
    size = rule.batch(batch)
    expected = lists(rule.along(minibatches(examples, size, steps=steps, **SAMPLE), examples))
    table = minibatch_table(local_rules.orders_of(examples, **SAMPLE), examples, size, steps=steps, width=min(size, 16))
    made = rule.in_table(table, examples)
    assert [row[:size].tolist() for row, size in zip(made.indices, made.sizes, strict=True)] == expected
    assert made.indices.min() >= 0
    assert made.indices.max() < examples
    as_base = LocalRule.in_table(rule, table, examples)
    assert [row[:size].tolist() for row, size in zip(as_base.indices, as_base.sizes, strict=True)] == expected


def test_only_local_rules_py_compares_rules():
    """Other files must not depend on a rule's name or class."""
    root = Path(fedcore.errors.__file__).parent
    classes = {rule.__name__ for rule in REGISTRY.values()}
    found = []
    for file in root.rglob("*.py"):
        text = file.read_text()
        names = [name for name in (*REGISTRY, *classes) if name in text]
        if file.name == "local_rules.py" or not names:
            continue
        for node in ast.walk(ast.parse(text)):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                sides += node.args[1:]
            for part in (part for side in sides for part in ast.walk(side)):
                if (isinstance(part, ast.Constant) and part.value in REGISTRY) or getattr(part, "id", "") in classes:
                    found.append(f"{file.relative_to(root)}:{node.lineno}")
    assert found == []
