"""NVFlare: overrides of its workflow FedAvg, filters and other components, with its own aggregation and with fedcore's.

The workflows, contexts, events, messages and filters are NVFlare's; only the transport is a call for each task.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.dxo import DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.signal import Signal
from nvflare.apis.wf_comm_spec import WFCommSpec
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import InTimeAccumulateWeightedAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.app_common.shareablegenerators.full_model_shareable_generator import FullModelShareableGenerator
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.widgets.intime_model_selector import IntimeModelSelector
from nvflare.app_common.widgets.metrics_artifact_writer import MetricsArtifactWriter
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather
from nvflare.fuel.utils import fobs
from nvflare.private.event import fire_event

from fedcore.adapters.nvflare import Aggregator, Controller

common_decomposers.register()
NAMES, ROUNDS = ["site-1", "site-2", "site-3"], 4


def x0():
    return {"w": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}


class Memory(ModelPersistor):
    """A persistor of a user's own, which keeps the models in memory."""

    def __init__(self):
        super().__init__()
        self.saved = []

    def load_model(self, fl_ctx):
        return make_model_learnable(x0(), {})

    def save_model(self, model, fl_ctx):
        self.saved.append({name: np.array(x) for name, x in model[ModelLearnableKey.WEIGHTS].items()})


class Calls(WFCommSpec):
    """A communicator whose sites are functions from FLModel to FLModel; None is no answer."""

    def __init__(self, sites, results=(), tasks=()):
        super().__init__()
        self.sites, self.results, self.tasks, self.asked = sites, results, tasks, []

    def broadcast(self, task, fl_ctx, targets=None, min_responses=0, wait_time_after_min_received=0):
        self.asked.append((task, fl_ctx, targets or [*self.sites]))

    def broadcast_and_wait(self, task, fl_ctx, targets=None, min_responses=0, *args, **more):
        self.broadcast(task, fl_ctx, targets)
        self.get_num_standing_tasks()

    def get_num_standing_tasks(self):
        asked, self.asked = self.asked, []
        for task, fl_ctx, targets in asked:
            for name in targets:
                context, peer = fl_ctx.get_engine().new_context(), FLContext()
                peer.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
                context.set_peer_context(peer)
                self._ask(ClientTask(Client(name, "token"), task), context, peer)
        return 0

    def _ask(self, client_task, context, peer):
        client_task.task.before_task_sent_cb(client_task, context)
        data = wired(client_task.task.data)
        for each in self.tasks:
            data = each.process(data, context)
        received = FLModelUtils.from_shareable(data)
        if (answer := self.sites[client_task.client.name](received)) is None:
            return
        result = FLModelUtils.to_shareable(answer) if isinstance(answer, FLModel) else answer
        result.set_cookie_jar(client_task.task.data.get_cookie_jar())
        result.set_peer_props({ReservedKey.IDENTITY_NAME: client_task.client.name})
        for each in self.results:
            result = each.process(result, context)
        client_task.result = wired(result)
        peer.set_prop(FLContextKey.SHAREABLE, client_task.result, private=False, sticky=False)
        client_task.task.result_received_cb(client_task, context)

    def cancel_all_tasks(self, *args, **more):
        self.asked = []


class Late(Calls):
    """Before its result of a round, each site's result of the round before arrives once more.

    NVFlare passes it to the workflow as that of a task that has ended.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.last = {}

    def _ask(self, client_task, context, peer):
        client = client_task.client
        if (last := self.last.get(client.name)) is not None:
            self.controller.process_result_of_unknown_task(client, client_task.task.name, "ended", last, context)
        super()._ask(client_task, context, peer)
        self.last[client.name] = wired(peer.get_prop(FLContextKey.SHAREABLE))


def wired(shareable):
    """A message after its way over the wire."""
    return fobs.loads(fobs.dumps(shareable))


class Federation:
    """A run of a workflow; ``control_flow`` as NVFlare's server calls it. A panic is an AssertionError."""

    def __init__(self, workflow, sites=None, *, results=(), tasks=(), calls=Calls, **components):
        self.persistor, self.panics = Memory(), []
        self.components = {"persistor": self.persistor, **components}
        self.workflow = workflow
        handlers = [workflow, self.persistor, *components.values(), getattr(workflow, "aggregator", None)]
        self.handlers = [one for one in handlers if hasattr(one, "handle_event")]
        self.sites = sites or {name: site(i) for i, name in enumerate(NAMES)}
        manager = FLContextManager(self, "server", "job")
        self.new_context = manager.new_context
        workflow.set_communicator(calls(self.sites, results, tasks))

    def get_clients(self):
        return [SimpleNamespace(name=name) for name in self.sites]

    def get_component(self, name):
        return self.components.get(name)

    def fire_event(self, event, fl_ctx):
        if event == EventType.FATAL_SYSTEM_ERROR:
            self.panics.append(fl_ctx.get_prop("__event_data__"))
        fire_event(event, self.handlers, fl_ctx)

    def run(self):
        self.fire_event(EventType.START_RUN, self.new_context())
        self.workflow.initialize(self.new_context())
        self.workflow.control_flow(Signal(), self.new_context())
        assert not self.panics, self.panics
        return self.persistor.saved[-1]


