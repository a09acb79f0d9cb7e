"""The contract of adapters to other frameworks."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedcore.algorithms import Algorithm
from fedcore.arrays import to_host
from fedcore.errors import CheckpointError
from fedcore.server import Report, Server, Update
from fedcore.testing.contract import Contract, raises, require, same

LR, STEPS = 0.1, 5
MODEL = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
Work = Callable[..., Update | None]
"""``work(round, i, sent, task)``: client i's update of the model ``sent``, by name, or None for no answer."""


def honest(t: int, i: int, sent: Mapping[str, Any], task: Any = None) -> Update:
    """Return client i's update, a function of the round."""
    rng = np.random.default_rng([t, i])
    y = {name: sent[name] + rng.normal(size=x.shape).astype(np.float32) for name, x in MODEL.items()}
    control = np.full(10, 0.5 + i, np.float32) if getattr(task, "second", False) else None
    return Update(i, y, steps=STEPS, examples=1, control=control)


def _with(change: Callable[[Any], Any]) -> Callable[[Update], Update]:
    return lambda update: update._replace(value={**update.value, "w": change(update.value["w"])})


Lies = Mapping[str, tuple[Callable[[Update], Update], str | None, str | None]]
LIES: Lies = {
    "steps below 0": (lambda update: update._replace(steps=-3), "steps", "steps"),
    "no step": (lambda update: update._replace(steps=0), "steps", "steps"),
    "too many steps": (lambda update: update._replace(steps=10**15), "steps", "steps"),
    "examples below 0": (lambda update: update._replace(examples=-1), "examples", "examples"),
    "no example": (lambda update: update._replace(examples=0), "examples", None),
    "too many examples": (lambda update: update._replace(examples=10**18), "examples", "examples"),
    "a rate of NaN": (lambda update: update._replace(lr=float("nan")), "rate", "lr"),
    "NaN": (_with(lambda y: y * np.float32("nan")), None, "update"),
    "infinity": (_with(lambda y: np.full_like(y, np.inf)), None, "update"),
    "shape": (_with(lambda y: y[:, :-1]), None, None),
    "dtype": (_with(lambda y: y.astype(np.complex64)), None, None),
    "integers": (_with(lambda y: y.astype(np.int32)), "names", None),
    "a tensor is missing": (lambda update: update._replace(value={"w": update.value["w"]}), None, None),
    "other names": (lambda update: update._replace(value={f"x{k}": v for k, v in update.value.items()}), "names", None),
}
"""By name: the change of an honest update, the claim that the framework must carry, the argument in the reason."""


