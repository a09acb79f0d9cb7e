"""fedcore's methods for Flower's older API: ``flwr.server.strategy.Strategy``, ``NumPyClient`` and their kin."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flwr.common import EvaluateRes, FitIns, FitRes, Parameters, Scalar
from flwr.common.logger import log
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg as FlowerFedAvg

from fedcore.adapters import npy
from fedcore.adapters.flower.metrics import IN_RANGE, mean_of, plain_number, require_finite, within_medians
from fedcore.adapters.open_server import limits_of, load_server, newcomers, open_server
from fedcore.adapters.order import (
    beyond_plain_steps,
    require_own_model,
    require_rate_of_rounds,
    require_steps,
    steps_of,
)
from fedcore.adapters.refusals import refusal_line, refusals
from fedcore.adapters.replies import add_reply
from fedcore.algorithms import Algorithm, named
from fedcore.arguments import absolute_store, integral, is_real, real, reason_of, shown
from fedcore.errors import ArrayError, RangeError
from fedcore.layout import named_tensors
from fedcore.server import Broadcast, Round, RoundReport, Server, Update
from fedcore.server.limits import Limits

PREFIX = "fedcore."
"""What the config and metrics of fedcore's methods begin with: the fields of ``order.FIELDS``, steps; as `.npy` bytes
offset, x_prev, control."""


class LegacyStrategy(FlowerFedAvg):
    """Flower's older FedAvg, but that the model, the method and its state are a ``fedcore.Server``'s.

    A client finds the method's coefficients in its config: ``fedcore.lr``, ``fedcore.a``, ``fedcore.b``,
    ``fedcore.mu``, ``fedcore.second_vector`` ("" for none), ``fedcore.plain`` (whether it must do without local
    momentum and clipping), and as `.npy` bytes of flat vectors ``fedcore.offset`` and ``fedcore.x_prev``. In its
    metrics it says ``fedcore.steps`` and, where a second vector is asked for, ``fedcore.control``. Its steps are along
    minibatches and its row is the server's: this API has no client of fedcore's own, that could be held to anything
    else. Tensors have no names here, so that BatchNorm's statistics are parameters like the others, and counters alone
    are told apart.

    Args:
        algorithm: one of ``fedcore.algorithms``, or its name: one whose clients step along each minibatch, with rows on
            the server.
        lr: as for ``fedcore.Server``, the same for all steps of a round.
        steps: K of results that do not say ``fedcore.steps``: a number, or the metric that holds it; for methods of
            plain local steps, whose clients need not know fedcore. A number is also the ``max_steps`` of a new server
            that is told none.
        server: further arguments of it; on the store "mmap:PATH" every finished round is durable, and a strategy that
            finds an earlier one's store goes on after its last finished round.
        resume: a folder that ``server.save`` wrote, to go on from.
        options: those of Flower's FedAvg; ``initial_parameters`` is needed.

    Attributes:
        reports: a RoundReport of each round.

    Raises:
        RangeError: there are no initial parameters; or the method's clients do what this API cannot tell them.
        CheckpointError: there is a server to go on with, of another algorithm or model.
    """

    def __init__(
        self,
        algorithm: Algorithm | str,
        *,
        lr: Any,
        steps: int | str | None = None,
        server: Mapping[str, Any] | None = None,
        resume: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self.initial_parameters is None:
            raise RangeError("initial_parameters: expected the model to start from, got None")
        algorithm = _told(algorithm)
        require_rate_of_rounds(lr)
        require_steps(steps, algorithm)
        self._steps = steps
        self.server: Server | None = None
        self.reports: list[RoundReport] = []
        self._returned: Parameters | None = None
        self._model = [npy.read(tensor) for tensor in self.initial_parameters.tensors]
        self._how: dict[str, Any] = {"algorithm": algorithm, "x0": self._model, "lr": lr, **(server or {})}
        self._client_sizes = self._how.pop("client_sizes", None)
        self._ratio = Limits.of(limits_of(self._how)).examples_ratio
        self._how["store"] = absolute_store(self._how.get("store", "ram"))
        medium, _, path = self._how["store"].partition(":")
        if resume is not None:
            self.server = load_server(resume, steps=steps, **self._how)
        elif medium == "mmap" and Path(path).is_dir() and any(Path(path).iterdir()):
            self.server = open_server(clients=[], steps=steps, **self._how)

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """The first model: that of the server to go on with, if there is one."""
        initial = super().initialize_parameters(client_manager)
        return initial if self.server is None else self._parameters()

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Flower's sample of clients, with the server's model and the method's coefficients.

        Raises:
            ArrayError: ``parameters`` are another model than ``aggregate_fit`` returned.
        """
        if parameters and self._returned and parameters is not self._returned:
            own, given = ([npy.read(one) for one in each.tensors] for each in (self._returned, parameters))
            require_own_model(own, given)
        chosen = super().configure_fit(server_round, parameters, client_manager)
        clients = [_key(proxy) for proxy, _ in chosen]
        if self.server is None:
            self.server = open_server(clients=[], steps=self._steps, **self._how)
        sent = self.server.broadcast(clients, newcomers=clients).on_host()
        model = self._parameters()
        return [(proxy, FitIns(model, {**said.config, **_says(sent, _key(proxy))})) for proxy, said in chosen]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Fold the results in and take the server's step; who failed did not take part."""
        assert self.server is not None
        if failures and not self.accept_failures:
            return None, {}
        came = newcomers(self.server, (_key(proxy) for proxy, _ in results), self._client_sizes)
        with self.server.open_round(newcomers=came) as round:
            for proxy, result in results:
                self._add(round, _key(proxy), result)
        assert round.report is not None
        self.reports.append(round.report)
        if line := refusal_line(round.report):
            log(WARNING if round.report.heard else ERROR, "aggregate_fit: %s", line)
        heard = set(round.report.heard)
        counted = [pair for pair in results if _key(pair[0]) in heard]
        if self.server.algorithm.keeps_rows and _are_alike(counted):
            log(
                WARNING,
                "aggregate_fit: all %s results are the same model, as after secure aggregation: from a mean alone, "
                "%s learns nothing about single clients and steps as FedAvg; take FedAvg",
                len(counted),
                type(self.server.algorithm).__name__,
            )
        usable = _usable(counted, "aggregate_fit", self._ratio)
        aggregate = self.fit_metrics_aggregation_fn
        self._returned = self._parameters()
        if not aggregate or not usable:
            return self._returned, {}
        mean = _of_most(lambda some: aggregate([(result.num_examples, result.metrics) for _, result in some]), usable)
        return self._returned, mean or {}

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Flower's means of what the clients say, of those that can be believed; the others are named in the log."""
        usable = _usable(results, "aggregate_evaluate", self._ratio)
        mean = super().aggregate_evaluate
        return _of_most(lambda some: mean(server_round, some, failures), usable) or (None, {})

    def _add(self, round: Round, client: int | str, result: FitRes) -> None:
        add_reply(round, client, lambda: self._read(client, result))

    def _read(self, client: int | str, result: FitRes) -> Update:
        assert self.server is not None
        says = {name.removeprefix(PREFIX): value for name, value in result.metrics.items() if name.startswith(PREFIX)}
        if len(result.parameters.tensors) != len(self._model):
            raise ArrayError(f"parameters: expected {len(self._model)}, got {len(result.parameters.tensors)}")
        control: Any = says.get("control")
        by = f"say {PREFIX}steps among the metrics"
        return Update(
            client,
            [npy.as_float32(npy.read(tensor)) for tensor in result.parameters.tensors],
            steps=steps_of(says.get("steps"), result.metrics, self._steps, self.server, by=by),
            examples=result.num_examples,
            lr=says.get("lr"),  # type: ignore[arg-type]
            control=npy.read(control).copy() if isinstance(control, bytes) else None,
            keep=True,  # of the message, or made here
        )

    def _parameters(self) -> Parameters:
        assert self.server is not None
        tensors = named_tensors(self.server.tensors(library="numpy", copy=False, sent=True))
        return Parameters([npy.write(tensors[str(i)]) for i in range(len(self._model))], "numpy.ndarray")


