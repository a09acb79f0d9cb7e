"""One trial: its parts, made from the experiment and the seed, and its rounds.

The parts that a comparison must hold equal (first model, partition, active sets, minibatches) are made from the seed
and never see the algorithm.
"""

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from fedcore.algorithms import Algorithm, FedAvgM, LocalDescent
from fedcore.algorithms.rates import InverseRound, PerCohort, Rate, Staircase
from fedcore.arrays import CPU, F32
from fedcore.experiment.journal import SECONDS, FolderJournal, Journal, rows_file
from fedcore.experiment.presets import load_and_partition
from fedcore.experiment.results import RoundRecord, finite
from fedcore.experiment.schema import Experiment, Objective, Trial
from fedcore.network import Network
from fedcore.options import Compute, Limits
from fedcore.server import Report, Server, Update
from fedcore.simulation import nets, participation
from fedcore.simulation.data import Dataset
from fedcore.simulation.engines import Engine, Evaluation, KeepingClients, Nodes, NodesEngine, RecoveringClients
from fedcore.simulation.in_process import InProcess
from fedcore.simulation.participation import Participation, Schedule
from fedcore.simulation.sgd import LocalOptions
from fedcore.store.registry import ClientId

MakeEngine = Callable[..., Engine]
"""Makes a trial's engine; called as ``InProcess`` is. No result depends on it."""


@dataclass
class ChangingObjective:
    """The changes of the objective in the course of a trial.

    Args:
        objective: what arrivals and departures mean.
        pattern: the participation, with a ``Schedule`` in its composition, or without.
        sizes: n_k of each client.
    """

    objective: Objective
    pattern: Participation
    sizes: Sequence[int]
    arrivals: dict[int, int] = field(init=False)
    departures: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.arrivals, self.departures = {}, {}
        inner: Participation | None = self.pattern
        while inner is not None:
            if isinstance(inner, Schedule):
                self.arrivals |= {client: round for client, round in inner.arrivals.items() if round > 0}
                self.departures |= inner.departures
            inner = inner.among

    @property
    def excludes(self) -> bool:
        """Whether the objective leaves out clients that have departed."""
        return self.objective.departures == "exclude"

    def start(self) -> dict[ClientId, int]:
        """n_k of the clients that are in the objective in round 0."""
        return {client: size for client, size in enumerate(self.sizes) if client not in self.arrivals}

    def begin(self, server: Server, round: int) -> None:
        """Announce the arrivals and departures before this round to the server."""
        arriving = [client for client, at in self.arrivals.items() if at == round]
        server.add_clients({client: self.sizes[client] for client in arriving})
        for client in [client for client, at in self.departures.items() if at == round]:
            server.remove_client(client, from_objective=self.excludes)

    def rate(self, rate: Rate) -> Rate:
        """The rate, which begins anew when the objective changes."""
        if self.objective.restart and isinstance(rate, Staircase | InverseRound):
            for round in {*self.arrivals.values(), *(self.departures.values() if self.excludes else ())}:
                rate = rate.restarted(round)
        return rate

    def counted_in(self, round: int) -> frozenset[int]:
        """The clients whose test examples count in this round."""
        gone = self.departures if self.excludes or self.objective.test == "present" else {}
        return frozenset(
            client
            for client in range(len(self.sizes))
            if self.arrivals.get(client, 0) <= round < gone.get(client, round + 1)
        )


class TestSets:
    """Evaluates a model on the test examples of the clients that count in a round.

    Args:
        changing: the changes, which give those clients.
        dataset: the whole test set.
        parts: client i holds the training examples ``parts[i]``, int64[m_i].
        engine_on: an engine of the model on a data set.
    """

    def __init__(
        self,
        changing: ChangingObjective,
        dataset: Dataset,
        parts: Sequence[npt.NDArray[np.int64]],
        engine_on: Callable[[Dataset], Engine],
    ) -> None:
        self._changing, self._dataset, self._parts, self._engine_on = changing, dataset, parts, engine_on
        self._engines: dict[frozenset[int], Engine] = {}

    def evaluate(self, round: int, x: F32) -> Evaluation:
        """Accuracy and loss of x, float32[n], on those examples."""
        clients = self._changing.counted_in(round)
        if clients not in self._engines:
            chosen = test_examples(self._dataset, self._parts, clients)
            test_x, test_y = self._dataset.test_x[chosen], self._dataset.test_y[chosen]
            counted = replace(self._dataset, test_x=test_x, test_y=test_y, test_parts=None)
            self._engines[clients] = self._engine_on(counted)
        return self._engines[clients].evaluate(x)


