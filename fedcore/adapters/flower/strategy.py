"""Flower strategies over a fedcore server: what every method shares, and a class for each method."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from logging import ERROR, INFO, WARNING
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from fedcore import algorithms
from fedcore.adapters.flower.grid import UNREADABLE, Asked, Failure, StreamingGrid, failure_of, request_of
from fedcore.adapters.flower.metrics import (
    Collected,
    Rejected,
    Sizes,
    ask_sizes,
    mean_of,
    only_record,
    records_of,
)
from fedcore.adapters.flower.records import CONTROL, METHOD, Wire, instructions, model_alone, read_vector
from fedcore.adapters.session import (
    add_reply,
    beyond_plain_steps,
    is_begun,
    load_server,
    newcomers,
    open_server,
    rejection_line,
    rejections,
    require_own_model,
    require_rate_of_rounds,
    require_steps,
    silence,
    steps_of,
)
from fedcore.algorithms import Algorithm, optimizers
from fedcore.algorithms.optimizers import Optimizer
from fedcore.algorithms.rates import Rate
from fedcore.arguments import absolute, integral
from fedcore.arrays import F32
from fedcore.errors import ArrayError, RangeError, RoundError, UnknownNameError
from fedcore.options import Callback, Compute, Limits, Storage
from fedcore.profiling import span
from fedcore.rules import Chain
from fedcore.sampling import without_replacement
from fedcore.server import Report, Server, Update
from fedcore.server.server import Aggregation

UNKNOWN = 1.0
"""The rate of a server that is told none: the norms of its reports are then lengths of models, for each step."""


class ServerStrategy(FlowerFedAvg):
    """Flower's FedAvg, but that the model, the method and its state are a ``fedcore.Server``'s.

    Nodes are the server's clients, by their ids, from their first reply to a training message that counts; one that is
    connected and never answers is none, and nobody waits for it. A node that does not answer, or fails, or sends
    nonsense did not take part in the round. Sampling, evaluation, metrics and logs are Flower's.

    Args:
        lr, server_lr, optimizer, aggregation, limits, compute, callbacks: as for ``fedcore.Server``. The rate goes to
            the clients as "lr" of their configuration. Where a method averages the models of plain local steps it may
            be left out: messages are then those of Flower's FedAvg, to ClientApps of any rate.
        steps: K of replies that do not report it, of ClientApps that do not use fedcore: a number, or the metric that
            holds it. For methods of plain local steps, with ``lr`` the rate at which the ClientApps take them. A number
            is also the ``max_steps`` of a new server whose ``limits`` have no other.
        storage: as for ``fedcore.Server``; ``start`` goes on with the server that the folder has already.
        resume: a folder of ``Server.save``, which ``start`` goes on from.
        client_sizes: n_k by node id, or a function of it; None asks the nodes by a query where the method needs it.
        max_staleness: with more than 0, a node that misses a round's timeout is not asked again until it replies, and
            its reply counts up to so many rounds later, measured against the x that it started from.
        seed: of the draw of a round's nodes.
        poll: seconds between two looks for replies.
        options: those of the method (``fedcore.algorithms``), and those of Flower's FedAvg (``fraction_train``,
            ``min_available_nodes``, ``evaluate_metrics_aggr_fn``, ...). Functions for metrics see the replies'
            records of metrics alone: the rest of a reply is gone by then.

    Attributes:
        reports: the ``Report`` of each round since ``start``.
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
        aggregation: Aggregation = None,
        limits: Limits | None = None,
        storage: Storage | str | PathLike[str] | None = None,
        compute: Compute = Compute(),  # noqa: B008  # a frozen value
        max_staleness: int = 0,
        callbacks: Sequence[Callback] = (),
        resume: str | PathLike[str] | None = None,
        client_sizes: Sizes = None,
        steps: int | str | None = None,
        seed: int = 0,
        poll: float = 0.1,
        **options: Any,
    ) -> None:
        of_method = {name: options.pop(name) for name in signature(self.method).parameters if name in options}
        if unknown := [name for name in options if name not in signature(FlowerFedAvg).parameters]:
            known = [*signature(ServerStrategy).parameters, *signature(self.method).parameters]
            known += signature(FlowerFedAvg).parameters
            raise UnknownNameError.of(f"option of {type(self).__name__}", unknown[0], known)
        super().__init__(**options)
        self.algorithm = method = self.method(**of_method)
        require_rate_of_rounds(lr)
        require_steps(steps, method)
        averages = method.averages and server_lr is None and not beyond_plain_steps(method)
        if lr is None and not averages:
            raise RangeError(f"lr=None: {type(self).__name__} needs the rate of the clients' steps")
        self.reports: list[Report] = []
        self.failures: list[Failure] = []
        self.left_out: Rejected = []
        self._lr, self._storage = lr, Storage.of(storage)
        self._options: dict[str, Any] = {
            "server_lr": server_lr,
            "optimizer": optimizer,
            "aggregation": aggregation,
            "limits": limits,
            "compute": compute,
            "max_staleness": max_staleness,
            "callbacks": callbacks,
            "steps": steps,
            "own_rates": lr is None,
        }
        self._ratio = Chain.of(aggregation).examples_ratio
        self._resume = None if resume is None else absolute(resume)
        self._client_sizes, self._max_staleness = client_sizes, max_staleness
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
            RoundError: no round was configured yet.
        """
        if self._server is None:
            raise RoundError("server: there is none before the strategy's first round")
        return self._server

    def summary(self) -> None:
        """Log what the strategy does."""
        options = {name: getattr(self.algorithm, name) for name in signature(self.method).parameters}
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        lr, place = "of the clients' own" if self._lr is None else self._lr, self._storage.path or "in memory"
        log(INFO, "\t├──> fedcore: %s(%s), lr %s, storage %s", self.method.__name__, said, lr, place)
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
        orders = instructions if self._lr is not None else model_alone
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
        new = newcomers(self.server, (one.node for one in self._asked), sizes)
        with self.server.open_round(newcomers=new) as round:
            for reply in replies:
                who = request_of(asked, reply)
                if who is None:
                    log(WARNING, "aggregate_train: a reply to no message that is waited for, left out")
                elif failure := failure_of(who.node, reply):
                    self.failures.append(failure)
                    if failure.code == UNREADABLE:
                        round.reject(who.node, failure.reason)
                else:
                    add_reply(round, who.node, partial(self._read, who, reply))
                    collected.add(who.node, reply)
                del reply
        assert round.report is not None
        return self._after(round.report, asked.values(), collected)

    def _read(self, asked: Asked, reply: Message) -> Update:
        """The update in a reply; what it reports is checked by the round."""
        content, weight = reply.content, self.weighted_by_key
        controls = records_of(content, ArrayRecord)
        models = [record for name, record in controls.items() if name != CONTROL]
        if len(models) != 1:
            raise ArrayError(f"arrays: expected one record of the model, got {len(models)}")
        metrics = only_record(content)
        if weight not in metrics:  # where Flower's own strategy stops
            raise ArrayError(f"metrics: expected {weight!r}, the reply's weight, got none: see weighted_by_key")
        done: Mapping[str, Any] = records_of(content, ConfigRecord).get(METHOD, {})
        model = self._wire.read(models[0])
        for name, residue in self._lost.get(asked.round, {}).items():  # so that x - y is what the client did
            model[name] = _moved(model[name], residue)
        return Update(
            asked.node,
            model,
            steps=steps_of(done.get("steps"), metrics, self._steps, self.server),
            examples=integral(metrics.get(weight)),
            lr=done.get("lr"),
            control=read_vector(CONTROL, controls[CONTROL]) if CONTROL in controls else None,
            count=asked.count,
            round=asked.round,
            keep=True,  # of the message, or made here
        )

    def _after(
        self, report: Report, pending: Iterable[Asked], collected: Collected
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Keep what a finished round leaves, log it, and make Flower's answer."""
        self.reports.append(report)
        first = report.round - self._max_staleness
        pending = list(pending)
        self._asked = [asked for asked in pending if asked.round > first]
        self._lost = {round: lost for round, lost in self._lost.items() if round > first}
        log(INFO, "aggregate_train: Received %s results and %s failures", len(report.accepted), len(self.failures))
        if silent := [asked.node for asked in pending if asked.round == report.round]:
            log(INFO, "\t> %s", silence(silent))
        if line := rejection_line(report):
            log(WARNING if report.accepted else ERROR, "\t> %s", line)
        _log_failures(self.failures)
        metrics, odd = collected.usual(
            self.weighted_by_key, "aggregate_train", self._ratio, [int(node) for node in report.accepted]
        )
        if odd:
            log(WARNING, "\t> Of the metrics alone: %s", rejections(odd, len(metrics)))
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

        With the rule ``CapExamples`` a claim of examples weighs up to its ratio times the median of the claims.
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
        _log_failures(failures)
        if self.left_out:
            log(WARNING if metrics else ERROR, "\t> %s", rejections(self.left_out, len(metrics)))
        return mean_of(lambda some: self.evaluate_metrics_aggr_fn(some, self.weighted_by_key), metrics)

    def _write_model(self) -> ArrayRecord:
        """The server's model as a record, made once a round."""
        number = self.server.round_number
        if self._written is None or self._written[0] != number:
            self._written = None  # before there are two
            with span("encode"):
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
            options = {"lr": UNKNOWN if self._lr is None else self._lr, "storage": self._storage, **self._options}
            self._server = open_server(self._wire.read(arrays), self.algorithm, [], **options)
        if not self._is_sized:
            return nodes
        known = self._server.clients
        new = [node for node in nodes if node not in known and node not in self._sizes]
        known_sizes = () if self._server.client_sizes is None else self._server.client_sizes.tolist()
        others = [*self._sizes.values(), *known_sizes]
        if new:
            self._sizes |= ask_sizes(grid, new, self._client_sizes, self.configrecord_key, self._ratio, others)
        if not self._sizes and not len(known):
            raise RangeError("client_sizes: no node answered the query for its number of examples; give client_sizes=")
        return [node for node in nodes if node in known or node in self._sizes]

    def _go_on(self, initial: ArrayRecord) -> None:
        """Load the server of an earlier run, if there is one."""
        folder = self._resume or (Path(self._storage.path or "") if is_begun(self._storage) else None)
        if folder is not None and self._server is None:
            storage = self._storage if self._resume is None else None
            how = {"lr": self._lr, "storage": storage, "any_form": True, **self._options}
            self._server = load_server(folder, self._wire.read(initial), self.algorithm, **how)


