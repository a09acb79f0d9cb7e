import json
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils.class_utils import get_component_init_parameters
from nvflare.fuel.utils.component_builder import ComponentBuilder
from nvflare.job_config.fed_job_config import FedJobConfig

from fedcore import Compute, Limits, RoundPolicy, Server, Storage, Update, errors
from fedcore.adapters.nvflare import Aggregator, Controller, SecureController, Trainer, order, reply
from fedcore.algorithms import FlexibleFedAvg
from fedcore.algorithms.local_rules import minibatches
from fedcore.rules import Filter, RejectLong, TrimmedMean
from tests.adapters.drivers import Raw
from tests.adapters.drivers.nvflare import LocalController
from tests.adapters.nvflare.sites import (
    NAMES,
    PARTS,
    ROUNDS,
    WITHOUT_SIZES,
    X,
    Y,
    engine,
    lie,
    net,
    sites,
    straight,
    x0,
)


@pytest.mark.parametrize("name", WITHOUT_SIZES)
def test_every_method_equals_fedcore_s_own_simulation(name):
    controller = LocalController(sites(), x0(), name, lr=0.1, num_rounds=ROUNDS, num_clients=2)
    controller.run()
    cohorts = [sorted(int(name[-1]) - 1 for name in report.accepted) for report in controller.reports]
    assert [len(cohort) for cohort in cohorts] == [2] * ROUNDS
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    due = straight(name, ROUNDS, cohorts)
    np.testing.assert_array_equal(controller.server.x, due.x)
    for client, site in enumerate(NAMES):
        np.testing.assert_array_equal(controller.server.store.read(site), due.store.read(client))
    np.testing.assert_array_equal(due.layout.flatten(controller.saved[-1].params), due.x)


@pytest.mark.parametrize("kind", [Aggregator, Controller])
def test_wrong_methods_and_optimizers_fail_before_the_job(kind):
    with pytest.raises(errors.UnknownNameError, match="SCAFFOLD"):
        kind("SCAFFOLDD")
    with pytest.raises(errors.RangeError, match=r"^optimizer"):
        kind("FedAvg", optimizer={"name": "SGD"})


@pytest.mark.parametrize("scheme", ["A", "B", "C"])
def test_flexible_participation_with_incomplete_work_and_a_late_site(scheme):
    """Site 2 does one of three steps in every other round, site 3 joins in round 2; against fedcore's own server."""
    done = {(t, 1): 1 for t in (0, 2, 4)}
    sizes = {name: len(part) for name, part in zip(NAMES, PARTS, strict=True)}

    def work(client, received):
        steps = done.get((received.current_round, client), 3)
        part = PARTS[client]
        batches = minibatches(len(part), 8, steps=steps, seed=0, round=received.current_round, client=client)
        inputs, labels = torch.from_numpy(X[part]), torch.from_numpy(Y[part])
        answer = Trainer(net()).train(received, inputs, labels, batches)
        sent.append((received.current_round, NAMES[client], answer.params, steps))
        return answer

    sent = []
    clients = {name: lambda received, i=i: work(i, received) for i, name in enumerate(NAMES[:2])}
    clients["stranger"] = lambda received: pytest.fail("asked a client of unknown size")
    algorithm = FlexibleFedAvg(scheme, local_steps=3)

    def joins(report):
        if report.round == 1:
            clients["site-3"] = lambda received: work(2, received)

    how = {"client_sizes": sizes, "callbacks": joins}
    controller = LocalController(clients, x0(), algorithm, lr=0.1, num_rounds=6, **how)
    controller.run()
    assert [len(report.accepted) for report in controller.reports] == [2, 2, 3, 3, 3, 3]
    due = Server(x0(), algorithm, {name: sizes[name] for name in NAMES[:2]}, lr=0.1)
    for t in range(6):
        if t == 2:
            due.add_clients({"site-3": sizes["site-3"]})
        due.round([Update(name, y, steps, sizes[name]) for round, name, y, steps in sent if round == t])
    np.testing.assert_array_equal(controller.server.x, due.x)
    assert not np.array_equal(due.x, due.layout.flatten(x0()))


