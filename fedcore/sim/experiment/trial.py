"""Running one trial: its server, clients and participation are built from the experiment and the seed.

The first model, partition, active clients and minibatches depend only on the seed, so all algorithms share them.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from fedcore.algorithms import FedAvgM
from fedcore.algorithms.rates import InverseRound, Rate, Staircase
from fedcore.arrays import CPU, F32, I64
from fedcore.errors import RangeError
from fedcore.options import Compute, Limits
from fedcore.server import Broadcast, Report, Server, Update
from fedcore.sim import nets, participation
from fedcore.sim.attacks import Liars
from fedcore.sim.clock import Arrivals, Clock
from fedcore.sim.data import Dataset
from fedcore.sim.engines import AtWork, Engine, Evaluation, KeepingClients, Nodes, NodesEngine, RecoveringClients
from fedcore.sim.experiment import results
from fedcore.sim.experiment.config import hashes, load_and_partition
from fedcore.sim.experiment.results import SECONDS, Begun, FolderJournal, Journal, Kept, RoundRecord, finite
from fedcore.sim.experiment.schema import Evaluate, Objective, Trial
from fedcore.sim.in_process import InProcess
from fedcore.sim.participation import Active, Participation, Schedule
from fedcore.sim.sgd import LocalOptions
from fedcore.store.registry import ClientId

MakeEngine = Callable[..., Engine]
"""Makes a trial's engine, with the arguments of ``InProcess``. Results do not depend on it."""
MOST_ARRIVALS = 1000
"""The maximum number of arrivals for each update of an asynchronous round."""


@dataclass
class ChangingObjective:
    """The changes of the objective during a trial, with the corresponding test sets.

    A ``Schedule`` in ``pattern`` defines the arrivals and departures; ``objective`` defines their effect. Client i has
    the training examples ``parts[i]``. ``engine_on`` makes an engine of the model for a data set. The trial has this
    number of ``rounds``.
    """

    objective: Objective
    pattern: Participation
    dataset: Dataset
    parts: Sequence[I64]
    engine_on: Callable[[Dataset], Engine]
    rounds: int
    arrivals: dict[int, int] = field(init=False, default_factory=dict)
    departures: dict[int, int] = field(init=False, default_factory=dict)
    engines: dict[frozenset[int], Engine] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for inner in participation.nested(self.pattern):
            if isinstance(inner, Schedule):
                arrivals, departures = inner.moves
                self.arrivals |= {client: self._first_round(at) for client, at in arrivals.items() if at > 0}
                self.departures |= {client: self._first_round(at) for client, at in departures.items()}
        for round in sorted({0, *self.arrivals.values(), *self.departures.values()} - {self.rounds}):
            if not self.counted_in(round):
                raise RangeError(f"objective: no client counts in round {round}; change the Schedule's rounds")

    def _first_round(self, at: int) -> int:
        """Return the first round of the trial, or its end, at which the schedule's round is at least this one."""
        return next((t for t in range(self.rounds) if self.pattern.inner_round(t) >= at), self.rounds)

    @property
    def excludes(self) -> bool:
        """Whether the objective excludes departed clients."""
        return self.objective.departures == "exclude"

    def start(self) -> dict[ClientId, int]:
        """Return n_k of each client in the objective of round 0."""
        return {client: len(part) for client, part in enumerate(self.parts) if client not in self.arrivals}

    def begin(self, server: Server, round: int) -> None:
        """Apply the arrivals and departures before this round to the server."""
        server.add_clients({client: len(self.parts[client]) for client, at in self.arrivals.items() if at == round})
        for client in [client for client, at in self.departures.items() if at == round]:
            server.remove_client(client, from_objective=self.excludes)

    def rate(self, rate: Rate) -> Rate:
        """Return the rate, restarted at each change of the objective if ``objective.restart`` is true."""
        if self.objective.restart and isinstance(rate, Staircase | InverseRound):
            for round in {*self.arrivals.values(), *(self.departures.values() if self.excludes else ())}:
                rate = rate.restarted(round)
        return rate

    def counted_in(self, round: int) -> frozenset[int]:
        """Return the clients whose test examples count in this round."""
        departures = self.departures if self.excludes or self.objective.test == "present" else {}
        return frozenset(
            client
            for client in range(len(self.parts))
            if self.arrivals.get(client, 0) <= round < departures.get(client, round + 1)
        )

    def evaluate(self, round: int, x: F32) -> Evaluation:
        """Return accuracy and loss of x, float32[n], on the test examples that count in this round."""
        clients = self.counted_in(round)
        if clients not in self.engines:
            chosen = test_examples(self.dataset, self.parts, clients)
            test_x, test_y = self.dataset.test_x[chosen], self.dataset.test_y[chosen]
            self.engines[clients] = self.engine_on(replace(self.dataset, test_x=test_x, test_y=test_y, test_parts=None))
        return self.engines[clients].evaluate(x)


