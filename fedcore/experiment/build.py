"""The parts of one trial, each made from the experiment and the seed.

What a comparison must hold equal (first model, partition, active sets, minibatches) is made from the seed and
never sees the algorithm.
"""

from pathlib import Path

from fedcore import participation
from fedcore.algorithms.rates import PerCohort
from fedcore.engines.inprocess import InProcess
from fedcore.experiment.division import divided
from fedcore.experiment.trial import Trial
from fedcore.local import Options, nets
from fedcore.participation import Participation
from fedcore.server import Server


def build(trial: Trial, saved: Path | None = None) -> tuple[Server, InProcess, Participation]:
    """The server, the clients' engine and the participation pattern of a trial.

    Args:
        saved: the folder with the server as a run before has left it; where there is none, it is a new one.
    """
    experiment, seed = trial.experiment, trial.seed
    clients = experiment.partition.clients
    module = nets.build(experiment.model.name, seed=seed, **experiment.model.options)
    dataset, parts = divided(experiment, seed)
    engine = InProcess(
        module,
        dataset,
        parts,
        batch=experiment.local.batch,
        epochs=experiment.local.epochs,
        steps=experiment.local.steps,
        seed=seed,
        options=Options(experiment.local.weight_decay, experiment.local.momentum, experiment.local.clip),
    )
    pattern = participation.named(
        experiment.participation.name,
        clients,
        seed=seed,
        first_round=experiment.participation.first_round,
        **experiment.participation.options,
    )
    gamma = experiment.rate.server_lr.make() if experiment.rate.server_lr else None
    if isinstance(gamma, PerCohort):
        gamma = gamma.over(lambda round: len(pattern.active(round)))
    lr, algorithm = experiment.rate.lr.make(), trial.method.make()
    if saved is not None and saved.exists():
        return Server.load(saved, algorithm=algorithm, lr=lr, server_lr=gamma), engine, pattern
    sizes = [len(part) for part in parts]
    # The module, not its flat vector, which does not tell BatchNorm's statistics from parameters.
    # A simulation can afford to read the rows once more: it is less than one local step.
    server = Server(algorithm, module, clients, lr=lr, server_lr=gamma, examples=sizes, correction_norms=True)
    return server, engine, pattern
