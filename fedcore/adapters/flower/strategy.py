"""A Flower strategy over a fedcore server: what every method shares."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from fedcore.adapters.flower.examples_query import Sizes, ask_sizes
from fedcore.adapters.flower.grid import UNREADABLE, StreamingGrid
from fedcore.adapters.flower.instructions import instructions, model_alone
from fedcore.adapters.flower.metrics import Collected, Refused, mean_of
from fedcore.adapters.flower.pending import Asked, Failure, failure_of, request_of
from fedcore.adapters.flower.records import Wire
from fedcore.adapters.flower.replies import Reader
from fedcore.adapters.open_server import (
    allow_asked_steps,
    asked_at_most,
    limits_of,
    newcomers,
    saved_layout,
)
from fedcore.adapters.order import beyond_plain_steps, require_own_model, require_rate_of_rounds, require_steps
from fedcore.adapters.refusals import refusal_line, refusals, silence
from fedcore.algorithms import Algorithm
from fedcore.arguments import absolute, absolute_store
from fedcore.errors import CheckpointError, RangeError, RoundError, UnknownNameError
from fedcore.layout import Layout
from fedcore.optimizers import Optimizer
from fedcore.rates import Rate
from fedcore.sampling import without_replacement
from fedcore.server import RoundReport, Server
from fedcore.server.limits import Limits

UNKNOWN = 1.0
"""The rate of a server that is told none: the norms of its reports are then lengths of models, for each step."""


class ServerStrategy(FlowerFedAvg):
    """Flower's FedAvg, but that the model, the method and its state are a ``fedcore.Server``'s.

    Nodes are the server's clients, by their ids, from their first reply to a training message that counts; one that is
    connected and never answers is none, and nobody waits for it. A node that does not answer, or fails, or sends
    nonsense did not take part in the round. Sampling, evaluation, metrics and logs are Flower's.

    Args:
        lr, server_lr, optimizer, late_rounds, fold, accumulate, own_rates, weights, on_report: ``fedcore.Server``'s.
            The rate goes to the clients as "lr" of their configuration. Where a method averages the models of plain
            local steps it may be left out: then messages are those of Flower's FedAvg, to ClientApps of any rate.
        limits, max_steps, max_examples, max_norm, ...: ``fedcore.Server``'s limits.
        steps: K of replies that do not say it, of ClientApps that know nothing of fedcore: a number, or the metric that
            holds it. For methods of plain local steps, with ``lr`` the rate at which the ClientApps take them. A number
            is also the ``max_steps`` of a new server that is told none.
        store: "ram", or "mmap:PATH", which ``start`` goes on with if a server is there already.
        resume: a folder of ``Server.save``, which ``start`` goes on from.
        client_sizes: n_k by node id, or a function of it; None asks the nodes by a query where the method needs it.
        late_rounds: with more than 0, a node that misses a round's timeout is not asked again until it replies, and
            its reply counts up to so many rounds later, measured against the x that it started from.
        seed: of the draw of a round's nodes.
        poll: seconds between two looks for replies.
        options: those of the method (``fedcore.algorithms``), and those of Flower's FedAvg (``fraction_train``,
            ``min_available_nodes``, ``evaluate_metrics_aggr_fn``, ...). Functions for metrics see the replies'
            records of metrics alone: whatever else came is gone by then.

    Attributes:
        reports: a RoundReport of each round since ``start``.
        failures: of the last round, the nodes that answered with an error.
        left_out: of the last evaluation, (node, reason) of the replies that are not part of the means.

    Raises:
        UnknownNameError: there is no such option.
        RangeError: ``lr`` is missing, or differs between the steps of a round; or ``steps`` is given where clients must
            do more than plain steps.
    """

    method: ClassVar[type[Algorithm]]

    def __init__(
        self,
        *,
        lr: float | Rate | None = None,
        server_lr: float | Rate | None = None,
        optimizer: Optimizer | None = None,
        store: str = "ram",
        resume: str | Path | None = None,
        client_sizes: Sizes = None,
        steps: int | str | None = None,
        late_rounds: int = 0,
        seed: int = 0,
        poll: float = 0.1,
        **options: Any,
    ) -> None:
        # A string is FedAvg's own option of this name.
        weights = {} if isinstance(options.get("weights", ""), str) else {"weights": options.pop("weights")}
        of_method, of_server, of_flower = (
            {name: options.pop(name) for name in [*options] if name in signature(what).parameters}
            for what in (self.method, Server, FlowerFedAvg)
        )
        if options:
            known = [*signature(self.method).parameters, *signature(Server).parameters]
            known += signature(FlowerFedAvg).parameters
            raise UnknownNameError.of(f"option of {type(self).__name__}", next(iter(options)), known)
        super().__init__(**of_flower)
        self.algorithm = method = self.method(**of_method)
        require_rate_of_rounds(lr)
        require_steps(steps, method)
        averages = method.averages and server_lr is None and not beyond_plain_steps(method)
        if lr is None and not averages:
            raise RangeError(
                f"lr: expected the rate of the clients' steps, which {type(self).__name__} needs, got None"
            )
        self.reports: list[RoundReport] = []
        self.failures: list[Failure] = []
        self.left_out: Refused = []
        self._rates: dict[str, Any] = {"lr": lr, "server_lr": server_lr, "optimizer": optimizer}
        self._settings: dict[str, Any] = {"late_rounds": late_rounds, **of_server, **weights}
        self._ratio = Limits.of(limits_of(self._settings)).examples_ratio
        self._store, self._resume = absolute_store(store), None if resume is None else absolute(resume)
        self._client_sizes, self._late_rounds = client_sizes, late_rounds
        self._seed, self._poll, self._steps = seed, poll, steps
        self._server: Server | None = None
        self._asked: list[Asked] = []
        self._evaluating: list[Asked] = []
        self._sizes: dict[int, int] = {}
        self._lost: dict[int, Mapping[str, Any]] = {}
        self._written: tuple[int, ArrayRecord] | None = None
        self._first = 0

    @property
    def server(self) -> Server:
        """The server.

        Raises:
            RoundError: no round was configured yet, so that nobody knows its first model and clients.
        """
        if self._server is None:
            raise RoundError("server: expected a strategy that has started, got one before its first round")
        return self._server

    def summary(self) -> None:
        """Log what the strategy does."""
        options = {name: getattr(self.algorithm, name) for name in signature(self.method).parameters}
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        lr = "of the clients' own" if self._rates["lr"] is None else self._rates["lr"]
        log(INFO, "\t├──> fedcore: %s(%s), lr %s, store %s", self.method.__name__, said, lr, self._store)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        **more: Any,
    ) -> Result:
        """Run rounds up to ``num_rounds``, those before a resumed server was stopped counted in.

        The arguments are those of Flower's strategies, those of later versions too (``more``). ``timeout`` is a round's
        deadline. The keys of the result are the rounds' own numbers, also after a resumption.

        Raises:
            CheckpointError: there is a server to go on with, of another model or method.
        """
        self._wire = Wire.of(initial_arrays)
        self._go_on(initial_arrays)
        first = self._first = self._server.round_number if self._server else 0
        if first:
            log(INFO, "Going on after round %d", first)
        evaluate = None if evaluate_fn is None else lambda round, arrays: evaluate_fn(round + first, arrays)
        streaming = grid if isinstance(grid, StreamingGrid) else StreamingGrid(grid, poll=self._poll)
        arrays = self._write_model() if self._server else initial_arrays
        result = super().start(
            streaming, arrays, max(num_rounds - first, 0), timeout, train_config, evaluate_config, evaluate, **more
        )
        if num_rounds <= first:
            result.arrays = arrays
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {round + first: record for round, record in getattr(result, name).items()})
        return result

    def choose(self, round: int, nodes: Sequence[int], k: int) -> Iterable[int]:
        """The nodes of a round: k of those that are connected, drawn by (seed, round). Override it at will.

        A node that comes twice was drawn twice (sampling with replacement), and counts twice.

        Args:
            round: the server's number of the round, from 0.
            nodes: connected, of known size where the method weighs by it, and not at work for an earlier round;
                ascending.
        """
        if not nodes:
            return []
        drawn = without_replacement(len(nodes), min(k, len(nodes)), seed=self._seed, round=round, purpose="flower")
        return [nodes[i] for i in sorted(drawn.tolist())]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the round, of the server's model, which ``arrays`` is from the second round on.

        Raises:
            ArrayError: it is another model, as a wrapper makes one that adds noise to the aggregated model.
        """
        if self.fraction_train == 0.0:
            return []
        if self._written is not None and arrays is not self._written[1]:
            require_own_model(self._written[1].to_numpy_ndarrays(), arrays.to_numpy_ndarrays())
        nodes = self._there(arrays, grid)
        k = max(int(len(nodes) * self.fraction_train), self.min_train_nodes)
        busy = {asked.node for asked in self._asked}
        chosen = Counter(self.choose(self.server.round_number, [node for node in nodes if node not in busy], k))
        log(INFO, "configure_train: Sampled %s nodes (out of %s)", len(chosen), len(nodes))
        if isinstance(grid, StreamingGrid):
            grid.await_also(asked.message_id for asked in self._asked)
        config["server-round"] = self.server.round_number + 1
        messages = self._messages(chosen, config)
        return messages if isinstance(grid, StreamingGrid) else list(messages)

    def _messages(self, chosen: Mapping[int, int], config: ConfigRecord) -> Iterator[Message]:
        sent = self.server.broadcast(chosen, newcomers=chosen).on_host()
        model = self._write_model()
        if self._wire.is_narrow:
            self._lost[sent.round] = self._wire.lost(
                self.server.tensors(library="numpy", copy=False, sent=True), self.server.layout
            )
        keys = self.arrayrecord_key, self.configrecord_key
        orders = instructions if self._rates["lr"] is not None else model_alone
        for node, content in orders(sent, model, config, *keys):
            message = Message(content, node, "train")
            self._asked.append(Asked(message.metadata, node, sent.round, chosen[node]))
            yield message

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the replies in as they come, and take the server's step.

        Raises:
            DivergedError: the model would become infinite or NaN; the server stays as it was.
        """
        if self.fraction_train == 0.0:  # no node was asked, and there may be no server
            return None, None
        asked = {one.message_id: one for one in self._asked}
        collected = Collected()
        self.failures = []
        sizes = self._sizes if self._is_sized else None
        with self.server.open_round(
            newcomers=newcomers(self.server, (one.node for one in self._asked), sizes)
        ) as round:
            reader = Reader(self.server, self._wire, self.weighted_by_key, self._lost, self._steps)
            for reply in replies:
                who = request_of(asked, reply)
                if who is None:
                    log(WARNING, "aggregate_train: a reply to no message that is waited for, left out")
                elif failure := failure_of(who.node, reply):
                    self.failures.append(failure)
                    if failure.code == UNREADABLE:
                        round.refuse(who.node, failure.reason)
                else:
                    reader.add(round, who, reply)
                    collected.add(who.node, reply)
                del reply
        assert round.report is not None
        return self._after(round.report, asked.values(), collected)

    def _after(
        self, report: RoundReport, unheard: Iterable[Asked], collected: Collected
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Keep what a finished round leaves, log it, and make Flower's answer."""
        self.reports.append(report)
        first = report.round - self._late_rounds
        unheard = list(unheard)
        self._asked = [asked for asked in unheard if asked.round > first]
        self._lost = {round: lost for round, lost in self._lost.items() if round > first}
        log(INFO, "aggregate_train: Received %s results and %s failures", len(report.heard), len(self.failures))
        if silent := [asked.node for asked in unheard if asked.round == report.round]:
            log(INFO, "\t> %s", silence(silent))
        if line := refusal_line(report):
            log(WARNING if report.heard else ERROR, "\t> %s", line)
        for failure in self.failures:
            log(INFO, "\t> Received error in reply from node %d: %s", failure.node, failure.reason)
        metrics, odd = collected.usual(
            self.weighted_by_key, "aggregate_train", self._ratio, [int(node) for node in report.heard]
        )
        if odd:
            log(WARNING, "\t> Of the metrics alone: %s", refusals(odd, len(metrics)))
        mean = mean_of(lambda some: self.train_metrics_aggr_fn(some, self.weighted_by_key), metrics)
        return self._write_model(), mean

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's, with the round's own number also after a resumption."""
        messages = list(super().configure_evaluate(server_round + self._first, arrays, config, grid))
        number = server_round + self._first - 1
        self._evaluating = [Asked(one.metadata, one.metadata.dst_node_id, number, 1) for one in messages]
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The means of what the nodes say of the model; a reply that cannot be believed is left out by name.

        A claim of examples weighs up to ``max_examples_ratio`` times the median of the claims.
        """
        asked = {one.message_id: one.node for one in self._evaluating}
        collected = Collected()
        failures: list[Failure] = []
        for reply in replies:
            node = request_of(asked, reply)
            if node is None:
                log(WARNING, "aggregate_evaluate: a reply to no message that is waited for, left out")
            elif failure := failure_of(node, reply):
                failures.append(failure)
            else:
                collected.add(node, reply)
        metrics, self.left_out = collected.usual(self.weighted_by_key, "aggregate_evaluate", self._ratio)
        log(INFO, "aggregate_evaluate: Received %s results and %s failures", len(collected), len(failures))
        for failure in failures:
            log(INFO, "\t> Received error in reply from node %d: %s", failure.node, failure.reason)
        if self.left_out:
            log(WARNING if metrics else ERROR, "\t> %s", refusals(self.left_out, len(metrics)))
        return mean_of(lambda some: self.evaluate_metrics_aggr_fn(some, self.weighted_by_key), metrics)

    def _write_model(self) -> ArrayRecord:
        """The server's model as a record, made once a round."""
        number = self.server.round_number
        if self._written is None or self._written[0] != number:
            self._written = None  # before there are two
            self._written = number, self._wire.write(self.server.tensors(library="numpy", copy=False, sent=True))
        return self._written[1]

    @property
    def _is_sized(self) -> bool:
        return self.algorithm.needs_shares or self._client_sizes is not None

    def _there(self, arrays: ArrayRecord, grid: Grid) -> list[int]:
        """Wait for enough nodes, make the server if there is none, and return the nodes that can be asked."""
        enough = max(self.min_available_nodes, self.min_train_nodes)
        while len(nodes := sorted(grid.get_node_ids())) < enough:
            log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).", len(nodes), enough)
            time.sleep(1)
        if self._server is None:
            self._wire = Wire.of(arrays)
            self._server = Server(
                self.algorithm,
                self._wire.read(arrays),
                [],
                store=self._store,
                **{**self._rates, "lr": UNKNOWN if self._rates["lr"] is None else self._rates["lr"]},
                **{"own_rates": self._rates["lr"] is None} | asked_at_most(self._steps) | self._settings,
            )
        if not self._is_sized:
            return nodes
        known = self._server.clients
        new = [node for node in nodes if node not in known and node not in self._sizes]
        heard = [
            *self._sizes.values(),
            *(() if self._server.client_sizes is None else self._server.client_sizes.tolist()),
        ]
        self._sizes |= (
            ask_sizes(grid, new, self._client_sizes, self.configrecord_key, self._ratio, heard) if new else {}
        )
        if not self._sizes and not len(known):
            raise RangeError("client_sizes: expected the number of at least one node, which its query tells, got none")
        return [node for node in nodes if node in known or node in self._sizes]

    def _go_on(self, initial: ArrayRecord) -> None:
        """The server that a run before this one has left, if there is one."""
        medium, _, path = self._store.partition(":")
        folder = self._resume or (path if medium == "mmap" and Path(path).exists() else None)
        if folder is None or self._server is not None:
            return
        due, got = saved_layout(folder), Layout.of(self._wire.read(initial))
        if (due.slices, due.outside) != (got.slices, got.outside):
            raise CheckpointError(f"{folder}: expected a server of the model that is given, got one of another model")
        own: dict[str, Any] = {name: self._settings.get(name) for name in ("on_report", "weights")}
        limits = ({"own_rates": True} if self._rates["lr"] is None else {}) | limits_of(self._settings)
        loaded = Server.load(folder, algorithm=self.algorithm, **own, **self._rates, **limits)
        allow_asked_steps(loaded, self._steps, self._settings)
        self._server = loaded
