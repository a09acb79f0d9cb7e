"""One client cannot spoil buffers and counters: variances stay positive, counters count steps."""

import numpy as np
import pytest
import torch

from fedcore import ClientStore, Compute, Limits, Model, RoundPolicy, Server, Update
from fedcore.algorithms import MIFA, FedAsync
from fedcore.cluster.manifest import BLOCK
from fedcore.rules import Median
from tests.kit import flat
from tests.rejections import rejected_arguments

METHODS = ["FedAvg", "MIFA", "MimiC", "SCAFFOLD"]


def model(var=1.0, count=10, dtype=np.int64):
    return {
        "w": np.zeros(4, np.float32),
        "running_mean": np.full(3, 0.5, np.float32),
        "running_var": np.full(3, var, np.float32),
        "num_batches_tracked": np.array(count, dtype),
    }


def server_of(method="FedAvg", **options):
    return Server(model(), method, 10, **dict(lr=0.1) | flat(**options))


def in_one(server, var):
    y = server.x.copy()
    y[-3:] = var
    return y


FORMS = {
    "by name": (lambda server, var: model(var), "model"),
    "flat": (in_one, "model"),
    "bytes": (lambda server, var: in_one(server, var).tobytes(), "model"),
    "bfloat16": (lambda server, var: torch.from_numpy(in_one(server, var)).bfloat16(), "model"),
    "difference": (lambda server, var: in_one(server, var) - server.x, "delta"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_a_negative_variance_is_rejected(method, form):
    make, kind = FORMS[form]
    server, without = server_of(method), server_of(method)
    updates = [Update(i, make(server, var), steps=5, kind=kind) for i, var in enumerate((2.0, -60000.0))]
    report = server.round(updates)
    without.round(updates[:1])
    [(client, why)] = report.rejected
    assert client == 1
    assert why.startswith("running_var")
    assert server.x.tobytes() == without.x.tobytes()


def test_a_negative_variance_in_a_list_of_flat_models_is_rejected():
    start = {name: tensor for name, tensor in model().items() if name != "num_batches_tracked"}
    server = Server(start, "FedAvg", 10, lr=0.1)
    report = server.round([Update(i, in_one(server, -1.0 if i == 9 else 1.0), 5) for i in range(10)])
    assert [client for client, _ in report.rejected] == [9]


def test_a_mean_and_a_buffer_that_starts_at_zero_may_have_any_sign():
    start = model(var=0.0)
    server = Server(start, "FedAvg", 3, lr=0.1)
    lower = start | {"running_mean": np.full(3, -1, np.float32), "running_var": np.full(3, -1, np.float32)}
    assert server.round([Update(0, lower, 5)]).rejected == ()
    signed = Server(model(), "FedAvg", 3, lr=0.1, limits=Limits(signed_buffers=["running_*"]))
    assert signed.round([Update(0, lower, 5)]).rejected == ()


def halves():
    """Two groups of tensors, and one block of parameters for each of two shards."""
    return {"a": np.zeros(BLOCK, np.float32), "b": np.zeros(BLOCK, np.float32), "running_var": np.ones(3, np.float32)}


LATE = RoundPolicy(max_staleness=2)
PLACES = {
    "plain": dict(policy=LATE),
    "rows": dict(policy=LATE, algorithm=MIFA(wait=False)),
    "own starts": dict(algorithm="FedAWE"),
    "median": dict(policy=LATE, aggregation=Median()),
    "exact": dict(policy=LATE, compute=Compute(accumulator="exact")),
    "shards": dict(policy=LATE, compute=Compute(shards=2)),
    "groups": dict(policy=LATE, model=Model(halves(), partial={"a": "a"})),
    "discount": dict(policy=RoundPolicy(buffer=1, max_staleness=2, discount=1)),
    "FedAsync": dict(policy=RoundPolicy(buffer=1, max_staleness=2), algorithm=FedAsync(alpha=0.5)),
}


@pytest.mark.parametrize("kind", ["model", "delta"])
@pytest.mark.parametrize("place", PLACES)
def test_buffers_become_the_mean_of_those_sent_wherever_clients_started(place, kind):
    server = Server(**dict(model=halves(), algorithm="FedAvg", clients=2, lr=0.1) | PLACES[place])
    kind, add = "model" if place == "FedAsync" else kind, server.push if server.settings.policy.buffer else server.round
    for t, var in enumerate((5, 7)):
        sent = halves() | {"running_var": np.full(3, var - (kind == "delta"), np.float32)}
        add([Update(t, sent, 5, kind=kind, round=t if place == "own starts" else 0)])
    assert server.tensors()["running_var"].tolist() == [6 if place == "discount" else 7] * 3


def test_rounding_makes_no_variance_negative():
    server = server_of("FedAvg")
    for t in range(50):
        tiny = np.float32(0.1) ** t
        server.round([Update(i, model(tiny * i / 7), 1, examples=1 + i) for i in range(7)])
        assert (server.tensors()["running_var"] >= 0).all()
    report = server.round([Update(0, model(-1e-30), 1)])
    assert [client for client, _ in report.rejected] == [0]


@pytest.mark.parametrize("accumulator", ["exact", "float32", "float64"])
@pytest.mark.parametrize(("weight", "after"), [(1e-320, (0.5, 0.5)), (1e-14, (0.5, 1.5)), (1e-10, (1.5, 1.5))])
def test_buffers_whose_weight_is_too_small_for_a_mean_stay(weight, after, accumulator):
    server, sent = server_of(accumulator=accumulator), model() | {"running_mean": np.full(3, 1.5, np.float32)}
    own = Update(0, sent, 1, weight=weight), Update(1, np.ones(4, np.float32), 1, kind="gradient", weight=1.0)
    assert server.round(own).accepted == (0, 1)
    np.testing.assert_allclose(server.tensors()["running_mean"], after[accumulator != "exact"], rtol=1e-4)


def test_the_names_of_nonnegative_buffers_are_saved(tmp_path):
    server = server_of()
    server.round([Update(0, model(0.0), 5)])  # all of it is zero now
    server.save(tmp_path / "copy")
    assert Server.load(tmp_path / "copy").round([Update(0, model(-1.0), 5)]).accepted == ()


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, np.uint64])
@pytest.mark.parametrize("method", METHODS)
def test_a_counter_past_its_dtype_or_past_every_count_is_rejected(method, dtype):
    server = Server(model(dtype=dtype), method, 10, lr=0.1)
    most = min(10 + 2**53, np.iinfo(dtype).max)
    still = {name: np.zeros_like(tensor) for name, tensor in model().items()}
    report = server.round(
        [
            Update(i, value=still | {"num_batches_tracked": np.array(most - 10 + i, dtype)}, kind="delta", steps=5)
            for i in range(2)
        ]
    )
    assert report.accepted == (0,)
    assert rejected_arguments(report) == [(1, "num_batches_tracked")]


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint64])
def test_a_counter_grows_by_ten_times_the_cohort_s_median_at_most(dtype):
    def count(*grown, start=10, steps=10**6):
        server = Server(model(count=start, dtype=dtype), "FedAvg", 10, lr=0.1)
        report = server.round([Update(i, model(count=start + by, dtype=dtype), steps) for i, by in enumerate(grown)])
        assert len(report.accepted) == len(grown)
        return int(server.tensors()["num_batches_tracked"]) - start

    assert count(2, 2, 3, 2, 3, 100) == 20
    assert count(3, 100) == 30  # of two the lower one
    assert count(100, 2, 5) == 50
    assert count(1, 6, 100, 2, 0) == 20  # of the four that grew the lower one in the middle
    assert count(0, 0, 0, 4, 5) == 5  # clients without growth do not count
    assert count(0, 0, -5) == 0
    assert count(7) == 7
    if dtype == np.int8:
        assert count(1, 1, 255, start=-128) == 10
    if dtype == np.uint64:
        assert count(1, 1, 10**6, start=2**64 - 1 - 10**6) == 10