def _told(algorithm: Algorithm | str) -> Algorithm:
    """The algorithm, if clients of this API can be told what it has them do."""
    method = named(algorithm) if isinstance(algorithm, str) else algorithm
    if not method.local_rule.ordinary or method.rows_at_clients:
        raise RangeError(
            "algorithm: expected one of steps along each minibatch and rows on the server over Flower's older API, got"
            f" {type(method).__name__}, {beyond_plain_steps(method)}: fedcore.adapters.flower has it"
        )
    return method


R = TypeVar("R", FitRes, EvaluateRes)
M = TypeVar("M")


def _usable(results: list[tuple[ClientProxy, R]], where: str, ratio: float | None) -> list[tuple[ClientProxy, R]]:
    """The results whose numbers spoil no mean, examples at most ``ratio`` times the median; the log says what was."""
    usable: list[tuple[ClientProxy, R]] = []
    refused: list[tuple[int | str, str]] = []
    for pair in results:
        try:
            usable.append((pair[0], _checked(pair[1])))
        except Exception as error:
            refused.append((_key(pair[0]), reason_of(error)))
    if refused:
        log(WARNING if usable else ERROR, "%s: of the metrics alone: %s", where, refusals(refused, len(usable)))
    claims = within_medians({_key(proxy): result.num_examples for proxy, result in usable}, where, ratio)
    counted = [(proxy, result, min(result.num_examples, claims[_key(proxy)])) for proxy, result in usable]
    return [(proxy, replace(result, num_examples=n)) for proxy, result, n in counted]  # type: ignore[arg-type]


