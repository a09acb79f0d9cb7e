"""Sizes and arrivals are columns: rounds do not write them, and many clients join in one commit."""

from itertools import count, pairwise

import numpy as np
import pytest

from fedcore import ClientStore, Server, Storage, Update
from fedcore.algorithms import FedAU, FedAWE
from fedcore.errors import RangeError, RoundError, StoreError, UnknownClientError
from fedcore.server.step import Population
from fedcore.store.registry import Registry
from tests.kit import place
from tests.store.peaks import peak_of

N = 3000
MORE = 65_536
"""Bytes by which the peaks for few and for many clients may differ: ten times less than a column of many."""


def flexible(store="ram", sizes=None):
    sizes = {i: 1 + i % 7 for i in range(N)} if sizes is None else sizes
    return Server(np.zeros(4, np.float32), "FlexibleFedAvg", sizes, lr=0.1, storage=place(store))


def hear(server, *clients):
    return server.round([Update(client, server.x + np.float32(1), 1) for client in clients])


def test_a_round_writes_no_sizes(tmp_path):
    server = flexible(f"mmap:{tmp_path / 'state'}")
    server.add_clients({"a": 3, "b": 4})
    columns = ["population/sizes", "population/arrived"]
    before = [server.store.vector(name).ctypes.data for name in columns]
    for t in range(3):
        hear(server, t, "a")
    assert [server.store.vector(name).ctypes.data for name in columns] == before
    assert len(str(server.store.state)) < 3000  # and of the clients there is no list in what each commit writes


def test_clients_added_together_or_one_by_one_are_the_same():
    together, in_turn = flexible(), flexible()
    for server in (together, in_turn):
        server.remove_client(17)
    together.add_clients({"a": 3, 2**64 - 1: 4, np.int64(17): 5})
    for client, size in zip(["a", 2**64 - 1, 17], [3, 4, 5], strict=True):
        in_turn.add_clients({client: size})
    for server in (together, in_turn):
        hear(server, 17, "a", 2**64 - 1, 0)
    assert together.x.tobytes() == in_turn.x.tobytes()


@pytest.mark.parametrize(
    ("clients", "error", "match"),
    [
        ({"a": 1, 3: 2}, RangeError, r"^clients\b.*\b3\b"),
        ({"a": 1, "b": 0}, RangeError, r"^clients\['b'\]=0\b"),
        ({"a": 1, "b": None}, RangeError, r"^clients\['b'\].*None"),
        ({"a": 2**53 + 1}, RangeError, "1..2"),
        ({"a": 1, 1.5: 1}, UnknownClientError, "1.5"),
        (["a"], RangeError, r"^clients\['a'\].*None"),
    ],
)
def test_one_invalid_client_registers_none(clients, error, match):
    server = flexible()
    before = server._backend.snapshot.population
    with pytest.raises(error, match=match):
        server.add_clients(clients)
    assert len(server.clients) == N
    assert server._backend.snapshot.population is before


def test_an_empty_list_adds_no_clients():
    server = flexible()
    server.add_clients([])
    assert len(server.clients) == N


def test_folders_that_listed_sizes_and_arrivals_are_read():
    registry = Registry([10, 20, "x"])
    listed = {"sizes": [[10, 4], [20, 6], ["x", 5]], "arrived": [["x", 3]], "included": [["gone", 5]], "total": 20}
    population = Population.from_state(listed, {}, registry)
    assert population.shares(registry, ["x", 10]).tolist() == [5 / 20, 4 / 20]
    assert population.ages(registry, ["x", 10], 5).tolist() == [3, np.inf]
    assert population.included == {"gone": 5}
    none = Population.from_state({"sizes": [], "arrived": [], "total": 0}, {}, registry)
    assert none.shares(registry, [10]) is none.ages(registry, [10], 0) is None


def test_forms_of_new_clients():
    server = Server(np.zeros(2, np.float32), "MIFA", 2, lr=0.1)
    server.add_clients("abc")
    server.add_clients(["d", 7])
    server.add_clients(np.int64(9))
    server.add_clients(name for name in ("e", "f"))
    assert list(server.clients) == [0, 1, "abc", "d", 7, 9, "e", "f"]
    assert len(server.clients) == 8
    assert "abc" in server.clients
    assert "a" not in server.clients
    for wrong in (b"gh", 1.5, None):
        with pytest.raises(UnknownClientError):
            server.add_clients(wrong)
    with pytest.raises(RangeError, match=r"^clients\b.*'g'.*5"):
        server.add_clients({"g": 5, "h": 5})
    sized = Server(np.zeros(2, np.float32), "FlexibleFedAvg", {0: 1, 1: 2}, lr=0.1)
    sized.add_clients({"a": np.int64(3)})
    sized.add_clients({"b": 4, "c": 5})
    assert sized.client_sizes.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kept", ["ram", "mmap"])