def test_examples(
    dataset: Dataset, parts: Sequence[npt.NDArray[np.int64]], clients: frozenset[int]
) -> npt.NDArray[np.int64]:
    """The test examples of some clients: their own, if the data has them, else those of the classes that they hold.

    Returns:
        Ascending indices into ``dataset.test_y``.
    """
    if dataset.test_parts is not None:
        return np.sort(np.concatenate([dataset.test_parts[client] for client in sorted(clients)]))
    held = np.unique(np.concatenate([dataset.train_y[parts[client]] for client in sorted(clients)]))
    return np.flatnonzero(np.isin(dataset.test_y, held))


@dataclass(frozen=True)
class TrialParts:
    """The parts that a trial runs on.

    Attributes:
        server, engine, pattern: the server, the clients' work, the participation.
        changing: the changes of the objective, if the experiment has them.
        test_sets: for the evaluation then.
        uploads: vectors that clients have sent for a warm start, one each; 0 without one.
    """

    server: Server | Nodes
    engine: Engine
    pattern: Participation
    changing: ChangingObjective | None = None
    test_sets: TestSets | None = None
    uploads: int = 0

    def begin(self, round: int) -> None:
        """Prepare a round."""
        if self.changing is not None and isinstance(self.server, Server):
            self.changing.begin(self.server, round)

    def end(self, report: Report) -> None:
        """End a round: clients that keep rows learn v."""
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
        make_engine: makes the engine.
        saved: the folder with the server of an earlier run. If it does not exist, the server is new.
    """
    experiment, seed = trial.experiment, trial.seed
    device = experiment.device or CPU
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
            lambda counted: InProcess(
                copy.deepcopy(as_made),
                counted,
                parts,
                batch=experiment.local.batch,
                steps=1,
                seed=0,
                together=False,  # it only evaluates
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
        engine = kept(engine, algorithm)
    gamma = experiment.rate.server_lr.make() if experiment.rate.server_lr else None
    if isinstance(gamma, PerCohort):
        gamma = gamma.over(lambda round: len(pattern.active(round)))
    optimizer = experiment.rate.optimizer.make() if experiment.rate.optimizer else None
    lr = experiment.rate.lr.make()
    lr = lr if changing is None else changing.rate(lr)
    present: dict[ClientId, int] = dict(enumerate(sizes)) if changing is None else changing.start()
    server_device = experiment.server_device or CPU
    if saved is not None and saved.exists():
        # lr is fedcore's, and saved with it
        server = Server.load(saved, algorithm=algorithm, server_lr=gamma, compute=Compute(device=server_device))
        if isinstance(engine, KeepingClients):
            engine.load(rows_file(saved, server.round_number))
    else:
        # The module, not its flat vector, which does not separate BatchNorm's statistics from parameters.
        # A simulation can afford to read the rows once more: it is less than one local step.
        server = Server(
            as_made,
            algorithm,
            present,
            lr=lr,
            server_lr=gamma,
            optimizer=optimizer,
            limits=Limits(max_steps=engine.most_steps(algorithm.local_rule)),
            compute=Compute(device=server_device, diagnostics=True),
        )
        if trial.method.warm_start:
            minibatches = None if trial.method.warm_start is True else trial.method.warm_start
            server.warm_start(engine.gradients(server.broadcast(present), minibatches))
    uploads = len(present) if trial.method.warm_start else 0
    return TrialParts(server, engine, pattern, changing, test_sets, uploads)


def _nodes(
    experiment: Experiment, algorithm: Algorithm, module: nn.Module, sizes: list[int], steps: int, saved: Path | None
) -> Nodes:
    """The network of a trial, new or of an earlier run."""
    assert isinstance(algorithm, LocalDescent)
    assert experiment.network is not None
    if saved is not None and saved.exists():
        return Nodes(Network.load(saved), algorithm)
    topology = experiment.network.topology(len(sizes))
    q = sizes if experiment.network.weights == "examples" else None
    models = [module] * len(sizes)
    limits = Limits(max_steps=steps)
    return Nodes(Network(models, topology, lr=experiment.rate.lr.make(), q=q, limits=limits), algorithm)


def run_trial(
    trial: Trial,
    folder: Path,
    on_round: Callable[[RoundRecord], None] = lambda _: None,
    *,
    checkpoint_seconds: float = SECONDS,
    make_engine: MakeEngine = InProcess,
) -> None:
    """Run one trial and write its record; one that was stopped goes on from its last checkpoint.

    Args:
        trial: what to run.
        folder: of the run, with ``records`` in it; ``checkpoints`` is made.
        on_round: called with each round after it was written, and with those that a record holds already.
        checkpoint_seconds: the least time between two checkpoints.
        make_engine: makes the engine.

    Raises:
        FedcoreError: the data is missing, the model diverged, ...; the rounds before it are in the record.

    Determinism: all but ``seconds`` depends only on the trial, on one machine and for one number of torch's
    threads (which this function leaves as it is).
    """
    with (
        FolderJournal(trial, folder, checkpoint_seconds) as journal,
        closing(trial_rounds(trial, journal, make_engine)) as lines,
    ):
        for line in lines:
            on_round(line)


def trial_rounds(
    trial: Trial, journal: Journal, make_engine: MakeEngine = InProcess
) -> Generator[RoundRecord, None, None]:
    """Run one trial from where its journal stands; see ``run_trial``.

    Args:
        trial: what to run.
        journal: of its rounds.
        make_engine: makes the engine.

    Yields:
        Each round after it was written; at first those that were written before.
    """
    experiment = trial.experiment
    if len(journal.before) == experiment.rounds:
        journal.end()
        yield from journal.before
        return
    parts = build(trial, journal.saved, make_engine)
    if parts.server.round_number > len(journal.before):  # the record has lost rounds of the checkpoint
        parts.engine.close()
        parts = build(trial, None, make_engine)
    before = journal.before[: parts.server.round_number]
    with closing(parts.engine):
        journal.begin(before)
        yield from before
        uploads, every = before[-1].uploads if before else parts.uploads, experiment.evaluate.every
        for line in rounds(parts, count=experiment.rounds, evaluate_every=every, uploads=uploads):
            if experiment.evaluate.keeps(line.round, experiment.rounds):
                journal.keep(line.round, parts.model())
            journal.add(line)
            yield line
            journal.save_when_due(parts.server, parts.engine)
    journal.end()


def rounds(parts: TrialParts, *, count: int, evaluate_every: int, uploads: int = 0) -> Iterator[RoundRecord]:
    """Run the server's rounds up to ``count``, and yield the record of each.

    Args:
        parts: of the trial.
        uploads: the vectors that were sent in the rounds before.

    Raises:
        DivergedError: a step would make the model infinite or NaN.
    """
    server = parts.server
    for round in range(server.round_number, count):
        begun = perf_counter()
        parts.begin(round)
        active = parts.pattern.active(round)
        broadcast = server.broadcast(active.clients)
        stream, waited = _Timed(parts.engine.updates(broadcast, active)), -parts.engine.waited
        start = perf_counter()
        report = server.round(stream)
        parts.end(report)
        folded, waited = perf_counter(), waited + parts.engine.waited
        evaluate = (round + 1) % evaluate_every == 0 or round + 1 == count
        evaluation = parts.evaluate(round, server.x) if evaluate else None
        done = perf_counter()
        uploads += stream.seen * server.algorithm.uploads
        yield RoundRecord(
            round=round,
            active=active.clients.tolist(),
            heard=len(report.accepted),
            refused=len(report.rejected),
            accuracy=evaluation.accuracy if evaluation else None,
            loss=finite(evaluation.loss) if evaluation else None,
            lr=broadcast.lr,
            gamma=report.gamma,
            steps=report.steps,
            uploads=uploads,
            norm=finite(float(np.mean(report.norms))) if len(report.norms) else None,
            bytes=report.bytes,
            seconds={
                "broadcast": start - begun,
                "local": stream.seconds - waited,
                "aggregate": folded - start - stream.seconds,
                "evaluate": done - folded,
                **({"waited": waited} if waited else {}),
            },
            uploadings=(round + 1) * server.algorithm.uploads + (parts.uploads > 0),
            bytes_down=broadcast.bytes + parts.bytes_more,
            diversity=finite(report.diversity),
            correction_norm=finite(report.correction_norm),
            staleness=report.staleness,
            together=parts.engine.together,
            awaited=report.waiting_for,
        )


@dataclass
class _Timed:
    """Passes updates on, counts them, and adds up the time that making them took."""

    updates: Iterable[Update]
    seconds: float = 0.0
    seen: int = 0

    def __iter__(self) -> Iterator[Update]:
        start = perf_counter()
        for update in self.updates:
            self.seconds += perf_counter() - start
            self.seen += 1
            yield update
            start = perf_counter()
        self.seconds += perf_counter() - start
