"""Flower strategies that run a fedcore server: a shared base class, and one class per method."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from logging import ERROR, INFO, WARNING
from os import PathLike
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from fedcore import algorithms
from fedcore.adapters import session
from fedcore.adapters.flower.grid import UNREADABLE, Failure, Messages, Request, StreamingGrid, answers, by_id
from fedcore.adapters.flower.metrics import Collected, Rejected, Sizes, ask_sizes, mean_of, only_record, records_of
from fedcore.adapters.flower.records import CONTROL, METHOD, Wire, instructions, model_alone, read_vector
from fedcore.algorithms import Algorithm, optimizers
from fedcore.algorithms.rates import Rate, rate_at
from fedcore.errors import ArrayError, CheckpointError, RangeError, RoundError, TooFewUpdatesError
from fedcore.model import Layout
from fedcore.options import RoundPolicy, ServerOptions
from fedcore.profiling import span
from fedcore.rules import Chain
from fedcore.sampling import without_replacement
from fedcore.server import Report, Round, Server, Update
from fedcore.server.opening import is_begun
from fedcore.validation import absolute, as_integer, is_integer

__all__ = [
    "MBSTORM", "MIFA", "SCAFFOLD", "SCAFFOLDM", "SCAFFOLDMVR", "FedACG", "FedAU", "FedAdagrad", "FedAdam", "FedAsync",
    "FedAvg", "FedAvgLocalM", "FedAvgM", "FedAvgMVR", "FedDyn", "FedExP", "FedNova", "FedProx", "FedStale", "FedVARP",
    "FedYogi", "FlexibleFedAvg", "LocalDescent", "MimiC", "QFedAvg", "ServerStrategy",
]  # fmt: skip

UNKNOWN = 1.0
"""The server's ``lr`` if the strategy has none. Reported norms are then |x - y| per local step."""

NOT_PASSED = "no message was sent, or no reply was passed on; to read replies first, pass on list(replies)"
"""Why a round of a subclass or wrapper accepted nothing."""


