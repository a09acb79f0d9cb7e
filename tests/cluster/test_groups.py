"""Partial updates on shards have the bits of partial updates on one server, whatever happens to both."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from fedcore import Compute, EdgeAggregator, Limits, Model, RoundPolicy, Server, Storage, Update, cluster
from fedcore.cluster import Slices, manifest
from fedcore.errors import CheckpointError, RangeError, RoundError, StoreError
from fedcore.model import Layout
from fedcore.rules import Krum, PrivateMean
from fedcore.server.folder import read_model
from fedcore.store import ClientStore
from tests.cli.command import invoke, output_of
from tests.cluster.pairs import audited, both, same, told
from tests.server import test_groups
from tests.server.test_groups import METHODS, N, claims_of, sets_in, sets_of

SHAPES = {"image.w": (3, 16_384), "text.w": (20_000,), "text.running_var": (5,), "body": (500,)}
NAMES = {"text": ["text.w", "text.running_var", "text.num_batches_tracked"], "image": ["image.w"], "rest": ["body"]}
THREE = tuple(NAMES)


def tensors_of(rng, shapes=SHAPES, moved=0):
    tensors = {name: (1 + np.abs(rng.normal(size=shape))).astype(np.float32) for name, shape in shapes.items()}
    return tensors | {"text.num_batches_tracked": np.int64(3 + moved)}


def update_of(client, round, groups, shapes=SHAPES):
    tensors = tensors_of(np.random.default_rng([client, round]), shapes, moved=client)
    return {name: tensor for name, tensor in tensors.items() if any(name in NAMES[group] for group in groups)}


def new_server(method, shards=None, shapes=SHAPES, clients=N, **options):
    model = Model(tensors_of(np.random.default_rng(3), shapes), {"text": "text.*", "image": "image.*"})
    options = {"algorithm": method.split()[0], "clients": clients, "lr": 0.1} | options
    compute = replace(options.pop("compute", Compute()), **({} if shards is None else {"shards": shards}))
    return Server(model, compute=compute, **options)


def run_round(server, sets=None, cohort=None, shapes=SHAPES, start=None, **options):
    """A round of a random cohort, or of this one."""
    number, sets = server.round_number, sets or sets_of(THREE)
    cohort = np.flatnonzero(np.random.default_rng(number).random(N) < 0.6).tolist() if cohort is None else cohort
    with server.open_round(**options) as opened:
        for client in [one for one in cohort if one in server.clients or one in options.get("newcomers", ())]:
            rng, sent = np.random.default_rng([client, number, 7]), dict(claims_of(client))
            if server.algorithm.second_vector:
                sent["control"] = rng.normal(size=server.layout.n_parameters).astype(np.float32)
            if start is not None:
                sent["round"] = start(client, number)
            opened.add(client, update_of(client, number, sets[client % len(sets)], shapes), **sent)
    return opened.report


def whole(report):
    """What a report tells, with those of its groups."""
    return told(report) | {"groups": {name: told(one) for name, one in (report.groups or {}).items()}}


def alike(first, second):
    assert whole(first) == whole(second)


def sent_alike(one, many):
    """Clients get the same."""
    first, second = one.broadcast(one.clients), many.broadcast(many.clients)
    assert (first.x_prev is None) == (second.x_prev is None)
    assert first.x_prev is None or first.x_prev.tobytes() == second.x_prev.tobytes()
    for client in one.clients:
        assert first.start(client).tobytes() == second.start(client).tobytes()
        assert np.asarray(first.offset(client)).tobytes() == np.asarray(second.offset(client)).tobytes()


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sample(1)
def test_each_round_has_the_bits_of_one_server(method, shards):
    """With newcomers, all of whose tensors are one group's parameters, so that lengths are the same too."""
    options, policy = METHODS[method], METHODS[method].get("policy")
    one, many, known = new_server(method, **options), new_server(method, shards, **options), set()
    sized = isinstance(options.get("clients"), dict)
    for number in range(4):
        sets = sets_in(number, THREE, sets_of(THREE) if one.algorithm.counts_absent else None, known)
        newcomers = [] if number != 1 else {N: 5} if sized else [N]
        cohort = [*list(newcomers), *reversed(np.flatnonzero(np.random.default_rng(number).random(N) < 0.7).tolist())]
        late = {} if policy is None else {"start": lambda client, round: max(0, round - client % 2)}
        reports = [run_round(server, sets, cohort, newcomers=newcomers, **late) for server in (one, many)]
        alike(*reports)
        same(one, many)
        known |= set(reports[0].accepted)
    sent_alike(one, many)
    many.close()


