"""A server with partial updates equals one server per group, to the bit, in which absent clients sent nothing."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from fedcore import Compute, Limits, Model, RoundPolicy, Server, Storage, Update, arrays, rules
from fedcore.algorithms import SCAFFOLD, SCAFFOLDM, FlexibleFedAvg
from fedcore.algorithms.optimizers import Adam, Nesterov
from fedcore.algorithms.rates import Exponential
from fedcore.arrays import FileMemory, device_of
from fedcore.cli.app import main
from fedcore.errors import CheckpointError, DivergedError, StoreError
from fedcore.server.folder import read_model
from fedcore.store import ClientStore
from fedcore.store.content import Content
from fedcore.testing import ServerContract
from tests.cli.command import invoke
from tests.kills import killed

N, ROUNDS = 7, 5
PARTIAL = {"text": "text.*", "image": ("image.*", "pool")}
TWO, THREE = ("text", "rest"), ("text", "image", "rest")
SHAPES = {"image.w": (3, 5), "text.w": (4,), "body": (2, 3), "pool": (3,), "text.running_var": (2,), "image.b": (3,)}
SIZES = {client: 10 + client for client in range(N)}
METHODS = {
    "FedAvg": {},
    "FedAvg with sizes": {"clients": SIZES},
    "FedAvg and Adam": {"optimizer": Adam(corrected_from=1)},  # its rate counts rounds
    "FedAvg and late updates": {"policy": RoundPolicy(max_staleness=1)},
    "FedProx": {},
    "FedNova": {},
    "FedExP": {},
    "FedDyn": {},
    "FedStale": {},
    "FedVARP": {},
    "FedAWE": {},
    "FedAvgM": {"lr": Exponential(0.1, 0.5), "server_lr": Exponential(0.3, 0.5)},
    "FedACG": {},
    "FedAU": {},
    "FedAvgMVR": {},
    "FlexibleFedAvg": {"clients": SIZES, "algorithm": FlexibleFedAvg(local_steps=5)},
    "MIFA": {},
    "MIFA with exact sums": {"compute": Compute(accumulator="exact")},
    "MIFA with int8 rows": {"storage": Storage(codec="int8")},
    "MimiC": {},
    "SCAFFOLD": {},
    "SCAFFOLDM": {},
    "SCAFFOLD with two vectors": {"algorithm": SCAFFOLD(control="sent"), "limits": Limits(max_norm=1e6)},
    "SCAFFOLDMVR": {},
    "FedAvg and a median": {"aggregation": [rules.Median()]},
    "FedAvg and mixing": {"aggregation": [rules.NearestNeighborMixing(0), rules.GeometricMedian()]},
    "MIFA and clipping": {"aggregation": [rules.CentredClipping(0.5)], "limits": Limits(max_norm=1e6)},
    "SCAFFOLD and clipped norms": {"aggregation": [rules.ClipNorm()], "limits": Limits(max_norm=1e6)},
}


def group_of(name):
    return {"t": "text", "i": "image", "p": "image", "b": "rest"}[name[0]]


def tensors_of(groups, rng, moved=0.0):
    """The tensors of some groups; the numbers of a tensor do not depend on the groups."""
    tensors = {name: (1 + np.abs(rng.normal(size=shape))).astype(np.float32) for name, shape in SHAPES.items()}
    tensors["text.num_batches_tracked"] = np.int64(3 + moved)
    tensors["image.b"] = tensors["image.b"].astype(np.float16)  # clients receive it rounded
    return {name: tensor for name, tensor in tensors.items() if group_of(name) in groups}


def first(groups):
    return tensors_of(groups, np.random.default_rng(3))


def update_of(client, round, groups):
    return tensors_of(groups, np.random.default_rng([client, round]), moved=client)


def control_of(server, client, round, groups):
    """The second vector of an update; its elements of other groups have no effect."""
    layout, named = server.layout, tensors_of(THREE, np.random.default_rng([client, round, 7]))
    of = [piece for piece in layout.slices if piece.stop <= layout.n_parameters]
    parts = [named[one.name].reshape(-1) * np.float32(1 if group_of(one.name) in groups else np.nan) for one in of]
    return np.concatenate(parts).astype(np.float32)


def claims_of(client):
    return {"steps": 1 + client % 3, "examples": 5 + client}


def sets_of(groups, seed=4):
    rng = np.random.default_rng(seed)
    return [[group for group in groups if rng.random() < 0.6] or [groups[client % len(groups)]] for client in range(N)]


def sets_in(number, groups, first, known):
    """The groups that each client sends in a round: any, in odd rounds all the same one; or some of its first ones."""
    rng, sent = np.random.default_rng([9, number]), []
    for client in range(N + 2):
        own = list(groups) if first is None else first[client % N]
        if first is None or client in known:
            own = [groups[number % len(groups)]] if first is None and number % 2 else own
            own = [group for group in own if rng.random() < 0.6] or own[-1:]
        sent.append(own)
    return sent


def new_server(method, groups=THREE, clients=N, **options):
    described = {name: patterns for name, patterns in PARTIAL.items() if name in groups}
    return Server(
        Model(first(groups), described), **({"algorithm": method.split()[0], "clients": clients, "lr": 0.1} | options)
    )


def run_round(server, sets, cohort=None, of=None, **options):
    """A round of a random cohort, or of this one, with the updates of round ``of``; return its report."""
    number = server.round_number
    cohort = np.flatnonzero(np.random.default_rng(number).random(N) < 0.6).tolist() if cohort is None else cohort
    with server.open_round(**options) as opened:
        for client in cohort:
            at, groups = number if of is None else of, sets[client % len(sets)]
            control = (
                {} if server.algorithm.second_vector is None else {"control": control_of(server, client, at, groups)}
            )
            assert opened.add(client, update_of(client, at, groups), **claims_of(client), **control)
    return opened.report


def require_equal(server, oracles, report, reports):
    """Each group of a server has the bytes of a separate server."""
    layout, sent = server.layout, server.broadcast(server.clients)
    for group, own in oracles.items():
        own_sent, n, p = own.broadcast(own.clients), own.layout.n, own.layout.n_parameters
        of_group = [name for name in layout.names if group_of(name) == group]

        def part(whole, length, names=of_group):
            places = [piece for name in names for piece in layout.slices if piece.name == name]
            parts = [np.asarray(whole)[piece.start : piece.stop] for piece in places if piece.stop <= len(whole)]
            assert sum(map(len, parts)) == length
            return b"".join(one.tobytes() for one in parts)

        assert part(server.x, n) == own.x.tobytes()
        assert part(server.v, p) == own.v.tobytes()
        assert part(sent.x, n) == own_sent.x.tobytes()
        if own.total() is not None:
            assert part(server.total(), p) == own.total().tobytes()
        if own_sent.x_prev is not None:
            assert part(sent.x_prev, n) == own_sent.x_prev.tobytes()
        assert all(server.tensors()[name].tobytes() == tensor.tobytes() for name, tensor in own.tensors().items())
        for client in server.clients:
            if client in own.clients:
                assert part(sent.start(client), n) == own_sent.start(client).tobytes()
            for read, of_own in (
                (server.row, own.row),
                (server.correction, own.correction),
                (sent.offset, own_sent.offset),
            ):
                found = part(read(client), p)
                assert found == (of_own(client).tobytes() if client in own.clients else bytes(len(found)))
        for name in ("accepted", "gamma", "waiting_for", "diversity", "staleness") if group in reports else ():
            assert getattr(report.groups[group], name) == getattr(reports[group], name), name
        for name in ("norms", "weights") if group in reports else ():
            assert getattr(report.groups[group], name).tobytes() == getattr(reports[group], name).tobytes(), name


class TestGroups(ServerContract):
    """If every client sends all groups, x has the bits of a server without groups; lengths are those of a group."""

    algorithms = {name: algorithm for name, algorithm in ServerContract.algorithms.items() if name != "FedExP"}
    algorithms |= {"two vectors": SCAFFOLD(control="sent"), "rows at clients": SCAFFOLDM(placement="client")}
    options = ServerContract.options | {
        "clipping before a robust rule": {"aggregation": [rules.ClipToMedian(), rules.TrimmedMean(1)]},
        "noise": {"aggregation": [rules.PrivateMean(8.0, 0.5, 5, quantile=0.5, seed=3)]},
    }
    shapes = {"w": (16_384,), "b": (77,)}  # a block of the sums of lengths, and a part of one
    buffers = ServerContract.buffers[:1]  # a group may get too few updates for a robust rule
    test_copies = None  # only servers in memory
    test_warm_start = None  # not supported with partial updates

    def make_server(self, folder, model, *args, **options):
        return Server(Model(model, {"head": "w"}), *args, storage=Storage(folder), **options)

    def reopen(self, server, folder):
        server.close()
        return Server.load(folder)

    def seen(self, report):
        return {"accepted": report.accepted, "rejected": [client for client, _ in report.rejected]}


@pytest.mark.sample(1)
class TestGroupsInFiles(TestGroups):
    """Vectors are in files, and computed in windows."""

    @pytest.fixture(autouse=True)
    def short_vectors_are_in_files(self, monkeypatch):
        monkeypatch.setattr(arrays, "FILES_FROM", 1)

    def make_server(self, folder, model, *args, **options):
        return Server(Model(model, {"head": "w"}), *args, storage=Storage(folder, resident=1), **options)

    def reopen(self, server, folder):
        assert isinstance(device_of(server.x), FileMemory)
        assert all(isinstance(device_of(one.snapshot.x), FileMemory) for one in server._backend.groups.values())
        server.close()
        return Server.load(folder, storage=Storage(resident=1))


@pytest.mark.sample(1)
class TestGroupsOnDevice(TestGroups):
    """Vectors and rows are on a device."""

    @pytest.fixture(autouse=True)
    def device(self, cuda_device):
        pass

    def make_server(self, folder, model, *args, **options):
        compute = replace(options.pop("compute", Compute()), device="cuda")
        return super().make_server(folder, model, *args, compute=compute, **options)


@pytest.mark.parametrize("groups", [TWO, THREE], ids=len)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sample(1)
def test_each_group_is_a_server_of_its_own(method, groups):
    """A client that does not send a group is absent from it. Without rows, a group without updates has no round."""
    options = {"algorithm": method.split()[0], "clients": N, "lr": 0.1} | METHODS[method]
    server, own_sets = new_server(method, groups, **options), sets_of(groups)
    oracles = {group: Server(first([group]), **options) for group in groups}
    counts, known, sized, moved = server.algorithm.counts_absent, set(), isinstance(options["clients"], dict), set()
    for number in range(ROUNDS):
        sets = sets_in(number, groups, own_sets if counts else None, known)
        newcomers = [] if number != 2 else {N: 5, N + 1: 6} if sized else [N, N + 1]
        cohort = [
            *list(newcomers)[:1],
            *reversed(np.flatnonzero(np.random.default_rng(number).random(N) < 0.6).tolist()),
        ]
        report, reports = run_round(server, sets, cohort, newcomers=newcomers), {}
        for group, own in oracles.items():
            own_cohort = [client for client in cohort if group in sets[client]]
            if counts or own_cohort:
                if callable(options["lr"]):
                    own.change(lr=options["lr"](number))  # the clients' rate is that of the server's round
                reports[group] = run_round(own, [[group]] * N, own_cohort, of=number, newcomers=newcomers)
            for client in cohort:
                if not counts and client not in own.clients:
                    own.add_clients({client: newcomers[client]} if sized else [client])
                if counts and client not in known and group not in sets[client] and client in own.clients:
                    own.remove_client(client)  # its set is known now
            moved |= {group} if number and own_cohort else set()
        known |= set(cohort)
        assert {*report.accepted} == {*cohort}
        require_equal(server, oracles, report, reports)
    assert moved == set(groups)
    assert counts or any(own.round_number < ROUNDS for own in oracles.values())


@pytest.mark.parametrize("method", ["FedAU", "FedAWE", "FlexibleFedAvg", "FedAvg"])
def test_an_update_has_a_weight_unless_those_of_its_groups_may_differ(method):
    server, has_weights = new_server(method, **METHODS[method], storage=Storage(audit=True)), method == "FedAvg"
    report = run_round(server, [THREE] * N)
    assert len(report.weights) == has_weights * len(report.accepted)
    assert {"weight" in one for one in server.audit_log()[0]["updates"]} == {has_weights}


def test_changes_and_late_updates_reach_each_group():
    """A client is removed, another one added, and an update of an earlier round counts from its own model."""
    options = {"policy": RoundPolicy(max_staleness=1)}
    server, sets = new_server("MIFA", **options), [*sets_of(THREE), THREE]
    oracles = {group: Server(first([group]), "MIFA", N, lr=0.1, **options) for group in THREE}

    def each_round(updates):
        """Add (client, round) with the model of that round to the server and to the group's servers."""
        reports = {}
        for group, one in {None: server, **oracles}.items():
            with one.open_round() as opened:
                for client, start in updates:
                    own = sets[N if client == "new" else client]
                    if group is None or group in own:
                        sent = update_of(0 if client == "new" else client, start, own if group is None else [group])
                        assert opened.add(client, sent, steps=3, examples=2, round=start)
            reports[group] = opened.report
        for group, own in oracles.items() if server.round_number == 1 else ():
            for client in range(N):
                if group not in sets[client]:
                    own.remove_client(client)  # its set is known now
        require_equal(server, oracles, reports.pop(None), reports)

    each_round([(client, 0) for client in range(N)])
    for one in (server, *oracles.values()):
        if 2 in one.clients:
            one.remove_client(2)
        one.add_clients(["new"])
        one.change(lr=0.2)
    assert [*server.clients] == [0, 1, *range(3, N), "new"]
    each_round([(3, 1), ("new", 1)])
    each_round([(1, 1), (3, 2)])
    with server.open_round() as opened:
        assert not opened.add(3, update_of(3, 2, sets[3]), steps=3, round=2)  # it has counted
        assert not opened.add(1, update_of(1, 1, sets[1]), steps=3, round=1)  # too late


