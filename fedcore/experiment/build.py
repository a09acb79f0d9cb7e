"""The parts of one trial, each made from the experiment and the seed.

What a comparison must hold equal (first model, partition, active sets, minibatches) is made from the seed and
never sees the algorithm.
"""

from functools import cache

from fedcore import data, participation
from fedcore.algorithms.rates import Exponential
from fedcore.data.partition import shards
from fedcore.engines.inprocess import InProcess
from fedcore.experiment.trial import Trial
from fedcore.local import nets
from fedcore.participation import Participation
from fedcore.server import Server

_load = cache(data.load)  # a process runs many trials on the same data


def build(trial: Trial) -> tuple[Server, InProcess, Participation]:
    """The server, the clients' engine and the participation pattern of a trial."""
    experiment, seed = trial.experiment, trial.seed
    clients = experiment.partition.clients
    dataset = _load(experiment.data.name)
    parts = shards(
        dataset.train_y,
        clients,
        experiment.partition.shards_per_client,
        seed=seed,
        distinct_classes=experiment.partition.distinct_classes,
    )
    engine = InProcess(
        nets.build(experiment.model.name, seed=seed),
        dataset,
        parts,
        batch=experiment.local.batch,
        epochs=experiment.local.epochs,
        steps=experiment.local.steps,
        seed=seed,
    )
    pattern = participation.named(
        experiment.participation.name,
        clients,
        seed=seed,
        first_round=experiment.participation.first_round,
        **experiment.participation.options,
    )
    rate = experiment.rate
    server = Server(
        trial.method.make(),
        engine.initial,
        clients=clients,
        lr=Exponential(rate.lr, rate.decay),
        server_lr=Exponential(rate.server_lr.initial, rate.server_lr.decay) if rate.server_lr else None,
    )
    return server, engine, pattern