@pytest.mark.parametrize("scheme", ["A", "B", "C"])
def test_a_size_does_not_register_a_site(scheme):
    sizes = {name: len(part) for name, part in zip(NAMES, PARTS, strict=True)} | {"phantom": 10**6}
    xs = []
    for phantoms in ({}, {"phantom": lambda got: None}):
        algorithm = FlexibleFedAvg(scheme, local_steps=3)
        controller = LocalController(sites() | phantoms, x0(), algorithm, lr=0.1, num_rounds=3, client_sizes=sizes)
        controller.run()
        assert set(controller.server.clients) == set(NAMES)
        xs.append(controller.server.x)
    np.testing.assert_allclose(*xs, rtol=1e-5, atol=1e-6)


def test_a_site_answers_for_itself_once_and_before_the_round_s_end():
    """NVFlare sets the name of the task's client, whatever the message has."""
    callbacks = []

    class Twice(LocalController):
        def send_model(self, callback, **task):
            callbacks.append(callback)
            super().send_model(callback=callback, **task)

        def get_num_standing_tasks(self):
            super().get_num_standing_tasks()
            answer = lie()(FLModel(params=x0()))
            answer.meta["client_name"] = "a"
            assert callbacks[0](answer) is False
            return 0

    def another(received):
        answer = lie()(received)
        answer.meta["client_name"] = "b"
        return answer

    controller = Twice({"a": another, "b": lambda got: None}, x0(), "MIFA", lr=0.1, num_rounds=1)
    controller.run()
    assert controller.reports[0].accepted == ("a",)
    assert list(controller.server.clients) == ["a"]
    late = lie()(FLModel(params=x0()))
    late.meta["client_name"] = "b"
    assert callbacks[0](late) is False
    assert controller.reports[0].rejected == ()  # a second answer to a task is a copy of the first
    assert any(line.startswith("b: round: ") for line in controller.warnings)


def test_an_aborted_job_rolls_the_round_back():
    controller = LocalController(sites(), x0(), "MimiC", lr=0.1, num_rounds=2)
    controller.get_num_standing_tasks = lambda: controller.abort_signal.trigger(True) or 0
    controller.run()
    assert controller.reports == []
    assert controller.server.round_number == 0
    np.testing.assert_array_equal(controller.server.x, controller.server.layout.flatten(x0()))


class SlowController(LocalController):
    """A client whose function returns None keeps its task until it is cancelled; its result arrives a round later."""

    waiting = late = ()
    late_result = FLModelUtils.to_shareable(FLModel(params=x0()))

    def get_num_standing_tasks(self):
        asked, start = list(self.asked), len(self.arrived)
        for name, _, task in self.late:
            answer = ClientTask(Client(name, "token"), task)
            answer.result = self.late_result
            self._process_result(answer, FLContext())
        self.late = ()
        super().get_num_standing_tasks()
        self.waiting = [*self.waiting, *(one for one in asked if one[0] not in self.arrived[start:])]
        return len(self.waiting)

    def cancel_all_tasks(self):
        self.waiting, self.late = (), self.waiting


def test_a_policy_closes_rounds_without_the_silent_sites():
    silent = {"phantom": lambda received: None}
    policy = {"min_clients": 2, "min_share": 0.75}
    controller = SlowController(sites() | silent, x0(), "FedAvg", lr=0.1, num_rounds=3, policy=policy)
    controller.run()
    assert [(report.closed, report.missing) for report in controller.reports] == [("min_share", ("phantom",))] * 3
    assert controller.waiting == ()
    np.testing.assert_array_equal(controller.server.x, straight("FedAvg", 3, [[0, 1, 2]] * 3).x)


@pytest.mark.parametrize("late", [SlowController.late_result, make_reply(ReturnCode.EXECUTION_EXCEPTION)])
def test_a_late_result_of_an_aborted_round_is_no_rejection_when_the_round_is_repeated(late):
    honest, tries = sites(), iter([None])
    clients = honest | {"site-1": lambda received: next(tries, 1) and honest["site-1"](received)}
    policy = {"min_clients": 2, "min_share": 0.6}
    controller = SlowController(clients, x0(), "FedAvg", num_rounds=1, policy=policy, aggregation="trimmed-mean")
    controller.late_result = late
    controller.run()
    assert [(len(report.accepted), len(report.rejected)) for report in controller.reports] == [(0, 2), (3, 0)]


LAG = {("site-3", 0): 2, ("site-1", 3): 5}


class LaggingController(LocalController):
    """Some results arrive in a later round: ``LAG``, by (site, round of its task)."""

    def get_num_standing_tasks(self):
        now, asked = self.server.round_number, self.asked
        later = [one for one in asked if LAG.get((one[0], one[1].current_round), 0) > now]
        self.asked = [one for one in asked if one not in later]
        super().get_num_standing_tasks()
        self.asked += later
        return len(self.asked)


