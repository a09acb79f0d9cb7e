"""A server in shards has the bits of one, whatever happens to both."""

import json
import shutil
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import pytest

from fedcore import Compute, Limits, RoundPolicy, Server, Storage, Update, algorithms, cluster
from fedcore import rules as robust
from fedcore.algorithms import Step
from fedcore.cluster.coordinator import ANSWERS
from fedcore.errors import CheckpointError, DivergedError, FedcoreError, RangeError, UnknownClientError
from fedcore.kernels import Linear
from fedcore.rules import CapExamples, CentredClipping, ClipToMedian, GeometricMedian, Krum, NearestNeighborMixing
from fedcore.secure import Encoding
from fedcore.server.folder import JOURNAL
from fedcore.server.update import digest_of_text
from fedcore.testing import ServerContract
from tests.cli.command import invoke
from tests.cluster.pairs import (
    METHODS,
    N,
    algorithm_of,
    alike,
    audited,
    both,
    made,
    n,
    nearly_alike,
    one_round,
    same,
    told,
)
from tests.kit import flat, in_time

X0 = np.linspace(-1, 1, n, dtype=np.float32)


def liars(t, i, said):
    """Rejected updates: some by what only one shard can see, some by what all of them know."""
    y = said["value"]
    if (t, i) == (1, 0):
        y[-5] = np.nan  # in the last shard
    if (t, i) == (2, 1):
        y[7] = 3e38  # in the first
    if (t, i) == (1, 1):
        y[9] = 1e33  # too large for a float32 sum, not for a float64 one
    if (t, i) == (2, 0):
        y[:] = 1e28  # no slice is too long, the whole is
    if (t, i) == (3, 0):
        said["steps"] = 0
    if (t, i) == (3, 1):
        said["value"] = y[:-3]
    return said


def compared(one, many, rounds, change=liars, compare=alike):
    for _ in range(rounds):
        both(one, many, lambda server: one_round(server, change), compare)
    same(one, many)
    many.close()


@pytest.mark.sample(1)
class TestShards(ServerContract):
    shards = 3
    algorithms = {method: algorithm_of(method) for method in METHODS}
    test_copies = None  # only servers in memory

    def make_server(self, folder, *args, **options):
        compute = replace(options.pop("compute", Compute()), shards=self.shards)
        return Server(*args, compute=compute, **options)


class TestSevenShards(TestShards):
    shards, shapes = 7, {"w": (7, 16_384), "b": (1_000,)}
    algorithms = ServerContract.algorithms


class TestShardsInFolders(TestSevenShards):
    shards, shapes = 2, ServerContract.shapes

    def make_server(self, folder, *args, **options):
        return super().make_server(folder, *args, storage=Storage(folder), **options)

    def reopen(self, server, folder):
        server.close()
        return Server.load(folder)


@pytest.mark.parametrize("method", ["MIFA", "SCAFFOLD", "MimiC, short history"])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_rows_are_rounded_alike(method, codec):
    compared(made(method, X0, codec=codec), made(method, X0, codec=codec, shards=3), 5)


@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLD, two vectors"])
def test_limits(method):
    def long(t, i, said):
        if i == 1:
            said["value"] *= 50
        return said

    options = dict(reject_long=3.0, cap_examples=2.0)
    compared(made(method, X0, **options), made(method, X0, shards=3, **options), 5, long)


