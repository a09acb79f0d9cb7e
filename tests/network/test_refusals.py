"""What nodes send wrongly is refused by name, and a caller's mistake raises; the others' round goes on."""

import re

import numpy as np
import pytest

from fedcore import Network, Update, errors
from fedcore.topology import Topology
from tests.network.problem import pair, vector


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (dict(model=vector(1)), r"model: expected float32\[2\]"),
        (dict(model=np.ones(2, np.int64)), r"model: expected float32\[2\], got int64\[2\]"),
        (dict(model=vector(np.nan, 0)), "update: expected finite numbers"),
        (dict(model=vector(0, -np.inf)), "update: expected finite numbers"),
        (dict(model=vector(1e31, 0)), "update: expected finite numbers"),
        (dict(delta=vector(3e38, 0)), "update: expected finite numbers"),
        (dict(gradient=vector(3e38, 0), steps=10**6), "update: expected finite numbers"),
        (dict(gradient=vector(np.nan, 0)), "update: expected finite numbers"),
        (dict(model=b"1234567"), "model: expected 8 bytes"),
        (dict(model=None), "model: expected"),
        (dict(steps=0), "steps: expected an integer in 1..1000000, got 0"),
        (dict(steps=10**7), "steps: expected"),
        (dict(steps=2.0), "steps: expected"),
        (dict(lr=-1.0), "lr: expected"),
        (dict(lr=float("nan")), "lr: expected"),
        (dict(round=3), "round: expected 0, the open one, got 3"),
    ],
)
def test_what_a_node_sent_wrongly_is_refused_and_the_round_goes_on(sent, message):
    network, clean = pair(), pair()
    with network.open_round() as opened:
        opened.add(0, **({"steps": 1, next(iter({"delta", "gradient"} & sent.keys()), "model"): vector(1, 1)} | sent))
        opened.add(1, vector(3, 4), steps=1)
    (refusal,) = opened.report.refused
    assert refusal[0] == 0
    assert re.match(message, refusal[1])
    assert opened.report.heard == (1,)
    clean_report = clean.round([Update(1, vector(3, 4), steps=1)])
    np.testing.assert_array_equal(network.models, clean.models)
    assert opened.report.diversity == clean_report.diversity == 1
    assert opened.report.consensus == clean_report.consensus


def test_a_second_update_of_a_node_is_refused_and_the_first_counts():
    network = pair()
    with network.open_round() as opened:
        assert opened.add(0, vector(2, 2), steps=1)
        assert not opened.add(0, vector(9, 9), steps=1)
    assert opened.report.heard == (0,)
    assert [node for node, _ in opened.report.refused] == [0]
    np.testing.assert_array_equal(network.models, [[1, 1], [0, 0]])


def test_a_node_that_was_refused_may_try_again():
    network = pair()
    with network.open_round() as opened:
        opened.add(0, vector(np.inf, 1), steps=1)
        opened.add(0, vector(2, 2), steps=1)
    assert (opened.report.heard, len(opened.report.refused)) == ((0,), 1)
    np.testing.assert_array_equal(network.models, [[1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("update", "error", "message"),
    [
        (Update(2, vector(1, 1), 1), errors.UnknownClientError, r"node: expected an integer in 0\.\.1, got 2"),
        (Update(-1, vector(1, 1), 1), errors.UnknownClientError, "node: expected"),
        (Update("0", vector(1, 1), 1), errors.UnknownClientError, "node: expected"),
        (Update(True, vector(1, 1), 1), errors.UnknownClientError, "node: expected"),
        (
            Update(0, vector(1, 1), 1, gradient=vector(1, 1)),
            errors.RangeError,
            "model, delta, gradient: expected one of them, got model and gradient",
        ),
        (Update(0, vector(1, 1), 1, count=2), errors.RangeError, "count: expected 1, since every node is one, got 2"),
    ],
)
def test_a_callers_mistake_raises_and_the_round_stays_open(update, error, message):
    with pair().open_round() as opened:
        opened.add(np.int64(1), vector(1, 1), steps=1)
        with pytest.raises(error, match=message):
            opened.add_update(update)
    assert opened.report.heard == (1,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(models=[]), errors.ArrayError, "models: expected a list or tuple"),
        (dict(models=np.zeros((2, 3), np.float32)), errors.ArrayError, "models: expected a list or tuple"),
        (dict(models=[vector(1), vector(1, 2)]), errors.ShapeError, "x: expected shape"),
        (dict(models=[vector(1), vector(np.nan)]), errors.ArrayError, r"models\[1\]: expected finite"),
        (dict(models=[[], []]), errors.ShapeError, r"models\[0\]: expected at least one parameter"),
        (dict(W=np.eye(3)), errors.ShapeError, r"W: expected \[2, 2\], one row a model, got \[3, 3\]"),
        (dict(W=[[1], [1, 2]]), errors.ShapeError, "W: expected"),
        (dict(W=[["1", "0"], ["0", "1"]]), errors.DtypeError, "W: expected float32 or float64"),
        (dict(W=[[1.5, -0.5], [-0.5, 1.5]]), errors.RangeError, "W: expected finite entries >= 0"),
        (dict(W=[[np.nan, 1], [1, 0]]), errors.RangeError, "W: expected finite entries >= 0"),
        (dict(W=[[0.5, 0.5], [0.4, 0.6]]), errors.RangeError, "W: expected a symmetric matrix"),
        (dict(W=[[0.5, 0.4], [0.4, 0.6]]), errors.RangeError, "W: expected rows that add up to 1, got 0.9 in row 0"),
        (
            dict(W=np.eye(2)),
            errors.RangeError,
            r"W: expected a matrix that mixes all models \(zeta < 1\), got zeta = 1",
        ),
        (dict(W=[[0.0, 1.0], [1.0, 0.0]]), errors.RangeError, r"zeta < 1\), got zeta = 1"),  # they only change places
        (dict(W=Topology.named("ring", 3)), errors.ShapeError, r"W: expected \[2, 2\]"),
        (dict(q=[1]), errors.ShapeError, "q: expected 2 numbers"),
        (dict(q=[1, -1]), errors.RangeError, "q: expected finite numbers >= 0"),
        (dict(q=[0, 0]), errors.RangeError, "q: expected finite numbers >= 0 with a sum > 0"),
        (dict(q=["a", "b"]), errors.DtypeError, "q: expected 2 numbers"),
        (dict(lr=0), errors.RangeError, "rate: expected"),
        (dict(max_steps=0), errors.RangeError, "max_steps: expected"),
    ],
)
def test_arguments_are_checked(change, error, message):
    with pytest.raises(error, match=message):
        Network(**(dict(models=[vector(1, 2), vector(3, 4)], W=np.full((2, 2), 0.5), lr=0.1) | change))
