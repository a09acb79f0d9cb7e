"""Results that no honest site sends, at NVFlare's own ways in: each is rejected by its site's name, and no other."""

import numpy as np
import pytest
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import ReservedKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedcore import Server
from fedcore.adapters.nvflare import Aggregator, reply
from fedcore.algorithms import SCAFFOLD
from tests.adapters.malformed import assert_only_the_valid_count, malformed
from tests.adapters.nvflare.local import LocalController

HONEST = ["site-1", "site-2", "site-3"]
LIARS = [f"liar-{i}" for i in range(420)]
ROUNDS = 5
LR = 0.1


def x0():
    return {"w": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def model_of(name):
    """What a site sends if it is honest; all liars would send the same."""
    rng = np.random.default_rng(HONEST.index(name) if name in HONEST else 9)
    params = {key: rng.normal(size=array.shape).astype(np.float32) for key, array in x0().items()}
    return reply(params, steps=5, control=np.full(10, 0.5, np.float32))


def shareable_of(message):
    if type(message) is not dict:
        return message
    made = Shareable()
    made.clear()
    made.update(message)
    return made


def results(seed):
    """The results of a round by name, the honest among the malformed."""
    valid = dict(FLModelUtils.to_shareable(model_of("liar")))
    changed = malformed(valid, len(LIARS), seed)
    made = {name: shareable_of(message) for name, message in zip(LIARS, changed, strict=True)}
    at = {name: FLModelUtils.to_shareable(model_of(name)) for name in HONEST}
    return {HONEST[0]: at[HONEST[0]], **made, **at}


def context_of(name):
    context, peer = FLContext(), FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
    context.set_peer_context(peer)
    return context


def assert_as_without_liars(server, reports, algorithm, clients):
    """The server is, bit for bit, one that never had a malformed result."""
    due = Server(x0(), algorithm, clients, lr=LR)
    assert len(reports) == ROUNDS
    for number, report in enumerate(reports):
        sent_in_round = results(number)
        assert_only_the_valid_count(report, HONEST, LIARS)
        new = [name for name in (*HONEST, *LIARS) if name not in due.clients]
        with due.open_round(newcomers=new) as opened:
            for name in report.accepted:
                sent = model_of(name)
                steps = FLModelUtils.from_shareable(sent_in_round[name]).meta["NUM_STEPS_CURRENT_ROUND"]  # 1.0, say
                opened.add(name, sent.params, steps=int(steps), control=sent.meta["fedcore"]["control"])
    np.testing.assert_array_equal(server.x, due.x)
    for name in HONEST:
        np.testing.assert_array_equal(server.store.read(name), due.store.read(name))


def test_results_that_are_no_models_are_rejected_by_name_in_scatter_and_gather():
    aggregator = Aggregator("MIFA", lr=LR, model=x0(), clients=[*HONEST, *LIARS])
    for round in range(ROUNDS):
        aggregator.reset_stats()
        accepted = {name: aggregator.accept(sent, context_of(name)) for name, sent in results(round).items()}
        aggregator.aggregate(context_of(""))
        counted = aggregator.reports[-1].accepted
        assert accepted == {name: name in counted for name in accepted}
    assert_as_without_liars(aggregator.server, aggregator.reports, "MIFA", [*HONEST, *LIARS])


def test_models_that_are_none_are_rejected_by_name_where_the_workflow_makes_them():
    aggregator = Aggregator("MIFA", model=x0(), clients=[*HONEST, *LIARS])  # which needs steps
    aggregator.reset_stats()
    for name in HONEST:
        sent = model_of(name)
        sent.meta["client_name"] = name
        assert aggregator.accept_model(sent) is True
    for name, change in zip(LIARS, malformed({"params": x0(), "meta": {"fedcore": {}}}, len(LIARS)), strict=True):
        sent = FLModel(params=x0())
        for key, value in change.items() if type(change) is dict else [("params", change)]:
            setattr(sent, str(key).encode("ascii", "replace").decode(), value)
        if type(sent.meta) is dict:
            sent.meta["client_name"] = name
        assert aggregator.accept_model(sent) is False  # for want of steps, at least
    aggregator.aggregate_model()
    assert aggregator.reports[0].accepted == tuple(HONEST)


class ThroughTasks(LocalController):
    """A Controller that gets results as NVFlare's communicator hands them over."""

    def run(self):
        self.made = [results(round) for round in range(ROUNDS)]
        super().run()

    def send_model(self, task_name, data, targets, timeout, callback):
        task = self._prepare_task(data, task_name, timeout, callback)
        for name in targets:
            result = self.made[data.current_round][name]
            client_task = ClientTask(Client(name, "token"), task)
            client_task.result = result
            self._process_result(client_task, FLContext())

    def event(self, event_type):
        pass


def test_results_that_are_no_models_are_rejected_by_name_in_the_controller():
    names = dict.fromkeys([*HONEST, *LIARS])
    algorithm = SCAFFOLD(control="sent")
    controller = ThroughTasks(names, x0(), algorithm, lr=LR, num_rounds=ROUNDS)
    controller.run()
    assert_as_without_liars(controller.server, controller.reports, algorithm, [])


def test_nobody_speaks_in_another_s_name():
    """Whatever the message or the peer's context says, where the server has noted whose token came."""
    aggregator = Aggregator("FedAvg", model=x0(), clients=HONEST)
    aggregator.reset_stats()
    for meta, header, peer in [("site-2", "site-1", "site-2"), ("site-1", None, "site-3")]:
        sent = model_of("site-1")
        sent.meta["client_name"] = meta
        result = FLModelUtils.to_shareable(sent)
        result.set_header("client_name", "site-2")
        if header:
            result.set_header(ServerCommandKey.FL_CLIENT, Client(header, "token"))
        assert aggregator.accept(result, context_of(peer)) is True
    aggregator.aggregate_model()
    assert aggregator.reports[0].accepted == ("site-1", "site-3")


def test_what_is_not_the_sites_fault_is_raised():
    aggregator = Aggregator("FedAvg", clients=HONEST)
    with pytest.raises(ValueError, match="model"):
        aggregator.accept(FLModelUtils.to_shareable(model_of("site-1")), context_of("site-1"))
