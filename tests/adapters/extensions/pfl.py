"""pfl: callbacks, postprocessors, optimizers and algorithms in its real backend, with and without fedcore's Method."""

import tempfile
from contextlib import suppress

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.restore_training import RestoreTrainingCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.hyperparam.base import HyperParam
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.stats import MappedVectorStatistics

from fedcore.adapters.pfl import Method

set_framework_module(pytorch_ops)
USERS, ITERATIONS, LR, EPOCHS = [f"u{i}" for i in range(6)], 4, 0.05, 2


class Net(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(3, 2)

    def loss(self, x, y, eval=False):
        return ((self(x) - y) ** 2).mean()

    def metrics(self, x, y, eval=False):
        return {"loss": self.loss(x, y).item()}


def user(name):
    rng = np.random.default_rng(int(name[1:]))
    size = 4 + 2 * int(name[1:])
    inputs = rng.normal(size=(size, 3)).astype(np.float32)
    return Dataset([inputs, (inputs[:, :2] + rng.normal(size=2)).astype(np.float32)], user_id=name)


def method(side, algorithm="FedAvg", **how):
    return None if side == "theirs" else Method(algorithm, USERS, lr=LR, steps=EPOCHS, **how)


def run(
    side,
    *,
    before=(),
    after=(),
    callbacks=(),
    algorithm=None,
    params=NNAlgorithmParams,
    optimizer=None,
    own=None,
    users=None,
    postprocessors=None,
    aggregator=None,
    lr=LR,
    cohort=3,
    validation=None,
    folder=None,
    **more,
):
    """The model after a run; ``before`` and ``after`` are the postprocessors on both sides of fedcore's."""
    np.random.seed(0)
    own = own or method(side)
    net = Net()
    central = (optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1.0)))(net.parameters())
    model = PyTorchModel(net, torch.optim.SGD, central)
    users = users or FederatedDataset(user, get_user_sampler("minimize_reuse", USERS))
    processors = [*before, *([own] if own is not None else []), *after] if postprocessors is None else postprocessors
    backend = SimulatedBackend(users, users, postprocessors=processors, aggregator=aggregator or own)
    how = {"central_num_iterations": ITERATIONS, "evaluation_frequency": 1, "train_cohort_size": cohort} | more
    train = NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=lr, local_batch_size=None)
    algorithm = algorithm or FederatedAveraging()
    callbacks = [*callbacks] if folder is None else [RestoreTrainingCallback([model, algorithm], folder), *callbacks]
    algorithm.run(
        params(**how, val_cohort_size=validation),
        backend,
        model,
        train,
        train,
        callbacks,
        send_metrics_to_platform=False,
    )
    return [torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()]


class Averages(TrainingProcessCallback):
    """A callback that changes the central model: the average over rounds."""

    mean = None

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        now = model.get_parameters().apply_elementwise(torch.clone)
        if self.mean is not None:
            now = MappedVectorStatistics({name: (now[name] + self.mean[name]) / 2 for name in now})
            model.set_parameters(now)
        self.mean = now
        return False, Metrics()


class Stops(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        return central_iteration == 1, Metrics()


class Decays(HyperParam, TrainingProcessCallback):
    """A schedule as pfl's own pages write it."""

    def __init__(self, first):
        self.now = first

    def value(self):
        return self.now

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.now = type(self.now)(self.now / 2)
        return False, Metrics()


class Clips(Postprocessor):
    """A user's postprocessor, in place."""

    def postprocess_one_user(self, *, stats, user_context):
        for name in stats:
            stats[name].clamp_(-0.05, 0.05)
        return stats, Metrics()


class Crashes(Postprocessor):
    users = 0

    def postprocess_one_user(self, *, stats, user_context):
        self.users += 1
        if self.users > 2 * len(USERS):
            raise InterruptedError
        return stats, Metrics()


class Halves(Postprocessor):
    """A postprocessor of the sum."""

    def postprocess_server(self, *, stats, central_context, aggregate_metrics):
        return stats.apply_elementwise(lambda x: x / 2), Metrics()


class Own(FederatedAveraging):
    """A user's algorithm: half of each model difference, and a step that is cut."""

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        stats, metrics = super().train_one_user(initial_model_state, model, user_dataset, central_context)
        return stats.apply_elementwise(lambda x: x / 2), metrics

    def process_aggregated_statistics(self, central_context, aggregate_metrics, model, statistics):
        statistics = statistics.apply_elementwise(lambda x: x.clamp(-0.1, 0.1))
        return super().process_aggregated_statistics(central_context, aggregate_metrics, model, statistics)


def central():
    return CentrallyAppliedPrivacyMechanism(GaussianMechanism(0.1, 0.5))


def decayed(side):
    schedule = Decays(LR)
    return run(side, lr=schedule, callbacks=[schedule])


def cohorts(side):
    schedule = Decays(48)
    return run(side, cohort=Capped(schedule), callbacks=[schedule])


class Capped(HyperParam):
    def __init__(self, schedule):
        self.schedule = schedule

    def value(self):
        return min(self.schedule.value(), len(USERS))


def restored(side, make=method):
    """A run that fails in its third iteration, and its successor, which pfl's callback restores."""
    with tempfile.TemporaryDirectory() as folder:
        for crashes in ([Crashes()], []):
            with suppress(InterruptedError):
                result = run(side, own=(own := make(side)), cohort=len(USERS), folder=folder, before=crashes)
            if own is not None:
                own.server.close()
    return result


def lost(side, why, rounds, **how):
    """A run that accepts no update."""
    run(side, own=method(side, limits={"max_norm": 1e-9}, **how), central_num_iterations=rounds)


RUNS = {
    "nothing": run,
    "evaluation": lambda side: run(side, validation=3),
    "callback that changes the model": lambda side: run(side, callbacks=[Averages()]),
    "early stopping": lambda side: run(side, callbacks=[Stops()]),
    "restored run": restored,
    "schedule of the rate": decayed,
    "schedule of the cohort": cohorts,
    "postprocessor of users": lambda side: run(side, before=[Clips()]),
    "postprocessor of the sum": lambda side: run(side, before=[Halves()]),
    "WeightByDatapoints": lambda side: run(side, before=[WeightByDatapoints()]),
    "local privacy": lambda side: run(side, before=[GaussianMechanism(0.1, 0.5)]),
    "central privacy": lambda side: run(side, before=[central()]),
    "central privacy of weights": lambda side: run(side, before=[WeightByDatapoints(), central()]),
    "subclass of the algorithm": lambda side: run(side, algorithm=Own()),
    "FedProx": lambda side: run(side, algorithm=FedProx(), params=FedProxParams, mu=0.3),
    "central SGD": lambda side: run(side, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)),
    "central Adam": lambda side: run(side, optimizer=lambda p: torch.optim.Adam(p, lr=0.01)),
}
