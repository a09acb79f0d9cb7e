"""The contract of servers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np

from fedcore.algorithms import Algorithm, named
from fedcore.algorithms.optimizers import Adam
from fedcore.algorithms.rates import Exponential
from fedcore.arrays import copy_into, to_host
from fedcore.errors import DivergedError, FedcoreError
from fedcore.options import Compute, Limits, RoundPolicy
from fedcore.rules import CapExamples, ClipToMedian, RejectLong, TrimmedMean
from fedcore.server import Report, Server, Update
from fedcore.testing.contract import Contract, require, same
from fedcore.testing.rounds import N, at_once, by_adding, by_batches, cohort_of, look, run_rounds, updates_of

SIZES = {i: 1 + i for i in range(N)}


def by_pieces(server: Server, updates: list[Update], newcomers: Any = ()) -> Report:
    """Run a round with ``Round.begin`` and ``Incoming.write``, in two parts of each tensor."""
    with server.open_round(newcomers=newcomers) as opened:
        for update in updates:
            claims = {name: getattr(update, name) for name in ("steps", "examples", "loss")}
            incoming = opened.begin(update.client, **claims)
            pieces = dict(server.layout.unflatten(update.value).items())
            for name, piece in (pieces if update.control is None else pieces | {"control": update.control}).items():
                flat = piece.reshape(-1)
                incoming.write(name, flat[7:], start=7)
                incoming.write(name, flat[:7])
            incoming.done()
        return opened.finish()


def by_buffers(server: Server, updates: list[Update], newcomers: Any = ()) -> Report:
    """Run a round with updates that are written to the server's own buffers."""
    with server.open_round(newcomers=newcomers) as opened:
        for update in updates:
            buffer = opened.buffer()
            copy_into(buffer, update.value)
            opened.add_batch([update._replace(value=buffer)])
            del buffer
        return opened.finish()


def with_errors(server: Server) -> list[Any]:
    """Return the errors of acts that a round with an update of client 3 does not allow, and finish the round."""
    third, fourth = updates_of(server, [3, 4])
    with server.open_round() as opened:
        opened.add(**third._asdict())
        acts: list[Callable[[Server], Any]] = [
            lambda _: opened.add(**third._replace(client="nobody")._asdict()),
            lambda _: opened.begin(3, steps=third.steps, loss=third.loss),
            lambda server: server.open_round(),
            lambda server: server.change(lr=0.2),
            lambda server: server.add_clients({"new": 1}),
            lambda server: server.remove_client(0),
            lambda server: server.warm_start({}),
            lambda server: server.push([]),
        ]
        errors = [_result(act, server) for act in acts]
    errors.append(_result(lambda _: opened.add(**fourth._asdict()), server))
    require(all(isinstance(error, tuple) for error in errors), "an error of each act", errors)
    return errors


