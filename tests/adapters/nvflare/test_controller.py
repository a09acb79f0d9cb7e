import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedcore import Server, Update, errors
from fedcore.adapters.nvflare import Trainer, reply, terms
from fedcore.algorithms import MIFA, REGISTRY, SCAFFOLD, FedAvg, FlexibleFedAvg, MimiC, named
from fedcore.data import Dataset
from fedcore.engines import InProcess
from fedcore.local import minibatches
from tests.adapters import corrections
from tests.adapters.nvflare.local import LocalController

NAMES, ROUNDS = ["site-1", "site-2", "site-3"], 4
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype(np.float32), RNG.integers(0, 3, 60)
PARTS = [np.arange(0, 10), np.arange(10, 35), np.arange(35, 60)]


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def x0():
    return {name: tensor.numpy().copy() for name, tensor in net().state_dict().items()}


def sites(names=NAMES):
    """Each trains on its part, with the minibatches that fedcore's own engine takes."""

    def site(client):
        trainer = Trainer(net())
        part = PARTS[client]
        inputs, labels = torch.from_numpy(X[part]), torch.from_numpy(Y[part])

        def train(received):
            local_rule = terms(received).local_rule
            batch = len(part) if local_rule == "full gradient" else 8
            batches = minibatches(len(part), batch, steps=3, seed=0, round=received.current_round, client=client)
            return trainer.train(received, inputs, labels, batches)

        return train

    return {name: site(int(name[-1]) - 1) for name in names}


def engine():
    return InProcess(net(), Dataset("mine", X, Y, X, Y, classes=3), PARTS, batch=8, steps=3, seed=0)


def straight(algorithm, rounds, cohorts):
    """fedcore's own simulation of the same participation, of clients that come with the first round that hears them."""
    simulated = engine()
    server = Server(algorithm, net(), [], lr=0.1)
    for round in range(rounds):
        new = [client for client in cohorts[round] if client not in server.store.registry]
        updates = simulated.updates(server.broadcast(cohorts[round], newcomers=new))
        with server.open_round(newcomers=new) as opened:
            for update in updates:
                opened.add_update(update)
    return server


def cohorts_of(controller):
    return [sorted(int(name[-1]) - 1 for name in report.heard) for report in controller.reports]


WITHOUT_SIZES = [name for name in REGISTRY if not named(name).needs_shares]


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
    controller = LocalController(clients, x0(), algorithm, lr=0.1, num_rounds=6, examples=sizes)
    tell = controller._tell

    def joins(report):
        tell(report)
        if report.round == 1:
            clients["site-3"] = lambda received: work(2, received)

    controller._tell = joins
    controller.run()
    assert [len(report.heard) for report in controller.reports] == [2, 2, 3, 3, 3, 3]
    due = Server(algorithm, x0(), NAMES[:2], lr=0.1, examples=[sizes[name] for name in NAMES[:2]])
    for t in range(6):
        if t == 2:
            due.arrive("site-3", examples=sizes["site-3"])
        due.round([Update(name, y, steps, sizes[name]) for round, name, y, steps in sent if round == t])
    np.testing.assert_array_equal(controller.server.x, due.x)
    assert not np.array_equal(due.x, due.layout.flatten(x0()))


def with_corrections(algorithm, placement):
    """x of every round, with clients that keep their own corrections or leave them to the server."""
    workers = [corrections.Client(type(algorithm), placement, target) for target in corrections.TARGETS]

    def site(i):
        def answer(received):
            told = terms(received)
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
        for name in report.heard:
            workers[NAMES.index(name)].heard(controller.server.v)

    controller._tell = after
    controller.run()
    assert all(not report.refused for report in controller.reports)
    assert {len(report.heard) for report in controller.reports} == {1, 2, 3}
    return xs


@pytest.mark.parametrize("method", corrections.METHODS)
def test_corrections_that_the_clients_keep_lead_the_same_way(method):
    at_server, at_clients = (with_corrections(method(placement=place), place) for place in ("server", "client"))
    corrections.assert_same_trajectory(at_server, at_clients, with_corrections(FedAvg(), "server"))


@pytest.mark.parametrize("name", ["MimiC", "SCAFFOLD", "MIFA", "SCAFFOLDMVR", "FedAvgM"])
def test_a_second_job_goes_on_with_the_controls_of_the_first(tmp_path, name):
    whole = LocalController(sites(), x0(), name, lr=0.1, num_rounds=ROUNDS, num_clients=2)
    whole.run()
    store = f"mmap:{tmp_path / 'rows'}"
    for until in (2, ROUNDS):
        job = LocalController(sites(), x0(), name, lr=0.1, num_rounds=until, num_clients=2, store=store)
        job.run()
    assert [report.round for report in job.reports] == [2, 3]
    found = Server.load(tmp_path / "rows", medium="ram")
    np.testing.assert_array_equal(found.x, whole.server.x)
    for site in NAMES:
        np.testing.assert_array_equal(found.store.read(site), whole.server.store.read(site))