def test_late_updates_of_groups_in_turn():
    """An update of a group counts from its own model, whatever its client has sent of other groups since then."""
    options = {"policy": RoundPolicy(max_staleness=3), "optimizer": Nesterov()}
    server = new_server("FedAvg", **options)
    oracles = {group: Server(first([group]), "FedAvg", N, lr=0.1, **options) for group in THREE}
    own_rounds = []  # by round of the server, those that each group has had before
    for number, sent in enumerate(
        [
            [("text", 0), ("rest", 0), ("text", 0)],  # a group and the start round for each client
            [("image", 0), ("text", 1), ("rest", 1)],
            [("rest", 0), ("image", 1), ("rest", 0)],  # client 2 sent this group from round 1
            [("image", 2), ("text", 1), ("text", 2)],  # client 1 sent this group from round 1
            [("text", 3), ("image", 0), ("image", 2)],  # round 0 is too old
            [("rest", 2), ("text", 4), ("image", 4)],
        ]
    ):
        own_rounds.append({group: own.round_number for group, own in oracles.items()})
        due = [client for client in range(3) if (number, client) not in ((2, 2), (3, 1), (4, 1))]
        with server.open_round() as opened:
            for client, (group, start) in enumerate(sent):
                assert opened.add(client, update_of(client, number, [group]), steps=2, round=start) == (client in due)
        reports = {}
        for group in {sent[client][0] for client in due}:
            with oracles[group].open_round() as one:
                for client in due:
                    if sent[client][0] == group:
                        start = own_rounds[sent[client][1]][group]
                        assert one.add(client, update_of(client, number, [group]), steps=2, round=start)
            reports[group] = one.report
        require_equal(server, oracles, opened.report, reports)