class ServerStrategy(FlowerFedAvg):
    """Flower's FedAvg, except that a ``fedcore.Server`` holds the model, the method and its state.

    A node becomes a client of the server, under its node id, with its first accepted training reply. Methods such as
    MIFA therefore do not wait for nodes that never reply. A node that fails, times out or sends an invalid reply does
    not take part in the round. Flower does the sampling, evaluation, metrics and logs.

    Args:
        lr, server_lr, optimizer, aggregation, limits, compute, callbacks: as for ``fedcore.Server``. Clients get the
            rate as "lr" in their configuration. ``lr`` is optional if the method averages models after plain local
            steps and ``server_lr`` is not set. Without ``lr``, clients get the messages of Flower's FedAvg and choose
            their own rates.
        steps: K, the number of local steps, for replies of ClientApps that do not use fedcore: a number, or the name of
            the metric that holds it. It requires a method whose clients take plain local steps, and ``lr`` must be the
            rate that the ClientApps use. If ``steps`` is a number, it is also the ``max_steps`` of a new server, unless
            ``limits`` set one. A log line warns if BatchNorm layers counted more steps than the number.
        storage: as for ``fedcore.Server``. If the folder already holds a server, ``start`` resumes it. A log line warns
            if none of the connected nodes is registered, since the clients of the earlier run then still count.
        resume: a folder written by ``Server.save``, which ``start`` resumes.
        client_sizes: n_k by node id, or a function of the node id. Default: the strategy queries the nodes if the
            method needs the sizes.
        policy: when a round may close, before the ``timeout`` of ``start``. The strategy waits for ``min_clients``
            connected nodes, and asks ``over_selection`` times as many nodes as Flower's options give. If the timeout
            leaves fewer than ``min_clients`` accepted replies, the model stays. If ``max_staleness`` is above 0, a node
            that misses the timeout gets no new task until it replies or its reply would be too late. With ``buffer``, a
            round ends at its K-th reply, and the nodes still at work count as asked in the next round. Default: as for
            ``fedcore.Server``, or as saved.
        seed: the seed for drawing the nodes of a round.
        poll: the seconds between two checks for replies.
        abort_after: the run ends with an error after this many rounds in a row that accepted no reply, or fewer than a
            robust rule needs, unless late replies may still count; and also if no round of a shorter run accepted one.
            None: the run continues.
        parts: the arguments ``partial``, ``personal`` and ``frozen`` of ``fedcore.Model``, as a mapping. With
            ``partial``, a reply may lack the arrays of some groups. Messages have no personal and frozen arrays.
        options: options of the method (``fedcore.algorithms``) and of Flower's FedAvg (``fraction_train``,
            ``min_available_nodes``, ``evaluate_metrics_aggr_fn``, ...). Functions for metrics get only the metric
            records, since the server does not keep the rest of a reply. ``options``: a ``ServerOptions`` with any of
            lr, server_lr, optimizer, aggregation, limits, storage, compute, policy and callbacks in one object.

    Attributes:
        reports: the ``Report`` of each round.
        failures: the nodes that answered with an error in the last round.
        left_out: (node, reason) for each reply excluded from the means of the last evaluation.

    Raises:
        UnknownNameError: an option is unknown.
        RangeError: ``lr`` is missing or differs between the steps of a round, or ``steps`` is set for a method whose
            clients do more than plain steps.
    """

    method: type[Algorithm]

    def __init_subclass__(cls, method: type[Algorithm] | None = None, **options: Any) -> None:
        """Set the method of a subclass."""
        super().__init_subclass__(**options)
        if method is not None:
            cls.method = method

    def __init__(
        self,
        *,
        resume: str | PathLike[str] | None = None,
        client_sizes: Sizes = None,
        steps: int | str | None = None,
        seed: int = 0,
        poll: float = 0.1,
        abort_after: int | None = 3,
        parts: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        kinds = (self.method, ServerOptions, ServerStrategy, FlowerFedAvg)
        of_method, own, ours, flower = ([*signature(kind).parameters] for kind in kinds)
        method_options = {name: options.pop(name) for name in of_method if name in options}
        server_options = {name: options.pop(name) for name in ("options", *own) if name in options}
        session.require_known(type(self).__name__, options, of_method + own + ours + flower)
        super().__init__(**options)
        self.algorithm = method = self.method(**method_options)
        self._options = ServerOptions.from_mapping(server_options)
        self._lr, self._steps, self._parts = self._options.lr, steps, session.model_of_parts(None, parts)
        session.require_rate_of_rounds(self._lr)
        session.require_steps(steps, method)
        averages = method.averages and self._options.server_lr is None and not session.beyond_plain_steps(method)
        if self._lr is None and not averages:
            raise RangeError(f"lr=None: {type(self).__name__} needs the clients' learning rate; set lr=")
        self.reports: list[Report] = []
        self.failures: list[Failure] = []
        self.left_out: Rejected = []
        self._ratio = Chain.of(self._options.aggregation).ratio("examples")
        self._resume = None if resume is None else absolute(resume, "resume")
        self._client_sizes = client_sizes
        self._seed, self._poll, self._rejected_rounds = seed, poll, session.RejectedRounds(abort_after)
        self._server: Server | None = None
        self._round: Round | None = None
        self._asked: list[Request] = []
        self._chosen: Mapping[int, int] | None = None
        self._initial: ArrayRecord | None = None
        self._config, self._numbers, self._warned = ConfigRecord(), dict[tuple[str, str], Any](), set[str]()
        self._evaluating: list[Request] = []
        self._sizes: dict[int, int] = {}
        self._lost: dict[int, Mapping[str, Any]] = {}
        self._written: tuple[int, ArrayRecord, dict[str, Array]] | None = None
        self._first, self._configured, self._nodes = 0, 0, list[int]()
        self._has_hinted = self._is_loaded = self._gets_replies = False

    @property
    def server(self) -> Server:
        """The server; raises ``RoundError`` before the first round."""
        if self._server is None:
            raise RoundError("server: created in the strategy's first round; call start first")
        return self._server

    def summary(self) -> None:
        """Log the method, its options, the rate and the storage."""
        options = ", ".join(f"{name}={getattr(self.algorithm, name)!r}" for name in signature(self.method).parameters)
        lr, place = "chosen by the clients" if self._lr is None else self._lr, self._options.storage.path or "in memory"
        log(INFO, "\t├──> fedcore: %s(%s), lr %s, storage %s", self.method.__name__, options, lr, place)
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
        """Run until the server has finished ``num_rounds`` rounds, including those before a resume.

        The arguments are those of Flower's strategies; ``timeout`` is in seconds per round. The keys of the result are
        the server's round numbers, even after a resume.

        Raises:
            CheckpointError: the saved server has a different model or method.
        """
        self._load(initial_arrays)
        self._chosen, self._rejected_rounds = None, session.RejectedRounds(self._rejected_rounds.abort_after)
        first = self._first = self._server.round_number if self._server else 0
        evaluate = None if evaluate_fn is None else lambda round, arrays: evaluate_fn(round + first, arrays)
        if should_stop := more.get("should_stop"):
            more["should_stop"] = lambda round, result: should_stop(round + first, result)
        streaming = grid if isinstance(grid, StreamingGrid) else StreamingGrid(grid, poll=self._poll)
        arrays, rounds = self._write_model() if self._server else initial_arrays, max(num_rounds - first, 0)
        self._initial, self._timeout = arrays, timeout
        result = super().start(streaming, arrays, rounds, timeout, train_config, evaluate_config, evaluate, **more)
        if rounds:
            self._rejected_rounds.check(ended=True)
            self._catch_up(result.arrays)
        else:
            result.arrays = arrays
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {round + first: record for round, record in getattr(result, name).items()})
        return result

    def choose(self, round: int, nodes: Sequence[int], k: int) -> Iterable[int]:
        """Return ``k`` nodes, drawn at random; seed and round determine the draw. A subclass may override this.

        A subclass may list a node twice (sampling with replacement); its update then counts twice.

        Args:
            round: the server's round number, from 0.
            nodes: the connected nodes without a pending task, ascending. If the method weights by size, only nodes
                with a known size.
        """
        if not nodes:
            return []
        drawn = without_replacement(len(nodes), min(k, len(nodes)), seed=self._seed, round=round, purpose="flower")
        return [nodes[i] for i in sorted(drawn.tolist())]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the round, with the model ``arrays``.

        If ``arrays`` is not the model that the last round returned, because a subclass or a wrapper changed it, it
        becomes the server's x (``Server.replace_x``).

        Raises:
            RangeError: the method does not allow another x, or ``config`` contradicts the strategy's schedule of rates.
        """
        if self.fraction_train == 0.0:
            return []
        self._open(arrays)
        if self._chosen is None or server_round != self._configured:  # else a subclass asks one more group of nodes
            self._nodes = []
            if server_round == 1:
                self._chosen, self._asked, self._first = None, [], self.server.round_number
            self._catch_up(arrays)
        self._configured, number = server_round, self.server.round_number
        nodes = self._connected(grid)
        self._nodes += nodes
        asked = [request for request in self._asked if request.round < number]
        needed = max(int(len(nodes) * self.fraction_train), self.min_train_nodes, self._policy.min_clients)
        k = self._policy.asked(needed)
        if self._policy.buffer is not None:
            k = max(0, k - len(asked))  # the others are still at work
        free = sorted({*nodes} - {request.node for request in asked})
        chosen = Counter(self.choose(number, free, k))
        self._chosen = Counter(self._chosen or ()) + chosen
        log(INFO, "configure_train: Sampled %s nodes (out of %s)", len(chosen), len(nodes))
        if isinstance(grid, StreamingGrid):
            grid.await_also(by_id(asked))
            grid.close_when(partial(self._may_close, grid))
        self._set("train", config, "server-round", server_round + self._first)
        if self._lr is not None:
            self._set_rate(config)
        self._config = config
        return Messages(self._messages(chosen, config))

    def _may_close(self, grid: StreamingGrid) -> bool:
        """Whether a round may close early; before it is open, a subclass gets the replies of an asynchronous round."""
        if self._round is None:
            return self._policy.buffer is not None and grid.arrived >= self._policy.buffer
        return session.may_close_early(self._round)

    def _set(self, kind: str, config: ConfigRecord, name: str, value: Any) -> None:
        """Write a number of the strategy into a configuration, and warn once if the configuration has another one."""
        given, before = config.get(name, value), self._numbers.get((kind, name), value)
        config[name] = self._numbers[kind, name] = value
        if given != value and given != before and name not in self._warned:
            self._warned.add(name)
            text = "configure_%s: the configuration has %r=%r, but the strategy sends %r; leave it out"
            log(WARNING, text, kind, name, given, value)

    def _set_rate(self, config: ConfigRecord) -> None:
        """Write the rate into a configuration; a rate that the configuration has already becomes the strategy's."""
        due = rate_at(self.server.settings.lr, self.server.round_number)
        given: Any = config.get("lr", due)
        before = self._numbers.get(("train", "lr"), due)
        if given != due and given != before:
            if callable(self._lr):
                raise RangeError(
                    f"lr: the configuration has lr={given!r}, but lr= of {type(self).__name__} gives {due!r} in round "
                    f"{self.server.round_number}; leave one of them out"
                )
            self.server.change(lr=given)
            if "lr" not in self._warned:
                self._warned.add("lr")
                text = (
                    "configure_train: the configuration has lr=%r, but the strategy has lr=%r; clients and server use "
                    "the configuration's from now on (a schedule is lr=lambda round: ...)"
                )
                log(WARNING, text, given, due)
            self._lr = due = given
        config["lr"] = self._numbers["train", "lr"] = due

    def _catch_up(self, arrays: ArrayRecord) -> None:
        """Make a changed model the server's x, after an empty round if a subclass aggregated the last one."""
        is_own = not arrays or self._is_own(arrays)
        if self._chosen is not None:
            self._chosen, self._gets_replies, self.failures = None, False, []
            self._asked = [request for request in self._asked if request.round < self.server.round_number]
            if is_own:
                self._note((), (), self._asked)
            else:
                self._finish_without_updates()
                self._write_model()
        if not is_own and self._written is not None:
            session.take_model(self.server, self._wire.read(arrays), self._wire.read(self._written[2]))
            self._written = None

    def _finish_without_updates(self) -> None:
        """Count a round that a subclass aggregated, and in which ``min_clients`` of the policy thus cannot count."""
        if fewest := self._policy.min_clients:
            text = (
                "aggregate_train: a subclass aggregates, so that min_clients=%d is only the number of nodes to wait for"
            )
            log(WARNING, text, fewest)
            self.min_train_nodes = max(self.min_train_nodes, fewest)
            self.server.change(policy=replace(self._policy, min_clients=0))
        self.reports.append(self.server.round([]))

    def _is_own(self, arrays: ArrayRecord) -> bool:
        """Whether a record is the model that the server wrote last; also true before it has written one."""
        own = None if self._written is None else self._written[2]
        return own is None or (
            own.keys() == arrays.keys() and all(array.data == own[name].data for name, array in arrays.items())
        )

    def _messages(self, chosen: Mapping[int, int], config: ConfigRecord) -> Iterator[Message]:
        for node, content, round in self._contents(chosen, config):
            message = Message(content, node, "train")
            self._asked.append(Request(message.metadata, node, round, chosen[node]))
            yield message

    def _contents(self, chosen: Iterable[int], config: ConfigRecord) -> Iterator[tuple[int, RecordDict, int]]:
        """Yield each node, the content of its message, and the round."""
        sent = self.server.broadcast(chosen, newcomers=chosen).on_host()
        model = self._write_model()
        if self.server.algorithm.looks_ahead:  # Flower gets x, and clients the model ahead of it
            model = self._wire.write(self.server.tensors(library="numpy", copy=False, sent=True))
        if self._wire.is_narrow:
            tensors = self.server.tensors(library="numpy", copy=False, sent=True)
            self._lost[sent.round] = self._wire.lost(tensors, self.server.layout)
        keys = self.arrayrecord_key, self.configrecord_key
        contents = instructions if self._lr is not None else model_alone
        for node, content in contents(sent, model, config, *keys):
            yield node, content, sent.round

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the replies to the round as they arrive, and take the server step.

        Raises:
            DivergedError: the model would become infinite or NaN; the round is rolled back.
            RoundError: no reply was accepted in ``abort_after`` rounds in a row; the message has the reasons.
        """
        if self.fraction_train == 0.0:  # no messages were sent, and the server may not exist
            return None, None
        self._open(self._initial)
        if self._lr is not None and self._chosen and self._config.get("lr") != self._numbers["train", "lr"]:
            raise RangeError("lr: a subclass changed config['lr'] after super().configure_train; change it before")
        number, self._chosen = self.server.round_number, None
        self._asked = [request for request in self._asked if request.metadata.message_id]  # which were sent
        pending, collected = by_id(self._asked), Collected()
        self._gets_replies = isinstance(replies, Messages)  # otherwise a subclass or wrapper may have used them
        if not (nodes := self._nodes):
            replies = list(replies)  # to messages that a subclass made without super
            nodes = [request.node for request, _, _ in answers(replies, {}) if request]
        self.failures, counted = [], self._count_batches()
        asked, self._nodes = [*(request.node for request in pending.values()), *nodes], []
        new = session.newcomers(self.server, asked, self._sizes if self._is_sized else None)
        try:
            with self.server.open_round(newcomers=new) as round:
                self._round = round
                for request, reply, failure in answers(replies, pending, number):
                    if request is None:
                        log(WARNING, "aggregate_train: ignored a late or second reply, or one without a message's id")
                    elif failure:
                        self.failures.append(failure)
                        if failure.code == UNREADABLE:
                            round.reject(request.node, failure.reason)
                    else:
                        session.add_reply(round, request.node, partial(self._read, request, reply))
                        collected.add(request.node, reply)
                    del reply
                report = session.finish(self.server, round, partial(log, ERROR), (RoundError, TooFewUpdatesError))
                if round.report is None:
                    self._note(report.accepted, report.rejected, [*pending.values()])
                    return None, None
        finally:
            self._round = None
        self._hint_at_steps(report, counted)
        return self._after(report, [*pending.values()], collected)

    def _read(self, request: Request, reply: Message) -> Update:
        content, weight = reply.content, self.weighted_by_key
        vectors = records_of(content, ArrayRecord)
        models = [record for name, record in vectors.items() if name != CONTROL]
        if len(models) != 1:
            raise ArrayError(f"arrays: the reply has {len(models)} model records; it must have exactly one")
        metrics = only_record(content)
        if weight not in metrics:  # as in Flower's own strategy
            raise ArrayError(f"metrics: {weight!r} is missing; add the reply's weight, or change weighted_by_key")
        done: Mapping[str, Any] = records_of(content, ConfigRecord).get(METHOD, {})
        model = self._wire.read(models[0])
        for name, error in self._lost.get(request.round, {}).items():  # so that x - y is the client's exact step
            if name in model and model[name].shape == error.shape:  # otherwise the round rejects the reply
                model[name] = model[name] + error
        return Update(
            request.node,
            model,
            steps=session.steps_of(done.get("steps"), metrics, self._steps, self.server),
            examples=as_integer(metrics.get(weight)),
            lr=done.get("lr"),
            loss=done.get("loss"),
            control=read_vector(CONTROL, vectors[CONTROL]) if CONTROL in vectors else None,
            count=request.draws,
            round=request.round,
            update_id=f"{request.round} {reply.metadata.reply_to_message_id}",
            keep=True,  # nothing else writes to the memory of the message
        )

    def _after(
        self, report: Report, pending: list[Request], collected: Collected
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Keep the requests that may still get late replies, log the round, and return Flower's result."""
        self.reports.append(report)
        first = report.round - self._policy.max_staleness
        self._lost = {round: lost for round, lost in self._lost.items() if round > first}
        log(INFO, "aggregate_train: Received %s results and %s failures", len(report.accepted), len(self.failures))
        if silent := [request.node for request in pending if request.round == report.round]:
            log(INFO, "\t> %s", session.silence(silent))
        if line := session.rejection_line(report):
            log(WARNING if report.accepted else ERROR, "\t> %s", line)
        log_failures(self.failures)
        self._note(report.accepted, report.rejected, pending, first)
        accepted = [int(node) for node in report.accepted]
        metrics, odd = collected.usual(self.weighted_by_key, "aggregate_train", self._ratio, accepted)
        if odd:
            log(WARNING, "\t> Metrics: %s", session.rejections(odd, len(metrics)))
        mean = mean_of(lambda some: self.train_metrics_aggr_fn(some, self.weighted_by_key), metrics)
        return self._write_model(), mean

    def _note(
        self, accepted: Any, rejected: Iterable[Any], pending: list[Request], first: float = float("inf")
    ) -> None:
        """Count a round for ``abort_after``; requests of round ``first`` and earlier are given up."""
        self._asked = [request for request in pending if request.round > first]
        lost = [*rejected, *((failure.node, failure.reason) for failure in self.failures)]
        reason = "did not reply" if self._gets_replies else NOT_PASSED
        lost += [(request.node, reason) for request in pending if request.round <= first]
        if not (accepted or lost or self._asked):
            lost = [(type(self).__name__, NOT_PASSED)]
        if not accepted and NOT_PASSED in dict(lost).values():
            log(ERROR, "aggregate_train: %s", NOT_PASSED)
        self._rejected_rounds.note(accepted, lost)

    def _count_batches(self) -> int | None:
        """Return the training steps that the model's BatchNorm layers counted; None without such a layer."""
        names = [piece.name for piece in self.server.layout.counters if piece.name.endswith("num_batches_tracked")]
        tensors = self.server.tensors(library="numpy", copy=False) if names else {}
        return min((int(tensors[name]) for name in names), default=None)

    def _hint_at_steps(self, report: Report, before: int | None) -> None:
        """Warn once if BatchNorm layers counted more steps than ``steps``; mean gradients are then too long."""
        steps, now = self._steps, self._count_batches()
        if self._has_hinted or before is None or now is None or not is_integer(steps) or not report.accepted:
            return
        if (counted := now - before) > max(steps, report.steps / len(report.accepted)):
            self._has_hinted = True
            text = (
                "aggregate_train: steps=%d: BatchNorm counted %d local steps, so mean gradients are %.3g times too "
                "long; set steps=%d, or the name of a metric with the number of steps"
            )
            log(WARNING, text, steps, counted, counted / steps, counted)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return Flower's messages, with the server's round number even after a resume."""
        if self._chosen is not None and self._is_own(arrays):
            self._catch_up(arrays)  # a wrapper did not aggregate the round
        if self.fraction_evaluate != 0.0:
            self._set("evaluate", config, "server-round", server_round + self._first)
        messages = list(super().configure_evaluate(server_round + self._first, arrays, config, grid))
        self._evaluating = [Request(message.metadata, message.metadata.dst_node_id) for message in messages]
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the means of the reported metrics, and list rejected replies in ``left_out``.

        With the rule ``CapExamples``, a reported number of examples is capped at ``ratio`` times the median.
        """
        collected, failures = Collected(), []
        pending = by_id(request for request in self._evaluating if request.metadata.message_id)  # which were sent
        self._evaluating = []
        for request, reply, failure in answers(replies, pending):
            if request is None:
                log(WARNING, "aggregate_evaluate: ignored a second reply to a message, or one without its id")
            elif failure:
                failures.append(failure)
            else:
                collected.add(request.node, reply)
        metrics, self.left_out = collected.usual(self.weighted_by_key, "aggregate_evaluate", self._ratio)
        log(INFO, "aggregate_evaluate: Received %s results and %s failures", len(collected), len(failures))
        log_failures(failures)
        if self.left_out:
            log(WARNING if metrics else ERROR, "\t> %s", session.rejections(self.left_out, len(metrics)))
        return mean_of(lambda some: self.evaluate_metrics_aggr_fn(some, self.weighted_by_key), metrics)

    def _write_model(self) -> ArrayRecord:
        """Return the server's model as a record; write it once per round."""
        number = self.server.round_number
        if self._written is None or self._written[0] != number:
            self._written = None  # frees the old record before the new one is written
            with span("encode"):
                record = self._wire.write(self.server.tensors(library="numpy", copy=False))
                self._written = number, record, dict(record.items())  # a subclass may change the record
        return self._written[1]

    @property
    def _policy(self) -> RoundPolicy:
        return self._options.policy or RoundPolicy() if self._server is None else self._server.policy

    @property
    def _is_sized(self) -> bool:
        return self.algorithm.needs_shares or self._client_sizes is not None

    def _connected(self, grid: Grid) -> list[int]:
        """Wait for enough nodes, and return the nodes that can take part."""
        enough = max(self.min_available_nodes, self.min_train_nodes, self._policy.min_clients)
        while len(nodes := sorted(grid.get_node_ids())) < enough:
            log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).", len(nodes), enough)
            time.sleep(1)
        known = self.server.clients
        if self._is_loaded and len(known) and not any(node in known for node in nodes):
            text = (
                "Resuming: none of the %d connected nodes is registered, and the server keeps %d clients of an earlier "
                "run, which still count; remove them with strategy.server.remove_client(id) or `fedcore store "
                "remove-client`, or run SuperNodes with keys, which keep their ids"
            )
            log(WARNING, text, len(nodes), len(known))
        self._is_loaded = False
        if not self._is_sized:
            return nodes
        new = [node for node in nodes if node not in known and node not in self._sizes]
        known_sizes = () if self.server.client_sizes is None else self.server.client_sizes.tolist()
        others = [*self._sizes.values(), *known_sizes]
        if new:
            self._sizes |= ask_sizes(grid, new, self._client_sizes, self.configrecord_key, self._ratio, others)
        if not self._sizes and not len(known):
            raise RangeError("client_sizes: no node reported its number of examples; pass client_sizes")
        return [node for node in nodes if node in known or node in self._sizes]

    def _open(self, arrays: ArrayRecord | None) -> None:
        """Load or create the server of a model, unless there is one."""
        if self._server is not None:
            return
        if arrays is None:
            raise RoundError("server: there is no model yet; call super().start or super().configure_train")
        self._load(arrays)
        if self._server is None:
            self._server = self._opened(arrays, replace(self._options, lr=UNKNOWN if self._lr is None else self._lr))
        self._initial = None

    def _load(self, initial: ArrayRecord) -> None:
        self._wire = Wire.of(initial, self._parts)
        if self._server is not None:
            if Layout.of(replace(self._parts, tensors=self._wire.read(initial))) != self._server.layout:
                raise CheckpointError("initial_arrays: a different model than before; make a new strategy for it")
            text = "Continuing after round %d with its model, not with initial_arrays; a new strategy starts over"
            log(INFO, text, self._server.round_number)
        elif self._resume is not None or is_begun(self._options.storage):
            self._server, self._is_loaded = self._opened(initial, self._options, resume=self._resume), True
            if self._server.round_number:
                log(INFO, "Resuming after round %d, with the saved model", self._server.round_number)

    def _opened(self, arrays: ArrayRecord, options: ServerOptions, **how: Any) -> Server:
        work = session.ClientWork(steps=self._steps, own_rates=self._lr is None)
        model = replace(self._parts, tensors=self._wire.read(arrays))
        return session.open_server(model, self.algorithm, [], options, work, **how)


