"""The parts of one trial, each made from the experiment and the seed.

What a comparison must hold equal (first model, partition, active sets, minibatches) is made from the seed and
never sees the algorithm.
"""

from dataclasses import dataclass
from pathlib import Path

from fedcore import participation
from fedcore.algorithms.rates import PerCohort
from fedcore.engines.inprocess import Evaluation, InProcess
from fedcore.experiment.course import F32, Course, Judges
from fedcore.experiment.division import divided
from fedcore.experiment.trial import Trial
from fedcore.local import Options, nets
from fedcore.participation import Participation
from fedcore.server import Server
from fedcore.store import ClientId


@dataclass(frozen=True)
class Parts:
    """What a trial runs on.

    Attributes:
        server, engine, pattern: the server, the clients' work, who takes part.
        course: how the objective changes, if the experiment says that it does.
        judges: who evaluates then.
        uploads: vectors that clients have sent for a warm start, one each; 0 without one.
    """

    server: Server
    engine: InProcess
    pattern: Participation
    course: Course | None = None
    judges: Judges | None = None
    uploads: int = 0

    def begin(self, round: int) -> None:
        """Do what comes before a round."""
        if self.course is not None:
            self.course.begin(self.server, round)

    def evaluate(self, round: int, x: F32) -> Evaluation:
        """Accuracy and loss of a round's model."""
        return self.engine.evaluate(x) if self.judges is None else self.judges.evaluate(round, x)


def build(trial: Trial, saved: Path | None = None) -> Parts:
    """The parts of a trial.

    Args:
        saved: the folder with the server as a run before has left it; where there is none, it is a new one.
    """
    experiment, seed = trial.experiment, trial.seed
    clients = experiment.partition.clients
    module = nets.build(experiment.model.name, seed=seed, **experiment.model.options)
    dataset, parts = divided(experiment, seed)
    pattern = participation.named(
        experiment.participation.name,
        clients,
        seed=seed,
        first_round=experiment.participation.first_round,
        **experiment.participation.options,
    )
    sizes = [len(part) for part in parts]
    objective = trial.method.objective or experiment.objective
    course = None if objective is None else Course(objective, pattern, sizes)
    judges = None if course is None else Judges(course, module, dataset, parts, experiment.local.batch)
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
    gamma = experiment.rate.server_lr.make() if experiment.rate.server_lr else None
    if isinstance(gamma, PerCohort):
        gamma = gamma.over(lambda round: len(pattern.active(round)))
    optimizer = experiment.rate.optimizer.make() if experiment.rate.optimizer else None
    lr, algorithm = experiment.rate.lr.make(), trial.method.make()
    lr = lr if course is None else course.rate(lr)
    present: dict[ClientId, int] = dict(enumerate(sizes)) if course is None else course.start()
    if saved is not None and saved.exists():
        server = Server.load(saved, algorithm=algorithm, server_lr=gamma)  # lr is fedcore's own and saved with it
    else:
        # The module, not its flat vector, which does not tell BatchNorm's statistics from parameters.
        # A simulation can afford to read the rows once more: it is less than one local step.
        server = Server(
            algorithm,
            module,
            list(present),
            lr=lr,
            server_lr=gamma,
            optimizer=optimizer,
            examples=present,
            diagnostics=True,
            max_steps=engine.most_steps(algorithm.local_rule),
        )
        if trial.method.warm_start:
            server.warm_start(engine.gradients(server.broadcast(present)))
    uploads = len(present) if trial.method.warm_start else 0
    return Parts(server, engine, pattern, course, judges, uploads)