def updates_of(server, sets=None):
    """Partial updates of a server's next round, which depend only on its round."""
    number, sets = server.round_number, sets or sets_of(THREE)
    for client in np.flatnonzero(np.random.default_rng(number).random(N) < 0.6).tolist():
        yield Update(client, update_of(client, number, sets[client]), **claims_of(client))


@pytest.mark.parametrize("method", ["FedAvg", "FedAvgM", "FedVARP"])
def test_a_buffer_is_one_of_each_group(method, folder_in_memory):
    """A fold of K updates, several of one client and late ones, is that of each group's own; also after a restart."""
    rows = method == "FedVARP"
    policy = {"max_staleness": 2} if rows else {"max_staleness": 2, "discount": 0.5}
    folder = Storage(folder_in_memory / "run", journal=True)
    server = new_server(method, policy=RoundPolicy(buffer=4, **policy), storage=folder)
    oracles = {
        group: Server(first([group]), method, N, lr=0.1, policy=RoundPolicy(buffer=99, **policy)) for group in THREE
    }
    rng, sets, own_rounds, arrivals = np.random.default_rng(2), sets_of(THREE), [], 0
    for number in range(6):
        own_rounds.append({group: own.round_number for group, own in oracles.items()})
        sent = []
        for client in rng.permutation(N)[:4] if rows else rng.choice(N, 4):
            groups = sets[client] if rows else [THREE[(client + number) % 3], THREE[(client + number + 1) % 3]]
            start, arrivals = max(0, number - int(rng.integers(3))), arrivals + 1
            sent.append((int(client), update_of(client, arrivals, groups), groups, start))
        updates = [Update(client, y, **claims_of(client), round=start) for client, y, _, start in sent]
        assert server.push(updates[:2]) == []
        if not rows:  # v is not in the folder, and a group without updates keeps it
            server.close()
            server = Server.load(folder.path)
        [report] = server.push(updates[2:])
        reports = {}
        for group, own in oracles.items():
            opened = own.open_buffer()
            for client, y, groups, start in sent:
                if group in groups and client in report.accepted:
                    part = {name: tensor for name, tensor in y.items() if group_of(name) == group}
                    assert opened.add(client, part, **claims_of(client), round=own_rounds[start][group])
            if opened.clients or rows:
                reports[group] = opened.finish()
            if rows:
                for client in [one for one in report.accepted if group not in sets[one] and one in own.clients]:
                    own.remove_client(client)
        require_equal(server, oracles, report, reports)
        for group, one in reports.items():
            assert report.groups[group].factors.tobytes() == one.factors.tobytes()
    assert len(report.accepted) == 4
    server.close()