class TestGroupsOnShards(test_groups.TestGroups):
    """The contract of every server: each group has a part on each of two shards, or on one."""

    options = {name: one for name, one in test_groups.TestGroups.options.items() if name != "noise"}  # of each element
    shapes = {"w": (2, 16_384), "b": (1_000,)}

    def make_server(self, folder, model, *args, **options):
        compute = replace(options.pop("compute", Compute()), shards=2)
        return Server(Model(model, {"head": "w"}), *args, storage=Storage(folder), compute=compute, **options)


def test_ranges_are_cut_at_blocks_of_a_group():
    layout = Layout.of(Model(tensors_of(np.random.default_rng(0)), {"text": "text.*", "image": "image.*"}))
    ranges = manifest.ranges_of(layout, 4)
    assert [span.start for span in ranges] == [0, 16_384, 20_000 + 16_384, 20_000 + 2 * 16_384]
    pieces = [manifest.pieces_of(layout, span) for span in ranges]
    assert [(piece["text"].start, piece["text"].stop) for piece in pieces][:2] == [(0, 16_384), (16_384, 20_005)]
    assert [piece["image"].end - piece["image"].start for piece in pieces] == [0, 16_384, 16_384, 16_384]
    with pytest.raises(RangeError, match="at most 6"):
        manifest.ranges_of(layout, 7)


def test_lengths_of_several_tensors_differ_in_the_last_bits_only():
    """As without groups; see docs/cluster.md."""
    shapes, options = SHAPES | {"image.b": (300,)}, {"limits": Limits(max_norm=1e6)}
    NAMES["image"].append("image.b")
    try:
        one, many = (new_server("MIFA", shards, shapes, **options) for shards in (None, 3))
        for _ in range(3):
            first, second = (run_round(server, shapes=shapes) for server in (one, many))
            np.testing.assert_allclose(first.norms, second.norms, rtol=1e-6)
            assert first.accepted == second.accepted
            same(one, many)
    finally:
        NAMES["image"].remove("image.b")
    many.close()


@pytest.mark.parametrize("method", ["MIFA", "FedAvg", "SCAFFOLD"])
def test_a_folder(method, folder_in_memory):
    """Changes, an audit, an update in a journal, a copy, commands, and other numbers of shards."""
    run, other = folder_in_memory / "run", folder_in_memory / "other"
    one = new_server(method, storage=Storage(folder_in_memory / "one", audit=True, journal=True))
    many = new_server(method, 3, storage=Storage(run, audit=True, journal=True))

    def go_on(*servers):
        for server in servers:
            run_round(server)
            server.add_clients([f"new {server.round_number}"])
            server.remove_client(3) if 3 in server.clients else None
            server.change(lr=0.2 / (server.round_number + 1))
            server.replace_x(update_of(1, 9, ["text"]))
            run_round(server)
        assert audited(servers[0]) == audited(servers[-1])
        same(*servers, opened_again=True)

    go_on(one, many)
    many.save(folder_in_memory / "copy")
    many.compact(erase=True)
    assert many.verify() == []
    many.close()
    for place in (folder_in_memory / "copy", run):
        assert f"sound: 3 shards at transaction {one.transactions}" in output_of("store", "verify", place)
        with Server.load(place) as many:
            same(one, many, opened_again=True)
    with Server.load(run) as many:
        go_on(one, many)
        assert many.open_round().add(2, update_of(2, 0, sets_of(THREE)[2]), steps=3)
    assert one.open_round().add(2, update_of(2, 0, sets_of(THREE)[2]), steps=3)
    cluster.reshard(folder_in_memory / "one", 2, to=other)  # a reader
    one.close()
    cluster.reshard(run, 4)
    assert str(one.transactions) in output_of("store", "info", run)
    with Server.load(run) as many, Server.load(other) as split, Server.load(folder_in_memory / "one") as one:
        reports = []
        for server in (one, many, split):
            opened = server.open_round()
            assert opened.clients == (2,)
            reports.append(replace(opened.finish(), audited=None))  # has the time
        alike(reports[0], reports[1])
        alike(reports[0], reports[2])
        go_on(one, many)
    assert "sound: 4 shards" in output_of("store", "verify", run)