def _moved(y: Any, residue: F32) -> Any:
    """y + residue; y as it is where the shapes differ, for which the round will reject it."""
    return y + residue if y.shape == residue.shape else y


def _log_failures(failures: Iterable[Failure]) -> None:
    for failure in failures:
        log(INFO, "\t> Received error in reply from node %d: %s", failure.node, failure.reason)


# A strategy for each of ``fedcore.algorithms``; their arguments are in ``ServerStrategy``.


class FedAvg(ServerStrategy):
    """``fedcore.algorithms.FedAvg`` in Flower."""

    method = algorithms.FedAvg


class FedAdagrad(FedAvg):
    """Flower's FedAdagrad, with its arguments and numbers: FedAvg with ``fedcore.algorithms.optimizers.Adagrad``."""

    def __init__(self, *, eta: float = 0.1, tau: float = 1e-3, **options: Any) -> None:
        super().__init__(optimizer=optimizers.Adagrad(eta=eta, tau=tau, s0=0.0), **_flowers_own(options))


class FedAdam(FedAvg):
    """Flower's FedAdam, with its arguments and its numbers: FedAvg with ``fedcore.algorithms.optimizers.Adam``.

    Flower corrects the start with the exponent of the round after.
    """

    def __init__(
        self, *, eta: float = 0.1, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3, **options: Any
    ) -> None:
        adam = optimizers.Adam(eta=eta, beta1=beta_1, beta2=beta_2, tau=tau, s0=0.0, corrected_from=2)
        super().__init__(optimizer=adam, **_flowers_own(options))


