"""MIFA in pfl's FederatedAveraging: 20 users, two in each round."""

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data import dataset, federated_dataset, sampling
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel

from fedcore.adapters.pfl import Method


class Net(torch.nn.Sequential):
    def loss(self, x, y, eval=False):
        return torch.nn.functional.cross_entropy(self(x), y.long())

    def metrics(self, x, y, eval=False):
        return {}


rng = np.random.default_rng(0)
truth = rng.normal(size=(10, 3))
inputs = {str(user): rng.normal(size=(40, 10)).astype(np.float32) for user in range(20)}
users = federated_dataset.FederatedDataset(
    lambda user: dataset.Dataset([inputs[user], (inputs[user] @ truth).argmax(1)], user_id=user),
    sampling.get_user_sampler("minimize_reuse", list(inputs)),
)
net = Net(torch.nn.Linear(10, 3))
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
mifa = Method("MIFA", inputs, lr=0.1, steps=4)  # 40 examples in batches of 10
FederatedAveraging().run(
    NNAlgorithmParams(central_num_iterations=60, evaluation_frequency=100, train_cohort_size=2, val_cohort_size=None),
    SimulatedBackend(users, users, postprocessors=[mifa], aggregator=mifa),
    model,
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10),
    send_metrics_to_platform=False,
)
right = [(net(torch.tensor(x)).argmax(1).numpy() == (x @ truth).argmax(1)).mean() for x in inputs.values()]
print(len(mifa.reports), "rounds, accuracy", np.mean(right).round(2))
