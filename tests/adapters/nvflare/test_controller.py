import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedcore import Server, Storage, Update, errors
from fedcore.adapters.nvflare import Trainer, order, reply
from fedcore.algorithms import MIFA, SCAFFOLD, FedAvg, FlexibleFedAvg, MimiC
from fedcore.simulation.local_rules import minibatches
from tests.adapters import corrections
from tests.adapters.nvflare.local import LocalController
from tests.adapters.nvflare.sites import (
    NAMES,
    PARTS,
    ROUNDS,
    WITHOUT_SIZES,
    X,
    Y,
    lie,
    net,
    sites,
    straight,
    x0,
)


def cohorts_of(controller):
    return [sorted(int(name[-1]) - 1 for name in report.accepted) for report in controller.reports]


@pytest.mark.parametrize("name", WITHOUT_SIZES)
def test_every_method_equals_fedcore_s_own_simulation(name):
    controller = LocalController(sites(), x0(), name, lr=0.1, num_rounds=ROUNDS, num_clients=2)
    controller.run()
    cohorts = cohorts_of(controller)
    assert [len(cohort) for cohort in cohorts] == [2] * ROUNDS
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    due = straight(name, ROUNDS, cohorts)
    np.testing.assert_array_equal(controller.server.x, due.x)
    for client, site in enumerate(NAMES):
        np.testing.assert_array_equal(controller.server.store.read(site), due.store.read(client))
    saved = controller.saved[-1].params
    np.testing.assert_array_equal(due.layout.flatten(saved), due.x)


@pytest.mark.parametrize("algorithm", [SCAFFOLD(control="sent"), MimiC(units="update")])
def test_options(algorithm):
    controller = LocalController(sites(), x0(), algorithm, lr=0.1, num_rounds=2)
    controller.run()
    np.testing.assert_array_equal(controller.server.x, straight(algorithm, 2, [[0, 1, 2]] * 2).x)


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
    clients["stranger"] = lambda received: pytest.fail("asked one whose examples nobody knows")
    algorithm = FlexibleFedAvg(scheme, local_steps=3)
    controller = LocalController(clients, x0(), algorithm, lr=0.1, num_rounds=6, client_sizes=sizes)
    tell = controller._tell

    def joins(report):
        tell(report)
        if report.round == 1:
            clients["site-3"] = lambda received: work(2, received)

    controller._tell = joins
    controller.run()
    assert [len(report.accepted) for report in controller.reports] == [2, 2, 3, 3, 3, 3]
    due = Server(x0(), algorithm, {name: sizes[name] for name in NAMES[:2]}, lr=0.1)
    for t in range(6):
        if t == 2:
            due.add_clients({"site-3": sizes["site-3"]})
        due.round([Update(name, y, steps, sizes[name]) for round, name, y, steps in sent if round == t])
    np.testing.assert_array_equal(controller.server.x, due.x)
    assert not np.array_equal(due.x, due.layout.flatten(x0()))


def with_corrections(algorithm, placement):
    """x of every round, with clients that keep their own corrections or leave them to the server."""
    workers = [corrections.Client(type(algorithm), placement, target) for target in corrections.TARGETS]

    def site(i):
        def answer(received):
            told = order(received)
            if i in corrections.AWAY.get(received.current_round, []):
                return None
            y, control = workers[i].work(received.params["w"], told.offset)
            return reply({"w": y}, steps=corrections.STEPS, control=control if told.second else None)

        return answer

    start, xs = {"w": np.zeros(3, np.float32)}, []
    clients = {name: site(i) for i, name in enumerate(NAMES)}
    controller = LocalController(clients, start, algorithm, lr=corrections.LR, num_rounds=corrections.ROUNDS)
    tell = controller._tell

    def after(report):
        tell(report)
        xs.append(controller.server.x.copy())
        for name in report.accepted:
            workers[NAMES.index(name)].accepted(controller.server.v)

    controller._tell = after
    controller.run()
    assert all(not report.rejected for report in controller.reports)
    assert {len(report.accepted) for report in controller.reports} == {1, 2, 3}
    return xs