def test_changed_sizes_change_the_shares(tmp_path, kept):
    """p^k = n_k / n of the new sizes, as if the server had them from the start."""
    server = flexible(f"mmap:{tmp_path / 'state'}" if kept == "mmap" else "ram", {"a": 1, "b": 2, 3: 5})
    server.update_clients({"b": 9, 3: 4})
    fresh = flexible("ram", {"a": 1, "b": 9, 3: 4})
    for each in (server, fresh):
        hear(each, "a", "b")
    assert (server.x == fresh.x).all()
    np.testing.assert_allclose(server.x, (1 + 9) / 14, rtol=1e-6)
    server.update_clients({})
    server.add_clients({"d": 6})
    server.update_clients({"a": 2})
    hear(server, "d")
    np.testing.assert_allclose(server.x, 10 / 14 + 3 * 6 / 21, rtol=1e-6)  # a newcomer's share, threefold at first
    if kept == "mmap":
        x = server.x.copy()
        server.close()
        server = Server.load(tmp_path / "state")
        hear(server, "a")
        np.testing.assert_allclose(server.x - x, 2 / 21, rtol=1e-5)


def test_invalid_sizes_are_rejected():
    server = flexible("ram", {"a": 1, "b": 2})
    with pytest.raises(UnknownClientError, match=r"^sizes\b.*'c'"):
        server.update_clients({"c": 1})
    with pytest.raises(RangeError, match=r"^sizes\['a'\]=0\b"):
        server.update_clients({"a": 0})
    with server.open_round(), pytest.raises(RoundError):
        server.update_clients({"a": 2})
    with pytest.raises(RangeError, match=r"^sizes\b"):
        Server(np.zeros(2, np.float32), "MimiC", 2, lr=0.1).update_clients({0: 3})
    hear(server, "a", "b")
    np.testing.assert_allclose(server.x, 1, rtol=1e-6)


class Few:
    """A server with many clients that joined after a round, with sizes; and changes of single clients."""

    def __init__(self, clients, storage):
        ids = [f"client {i}" for i in range(clients)]
        self.server = Server(np.zeros(4, np.float32), "MIFA", {"first": 1}, lr=0.1, storage=storage)
        self.server.round([])
        self.server.add_clients({client: 1 + i % 7 for i, client in enumerate(ids)})
        self.ids, self.numbers = iter(ids), count()

    def arrive(self):
        self.server.add_clients({f"new {next(self.numbers)}": 3})

    def depart(self):
        self.server.remove_client(next(self.ids))

    def resize(self):
        self.server.update_clients({next(self.ids): 9})

    def refused(self):
        with pytest.raises(RangeError):
            self.server.add_clients({"another": 1, "first": 1})

    def newcomer(self):
        name = f"newcomer {next(self.numbers)}"
        with self.server.open_round(newcomers={name: 4, "who is not heard": 5}) as opened:
            opened.add(name, self.server.x, steps=1)

    def depart_in_vain(self):
        """A removal that the store cannot write."""
        state = self.server._backend
        keep, state.keep = state.keep, self._fail
        with pytest.raises(StoreError):
            self.server.remove_client("first")
        state.keep = keep

    @staticmethod
    def _fail(*_):
        raise StoreError("the disk is full")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["ram", "mmap", "undoable"])
@pytest.mark.parametrize("change", ["arrive", "depart", "resize", "refused", "newcomer", "depart_in_vain"])
def test_a_change_of_one_client_takes_the_same_memory_among_many(tmp_path, kind, change, caplog):
    caplog.set_level("INFO", "fedcore.server")  # the log of awaited clients looks for some of them
    peaks = []
    for clients in (200, 20_000):
        path = None if kind == "ram" else tmp_path / str(clients)
        few = Few(clients, Storage(path, keep_previous=kind == "undoable"))
        peaks.append(peak_of(getattr(few, change)))
        few.server.close()
    assert peaks[1] < peaks[0] + MORE