def state(server):
    rows, total = [server.row(client).tobytes() for client in server.clients], server.total()
    return server.x.tobytes(), None if total is None else total.tobytes(), server.round_number, [*server.clients], rows


def test_bad_updates_are_rejected_whole():
    server, twin = new_server("MIFA"), new_server("MIFA")
    good = [update_of(client, 0, THREE) for client in range(N)]
    bad = update_of(0, 0, ["text", "image"])
    del bad["image.b"]
    with server.open_round() as opened:
        assert not opened.add(0, bad, **claims_of(0))
        assert not opened.add(0, {}, **claims_of(0))
        assert not opened.add(0, good[0] | {"other": np.zeros(2, np.float32)}, **claims_of(0))
        nan = {name: np.full_like(tensor, np.nan) for name, tensor in good[0].items() if name == "body"}
        assert not opened.add(0, good[0] | nan, **claims_of(0))
        assert not opened.add(0, good[0] | {"text.running_var": np.float32([1, -1])}, **claims_of(0))
        assert opened.add(1, good[1], **claims_of(1))
    reasons = [reason for client, reason in opened.report.rejected if client == 0]
    assert ["'image'" in reasons[0], "other" in reasons[2], "body" in reasons[3]] == [True] * 3
    run_round(twin, [THREE] * N, [1])
    assert opened.report.accepted == (1,)
    assert state(server) == state(twin)


