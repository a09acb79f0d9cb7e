"""NVFlare: ``Controller`` over functions, and ``Aggregator`` as its own workflows call it."""

import logging
from copy import copy
from types import SimpleNamespace

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from fedcore.adapters.nvflare import Aggregator, Controller, order, reply
from tests.adapters.drivers import LR, MODEL, Driver, Raw, arranged, plain_task, sizes_by_id
from tests.adapters.malformed import ODD

common_decomposers.register()
LOGGER = logging.getLogger("nvflare.local")


def wired(model):
    """The model after its way over the wire."""
    return FLModelUtils.from_shareable(fobs.loads(fobs.dumps(FLModelUtils.to_shareable(model))))


class LocalController(Controller):
    """A Controller whose clients are functions from FLModel to FLModel, ``Raw`` or None, by name.

    Messages pass through NVFlare's own bytes and tasks.
    """

    def __init__(self, clients, x0, *args, answer_order=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.clients, self.x0, self.saved, self.warnings = clients, x0, [], []
        self.answer_order, self.asked, self.arrived = answer_order, [], []
        self.engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=name) for name in self.clients])
        self.abort_signal, self._task_check_period, self.fl_ctx = Signal(), 0.001, FLContext()

    def load_model(self):
        return FLModel(params={name: array.copy() for name, array in self.x0.items()})

    def save_model(self, model):
        self.saved.append(copy(model))

    def send_model(self, task_name, data, targets, callback):
        task = self._prepare_task(data, task_name, 0, callback)
        self.asked += [(name, data, task) for name in targets]

    def get_num_standing_tasks(self):
        asked, self.asked = self.asked, []
        for name, data, task in arranged(asked, self.answer_order):
            answer = self.clients[name](wired(data))
            if answer is None:
                continue
            self.arrived.append(name)
            client_task = ClientTask(Client(name, "token"), task)
            is_model = isinstance(answer, FLModel)
            client_task.result = FLModelUtils.to_shareable(wired(answer)) if is_model else answer.form
            self._process_result(client_task, FLContext())
        return 0

    def cancel_all_tasks(self):
        self.asked = []

    def fire_event(self, event_type, fl_ctx):
        pass

    def info(self, message, *args, **options):
        LOGGER.info(message)

    def warning(self, message, *args, **options):
        self.warnings.append(message)
        LOGGER.warning(message)

    error = warning


class Workflow(Driver):
    odd = ODD

    def run(self, algorithm, work, *, n=3, rounds=3, x0=MODEL, order=None, lr=LR, steps=None, **options):
        if steps is not None:
            options["limits"] = {"max_steps": steps}
        names = self.ids(n)
        clients = {name: self._client(i, work) for i, name in enumerate(names)}
        how = sizes_by_id(options, names)
        controller = LocalController(clients, x0, algorithm, lr=lr, num_rounds=rounds, answer_order=order, **how)
        self.controller = controller
        controller.run()
        return controller.server, controller.reports, controller.saved[-1].params if controller.saved else None

    def _client(self, i, work):
        def client(received):
            answer = work(received.current_round, i, received.params, order(received))
            return None if answer is None else Raw(self.message(answer, received.params))

        return client

    def form(self, update, sent):
        more = {"lr": update.lr, "control": update.control, "loss": update.loss}
        params = {name: np.array(y) for name, y in update.value.items()}
        model = wired(reply(params, steps=update.steps, examples=update.examples, **more))
        return dict(FLModelUtils.to_shareable(model))

    def built(self, form):
        if type(form) is not dict:
            return form
        made = Shareable()
        made.clear()
        made.update(form)
        return made


def context_of(name):
    context, peer = FLContext(), FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
    context.set_peer_context(peer)
    return context


class OwnWorkflow(Workflow):
    def run(self, algorithm, work, *, n=3, rounds=3, x0=MODEL, order=None, lr=LR, steps=None, **options):
        if steps is not None:
            options["limits"] = {"max_steps": steps}
        names, model = self.ids(n), {name: x.copy() for name, x in x0.items()}
        aggregator = Aggregator(algorithm, lr=lr, model=model, **options)
        aggregator._names = lambda: names
        aggregator.reset_stats()
        result = SimpleNamespace(params=aggregator.server.tensors())
        while aggregator.server.round_number < rounds:
            t = aggregator.server.round_number
            aggregator.reset_stats()
            sent = aggregator.server.tensors()
            for i in arranged(range(n), order):
                if (answer := work(t, i, sent, plain_task(t, lr))) is not None:
                    aggregator.accept(self.message(answer, sent), context_of(names[i]))
            result = aggregator.aggregate_model()
        return aggregator.server, aggregator.reports, result.params
