"""Tests of custom code: ``check_algorithm(MyMethod())`` and ``check_optimizer(MyOptimizer())`` check the rules that
fedcore's methods and server optimizers follow."""

import pickle
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import isclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.algorithms import Algorithm, FedAvg, check_table, optimizers
from fedcore.algorithms.optimizers import Optimizer
from fedcore.algorithms.rates import Exponential
from fedcore.arrays import F32, F64
from fedcore.errors import AlgorithmError
from fedcore.options import Compute, describe
from fedcore.server import Server, Update
from fedcore.server.broadcast import Instructions

N, n, ROUNDS, STEPS = 6, 70, 6, 3


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise AlgorithmError if an algorithm breaks a rule that all of fedcore's methods follow.

    The algorithm runs on a small server with random updates and no training. Test it against its paper yourself. The
    rules:

    * its coefficients do not contradict each other, and its options and its pickle describe it;
    * its ``weigh`` and ``step`` depend only on their arguments and its options;
    * updates added one by one, in batches, or all at once give the same bits;
    * an aborted round or a rejected update changes nothing, and rounds may be empty;
    * a server that was saved and loaded, or resumed from its folder, continues with the same bits;
    * T is the sum of the rows, even after a client was removed, if the method declares it;
    * the gradient diversity in a report is correct, or None;
    * a message preserves the instructions to clients.

    Raises:
        AlgorithmError: a rule is broken; the message names the rule and the expected result. Or ``algorithm`` is not an
            ``Algorithm``, for example a class.

    Cost: about 50 rounds of 6 clients and 70 parameters: a tenth of a second.

    >>> from fedcore.algorithms import MIFA
    >>> check_algorithm(MIFA())
    """
    if not isinstance(algorithm, Algorithm):
        raise AlgorithmError(
            f"algorithm={algorithm!r}: must be an object of a subclass of fedcore.algorithms.Algorithm, such as MIFA()"
        )
    check_table(algorithm)
    with tempfile.TemporaryDirectory(prefix="fedcore-check-") as folder:
        for number, rule in enumerate(RULES):
            rule(Case(algorithm, Path(folder) / str(number)))


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise AlgorithmError if a server optimizer breaks a rule that all of fedcore's optimizers follow.

    The optimizer runs with ``FedAvg`` on a small server. Test its formula yourself. The rules:

    * its options and its pickle describe it;
    * ``start``, ``rate`` and ``turn`` depend only on their arguments and its options;
    * ``turn`` writes all of x' and of each moment, only finite numbers, and does not write to its inputs;
    * with ``elementwise``, parts of the vectors give the bits of whole vectors;
    * an aborted round or a rejected update changes nothing;
    * a server that was saved and loaded, or resumed from its folder, continues with the same bits.

    Raises:
        AlgorithmError: a rule is broken; the message names the rule and the expected result.

    Cost: about 30 rounds of 6 clients and 70 parameters.

    >>> from fedcore.algorithms.optimizers import Adam
    >>> check_optimizer(Adam())
    """
    if isclass(optimizer) or not (hasattr(optimizer, "start") and hasattr(optimizer, "turn")):
        raise AlgorithmError(f"optimizer={optimizer!r}: must be an object with the methods start and turn")
    with tempfile.TemporaryDirectory(prefix="fedcore-check-") as folder:
        for number, rule in enumerate(OPTIMIZER_RULES):
            rule(Case(FedAvg(), Path(folder) / str(number), optimizer))


@dataclass
class Case:
    """An algorithm under test, or an optimizer, and a folder for its servers."""

    algorithm: Algorithm
    folder: Path
    optimizer: Any = None

    @property
    def tested(self) -> Any:
        """The object under test."""
        return self.algorithm if self.optimizer is None else self.optimizer

    def server(self, **options: Any) -> Server:
        """Return a new server with N clients."""
        x0, rate = np.linspace(-1, 1, n, dtype=np.float32), Exponential(0.1, 0.9)
        return Server(x0, self.algorithm, {i: 1 + i for i in range(N)}, lr=rate, optimizer=self.optimizer, **options)

    def expect(self, right: bool, expected: str, got: str) -> None:
        """Raise AlgorithmError unless the result is right."""
        if not right:
            raise AlgorithmError(f"{self.tested!r}: expected {expected}, got {got}")