def test_each_element_of_a_counter_has_its_own_median():
    x0 = {"w": np.zeros(2, np.float32), "num_batches_tracked": np.zeros(3, np.int64)}
    seen = [[1, 0, 0], [2, 0, 0], [1, 0, 7], [500, 500, 500]]
    server = Server(x0, "FedAvg", 4, lr=0.1)
    server.round([Update(i, x0 | {"num_batches_tracked": np.array(counts)}, 1000) for i, counts in enumerate(seen)])
    assert server.tensors()["num_batches_tracked"].tolist() == [10, 500, 70]


@pytest.mark.parametrize("first", [0, 9])
@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_unchanged_buffers_are_limited_by_their_own_length(name, first):
    """With BatchNorm in evaluation mode the median of changes is zero, and does not limit a change of 1e29."""
    server = server_of(reject_long=10.0)
    updates = [Update(i, model() | {"w": np.full(4, 1 + i, np.float32)}, 5) for i in range(10)]
    updates[first] = updates[first]._replace(value=model() | {name: np.full(3, 1e29, np.float32)})
    report = server.round(updates)
    [(client, why)] = report.rejected
    assert client == first
    assert "RejectLong" in why
    np.testing.assert_array_equal(server.tensors()[name], model()[name])


def test_a_folder_without_names_of_nonnegative_buffers_keeps_variances_positive(tmp_path):
    with server_of("MIFA", path=tmp_path / "run") as server:
        state = server.store.state
    del state["settings"]["nonnegative"]
    with ClientStore.open(tmp_path / "run") as rows:
        vectors = {name: rows.vector(name) for name in rows.vector_names()}
        rows.commit(0, vectors, state)
    with Server.load(tmp_path / "run") as again:
        assert again.round([Update(0, model(-1.0), 5)]).rejected[0][0] == 0
