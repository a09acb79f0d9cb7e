"""The uploads that FedLab's handler and manager get: whose they are, and which count."""

import random
from queue import SimpleQueue

import numpy as np
import pytest

pytest.importorskip("fedlab")

import torch
from fedlab.core.communicator import Package
from fedlab.utils import MessageCode

from fedcore import errors
from fedcore.adapters.fedlab import ServerHandler, ServerManager
from tests.adapters.fedlab.processes import LR, net
from tests.adapters.malformed import OBJECTS, PLAIN


def test_evaluate_is_the_callers_function_of_the_newest_model():
    assert ServerHandler(net(), 1, 1.0, "FedAvg", lr=LR).evaluate() is None
    handler = ServerHandler(net(), 1, 1.0, "FedAvg", lr=LR, evaluate=lambda model: model(torch.zeros(5)).detach())
    handler.num_clients = 1
    handler.sample_clients()
    handler.load([handler.downlink_package[0] * 0 + 2])
    assert handler.evaluate().tolist() == [2, 2, 2]


def a_third_of_ten(name="MIFA"):
    """A handler that has sampled three clients of ten, these clients, and the model."""
    random.seed(0)
    handler = ServerHandler(net(), 5, 0.3, name, lr=LR)
    handler.num_clients = 10
    return handler, handler.sample_clients(), handler.downlink_package[0]


def claim(client, steps=1, examples=1):
    return torch.tensor([client, steps, examples])


def test_an_upload_counts_once_and_only_for_a_sampled_client(caplog):
    handler, sampled, x = a_third_of_ten()
    victim = next(client for client in range(10) if client not in sampled)
    for _ in range(3):
        assert not handler.load([x + 5, claim(victim)])
    assert not handler.load([x - 0.1, claim(sampled[0])])
    for _ in range(3):
        assert not handler.load([x + 7, claim(sampled[0])])
    assert not handler.load([x - 0.2, claim(sampled[1])])
    assert handler.load([x - 0.3, claim(sampled[2])])
    [report] = handler.reports
    assert report.accepted == tuple(sampled)
    assert [client for client, _ in report.rejected] == [victim, sampled[0]]
    assert "was not sampled" in report.rejected[0][1]
    assert "answered" in report.rejected[1][1]
    assert f"client: {victim} was not sampled" in caplog.text
    assert handler.server.store.row(victim) is None
    np.testing.assert_allclose(handler.server.store.read(sampled[0]), 1, rtol=1e-5)


def test_a_rejected_upload_also_counts_as_its_client_s_answer():
    handler, sampled, x = a_third_of_ten()
    assert not handler.load([x * float("nan"), claim(sampled[0])])
    assert not handler.load([x - 0.1, claim(sampled[0])])
    assert not handler.load([x - 0.1, claim(sampled[1])])
    assert handler.load([x - 0.1, claim(sampled[2])])
    assert handler.reports[0].accepted == tuple(sampled[1:])


def test_an_unexpected_upload_opens_no_round(caplog):
    handler, sampled, x = a_third_of_ten()
    for client in sampled:
        handler.load([x - 0.1, claim(client)])
    before = handler.server.x.copy()
    for upload in ([x + 5, claim(sampled[0])], [x + 5]):
        assert not handler.load(upload)
        assert "unexpected upload" in caplog.text
    fresh = handler.sample_clients()
    x = handler.downlink_package[0]
    np.testing.assert_array_equal(x.numpy(), before)
    for client in fresh:
        handler.load([x - 0.1, claim(client)])
    assert [report.accepted for report in handler.reports] == [tuple(sampled), tuple(fresh)]


@pytest.mark.parametrize(
    "upload", [None, [], (), object(), [torch.zeros(18).to_sparse()]], ids=["None", "[]", "()", "object", "sparse"]
)
def test_an_upload_without_a_model_is_rejected_as_the_next_client_s(upload):
    handler, sampled, x = a_third_of_ten()
    handler.load(upload)
    for _ in sampled[1:]:
        handler.load([x - 0.1])
    assert handler.reports[0].accepted == tuple(sampled[1:])
    assert handler.reports[0].rejected[0][0] == sampled[0]


def test_sampling_ends_a_round_with_silent_clients(caplog):
    caplog.set_level("INFO")
    handler, sampled, x = a_third_of_ten()
    handler.load([x - 0.1, claim(sampled[1])])
    handler.sample_clients()
    assert handler.reports[0].accepted == (sampled[1],)
    assert f"2 clients did not reply ({sampled[0]}, {sampled[2]})" in caplog.text


def as_it_travels(*content):
    """An upload after FedLab's network: all tensors have the dtype of the first one."""
    package = Package(MessageCode.ParameterUpdate, [tensor.float() for tensor in content])
    return Package.parse_content(package.slices, package.content)


def test_claims_travel_as_floats():
    handler, sampled, x = a_third_of_ten()
    for number, client in enumerate(sampled):
        assert handler.load(as_it_travels(x - 0.1, claim(client, 1, 10**6 + 1))) is (number == 2)
    assert handler.reports[0].accepted == tuple(sampled)