def cohort_of(t: int) -> list[int]:
    """Return the clients of round t: none, all, or some."""
    return [[], list(range(N)), [4], [0, 2, 3], [1, 3, 5], [0, 1, 2, 4]][t % 6]


def updates_of(server: Server, cohort: Iterable[int]) -> list[Update]:
    """Return updates that depend only on the broadcast, the client and the round."""
    sent, updates = server.broadcast(list(cohort)), []
    for i in sent.ids:
        rng = np.random.default_rng([server.round_number, int(i)])
        y = sent.x * np.float32(0.9) + rng.normal(size=n).astype(np.float32) - sent.offset(i)
        control = rng.normal(size=n).astype(np.float32) if sent.second else None
        steps = min(1 + int(i) % STEPS, server.algorithm.most_steps or STEPS)
        updates.append(Update(i, y, steps=steps, examples=1 + int(i), control=control))
    return updates


def run_rounds(server: Server, rounds: int = ROUNDS) -> Server:
    """Run some rounds, and return the server."""
    for _ in range(rounds):
        server.round(updates_of(server, cohort_of(server.round_number)))
    return server


def state_of(server: Server) -> tuple[bytes, ...]:
    """Return the state of a method as bytes."""
    total = server._backend.snapshot.total
    rows = [server.store.read(i).tobytes() for i in server.clients]
    moments = [moment.tobytes() for moment in server._backend.snapshot.moments]
    return server.x.tobytes(), server.v.tobytes(), b"" if total is None else total.tobytes(), *moments, *rows


def _pickles(case: Case) -> None:
    what = "algorithm" if case.optimizer is None else "optimizer"
    try:
        copy = pickle.loads(pickle.dumps(case.tested))
    except Exception as error:
        raise AlgorithmError(f"{case.tested!r}: it cannot be pickled for workers: {error}") from error
    one, other = describe(what, case.tested), describe(what, copy)
    case.expect(one == other, f"a pickle with the same options, {one}", str(other))


def _repeats(case: Case) -> None:
    one, other = run_rounds(case.server()), run_rounds(case.server())
    right = state_of(one) == state_of(other)
    case.expect(right, "the same bits from the same updates", "different bits in a second run")


def _ignores_batches(case: Case) -> None:
    servers = [case.server(compute=Compute(batch_size=size)) for size in (None, 1, 2)]
    for t in range(ROUNDS):
        updates = updates_of(servers[0], cohort_of(t))
        servers[0].round(updates)
        for server in servers[1:]:
            with server.open_round() as opened:
                for update in updates:
                    opened.add_batch([update])
        right = len(set(map(state_of, servers))) == 1
        case.expect(right, "the same bits from updates one by one and all at once", f"different bits in round {t}")


def _rolls_back(case: Case) -> None:
    server, other = run_rounds(case.server(), 3), run_rounds(case.server(), 3)
    before, updates = state_of(server), updates_of(server, range(N))
    with server.open_round() as opened:
        for update in updates:
            opened.add_batch([update])
        opened.abort()
    case.expect(state_of(server) == before, "the state before the aborted round", "a different state")
    invalid = updates[1]._replace(value=np.full(n, np.nan, np.float32))
    report = server.round([updates[0], invalid, *updates[2:]])
    other.round([updates[0], *updates[2:]])
    case.expect([i for i, _ in report.rejected] == [1], "client 1's NaN to be rejected", str(report.rejected))
    right = state_of(server) == state_of(other)
    case.expect(right, "the bits of a round without the rejected update", "different bits")


def _resumes(case: Case) -> None:
    straight = state_of(run_rounds(case.server()))
    for name in ("saved", "resumed"):
        path = case.folder / name
        server = run_rounds(case.server(storage=None if name == "saved" else path), 3)
        if name == "saved":
            path.parent.mkdir(exist_ok=True)
            server.save(path)
        server.close()
        with Server.load(path, algorithm=case.algorithm, optimizer=case.optimizer) as loaded:
            right = state_of(run_rounds(loaded, ROUNDS - 3)) == straight
            case.expect(right, "the bits of an uninterrupted run", f"different bits after the server was {name}")