class ServerContract(Contract):
    """Your server gives the bits of a plain ``fedcore.Server`` in memory, whatever happens to both.

    Override ``make_server``. For a server in a folder, override ``reopen`` too, and ``undo`` if it keeps the previous
    transaction. The promises:

    * rounds through every door (``add``, ``add_batch``, ``begin``, ``buffer``, ``round``, ``push``) have the same
      reports and bits, with absent clients, empty rounds and newcomers;
    * rejected updates, aborted and failed rounds, and errors of the caller leave no trace;
    * options, changes of options and of clients, and warm starts have the same effect;
    * copies, saved servers and reopened folders continue with the same bits, and an undone transaction leaves no trace;
    * results do not depend on the number of threads or, with exact sums, on the order of the updates.
    """

    algorithms: ClassVar[Mapping[str, Algorithm]] = {
        "FedAvg": named("FedAvg"),
        "FedExP": named("FedExP"),
        "FedAvgM": named("FedAvgM"),
        "MIFA": named("MIFA", wait=False),
        "MimiC": named("MimiC", history=2),
        "SCAFFOLD": named("SCAFFOLD"),
    }
    shapes: ClassVar[Mapping[str, tuple[int, ...]]] = {"w": (2, 16_384), "b": (1_000,)}  # at least three shards
    buffers: ClassVar[Sequence[tuple[Any, float]]] = ((None, 0.5), ("trimmed-mean", 0.0))
    """The rules and discounts of asynchronous servers."""
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "Adam": {"optimizer": Adam(), "server_lr": 0.5},
        "exact sums": {"compute": Compute(accumulator="exact")},
        "diagnostics": {"compute": Compute(diagnostics=True)},
        "limits": {"limits": Limits(max_steps=2), "aggregation": [CapExamples(1.5), ClipToMedian()]},
        "a robust rule": {"aggregation": [TrimmedMean(1)]},
        "late updates": {"policy": RoundPolicy(max_staleness=1)},
    }
    changes: ClassVar[Mapping[str, Callable[[Server], Any]]] = {
        "errors of the caller": with_errors,
        "a lower rate": lambda server: server.change(lr=0.05),
        "another x": lambda server: server.replace_x(np.array(to_host(server.x)) * np.float32(0.5)),
        "a wrong rate": lambda server: server.change(lr=0),
        "an unknown rule": lambda server: server.change(aggregation="medain"),
        "a short limit": lambda server: server.change(limits=Limits(max_norm=1.5)),
        "a long limit": lambda server: server.change(limits=Limits(max_norm=1e6)),
        "a rule": lambda server: server.change(aggregation=[RejectLong(1.01)]),
        "no rule": lambda server: server.change(aggregation=[]),
        "a policy": lambda server: server.change(policy=RoundPolicy(min_clients=1)),
        "new clients": lambda server: server.add_clients({"anna": 5, 7: 6}),
        "a client leaves": lambda server: server.remove_client(2),
        "a client that left": lambda server: server.remove_client(2),
        "a client that is there": lambda server: server.add_clients({"anna": 5}),
        "other sizes": lambda server: server.update_clients({0: 9, "anna": 2}),
        "a wrong size": lambda server: server.update_clients({0: 0}),
        "a client leaves, and its share stays": lambda server: server.remove_client("anna", from_objective=False),
    }
    doors: ClassVar[Mapping[str, Callable[..., Report]]] = {
        "add": by_adding,
        "add_batch": by_batches,
        "begin": by_pieces,
        "buffer": by_buffers,
        "round of a list": at_once,
        "round of an iterator": lambda server, updates: server.round(iter(updates)),
    }

    def make_server(self, folder: Path, model: Any, algorithm: Algorithm, clients: Any, **options: Any) -> Server:
        """Return your server, with the arguments of ``fedcore.Server``; ``folder`` does not exist yet."""
        return Server(model, algorithm, clients, **options)

    def make_plain(self, model: Any, algorithm: Algorithm, clients: Any, **options: Any) -> Server:
        """Return the plain server. Override it if your server has an option that changes bits, such as a codec."""
        return Server(model, algorithm, clients, **options)

    def reopen(self, server: Server, folder: Path) -> Server:
        """Close a server in a folder, and open it again. Default: the server, which is in memory."""
        return server

    def undo(self, server: Server, folder: Path) -> Server:
        """Close the server, undo its last transaction, and open it again. Default: skip the test."""
        raise SkipTest("the server does not keep its previous transaction")

    def seen(self, report: Report) -> Mapping[str, Any]:
        """Return what must be equal in reports. Default: all but the time, and the tensor that a rejection names."""
        rejected = tuple((client, reason.partition(", in ")[0]) for client, reason in report.rejected)
        return {**vars(report), "seconds": 0, "rejected": rejected}

    # The tests compare your server, the second of a pair, with the plain one.

    def pair(
        self, path: Path, algorithm: Algorithm, clients: Any = None, model: Any = None, **options: Any
    ) -> tuple[Server, Server]:
        """Return a plain server and yours."""
        rng = np.random.default_rng(7)
        drawn = {name: rng.normal(size=shape).astype(np.float32) for name, shape in self.shapes.items()}
        model, clients = drawn if model is None else model, SIZES if clients is None else clients
        options = {"lr": Exponential(0.1, 0.9)} | options
        plain = self.make_plain(model, algorithm, clients, **options)
        return plain, self.make_server(path / "server", model, algorithm, clients, **options)

    def both(self, pair: tuple[Server, Server], act: Callable[[Server], Any], what: str) -> Any:
        """Do the same with both servers; compare results, errors and servers; return the result of yours."""
        due, got = (_result(act, server) for server in pair)
        if isinstance(due, Report) and isinstance(got, Report):
            same(self.seen(got), self.seen(due), f"report of {what}")
        else:
            same(got, due, what)
        same(look(pair[1]), look(pair[0]), f"server after {what}")
        return got

    def rounds(self, pair: tuple[Server, Server], count: int, **options: Any) -> None:
        """Run rounds on both servers."""
        for _ in range(count):
            self.both(pair, lambda server: _round(server, **options), f"round {pair[0].round_number}")

    def test_doors(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """Updates one by one, in batches, in pieces or as a list give the same bits (docs/design.md, "Principles")."""
        pair = plain, own = self.pair(tmp_path, algorithm)
        for t in range(2):
            for name, door in self.doors.items():
                cohort = [] if name == "buffer" and t else cohort_of(1 + plain.round_number % 5)
                due = by_adding(plain, updates_of(plain, cohort))
                got = door(own, updates_of(own, cohort))
                same(self.seen(got), self.seen(due), f"report of {name}")
                same(look(own), look(plain), f"server after {name}")
        require(pair[0].round_number == 12, "12 rounds", pair[0].round_number)

    def test_rejected_updates(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """Invalid updates are rejected by name, and the result is that of the others (docs/trust.md)."""
        pair = self.pair(tmp_path, algorithm)

        def spoilt(door: Callable[..., Report], server: Server) -> Report:
            updates = updates_of(server, range(N))
            for update, at, value in zip(updates, (-5, 7, 9), (np.nan, 3e38, 1e33), strict=False):
                update.value[at] = value
            updates[3] = updates[3]._replace(steps=0)
            updates[4] = updates[4]._replace(value=updates[4].value[:-3])
            return door(server, updates)

        for number, door in enumerate((by_adding, at_once, by_adding)):
            report = self.both(pair, partial(spoilt, door), f"invalid updates {number}")
            require({4, 0} <= dict(report.rejected).keys(), "clients 0 and 4 to be rejected", report.rejected)

    def test_newcomers(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """A newcomer is registered with its first accepted update, else never (docs/state.md)."""
        pair = self.pair(tmp_path, algorithm)
        self.rounds(pair, 1)
        new = {"anna": 5, "bert": 2, "cleo": 9}

        def joining(server: Server) -> Report:
            updates = updates_of(server, [1, *list(new)[:2]], new)
            updates[2].value[0] = np.inf
            return by_batches(server, updates, new)

        self.both(pair, joining, "a round with newcomers")
        same([client for client in pair[1].clients if client in new], ["anna"], "registered newcomers")
        self.rounds(pair, 2)

    def test_failed_rounds(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """An aborted or dropped round, and an exception in it, leave no trace (docs/design.md, "Guarantees")."""
        pair = plain, own = self.pair(tmp_path, algorithm)
        self.rounds(pair, 3)
        for end in ("abort", "exception", "drop"):
            opened = own.open_round(newcomers={"anna": 5})
            opened.add_batch(updates_of(own, [0, "anna", 4], ["anna"]))
            if end == "abort":
                opened.abort()
            elif end == "exception":
                with suppress(ZeroDivisionError), opened:
                    raise ZeroDivisionError
            del opened
            same(look(own), look(plain), f"server after {end} of a round")
            self.rounds(pair, 1)

    def test_divergence(self, tmp_path: Path) -> None:
        """A step that is not finite raises DivergedError, and changes nothing (``Round.finish``)."""
        model = {name: np.zeros(shape, np.float32) for name, shape in self.shapes.items()}
        model["b"][-1] = np.finfo(np.float32).max
        pair = self.pair(tmp_path, named("FedAvg"), model=model, server_lr=1e4)

        def far(server: Server) -> Report:
            delta = np.zeros(server.layout.n, np.float32)
            delta[-1] = 5e28
            return by_adding(server, [Update(i, delta, 1, kind="delta") for i in range(2)])

        for _ in range(2):
            same(self.both(pair, far, "a step to infinity")[0], DivergedError, "error")
        self.both(pair, lambda server: server.round([]), "an empty round")

    def test_options(self, option: Mapping[str, Any], tmp_path: Path) -> None:
        """Options have the same effect on every server (docs/api/server.md)."""
        late = "policy" in option
        for number, algorithm in enumerate((named("FedAvg"), named("MIFA", wait=False))):
            if number == 0 or "aggregation" not in option:
                self.rounds(self.pair(tmp_path / str(number), algorithm, **option), 5, late=late, least=4 * (not late))

    def test_changes(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """Clients, options and the caller's errors have the same effect on every server (docs/state.md)."""
        pair = self.pair(tmp_path, algorithm)
        self.rounds(pair, 2)
        for name, act in self.changes.items():
            self.both(pair, act, name)
            self.rounds(pair, 1)

    def test_warm_start(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """A warm start has the same effect on every server (``Server.warm_start``)."""
        pair = self.pair(tmp_path, algorithm)
        gradients: Any = {i: np.random.default_rng(i).normal(size=len(pair[0].x)).astype(np.float32) for i in range(4)}
        for given in ({1: gradients[1] * np.float32("nan")}, gradients, gradients):
            self.both(pair, methodcaller("warm_start", gradients=given), "a warm start")
        self.rounds(pair, 3)

    def test_push(self, tmp_path: Path) -> None:
        """Asynchronous updates close a round at each K-th one, with the same bits (docs/asynchronous.md)."""
        for i, (rule, discount) in enumerate(self.buffers):
            policy = RoundPolicy(buffer=3, max_staleness=2, discount=discount)
            pair = self.pair(tmp_path / str(i), named("FedAvg"), policy=policy, aggregation=rule)
            for _ in range(3):
                start = max(0, pair[0].round_number - 1)
                some = [update._replace(round=start) for update in updates_of(pair[0], (3, 1, 1, 0, 4))]
                for got, due in zip(pair[1].push(some), pair[0].push(some), strict=True):
                    same(self.seen(got), self.seen(due), "report of push")
            same(look(pair[1]), look(pair[0]), "server after push")

    def test_copies(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """A deep copy is a separate server in memory (``copy.deepcopy``)."""
        plain, own = self.pair(tmp_path, algorithm)
        self.rounds((plain, own), 2)
        for step in (1, -1):
            changed, own = [own, copy.deepcopy(own)][::step]
            run_rounds(changed, 1)
            self.rounds((plain, own), 2)

    def test_saved_servers(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """A loaded copy continues with the same bits; the original does not change it (docs/state.md)."""
        plain, own = self.pair(tmp_path, algorithm)
        self.rounds((plain, own), 3)
        own.save(tmp_path / "copy")
        run_rounds(own, 1)
        with Server.load(tmp_path / "copy") as loaded:
            self.rounds((plain, loaded), 3)

    def test_reopened_servers(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """A server that is closed and opened again continues with the same bits (docs/state.md)."""
        plain, own = self.pair(tmp_path, algorithm)
        for rounds in (3, 2, 2):
            self.rounds((plain, own), rounds)
            own = self.reopen(own, tmp_path / "server")
            same(look(own), look(plain), "reopened server")
        same(own.verify(), [], "damage")

    def test_undo(self, algorithm: Algorithm, tmp_path: Path) -> None:
        """An undone transaction leaves no trace (docs/operations.md)."""
        acts: list[Callable[[Server], Any]] = [
            _round,
            lambda server: server.add_clients({"anna": 5}),
            lambda server: server.remove_client(2),
            lambda server: server.change(lr=0.05),
        ]
        plain, own = self.pair(tmp_path, algorithm)
        self.rounds((plain, own), 3)
        for act in acts:
            if not isinstance(_result(act, own), tuple):  # an error, such as of a method that cannot remove clients
                own = self.undo(own, tmp_path / "server")
            same(look(own), look(plain), "server after an undo")
            self.rounds((plain, own), 1)

    def test_order_with_exact_sums(self, tmp_path: Path) -> None:
        """With exact sums, the order of the updates changes no bit (docs/api/server.md, ``Compute``)."""
        plain, own = self.pair(tmp_path, named("SCAFFOLD"), compute=Compute(accumulator="exact"))
        for t in range(4):
            updates = updates_of(plain, range(N))
            Server.round(plain, updates)
            by_adding(own, [updates[i] for i in np.random.default_rng(t).permutation(N)])
            same(look(own), look(plain), f"server after another order in round {t}")


def _result(act: Callable[[Server], Any], server: Server) -> Any:
    try:
        return act(server)
    except FedcoreError as error:
        return type(error), str(error)


def _round(server: Server, *, late: bool = False, least: int = 0) -> Report:
    """Run a round through the door of its number; with ``late``, some updates are from the round before."""
    t = server.round_number
    there = [i for i in range(N) if i in server.clients]
    updates = updates_of(server, there if len(cohort_of(t)) < least else [i for i in cohort_of(t) if i in there])
    if late and t:
        updates = [update._replace(round=t - i % 2) for i, update in enumerate(updates)]
    return (at_once, by_adding, by_batches)[t % 3](server, updates)
