"""The contract of servers: the same rounds have the same bits, also after a copy, a resume or a rollback half-way.

``tests/cluster/test_same_bits.py`` has the same contract for servers in shards.
"""

import copy

import numpy as np
import pytest

from fedcore import ClientStore, Server, Storage
from fedcore.algorithms import optimizers
from fedcore.server.folder import folder_problems
from tests.server.invariant import contradictions
from tests.server.rounds import METHODS, N, everything, go_on, made, n
from tests.server.test_examples import replies
from tests.server.test_examples import server_of as capped
from tests.server.test_norm_limits import N as MANY
from tests.server.test_norm_limits import honest, lying
from tests.server.test_norm_limits import server_of as limited
from tests.server.test_undone import take_back


def saved(server, path):
    """In a copy; later rounds of the original do not change it."""
    server.save(path / "copy")
    go_on(server, 1)
    return Server.load(path / "copy")


def copied(server, path):
    """In a copy in memory; its rounds do not change the original."""
    before, other = everything(server), copy.deepcopy(server)
    go_on(other, 1)
    assert everything(server) == before
    return copy.deepcopy(server)


def reopened(server, path):
    """In its own folder, closed and opened again twice."""
    for _ in range(2):
        server.close()
        server = Server.load(path / "run")
        go_on(server, 1)
    assert folder_problems(server._backend.store) == []
    return server


def read_into_memory(server, path):
    """Its folder is read into memory and does not change."""
    server.close()
    return Server.load(path / "run", storage=Storage(medium="ram"))


def rolled_back(server, path):
    """A round more is taken back in its folder."""
    before, count = everything(server), server.transactions
    go_on(server, 1)
    server.close()
    server = take_back(path / "run", count)
    assert everything(server) == before
    assert contradictions(server) == []
    return server


WAYS = {False: [saved, copied], True: [saved, reopened, read_into_memory, rolled_back]}
IN_FOLDER = [(way, folder) for folder, ways in WAYS.items() for way in ways]


def with_liar(server, t):
    updates = honest(server, range(3), np.random.default_rng(t))
    return [updates[0], lying(server, updates[1], 12), updates[2]]


def check(make, way, path, is_in_folder):
    straight, server = make(None), make(path / "run" if is_in_folder else None)
    go_on(straight, 9)
    go_on(server, 4)
    server = way(server, path)
    go_on(server, 9 - server.round_number)
    assert everything(server, list(server.clients)) == everything(straight, list(straight.clients))
    server.close()


@pytest.mark.parametrize(("way", "is_in_folder"), IN_FOLDER, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("method", METHODS)
def test_every_method(method, way, is_in_folder, tmp_path):
    def make(path):
        return made(method, storage=None if path is None else Storage(path, keep_previous=True))

    check(make, way, tmp_path, is_in_folder)


OPTIONS = {
    "Adam": dict(optimizer=optimizers.Adam()),
    "late updates and long ones": dict(max_staleness=1, reject_long=50.0),
    "exact": dict(accumulator="exact"),
}


@pytest.mark.parametrize(("way", "is_in_folder"), IN_FOLDER, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD"])
def test_options(method, options, way, is_in_folder, tmp_path):
    def make(path):
        return made(method, storage=None if path is None else Storage(path, keep_previous=True), **options)

    check(make, way, tmp_path, is_in_folder)


@pytest.mark.parametrize(("way", "is_in_folder"), IN_FOLDER, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("method", METHODS)
def test_codecs(method, codec, way, is_in_folder, tmp_path):
    if method in ("FedAvg", "MIFA", "MimiC, short history", "SCAFFOLD", "SCAFFOLDMVR") or way is saved:
        medium = "mmap" if is_in_folder else "ram"

        def make(path):
            own = dict(path=path, keep_previous=True) if is_in_folder and path else {}
            return made(method, storage=ClientStore(N, n, codec=codec, medium=medium if path else "ram", **own))

        check(make, way, tmp_path, is_in_folder)


@pytest.mark.parametrize("is_in_folder", [False, True], ids=["copies", "folder"])
@pytest.mark.parametrize("method", ["FedAvg", "MimiC", "SCAFFOLDMVR"])
def test_remembered_norms(method, is_in_folder, tmp_path):
    """Also while there are fewer norms than a median needs."""
    continues(lambda **options: limited(method, **options), with_liar, MANY, is_in_folder, tmp_path)


@pytest.mark.parametrize("is_in_folder", [False, True], ids=["copies", "folder"])
def test_remembered_claims(is_in_folder, tmp_path):
    continues(capped, lambda server, t: replies(server, [3, 10**6, 4], t), MANY, is_in_folder, tmp_path)


def continues(make, updates, clients, is_in_folder, path):
    """Rounds of 2, 4 and 3, with a resume between them, are 9 rounds."""
    straight, server = make(), make(path=path / "run") if is_in_folder else make()
    for t in range(9):
        if t in (2, 6):
            if is_in_folder:
                server.close()
                server = Server.load(path / "run")
            else:
                server.save(path / f"copy {t}")
                server = Server.load(path / f"copy {t}")
        for one in (straight, server):
            one.round(updates(one, t))
    assert everything(server, range(clients)) == everything(straight, range(clients))
    server.close()