@pytest.mark.parametrize("method", corrections.METHODS)
def test_corrections_that_the_clients_keep_lead_the_same_way(method):
    at_server, at_clients = (with_corrections(method(placement=place), place) for place in ("server", "client"))
    corrections.assert_same_trajectory(at_server, at_clients, with_corrections(FedAvg(), "server"))


@pytest.mark.parametrize("name", ["MimiC", "SCAFFOLD", "MIFA", "SCAFFOLDMVR", "FedAvgM"])
def test_a_second_job_goes_on_with_the_controls_of_the_first(tmp_path, name):
    whole = LocalController(sites(), x0(), name, lr=0.1, num_rounds=ROUNDS, num_clients=2)
    whole.run()
    storage = str(tmp_path / "rows")
    for until in (2, ROUNDS):
        job = LocalController(sites(), x0(), name, lr=0.1, num_rounds=until, num_clients=2, storage=storage)
        job.run()
    assert [report.round for report in job.reports] == [2, 3]
    found = Server.load(tmp_path / "rows", storage=Storage(medium="ram"))
    np.testing.assert_array_equal(found.x, whole.server.x)
    for site in NAMES:
        np.testing.assert_array_equal(found.store.read(site), whole.server.store.read(site))


def test_a_store_of_another_model_is_refused_and_another_rate_counts(tmp_path):
    storage = str(tmp_path / "rows")
    LocalController(sites(), x0(), "MIFA", lr=0.1, num_rounds=1, storage=storage).run()
    with pytest.raises(errors.CheckpointError, match="algorithm"):
        LocalController(sites(), x0(), "MimiC", lr=0.2, storage=storage).run()
    other = {"w": np.zeros(3, np.float32)}
    with pytest.raises(errors.CheckpointError, match="other tensors"):
        LocalController(sites(), other, "MIFA", lr=0.2, storage=storage).run()
    job = LocalController(sites(), x0(), "MIFA", lr=0.2, num_rounds=2, storage=storage, limits={"max_steps": 50})
    job.run()
    assert [report.changed for report in job.reports] == [{"lr": 0.2, "limits": {"max_steps": 50}}]  # of this job alone


def test_a_client_that_joins_later_arrives():
    clients = sites(NAMES[:2])
    controller = LocalController(clients, x0(), "SCAFFOLD", lr=0.1, num_rounds=3)
    third = sites()["site-3"]

    def joins(report):
        if report.round == 0:
            clients["site-3"] = third

    tell = controller._tell
    controller._tell = lambda report: (tell(report), joins(report))
    controller.run()
    assert [len(report.accepted) for report in controller.reports] == [2, 3, 3]


@pytest.mark.parametrize("name", WITHOUT_SIZES)
def test_sites_that_are_connected_and_never_answer_change_nothing(name):
    silent = {f"phantom-{i}": lambda got: None for i in range(90)}
    algorithm = MIFA(wait=True) if name == "MIFA" else name
    controllers = []
    for phantoms in ({}, silent):
        controller = LocalController(sites() | phantoms, x0(), algorithm, lr=0.1, num_rounds=3)
        said = []
        controller.info = said.append
        controller.run()
        assert set(controller.server.clients) == set(NAMES)
        assert sum("no answer from 90 that were asked ('phantom-0'" in line for line in said) == (3 if phantoms else 0)
        controllers.append(controller)
    np.testing.assert_array_equal(*(controller.server.x for controller in controllers))