def test_a_buffer_takes_results_while_other_sites_work():
    policy = RoundPolicy(buffer=2, max_staleness=2, discount=0.5)
    controller = LaggingController(sites(), x0(), "FedAvg", lr=0.1, num_rounds=4, policy=policy)
    controller.run()
    accepted = [list(zip(report.accepted, report.ages.tolist(), strict=True)) for report in controller.reports]
    assert accepted[:3] == [
        [("site-1", 0), ("site-2", 0)],
        [("site-1", 0), ("site-2", 0)],
        [("site-3", 2), ("site-1", 0)],
    ]
    assert accepted[3][0] == ("site-2", 1)
    assert [model.current_round for model in controller.saved] == [0, 1, 2, 3]
    server, simulated, sent = Server(net(), "FedAvg", 3, lr=0.1, policy=policy), engine(), {}
    for t, updates in enumerate(accepted):
        for update in simulated.updates(server.broadcast(range(3))):
            sent[NAMES[update.client], t] = update._replace(value=update.value.copy(), round=t)
        server.push([sent[name, t - age] for name, age in updates])
    np.testing.assert_array_equal(controller.server.x, server.x)


class AskingController(LocalController):
    """The loop's thread looks for free sites while NVFlare's thread still has a pushed result."""

    def event(self, event_type):
        if event_type == AppEventType.AFTER_CONTRIBUTION_ACCEPT:
            self._ask_free_sites(self.server)


def test_an_accepted_site_is_not_rejected_if_it_is_asked_meanwhile():
    policy = {"buffer": 3, "max_staleness": 1}
    controller = AskingController(sites(), x0(), "FedAvg", lr=0.1, num_rounds=4, policy=policy)
    controller.run()
    assert [(len(report.accepted), report.rejected) for report in controller.reports] == [(3, ())] * 4


@pytest.mark.parametrize("options", [{"aggregation": "open"}, {"algorithm": "FedVARP"}], ids=str)
def test_a_site_that_counts_once_waits_for_the_end_of_the_buffer(options):
    """Even if one site is at work at a time, and the buffer is larger than the number of sites."""
    options = {"algorithm": "FedAvg", "policy": {"buffer": 5, "max_staleness": 1}, "num_clients": 1} | options
    controller = LocalController(sites(), x0(), lr=0.1, num_rounds=3, **options)
    controller.run()
    assert [(sorted(report.accepted), report.rejected) for report in controller.reports] == [(sorted(NAMES), ())] * 3


def test_a_buffer_rejects_unreadable_results_and_asks_again():
    clients = {"failing": lambda received: Raw(make_reply(ReturnCode.EXECUTION_EXCEPTION)), "liar": lie(params={})}
    controller = LocalController(clients | sites(), x0(), "FedAvg", lr=0.1, num_rounds=3, policy={"buffer": 3})
    controller.run()
    assert [len(report.accepted) for report in controller.reports] == [3] * 3
    assert [client for report in controller.reports for client, _ in report.rejected] == ["failing", "liar"] * 3


def test_a_site_that_joins_closes_a_buffer_early():
    """The third site is there from the second task of the first site on."""
    clients, asked = sites(NAMES[:2]), []
    first = clients["site-1"]

    def joined(received):
        asked.append(received)
        if len(asked) == 2:
            clients.update(sites(NAMES[2:]))
        return first(received)

    clients["site-1"] = joined
    controller = LocalController(
        clients, x0(), "FedAvg", lr=0.1, num_rounds=2, policy={"buffer": 9, "max_staleness": 1}
    )
    controller.run()
    assert [report.accepted for report in controller.reports] == [
        ("site-1", "site-2") * 3,
        ("site-3", *NAMES, *NAMES, "site-1", "site-2"),
    ]


def test_over_selection_asks_more_sites():
    policy = RoundPolicy(min_clients=3, over_selection=1.5)
    controller = LocalController(sites(), x0(), "FedAvg", num_rounds=1, num_clients=2, policy=policy)
    controller.run()
    assert len(controller.reports[0].accepted) == 3


def test_a_job_with_too_few_sites_stops():
    with pytest.raises(errors.RoundError, match="min_clients"):
        LocalController(sites(NAMES[:2]), x0(), "FedAvg", policy=RoundPolicy(min_clients=3)).run()
    for policy, why in (({"min_share": 2}, "min_share"), (3, "^policy=3: must be")):
        with pytest.raises(errors.RangeError, match=why):
            Controller(policy=policy)