class AdapterContract(Contract):
    """A framework with your adapter gives the results of a ``fedcore.Server`` alone, and keeps its guarantees.

    Override ``run``, which runs the framework with clients that are functions, and ``ids`` if the framework has its own
    ids of clients. The promises:

    * rounds have the bits of the server alone, also if clients miss rounds or come later;
    * FedAvg is the framework's own average, weighted by examples, to 1e-6;
    * an invalid reply is rejected by its client, and the result is that of the others;
    * a client without an accepted reply is not registered;
    * a later run resumes after the last finished round, and refuses another method or model.

    Attributes:
        kind: the kind of a client's value.
        carries: the claims that a message has, of "steps", "examples", "rate" and "names" (of tensors).
        registers_all: whether clients are registered at the start, and not with their first accepted reply.
    """

    kind: Any = "model"
    carries: Collection[str] = frozenset({"steps", "examples", "rate", "names"})
    registers_all = False
    algorithms: ClassVar[Mapping[str, Algorithm | str]] = {name: name for name in ("FedAvg", "MIFA", "MimiC")}

    def ids(self, n: int) -> Sequence[Any]:
        """Return the ids of n clients, as the server gets them."""
        return [f"client-{i}" for i in range(n)]

    def run(
        self, algorithm: Algorithm | str, work: Work, *, n: int, rounds: int, x0: Mapping[str, Any], **options: Any
    ) -> tuple[Server, Sequence[Report], Mapping[str, Any]]:
        """Run the framework until ``rounds`` rounds are done, at the rate ``LR``.

        Args:
            algorithm, options: of the adapter; ``storage`` is the folder of a run that may resume.
            work: the clients; see ``Work``.
            n: the number of clients.
            x0: the first model.

        Returns:
            The adapter's server, its reports, and the framework's model by name.
        """
        raise NotImplementedError("run: override it in your class")

    def test_rounds_have_the_bits_of_the_server_alone(self, algorithm: Any) -> None:
        """The adapter adds nothing to the server: same model, rows and clients (docs/other-frameworks.md)."""
        missing = ((0, 2), (2, 0))  # a client joins with its first answer, and one misses a round
        work = lambda t, i, *sent: None if (t, i) in missing else honest(t, i, *sent)  # noqa: E731
        server, reports, model = self.run(algorithm, work, n=3, rounds=4, x0=MODEL)
        ids = self.ids(3)
        answered = [{*ids[:2]}, {*ids}, {*ids[1:]}, {*ids}]
        same([set(report.accepted) for report in reports], answered, "clients of the rounds")
        self.same_as_alone(server, algorithm, reports, n=3)
        same(np.concatenate([np.ravel(model[name]) for name in MODEL]), np.array(to_host(server.x)), "model")

    def test_the_average_is_weighted_by_examples(self) -> None:
        """FedAvg is the framework's own average of the models, weighted by examples (docs/other-frameworks.md)."""
        if "examples" not in self.carries:
            return
        work = lambda t, i, *sent: honest(t, i, *sent)._replace(examples=1 + 3 * i)  # noqa: E731
        _, _, model = self.run("FedAvg", work, n=3, rounds=1, x0=MODEL)
        for name in MODEL:
            due = np.average([honest(0, i, MODEL).value[name] for i in range(3)], axis=0, weights=[1, 4, 7])
            require(np.allclose(model[name], due, rtol=1e-6, atol=1e-6), f"{name}: {due}", model[name])

    def test_invalid_replies_are_rejected(self) -> None:
        """An invalid reply is rejected by its client, and the result is that of the others (docs/trust.md)."""
        lies = [lie for lie in LIES.values() if lie[1] is None or lie[1] in self.carries]
        n = len(lies) + 2

        def work(t: int, i: int, sent: Mapping[str, Any], task: Any) -> Update:
            update = honest(t, i, sent, task)
            return lies[i - 1][0](update) if 1 <= i <= len(lies) else update

        for algorithm in [*self.algorithms.values()][1:]:
            server, reports, _ = self.run(algorithm, work, n=n, rounds=2, x0=MODEL)
            ids = self.ids(n)
            for report in reports:
                same(set(report.accepted), {ids[0], ids[-1]}, "accepted clients")
                reasons = dict(report.rejected)
                same(set(reasons), set(ids[1:-1]), "rejected clients")
                for client, (_, _, argument) in zip(ids[1:], lies, strict=False):
                    named = argument is None or re.match(rf"{argument}\b", reasons[client])
                    require(named, f"a reason that names {argument}", reasons[client])
            self.same_as_alone(server, algorithm, reports, n=n)

    def test_a_client_without_an_accepted_reply_is_not_registered(self) -> None:
        """A newcomer is registered with its first accepted reply (docs/state.md)."""

        def work(t: int, i: int, sent: Mapping[str, Any], task: Any) -> Update | None:
            update = honest(t, i, sent, task)
            return [update, LIES["NaN"][0](update), None][i]

        server, reports, _ = self.run("MimiC", work, n=3, rounds=2, x0=MODEL)
        same([*server.clients], [*self.ids(3 if self.registers_all else 1)], "registered clients")
        same([report.accepted for report in reports], [tuple(self.ids(1))] * 2, "accepted clients")

    def test_a_later_run_resumes(self, tmp_path: Path) -> None:
        """A run with a folder resumes after the last finished round, with the same bits (docs/state.md)."""
        whole, _, model = self.run("MimiC", honest, n=3, rounds=4, x0=MODEL)
        for until in (2, 4):
            part, reports, end = self.run("MimiC", honest, n=3, rounds=until, x0=MODEL, storage=str(tmp_path / "rows"))
            part.close()
        same([report.round for report in reports], [2, 3], "rounds of the later run")
        same({k: np.array(end[k]) for k in MODEL}, {k: np.array(model[k]) for k in MODEL}, "model")
        with Server.load(tmp_path / "rows") as found:
            for client in self.ids(3):
                same(np.array(found.row(client)), np.array(whole.row(client)), f"row {client!r}")
        with raises(CheckpointError, "algorithm"):
            self.run("MIFA", honest, n=3, rounds=5, x0=MODEL, storage=str(tmp_path / "rows"))
        with raises(CheckpointError, "model"):
            short = {"w": np.zeros(5, np.float32)}
            answer = lambda t, i, sent, task: Update(i, {"w": sent["w"]}, 1, 1)  # noqa: E731
            self.run("MimiC", answer, n=3, rounds=5, x0=short, storage=str(tmp_path / "rows"))

    def alone(
        self, algorithm: Any, reports: Sequence[Report], *, n: int, work: Work = honest, **options: Any
    ) -> Server:
        """Return fedcore's own server, to which the accepted clients of these reports sent the same updates."""
        ids = self.ids(n)
        server = Server(MODEL, algorithm, ids if self.registers_all else [], lr=LR, **options)
        for report in reports:
            sent = server.layout.unflatten(server.x.copy())
            new = [client for client in ids if client not in server.clients]
            task = server.broadcast(ids, newcomers=new).of(ids[0])
            with server.open_round(newcomers=new) as opened:
                for client in report.accepted:
                    update = work(report.round, list(ids).index(client), sent, task)
                    assert update is not None
                    value = update.value
                    if self.kind == "delta":
                        value = {name: y - sent[name] for name, y in value.items()}
                    opened.add_batch([update._replace(client=client, value=value, kind=self.kind)])
        return server

    def same_as_alone(
        self, server: Server, algorithm: Any, reports: Sequence[Report], *, n: int, **options: Any
    ) -> None:
        """Require that a server equals the one of ``alone``: model, clients and rows."""
        due = self.alone(algorithm, reports, n=n, **options)
        same([*server.clients], [*due.clients], "clients")
        same(np.array(to_host(server.x)), due.x, "x")
        for client in due.clients:
            same(np.array(server.row(client)), due.row(client), f"row {client!r}")
