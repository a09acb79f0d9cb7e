"""``fedcore plan``: sizes beside those of real servers, and unit costs that are measured, saved and used."""

import json
import resource

import numpy as np
import pytest

import fedcore
from fedcore.cli import plan
from tests.cli.command import assert_rejected, invoke, output_of

SIZES = ["--clients", 100, "--parameters", 100_000, "--per-round", 10]


@pytest.fixture(autouse=True)
def _no_saved_costs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(*arguments):
    return json.loads(output_of("plan", *arguments, "--json"))


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
def test_disk_space_is_that_of_a_folder_whose_clients_all_have_rows(tmp_path, codec):
    storage = fedcore.Storage(tmp_path / "state", codec=codec)
    with fedcore.Server(np.zeros(100_000, np.float32), "MIFA", clients=100, lr=0.1, storage=storage) as server:
        for first in range(0, 110, 10):
            h = np.ones(100_000, np.float32)
            server.round([fedcore.Update(client % 100, h, steps=1) for client in range(first, first + 10)])
        used = sum(file.stat().st_blocks * 512 for file in (tmp_path / "state").iterdir())
    due = planned(*SIZES, "--method", "MIFA", "--codec", codec, "--numbered")["disk"]
    assert sum(due.values()) == pytest.approx(used, rel=0.1)  # a file grows in steps of 1 MB or more


@pytest.mark.parametrize("method", ["FedAvg", "FedAvgM", "FedACG", "MIFA", "SCAFFOLD"])
def test_vectors_on_disk_are_those_of_the_method(tmp_path, method):
    sizes = ["--clients", 4, "--parameters", 1_000_000, "--per-round", 2]
    due = planned(*sizes, "--method", method)["disk"]["vectors"]
    storage = fedcore.Storage(tmp_path)
    with fedcore.Server(np.zeros(1_000_000, np.float32), method, clients=4, lr=0.1, storage=storage) as server:
        y = np.ones(1_000_000, np.float32)
        for _ in range(3):
            control = y if server.broadcast(range(4)).second_vector else None
            server.round([fedcore.Update(client, y, steps=1, control=control) for client in range(4)])
        used = sum(file.stat().st_blocks * 512 for file in tmp_path.glob("vectors*"))
    assert due == pytest.approx(used, rel=0.1)


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "SCAFFOLD", "FedAvgMVR"])
def test_network_is_what_the_server_sends_and_receives(method):
    server = fedcore.Server(np.zeros(1_000, np.float32), method, clients=100, lr=0.1)
    sent = server.broadcast(range(10))
    control = np.ones(1_000, np.float32) if sent.second_vector else None
    y = np.ones(1_000, np.float32)
    report = server.round([fedcore.Update(client, y, steps=1, control=control) for client in range(10)])
    due = planned("--clients", 100, "--parameters", 1_000, "--per-round", 10, "--method", method)["network"]
    assert due == {"to clients": sent.bytes, "from clients": report.bytes}


def test_messages_of_edges_have_the_planned_bytes():
    clients, x = [2**64 - 1 - i for i in range(20)], np.zeros(1_000, np.float32)
    size = 0
    for own in (clients[:10], clients[10:]):
        edge = fedcore.EdgeAggregator(x, "FedAvg", own, lr=0.1)
        with edge.open_round(x, round=0) as round:
            for client in own:
                round.add(client, x, steps=1, examples=1)
            size += len(round.partial_sum().to_bytes())
    due = planned("--clients", 20, "--parameters", 1_000, "--per-round", 20, "--edges", 2)["network"]
    assert due["from edges"] == pytest.approx(size, rel=0.05)


def seconds(*sizes):
    return sum(planned(*sizes)["seconds"].values())