def test_examples(dataset: Dataset, parts: Sequence[I64], clients: frozenset[int]) -> I64:
    """Return the test examples of some clients as ascending indices into ``dataset.test_y``.

    If the data set assigns test examples to clients, return those; else all test examples of the clients' classes.
    """
    if dataset.test_parts is not None:
        return np.sort(np.concatenate([dataset.test_parts[client] for client in sorted(clients)]))
    classes = np.unique(np.concatenate([dataset.train_y[parts[client]] for client in sorted(clients)]))
    return np.flatnonzero(np.isin(dataset.test_y, classes))


@dataclass(frozen=True)
class TrialParts:
    """The parts of a trial. ``uploads`` counts the vectors sent for a warm start: one per client, else 0."""

    server: Server | Nodes
    engine: Engine
    pattern: Participation
    changing: ChangingObjective | None = None
    uploads: int = 0
    liars: Liars | None = None

    @property
    def course(self) -> Arrivals | None:
        """The asynchronous clients, if any."""
        return self.engine.arrivals if isinstance(self.engine, AtWork) else None

    def updates(self, broadcast: Broadcast, active: Active) -> Iterable[Update]:
        """Return the updates of a round, including those of dishonest clients."""
        updates = self.engine.updates(broadcast, active)
        return updates if self.liars is None else self.liars.updates(broadcast, updates)

    def begin(self, round: int) -> None:
        """Prepare a round: apply arrivals and departures."""
        if self.changing is not None and isinstance(self.server, Server):
            self.changing.begin(self.server, round)

    def end(self, report: Report) -> None:
        """Complete a round: clients that keep rows update them."""
        if isinstance(self.engine, KeepingClients) and isinstance(self.server, Server):
            self.engine.after(self.server, report)

    @property
    def bytes_more(self) -> int:
        """The bytes sent to the clients of the last round in addition to the broadcast."""
        return self.engine.bytes_more if isinstance(self.engine, KeepingClients) else 0

    def evaluate(self, round: int, x: F32) -> Evaluation:
        """Return accuracy and loss of a round's model."""
        return self.engine.evaluate(x) if self.changing is None else self.changing.evaluate(round, x)


@dataclass(frozen=True)
class Problem:
    """What all algorithms of a comparison share for one seed: the first model, the data, and who takes part when."""

    module: nn.Module
    dataset: Dataset
    parts: Sequence[I64]
    pattern: Participation
    course: Clock | Arrivals | None
    liars: Liars | None

    @property
    def sizes(self) -> dict[ClientId, int]:
        """The number of examples of each client."""
        return {client: len(part) for client, part in enumerate(self.parts)}


def build(trial: Trial, saved: Path | None = None, make_engine: MakeEngine = InProcess) -> TrialParts:
    """Return the parts of a trial. The server is loaded from the folder ``saved``, or new if this does not exist."""
    problem, saved = problem_of(trial), saved if saved is not None and saved.exists() else None
    engine = make_executor(trial, problem, make_engine)
    if trial.experiment.network is not None:
        nodes = make_nodes(trial, problem, engine, saved)
        return TrialParts(nodes, NodesEngine(engine, nodes), problem.pattern)
    objective, changing = trial.own("objective"), None
    if objective is not None:

        def evaluator(counted: Dataset) -> Engine:
            options: dict[str, Any] = {"batch": trial.local.batch, "device": trial.experiment.device or CPU}
            return InProcess(problem.module, counted, problem.parts, steps=1, seed=0, together=False, **options)

        changing = ChangingObjective(
            objective, problem.pattern, problem.dataset, problem.parts, evaluator, trial.experiment.rounds
        )
    server = make_server(trial, problem, engine, changing, saved)
    uploads = len(problem.sizes if changing is None else changing.start()) if trial.method.warm_start else 0
    return TrialParts(server, engine, problem.pattern, changing, uploads, problem.liars)


