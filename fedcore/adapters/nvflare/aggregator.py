"""fedcore's averaging methods in the place of an NVFlare workflow's aggregator."""

from collections.abc import Callable, Mapping
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedcore.adapters.nvflare.wire import mean_metrics, metrics_of, update_of
from fedcore.adapters.open_server import check_limits, newcomers, open_server
from fedcore.adapters.order import with_plain_steps
from fedcore.adapters.refusals import refusal_line
from fedcore.adapters.replies import add_reply
from fedcore.aggregation.sum import Precision
from fedcore.algorithms import Algorithm
from fedcore.arguments import reason_of
from fedcore.errors import ArrayError, RoundError
from fedcore.server import Round, RoundReport, Server, Update


class Aggregator(ModelAggregator):
    """The methods whose clients take plain steps (FedAvg, MIFA, MimiC, LocalDescent), for NVFlare's FedAvg
    and ScatterAndGather workflows and clients as they are.

    ``reset_stats`` opens a round, ``accept_model`` folds a reply in, ``aggregate_model`` finishes the round. A reply
    that cannot be believed is left out, by name and reason in ``reports``. Other methods need ``Controller``.

    Args:
        algorithm: one of ``fedcore.algorithms``, or its name.
        lr: eta, the rate of the clients' steps, which only methods in gradient units use.
        server_lr, optimizer: as for ``fedcore.Server``.
        limits: those of ``fedcore.Server`` by name, such as {"limits": "open"} or {"max_norm": 10.0}.
        accumulate: as for ``fedcore.Server``: with "exact" no order of the answers shows.
        on_report, weights: as for ``fedcore.Server``; in a job's configuration objects of classes that can be imported
            there, or weights by site.
        store: "ram", or "mmap:PATH" so that a later job goes on after the last finished round: with the rows, and with
            the model, which takes the place of the one that the job starts from.
        model: the first model by name; None for the job's own.
        clients: the names of all clients, whether or not they ever answer; None for those that do: each counts from
            its first answer that does.

    Attributes:
        server: the ``fedcore.Server``, once a round was opened.
        reports: the ``RoundReport`` of each round of this job.

    Raises:
        RangeError: the method's clients take no plain steps, and ``Controller`` has it; or ``lr`` differs between the
            steps of a round.
    """

    def __init__(
        self,
        algorithm: Algorithm | str = "FedAvg",
        lr: float = 0.1,
        server_lr: float | None = None,
        optimizer: Any = None,
        store: str = "ram",
        model: dict[str, Any] | None = None,
        clients: list[str] | None = None,
        limits: Mapping[str, Any] | None = None,
        accumulate: Precision = "float32",
        on_report: Any = None,
        weights: Any = None,
    ) -> None:
        super().__init__()
        self.algorithm, self.lr, self.server_lr, self.optimizer = algorithm, lr, server_lr, optimizer
        self.store, self.model, self.clients, self.limits = store, model, clients, limits
        self.accumulate, self.on_report, self.weights = accumulate, on_report, weights
        with_plain_steps(algorithm, lr)
        check_limits(limits)
        self.server: Server | None = None
        self.reports: list[RoundReport] = []
        self._round: Round | None = None
        self._metrics: dict[Any, dict[str, float]] = {}

    def reset_stats(self) -> None:
        """Open a round; one that was never finished is forgotten."""
        if self._round is not None:
            self._round.abort()
        if self.server is None:
            self.server = self._start()
        self._round = self.server.open_round(newcomers=newcomers(self.server, self._names(), None))

    def accept_model(self, model: FLModel) -> bool:
        """Fold a reply in, or reject it if it cannot be believed; return whether it counts so far."""
        try:
            name = model.meta["client_name"]  # NVFlare's workflow writes it over what the client sent
        except Exception as error:
            self._warn(f"a result without a client's name: {reason_of(error)}")
            return False
        return self._add(name, lambda: model)

    def aggregate_model(self) -> FLModel:
        """Finish the round.

        Raises:
            RoundError: none is open.
        """
        if self._round is None or self.server is None:
            raise RoundError("aggregate_model: expected an open round, got none")
        opened, self._round = self._round, None
        self.reports.append(report := opened.finish())
        if line := refusal_line(report):
            self._warn(line)
        meta = {"nr_aggregated": len(report.heard)}
        weights = dict(zip(report.heard, report.weights.tolist(), strict=True))
        metrics = mean_metrics([(weights[name], found) for name, found in self._metrics.items() if name in weights])
        self._metrics = {}
        return FLModel(params_type=ParamsType.FULL, params=self.server.tensors(), metrics=metrics, meta=meta)

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Take a result of ScatterAndGather, as ``accept_model`` does, by the name that NVFlare authenticated."""
        self.fl_ctx = fl_ctx
        return self._add(_sender(shareable, fl_ctx), lambda: FLModelUtils.from_shareable(shareable, fl_ctx))

    def _add(self, name: Any, read: Callable[[], FLModel]) -> bool:
        if self._round is None:
            self.reset_stats()
        assert self._round is not None
        counts_steps = self.server is not None and self.server._settings.counts_steps

        told: list[dict[str, float]] = []

        def update() -> Update:
            model = read()
            told.append(metrics_of(model.metrics))
            return update_of(name, model, counts_steps=counts_steps)

        is_accepted = add_reply(self._round, name, update)
        if is_accepted:
            self._metrics[name] = told[0]
        return is_accepted

    def _start(self) -> Server:
        weights = self.model if self.model is not None else self._job_s_weights()
        server = open_server(
            self.algorithm,
            weights,
            self.clients or [],
            store=self.store,
            lr=self.lr,
            server_lr=self.server_lr,
            optimizer=self.optimizer,
            accumulate=self.accumulate,
            on_report=self.on_report,
            weights=self.weights,
            **check_limits(self.limits),
        )
        if server.round_number:
            weights.update(server.tensors())  # in place: it is the workflow's own model, and about to be sent
        return server

    def _job_s_weights(self) -> dict[str, Any]:
        learnable = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL) if self.fl_ctx is not None else None
        if learnable is None:
            raise ArrayError("model: expected the job's first model in the context, or as an argument, got neither")
        weights: dict[str, Any] = learnable[ModelLearnableKey.WEIGHTS]
        return weights

    def _names(self) -> list[str]:
        if self.clients is not None:
            return self.clients
        engine = self.fl_ctx.get_engine() if self.fl_ctx is not None else None
        return sorted(client.name for client in engine.get_clients()) if engine is not None else []

    def _warn(self, message: str) -> None:
        if self.fl_ctx is not None:
            self.warning(message)


def _sender(shareable: Shareable, fl_ctx: FLContext) -> Any:
    """Find the sender's name: by the token, as the server noted it in the result, else as the peer's context says."""
    try:
        client = shareable.get_header(ServerCommandKey.FL_CLIENT)
    except Exception:  # headers that are none
        client = None
    return client.name if isinstance(client, Client) else fl_ctx.get_peer_context().get_identity_name()