def log_failures(failures: Iterable[Failure]) -> None:
    for failure in failures:
        log(INFO, "\t> Received error in reply from node %d: %s", failure.node, failure.reason)


# One strategy per method of ``fedcore.algorithms``; ``ServerStrategy`` documents the arguments.


class FedAvg(ServerStrategy, method=algorithms.FedAvg):
    """``fedcore.algorithms.FedAvg`` in Flower."""


class FedAdagrad(FedAvg):
    """FedAvg with ``fedcore.algorithms.optimizers.Adagrad``: the arguments and results of Flower's FedAdagrad."""

    def __init__(self, *, eta: float = 0.1, tau: float = 1e-3, **options: Any) -> None:
        options.pop("eta_l", None)  # the clients' rate, which Flower accepts and never uses
        super().__init__(optimizer=optimizers.Adagrad(eta=eta, tau=tau, s0=0.0), **options)


class FedAdam(FedAvg):
    """FedAvg with ``fedcore.algorithms.optimizers.Adam``: the arguments and results of Flower's FedAdam.

    As in Flower, the bias correction of the first round uses the exponent 2.
    """

    def __init__(
        self, *, eta: float = 0.1, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3, **options: Any
    ) -> None:
        adam = optimizers.Adam(eta=eta, beta1=beta_1, beta2=beta_2, tau=tau, s0=0.0, corrected_from=2)
        options.pop("eta_l", None)
        super().__init__(optimizer=adam, **options)