def problem_of(trial: Trial) -> Problem:
    """Return the model, the data and the participation of a trial."""
    experiment, seed = trial.experiment, trial.seed
    clients, active, attack = experiment.partition.clients, experiment.participation, experiment.attack
    dataset, parts = load_and_partition(experiment, seed)
    if not len(dataset.test_y):
        raise RangeError(f"data: {dataset.name!r} has no test examples; set validation, the share of the others to use")
    labels = [dataset.train_y[part] for part in parts]
    more: dict[str, Any] = {"labels": labels, "seed": seed, "first_round": active.first_round}
    pattern = participation.named(active.name, clients, **more, **active.options)
    if dataset.clients is not None and experiment.partition.name == "natural":
        for each in participation.nested(pattern):
            if isinstance(each, participation.Trace):
                each.check_names(dataset.clients)
    course = None if trial.clock is None else trial.clock.over(pattern)
    return Problem(
        nets.build(experiment.model.name, seed=seed, **experiment.model.options),
        dataset,
        parts,
        course if isinstance(course, Clock) else pattern,
        course,
        None if attack is None else Liars(attack.make(), range(clients - attack.clients, clients), seed),
    )


def make_executor(trial: Trial, problem: Problem, make_engine: MakeEngine) -> Engine:
    """Return the engine that trains the clients of a trial."""
    experiment, local, algorithm, liars = trial.experiment, trial.local, trial.method.make(), problem.liars
    dataset = problem.dataset if liars is None else liars.poisoned(problem.dataset, problem.parts)
    how: dict[str, Any] = {"together": True if experiment.together is None else experiment.together}
    how |= {"threads": experiment.threads, "device": experiment.device or CPU}
    how |= {"options": LocalOptions(local.weight_decay, local.momentum, local.clip), "seed": trial.seed}
    sizes = local.model_dump(include={"batch", "epochs", "steps"})
    engine = make_engine(problem.module, dataset, problem.parts, **sizes, **how)
    if isinstance(problem.course, Arrivals):
        return AtWork(engine, problem.course)
    if algorithm.rows_at_clients:
        return (RecoveringClients if isinstance(algorithm, FedAvgM) else KeepingClients)(engine, algorithm)
    return engine


def make_server(
    trial: Trial, problem: Problem, engine: Engine, changing: ChangingObjective | None, saved: Path | None
) -> Server:
    """Return the server of a trial, loaded from ``saved`` or new. A new one starts warm if the method does."""
    algorithm, options = trial.method.make(), trial.server_options(lambda round: len(problem.pattern.active(round)))
    device = trial.experiment.server_device or CPU
    if changing is not None:
        options["lr"] = changing.rate(options["lr"])
    if saved is not None:
        own = {name: options[name] for name in ("lr", "server_lr", "optimizer")}  # possibly the user's code
        server = Server.load(saved, algorithm=algorithm, compute=Compute(device=device), **own)
        if isinstance(engine, KeepingClients | AtWork):
            engine.load(results.rows_file(saved, server.round_number))
        return server
    present = problem.sizes if changing is None else changing.start()
    # A flat vector would not separate BatchNorm's statistics from parameters, so the server gets the module.
    # Diagnostics read the rows once more, which costs less than one local step.
    options["compute"] = Compute(device=device, diagnostics=True)
    options["limits"] = replace(options["limits"], max_steps=engine.most_steps(algorithm.local_rule))
    server = Server(problem.module, algorithm, present, **options)
    if warm := trial.method.warm_start:
        server.warm_start(engine.gradients(server.broadcast(present), None if warm is True else warm))
    return server


