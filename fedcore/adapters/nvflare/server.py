"""The server's side: ``Aggregator`` for NVFlare's own workflows, and ``Controller``, a workflow for every method."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import FLMetaKey, ReturnCode, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.model_controller import ModelController

from fedcore.adapters.nvflare.client import KEY
from fedcore.adapters.session import (
    add_reply,
    beyond_plain_steps,
    chain_of,
    newcomers,
    open_server,
    options_of,
    rejection_line,
    require_rate_of_rounds,
    silence,
    with_plain_steps,
)
from fedcore.algorithms import Algorithm
from fedcore.arguments import LONGEST, integral, is_real, is_whole, reason_of, shown
from fedcore.errors import ArrayError, FedcoreError, RangeError, RoundError
from fedcore.options import LARGEST, Compute, Limits, Storage
from fedcore.sampling import without_replacement
from fedcore.server import Broadcast, Report, Round, Server, Update
from fedcore.store.registry import ClientId

MOST_METRICS = 1000
"""Metrics of one site that are kept until the round's end."""


def _options(job: Any) -> dict[str, Any]:
    """The options of ``Server`` among a component's attributes, from which NVFlare makes a job's configuration.

    Raises:
        UnknownNameError, RangeError: one of them is wrong.
    """
    return {
        "lr": job.lr,
        "server_lr": job.server_lr,
        "optimizer": job.optimizer,
        "aggregation": chain_of(job.aggregation),
        "limits": None if job.limits is None else options_of(Limits, job.limits),
        "storage": Storage.of(options_of(Storage, job.storage)),
        "compute": options_of(Compute, job.compute or {}),
        "callbacks": [job.callbacks] if callable(job.callbacks) else list(job.callbacks or ()),
    }