def test_the_norm_of_a_whole_update_counts():
    """Each group has |h| = 3 and 4, below the limit; together they have 5."""
    model = {"text.w": np.zeros(1, np.float32), "body": np.zeros(1, np.float32)}
    server = Server(Model(model, {"text": "text.*"}), "FedAvg", 2, lr=0.1, limits=Limits(max_norm=4.5))
    with server.open_round() as opened:
        assert not opened.add(0, {"text.w": np.float32([3]), "body": np.float32([4])}, steps=1)
        assert opened.add(0, {"body": np.float32([4])}, steps=1)
        assert opened.add(1, {"text.w": np.float32([3])}, steps=1)
    assert "5" in opened.report.rejected[0][1]
    assert opened.report.norms.tolist() == [40, 30]  # as gradients
    assert server.x.tolist() == [3, 4]


def test_a_set_is_fixed_by_the_first_update_that_counts(folder_in_memory):
    server = new_server("FedVARP", storage=folder_in_memory / "run")
    with server.open_round() as opened:
        nan = {name: np.full_like(t, np.nan) for name, t in update_of(0, 0, ["text"]).items() if t.ndim}
        opened.add(0, update_of(0, 0, ["text"]) | nan, steps=1)  # does not count
        opened.add(1, update_of(1, 0, ["text", "rest"]), steps=1)
    with server.open_round() as opened:  # aborted: does not count
        opened.add(2, update_of(2, 1, ["text"]), steps=1)
        opened.abort()
    server.close()
    with Server.load(folder_in_memory / "run") as server, server.open_round() as opened:
        assert opened.add(0, update_of(0, 1, ["rest"]), steps=1)
        assert opened.add(2, update_of(2, 1, THREE), steps=1)
        assert not opened.add(1, update_of(1, 1, THREE), steps=1)
        assert not opened.add(1, update_of(1, 1, ["image"]), steps=1)
        assert opened.add(1, update_of(1, 1, ["text"]), steps=1)
    assert [client for client, _ in opened.report.rejected] == [1, 1]
    assert all("text, rest" in reason for _, reason in opened.report.rejected)


