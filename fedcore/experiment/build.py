"""The parts of one trial, each made from the experiment and the seed.

What a comparison must hold equal (first model, partition, active sets, minibatches) is made from the seed and
never sees the algorithm.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedcore import devices, participation
from fedcore.algorithms import Algorithm, FedAvgM, LocalDescent
from fedcore.clients import ClientId
from fedcore.engines import Engine, Evaluation, InProcess, KeepingClients, RecoveringClients
from fedcore.experiment.changing_objective import ChangingObjective, TestSets
from fedcore.experiment.checkpoints import rows_file
from fedcore.experiment.datasets import load_and_partition
from fedcore.experiment.nodes import Nodes, NodesEngine
from fedcore.experiment.schema.experiment import Experiment
from fedcore.experiment.trial import Trial
from fedcore.local import LocalOptions, nets
from fedcore.network import Network
from fedcore.participation import Participation
from fedcore.rates import PerCohort
from fedcore.server import RoundReport, Server
from fedcore.typing import F32

MakeEngine = Callable[..., Engine]
"""What makes a trial's engine: called as ``InProcess`` is. It changes no figure."""


@dataclass(frozen=True)
class TrialParts:
    """The parts that a trial runs on.

    Attributes:
        server, engine, pattern: the server, the clients' work, who takes part.
        changing: how the objective changes, if the experiment says that it does.
        test_sets: who evaluates then.
        uploads: vectors that clients have sent for a warm start, one each; 0 without one.
    """

    server: Server | Nodes
    engine: Engine
    pattern: Participation
    changing: ChangingObjective | None = None
    test_sets: TestSets | None = None
    uploads: int = 0

    def begin(self, round: int) -> None:
        """Do what comes before a round."""
        if self.changing is not None and isinstance(self.server, Server):
            self.changing.begin(self.server, round)

    def end(self, report: RoundReport) -> None:
        """Do what comes after a round: clients that keep rows hear of v."""
        if isinstance(self.engine, KeepingClients) and isinstance(self.server, Server):
            self.engine.after(self.server, report)

    @property
    def bytes_more(self) -> int:
        """The bytes that the clients of the last round were sent beside the broadcast."""
        return self.engine.bytes_more if isinstance(self.engine, KeepingClients) else 0

    def model(self) -> Any:
        """The server's model by name, torch's tensors."""
        assert isinstance(self.server, Server), "nodes have a model each"
        return self.server.tensors()

    def evaluate(self, round: int, x: F32) -> Evaluation:
        """Accuracy and loss of a round's model."""
        return self.engine.evaluate(x) if self.test_sets is None else self.test_sets.evaluate(round, x)


def build(trial: Trial, saved: Path | None = None, make_engine: MakeEngine = InProcess) -> TrialParts:
    """The parts of a trial.

    Args:
        make_engine: who does the clients' work.
        saved: the folder with the server as a run before has left it; where there is none, it is a new one.
    """
    experiment, seed = trial.experiment, trial.seed
    device = experiment.device or devices.CPU
    clients = experiment.partition.clients
    module = nets.build(experiment.model.name, seed=seed, **experiment.model.options)
    dataset, parts = load_and_partition(experiment, seed)
    pattern = participation.named(
        experiment.participation.name,
        clients,
        seed=seed,
        first_round=experiment.participation.first_round,
        **experiment.participation.options,
    )
    sizes = [len(part) for part in parts]
    objective = trial.method.objective or experiment.objective
    changing = None if objective is None else ChangingObjective(objective, pattern, sizes)
    as_made = copy.deepcopy(module)  # an engine takes its module over, and to its device
    test_sets = (
        None
        if changing is None
        else TestSets(
            changing,
            dataset,
            parts,
            lambda judged: InProcess(
                copy.deepcopy(as_made),
                judged,
                parts,
                batch=experiment.local.batch,
                steps=1,
                seed=0,
                together=False,  # it evaluates alone
                device=device,
            ),
        )
    )
    engine = make_engine(
        module,
        dataset,
        parts,
        batch=experiment.local.batch,
        epochs=experiment.local.epochs,
        steps=experiment.local.steps,
        seed=seed,
        options=LocalOptions(experiment.local.weight_decay, experiment.local.momentum, experiment.local.clip),
        together=True if experiment.together is None else experiment.together,
        threads=experiment.threads,
        device=device,
    )
    algorithm = trial.method.make()
    if experiment.network is not None:
        nodes = _nodes(experiment, algorithm, as_made, sizes, engine.most_steps(algorithm.local_rule), saved)
        return TrialParts(nodes, NodesEngine(engine, nodes), pattern)
    if algorithm.rows_at_clients:
        kept = RecoveringClients if isinstance(algorithm, FedAvgM) else KeepingClients
        engine = kept(engine, algorithm)  # type: ignore[arg-type]  # of its own kind
    gamma = experiment.rate.server_lr.make() if experiment.rate.server_lr else None
    if isinstance(gamma, PerCohort):
        gamma = gamma.over(lambda round: len(pattern.active(round)))
    optimizer = experiment.rate.optimizer.make() if experiment.rate.optimizer else None
    lr = experiment.rate.lr.make()
    lr = lr if changing is None else changing.rate(lr)
    present: dict[ClientId, int] = dict(enumerate(sizes)) if changing is None else changing.start()
    server_device = experiment.server_device or devices.CPU
    if saved is not None and saved.exists():
        # lr is fedcore's own and saved with it
        server = Server.load(saved, algorithm=algorithm, server_lr=gamma, device=server_device)
        if isinstance(engine, KeepingClients):
            engine.load(rows_file(saved, server.round_number))
    else:
        # The module, not its flat vector, which does not tell BatchNorm's statistics from parameters.
        # A simulation can afford to read the rows once more: it is less than one local step.
        server = Server(
            algorithm,
            as_made,
            list(present),
            lr=lr,
            server_lr=gamma,
            optimizer=optimizer,
            client_sizes=present,
            diagnostics=True,
            max_steps=engine.most_steps(algorithm.local_rule),
            device=server_device,
        )
        if trial.method.warm_start:
            minibatches = None if trial.method.warm_start is True else trial.method.warm_start
            server.warm_start(engine.gradients(server.broadcast(present), minibatches))
    uploads = len(present) if trial.method.warm_start else 0
    return TrialParts(server, engine, pattern, changing, test_sets, uploads)


def _nodes(
    experiment: Experiment, algorithm: Algorithm, module: nn.Module, sizes: list[int], steps: int, saved: Path | None
) -> Nodes:
    """The network of a trial, new or as a run before has left it."""
    assert isinstance(algorithm, LocalDescent)
    assert experiment.network is not None
    if saved is not None and saved.exists():
        return Nodes(Network.load(saved), algorithm)
    topology = experiment.network.topology(len(sizes))
    q = sizes if experiment.network.weights == "examples" else None
    models = [module] * len(sizes)
    return Nodes(Network(models, topology, lr=experiment.rate.lr.make(), q=q, max_steps=steps), algorithm)
