"""FedLab: subclasses of its handler, trainer and pipeline, with its own handler and with fedcore's."""

import random
from functools import partial

import numpy as np
import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.algorithm.powerofchoice import Powerofchoice, PowerofchoicePipeline
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import SerializationTool

from fedcore.adapters.fedlab import ServerHandler

CLIENTS, ROUNDS, LR = 6, 4, 0.1


class Data:
    """Each client's own labels of a linear problem, in one minibatch."""

    def get_dataloader(self, client, batch_size=None):
        generator = torch.Generator().manual_seed(client)
        return [(torch.randn(12, 5, generator=generator), torch.full((12,), client % 3))]


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


class Pipeline(StandalonePipeline):
    def evaluate(self):
        self.handler.evaluate()


class Trainer(SGDSerialClientTrainer):
    """A trainer whose cached uploads FedLab's own one sends."""

    def evaluate(self, clients, parameters):
        return [float(client * 7 % 5) for client in clients]


# A user's overrides. Each class works over FedLab's SyncServerHandler and over fedcore's ServerHandler.


class Plain:
    def evaluate(self):
        pass


class ChangedModel(Plain):
    """The model is changed after each round, where FedLab evaluates it."""

    def evaluate(self):
        self.set_model(0.5 * self.model_parameters + 0.25)


class ChangedParameters(Plain):
    """The parameters are changed in place, as clipping or pruning changes them."""

    def evaluate(self):
        with torch.no_grad():
            self._model.bias.zero_()


class GlobalUpdate(Plain):
    """Noise and averages after the sum."""

    def global_update(self, buffer):
        before = self.model_parameters
        super().global_update(buffer)
        SerializationTool.deserialize_model(self._model, (self.model_parameters + before) / 2)


class ReadsBuffer(Plain):
    """Logs the uploads before the sum."""

    norms = ()

    def global_update(self, buffer):
        self.norms += tuple(float(upload[0].norm()) for upload in buffer)
        super().global_update(buffer)


class FilteredBuffer(Plain):
    """Passes on some of the uploads, in another order."""

    def global_update(self, buffer):
        super().global_update(buffer[:0:-1])


class ChangedBuffer(Plain):
    """Passes on changed uploads."""

    def global_update(self, buffer):
        super().global_update([[upload[0] / 2] for upload in buffer])


class BothBuffer(Plain):
    """Passes on some changed uploads in another order, so that their clients are unknown."""

    def global_update(self, buffer):
        super().global_update([[upload[0] / 2] for upload in buffer[:0:-1]])


class OwnSum(Plain):
    """A user's sum, without ``super``, as in FedLab's other algorithms."""

    def global_update(self, buffer):
        self.set_model(sum(upload[0] for upload in buffer) / len(buffer))


class Nobody(Plain):
    def sample_clients(self):
        return []


class Load(Plain):
    """Changes each upload: clipped differences."""

    def load(self, payload):
        x = self.model_parameters
        return super().load([x + (payload[0] - x).clamp(-0.01, 0.01), *payload[1:]])


class OwnLoad(Plain):
    """A user's buffer, as in FedLab's pages."""

    def load(self, payload):
        self.client_buffer_cache.append([tensor.clone() for tensor in payload])
        if len(self.client_buffer_cache) < self.num_clients_per_round:
            return False
        self.global_update(self.client_buffer_cache)
        self.round += 1
        self.client_buffer_cache = []
        return True


class Sampling(Plain):
    """A user's draw, without ``super``."""

    def sample_clients(self):
        return [(self.round + k) % self.num_clients for k in (4, 1, 0)]


class Filtered(Plain):
    """FedLab's draw in another order and without a client."""

    def sample_clients(self):
        return super().sample_clients()[::-1]


class Stops(Plain):
    @property
    def if_stop(self):
        return super().if_stop or self.round >= 2


class Downlink(Plain):
    """Sends more than the model."""

    @property
    def downlink_package(self):
        return [*super().downlink_package, torch.ones(1)]


class ChangedDownlink(Plain):
    """Sends a changed model, as compression or noise changes it."""

    @property
    def downlink_package(self):
        return [0.5 * super().downlink_package[0] + 0.25]


class Optim(Plain):
    def setup_optim(self, rounds):
        self.global_round = rounds


def handler(side, body=Plain, algorithm="FedAvg", rounds=ROUNDS, **how):
    base = ServerHandler if side != "theirs" else SyncServerHandler
    more = {} if side == "theirs" else {"algorithm": algorithm, "lr": LR, **how}
    return type(body.__name__, (body, base), {})(net(), rounds, 0.5, **more)


def run(side, body=Plain, trainer=Trainer, pipeline=Pipeline, made=None):
    """The model after a run, and the numbers that the override noted."""
    random.seed(0)
    made = made or handler(side, body)
    if body is Optim:
        made.setup_optim(2)
    clients = trainer(net(), CLIENTS)
    clients.setup_dataset(Data())
    clients.setup_optim(epochs=2, batch_size=12, lr=LR)
    pipeline(made, clients).main()
    return [made.model_parameters.numpy(), np.array([made.round, *getattr(made, "norms", [])])]


def chosen(side):
    """FedLab's own power of choice."""
    body = type(
        "Body", (Plain,), {name: Powerofchoice.__dict__[name] for name in ("sample_candidates", "sample_clients")}
    )
    made = handler(side, body)
    made.d = 4
    return run(side, made=made, pipeline=PowerofchoicePipeline)


class Reversed(Trainer):
    """A user's trainer: another local process, and a changed upload."""

    def local_process(self, payload, id_list):
        super().local_process([0.9 * payload[0]], id_list)

    @property
    def uplink_package(self):
        return [[upload[0] / 2] for upload in super().uplink_package]


class Silent(Trainer):
    @property
    def uplink_package(self):
        return []


class Wrong(Trainer):
    """Uploads as FedLab's FedNova sends them."""

    @property
    def uplink_package(self):
        return [[*upload, upload[0][:1]] for upload in super().uplink_package]


def lost(side, why, rounds, **how):
    """A run in which no upload counts."""
    run(side, made=handler(side, rounds=rounds, **how), trainer=Silent if why == "silent" else Wrong)


RUNS = {
    **{
        body.__name__: partial(run, body=body)
        for body in (ChangedModel, ChangedParameters, GlobalUpdate, ReadsBuffer, FilteredBuffer, ChangedBuffer)
    },
    **{
        body.__name__: partial(run, body=body)
        for body in (Plain, Load, OwnLoad, Sampling, Filtered, Stops, Downlink, ChangedDownlink, Optim)
    },
    "Powerofchoice": chosen,
    "trainer": partial(run, trainer=Reversed),
}