def site(i, kind=ParamsType.FULL):
    """A site whose update depends on what it received, with weights and metrics of its own."""

    def train(received):
        rng = np.random.default_rng([received.current_round, i])
        y = {name: 0.9 * x + rng.normal(size=x.shape).astype(np.float32) for name, x in received.params.items()}
        if kind == ParamsType.DIFF:
            y = {name: tensor - received.params[name] for name, tensor in y.items()}
        y = {name: received.meta.get("weight", 1.0) * tensor for name, tensor in y.items()}
        meta = {FLMetaKey.NUM_STEPS_CURRENT_ROUND: i + 1, "site": i}
        accuracy = 0.5 + 0.1 * received.current_round + 0.01 * i
        y = {name: tensor.astype(np.float32) for name, tensor in y.items()}
        return FLModel(kind, y, metrics={"accuracy": accuracy}, meta=meta)

    return train


# A user's overrides. Each class works over NVFlare's FedAvg, alone or with fedcore's Aggregator, and over Controller.


class ChangedModel:
    """The model is changed after each round, as noise, pruning or an average over rounds change it."""

    def update_model(self, model, aggr_result):
        model = super().update_model(model, aggr_result)
        model.params = {name: (0.5 * x + 0.25).astype(np.float32) for name, x in model.params.items()}
        return model


class ChangedInPlace:
    def update_model(self, model, aggr_result):
        model = super().update_model(model, aggr_result)
        model.params["b"][...] = 0  # a frozen layer
        return model


class ChangedUpdate:
    """The update is changed before ``super``."""

    def update_model(self, model, aggr_result):
        aggr_result.params = {name: x / 2 for name, x in aggr_result.params.items()}
        return super().update_model(model, aggr_result)


class Checkpoint:
    """Saves a copy of its own, and reads the metrics and the meta."""

    def save_model(self, model):
        noted = [model.metrics["accuracy"], model.meta["nr_aggregated"], model.current_round, model.total_rounds]
        self.facts = [*getattr(self, "facts", []), *noted]
        super().save_model(model)


class Sampling:
    def sample_clients(self, num_clients=None):
        names = [client.name for client in self.engine.get_clients()]
        return [name for k, name in enumerate(names) if k != self.current_round % 3]


class Drawn:
    def sample_clients(self, num_clients=None):
        return super().sample_clients(num_clients)[::-1][:2]


class Config:
    """The meta of the model carries a setting to the sites."""

    def send_model(self, task_name="train", data=None, **more):
        data.meta["weight"] = 2.0**self.current_round
        super().send_model(task_name, data, **more)


class Rounded(DXOFilter):
    """A user's filter, which rounds the numbers."""

    def __init__(self):
        super().__init__([DataKind.WEIGHTS], [DataKind.WEIGHTS])

    def process_dxo(self, dxo, shareable, fl_ctx):
        dxo.data = {name: np.round(x, 1) for name, x in dxo.data.items()}
        return dxo


class OwnRun:
    """A user's run, as in NVFlare's ``BaseFedAvg``, whose function of the results may be fedcore's."""

    def run(self):
        model = self.load_model()
        for round in range(self.num_rounds):
            model.current_round = self.current_round = round
            results = self.send_model_and_wait(targets=self.sample_clients(), data=model)
            aggregated = self.aggregate(results, aggregate_fn=self.aggregated if self.aggregator else None)
            model = self.update_model(model, aggregated)
            self.save_model(model)

    def aggregated(self, results):
        for result in results:
            self.aggregator.accept_model(result)
        return self.aggregator.aggregate_model()


class Filtered(Aggregator):
    """A user's aggregator on top of fedcore's: a site does not count, and the mean is halved."""

    def accept_model(self, model):
        return model.meta["site"] != 1 and super().accept_model(model)

    def aggregate_model(self):
        model = super().aggregate_model()
        model.params = {name: x / 2 for name, x in model.params.items()}
        return model


class Halves:
    """The same in NVFlare's own workflow."""

    def _aggregate_one_result(self, result):
        return result.meta["site"] != 1 and super()._aggregate_one_result(result)

    def _get_aggregated_result(self):
        model = super()._get_aggregated_result()
        model.params = {name: x / 2 for name, x in model.params.items()}
        return model


class Doubles(FLComponent):
    """A component that changes the result of a round."""

    def handle_event(self, event_type, fl_ctx):
        if event_type == AppEventType.AFTER_AGGREGATION:
            model = fl_ctx.get_prop(AppConstants.AGGREGATION_RESULT)
            model.params = {name: 2 * x for name, x in model.params.items()}