def test_vectors_by_name():
    seen = {}

    def look(received):
        work = order(received)
        seen["offset"], seen["lr"] = work.named(work.offset), work.lr
        assert work.x_prev is None
        assert work.named(work.x_prev) == {}
        return reply(received.params, steps=1)

    first = {**x0(), "norm.running_mean": np.ones(2, np.float32)}  # a buffer, which has no offset
    controller = LocalController({"a": look}, first, "FedAvgM", lr=0.25, num_rounds=1)
    controller.run()
    assert controller.reports[0].accepted == ("a",)
    assert seen["lr"] == 0.25
    assert {name: v.shape for name, v in seen["offset"].items()} == {name: v.shape for name, v in x0().items()}


def test_a_model_of_another_controller_has_no_instructions():
    with pytest.raises(errors.ArrayError, match=r"^model\b.*'fedcore'"):
        order(FLModel(params=x0()))


class Builder(ComponentBuilder):
    """NVFlare's own, without its search for the modules of classes."""

    def get_module_scanner(self):
        return SimpleNamespace(get_module_name=lambda name: "fedcore.rules")


@pytest.mark.parametrize("component", [Controller, Aggregator, SecureController])
def test_nvflare_builds_a_component_from_the_json_of_its_attributes(component, tmp_path):
    """NVFlare takes a mapping with "path" or "name" for a component; the attributes mark it as a plain dictionary."""
    mappings = {
        "storage": {"path": str(tmp_path / "my.rows"), "codec": "bf16"},
        "limits": {"max_norm": 10.0},
        "compute": {"accumulator": "exact"},
        "aggregation": {"name": "RejectLong", "ratio": 30},
    }
    job = component(**mappings)
    args = {name: getattr(job, name) for name in ("algorithm", "lr", *mappings)}
    assert args.keys() <= get_component_init_parameters(job).keys()  # of which NVFlare writes a configuration
    config = json.loads(json.dumps({"path": f"{component.__module__}.{component.__name__}", "args": args}))
    options = Builder().build_component(config)._server_options()
    assert options.storage == Storage(tmp_path / "my.rows", codec="bf16")
    assert options.limits == Limits(max_norm=10.0)
    assert options.compute == Compute(accumulator="exact")
    assert [rule.ratio for rule in options.aggregation if isinstance(rule, RejectLong)] == [30]
    with pytest.raises(ValueError, match="instantiate"):
        Builder().build_component({**config, "args": {"storage": mappings["storage"]}})


class Hiding(Aggregator):
    def __init__(self, algorithm="FedAvg", **options):
        super().__init__(algorithm, **options)


class Slower(Controller):
    def __init__(self, *args, lr=0.01, **kwargs):
        super().__init__(*args, lr=lr, **kwargs)


def test_nvflare_s_job_has_the_options_of_a_subclass_or_there_is_an_error(tmp_path):
    write = FedJobConfig("job", 1)._get_args
    assert write(Hiding("MIFA"), str(tmp_path))["algorithm"] == "MIFA"
    with pytest.raises(errors.RangeError, match=r"^Hiding\b.*'options'.*\*args and \*\*kwargs"):
        Hiding("MIFA", lr=0.2)
    assert write(Slower("MIFA", lr=0.1), str(tmp_path))["lr"] == 0.1  # the default of Controller, and not of Slower
    assert deepcopy(Slower("MIFA")).lr == 0.01


@dataclass(frozen=True)
class Longest(Filter):
    """A user's rule."""

    most: float

    def decide(self, group):
        return [None for _ in group.clients]


@pytest.mark.parametrize("component", [Controller, Aggregator])
def test_rules_in_a_list_fit_into_the_json_of_a_job(component):
    """NVFlare writes an object of an argument, but none in a list."""
    rules = [RejectLong(30), Longest(2.0), TrimmedMean(1)]
    given = json.loads(json.dumps(component("FedAvg", aggregation=rules).aggregation))
    assert [*component("FedAvg", aggregation=given)._server_options().aggregation] == rules


def test_the_default_is_mimic():
    controller = LocalController(sites(), x0(), num_rounds=2)
    controller.run()
    np.testing.assert_array_equal(controller.server.x, straight("MimiC", 2, [[0, 1, 2]] * 2).x)