def batch_norm():
    rng = np.random.default_rng(3)
    model = {
        "conv.weight": rng.normal(size=(8, 3, 3, 3)),
        "bn.weight": rng.normal(size=8),
        "bn.running_mean": np.ones(8),
    }
    model |= {"bn.running_var": np.ones(8), "fc.weight": rng.normal(size=(100, 400)), "fc.bias": rng.normal(size=100)}
    model = {name: tensor.astype(np.float32) for name, tensor in model.items()}
    return model | {"bn.num_batches_tracked": np.int64(0) + np.zeros((), np.int64)}


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD, two vectors"])
@pytest.mark.parametrize("limits", [{}, {"reject_long": 4.0}])
def test_buffers_and_counters(method, limits):
    """Models by name, whose buffers are the last shard's, and whose counters the first one's.

    One server measures tensors that lie apart one by one, so that lengths differ in their last bits.
    """

    def named(t, i, said):
        flat, model = said["value"], batch_norm()
        at = 0
        parameters = [name for name in model if "running" not in name and "num" not in name]
        for name in [*parameters, "bn.running_mean", "bn.running_var"]:
            model[name] = flat[at : at + model[name].size].reshape(model[name].shape)
            at += model[name].size
        model["bn.running_var"] = np.abs(model["bn.running_var"]) - np.float32(2 * ((t, i) == (1, 0)))
        model["bn.num_batches_tracked"] = np.array(3 * t + i + 10**7 * ((t, i) == (2, 0)), np.int64)
        return said | {"value": model}

    options = dict(diagnostics=True, **limits)
    compared(
        made(method, batch_norm(), **options), made(method, batch_norm(), shards=3, **options), 4, named, nearly_alike
    )


def test_an_update_without_buffers_has_no_length_there():
    x0 = {"w": X0[:40_000], "running_mean": np.ones(3, np.float32)}
    near = {"w": x0["w"] + np.float32(1e-3), "running_mean": x0["running_mean"] + np.float32(1e-3)}
    gradient = np.full(40_000, 1e-3, np.float32)
    for shards in (None, 3):
        server = made("FedAvg", x0, shards=shards, reject_long=4.0)
        updates = [Update(i, near, 1) for i in range(N - 1)] + [Update(N - 1, gradient, 1, kind="gradient")]
        assert server.round(updates).accepted == tuple(range(N))


def test_half_precision():
    x0 = {"w": X0.astype(np.float16)[:40_000], "b": X0[:20]}
    compared(made("MimiC", x0), made("MimiC", x0, shards=3), 3, lambda t, i, said: said)


def test_lengths_are_added_in_the_order_of_the_shards():
    """As one server adds its blocks: a small one is lost behind a large one, and two together before it are not."""
    small = np.array([[2.0**-53]])
    (added,) = ANSWERS["add"]([[np.array([[1.0]])], [small], [small]])
    assert added.tolist() == [1.0]
    (added,) = ANSWERS["add"]([[small], [small], [np.array([[1.0]])]])
    assert added.tolist() == [1 + 2.0**-52]


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", "SCAFFOLDMVR", "FedACG", "MBSTORM"])
def test_x_is_replaced(method):
    one, many = made(method, X0), made(method, X0, shards=3)
    for given in (X0[::-1].copy(), X0 * np.nan, X0[:5]):
        both(one, many, one_round)
        both(one, many, lambda server, given=given: server.replace_x(given))
    compared(one, many, 2)


@pytest.mark.parametrize("name", ["bn.running_mean", "bn.running_var", "fc.weight", "bn.num_batches_tracked"])
def test_a_replaced_model_has_buffers_and_counters(name):
    """Also limits on buffers are alike then: one that is negative may stay so."""
    new, half = batch_norm(), {"fc.weight": np.float16, "conv.weight": np.float16}
    first = {name: tensor.astype(half.get(name, tensor.dtype)) for name, tensor in new.items()}
    new[name] = np.asarray(new[name] - 3)
    one, many = made("FedAvg", first), made("FedAvg", first, shards=3)
    both(one, many, lambda server: server.replace_x(new))
    both(one, many, lambda server: server.replace_x(new | {"fc.weight": new["fc.weight"] + np.float32(70_000)}))
    for sign in (1, -1):
        updates = [Update(0, new | {"bn.running_var": new["bn.running_var"] * sign}, 1)]
        both(one, many, lambda server, updates=updates: server.round(updates), nearly_alike)
    same(one, many)
    many.close()


def test_differences_and_gradients():
    def other(t, i, said):
        return said | {"kind": "delta" if i % 2 else "gradient"}

    compared(made("FedAvg", X0, server_lr=1.0), made("FedAvg", X0, shards=3, server_lr=1.0), 3, other)