class Averages(FullModelShareableGenerator):
    """The generator of ScatterAndGather averages the model over rounds."""

    def shareable_to_learnable(self, shareable, fl_ctx):
        before = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]
        before = {name: np.array(x) for name, x in before.items()}
        model = super().shareable_to_learnable(shareable, fl_ctx)
        weights = model[ModelLearnableKey.WEIGHTS]
        weights.update({name: ((x + before[name]) / 2).astype(np.float32) for name, x in weights.items()})
        return model


def workflow(side, body=object, aggregator=Aggregator, **how):
    base = Controller if side == "controller" else FedAvg
    kind = base if body is object else type(body.__name__, (body, base), {})
    if side == "controller":
        return kind("FedAvg", **{"num_rounds": ROUNDS} | how)
    how = {"num_clients": 3, "num_rounds": ROUNDS} | how
    return kind(aggregator=aggregator("FedAvg") if side != "theirs" else None, **how)


def run(side, body=object, sites=None, results=(), tasks=(), components=None, **how):
    """The saved models of a run in one vector, and the numbers that the override noted."""
    np.random.seed(0)  # of NVFlare's filters
    made = workflow(side, body, **how)
    federation = Federation(made, sites, results=results, tasks=tasks, **(components or {}))
    federation.run()
    return flat(federation.persistor.saved), np.array(getattr(made, "facts", []))


def flat(models):
    return np.concatenate([np.ravel(model[name]) for model in models for name in model])


def gathered(side, generator=FullModelShareableGenerator, **how):
    """ScatterAndGather with a generator of models."""
    aggregator = (
        Aggregator("FedAvg") if side != "theirs" else InTimeAccumulateWeightedAggregator(expected_data_kind="WEIGHTS")
    )
    names = {"persistor_id": "persistor", "aggregator_id": "sum", "shareable_generator_id": "generator"}
    made = ScatterAndGather(3, ROUNDS, wait_time_after_min_received=0, snapshot_every_n_rounds=0, **names)
    federation = Federation(made, sum=aggregator, generator=generator(), **how)
    federation.run()
    return [flat(federation.persistor.saved)]


def differences(side, body=object, **how):
    sites = {name: site(i, ParamsType.DIFF) for i, name in enumerate(NAMES)}
    return run(side, body, sites, **how)


def selected(side):
    """The model that NVFlare's selector finds best is saved beside the last one."""
    best = []

    class Best(FLComponent):
        def handle_event(self, event_type, fl_ctx):
            if event_type == AppEventType.GLOBAL_BEST_MODEL_AVAILABLE:
                best.append(fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS])

    run(side, components={"selector": IntimeModelSelector(key_metric="accuracy"), "best": Best()})
    return [flat(best), np.array([len(best)])]


def written(side):
    """The metrics and the weight of each site in NVFlare's file of the rounds."""
    found = []

    class Records(MetricsArtifactWriter):
        def _append_round_record(self, fl_ctx, record):
            for one in sorted(record["sites"], key=lambda site: site["name"]):
                found.append([record["round"], one["metrics"][0]["value"], one["weight"]])

    run(side, components={"writer": Records()})
    return [np.array(found)]


def halved(side):
    return run(side, Halves if side == "theirs" else object, aggregator=Filtered)


def lost(side, why, rounds, **how):
    """A job without an accepted result."""
    own = how if side == "controller" else {"aggregator": partial(Aggregator, **how)}
    sites = dict.fromkeys(NAMES, lambda received: None) if why == "silent" else None
    Federation(workflow(side, num_rounds=rounds, **own), sites, results=[ExcludeVars(["b"])]).run()


RUNS = {
    "nothing": run,
    **{body.__name__: partial(run, body=body) for body in (Checkpoint, Sampling, Drawn, Config, OwnRun, ChangedUpdate)},
    **{body.__name__: partial(differences, body=body) for body in (ChangedModel, ChangedInPlace)},
    "stop_cond": partial(run, stop_cond="accuracy >= 0.7"),
    "patience": partial(run, stop_cond="accuracy <= 0.1", patience=2),
    "model": lambda side: run(side, model=x0()),
    "AFTER_AGGREGATION": lambda side: run(side, components={"doubles": Doubles()}),
    "IntimeModelSelector": selected,
    "subclass of the aggregator": halved,
    "ScatterAndGather": gathered,
    "late results": partial(gathered, calls=Late),
    "MetricsArtifactWriter": written,
    "shareable generator": partial(gathered, generator=Averages),
    "PercentilePrivacy": partial(differences, results=[PercentilePrivacy(50, 0.3)]),
    "SVTPrivacy": partial(differences, results=[SVTPrivacy(fraction=0.5)]),
    "filter of tasks": partial(run, tasks=[Rounded()]),
}