class LocalNetwork:
    """FedLab's network replaced by calls: ``uploads`` maps a rank to a function from a message to its uploads."""

    def __init__(self, numbers, uploads):
        self.world_size, self.numbers, self.uploads = len(numbers) + 1, numbers, uploads
        self.queue, self.closed = SimpleQueue(), False

    def init_network_connection(self):
        pass

    def close_network_connection(self):
        self.closed = True

    def send(self, content, message_code, dst):
        if message_code == MessageCode.ParameterUpdate:
            ids, x = as_it_travels(*content)
            for upload in self.uploads[dst](ids.int().tolist(), x):
                self.queue.put((dst, *upload))

    def recv(self, src=None):
        if src is None:
            return self.queue.get(timeout=30)
        if not self.closed and src in self.numbers:
            number = self.numbers.pop(src)
            return src, MessageCode.SetUp, as_it_travels(torch.tensor([number]))
        return src, MessageCode.Exit, None


def upload(*content):
    return MessageCode.ParameterUpdate, as_it_travels(*content)


def managed(uploads, numbers=(4, 6), rounds=2, mode="LOCAL", name="MIFA", **options):
    """A handler after its run, of processes that have so many clients each, all of which are sampled."""
    handler = ServerHandler(net(), rounds, 1.0, name, lr=LR)
    network = LocalNetwork(dict(enumerate(numbers, 1)), dict(enumerate(uploads, 1)))
    ServerManager(network, handler, mode, **options).run()
    assert network.closed
    return handler


def honest(shift):
    """Uploads without claims, in the order of the clients, as FedLab's own trainers send them."""
    return lambda ids, x: [upload(x - shift * (i + 1)) for i in ids]


@pytest.mark.parametrize("mode", ["LOCAL", "GLOBAL"])
def test_uploads_without_claims_answer_for_the_clients_of_their_process_in_order(mode):
    def backwards(ids, x):
        return [upload(x - 0.5 * (i + 1), claim(i)) for i in reversed(ids)]

    handler = managed([honest(0.1), backwards], mode=mode)
    assert [set(report.accepted) for report in handler.reports] == [set(range(10))] * 2
    first = {"LOCAL": 0, "GLOBAL": 4}[mode]
    due = [0.1 * (i + 1) for i in range(4)] + [0.5 * (first + i + 1) for i in range(6)]
    for client, shift in enumerate(due):
        np.testing.assert_allclose(handler.server.store.read(client), shift / LR, rtol=1e-4)


def test_a_process_answers_only_for_its_own_clients(caplog):
    def liar(ids, x):
        for_others = [upload(x + 7, claim(victim)) for victim in range(6, 10)]
        of_nothing = [(MessageCode.Exit, None), (MessageCode.ParameterUpdate, None)]
        return [*for_others, *of_nothing, *honest(0.5)(ids, x)]

    handler = managed([liar, honest(0.1)], numbers=(6, 4), mode="GLOBAL")
    for report in handler.reports:
        assert set(report.accepted) == set(range(10))
        assert report.rejected == ()
    for client in range(6, 10):
        np.testing.assert_allclose(handler.server.store.read(client), 0.1 * (client + 1) / LR, rtol=1e-4)
    assert "an upload of round 0 from process 1: client: " in caplog.text


@pytest.mark.parametrize("number", [0, -3, 10**7])
def test_a_process_with_a_wrong_number_of_clients_is_refused_by_its_rank(number):
    with pytest.raises(errors.RangeError, match=r"process 2.*max_clients"):
        managed([honest(0.1), honest(0.1)], numbers=(4, number))


TENSORS = [
    lambda: torch.zeros(18, dtype=torch.complex64),
    lambda: torch.zeros(18).to_sparse(),
    lambda: torch.zeros(18, device="meta"),
    lambda: torch.tensor(float("nan")),
    lambda: torch.tensor([0.5, 1.0, 1.0]),
    lambda: torch.tensor([0.0, float("inf"), 1.0]),
    lambda: torch.tensor([0, 1]),
    lambda: torch.tensor([0, 1, 1]).to_sparse(),
    lambda: torch.tensor([True, True, True]),
]
ODD = [*PLAIN, *OBJECTS, *TENSORS]


def test_wrong_claims_count_for_no_client(caplog):
    handler, sampled, x = a_third_of_ten()
    for odd in [*ODD, *(lambda made=made: [made()] for made in ODD)]:
        assert handler.load([x + 7, odd()]) is False
        assert "claims: " in caplog.messages[-1]
    for client in sampled:
        assert handler.load([x - 0.1, claim(client)]) is (client == sampled[-1])
    assert handler.reports[0].accepted == tuple(sampled)
    assert handler.reports[0].rejected == ()


def test_a_manager_continues_after_messages_that_are_no_uploads():
    def liar(ids, x):
        for made in ODD:
            yield MessageCode.ParameterUpdate, [x + 7, made()]
            yield made(), None
        yield MessageCode.ParameterUpdate, [object()]
        yield from [upload(x - 0.1) for _ in ids[1:]]

    handler = managed([liar, lambda ids, x: [upload(x - 0.1) for _ in ids]])
    for report in handler.reports:
        assert set(report.accepted) == set(range(1, 10))
        assert [client for client, _ in report.rejected] == [0]