def test_slices_of_two_vectors_are_refused():
    server = made("FedAvg", X0, shards=3)
    first, second = X0 * np.float32(2), X0 * np.float32(3)

    def cut(y):
        return [y[span.start : span.stop] for span in server._backend.ranges]

    digests = list(map(cluster.digest_of, cut(first)))
    for parts, own in ((None, None), (3, None), (cut(first), 3)):
        with pytest.raises(RangeError, match="must be a list"):
            cluster.Slices(parts, own)
    with server.open_round() as opened:
        opened.add(0, cluster.Slices(iter(cut(first)), iter(digests)), steps=2)
        opened.add(1, cluster.Slices([*cut(first)[:2], cut(second)[2]], digests), steps=2)
        opened.add(2, cluster.Slices([*cut(first)[:2], cut(second)[2][:-1]]), steps=2)
    assert opened.report.accepted == (0,)
    (client, reason), (other, short) = opened.report.rejected
    assert (client, other) == (1, 2)
    assert "slices of one vector" in reason
    assert "float32[" in short
    assert server.x.tobytes() == (X0 + (first - X0)).tobytes()


class Seen:
    """A custom method that uses each attribute of a cohort."""

    def __init__(self, cohort):
        self._cohort = cohort

    @cached_property
    def gamma(self):
        return max(1.0, float(self._cohort.squares.sum()) / (2 * self._cohort.square_of_sum + 1e-3))


class Lengthened(algorithms.FedExP):
    """A method of the caller's own."""

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.W), gamma=Seen(cohort).gamma)


def test_a_method_asks_the_sum_s_length_where_python_locks_its_class():
    """In Python 3.11 a ``cached_property`` is entered by one thread at a time: by one shard, which waits for others."""
    one, many = (Server(X0, Lengthened(), N, lr=0.1, compute=Compute(shards=shards)) for shards in (1, 3))
    with in_time():  # else the shards wait for each other
        for _ in range(3):
            both(one, many, one_round)
    assert one.round_number == 3
    same(one, many)
    many.close()


ROBUST = {
    "median": "median",
    "trimmed mean": robust.TrimmedMean(2),
    "Krum": Krum(1),
    "Bulyan": robust.Bulyan(1),
    "mixed": [ClipToMedian(), NearestNeighborMixing(1), GeometricMedian()],
    "clipping": CentredClipping(40.0),
}


def robust_round(server, k=8, start=None):
    """A round of k clients near each other, of which two lie, as named tensors that do not end at a shard's border."""
    rng, start = np.random.default_rng(server.round_number), server.x if start is None else start
    names = {piece.name: (piece.start, piece.stop, piece.shape) for piece in server.layout.slices}
    with server.open_round() as opened:
        for i in rng.permutation(k).tolist():
            y = start + np.float32(0.1) * rng.normal(size=len(start)).astype(np.float32)
            if i in (2, 5):
                y = y * np.float32(30 + i)
            model = {name: y[a:b].reshape(shape).copy() for name, (a, b, shape) in names.items()}
            opened.add(i, model, steps=2)
            for w in model.values():
                w[...] = np.nan  # the caller reuses its memory
    return opened.report


def robust_pair(rule, model, shards, **options):
    options = dict(lr=0.1, aggregation=rule) | options
    return Server(model, "FedAvg", 8, **options), Server(model, "FedAvg", 8, compute=Compute(shards=shards), **options)