class FedYogi(FedAvg):
    """Flower's FedYogi, with its arguments and its numbers: FedAvg with ``fedcore.algorithms.optimizers.Yogi``."""

    def __init__(
        self, *, eta: float = 0.01, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3, **options: Any
    ) -> None:
        yogi = optimizers.Yogi(eta=eta, beta1=beta_1, beta2=beta_2, tau=tau, s0=0.0)
        super().__init__(optimizer=yogi, **_flowers_own(options))


def _flowers_own(options: dict[str, Any]) -> dict[str, Any]:
    """Options without ``eta_l``, the clients' rate, which Flower takes and never uses."""
    return {name: value for name, value in options.items() if name != "eta_l"}


class FedProx(ServerStrategy):
    """``fedcore.algorithms.FedProx`` in Flower."""

    method = algorithms.FedProx


class SCAFFOLD(ServerStrategy):
    """``fedcore.algorithms.SCAFFOLD`` in Flower."""

    method = algorithms.SCAFFOLD


class MIFA(ServerStrategy):
    """``fedcore.algorithms.MIFA`` in Flower."""

    method = algorithms.MIFA


class MimiC(ServerStrategy):
    """``fedcore.algorithms.MimiC`` in Flower."""

    method = algorithms.MimiC


class FlexibleFedAvg(ServerStrategy):
    """``fedcore.algorithms.FlexibleFedAvg`` in Flower; nodes say their numbers of examples when they are queried."""

    method = algorithms.FlexibleFedAvg