@pytest.mark.parametrize("scheme", ["A", "B", "C"])
def test_a_size_alone_makes_no_member(scheme):
    sizes = {name: len(part) for name, part in zip(NAMES, PARTS, strict=True)} | {"phantom": 10**6}
    xs = []
    for phantoms in ({}, {"phantom": lambda got: None}):
        algorithm = FlexibleFedAvg(scheme, local_steps=3)
        controller = LocalController(sites() | phantoms, x0(), algorithm, lr=0.1, num_rounds=3, client_sizes=sizes)
        controller.run()
        assert set(controller.server.clients) == set(NAMES)
        xs.append(controller.server.x)
    np.testing.assert_allclose(*xs, rtol=1e-5, atol=1e-6)


def test_a_site_answers_for_itself_once_and_while_it_is_asked():
    """Whatever its message says; NVFlare knows whom it gave the task to, and sets the name."""
    held = []

    class Twice(LocalController):
        def send_model(self, task_name, data, targets, timeout, callback):
            held.append(callback)
            super().send_model(task_name, data, targets, timeout, callback)
            answer = self.clients["a"](data)
            answer.meta["client_name"] = "a"
            assert callback(answer) is False

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
    assert held[0](late) is False
    assert [client for client, _ in controller.reports[0].rejected] == ["a"]
    assert any("b: round: expected an open one" in line for line in controller.warnings)


def test_a_client_that_fails_is_not_heard():
    controller = LocalController({"a": lie(), "b": lambda got: None}, x0(), "MIFA", lr=0.1, num_rounds=2)
    controller.run()
    assert [report.accepted for report in controller.reports] == [("a",), ("a",)]


def test_differences_are_taken_as_such():
    def sends_difference(received):
        return reply(
            {k: np.full_like(v, -0.5) for k, v in received.params.items()}, steps=1, params_type=ParamsType.DIFF
        )

    controller = LocalController({"a": sends_difference}, x0(), "FedAvg", lr=0.1, num_rounds=1)
    controller.run()
    due = Server(x0(), "FedAvg", 1, lr=0.1)
    due.round([Update(0, due.x - np.float32(0.5), 1)])
    np.testing.assert_allclose(controller.server.x, due.x, rtol=0, atol=1e-6)


def test_an_aborted_job_leaves_the_round_as_if_it_had_never_been():
    controller = LocalController(sites(), x0(), "MimiC", lr=0.1, num_rounds=2)
    controller.get_num_standing_tasks = lambda: controller.abort_signal.trigger(True) or 0
    controller.run()
    assert controller.reports == []
    assert controller.server.round_number == 0
    np.testing.assert_array_equal(controller.server.x, controller.server.layout.flatten(x0()))


def test_a_job_that_says_nothing_else_runs_mimic_and_waits_for_every_site():
    controller = LocalController(sites(), x0(), num_rounds=2)
    controller.run()
    np.testing.assert_array_equal(controller.server.x, straight("MimiC", 2, [[0, 1, 2]] * 2).x)
    assert controller.timeout == 0


def test_terms_by_name():
    seen = {}

    def look(received):
        told = order(received)
        seen["offset"], seen["lr"] = told.named(told.offset), told.lr
        assert told.x_prev is None
        assert told.named(told.x_prev) == {}
        return reply(received.params, steps=1)

    first = {**x0(), "norm.running_mean": np.ones(2, np.float32)}  # a buffer, which has no offset
    controller = LocalController({"a": look}, first, "FedAvgM", lr=0.25, num_rounds=1)
    controller.run()
    assert controller.reports[0].accepted == ("a",)
    assert seen["lr"] == 0.25
    assert {name: v.shape for name, v in seen["offset"].items()} == {name: v.shape for name, v in x0().items()}


def test_a_model_of_somebody_else_has_no_terms():
    with pytest.raises(errors.ArrayError, match=r"^model\b.*'fedcore'"):
        order(FLModel(params=x0()))


def test_who_listens_hears_each_round():
    seen = []
    controller = LocalController(sites(), x0(), "MIFA", lr=0.1, num_rounds=2, callbacks=[seen.append])
    controller.run()
    assert seen == controller.reports
    assert len(seen) == 2