PARTS = {"a": X0[: n // 2 - 7], "b.running_mean": X0[:9], "c": X0[n // 2 - 7 :]}


@pytest.mark.parametrize("rule", ROBUST.values(), ids=ROBUST)
@pytest.mark.parametrize("shards", [2, 7])
def test_robust_rules(rule, shards):
    one, many = robust_pair(rule, PARTS, shards)
    for _ in range(3):
        nearly_alike(robust_round(one), robust_round(many))
    if rule == ROBUST["mixed"]:  # clipping reads norms
        np.testing.assert_allclose(many.x, one.x, rtol=1e-5)
    else:
        same(one, many)
    many.close()


def test_a_robust_round_with_too_few_updates_stays_open():
    one, many = robust_pair(Krum(1), X0, 3)
    for server in (one, many):
        with server.open_round() as opened:
            for i in range(4):
                opened.add(i, X0 + np.float32(i), steps=1)
            with pytest.raises(RangeError, match="needs at least 5 updates, got 4"):
                opened.finish()
            opened.add(4, X0, steps=1)
        with server.open_round():
            pass
    same(one, many)
    many.close()


BUFFERS = [
    ("FedAvg", RoundPolicy(buffer=3, max_staleness=3)),
    ("FedAvg", RoundPolicy(buffer=2, max_staleness=4, discount=0.5)),
    ("FedAsync", RoundPolicy(buffer=1, max_staleness=5)),
    ("MIFA", RoundPolicy(buffer=2, max_staleness=4)),
    ("SCAFFOLD", RoundPolicy(buffer=2, max_staleness=4)),
    ("MimiC", RoundPolicy(buffer=3, max_staleness=3)),
]


@pytest.mark.parametrize(("method", "policy"), BUFFERS)
def test_buffers(tmp_path, method, policy):
    """Late updates start from models of which only the shards have the slices; a folder is loaded in between."""
    one, many = made(method, X0, policy=policy), made(method, X0, shards=3, path=tmp_path / "run", policy=policy)

    def push(server):
        rng, reports = np.random.default_rng(server.round_number), []
        for client in (0, 1, 0, 3, 2, 1):
            y = server.x + rng.normal(size=n).astype(np.float32)
            started = max(0, server.round_number - int(rng.integers(3)))
            reports += server.push([Update(client, y, 2, examples=client + 1, round=started)])
        return tuple(told(report) for report in reports)

    assert both(one, many, push)
    many.close()
    many = Server.load(tmp_path / "run")
    one.open_buffer().abort()
    both(one, many, push)
    same(one, many, opened_again=True)
    many.close()


KEY = bytes(range(32))


@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
@pytest.mark.parametrize("method", ["MIFA", "FedAvg"])
def test_the_audit_log_is_that_of_one_server(tmp_path, method, key):
    """Also of changes, slices, rejected updates, another number of shards and the folder of one server."""
    run, signed = tmp_path / "run", dict(audit=True, audit_key=key)
    options = dict(lr=0.1, **flat(max_norm=1e6))
    one = Server(X0, method, N, storage=Storage(**signed), **options)
    folder = Server(X0, method, N, storage=Storage(tmp_path / "one", **signed), **options)
    many = Server(X0, method, N, storage=Storage(run, **signed), compute=Compute(shards=3), **options)

    def go_on(*servers):
        for server in servers:
            if method == "MIFA" and not server.round_number:
                server.warm_start({1: X0, 3: -X0})
            server.add_clients([f"new {server.round_number}"])
            report = one_round(server, liars)
            assert report.audited == digest_of_text(json.dumps(server.audit_log()[-1], sort_keys=True))
            server.change(lr=0.2 / (server.round_number + 1))
            one_round(server, liars)
            server.replace_x(server.x + np.float32(1))
            server.remove_client(0) if 0 in server.clients else None
            assert audited(server) == audited(one)

    go_on(one, folder, many)
    with many.open_round() as opened:
        y = many.x + np.float32(1)
        opened.add(1, cluster.Slices([y[a:b] for a, b, _ in many._backend.ranges]), steps=2)
    for server in (one, folder):
        server.round([Update(1, y, 2)])
    assert audited(many) == audited(one)
    with pytest.raises(FedcoreError):  # the shards of a change that fails leave no document
        many.warm_start({1: X0})
    for shards in (5, 2):
        many.close()
        cluster.reshard(run, shards)
        texts = invoke("store", "audit", run, "--export", tmp_path / "log").output
        with pytest.raises((CheckpointError, RangeError), match="audit=False" if key is None else "is signed by"):
            Server.load(run, storage=Storage(audit=False))
        many = Server.load(run, storage=Storage(audit_key=key))
        assert many.audit_log()[-1] == json.loads((tmp_path / "log").read_text().splitlines()[-1])
        assert digest_of_text(json.dumps(many.audit_log()[-1], sort_keys=True)) in texts
        go_on(one, folder, many)
    many.close()
    folder.close()
    assert invoke("store", "verify", run).status == 0
    # The last transaction of one server is undone; the shards have the document of the undo.
    options = dict(storage=Storage(tmp_path / "one", keep_previous=True, audit_key=key))
    with Server.load(tmp_path / "one", **options) as folder:
        folder.change(lr=0.5)
    assert invoke("store", "undo", tmp_path / "one").status == 0
    cluster.reshard(tmp_path / "one", 2, to=tmp_path / "cut")
    with (
        Server.load(tmp_path / "one", storage=Storage(audit_key=key)) as folder,
        Server.load(tmp_path / "cut", storage=Storage(audit_key=key)) as many,
    ):
        assert many.audit_log() == folder.audit_log()
        assert many.audit_log()[-1]["what"] == "an undo"
        for server in (folder, many):
            one_round(server)
        assert audited(many) == audited(folder)


@pytest.mark.parametrize("journal", [True, False])
def test_a_shard_that_is_ahead_leaves_no_document(tmp_path, journal):
    """A crash between the commits of two shards; the journal has the slices of the round, which is run again."""
    one, many = (
        Server(
            X0, "MIFA", N, lr=0.1, storage=Storage(path, audit=True, journal=journal), compute=Compute(shards=shards)
        )
        for path, shards in ((tmp_path / "one", None), (tmp_path / "run", 3))
    )
    for server in (one, many):
        one_round(server)
    many.save(tmp_path / "before")
    y = X0 + np.float32(2)
    opened = many.open_round()
    assert opened.add(2, cluster.Slices([y[a:b] for a, b, _ in many._backend.ranges]), steps=3)
    if journal:
        shutil.copytree(tmp_path / "run" / JOURNAL, tmp_path / "journal")
    opened.finish()
    many.close()
    manifest = json.loads((tmp_path / "before" / "cluster.json").read_text())
    shutil.rmtree(tmp_path / "run" / "shard-1")
    shutil.copytree(tmp_path / "before" / manifest["shards"][1]["folder"], tmp_path / "run" / "shard-1")
    if journal:
        shutil.rmtree(tmp_path / "run" / JOURNAL)
        shutil.copytree(tmp_path / "journal", tmp_path / "run" / JOURNAL)
    with Server.load(tmp_path / "run") as many:
        assert audited(many) == audited(one)
        with many.open_round() as opened:
            assert opened.clients == (2,) * journal
            if not journal:
                opened.add(2, y, steps=3)
        one.round([Update(2, y, 3)])
        assert audited(many) == audited(one)
        same(one, many, opened_again=True)
    cluster.reshard(tmp_path / "run", 2)
    with Server.load(tmp_path / "run") as many:
        assert audited(many) == audited(one)


def test_weights_of_a_mean():
    weights = robust.Mean({client: client + 0.5 for client in range(N)})
    one, many = made("FedAvg", X0, aggregation=[weights]), made("FedAvg", X0, shards=3, aggregation=[weights])
    compared(one, many, 3)


def test_a_step_that_fails_leaves_no_newcomers(tmp_path):
    many = made("FedAvg", {"w": np.zeros(n, np.float16)}, shards=2, path=tmp_path / "run", server_lr=1.0)
    with pytest.raises(DivergedError), many.open_round(newcomers=["new"]) as opened:
        opened.add("new", np.full(n, 1e5, np.float32), steps=1)
    assert "new" not in many.clients
    with many.open_round() as opened, pytest.raises(UnknownClientError):
        opened.add("new", np.zeros(n, np.float32), steps=1)
    many.close()
    with Server.load(tmp_path / "run") as many:
        assert len(many.clients) == N


def test_an_interrupt_after_the_shards_have_begun_leaves_no_newcomers(monkeypatch):
    many = made("FedAvg", X0, shards=2)
    call = many._backend.coordinator.call

    def interrupted(name, *arguments, **options):
        answer = call(name, *arguments, **options)
        if name == "begin_round":
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(many._backend.coordinator, "call", interrupted)
        many.open_round(newcomers=["new"])
    assert "new" not in many.clients
    with many.open_round() as opened, pytest.raises(UnknownClientError):
        opened.add("new", X0, steps=1)


def test_slices_that_the_caller_changes_or_that_are_not_finite():
    many = made("FedAvg", X0, shards=2)
    y, bad = X0 + np.float32(1), np.full(n, np.nan, np.float32)
    with many.open_round() as opened:
        assert opened.add(0, cluster.Slices([y[a:b] for a, b, _ in many._backend.ranges]), steps=1)
        y[:] = 99
        opened.add(1, cluster.Slices([bad[a:b].tobytes() for a, b, _ in many._backend.ranges]), steps=1)
    assert [client for client, _ in opened.report.rejected] == [1]
    assert many.x.tobytes() == (X0 + ((X0 + np.float32(1)) - X0)).tobytes()


def sums_of_edges(server, upper, clients, t):
    """The partial sum of some clients of a server in the state of the upper one."""
    with server.open_round() as opened:
        for i in clients:
            rng = np.random.default_rng([t, i])
            y = upper + np.float32(10.0 ** -rng.integers(6)) * rng.normal(size=len(upper)).astype(np.float32)
            control = rng.normal(size=server.layout.n_parameters).astype(np.float32)
            y[-1] = np.nan if i == 3 else y[-1]
            own = {"control": control} if server.algorithm.sends_row_change else {}
            opened.add(i, y, steps=2, examples=5 + i, **own)
        return opened.partial_sum()


@pytest.mark.parametrize("method", [algorithms.FedAvg(), algorithms.SCAFFOLD(placement="client")], ids=str)
def test_partial_sums(method):
    """A tree of sharded servers sends and joins the bytes of one of plain ones, and rejects the same sums."""
    model = {"w": X0, "running_mean": np.ones(30, np.float32)}
    options = dict(lr=0.1, limits=Limits(max_norm=1e6), aggregation=[CapExamples(2)])

    def made_in(shards, clients=N):
        return Server(model, method, clients, compute=Compute(shards=shards, accumulator="exact"), **options)

    (one, many), relays, edges = (tuple(made_in(k) for k in (None, 3)) for _ in range(3))
    for t in range(2):
        x = one.x
        sent = [sums_of_edges(edge, x, clients, t) for edge, clients in zip(edges, ([0, 1, 2], [3, 4]), strict=True)]
        assert sent[0].to_bytes() == sums_of_edges(edges[1], x, [0, 1, 2], t).to_bytes()
        joined = []
        for relay in relays:
            with relay.open_round() as opened:
                for partial in sent:
                    opened.add_partial_sum(partial.to_bytes(), "edge")
                joined.append(opened.partial_sum().to_bytes())
        assert joined[0] == joined[1]
        bad = replace(sent[0], high=sent[0].high + 2**30), replace(sent[0], made_under="0"), replace(sent[0], round=9)
        full = replace(sent[0], high=np.where(np.arange(len(x)) == n - 1, 2**62, sent[0].high))
        reports = []
        for server in (one, many):
            with server.open_round() as opened:
                opened.add(5, x + np.float32(1), steps=1, examples=5, control=np.ones(n, np.float32))
                for partial in (*bad, full, joined[0], sent[1]):
                    opened.add_partial_sum(partial, "edge")
            reports.append(opened.report)
        alike(*reports)
        assert reports[0].accepted == (0, 1, 2, 4, 5), reports[0].rejected
        assert len(reports[0].rejected) == 6
        for server in (*edges, *relays):  # they follow the upper server
            server.replace_x(one.x)
            server.round([])
    same(one, many)


def test_a_sum_that_overflows_in_one_shard_changes_none(monkeypatch):
    monkeypatch.setattr("fedcore.server.partial._require_length", lambda *_: None)
    one, many = (Server(X0, "FedAvg", N, lr=0.1, compute=Compute(shards=k, accumulator="exact")) for k in (None, 3))
    edge = Server(X0, "FedAvg", N, lr=0.1, compute=Compute(accumulator="exact"))
    first, second, third = (sums_of_edges(edge, X0, [i], 0) for i in range(3))
    first.high[-1] = second.high[-1] = 3 * 2**60
    for server in (one, many):
        with server.open_round() as opened:
            for partial in (first, second, third):
                opened.add_partial_sum(partial, "edge")
        assert opened.report.accepted == (0, 2)
    same(one, many)


def test_masked_sums():
    one, many = (
        Server(
            *(X0, "FedAvg", N),
            lr=0.1,
            limits=Limits(max_norm=1e3, max_examples=9, max_steps=4),
            compute=Compute(shards=k, accumulator="exact"),
        )
        for k in (None, 3)
    )
    for _ in range(2):
        encodings = [Encoding.of(server, clients=3) for server in (one, many)]
        assert encodings[0] == encodings[1]
        x = one.x
        words = [encodings[0].encode(x, x + np.float32(0.1) * X0, steps=2, examples=i + 1) for i in range(3)]
        for server, encoding in zip((one, many), encodings, strict=True):
            with server.open_round() as opened:
                opened.add_partial_sum(encoding.partial_sum(server, sum(words).view(np.int64), (0, 2, 4)), "sums")
            assert opened.report.accepted == (0, 2, 4)
    same(one, many)


@pytest.mark.parametrize(("quantile", "masked"), [(None, False), (0.5, False), (None, True)])
def test_private_rounds(tmp_path, quantile, masked):
    """With a seed, the bits of one server; without, each shard draws different noise of that deviation."""
    options = dict(clip=40.0, noise=0.5, expected=4, quantile=quantile)
    compute = {"accumulator": "exact"} if masked else {}

    def made_in(shards, path=None, **seed):
        rules, storage = [robust.PrivateMean(**options, **seed)], None if path is None else Storage(path, audit=True)
        more = dict(compute=Compute(shards=shards, **compute), policy=RoundPolicy(min_clients=4 * masked))
        return Server(X0, "FedAvg", N, lr=0.1, aggregation=rules, storage=storage, **more)

    def both_rounds(*servers):
        reports = []
        for server in servers:
            x, rng = server.x, np.random.default_rng(server.round_number)
            vectors = [x + np.float32(0.05 * (i + 1)) * rng.normal(size=n).astype(np.float32) for i in range(5)]
            reports.append(server.round([Update(i, y, 2) for i, y in enumerate(vectors)]))
        return reports

    if not masked:
        one, many = made_in(None, seed=3), made_in(3, tmp_path / "run", seed=3)
        for shards in (5, 2):
            alike(*(replace(report, audited=None) for report in both_rounds(one, many)))
            many.close()
            cluster.reshard(tmp_path / "run", shards)
            many = Server.load(tmp_path / "run")
            same(one, many, opened_again=True)
        assert all(update.keys() == {"client", "start"} for update in many.audit_log()[-1]["updates"])
        many.close()
    found = []
    for server in (made_in(None), made_in(3)):
        if masked:
            encoding = Encoding.of(server, clients=4, colluding=0)
            words = [encoding.encode(X0, X0, steps=1) for _ in range(4)]
            with server.open_round() as opened:
                opened.add_partial_sum(encoding.partial_sum(server, sum(words).view(np.int64), (0, 1, 2, 3)), "sums")
        else:
            server.round([Update(i, X0, 1) for i in range(5)])
        assert server.privacy.rounds == 1
        found.append(server.x.astype(np.float64) - X0)
    slices = [found[1][a:b] for a, b, _ in server._backend.ranges]
    assert [part.std() for part in slices] == pytest.approx([found[0].std()] * 3, rel=0.03)
    least = min(map(len, slices))
    assert all(abs(np.corrcoef(a[:least], b[:least])[0, 1]) < 0.05 for a, b in pairwise(slices))