def test_a_commit_that_fails_in_one_store_changes_nothing(folder_in_memory, monkeypatch):
    """A round has one commit in each of four stores of three shards, which are opened again after the error."""
    one, many = new_server("MIFA"), new_server("MIFA", 3, storage=folder_in_memory / "run")
    for due in (1, 5, 12):
        original, commits = ClientStore.commit, []

        def commit(self, *arguments, due=due, original=original, commits=commits, **options):
            commits.append(self)
            if len(commits) == due:
                raise StoreError("disk: full")
            return original(self, *arguments, **options)

        with monkeypatch.context() as patch, pytest.raises(StoreError, match="disk: full"):
            patch.setattr(ClientStore, "commit", commit)
            run_round(many)
        both(one, many, run_round, alike)
        same(one, many, opened_again=True)
    assert many.verify() == []
    many.close()


def test_a_buffer():
    policy = RoundPolicy(buffer=3, max_staleness=3, discount=0.5)
    one, many = (new_server("FedAvg", shards, policy=policy) for shards in (None, 3))

    def push(server):
        rng, found = np.random.default_rng(server.round_number), []
        for client in rng.choice(N, 7).tolist():
            start = max(0, server.round_number - int(rng.integers(3)))
            sent = update_of(client, int(rng.integers(99)), [THREE[client % 3], THREE[(client + 1) % 3]])
            found += server.push([Update(client, sent, **claims_of(client), round=start)])
        return found

    for _ in range(2):
        for first, second in zip(push(one), push(many), strict=True):
            alike(first, second)
    same(one, many)
    many.close()


@pytest.mark.parametrize("groups", [True, False])
def test_partial_sums_of_edges(groups, folder_in_memory):
    """Also if the shards were loaded again: the float buffers that stay non-negative are in one shard."""
    parts = {"text": "text.*", "image": "image.*"} if groups else {}

    def model():
        tensors = tensors_of(np.random.default_rng(3))
        del tensors["text.num_batches_tracked"]
        return Model(tensors, parts)

    options = {"lr": 0.1, "compute": Compute(accumulator="exact")}
    one = Server(model(), "FedAvg", N, **options)
    options["compute"] = Compute(accumulator="exact", shards=3)
    Server(model(), "FedAvg", N, storage=folder_in_memory / "run", **options).close()
    many, sums = Server.load(folder_in_memory / "run"), []
    for number in range(2):
        for server in (one, many):
            with server.open_round() as opened:
                for ids in (range(3), range(3, N)):
                    edge = EdgeAggregator(model(), "FedAvg", ids, lr=0.1)
                    with edge.open_round(server.broadcast(ids).x, round=number) as own:
                        for client in ids:
                            sent = update_of(client, number, sets_of(THREE)[client] if groups else THREE)
                            sent.pop("text.num_batches_tracked", None)
                            assert own.add(client, sent, **claims_of(client))
                        opened.add_partial_sum(own.partial_sum().to_bytes(), "edge")
            assert len(opened.report.accepted) == N
        same(one, many, opened_again=True)
    for server in (one, many):
        opened = server.open_round()
        for client in range(N):
            sent = update_of(client, 5, sets_of(THREE)[client] if groups else THREE)
            sent.pop("text.num_batches_tracked", None)
            assert opened.add(client, sent, **claims_of(client))
        sums.append(opened.partial_sum().to_bytes())
    assert sums[0] == sums[1] or not groups  # else lengths of several tensors differ in their last bits
    many.close()


def test_a_private_mean():
    """Each shard draws the noise of its slices, and all have one ledger."""
    tensors = {"text.w": np.zeros((2, 16_384), np.float32), "body": np.zeros(16_384, np.float32)}
    options = {"lr": 0.1, "aggregation": [PrivateMean(40.0, 0.5, 4, quantile=0.5)]}
    found = []
    for shards in (None, 3):
        compute = Compute(shards=shards)
        server = Server(Model(tensors, {"text": "text.*"}), "FedAvg", 5, compute=compute, **options)
        sent = [Update(i, tensors if i % 2 else {"body": tensors["body"]}, 1) for i in range(5)]
        assert server.round(sent).groups["text"].accepted == (1, 3)
        assert server.privacy.rounds == 1
        assert server.privacy.clip != 40.0
        found.append(np.split(server.x.astype(np.float64), 3))
    assert [part.std() for part in found[1]] == pytest.approx([part.std() for part in found[0]], rel=0.03)
    assert len({part[0] for part in found[1]}) == 3
    server.close()
    options["aggregation"] = [PrivateMean(40.0, 0.5, 4, seed=3)]
    with pytest.raises(RangeError, match="partial updates on shards"):
        Server(Model(tensors, {"text": "text.*"}), "FedAvg", 5, compute=Compute(shards=2), **options)