def test_groups_in_turn_are_resumed_and_undone(folder_in_memory):
    """The folder has the rounds of each group, on which its rates depend."""
    folder, options = folder_in_memory / "run", {"server_lr": Exponential(0.3, 0.5), "optimizer": Nesterov()}
    twin, sets = new_server("FedAvg", **options), [[[group]] * N for group in THREE * 3]
    for number, own in enumerate(sets):
        with (
            Server.load(folder, optimizer=options["optimizer"])
            if number
            else new_server("FedAvg", storage=folder, **options)
        ) as server:
            run_round(server, own)
        if number == 4:
            main(["store", "undo", str(folder)])
            with Server.load(folder, optimizer=options["optimizer"]) as server:
                run_round(server, own)
        run_round(twin, own)
    with Server.load(folder, optimizer=options["optimizer"]) as server:
        assert server.x.tobytes() == twin.x.tobytes()
        assert len({server.tensors()[name].tobytes() for name in ("body", "text.w")}) == 2


def test_a_step_that_diverges_in_one_group_changes_none():
    """The step of "body" ends at 120,000, which float16 cannot hold."""
    model = {"text.w": np.zeros(1, np.float32), "body": np.zeros(1, np.float16)}
    server = Server(Model(model, {"text": "text.*"}), "FedAvg", 2, lr=0.1, server_lr=0.2)
    opened = server.open_round()
    assert opened.add(0, {"text.w": np.ones(1, np.float32), "body": np.float16([60_000])}, steps=1)
    with pytest.raises(DivergedError):
        opened.finish()
    assert server.round_number == 0
    assert server.x.tolist() == [0, 0]