def test_an_undo_and_a_first_row_take_the_same_memory_among_many(tmp_path):
    def peaks(clients):
        ids = [f"client {i}" for i in range(clients)]
        with ClientStore(ids, 2, medium="mmap", path=tmp_path / str(clients), keep_previous=True) as store:
            round = count()

            def arrive():
                name = f"new {next(round)}"
                store.add(name)
                store.stage(name)[:] = 1
                store.commit(next(round))

            def come_and_go_back():
                store.forget(ids[next(round)])
                store.add("another")
                store.commit(next(round))
                store.undo()

            arrive()
            return np.array([peak_of(arrive), peak_of(come_and_go_back)])

    assert (peaks(20_000) < peaks(200) + MORE).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_population_equals_a_plain_dict_over_any_history(seed):
    """Arrivals, removals, returns and changes of sizes; no population ever changes."""
    rng = np.random.default_rng(seed)
    registry, population = Registry(), Population()
    clients, kept, seen = {}, {}, []  # id: [size, round of arrival]; id: size
    for t in range(120):
        if rng.random() < 0.5 or len(clients) < 2:
            back = [c for c in kept if rng.random() < 0.2]
            names = [f"{t}/{i}" for i in range(rng.choice([1, 1, 70, 300]))] + back
            sizes = rng.integers(1, 100, len(names)).tolist()
            numbers = registry.add_all(names)
            population = population.with_clients(numbers, names, sizes, t or None)
            since = {name: np.inf if name in kept or not t else t for name in names}
            clients |= {name: [size, since[name]] for name, size in zip(names, sizes, strict=True)}
            kept = {c: size for c, size in kept.items() if c not in names}
        else:
            chosen = [str(c) for c in rng.choice(list(clients), min(len(clients), rng.choice([1, 5])), replace=False)]
            if rng.random() < 0.5:
                population = population.with_sizes(registry, dict.fromkeys(chosen, t + 1))
                for c in chosen:
                    clients[c][0] = t + 1
            else:
                chosen = list(clients) if t % 40 == 17 else chosen
                for c in chosen:
                    forgotten = bool(rng.random() < 0.5)
                    population = population.without_client(registry.remove(c), c, from_objective=forgotten)
                    size, _ = clients.pop(c)
                    kept |= {} if forgotten else {c: size}
        if t % 10 == 3:  # through a folder
            vectors = population.vectors()
            population = Population.from_state(population.to_state(), vectors, registry)
        if t % 30 == 7:
            seen.append((population, {n: column.copy() for n, column in population.vectors().items()}))
        total = sum(size for size, _ in clients.values()) + sum(kept.values())
        assert (population.total, dict(population.included), bool(population.sizes)) == (total, kept, bool(clients))
        rooms = [column.shape[1] for column in population.sizes]
        assert all(8 * room <= before for before, room in pairwise(rooms))
        if clients:
            names, (sizes, since) = list(clients), np.transpose([*clients.values()])
            assert population.listed().tolist() == sorted(sizes)
            np.testing.assert_array_equal(population.shares(registry, names), sizes / total)
            ages = population.ages(registry, names, t)
            expected = np.where(np.isinf(since), np.inf, t + 1 - since)
            assert np.isinf(expected).all() if ages is None else (ages == expected).all()
    for before, columns in seen:
        for name, column in before.vectors().items():
            np.testing.assert_array_equal(column, columns[name])


def test_a_server_with_many_runs_is_resumed(tmp_path):
    """Clients join one by one, so that there are columns of several lengths."""
    servers = [flexible(f"mmap:{tmp_path / 'state'}"), flexible()]
    for server in servers:
        hear(server, 0, 1)
        for i in range(70):
            server.add_clients({f"a{i}": 1 + i})
        for client in (5, "a0", "a69"):
            server.remove_client(client)
        server.update_clients({7: 90})
    assert len(servers[0]._backend.snapshot.population.sizes) > 1
    servers[0].save(tmp_path / "copy")
    servers[0].close()
    for again in (Server.load(tmp_path / "state"), Server.load(tmp_path / "copy", storage=Storage(medium="ram"))):
        assert again.client_sizes.tolist() == servers[1].client_sizes.tolist()
        servers.append(again)
    for server in servers[1:]:
        hear(server, 7, "a1", "a68")
        assert server.x.tobytes() == servers[1].x.tobytes()


@pytest.mark.parametrize("method", [FedAU(cutoff=2), FedAWE()], ids=repr)
def test_a_client_that_returns_to_the_objective_counts_its_appearances_as_a_new_one_does(method):
    servers = [Server(np.zeros(1, np.float32), method, {0: 1, 1: 1}, lr=0.1) for _ in "ab"]
    for server, from_objective in zip(servers, (True, False), strict=True):
        for t in range(6):
            if t == 3:
                server.remove_client(1, from_objective=from_objective)
                server.add_clients({1: 1})
            sent = server.broadcast([0, 1])
            assert server.round([Update(i, sent.start(i) - i, 1) for i in (0, 1) if t != 4 or i]).weights.max() <= 2
    assert servers[0].x == servers[1].x
