"""The contract of aggregation rules."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.errors import FedcoreError
from fedcore.options import Compute
from fedcore.rules import ClipToMedian, Rule
from fedcore.server import Report, Server, Update
from fedcore.testing.contract import Contract, require, same
from fedcore.testing.rounds import by_adding, look

K, n = 11, 70


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