def _sums_rows(case: Case) -> None:
    if not case.algorithm.total_sums_rows:
        return
    server = run_rounds(case.server())
    server.remove_client(2)
    part = server.correction if case.algorithm.keeps_history else server.store.read
    sum = np.sum([part(i) for i in server.clients], axis=0, dtype=np.float64)
    total = server._backend.snapshot.total
    assert total is not None
    error = float(np.abs(total - sum).max())
    case.expect(error <= 1e-6 * (1 + np.abs(sum).max()), "T to equal the sum of the rows", f"a difference of {error:g}")


def _measures_diversity(case: Case) -> None:
    server = case.server(compute=Compute(diagnostics=True))
    for t in range(ROUNDS):
        sent, updates = server.broadcast(cohort_of(t)), updates_of(server, cohort_of(t))
        report = server.round(updates)
        if report.diversity is not None:
            diversity = _diversity(server, sent.x.astype(np.float64), sent.lr, updates, report.weights)
            right = bool(np.isclose(report.diversity, diversity, rtol=1e-3))
            case.expect(right, f"a diversity of {diversity:g} in round {t}, or None", f"{report.diversity:g}")


def _diversity(server: Server, x: F64, lr: float, updates: list[Update], w: F64) -> float:
    unit = np.array([1 if server.averages_models else lr * u.steps for u in updates])
    h = np.array([x - u.value for u in updates]) / unit[:, None]
    return float(w @ np.sum(h * h, axis=1) * w.sum() / np.sum((w @ h) ** 2))


def _travels(case: Case) -> None:
    if case.algorithm.own_starts:  # messages cannot carry a client's start
        return
    server = run_rounds(case.server(), 3)
    for i in range(N):
        sent = server.broadcast([i]).of(i)
        read = Instructions.read(sent.numbers(), sent.vectors())
        case.expect(read == sent, f"{sent} at client {i}", f"{read}")


def _turns(case: Case) -> None:
    rng = np.random.default_rng(0)
    optimizer, x = case.optimizer, rng.normal(size=n).astype(np.float32)
    for round in range(3):
        gamma = optimizers.rate_of(optimizer, round) or 0.5
        case.expect(gamma == (optimizers.rate_of(optimizer, round) or 0.5), "a rate of the round", "different rates")
    moments = optimizers.started(optimizer, n)
    for _ in range(3):
        v = rng.normal(size=n).astype(np.float32)
        whole = _turned(optimizer, v, moments, x, gamma)
        case.expect(_bits(whole) == _bits(_turned(optimizer, v, moments, x, gamma)), "the same bits", "different bits")
        finite = all(np.isfinite(vector).all() for vector in whole)
        case.expect(finite, "all numbers of x' and of the moments to be written and finite", "NaN or infinity")
        if getattr(optimizer, "elementwise", False):
            cuts = [slice(0, 1), slice(1, n // 2), slice(n // 2, n)]
            parts = [_turned(optimizer, v[cut], [m[cut] for m in moments], x[cut], gamma) for cut in cuts]
            joined = [np.concatenate(vectors) for vectors in zip(*parts, strict=True)]
            case.expect(_bits(joined) == _bits(whole), "parts with the bits of whole vectors", "different bits")
            one = optimizers.started(optimizer, 1)
            same = all(
                (moment == start).all() for moment, start in zip(optimizers.started(optimizer, n), one, strict=True)
            )
            case.expect(same, "moments that start with equal elements", "different elements")
        x, moments = whole[0], tuple(whole[1:])


def _turned(optimizer: Any, v: F32, moments: Iterable[F32], x: F32, gamma: float) -> list[F32]:
    """Return x' and the next moments; NaN where the optimizer writes nothing."""
    given = tuple(np.array(moment) for moment in moments)
    outs = [np.full(len(v), np.nan, np.float32) for _ in (x, *given)]
    optimizers.turn(optimizer, v, given, x, gamma=gamma, moments_out=tuple(outs[1:]), x_out=outs[0])
    return outs


def _bits(vectors: Iterable[F32]) -> list[bytes]:
    return [vector.tobytes() for vector in vectors]


OPTIMIZER_RULES: list[Callable[[Case], None]] = [_pickles, _turns, _repeats, _rolls_back, _resumes]
RULES: list[Callable[[Case], None]] = [
    _pickles,
    _repeats,
    _ignores_batches,
    _rolls_back,
    _resumes,
    _sums_rows,
    _measures_diversity,
    _travels,
]