def _checked(result: R) -> R:
    """The result, its numbers read once.

    Raises:
        Exception: a number is missing or would spoil a mean, or the result cannot be read.
    """
    if isinstance(result, EvaluateRes):
        if not is_real(loss := plain_number(result.loss)):
            raise ArrayError(f"loss: expected a number, got {shown(loss)}")
        require_finite("loss", loss)
        result = replace(result, loss=loss)  # type: ignore[call-arg]
    metrics = {str(name): plain_number(value) for name, value in result.metrics.items()}
    for name, value in metrics.items():
        require_finite(name, value)
    real("num_examples", result.num_examples, IN_RANGE)
    examples = integral(plain_number(result.num_examples))
    return replace(result, num_examples=examples, metrics=metrics)


def _of_most(mean: Callable[[list[tuple[ClientProxy, R]]], M], results: list[tuple[ClientProxy, R]]) -> M | None:
    """The mean by a function of the user's; if it raises, of those results whose metrics are named like most."""
    with suppress(Exception):
        return mean(results)
    forms = [frozenset((name, _kind(value)) for name, value in result.metrics.items()) for _, result in results]
    [(usual, number), *others] = Counter(forms).most_common(2)
    if others and others[0][1] == number:  # as many have others: one of them may lie
        with suppress(Exception):
            return mean_of(mean, results)
        log(ERROR, "metrics: as many results have these as others, all are left out")
        return None
    if number < len(results):
        log(ERROR, "metrics: %d results have other metrics than most, left out", len(results) - number)
    return mean_of(mean, [pair for pair, form in zip(results, forms, strict=True) if form == usual])


def _kind(value: object) -> type:
    return float if is_real(value) else type(value)


def _are_alike(results: list[tuple[ClientProxy, FitRes]]) -> bool:
    """Tell whether several clients sent one and the same model."""
    with suppress(Exception):  # of an object that a client made
        tensors = [result.parameters.tensors for _, result in results]
        return len(tensors) > 1 and all(each == tensors[0] for each in tensors[1:])
    return False


def _key(proxy: ClientProxy) -> int | str:
    """The node's id, or the client's where there are no nodes."""
    return getattr(proxy, "node_id", None) or proxy.cid


def _says(sent: Broadcast, client: int | str) -> dict[str, Scalar]:
    """The fields of a client's config that tell it the method."""
    assignment = sent.of(client)
    says: dict[str, Scalar] = {"lr": assignment.lr}
    says |= {PREFIX + name: value for name, value in assignment.numbers().items()}
    return says | {PREFIX + name: npy.write(np.asarray(vector)) for name, vector in assignment.vectors().items()}