def killed_at(commit, folder, sets):
    """Run a round in a child that is killed before its n-th commit; return whether it was killed."""
    original, due = ClientStore.commit, iter(range(1, 100))

    def commits(self, *arguments, **options):
        if next(due) == commit:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *arguments, **options)

    def act():
        with Server.load(folder) as server:
            ClientStore.commit = commits
            run_round(server, sets)

    return killed(act)


def test_killed_at_each_commit(folder_in_memory):
    """The folder is always at a whole round, and the run continues with the bits of an uninterrupted one."""
    sets, folder = sets_of(THREE), folder_in_memory / "run"
    twin = new_server("MimiC", storage=Storage(codec="bf16"))
    with new_server("MimiC", storage=Storage(folder, codec="bf16")):
        pass
    for commit in range(1, 7):  # a round commits in four stores
        assert killed_at(commit, folder, sets) == (commit < 5)
        if commit >= 5:
            run_round(twin, sets)
        with Server.load(folder) as server:
            assert server.round_number == twin.round_number == max(0, commit - 4)
            assert state(server) == state(twin)


def test_a_commit_that_fails_in_one_group_closes_the_server(folder_in_memory, monkeypatch):
    server, sets = new_server("MIFA", storage=folder_in_memory / "run"), sets_of(THREE)
    run_round(server, sets)
    before, original, commits = state(server), ClientStore.commit, []

    def commit(self, *arguments, **options):
        commits.append(self)
        if len(commits) == 3:
            raise StoreError("disk: full")
        original(self, *arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="disk: full"):
        patch.setattr(ClientStore, "commit", commit)
        run_round(server, sets)
    assert server.x.tobytes() == before[0]
    assert server.round_number == 1
    with pytest.raises(StoreError, match=r"Server\.load"):
        run_round(server, sets)
    with Server.load(folder_in_memory / "run") as server:
        assert state(server) == before
        run_round(server, sets)
        assert server.round_number == 2


@pytest.mark.parametrize("method", ["FedAvg", "FedAWE", "MIFA", "SCAFFOLD"])
def test_a_round_is_resumed_from_its_journal(method, folder_in_memory):
    """Named tensors of some groups, flat vectors, differences, gradients and newcomers, each before a restart."""
    folder, options = folder_in_memory / "run", {"limits": Limits(max_client_lr=1.0)}
    options |= {} if method == "FedAWE" else {"server_lr": 1.0}
    straight = new_server(method, **options)
    new_server(method, storage=Storage(folder, journal=True), **options).close()
    for number in range(3):
        named = {client: update_of(client, number, sent) for client, sent in enumerate(sets_of(THREE, 5)[:3])}
        flat = straight.layout.flatten(update_of(3, number, THREE))
        sent = [Update(client, y, 1 + client, examples=2, lr=0.3) for client, y in named.items()]
        sent[1] = sent[1]._replace(kind="delta", value={**named[1], "text.num_batches_tracked": np.int64(1)})
        if "text" not in sets_of(THREE, 5)[1]:
            del sent[1].value["text.num_batches_tracked"]
        sent += [Update(3, flat, 2, examples=3), Update(4, flat[: straight.layout.n_parameters], 2, 3, kind="gradient")]
        sent += [Update(5, update_of(5, number, THREE), 2, 3, kind="gradient"), Update(f"new {number}", named[2], 2, 5)]
        newcomers = [sent[-1].client]
        with straight.open_round(newcomers=newcomers) as opened:
            assert opened.add_batch(sent) == [True] * len(sent)
        for i, update in enumerate(sent):
            with Server.load(folder) as server:
                again = server.open_round(newcomers=newcomers if i == 0 else ())
                assert again.clients == tuple(one.client for one in sent[:i])
                assert again.add(**update._asdict())
        with Server.load(folder) as server:
            report = server.open_round().finish()
            assert report.norms.tobytes() == opened.report.norms.tobytes()
            assert state(server) == state(straight)


