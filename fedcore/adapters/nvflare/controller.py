"""fedcore's methods as an NVFlare workflow."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.model_controller import ModelController

from fedcore.adapters.nvflare.wire import knows_the_order, model_of, update_of
from fedcore.adapters.open_server import check_limits, newcomers, open_server
from fedcore.adapters.order import beyond_plain_steps, require_rate_of_rounds
from fedcore.adapters.refusals import refusal_line, silence
from fedcore.adapters.replies import add_reply
from fedcore.aggregation.sum import Precision
from fedcore.algorithms import Algorithm
from fedcore.arguments import reason_of, shown
from fedcore.errors import FedcoreError, RangeError, RoundError
from fedcore.sampling import without_replacement
from fedcore.server import Round, RoundReport, Server, Update


class Controller(ModelController):
    """Rounds of any method of ``fedcore.algorithms``, over NVFlare's clients by their names.

    Each client gets the model and, in ``FLModel.meta``, what its steps are (``order``); what it answers (``reply``)
    is folded in as it arrives. A client that fails, or sends what cannot be believed, is left out, by name and reason
    in ``reports``, and the round goes on with the others. Clients count from their first answer that does: one that
    is connected and never answers is none of the server's, and nobody waits for it. On an "mmap:PATH" store every
    finished round is durable, and a job that finds an earlier one's store goes on after its last finished round, with
    its controls; the persistor's model then does not count.

    Args:
        algorithm: one of ``fedcore.algorithms``, or its name.
        lr: eta, the rate of the clients' steps.
        num_rounds: the rounds of the whole run, those of earlier jobs counted.
        num_clients: how many of the clients there take part in a round, drawn by (seed, round); None for all.
        server_lr, optimizer: as for ``fedcore.Server``.
        client_sizes: n_k of each client by its name, for FlexibleFedAvg, whose shares are of all clients' examples and
            not of what a reply claims; a client that is not in it does not take part. Steps are those that it says.
        limits: those of ``fedcore.Server`` by name: max_steps, max_examples, max_lr, max_norm, max_norm_ratio,
            own_rates.
        accumulate: as for ``fedcore.Server``: with "exact" no order of the answers shows.
        on_report, weights: as for ``fedcore.Server``; in a job's configuration objects of classes that can be imported
            there, or weights by site.
        store: "ram" or "mmap:PATH", on the server's machine.
        timeout: seconds that a round waits for its clients; 0 for as long as it takes.
        seed: of the draws.
        task_name: what the clients are asked for.
        kwargs: those of NVFlare's ``ModelController``. ``ignore_result_error`` is True here unless it is said.

    Attributes:
        server: the ``fedcore.Server``; the store of one on a disk is closed when the job ends.
        reports: the ``RoundReport`` of each round of this job.

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
        limits: Mapping[str, Any] | None = None,
        accumulate: Precision = "float32",
        on_report: Any = None,
        weights: Any = None,
        store: str = "ram",
        timeout: int = 0,
        seed: int = 0,
        task_name: str = "train",
        ignore_result_error: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(ignore_result_error=ignore_result_error, **kwargs)
        require_rate_of_rounds(lr)
        check_limits(limits)
        # A job's configuration is made from the attributes that are named like the arguments.
        self.algorithm, self.lr, self.server_lr, self.optimizer = algorithm, lr, server_lr, optimizer
        self.num_rounds, self.num_clients, self.store, self.timeout = num_rounds, num_clients, store, timeout
        self.seed, self.task_name, self.client_sizes, self.limits = seed, task_name, client_sizes, limits
        self.accumulate, self.on_report, self.weights = accumulate, on_report, weights
        self.server: Server | None = None
        self.reports: list[RoundReport] = []
        self._open: tuple[Round, set[str]] | None = None

    def run(self) -> None:
        """The workflow."""
        self.server = server = open_server(
            self.algorithm,
            self.load_model().params,
            [],
            store=self.store,
            lr=self.lr,
            server_lr=self.server_lr,
            optimizer=self.optimizer,
            accumulate=self.accumulate,
            on_report=self.on_report,
            weights=self.weights,
            **check_limits(self.limits),
        )
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
            if server.store.medium == "mmap":
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
                opened.refuse(name, _no_model(result))

    def _tell(self, report: RoundReport) -> None:
        self.reports.append(report)
        if line := refusal_line(report):
            self.warning(line) if report.heard else self.error(line)
        self.info(f"round {report.round}: heard {len(report.heard)}, refused {len(report.refused)}")


def _no_model(result: Shareable) -> str:
    """Say why a result is no model."""
    try:
        if (code := result.get_return_code()) != ReturnCode.OK:
            return f"result: expected a model, got the return code {shown(code)}"
        FLModelUtils.from_shareable(result)
    except Exception as error:
        return reason_of(error)
    return "result: expected a model that NVFlare hands on, got one that it kept: see its log"