@pytest.mark.parametrize(
    ("clients", "n", "per_round", "deadline"),
    [(10**8, 10**6, 10**5, 15), (10**6, 10**6, 10**5, 9), (10**6, 500_000, 500, 0.18)],
)
@pytest.mark.parametrize("kind", ["shards", "edges"])
def test_deadline_finds_the_least_number_that_suffices(clients, n, per_round, deadline, kind):
    """At 9 s only counts between powers of two suffice. The seconds of edges fall, and then rise."""
    sizes = ["--clients", clients, "--parameters", n, "--per-round", per_round]
    count = planned(*sizes, "--deadline", deadline)[f"{kind} needed"]
    most = -(-n // 16_384) if kind == "shards" else 100
    times = [seconds(*sizes, f"--{kind}", k) for k in range(1, (count or most) + 1)]
    assert [k for k, time in enumerate(times, 1) if time <= deadline] == ([count] if count else [])


def test_deadline_tries_the_number_of_edges_with_the_shortest_round():
    sizes = ["--clients", 10**6, "--parameters", 10**6, "--per-round", 3_000]
    times = {k: seconds(*sizes, "--edges", k) for k in (*range(1, 60), 3_000)}
    best = min(times, key=times.__getitem__)
    assert best.bit_count() > 1
    assert planned(*sizes, "--deadline", times[best])["edges needed"] == best
    assert planned(*sizes, "--deadline", times[best] * 0.999)["edges needed"] is None


def test_deadline_without_edges_or_with_one_shard():
    sizes = ["--clients", 10**8, "--parameters", 10**6, "--per-round", 10**5]
    assert planned(*sizes, "--deadline", 1e-6)["shards needed"] is None
    assert "edges needed" not in planned(*sizes, "--method", "MIFA", "--deadline", 10**6)
    assert planned(*sizes, "--deadline", 10**6)["shards needed"] == 1


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ((10**8, 10**6, 10**5, "--deadline", 18), "network, 36 times"),
        ((10**8, 10**6, 10**5, "--method", "MIFA", "--codec", "int8"), "disk, 28 times"),
        ((100, 7 * 10**9, 1), "memory, "),
        ((10**6, 10**3, 10**6, "--deadline", 1), "seconds, "),
    ],
)
def test_the_first_to_break_is_named(sizes, first):
    clients, n, per_round, *more = sizes
    printed = output_of("plan", "--clients", clients, "--parameters", n, "--per-round", per_round, *more)
    assert f"first to break: {first}" in printed


def test_a_large_round_is_the_sum_of_its_costs():
    """Twice the updates double what grows with them; memory that no one asked for does not appear."""
    one, two = (planned("--clients", 10**6, "--parameters", 10**6, "--per-round", s, "--numbered") for s in (100, 200))
    assert two["seconds"]["updates"] == pytest.approx(2 * one["seconds"]["updates"])
    assert two["network"]["to clients"] == 2 * one["network"]["to clients"]
    assert one["memory"]["clients"] == one["disk"]["clients"] == 0


def test_measured_costs_are_saved_and_used(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "SIZES", ((100, 20, 4, 4), (1_000, 8, 2, 4), (20_000, 6, 2, 4), (200_000, 4, 2, 4)))
    for name, value in {"CLIENTS": 20_000, "CROWD": 2_000, "OF_CROWD": (100, 20, 4, 4)}.items():
        monkeypatch.setattr(plan, name, value)
    before = planned(*SIZES, "--costs", tmp_path / "costs")
    assert "documentation" in before["source"]
    assert not (tmp_path / "costs").exists()
    (tmp_path / "costs").mkdir()
    (tmp_path / "costs" / "plan.json").write_text('{"FedAvg f32 folder": {}}')  # as of an earlier version
    measured = planned(*SIZES, "--measure", "--costs", tmp_path / "costs")
    assert [file.name for file in (tmp_path / "costs").iterdir()] == ["plan.json"]
    (saved,) = json.loads((tmp_path / "costs" / "plan.json").read_text()).values()
    assert measured["unit_costs"] == saved
    assert {len(points) for key in ("server", "edge", "sum", "step") for points in [saved[key]]} == {4}
    assert 10 < saved["disk_client"] < 40
    assert saved["disk_vectors"] == pytest.approx(8, rel=0.2)
    assert 0 < saved["process"] < 2**10 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    again = planned(*SIZES, "--costs", tmp_path / "costs")
    assert (again, "of this machine" in again["source"]) == (measured, True)
    assert "documentation" in planned(*SIZES, "--in-memory", "--costs", tmp_path / "costs")["source"]