def test_a_store_of_another_model_or_rate_is_refused(tmp_path):
    store = f"mmap:{tmp_path / 'rows'}"
    LocalController(sites(), x0(), "MIFA", lr=0.1, num_rounds=1, store=store).run()
    for change in ({"lr": 0.2}, {"algorithm": "MimiC"}):
        with pytest.raises(errors.CheckpointError, match=next(iter(change))):
            LocalController(sites(), x0(), **{"algorithm": "MIFA", "lr": 0.1, "store": store, **change}).run()
    other = {"w": np.zeros(3, np.float32)}
    with pytest.raises(errors.CheckpointError, match="other tensors"):
        LocalController(sites(), other, "MIFA", lr=0.1, store=store).run()


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
    assert [len(report.heard) for report in controller.reports] == [2, 3, 3]


def lie(**change):
    """A client that changes what an honest one would send."""

    def answer(received):
        honest = {
            "params": {name: array - np.float32(0.1) for name, array in received.params.items()},
            "steps": 3,
            "examples": 10,
        }
        honest |= {key: made(honest["params"]) if callable(made) else made for key, made in change.items()}
        return reply(honest.pop("params"), **honest)

    return answer


LIES = {
    "steps-negative": (lie(steps=-3), "steps"),
    "steps-zero": (lie(steps=0), "steps"),
    "steps-huge": (lie(steps=10**18), "steps"),
    "steps-text": (lie(steps="many"), "steps"),
    "examples-negative": (lie(examples=-1), "examples"),
    "examples-zero": (lie(examples=0), "examples"),
    "examples-huge": (lie(examples=10**18), "examples"),
    "rate": (lie(lr=float("nan")), "lr"),
    "nan": (lie(params=lambda p: {k: v * np.float32("nan") for k, v in p.items()}), "y"),
    "huge": (lie(params=lambda p: {k: np.full_like(v, 3e38) for k, v in p.items()}), "y"),
    "names": (lie(params=lambda p: {f"x{k}": v for k, v in p.items()}), "model"),
    "missing": (lie(params=lambda p: dict(list(p.items())[1:])), "model"),
    "shape": (lie(params=lambda p: {k: v.reshape(-1)[:-1] for k, v in p.items()}), "0.weight"),
    "dtype": (lie(params=lambda p: {k: v.astype(np.float64) for k, v in p.items()}), "0.weight"),
    "text": (lie(params=lambda p: dict.fromkeys(p, "weights")), "0.weight"),
    "no-steps": (lambda got: FLModel(params=got.params), "steps"),
    "junk-meta": (lambda got: FLModel(params=got.params, meta={"NUM_STEPS_CURRENT_ROUND": [], "fedcore": 7}), "steps"),
}


@pytest.mark.parametrize("method", ["FedAvg", "MimiC", "SCAFFOLD"])
def test_lying_clients_are_refused_by_name_and_the_round_goes_on(method):
    clients = {name: liar for name, (liar, _) in LIES.items()} | {"honest-1": lie(), "honest-2": lie(steps=2)}
    controller = LocalController(clients, x0(), method, lr=0.1, num_rounds=1)
    controller.run()
    [report] = controller.reports
    assert set(report.heard) == {"honest-1", "honest-2"}
    reasons = dict(report.refused)
    # A float64 sum holds 3e38; such an update is far off, and finite.
    due = {name: about for name, (_, about) in LIES.items() if name in reasons or name != "huge"}
    assert {name: reason.split(":")[0] for name, reason in reasons.items()} == due
    [line] = [w for w in controller.warnings if "refused" in w]  # one a round, however many they are
    assert line.startswith(f"round 0: refused {len(reasons)} (")
    assert f"heard {len(report.heard)}: " in line
    assert np.isfinite(controller.server.x).all()


def test_a_second_vector_that_is_none_is_refused():
    clients = {
        "good": lie(control=np.zeros(38 + 5, np.float32)),
        "none": lie(),
        "short": lie(control=np.zeros(3, np.float32)),
        "nan": lie(control=np.full(43, np.nan, np.float32)),
    }
    controller = LocalController(clients, x0(), SCAFFOLD(control="sent"), lr=0.1, num_rounds=1)
    controller.run()
    [report] = controller.reports
    assert report.heard == ("good",)
    assert {name for name, _ in report.refused} == {"none", "short", "nan"}


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
        assert set(controller.server.store.registry) == set(NAMES)
        assert sum("no answer from 90 that were asked ('phantom-0'" in line for line in said) == (3 if phantoms else 0)
        controllers.append(controller)
    np.testing.assert_array_equal(*(controller.server.x for controller in controllers))