class FedYogi(FedAvg):
    """FedAvg with ``fedcore.algorithms.optimizers.Yogi``: the arguments and results of Flower's FedYogi."""

    def __init__(
        self, *, eta: float = 0.01, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3, **options: Any
    ) -> None:
        options.pop("eta_l", None)
        super().__init__(optimizer=optimizers.Yogi(eta=eta, beta1=beta_1, beta2=beta_2, tau=tau, s0=0.0), **options)


class FedAvgM(FedAvg):
    """FedAvg with ``fedcore.algorithms.optimizers.SGD``: the arguments and results of Flower's FedAvgM."""

    def __init__(self, *, server_learning_rate: float = 1.0, server_momentum: float = 0.0, **options: Any) -> None:
        super().__init__(optimizer=optimizers.SGD(momentum=server_momentum, eta=server_learning_rate), **options)


class FedProx(ServerStrategy, method=algorithms.FedProx):
    """``fedcore.algorithms.FedProx`` in Flower.

    Without ``lr`` it is Flower's FedProx: the nodes get mu as "proximal-mu" in their configuration and add the term
    themselves, and the server averages their models. ``proximal_mu`` is Flower's name for ``mu``.
    """

    def __init__(
        self, *, lr: float | Rate | None = None, mu: float = 0.01, proximal_mu: float | None = None, **options: Any
    ) -> None:
        self.proximal_mu = algorithms.FedProx(mu=mu if proximal_mu is None else proximal_mu).mu
        if lr is None:
            self.method = algorithms.FedAvg
        else:
            options["mu"] = self.proximal_mu
        super().__init__(lr=lr, **options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the round; without ``lr``, their configuration has "proximal-mu"."""
        if self._lr is None:
            self._set("train", config, "proximal-mu", self.proximal_mu)
        elif (given := config.get("proximal-mu", self.proximal_mu)) != self.proximal_mu:
            raise RangeError(
                f"proximal-mu: the configuration has {given!r}, but the strategy has mu={self.proximal_mu!r}; with "
                "lr=, clients of fedcore add the strategy's, so leave it out of the configuration"
            )
        return super().configure_train(server_round, arrays, config, grid)


class SCAFFOLD(ServerStrategy, method=algorithms.SCAFFOLD):
    """``fedcore.algorithms.SCAFFOLD`` in Flower."""


class MIFA(ServerStrategy, method=algorithms.MIFA):
    """``fedcore.algorithms.MIFA`` in Flower."""


class MimiC(ServerStrategy, method=algorithms.MimiC):
    """``fedcore.algorithms.MimiC`` in Flower."""


class FlexibleFedAvg(ServerStrategy, method=algorithms.FlexibleFedAvg):
    """``fedcore.algorithms.FlexibleFedAvg`` in Flower. Nodes report their numbers of examples on a query."""


class FedAvgLocalM(ServerStrategy, method=algorithms.FedAvgM):
    """``fedcore.algorithms.FedAvgM`` in Flower: momentum in the local steps, unlike ``FedAvgM`` here."""


class SCAFFOLDM(ServerStrategy, method=algorithms.SCAFFOLDM):
    """``fedcore.algorithms.SCAFFOLDM`` in Flower."""


class MBSTORM(ServerStrategy, method=algorithms.MBSTORM):
    """``fedcore.algorithms.MBSTORM`` in Flower."""


class FedAvgMVR(ServerStrategy, method=algorithms.FedAvgMVR):
    """``fedcore.algorithms.FedAvgMVR`` in Flower."""


class SCAFFOLDMVR(ServerStrategy, method=algorithms.SCAFFOLDMVR):
    """``fedcore.algorithms.SCAFFOLDMVR`` in Flower."""


class LocalDescent(ServerStrategy, method=algorithms.LocalDescent):
    """``fedcore.algorithms.LocalDescent`` in Flower."""


class FedVARP(ServerStrategy, method=algorithms.FedVARP):
    """``fedcore.algorithms.FedVARP`` in Flower."""


class FedStale(ServerStrategy, method=algorithms.FedStale):
    """``fedcore.algorithms.FedStale`` in Flower."""


class FedDyn(ServerStrategy, method=algorithms.FedDyn):
    """``fedcore.algorithms.FedDyn`` in Flower."""


class FedNova(ServerStrategy, method=algorithms.FedNova):
    """``fedcore.algorithms.FedNova`` in Flower."""


class QFedAvg(ServerStrategy, method=algorithms.QFedAvg):
    """``fedcore.algorithms.QFedAvg`` in Flower."""


class FedAU(ServerStrategy, method=algorithms.FedAU):
    """``fedcore.algorithms.FedAU`` in Flower."""


class FedACG(ServerStrategy, method=algorithms.FedACG):
    """``fedcore.algorithms.FedACG`` in Flower."""


class FedAsync(ServerStrategy, method=algorithms.FedAsync):
    """``fedcore.algorithms.FedAsync`` in Flower; see ``RoundPolicy(buffer=)``."""


class FedExP(ServerStrategy, method=algorithms.FedExP):
    """``fedcore.algorithms.FedExP`` in Flower."""