def make_nodes(trial: Trial, problem: Problem, engine: Engine, saved: Path | None) -> Nodes:
    """Return the network of a trial, new or loaded."""
    network, algorithm, sizes = trial.experiment.network, trial.method.make(), list(problem.sizes.values())
    assert network is not None
    lr = trial.rate.lr.make()
    if saved is not None:
        nodes = Nodes.load(saved, lr=lr)
    else:
        q, limits = sizes if network.weights == "examples" else None, Limits(engine.most_steps(algorithm.local_rule))
        nodes = Nodes([problem.module] * len(sizes), network.topology(len(sizes)), lr=lr, q=q, limits=limits)
    nodes.algorithm = algorithm
    return nodes


def run_trial(
    trial: Trial,
    folder: Path,
    on_round: Callable[[RoundRecord], None] = lambda _: None,
    *,
    checkpoint_seconds: float = SECONDS,
    make_engine: MakeEngine = InProcess,
) -> None:
    """Run one trial and write its record. An interrupted trial resumes from its last checkpoint.

    ``folder`` is the run's folder, with ``records`` in it. ``on_round`` is called with the rounds of an existing
    record, and with each new round after it is written.

    Determinism: everything but ``seconds`` depends only on the trial, on one machine and for one number of torch
    threads (which this function does not change).
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
    """Run one trial from the state of its journal; yield the recorded rounds, then each new one once it is written."""
    experiment = trial.experiment
    if results.have_ended(journal.before, experiment.rounds):
        journal.end()
        yield from journal.before
        return
    parts = build(trial, journal.saved, make_engine)
    if parts.server.round_number > len(journal.before):  # the record lost rounds that the checkpoint includes
        parts.engine.close()
        parts = build(trial, None, make_engine)
    server, before = parts.server, journal.before[: parts.server.round_number]
    with closing(parts.engine):
        journal.put(Begun(len(before), *hashes(trial)))
        yield from before
        uploads = before[-1].uploads if before else parts.uploads
        progress = _Improvement(experiment.evaluate)
        for line in before:
            progress.is_best(line)
        clock = before[-1].clock or 0.0 if before else 0.0
        count, evaluate = experiment.rounds, experiment.evaluate
        for line in rounds(parts, count=count, evaluate=evaluate, uploads=uploads, clock=clock):
            names = [f"round{line.round}"] if evaluate.keeps(line.round, count) else []
            names += ["best"] if progress.is_best(line) and evaluate.best else []
            for name in names:
                assert isinstance(server, Server), "each node of a network has its own model"
                journal.put(Kept(name, server.tensors()))
            if progress.is_over and line.round + 1 < experiment.rounds:
                line = replace(line, stopped=True)
            journal.put(line)
            yield line
            if line.stopped:
                break
            journal.save_when_due(server, parts.engine)
    journal.end()


@dataclass
class _Improvement:
    """The best value of the metric so far, and the number of evaluations of changed models since then.

    Equal accuracy and loss mean an unchanged model, as in rounds without clients, or while MIFA waits.
    """

    evaluate: Evaluate
    best: float = -inf
    since: int = 0
    last: tuple[float | None, float | None] | None = None

    def is_best(self, line: RoundRecord) -> bool:
        """Count a round; return whether its model is the best so far."""
        if line.accuracy is None:  # not evaluated
            return False
        loss = inf if line.loss is None else line.loss
        value = line.accuracy if self.evaluate.metric == "accuracy" else -loss
        unchanged = line.loss is not None and (line.accuracy, line.loss) == self.last
        self.last = line.accuracy, line.loss
        if unchanged:
            return False
        self.since += 1
        if value > self.best + self.evaluate.min_delta:
            self.best, self.since = value, 0
        return self.since == 0

    @property
    def is_over(self) -> bool:
        """Whether the trial must stop."""
        return self.evaluate.patience is not None and self.since >= self.evaluate.patience


def rounds(
    parts: TrialParts, *, count: int, evaluate: Evaluate, uploads: int = 0, clock: float = 0.0
) -> Iterator[RoundRecord]:
    """Run the server's rounds up to ``count``; yield the record of each.

    ``evaluate`` selects the rounds that are evaluated; ``uploads`` is the number of vectors sent earlier, and ``clock``
    the virtual time.
    """
    server = parts.server
    for round in range(server.round_number, count):
        before = parts.engine.waited
        work = _synchronous(parts, round, clock) if parts.course is None else _asynchronous(parts)
        report, facts = work.report, work.facts
        clock, waited = facts["clock"] or 0.0, parts.engine.waited - before
        start = perf_counter()
        evaluation = parts.evaluate(round, server.x) if evaluate.is_due(round, count) else None
        done = perf_counter()
        uploads += work.sent * server.algorithm.uploads
        seconds = {**work.seconds, "local": work.seconds["local"] - waited}
        seconds |= {"evaluate": done - start} | ({"waited": waited} if waited else {})
        same: dict[str, Any] = {name: getattr(report, name) for name in ("gamma", "steps", "bytes", "staleness")}
        yield RoundRecord(
            round=round,
            accepted=len(report.accepted),
            rejected=len(report.rejected),
            accuracy=evaluation.accuracy if evaluation else None,
            loss=finite(evaluation.loss) if evaluation else None,
            uploads=uploads,
            norm=finite(float(np.mean(report.norms))) if len(report.norms) else None,
            seconds=seconds,
            uploadings=(round + 1) * server.algorithm.uploads + (parts.uploads > 0),
            diversity=finite(report.diversity),
            correction_norm=finite(report.correction_norm),
            together=parts.engine.together,
            pending=report.waiting_for,
            ages=None if parts.course is None else report.ages.tolist(),
            **facts,
            **same,
        )


class _Work(NamedTuple):
    """A round: its report, the updates sent, the seconds of its phases, and further fields of its record."""

    report: Report
    sent: int
    seconds: dict[str, float]
    facts: dict[str, Any]


def _synchronous(parts: TrialParts, round: int, clock: float) -> _Work:
    """Run a round with the pattern's clients."""
    begun, end = perf_counter(), None
    parts.begin(round)
    if isinstance(parts.pattern, Clock):
        active, seconds = parts.pattern.closing(round)
        end = clock + seconds
    else:
        active = parts.pattern.active(round)
    broadcast = parts.server.broadcast(active.clients)
    start = perf_counter()
    report = parts.server.round(parts.updates(broadcast, active))
    done = perf_counter()
    parts.end(report)
    times = {"broadcast": start - begun, "local": done - start - report.seconds}
    times["aggregate"] = report.seconds + perf_counter() - done
    facts = {"active": active.clients.tolist(), "lr": broadcast.lr, "clock": end}
    sent = len(report.accepted) + len(report.rejected)
    return _Work(report, sent, times, facts | {"bytes_down": broadcast.bytes + parts.bytes_more})


def _asynchronous(parts: TrialParts) -> _Work:
    """Let clients start and arrive until the server closes its round."""
    server, engine = parts.server, parts.engine
    assert isinstance(server, Server)
    assert isinstance(engine, AtWork)
    begun, local, sent, received = perf_counter(), 0.0, 0, 0
    lr, reports = server.broadcast([]).lr, list[Report]()
    while not reports:
        start = perf_counter()
        received += engine.start(server)
        local += perf_counter() - start
        if (update := engine.next()) is None:
            continue
        sent += 1
        reports = server.push([update])
        if not reports and sent > MOST_ARRIVALS * (server.policy.buffer or 1):
            rejected = server.open_buffer().rejected
            raise RangeError(
                f"policy.buffer={server.policy.buffer}: the round is not complete after {sent} updates, of which "
                f"{len(rejected)} were rejected (the last one: {rejected[-1][1]}); change policy or concurrency"
            )
    facts = {"active": [int(client) for client in reports[0].accepted], "lr": lr, "clock": engine.arrivals.time}
    times = {"broadcast": 0.0, "local": local, "aggregate": perf_counter() - begun - local}
    return _Work(reports[0], sent, times, facts | {"bytes_down": received})