def test_measured_memory_is_without_rows_in_files(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "SIZES", ((100, 20, 4, 4), (1_000, 8, 2, 4), (20_000, 6, 2, 4), (400_000, 8, 2, 4)))
    monkeypatch.setattr(plan, "CLIENTS", 100)
    costs = planned(*SIZES, "--method", "MIFA", "--measure", "--costs", tmp_path)["unit_costs"]
    assert 24 < costs["vectors"] < 90  # x, three sums in float64, and updates


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"FedAvg f32 folder": {}}', '{"FedAvg f32 folder": []}'])
def test_damaged_costs_have_a_clear_error(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    assert_rejected(invoke("plan", *SIZES, "--costs", tmp_path), "plan.json: is damaged")


@pytest.mark.parametrize("value", [None, "many", [1, 2, 3], [[1, 2, 3]]])
def test_each_damaged_cost_has_a_clear_error(tmp_path, value):
    costs = planned(*SIZES)["unit_costs"]
    for name in costs:
        damaged = {key: cost for key, cost in costs.items() if key != name} | ({name: value} if value else {})
        (tmp_path / "plan.json").write_text(json.dumps({"FedAvg f32 folder": damaged}))
        assert_rejected(invoke("plan", *SIZES, "--costs", tmp_path), "plan.json: is damaged")


def test_text_has_the_parts_and_the_source():
    output = output_of("plan", *SIZES, "--method", "MIFA", "--deadline", 60)
    for words in ("memory", "disk", "rows", "network", "seconds", "shards needed: 1", "unit costs: those of MIFA f32"):
        assert words in output
    assert "of each shard" not in output
    output = output_of("plan", *SIZES, "--shards", 2)
    assert "memory of each shard" in output
    assert "disk of each shard" in output


def test_wrong_options_are_rejected(tmp_path):
    assert_rejected(invoke("plan", *SIZES, "--method", "MIFA", "--edges", 2), "--edges: does not work with MIFA")
    assert_rejected(invoke("plan", *SIZES, "--edges", 2, "--shards", 2), "--edges: does not work with --shards")
    assert_rejected(invoke("plan", *SIZES, "--method", "MIFFA"), "MIFA")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--per-round", 101], "--per-round 101: must be at most 100 (--clients)"),
        (["--active", 9], "--per-round 10: must be at most 9 (--active)"),
        (["--active", 101], "--active 101: must be at most 100 (--clients)"),
        (["--edges", 11], "--edges 11: must be at most 10 (--per-round)"),
        (["--shards", 8], "--shards 8: must be at most 7 (one for each"),
        (["--clients", 2**31], "--numbered"),
        (["--deadline", 0], "--deadline: '0': must be a finite number above 0"),
        (["--parameters", "1.5e0"], "--parameters"),
        (["--parameters", "1e999"], "--parameters"),
    ],
)
def test_servers_that_cannot_be_are_rejected(changed, words):
    assert_rejected(invoke("plan", *SIZES, *changed), words)


def test_the_greatest_sizes_are_planned():
    sizes = ["--active", 10, "--edges", 10, "--clients", 2**31 - 1, "--parameters", "1e5"]
    assert planned(*SIZES, *sizes)["memory"]["vectors"] > 0
    assert planned(*SIZES, "--shards", 7)["seconds"]["updates"] > 0
    assert planned(*SIZES, "--clients", 2**31, "--numbered")["memory"]["clients"] == 0


def test_the_slowest_edge_has_the_remainder():
    even, one_more = (planned(*SIZES[:-1], s, "--edges", 5) for s in (10, 11))
    assert one_more["edge memory"]["updates"] == pytest.approx(1.5 * even["edge memory"]["updates"])
    assert one_more["seconds"]["updates"] == planned(*SIZES[:-1], 15, "--edges", 5)["seconds"]["updates"]


def test_sums_take_longer_among_more_ids():
    cases = ([10**4], [10**7], [10**7, "--numbered"])
    few, many, numbered = (planned(*SIZES, "--edges", 2, "--clients", *case)["seconds"]["sums"] for case in cases)
    assert numbered == few < many
