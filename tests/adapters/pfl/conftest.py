"""Two users with quadratic losses, for which FedAvg misses the optimum, and pfl's real backend."""

import numpy as np
import pytest

pytest.importorskip("pfl")

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.bridge.pytorch import scaffold as step_module
from pfl.model.pytorch import PyTorchModel

USERS = {"0": (1.0, 0.0), "1": (10.0, 1.0)}  # h and a of h/2 (w - a)^2
OPTIMUM = 10 / 11
LR, EPOCHS = 0.05, 10


class Quadratic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def loss(self, h, a, eval=False):
        return (0.5 * h * (self.w - a) ** 2).mean()

    def metrics(self, h, a, eval=False):
        return {}


def population():
    def user(name):
        return Dataset(raw_data=[np.full((1, 1), value, np.float32) for value in USERS[name]], user_id=name)

    return FederatedDataset(user, get_user_sampler("minimize_reuse", list(USERS)))


def run(algorithm, params):
    """w after the run of an algorithm over both users."""
    np.random.seed(0)
    module, users = Quadratic(), population()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    train = NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=10)
    algorithm.run(params, SimulatedBackend(users, users), model, train, None, [], send_metrics_to_platform=False)
    return float(module.w.item())


def base(iterations, cohort):
    return {
        "central_num_iterations": iterations,
        "evaluation_frequency": 1000,
        "train_cohort_size": cohort,
        "val_cohort_size": None,
    }


@pytest.fixture
def scaffold(monkeypatch):
    """pfl's SCAFFOLD with the sign of its local step corrected: pfl adds server_c - local_c."""
    original = step_module._control_variate_train_step

    def exchanged(*args, **kwargs):
        kwargs["server_c"], kwargs["local_c"] = kwargs["local_c"], kwargs["server_c"]
        return original(*args, **kwargs)

    def go(iterations, storage, *, gradients, corrected=True, cohort=2):
        monkeypatch.setattr(step_module, "_control_variate_train_step", exchanged if corrected else original)
        params = SCAFFOLDParams(
            **base(iterations, cohort),
            population=2,
            use_gradient_as_control_variate=gradients,
            user_state_storage=storage,
        )
        return run(SCAFFOLD(), params)

    return go