def test_a_journal_counts_only_for_the_models_that_its_clients_got(folder_in_memory):
    new_server("FedAvg", storage=Storage(folder_in_memory / "run", journal=True)).close()
    with Server.load(folder_in_memory / "run") as server:
        assert server.open_round().add(0, update_of(0, 0, ["text"]), steps=1)
    with Server.load(folder_in_memory / "run") as server:
        server.replace_x(server.x * np.float32(2))
        opened = server.open_round()
        assert (opened.clients, [client for client, _ in opened.rejected]) == ((), [0])


def test_a_first_commit_that_fails_changes_no_group(monkeypatch):
    """Clients leave the groups that their first update lacks; this is undone too."""

    def commit(self, *arguments, **options):
        raise StoreError("disk: full")

    server, twin, sets = new_server("MIFA"), new_server("MIFA"), sets_of(THREE)
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="disk: full"):
        patch.setattr(ClientStore, "commit", commit)
        run_round(server, sets)
    for one in (server, twin):
        run_round(one, [THREE] * N)
    assert state(server) == state(twin)


def test_an_update_in_pieces_may_lack_groups():
    server, twin = new_server("MIFA"), new_server("MIFA")
    sent = update_of(1, 0, ["image"])
    with server.open_round() as opened:
        incoming = opened.begin(1, **claims_of(1))
        for name, tensor in sent.items():
            incoming.write(name, tensor)
        assert incoming.done()
        incoming = opened.begin(2, **claims_of(2))
        incoming.write("pool", sent["pool"][:2])
        assert not incoming.done()
    run_round(twin, [["image"]] * N, [1])
    assert state(server) == state(twin)
    assert "pool" in opened.report.rejected[0][1]


def test_a_folder_is_read_while_a_server_writes(folder_in_memory, monkeypatch):
    """The server has a further round after each store is opened, and after its rows are copied."""
    folder, read, copy_to = folder_in_memory / "run", Content.read, Content.copy_to
    with new_server("MIFA", storage=Storage(folder, journal=True, audit=True)) as server:

        def then_a_round(done):
            run_round(server, sets_of(THREE))
            return done

        monkeypatch.setattr(Content, "read", lambda folder: then_a_round(read(folder)))
        monkeypatch.setattr(Content, "copy_to", lambda *of: then_a_round(copy_to(*of)))
        for command in ("info", "verify", "verify --round", "audit", f"export {folder_in_memory}/x.npz"):
            name, *more = command.split()
            assert invoke("store", name, folder, *more).status == 0
        copy = Server.load(folder, storage=Storage(medium="ram"))
        assert copy.round_number == len(copy.audit_log()) < server.round_number


def test_commands_read_the_folder(folder_in_memory, capsys):
    folder = folder_in_memory / "run"
    with new_server("MIFA", storage=folder) as server:
        for _ in range(2):
            run_round(server, sets_of(THREE), range(N))
        saved = read_model(folder)
        assert saved.round_number == 2
        assert all(saved.tensors()[name].tobytes() == one.tobytes() for name, one in server.tensors().items())
        states = [state(server)]
    for command in ("info", "verify", "undo", "verify"):
        main(["store", command, str(folder)])
    assert "cannot be loaded" not in capsys.readouterr().out
    with Server.load(folder) as server:  # the groups follow the main folder back
        assert server.round_number == 1
        run_round(server, sets_of(THREE), range(N))
        assert state(server) == states[0]
    with ClientStore.open(folder / "groups" / "1") as rows:  # a later round of one group only
        for commit in range(2):
            rows.commit(
                rows.round, state=rows.state | {"numbers": rows.state["numbers"] | {"transactions": 9 + commit}}
            )
    with pytest.raises(CheckpointError):
        Server.load(folder)