@pytest.mark.parametrize("shards", [None, 3])
def test_a_group_with_too_few_updates_for_a_rule_changes_none(shards):
    """Its updates may still come; a group without updates is unchanged, like a server after an empty round."""
    tried, twin = (new_server("FedAvg", kind, aggregation=[Krum(1)]) for kind in (shards, None))
    before = tried.x.tobytes()
    with tried.open_round() as opened:
        for client in range(N):
            groups = ["text", "rest"] if client < 4 else ["rest"]
            assert opened.add(client, update_of(client, 0, groups), **claims_of(client))
        with pytest.raises(RangeError, match=r"Krum.* needs at least 5 updates of the group 'text', got 4"):
            opened.finish()
        assert (tried.x.tobytes(), tried.round_number) == (before, 0)
        opened.abort()
    sets = [["text", "rest"]] * 5 + [["rest"]] * 2
    reports = [run_round(one, sets, cohort).groups for one, cohort in ((tried, range(N)), (twin, range(6, -1, -1)))]
    same(twin, tried)
    assert [len(report.accepted) for report in reports[0].values()] == [5, 0, N]
    tried.close()


def test_bad_updates_are_rejected_alike():
    one, many = (new_server("MIFA", shards) for shards in (None, 3))

    def act(server):
        good = update_of(0, 0, THREE)
        with server.open_round() as opened:
            part = {name: tensor for name, tensor in good.items() if name != "text.w"}
            for bad in (part, {}, good | {"other": np.zeros(2, np.float32)}):
                assert not opened.add(0, bad, **claims_of(0))
            opened.add(0, good | {"body": np.full(500, np.nan, np.float32)}, **claims_of(0))  # perhaps held
            assert not opened.add(0, good | {"text.running_var": np.float32([1, 1, -1, 1, 1])}, **claims_of(0))
            assert opened.add(1, update_of(1, 0, ["text"]), **claims_of(1))
        with server.open_round() as second:
            assert not second.add(1, update_of(1, 1, ["image"]), **claims_of(1))  # not among its first groups
            flat = server.layout.flatten(update_of(2, 1, THREE))
            assert second.add(2, flat, steps=2)
            assert second.add(3, flat[: server.layout.n_parameters], steps=2, kind="gradient")
        reports = [opened.report, second.report]
        return [replace(one, rejected=tuple(sorted(one.rejected))) for one in reports]  # shards reject some later

    for first, second in zip(act(one), act(many), strict=True):
        alike(first, second)
    same(one, many)
    with many.open_round() as opened, pytest.raises(RangeError, match="takes no slices"):
        opened.add(1, Slices([np.zeros(1, np.float32)] * 3), steps=1)
    many.close()


def test_group_folders_that_are_missing_or_exchanged_are_damage(tmp_path):
    for shards in (None, 2):
        path = tmp_path / f"server-{shards}"
        new_server("FedAvg", shards, storage=Storage(path)).close()
        groups = (path if shards is None else path / "shard-0") / "groups"
        (groups / "0").rename(groups / "away")
        (groups / "2").rename(groups / "0")
        (groups / "away").rename(groups / "2")
        doors = [Server.load, partial(cluster.reshard, shards=3, to=tmp_path / "to")]
        for door in doors if shards else [*doors, read_model]:
            with pytest.raises(CheckpointError, match="other tensors than the group 'text'"):
                door(path)
        for command in ["verify"] if shards else ["verify", "info"]:
            found = invoke("store", command, path)
            assert "other tensors than the group 'text'" in found.output + found.errors, command
        shutil.rmtree(groups / "2")
        with pytest.raises(CheckpointError):
            Server.load(path)
        if shards is not None:
            assert "2 of 3 groups" in invoke("store", "verify", path).errors


def test_a_start_that_is_read_while_the_round_finishes_is_an_error(monkeypatch):
    server = new_server("FedAWE", 2)
    run_round(server)
    sent, state = server.broadcast([0, N], newcomers=[N]), server._backend
    for client, name in ((N, "read"), (0, "require_round")):
        calls, own = [], getattr(state, name)

        def then_a_round(*arguments, own=own, calls=calls, name=name):
            calls.append(own(*arguments))
            if len(calls) == 1:
                monkeypatch.undo()
                run_round(server)
            return calls[-1]

        monkeypatch.setattr(state, name, then_a_round)
        with pytest.raises(RoundError, match="make a new broadcast"):
            sent.start(client)
        sent = server.broadcast([0, N + 1], newcomers=[N + 1])