class Controller(ModelController):
    """Rounds of any method of ``fedcore.algorithms``, over NVFlare's clients by their names.

    Each client gets the model and, in ``FLModel.meta``, what its steps are (``order``); what it answers (``reply``)
    is folded in as it arrives. A client that fails, or sends what cannot be believed, is left out, by name and reason
    in ``reports``, and the round goes on with the others. Clients count from their first answer that does: one that
    is connected and never answers is none of the server's, and nobody waits for it. With a folder (``storage``) every
    finished round is durable, and a job that finds an earlier one's goes on after its last finished round, with
    its controls; the persistor's model then does not count.

    Args:
        algorithm: one of ``fedcore.algorithms``, or its name.
        lr: eta, the rate of the clients' steps.
        num_rounds: the rounds of the whole run, those of earlier jobs counted.
        num_clients: how many of the clients there take part in a round, drawn by (seed, round); None for all.
        server_lr, optimizer: as for ``fedcore.Server``.
        client_sizes: n_k of each client by its name, for FlexibleFedAvg, whose shares are of all clients' examples and
            not of what a reply claims; a client that is not in it does not take part. Steps are those that it says.
        aggregation: as for ``fedcore.Server``. A job's configuration can hold names, such as "open" or
            ["ClipToMedian"], rules as dictionaries, such as {"name": "RejectLong", "ratio": 20}, or one rule.
        limits, storage, compute: as for ``fedcore.Server``, or their fields as a dictionary: {"max_norm": 10.0}. The
            path of ``storage`` is one of the server's machine; with {"accumulator": "exact"} the model does not depend
            on the order of the answers.
        callbacks: as for ``fedcore.Server``, or one function; in a job's configuration one object of a class that can
            be imported there.
        timeout: seconds that a round waits for its clients; 0 for as long as it takes.
        seed: of the draws.
        task_name: what the clients are asked for.
        kwargs: those of NVFlare's ``ModelController``. ``ignore_result_error`` is True here unless it is said.

    Attributes:
        server: the ``fedcore.Server``; its folder is closed when the job ends.
        reports: the ``Report`` of each round of this job.

    Raises:
        RangeError: ``lr`` differs between the steps of a round, where a task carries one rate.
    """

    def __init__(
        self,
        algorithm: Algorithm | str = "MimiC",
        *,
        lr: float = 0.1,
        num_rounds: int = 5,
        num_clients: int | None = None,
        server_lr: float | None = None,
        optimizer: Any = None,
        client_sizes: Mapping[str, int] | None = None,
        aggregation: Any = None,
        limits: Limits | Mapping[str, Any] | None = None,
        storage: Storage | Mapping[str, Any] | str | None = None,
        compute: Compute | Mapping[str, Any] | None = None,
        callbacks: Any = (),
        timeout: int = 0,
        seed: int = 0,
        task_name: str = "train",
        ignore_result_error: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(ignore_result_error=ignore_result_error, **kwargs)
        require_rate_of_rounds(lr)
        # A job's configuration is made from the attributes that are named like the arguments.
        self.algorithm, self.lr, self.server_lr, self.optimizer = algorithm, lr, server_lr, optimizer
        self.num_rounds, self.num_clients, self.storage, self.timeout = num_rounds, num_clients, storage, timeout
        self.seed, self.task_name, self.client_sizes = seed, task_name, client_sizes
        self.aggregation, self.limits, self.compute, self.callbacks = aggregation, limits, compute, callbacks
        options_of(Limits, limits or {})  # a wrong one is an error here too; the others need the server's machine
        self.server: Server | None = None
        self.reports: list[Report] = []
        self._open: tuple[Round, set[str]] | None = None

    def run(self) -> None:
        """The workflow."""
        self.server = server = open_server(self.load_model().params, self.algorithm, [], **_options(self))
        self.info(f"{type(server.algorithm).__name__} starts at round {server.round_number} of {self.num_rounds}")
        try:
            while server.round_number < self.num_rounds and not self.abort_signal.triggered:
                names = self.choose(self._there(), server.round_number)
                with server.open_round(newcomers=newcomers(server, names, self.client_sizes)) as opened:
                    answered: set[str] = set()
                    self._open = opened, answered
                    self._ask(server, opened, names, answered)
                    self._wait()
                    if self.abort_signal.triggered:
                        opened.abort()
                        return
                assert opened.report is not None
                if silent := [name for name in names if name not in answered]:
                    self.info(f"round {opened.report.round}: {silence(silent)}")
                self._tell(opened.report)
                self.save_model(FLModel(params=server.tensors(), current_round=server.round_number))
        finally:
            if _options(self)["storage"].path is not None:
                server.close()  # so that another job may open it

    def choose(self, names: list[str], round: int) -> list[str]:
        """Choose who takes part: ``num_clients`` of the names, drawn anew each round; a subclass may do it otherwise.

        Args:
            names: the clients that are there, in alphabetical order.
        """
        if self.num_clients is None or self.num_clients >= len(names):
            return names
        drawn = without_replacement(len(names), self.num_clients, seed=self.seed, round=round)
        return [names[i] for i in sorted(drawn.tolist())]

    def _there(self) -> list[str]:
        names = (client.name for client in self.engine.get_clients())
        return sorted(name for name in names if self.client_sizes is None or name in self.client_sizes)

    def _ask(self, server: Server, opened: Round, names: list[str], answered: set[str]) -> None:
        """Send the round's tasks: one for all, or one for each client where a term is its own."""
        if not names:
            return
        sent = server.broadcast(names).on_host()
        own = server.algorithm.keeps_rows and server.algorithm.direction.from_row != 0
        for targets in [[name] for name in names] if own else [names]:
            self.send_model(
                task_name=self.task_name,
                data=model_of(server, sent, targets[0] if own else None),
                targets=targets,
                timeout=self.timeout,
                callback=lambda model: self._heard(opened, answered, model),
            )

    def _wait(self) -> None:
        while self.get_num_standing_tasks() and not self.abort_signal.triggered:
            time.sleep(self._task_check_period)

    def _heard(self, opened: Round, answered: set[str], model: FLModel) -> bool:
        """Fold a reply in; return whether it counts so far."""
        name = model.meta["client_name"]  # NVFlare's own, of whom the task was given to
        answered.add(name)
        try:
            return add_reply(opened, name, lambda: self._read(name, model))
        except FedcoreError as error:
            self.warning(f"{name}: {error}")
            return False

    def _read(self, name: str, model: FLModel) -> Update:
        assert self.server is not None
        method = self.server.algorithm
        if (more := beyond_plain_steps(method)) and not knows_the_order(model):
            due = f"steps: expected those of fedcore's reply, since {type(method).__name__} is a method {more}"
            raise RangeError(f"{due}, got an answer of a client that has not looked at them")
        return update_of(name, model, counts_steps=True)

    def _process_result(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Take a result as NVFlare does; reject by the client's name one that NVFlare cannot read or hand on."""
        name, result = client_task.client.name, client_task.result
        try:
            super()._process_result(client_task, fl_ctx)
        except Exception as error:
            client_task.result = None
            self.warning(f"{name}: {reason_of(error)}")
        if self._open is None or client_task.task.name != self.task_name:
            return
        opened, answered = self._open
        if name not in answered:
            answered.add(name)
            with suppress(RoundError):  # the round is over
                opened.reject(name, _no_model(result))

    def _tell(self, report: Report) -> None:
        self.reports.append(report)
        if line := rejection_line(report):
            self.warning(line) if report.accepted else self.error(line)
        self.info(f"round {report.round}: heard {len(report.accepted)}, refused {len(report.rejected)}")


def _no_model(result: Shareable) -> str:
    """Say why a result is no model."""
    try:
        if (code := result.get_return_code()) != ReturnCode.OK:
            return f"result: expected a model, got the return code {shown(code)}"
        FLModelUtils.from_shareable(result)
    except Exception as error:
        return reason_of(error)
    return "result: expected a model that NVFlare hands on, got one that it kept: see its log"


class Aggregator(ModelAggregator):
    """The methods whose clients take plain steps (FedAvg, MIFA, MimiC, LocalDescent), for NVFlare's FedAvg
    and ScatterAndGather workflows and clients as they are.

    ``reset_stats`` opens a round, ``accept_model`` folds a reply in, ``aggregate_model`` finishes the round. A reply
    that cannot be believed is left out, by name and reason in ``reports``. Other methods need ``Controller``.

    Args:
        algorithm: one of ``fedcore.algorithms``, or its name.
        lr: eta, the rate of the clients' steps, which only methods in gradient units use.
        server_lr, optimizer: as for ``fedcore.Server``.
        aggregation, limits, compute, callbacks: as for ``Controller``.
        storage: as for ``Controller``; with a folder a later job goes on after the last finished round: with the rows,
            and with the model, which takes the place of the one that the job starts from.
        model: the first model by name; None for the job's own.
        clients: the names of all clients, whether or not they ever answer; None for those that do: each counts from
            its first answer that does.

    Attributes:
        server: the ``fedcore.Server``, once a round was opened.
        reports: the ``Report`` of each round of this job.

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
        storage: Storage | Mapping[str, Any] | str | None = None,
        model: dict[str, Any] | None = None,
        clients: list[str] | None = None,
        aggregation: Any = None,
        limits: Limits | Mapping[str, Any] | None = None,
        compute: Compute | Mapping[str, Any] | None = None,
        callbacks: Any = (),
    ) -> None:
        super().__init__()
        self.algorithm, self.lr, self.server_lr, self.optimizer = algorithm, lr, server_lr, optimizer
        self.storage, self.model, self.clients = storage, model, clients
        self.aggregation, self.limits, self.compute, self.callbacks = aggregation, limits, compute, callbacks
        with_plain_steps(algorithm, lr)
        options_of(Limits, limits or {})  # a wrong one is an error here too; the others need the server's machine
        self.server: Server | None = None
        self.reports: list[Report] = []
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
        if line := rejection_line(report):
            self._warn(line)
        meta = {"nr_aggregated": len(report.accepted)}
        weights = dict(zip(report.accepted, report.weights.tolist(), strict=True))
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
        server = open_server(weights, self.algorithm, self.clients or [], **_options(self))
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


# What an FLModel holds beside its parameters, to a client and back.


def model_of(server: Server, sent: Broadcast, client: ClientId | None) -> FLModel:
    """Make the message to a client; with None the one to all of them, where no term is a client's own.

    Cost: one copy of x, and an offset.
    """
    assignment = sent.of(sent.ids[0] if client is None else client)
    told = {**assignment.numbers(), **assignment.vectors()}
    return FLModel(params=server.tensors(sent=True), current_round=sent.round, meta={KEY: told})


def knows_the_order(model: FLModel) -> bool:
    """Tell whether a client answered by ``reply``; one that did not has not looked at the order either."""
    return isinstance(model.meta, Mapping) and isinstance(model.meta.get(KEY), Mapping)


def update_of(client: ClientId, model: FLModel, *, counts_steps: bool) -> Update:
    """A reply as a round takes it; what it says is checked there and not here.

    Its weight is the examples of fedcore's own reply, else ``NUM_STEPS_CURRENT_ROUND``, else 1, as NVFlare has it.

    Args:
        counts_steps: whether the method needs the steps; else a site may leave them out, or give a fraction.
    """
    meta = model.meta if isinstance(model.meta, Mapping) else {}
    said = meta.get(KEY)
    said = said if isinstance(said, Mapping) else {}
    steps = integral(_number(meta.get(FLMetaKey.NUM_STEPS_CURRENT_ROUND)))
    examples = said.get("examples")
    if examples is None:
        examples = 1 if steps is None else steps
    if not counts_steps and (steps is None or (is_real(steps) and not is_whole(steps, high=Limits.max_steps))):
        steps = 1  # it is a weight alone, as large as the site likes
    return Update(
        client,
        _params(model.params),
        steps=steps,
        examples=integral(examples),
        lr=said.get("lr"),
        control=said.get("control"),
        kind="delta" if model.params_type == ParamsType.DIFF else "model",
    )


def _number(value: Any) -> Any:
    """A scalar of any library as Python's number; anything else unchanged."""
    is_scalar = hasattr(value, "item") and getattr(value, "shape", None) in ((), [])
    return value.item() if is_scalar else value


def _params(params: Any) -> Any:
    """The parameters; of NVFlare's references to tensors on a disk the tensors, one after another."""
    if not isinstance(params, Mapping):
        return params
    return {name: leaf.materialize() if hasattr(leaf, "materialize") else leaf for name, leaf in params.items()}


def metrics_of(given: Any) -> dict[str, float]:
    """A site's metrics, those that are numbers in float32's range; the first ``MOST_METRICS`` of them."""
    found: dict[str, float] = {}
    for name, value in islice(given.items(), MOST_METRICS) if isinstance(given, Mapping) else ():
        with suppress(Exception):  # of an object that a site made
            number = float(_number(value))
            is_named = type(name) is str and len(name) <= LONGEST
            if is_named and not isinstance(value, str | bytes) and abs(number) <= LARGEST:
                found[name] = number
    return found


def mean_metrics(found: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float] | None:
    """The mean of the sites' metrics as NVFlare makes it: of each over the sites that have it, by their weights.

    Args:
        found: the weight that each site's update had, and its metrics.
    """
    sums: dict[str, tuple[float, float]] = {}
    for weight, metrics in found:
        for name, value in metrics.items():
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = total + weight * value, weights + weight
    return {name: total / weights for name, (total, weights) in sums.items() if weights} or None