class FedAvgM(ServerStrategy):
    """``fedcore.algorithms.FedAvgM`` in Flower: momentum in the local steps, which Flower's FedAvgM is not."""

    method = algorithms.FedAvgM


class SCAFFOLDM(ServerStrategy):
    """``fedcore.algorithms.SCAFFOLDM`` in Flower."""

    method = algorithms.SCAFFOLDM


class MBSTORM(ServerStrategy):
    """``fedcore.algorithms.MBSTORM`` in Flower."""

    method = algorithms.MBSTORM


class FedAvgMVR(ServerStrategy):
    """``fedcore.algorithms.FedAvgMVR`` in Flower."""

    method = algorithms.FedAvgMVR


class SCAFFOLDMVR(ServerStrategy):
    """``fedcore.algorithms.SCAFFOLDMVR`` in Flower."""

    method = algorithms.SCAFFOLDMVR


class LocalDescent(ServerStrategy):
    """``fedcore.algorithms.LocalDescent`` in Flower."""

    method = algorithms.LocalDescent


class FedVARP(ServerStrategy):
    """``fedcore.algorithms.FedVARP`` in Flower."""

    method = algorithms.FedVARP


class FedStale(ServerStrategy):
    """``fedcore.algorithms.FedStale`` in Flower."""

    method = algorithms.FedStale


class FedDyn(ServerStrategy):
    """``fedcore.algorithms.FedDyn`` in Flower."""

    method = algorithms.FedDyn


class FedNova(ServerStrategy):
    """``fedcore.algorithms.FedNova`` in Flower."""

    method = algorithms.FedNova


class FedExP(ServerStrategy):
    """``fedcore.algorithms.FedExP`` in Flower."""

    method = algorithms.FedExP