@pytest.mark.parametrize("scheme", ["A", "B", "C"])
def test_a_size_alone_makes_no_member(scheme):
    sizes = {name: len(part) for name, part in zip(NAMES, PARTS, strict=True)} | {"phantom": 10**6}
    xs = []
    for phantoms in ({}, {"phantom": lambda got: None}):
        algorithm = FlexibleFedAvg(scheme, local_steps=3)
        controller = LocalController(sites() | phantoms, x0(), algorithm, lr=0.1, num_rounds=3, examples=sizes)
        controller.run()
        assert set(controller.server.store.registry) == set(NAMES)
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
    assert controller.reports[0].heard == ("a",)
    assert list(controller.server.store.registry) == ["a"]
    late = lie()(FLModel(params=x0()))
    late.meta["client_name"] = "b"
    assert held[0](late) is False
    assert any("has an update in round 0 already" in line for line in controller.warnings)
    assert any("b: round: expected an open one" in line for line in controller.warnings)


def test_a_client_that_fails_is_not_heard():
    controller = LocalController({"a": lie(), "b": lambda got: None}, x0(), "MIFA", lr=0.1, num_rounds=2)
    controller.run()
    assert [report.heard for report in controller.reports] == [("a",), ("a",)]


def test_differences_are_taken_as_such():
    def sends_difference(received):
        return reply(
            {k: np.full_like(v, -0.5) for k, v in received.params.items()}, steps=1, params_type=ParamsType.DIFF
        )

    controller = LocalController({"a": sends_difference}, x0(), "FedAvg", lr=0.1, num_rounds=1)
    controller.run()
    due = Server("FedAvg", x0(), 1, lr=0.1)
    due.round([Update(0, due.x - np.float32(0.5), 1)])
    np.testing.assert_allclose(controller.server.x, due.x, rtol=0, atol=1e-6)


def test_an_aborted_job_leaves_the_round_as_if_it_had_never_been():
    controller = LocalController(sites(), x0(), "MimiC", lr=0.1, num_rounds=2)
    controller.get_num_standing_tasks = lambda: controller.abort_signal.trigger(True) or 0
    controller.run()
    assert controller.reports == []
    assert controller.server.round_number == 0
    np.testing.assert_array_equal(controller.server.x, controller.server.layout.flatten(x0()))


def test_terms_by_name():
    seen = {}

    def look(received):
        told = terms(received)
        seen["offset"], seen["lr"] = told.named(told.offset), told.lr
        return reply(received.params, steps=1)

    LocalController({"a": look}, x0(), "FedAvgM", lr=0.25, num_rounds=1).run()
    assert seen["lr"] == 0.25
    assert {name: v.shape for name, v in seen["offset"].items()} == {name: v.shape for name, v in x0().items()}


def test_a_model_of_somebody_else_has_no_terms():
    with pytest.raises(errors.ArrayError, match="fedcore's Controller"):
        terms(FLModel(params=x0()))


@pytest.mark.parametrize("name", WITHOUT_SIZES)
def test_a_site_that_scales_its_update_is_refused_by_name_and_the_others_result_stands(name):
    def scaled(received):
        answer = honest(received)
        x = received.params
        answer.params = {key: x[key] + np.float32(1000) * (y - x[key]) for key, y in answer.params.items()}
        return answer

    clients = sites()
    honest, clients["site-1"] = clients["site-1"], scaled
    controller = LocalController(clients, x0(), name, lr=0.1, num_rounds=3, limits={"max_norm_ratio": 30})
    controller.run()
    assert [[site for site, _ in report.refused] for report in controller.reports] == [["site-1"]] * 3
    assert "the median of those heard (max_norm_ratio)" in controller.reports[0].refused[0][1]
    np.testing.assert_array_equal(controller.server.x, straight(name, 3, [[1, 2]] * 3).x)
    refused = "refused 1 ('site-1') and heard 2: 1 x y: expected a length"
    assert [f"round {t}: {refused}" in line for t, line in enumerate(controller.warnings)] == [True] * 3


def test_a_limit_that_nobody_knows_is_refused_by_name():
    with pytest.raises(errors.UnknownNameError, match="limits: 'max_nrom' is unknown; did you mean 'max_norm'"):
        LocalController(sites(), x0(), "MIFA", limits={"max_nrom": 3})


def test_a_round_that_heard_nobody_shouts():
    controller = LocalController({"a": lie(steps=-3), "b": lie(steps=0)}, x0(), "MimiC", lr=0.1, num_rounds=1)
    controller.run()
    [line] = controller.warnings
    assert line.startswith("round 0: refused 2 ('a', 'b') and HEARD NOBODY: 2 x steps: expected")


def test_a_site_says_no_more_steps_than_it_was_asked_for():
    controller = LocalController({"a": lie(steps=3), "b": lie(steps=4)}, x0(), "MIFA", limits={"max_steps": 3})
    controller.num_rounds = 1
    controller.run()
    assert controller.reports[0].refused == (("b", "steps: expected an integer in 1..3, got 4"),)
