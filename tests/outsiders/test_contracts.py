"""An outsider's parts keep the contracts of fedcore.testing; a broken part fails with the promise that it breaks."""

from functools import partial
from unittest import SkipTest

import pytest

from fedcore import ClientStore, Storage, testing
from tests.outsiders.house.mine import methods, parts


class TestMyAlgorithm(testing.AlgorithmContract):
    def make_algorithm(self):
        return methods.Accelerated(lam=0.5)


class TestMyOptimizer(testing.AlgorithmContract):
    def make_optimizer(self):
        return parts.Lion()


class TestMyRule(testing.RuleContract):
    def make_rule(self):
        return parts.RejectFast()

    def make_rejected(self, update):
        return update._replace(steps=60)


class TestMyStore(testing.StoreContract):
    def make_store(self, folder, clients, n, **options):
        return parts.LoggedStore(ClientStore(clients, n, medium="mmap", path=folder, **options))

    def reopen(self, folder, **options):
        return parts.LoggedStore(ClientStore.open(folder, **options))


class TestMyServer(testing.ServerContract):
    test_copies = None  # the server is in a folder

    def make_server(self, folder, *args, **options):
        return parts.WatchedServer(*args, storage=Storage(folder), **options)

    def reopen(self, server, folder):
        server.close()
        return parts.WatchedServer.load(folder)


class TestMyExecutor(testing.ExecutorContract):
    def make_executor(self):
        return parts.CountingProcesses()


class TestMyFramework(testing.AdapterContract):
    def run(self, algorithm, work, *, n, rounds, x0, **options):
        clients = {client: partial(self.client, work, i) for i, client in enumerate(self.ids(n))}
        return parts.federation(algorithm, clients, rounds=rounds, x0=x0, lr=0.1, **options)

    def client(self, work, i, t, sent):
        return work(t, i, sent, None)


class ForgetfulStore(parts.LoggedStore):
    def commit(self, round, vectors=None, *args, **options):
        super().commit(round, None, *args, **options)


def test_a_broken_promise_is_named():
    class Broken(testing.StoreContract):
        def make_store(self, folder, clients, n, **options):
            return ForgetfulStore(ClientStore(clients, n, **options))

    with pytest.raises(AssertionError, match="vectors") as raised:
        testing.check(Broken)
    assert "Broken breaks this promise: " in raised.value.__notes__[0]


def test_a_promise_that_is_skipped_is_left_out(tmp_path):
    testing.check(testing.StoreContract)
    with pytest.raises(SkipTest) as skipped:
        testing.StoreContract().test_undo(tmp_path)
    assert not hasattr(skipped.value, "__notes__")
