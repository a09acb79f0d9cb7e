"""The contracts of algorithms, server optimizers and aggregation rules."""

import pickle
from collections.abc import Iterable, Sequence
from inspect import isclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.algorithms import Algorithm, FedAvg, check_table, optimizers
from fedcore.algorithms.optimizers import Optimizer
from fedcore.algorithms.rates import Exponential
from fedcore.arrays import F32, F64
from fedcore.errors import AlgorithmError, FedcoreError
from fedcore.options import Compute, describe
from fedcore.rules import ClipToMedian, Rule
from fedcore.server import Report, Server, Update
from fedcore.server.broadcast import Instructions
from fedcore.testing.contract import Contract, check, require, same
from fedcore.testing.rounds import N, by_adding, cohort_of, look, run_rounds, updates_of

n, ROUNDS = 70, 6
K = 11  # clients of the rule's server


class AlgorithmContract(Contract):
    """The rules that all algorithms and server optimizers of fedcore follow, on a small server without training.

    Override ``make_algorithm`` or ``make_optimizer``. Test the formula against the paper yourself. The rules:

    * coefficients do not contradict each other, and the options and the pickle describe the object;
    * ``weigh`` and ``step``, or ``start``, ``rate`` and ``turn``, depend only on their arguments and the options;
    * updates added one by one, in batches, or all at once give the same bits;
    * an aborted round or a rejected update changes nothing, and rounds may be empty, or have only weights of zero;
    * a server that was saved and loaded, or resumed from its folder, continues with the same bits;
    * T is the sum of the rows, even after a client was removed, if the method declares it;
    * the gradient diversity in a report is correct, or None;
    * a message preserves the instructions to clients;
    * ``turn`` writes all of x' and of each moment, only finite numbers, and does not write to its inputs;
    * with ``elementwise``, parts of the vectors give the bits of whole vectors.
    """

    def make_algorithm(self) -> Algorithm:
        """Return the algorithm. Default: ``FedAvg()``, to test an optimizer."""
        return FedAvg()

    def make_optimizer(self) -> Optimizer | None:
        """Return the server optimizer. Default: none."""
        return None

    def server(self, **options: Any) -> Server:
        """Return a new server with six clients."""
        x0, sizes = np.linspace(-1, 1, n, dtype=np.float32), {i: 1 + i for i in range(N)}
        how: dict[str, Any] = {"lr": Exponential(0.1, 0.9), "optimizer": self.make_optimizer()}
        return Server(x0, self.make_algorithm(), sizes, **how, **options)

    def test_the_table_is_consistent_and_pickles(self) -> None:
        """Coefficients agree, and workers get the object by its pickle (docs/own-method.md, "The table")."""
        check_table(self.make_algorithm())
        for what, tested in (("algorithm", self.make_algorithm()), ("optimizer", self.make_optimizer())):
            if tested is not None:
                try:
                    copy = pickle.loads(pickle.dumps(tested))
                except Exception as error:
                    raise AssertionError(f"{what}: it cannot be pickled for workers: {error}") from error
                same(describe(what, copy), describe(what, tested), f"the pickled {what}, a frozen dataclass")

    def test_turn(self) -> None:
        """``turn`` depends only on its arguments, and writes all its outputs (docs/own-method.md)."""
        if (optimizer := self.make_optimizer()) is None:
            return
        rng = np.random.default_rng(0)
        x = rng.normal(size=n).astype(np.float32)
        for t in range(3):
            gamma = optimizers.rate_of(optimizer, t) or 0.5
            same(optimizers.rate_of(optimizer, t) or 0.5, gamma, "rate of the round, asked again")
        moments = optimizers.started(optimizer, n)
        for _ in range(3):
            v = rng.normal(size=n).astype(np.float32)
            whole = _turned(optimizer, v, moments, x, gamma)
            same(_turned(optimizer, v, moments, x, gamma), whole, "same bits of turn")
            finite = all(np.isfinite(vector).all() for vector in whole.values())
            require(finite, "all numbers of x' and of the moments to be written and finite", "NaN or infinity")
            if getattr(optimizer, "elementwise", False):
                cuts = [slice(0, 1), slice(1, n // 2), slice(n // 2, n)]
                parts = [_turned(optimizer, v[cut], [m[cut] for m in moments], x[cut], gamma) for cut in cuts]
                same({k: np.concatenate([part[k] for part in parts]) for k in whole}, whole, "parts of the vectors")
                starts = zip(optimizers.started(optimizer, n), optimizers.started(optimizer, 1), strict=True)
                require(all((moment == one).all() for moment, one in starts), "moments of equal elements", "others")
            x, *following = whole.values()
            moments = tuple(following)

    def test_the_same_updates_give_the_same_bits(self) -> None:
        """The same updates give the same bits (docs/design.md, "Guarantees")."""
        same(look(run_rounds(self.server(), ROUNDS)), look(run_rounds(self.server(), ROUNDS)), "same updates again")

    def test_batches_do_not_matter(self) -> None:
        """Updates one by one and all at once give the same bits (docs/design.md, "Principles")."""
        servers = [self.server(compute=Compute(batch_size=size)) for size in (None, 1, 2)]
        for t in range(ROUNDS):
            updates = updates_of(servers[0], cohort_of(t))
            servers[0].round(updates)
            for server in servers[1:]:
                by_adding(server, updates)
                same(look(server), look(servers[0]), f"updates one by one in round {t}")

    def test_aborted_rounds_and_rejected_updates_change_nothing(self) -> None:
        """An aborted round or a rejected update leaves no trace (docs/design.md, "Guarantees")."""
        server, other = run_rounds(self.server(), 3), run_rounds(self.server(), 3)
        before, updates = look(server), updates_of(server, range(N))
        with server.open_round() as opened:
            opened.add_batch(updates)
            opened.abort()
        same(look(server), before, "server after an aborted round")
        report = server.round([updates[0], updates[1]._replace(value=np.full(n, np.nan, np.float32)), *updates[2:]])
        other.round([updates[0], *updates[2:]])
        same([client for client, _ in report.rejected], [1], "clients rejected for a NaN")
        same(look(server), look(other), "round without the rejected update")

    def test_updates_of_weight_zero(self) -> None:
        """A round in which all weights are zero ends like others (``Algorithm.step``)."""
        server = run_rounds(self.server(), 2)
        if server.algorithm.weighs_claims:
            report = server.round([update._replace(weight=0.0) for update in updates_of(server, range(N))])
            same(sorted(report.accepted), list(range(N)), "clients accepted with a weight of zero")

    def test_servers_resume(self, tmp_path: Path) -> None:
        """A saved or closed server continues with the same bits (docs/state.md)."""
        straight = look(run_rounds(self.server(), ROUNDS + 1))
        for name in ("saved", "resumed"):
            server = run_rounds(self.server(storage=None if name == "saved" else tmp_path / name), 3)
            if name == "saved":
                server.save(tmp_path / name)
            server.close()
            mine: dict[str, Any] = {"algorithm": self.make_algorithm(), "optimizer": self.make_optimizer()}
            with Server.load(tmp_path / name, **mine) as loaded:
                same(look(run_rounds(loaded, ROUNDS - 2)), straight, f"{name} server")

    def test_the_total_is_the_sum_of_the_rows(self) -> None:
        """With ``total_sums_rows``, T equals the sum of the rows (docs/own-method.md, "Five lines: FedVARP")."""
        if not self.make_algorithm().total_sums_rows:
            return
        server = run_rounds(self.server(), ROUNDS)
        server.remove_client(2)
        part = server.correction if server.algorithm.keeps_history else server.row
        rows = np.sum([part(i) for i in server.clients], axis=0, dtype=np.float64)
        error = float(np.abs(np.asarray(server.total()) - rows).max())
        require(error <= 1e-6 * (1 + np.abs(rows).max()), "T to equal the sum of the rows", f"a difference of {error}")

    def test_diversity(self) -> None:
        """The diversity in a report is correct, or None (``fedcore.Report``)."""
        server = self.server(compute=Compute(diagnostics=True))
        for t in range(ROUNDS):
            sent, updates = server.broadcast(cohort_of(t)), updates_of(server, cohort_of(t))
            report = server.round(updates)
            if report.diversity is not None:
                due = _diversity(server, sent.x.astype(np.float64), sent.lr, updates, report.weights)
                require(np.isclose(report.diversity, due, rtol=1e-3), f"a diversity of {due:g}", report.diversity)

    def test_instructions_travel(self) -> None:
        """A message preserves the instructions to a client (``fedcore.server.broadcast.Instructions``)."""
        if self.make_algorithm().own_starts:  # messages cannot carry a client's start
            return
        server = run_rounds(self.server(), 3)
        for i in range(N):
            sent = server.broadcast([i]).of(i)
            read = Instructions.read(sent.numbers(), sent.vectors())
            require(read == sent, f"{sent} at client {i}", f"{read}")


def check_algorithm(algorithm: Algorithm) -> None:
    """Run the tests of ``AlgorithmContract`` on an algorithm.

    Raises:
        AlgorithmError: a rule is broken; the message names the rule and the expected result. Or ``algorithm`` is not an
            ``Algorithm``, for example a class.

    Cost: about 60 rounds of 6 clients and 70 parameters: a tenth of a second.

    >>> from fedcore.algorithms import MIFA
    >>> check_algorithm(MIFA())
    """
    if not isinstance(algorithm, Algorithm):
        raise AlgorithmError(
            f"algorithm={algorithm!r}: must be an object of a subclass of fedcore.algorithms.Algorithm, such as MIFA()"
        )
    _check(algorithm, make_algorithm=lambda self: algorithm)


def check_optimizer(optimizer: Optimizer) -> None:
    """Run the tests of ``AlgorithmContract`` on a server optimizer, with ``FedAvg``.

    Raises:
        AlgorithmError: a rule is broken; the message names the rule and the expected result.

    >>> from fedcore.algorithms.optimizers import Adam
    >>> check_optimizer(Adam())
    """
    if isclass(optimizer) or not (hasattr(optimizer, "start") and hasattr(optimizer, "turn")):
        raise AlgorithmError(f"optimizer={optimizer!r}: must be an object with the methods start and turn")
    _check(optimizer, make_optimizer=lambda self: optimizer)


def _check(tested: Any, **methods: Any) -> None:
    try:
        check(type("Given", (AlgorithmContract,), methods))
    except AssertionError as error:
        raise AlgorithmError(f"{tested!r}: {error}") from error


def _diversity(server: Server, x: F64, lr: float, updates: list[Update], w: F64) -> float:
    unit = np.array([1 if server.averages_models else lr * u.steps for u in updates])
    h = np.array([x - np.asarray(u.value) for u in updates]) / unit[:, None]
    return float(w @ np.sum(h * h, axis=1) * w.sum() / np.sum((w @ h) ** 2))


def _turned(optimizer: Any, v: F32, moments: Iterable[F32], x: F32, gamma: float) -> dict[str, F32]:
    """Return x' and the next moments; NaN where the optimizer writes nothing."""
    given = tuple(np.array(moment) for moment in moments)
    outs = [np.full(len(v), np.nan, np.float32) for _ in (x, *given)]
    optimizers.turn(optimizer, v, given, x, gamma=gamma, outs=tuple(outs))
    return {"x'": outs[0]} | {f"moment {k}": moment for k, moment in enumerate(outs[1:])}


class RuleContract(Contract):
    """The promises of a rule of the chain or a robust rule, tested on a small server with FedAvg.

    Override ``make_rule``; if the rule rejects updates, also ``make_rejected``. The promises:

    * decisions and the result do not depend on how updates arrive; nor on their order, unless the rule reads medians;
    * the rule changes neither the updates nor itself, and its pickle is equal;
    * no updates, one, equal ones, zeros and very long ones: the round finishes with finite numbers, or raises a
      FedcoreError and changes nothing; equal updates have equal factors;
    * a server that was saved and loaded continues with the same bits, medians included;
    * a rejected client is listed with a reason, and the result is that of the others.
    """

    def make_rule(self) -> Rule:
        """Return the rule, an object of a frozen dataclass. Default: ``ClipToMedian()``."""
        return ClipToMedian()

    def make_rejected(self, update: Update) -> Update | None:
        """Return the update, changed so that the rule rejects it. Default: None, the rule rejects nothing."""
        return None

    def server(self, **options: Any) -> Server:
        """Return a server of the rule; its sums are exact, so that their order has no effect."""
        how: dict[str, Any] = {"aggregation": [self.make_rule()], "compute": Compute(accumulator="exact")} | options
        try:
            return Server(np.linspace(-1, 1, n, dtype=np.float32), "FedAvg", K, lr=0.1, **how)
        except FedcoreError:  # robust rules hold the updates, and have no exact sums
            return Server(np.linspace(-1, 1, n, dtype=np.float32), "FedAvg", K, lr=0.1, **how | {"compute": Compute()})

    def updates(self, server: Server, clients: Sequence[int] = range(K)) -> list[Update]:
        """Return updates of very different lengths, steps and examples."""
        t, x, updates = server.round_number, server.x, []
        for i in clients:
            step = np.random.default_rng([t, i]).normal(size=n).astype(np.float32) * np.float32(2.0 ** (i % 5))
            updates.append(Update(i, x + step, steps=1 + i % 4, examples=1 + i * i))
        return updates

    def same(self, server: Server, other: Server, got: Report, due: Report, what: str) -> None:
        """Require that servers and their reports are equal, but for the order of the clients."""
        shown = []
        for report in (got, due):
            order = np.argsort(report.accepted)
            names = ("norms", "weights", "factors") if report.privacy is None else ()
            measured = {name: getattr(report, name)[order] for name in names}
            shown.append({"accepted": sorted(report.accepted), "gamma": report.gamma, **measured})
        same(shown[0], shown[1], f"report of {what}")
        same(look(server), look(other), f"server after {what}")

    def test_the_order_of_updates_does_not_matter(self) -> None:
        """A rule sees a cohort and no order, unless it reads medians of earlier updates (docs/robust-rules.md)."""
        if not self.make_rule().needs & {"medians", "examples", "steps"}:
            for t, (one, other) in enumerate([(self.server(), self.server())] * 4):
                updates = self.updates(one)
                due = one.round(updates)
                got = other.round([updates[i] for i in np.random.default_rng(t).permutation(K)])
                self.same(other, one, got, due, f"another order in round {t}")

    def test_batches_do_not_matter(self) -> None:
        """Updates one by one and all at once give the same bits (docs/design.md, "Principles")."""
        for t, (one, other) in enumerate([(self.server(), self.server())] * 4):
            updates = self.updates(one)
            due, got = one.round(updates), by_adding(other, updates)
            self.same(other, one, got, due, f"updates one by one in round {t}")

    def test_nothing_is_altered(self) -> None:
        """A rule changes neither the updates nor itself; workers and folders get it by its fields (``Rule``)."""
        rule = self.make_rule()
        server, before = self.server(aggregation=[rule]), pickle.dumps(rule)
        for _ in range(3):
            updates = self.updates(server)
            values = [update.value.tobytes() for update in updates]
            server.round(updates)
            same([update.value.tobytes() for update in updates], values, "values of the updates")
        same(pickle.dumps(rule), before, "pickle of the rule")
        require(pickle.loads(before) == rule == self.make_rule(), f"an equal rule, {rule!r}", pickle.loads(before))

    def test_extremes(self) -> None:
        """A round ends with finite numbers, or by an error that changes nothing (docs/design.md, "Guarantees")."""
        start = np.array(self.server().x)
        unequal = start[None] + np.random.default_rng(0).normal(size=(K, n)).astype(np.float32)
        cases = {
            "no update": unequal[:0],
            "one update": unequal[:1],
            "two updates": unequal[:2],
            "equal updates": np.repeat(unequal[:1], K, axis=0),
            "zeros": np.repeat(start[None], K, axis=0),
            "a long one": unequal * np.where(np.arange(K) == 3, np.float32(1e15), np.float32(1))[:, None],
            "short ones": start[None] + (unequal - start) * np.float32(1e-30),
        }
        for name, values in cases.items():
            server = self.server()
            if name != "no update":
                server.round([])
            before = look(server)
            try:
                report = server.round([Update(i, value, 2, examples=3) for i, value in enumerate(values)])
            except FedcoreError:
                same(look(server), before, f"server after an error for {name}")
                continue
            require(np.isfinite(server.x).all(), f"finite numbers after {name}", server.x)
            factors = np.asarray(report.factors)
            require(((factors >= 0) & (factors <= 1)).all(), f"factors in [0, 1] for {name}", factors)
            if name in ("equal updates", "zeros"):
                require(len(report.accepted) in (0, K) and len(set(factors)) <= 1, f"one decision for {name}", report)

    def test_servers_resume(self, tmp_path: Path) -> None:
        """A saved server continues with the same bits, and has the same rule (docs/state.md)."""
        straight, server = self.server(), self.server()
        for t in range(6):
            if t == 3:
                server.save(tmp_path / "s")
                server = Server.load(tmp_path / "s", aggregation=[self.make_rule()])
                same(server.aggregation, straight.aggregation, "rules of the loaded server")
            updates = self.updates(straight)
            self.same(server, straight, server.round(updates), straight.round(updates), f"round {t}")

    def test_rejected_clients_are_named(self) -> None:
        """A rejected client is listed with a reason, and the result is that of the others (docs/trust.md)."""
        server, other = self.server(), self.server()
        for one in (server, other):
            one.round(self.updates(one))
        updates = self.updates(server)
        if (wrong := self.make_rejected(updates[4])) is not None:
            report = server.round([*updates[:4], wrong, *updates[5:]])
            due, reasons = other.round([*updates[:4], *updates[5:]]), dict(report.rejected)
            same({*reasons}, {4, *dict(due.rejected)}, "rejected clients")
            require(reasons[4], "a reason", "none")
            self.same(server, other, report, due, "a rejected update")
