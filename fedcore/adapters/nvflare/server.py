"""The server side: ``Aggregator`` for NVFlare's workflows, and ``Controller``, a workflow for every method."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from inspect import Parameter, signature
from itertools import islice
from threading import RLock
from typing import Any, Self

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import FLMetaKey, ReturnCode, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.base_fedavg import BaseFedAvg
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.model_controller import ModelController

from fedcore.adapters import session
from fedcore.adapters.nvflare.client import KEY
from fedcore.algorithms import Algorithm, named
from fedcore.algorithms.optimizers import as_optimizer
from fedcore.errors import ArrayError, CheckpointError, FedcoreError, RangeError, RoundError
from fedcore.options import LARGEST, PLAIN_DICT, Compute, Limits, RoundPolicy, ServerOptions, Storage, describe
from fedcore.rules import Rule
from fedcore.sampling import without_replacement
from fedcore.server import Broadcast, Report, Round, Server, Update
from fedcore.store.registry import ClientId
from fedcore.validation import LONGEST_REASON, as_integer, is_integer, is_number, rejection_reason, short_repr

MOST_METRICS = 1000
"""The maximum number of metrics of one site that are kept until the end of the round."""


def _marked(value: Any) -> Any:
    """Mark a mapping with "path" or "name", so that NVFlare does not import a class for it.

    Rules in a list become mappings too, since NVFlare's configuration takes no objects in a list.
    """
    if isinstance(value, Mapping) and value.keys() & {"path", "name"}:
        return {PLAIN_DICT: "dict", **value}
    return [_as_mapping(one) for one in value] if isinstance(value, list | tuple) else value


def _as_mapping(rule: Any) -> Any:
    found = describe("aggregation", rule) if isinstance(rule, Rule) else None
    return {"name": found["name"], **found["options"]} if found and found["name"] else rule


class Component(session.Job):
    """The options of a component of a job, as attributes: from them NVFlare writes the job's configuration.

    NVFlare finds the options in the signature, and in those of the base classes of ``*args`` and ``**kwargs``.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = signature(partial(cls.__init__, None))  # type: ignore  # otherwise that of ``__new__``

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise RangeError if a subclass's constructor hides options from NVFlare; let it write those that are given.

        NVFlare leaves out an option that equals the default of a base class, also if the subclass has another default.
        """
        known = signature(cls.__init__).parameters
        given = signature(cls.__init__).bind_partial(None, *args, **kwargs).arguments
        hidden = [name for name in given if known[name].kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        if hidden and not {"args", "kwargs"} <= known.keys():
            raise RangeError(
                f"{cls.__name__}.__init__: the options in {hidden[0]!r} would be missing in the job, since NVFlare "
                "finds those of a base class only if the parameters are called *args and **kwargs; use both names"
            )
        component = super().__new__(cls)
        component.__dict__["_always_serialize_args"] = [*given, *kwargs]
        return component

    def __init__(
        self,
        algorithm: Algorithm | str,
        lr: float = 0.1,
        server_lr: float | None = None,
        optimizer: Any = None,
        storage: Storage | Mapping[str, Any] | str | None = None,
        aggregation: Any = None,
        limits: Limits | Mapping[str, Any] | None = None,
        compute: Compute | Mapping[str, Any] | None = None,
        policy: RoundPolicy | Mapping[str, Any] | None = None,
        callbacks: Any = (),
        parts: Mapping[str, Any] | None = None,
        abort_after: int | None = 3,
        **kwargs: Any,
    ) -> None:
        known = {name for kind in type(self).__mro__ for name in signature(kind.__init__).parameters}  # type: ignore[misc]
        session.require_known(type(self).__name__, kwargs, known - {"self", "args", "kwargs"})
        super().__init__(**kwargs)
        as_optimizer(optimizer)
        session.require_rate_of_rounds(lr)
        if isinstance(algorithm, str):
            named(algorithm)
        self.algorithm, self.lr, self.server_lr, self.optimizer = algorithm, lr, server_lr, optimizer
        self.aggregation, self.storage, self.parts = _marked(aggregation), _marked(storage), parts
        self.limits, self.compute, self.policy, self.callbacks = limits, compute, policy, callbacks
        self.abort_after, self._rejected_rounds = abort_after, session.RejectedRounds(abort_after)
        ServerOptions.from_mapping({"limits": limits, "policy": policy})  # the others need the server's machine
        self.server: Server | None = None
        self.reports: list[Report] = []
        self._metrics: dict[Any, dict[str, float]] = {}

    def _server_options(self) -> ServerOptions:
        callbacks = [self.callbacks] if callable(self.callbacks) else list(self.callbacks or ())
        options = {one.name: getattr(self, one.name) for one in fields(ServerOptions)}
        return ServerOptions.from_mapping(options | {"callbacks": callbacks})


class Controller(Component, ModelController):
    """An NVFlare workflow that runs any method of ``fedcore.algorithms``.

    Each client gets the model and, in ``FLModel.meta``, the instructions for its steps (``order``). The server adds
    each reply (``reply``) to the round when it arrives. It rejects a client that fails or sends an invalid reply; the
    round continues, and ``reports`` lists the name and the reason. A client is registered with its first accepted
    reply, so that methods such as MIFA do not wait for a client that never replies. With a folder (``storage``) every
    finished round is durable. A later job then resumes after the last finished round and ignores the persistor's model.

    Args:
        algorithm: one of ``fedcore.algorithms``, or its name.
        lr: eta, the rate of the clients' steps, the same for all steps of a round.
        num_rounds: the rounds of the whole run, including those of earlier jobs.
        num_clients: the number of clients that a round needs. ``over_selection`` times as many are drawn from the
            connected ones. Default: all.
        server_lr, optimizer: as for ``fedcore.Server``.
        client_sizes: n_k by client name, for FlexibleFedAvg, whose weights are shares of all clients' examples. A
            client without a size does not take part.
        aggregation: as for ``fedcore.Server``. A job's configuration may hold rules as names or dictionaries, such as
            "open", ["ClipToMedian"] or {"name": "RejectLong", "ratio": 20}.
        limits, storage, compute, policy: as for ``fedcore.Server``, or their fields as a dictionary, such as
            {"max_norm": 10.0}. The path of ``storage`` is on the server's machine. In a JSON file a dictionary with
            "path" also needs "config_type": "dict", since NVFlare reads other dictionaries as components. With
            {"accumulator": "exact"} the model does not depend on the order of the replies.
        callbacks: as for ``fedcore.Server``, or one function. In a job's configuration: one object whose class the
            server can import.
        seed: the seed for drawing clients.
        abort_after: the job ends with an error after this many rounds in a row that accepted no reply and rejected at
            least one. None: the job continues.
        parts: the arguments ``partial``, ``personal`` and ``frozen`` of ``fedcore.Model``, as a dictionary. With
            ``partial``, a reply may lack the tensors of some groups.
        task_name: the name of the clients' task.
        kwargs: arguments of NVFlare's ``ModelController``. The default of ``ignore_result_error`` is True.

    Attributes:
        server: the ``fedcore.Server``; its folder is closed when the job ends.
        reports: the ``Report`` of each round of this job.

    Raises:
        UnknownNameError: the algorithm or the optimizer is unknown.
        RangeError: the optimizer is not an optimizer, or the policy does not fit NVFlare's tasks.
    """

    def __init__(
        self,
        algorithm: Algorithm | str = "MimiC",
        *args: Any,
        num_rounds: int = 5,
        num_clients: int | None = None,
        client_sizes: Mapping[str, int] | None = None,
        seed: int = 0,
        task_name: str = "train",
        **kwargs: Any,
    ) -> None:
        super().__init__(algorithm, *args, **{"ignore_result_error": True, **kwargs})
        self.num_rounds, self.num_clients, self.client_sizes = num_rounds, num_clients, client_sizes
        self.seed, self.task_name, self.current_round = seed, task_name, 0
        policy = ServerOptions.from_mapping({"policy": self.policy}).policy
        if policy is not None and policy.max_staleness and policy.buffer is None:
            raise RangeError("policy: the tasks of a round end with it; leave max_staleness out, or set buffer")
        self._require_called_methods()
        self._model = FLModel(params={})
        self._open: tuple[Round, set[str]] | None = None
        self._at_work: dict[str, int] = {}  # with a buffer: the sites with a task, and the rounds of their broadcasts
        self._pushed: set[str] = set()  # the sites at work whose results were pushed, but not yet processed
        self._task_ids: dict[str, str] = {}  # of the last result of each site
        self._busy: set[Any] = set()  # with a buffer: the sites that get no task yet
        self._closed: list[Report] = []
        self._turn: Any = None  # the lock of pushes and broadcasts, which NVFlare cannot copy

    def _require_called_methods(self) -> None:
        """Raise an error if a subclass has a method that NVFlare's FedAvg calls and ``run`` does not."""
        kind, others = type(self), {*dir(FedAvg)} - {*dir(Controller)} | {"aggregate"}
        lost = [name for name in sorted(others) if getattr(kind, name, None) is not getattr(Controller, name, None)]
        if kind.run is Controller.run and (public := [name for name in lost if not name.startswith("_")]):
            raise RangeError(
                f"{public[0]}: Controller does not call it; override update_model, which gets the model of each round, "
                "or use Aggregator in a subclass of NVFlare's FedAvg"
            )

    update_model = BaseFedAvg.update_model

    def aggregate(self, results: Sequence[FLModel], aggregate_fn: Any = None) -> FLModel:
        """Raise RoundError, since ``run`` adds each reply when it arrives."""
        raise RoundError(
            "aggregate: Controller adds the replies in its own run; in a run of your own, pass each result to "
            "accept_model of an Aggregator, and take the model from aggregate_model"
        )

    def run(self) -> None:
        """Run the workflow."""
        options = self._server_options()
        self._model = self.load_model()
        model = session.model_of_parts(self._model.params, self.parts)
        self.server = server = session.open_server(model, self.algorithm, [], options)
        if server.round_number:
            self._model.params.update(server.tensors())
        self.info(f"{type(server.algorithm).__name__} starts at round {server.round_number} of {self.num_rounds}")
        try:
            if server.policy.buffer is not None:
                self._run_buffers(server)
            else:
                self._run_rounds(server)
            self._rejected_rounds.check(ended=not self.abort_signal.triggered)
        finally:
            if options.storage.path is not None:
                server.close()  # so that the next job can open the folder

    def _run_rounds(self, server: Server) -> None:
        while server.round_number < self.num_rounds and not self.abort_signal.triggered:
            self._start_round(server)
            if (report := self._run_round(server)) is None:
                return
            self._finished(report)
            self._hand_over(server, report)

    def _start_round(self, server: Server) -> None:
        self.current_round, self._metrics = server.round_number, {}
        self._model.current_round, self._model.total_rounds = self.current_round, self.num_rounds
        self.set_fl_context(self._model)
        self.event(AppEventType.ROUND_STARTED)

    def _hand_over(self, server: Server, report: Report) -> None:
        """Pass the model through ``update_model`` and ``save_model``; a changed model is the server's next x."""
        result = _result(server, report, self._metrics)
        result.current_round = report.round
        self.fire_event_with_data(AppEventType.AFTER_AGGREGATION, self.fl_ctx, AppConstants.AGGREGATION_RESULT, result)
        self._model = self.update_model(self._model, result)
        session.take_model(server, self._model.params)
        self.save_model(self._model)

    def _run_round(self, server: Server) -> Report | None:
        """Run a round; return None if the job was aborted."""
        names = self.sample_clients(self.num_clients)
        if not names:
            raise RoundError(f"round {server.round_number}: no site gets a task, since sample_clients returned none")
        with server.open_round(newcomers=session.newcomers(server, names, self.client_sizes)) as opened:
            answered: set[str] = set()
            self._open = opened, answered
            self._ask(server, names, partial(self._add, opened, answered))
            while self.get_num_standing_tasks() and not self.abort_signal.triggered:
                if session.may_close_early(opened):
                    self.cancel_all_tasks()
                    break
                time.sleep(self._task_check_period)
            if self.abort_signal.triggered:
                opened.abort()
                return None
            report = session.finish(server, opened, self.error)
        if silent := [name for name in names if name not in answered]:
            self.info(f"round {report.round}: {session.silence(silent)}")
        return report

    def _run_buffers(self, server: Server) -> None:
        """Keep ``num_clients`` sites at work; their results are pushed as they arrive."""
        self._turn = RLock()
        self._start_round(server)
        while server.round_number < self.num_rounds and not self.abort_signal.triggered:
            self._ask_free_sites(server)
            self.get_num_standing_tasks()
            with self._turn:
                self._open_buffer()  # closes a buffer whose deadline is over
            time.sleep(self._task_check_period)
            with self._turn:  # no push may close a round meanwhile
                report = None
                while self._closed:
                    self._finished(report := self._closed.pop(0))
                if report is not None:
                    self._hand_over(server, report)
                    self._start_round(server)
        self.cancel_all_tasks()

    def _ask_free_sites(self, server: Server) -> None:
        with self._turn:  # no push may close the round meanwhile
            counted = () if server.settings.repeats else self._open_buffer().clients  # they count once in a buffer
            now, oldest = server.round_number, server.round_number - server.policy.max_staleness
            for name, started in list(self._at_work.items()):
                if started < oldest:  # its result would be rejected
                    self._at_work.pop(name, None)
            self._busy = {*self._at_work, *counted}
            names = [name for name in self.sample_clients(self.num_clients) if name not in self._busy]
            self._at_work |= dict.fromkeys(names, now)
            self._ask(server, names, self._push)

    def _push(self, started: int, model: FLModel) -> bool:
        """Push a result; return whether it could be read."""
        assert self.server is not None
        name = model.meta["client_name"]
        self._pushed.add(name)
        try:
            update = self._read(name, model, started)
            with self._turn:
                self._open_buffer(name)
                self._closed += self.server.push([update], newcomers=self._newcomers())
        except FedcoreError as error:
            self._reject(name, rejection_reason(error))
            return False
        return True

    def _reject(self, name: str, reason: str) -> None:
        """List a site as rejected in the open buffer."""
        self.warning(f"{name}: {reason}")
        with self._turn:
            self._open_buffer().reject(name, reason)

    def _open_buffer(self, name: str | None = None) -> Round:
        """Return the open buffer. A site that joined after it was opened closes it early, to be registered."""
        assert self.server is not None
        self._closed += self.server.push([], newcomers=self._newcomers())
        opened = self.server.open_buffer(newcomers=self._newcomers())
        if name is None or name in self.server.clients:
            return opened
        if opened.clients:
            self._closed.append(opened.finish())
        else:
            opened.abort()
        return self.server.open_buffer(newcomers=self._newcomers())

    def _newcomers(self) -> Any:
        assert self.server is not None
        return session.newcomers(self.server, self._connected(), self.client_sizes)

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """Return the names of the sites to ask, as ``choose`` draws them. A subclass may override this."""
        free = [name for name in self._connected() if name not in self._busy]
        if num_clients == self.num_clients:
            return self.choose(free, self.current_round)
        return self._drawn(free, self.current_round, num_clients)

    def choose(self, names: list[str], round: int) -> list[str]:
        """Return the names to ask; seed and round determine the draw. A subclass may override this."""
        return self._drawn(names, round, self.num_clients)

    def _drawn(self, names: list[str], round: int, num_clients: int | None) -> list[str]:
        k = len(names)
        if num_clients is not None:
            policy = RoundPolicy() if self.server is None else self.server.policy
            k = max(0, policy.asked(num_clients) - len(self._at_work))
        if k >= len(names):
            return names
        drawn = without_replacement(len(names), k, seed=self.seed, round=round)
        return [names[i] for i in sorted(drawn.tolist())]

    def _connected(self) -> list[str]:
        names = (client.name for client in self.engine.get_clients())
        return sorted(name for name in names if self.client_sizes is None or name in self.client_sizes)

    def _ask(self, server: Server, names: list[str], take: Callable[[int, FLModel], bool]) -> None:
        """Send the same task to all clients, or a separate task to each client if a vector differs between clients.

        ``take`` gets the round of the broadcast and each result.
        """
        if not names:
            return
        sent = server.broadcast(names, newcomers=names).on_host()
        own = server.algorithm.keeps_rows and server.algorithm.direction.from_row != 0
        for targets in [[name] for name in names] if own else [names]:
            model = model_of(server, sent, targets[0])
            model.total_rounds = self.num_rounds
            self.send_model(task_name=self.task_name, data=model, targets=targets, callback=partial(take, sent.round))

    def _add(self, opened: Round, answered: set[str], started: int, model: FLModel) -> bool:
        """Add a reply to the round; return whether it is accepted so far."""
        name = model.meta["client_name"]  # NVFlare sets it to the name of the task's client
        answered.add(name)
        try:
            return session.add_reply(opened, name, lambda: self._read(name, model, started))
        except FedcoreError as error:
            self.warning(f"{name}: {error}")
            return False

    def _read(self, name: str, model: FLModel, started: int) -> Update:
        assert self.server is not None
        method, meta = self.server.algorithm, model.meta
        knows_order = isinstance(meta, Mapping) and isinstance(meta.get(KEY), Mapping)
        if not knows_order and (more := session.beyond_plain_steps(method)):
            raise RangeError(
                f"steps: the reply has no meta[{KEY!r}]; {type(method).__name__} is a method {more}, so clients must "
                "answer with fedcore.adapters.nvflare.reply"
            )
        self._metrics[name] = metrics_of(model.metrics)
        update = update_of(name, model, counts_steps=True)
        return update._replace(round=started, update_id=self._task_ids.get(name))

    def _process_result(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Process a result as NVFlare does; reject a result that NVFlare cannot read or does not pass on."""
        name, result = client_task.client.name, client_task.result
        self._task_ids[name] = client_task.id
        try:
            super()._process_result(client_task, fl_ctx)
        except Exception as error:
            client_task.result = None
            self.warning(f"{name}: {rejection_reason(error)}")
        if self.server is None or client_task.task.name != self.task_name:
            return
        started = client_task.task.data.get_header(AppConstants.CURRENT_ROUND)
        if self._open is None:
            is_pushed = name in self._pushed
            self._pushed.discard(name)
            if self._at_work.get(name) == started:  # otherwise the site has a later task by now
                self._at_work.pop(name, None)
                if not is_pushed:
                    self._reject(name, _failure_of(result))
            return
        opened, answered = self._open
        asked_by = getattr(client_task.task.get_prop(AppConstants.TASK_PROP_CALLBACK), "args", self._open)
        # Otherwise it is the result of a cancelled task, of an earlier round or of an earlier try of this one.
        if started == self.server.round_number and opened in asked_by and name not in answered:
            answered.add(name)
            with suppress(RoundError):  # the round has ended
                opened.reject(name, _failure_of(result))

    def _finished(self, report: Report) -> None:
        self.event(AppEventType.BEFORE_AGGREGATION)
        self.info(f"round {report.round}: accepted {len(report.accepted)}, rejected {len(report.rejected)}")
        self._record(report, self.warning if report.accepted else self.error)


def _failure_of(result: Shareable) -> str:
    try:
        if (code := result.get_return_code()) != ReturnCode.OK:
            return f"result: the return code is {short_repr(code)}"
        FLModelUtils.from_shareable(result)
    except Exception as error:
        return rejection_reason(error)
    return "result: NVFlare dropped it; see NVFlare's log"


class Aggregator(Component, ModelAggregator):
    """An aggregator for NVFlare's FedAvg and ScatterAndGather workflows with unchanged clients.

    It supports the methods whose clients take plain steps (FedAvg, MIFA, MimiC, LocalDescent); other methods need
    ``Controller``. An invalid reply is rejected, and ``reports`` lists the client and the reason. The workflow decides
    when a round closes, by its own options.

    Args:
        algorithm: one of ``fedcore.algorithms``, or its name.
        lr: eta, the rate of the clients' steps in a round, which only methods in gradient units use.
        server_lr, optimizer: as for ``fedcore.Server``.
        aggregation, limits, compute, callbacks: as for ``Controller``.
        storage: as for ``Controller``. If the folder already holds a server, the job resumes it, and its model replaces
            the job's first model.
        model: the first model by name. Default: the job's first model.
        clients: the names of all clients, including those that never reply. Default: each client is registered with its
            first accepted reply.
        parts: the arguments ``partial``, ``personal`` and ``frozen`` of ``fedcore.Model``, as a dictionary. With
            ``partial``, a reply may lack the tensors of some groups.

    Attributes:
        server: the ``fedcore.Server``, from the first round on.
        reports: the ``Report`` of each round of this job.
    """

    def __init__(
        self,
        algorithm: Algorithm | str = "FedAvg",
        *args: Any,
        model: dict[str, Any] | None = None,
        clients: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(algorithm, *args, **kwargs)
        session.with_plain_steps(algorithm, self.lr)
        if self.policy is not None:
            raise RangeError("policy: NVFlare's workflow decides when a round closes; leave policy out")
        self.model, self.clients = model, clients
        self._num_rounds: int | None = None
        self._round: Round | None = None
        self._sent: Shareable | None = None  # the task of the next round

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Start or resume the server before the workflow sends the model, and note the model that it sends."""
        super().handle_event(event_type, fl_ctx)
        if event_type == AppEventType.ROUND_STARTED and self._first_models():
            try:
                self._started()
            except Exception as error:  # NVFlare only logs an exception of a component's event
                self.system_panic(f"{type(error).__name__}: {error}", fl_ctx)
                raise
        if event_type == AppEventType.BEFORE_TRAIN_TASK and self._round is None:
            self._sent = fl_ctx.get_prop(AppConstants.TRAIN_SHAREABLE)
            self._num_rounds = self._sent.get_header(AppConstants.NUM_ROUNDS)

    def reset_stats(self) -> None:
        """Roll back an unfinished round. The next round opens with its first reply."""
        if self._round is not None:
            self._round.abort()
        self._round, self._sent, self._metrics = None, None, {}
        if self._first_models():
            self._started()

    def _opened(self) -> Round:
        """Return the open round, which starts from the model that the workflow sent."""
        if self._round is None:
            server = self._started()
            if self._sent is not None:
                sent = FLModelUtils.from_shareable(self._sent).params
                if session.changes(server, sent) and server.round_number and not self.reports:
                    raise CheckpointError(
                        "model: the job's first model is not that of its folder; let a persistor load the job's model, "
                        "which the aggregator replaces, or use a new folder"
                    )
                session.take_model(server, sent)
                self._sent = None
            self._round = server.open_round(newcomers=session.newcomers(server, self._names(), None))
        return self._round

    def accept_model(self, model: FLModel) -> bool:
        """Add a reply to the round, or reject it if it is invalid; return whether it is accepted so far."""
        try:
            name = model.meta["client_name"]  # NVFlare's workflow overwrites the client's entry
        except Exception as error:
            self._warn(f"ignored a result without a client name: {rejection_reason(error)}")
            return False
        return self._add(name, lambda: model)

    def aggregate_model(self) -> FLModel:
        """Finish the round; return the model and the mean metrics."""
        if self.server is None:
            raise RoundError("aggregate_model: no round is open; call reset_stats first")
        opened, self._round = self._opened(), None
        report = session.finish(self.server, opened, self._warn)
        self._record(report, self._warn, ended=len(self.reports) + 1 == self._num_rounds)
        metrics, self._metrics = self._metrics, {}
        return _result(self.server, report, metrics)

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Do as ``accept_model``, for a result of ScatterAndGather from a client that NVFlare authenticated.

        A result of another round is ignored, as by NVFlare's own aggregators.
        """
        self.fl_ctx = fl_ctx
        name, started, now = _sender(shareable, fl_ctx), None, fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
        with suppress(Exception):  # the headers are malformed
            started = shareable.get_cookie(AppConstants.CONTRIBUTION_ROUND)
        if type(started) is int and now is not None and started != now:
            self._warn(f"{name}: ignored a result of round {started}, since it came in round {now}")
            return False
        return self._add(name, lambda: FLModelUtils.from_shareable(shareable, fl_ctx))

    def _add(self, name: Any, read: Callable[[], FLModel]) -> bool:
        opened = self._opened()
        assert self.server is not None
        counts_steps, metrics = self.server.settings.counts_steps, {}

        def update() -> Update:
            model = read()
            metrics.update(metrics_of(model.metrics))
            return update_of(name, model, counts_steps=counts_steps)

        if is_accepted := session.add_reply(opened, name, update):
            self._metrics[name] = metrics
        return is_accepted

    def _first_models(self) -> list[dict[str, Any]]:
        """Return the argument ``model`` and the job's first model, as far as they are known."""
        learnable = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL) if self.fl_ctx is not None else None
        return [model for model in (self.model, learnable and learnable[ModelLearnableKey.WEIGHTS]) if model]

    def _started(self) -> Server:
        if self.server is None:
            models = self._first_models()
            sent = [] if self._sent is None else [FLModelUtils.from_shareable(self._sent).params]
            if not (known := models + sent):
                raise ArrayError("model: the job has no first model; pass model=")
            model = session.model_of_parts(known[0], self.parts)
            self.server = session.open_server(model, self.algorithm, self.clients or [], self._server_options())
            if self.server.round_number:
                for tensors in models:
                    tensors.update(self.server.tensors())  # in place, since the workflow sends this model next
        return self.server

    def _names(self) -> list[str]:
        if self.clients is not None:
            return self.clients
        engine = self.fl_ctx.get_engine() if self.fl_ctx is not None else None
        return sorted(client.name for client in engine.get_clients()) if engine is not None else []

    def _warn(self, message: str) -> None:
        if self.fl_ctx is not None:
            self.warning(message)


def _sender(shareable: Shareable, fl_ctx: FLContext) -> Any:
    """Return the sender's name from the client that NVFlare stored in the result, or from the peer's context."""
    client = None
    with suppress(Exception):  # the headers are malformed
        client = shareable.get_header(ServerCommandKey.FL_CLIENT)
    return client.name if isinstance(client, Client) else fl_ctx.get_peer_context().get_identity_name()


# Conversion between an FLModel and fedcore's values.


def _result(server: Server, report: Report, metrics: Mapping[Any, Mapping[str, float]]) -> FLModel:
    """Return the model after a round, with the mean of its accepted sites' metrics."""
    shown = report.weights.tolist() or [1.0] * len(report.accepted)  # a private round does not report them
    weights = dict(zip(report.accepted, shown, strict=True))
    mean = mean_metrics([(weights[name], own) for name, own in metrics.items() if name in weights])
    # NVFlare sends the meta to all sites, so its records get the sites' metrics from the results, and not from here.
    records = {"metric_source": "client_reported_flmodel_metrics", "use_contribution_sites": True}
    meta = {"nr_aggregated": len(report.accepted), "current_round": report.round}
    meta |= {AppConstants.METRICS_AGGREGATION_INFO: records}
    return FLModel(params_type=ParamsType.FULL, params=server.tensors(), metrics=mean, meta=meta)


def model_of(server: Server, sent: Broadcast, client: ClientId) -> FLModel:
    """Return the message to a client, the same for all clients unless a vector differs; copies x and an offset."""
    instructions = sent.of(client)
    meta = {KEY: {**instructions.numbers(), **instructions.vectors()}}
    return FLModel(params=server.tensors(sent=True), current_round=sent.round, meta=meta)


def update_of(client: ClientId, model: FLModel, *, counts_steps: bool) -> Update:
    """Return the update in a reply; the round checks its values.

    The weight is the number of examples if fedcore's ``reply`` reports it. Otherwise it is
    ``NUM_STEPS_CURRENT_ROUND``, or 1 if that is missing, as in NVFlare. Without ``counts_steps`` a site may omit the
    steps or report a fraction.
    """
    meta = model.meta if isinstance(model.meta, Mapping) else {}
    own = meta[KEY] if isinstance(meta.get(KEY), Mapping) else {}
    steps = as_integer(_number(meta.get(FLMetaKey.NUM_STEPS_CURRENT_ROUND)))
    examples = own.get("examples")
    if examples is None:
        examples = 1 if steps is None else steps
    if not counts_steps and (steps is None or (is_number(steps) and not is_integer(steps, high=Limits.max_steps))):
        steps = 1  # the reported number is only a weight, of any size
    params = model.params
    if isinstance(params, Mapping):  # read NVFlare's references to tensors on disk
        params = {name: leaf.materialize() if hasattr(leaf, "materialize") else leaf for name, leaf in params.items()}
    claims: dict[str, Any] = {name: own.get(name) for name in ("lr", "control", "loss")}
    update = Update(client, params, steps, as_integer(examples), **claims)
    return update._replace(kind="delta") if model.params_type == ParamsType.DIFF else update


def _number(value: Any) -> Any:
    """Convert a scalar of any library to a Python number; return other values unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) in ((), []) else value


def metrics_of(metrics: Any) -> dict[str, float]:
    """Return the numbers in float32's range among a site's first ``MOST_METRICS`` metrics."""
    numbers: dict[str, float] = {}
    for name, value in islice(metrics.items(), MOST_METRICS) if isinstance(metrics, Mapping) else ():
        with suppress(Exception):  # a site's object can raise any exception
            number = float(_number(value))
            is_named = type(name) is str and len(name) <= LONGEST_REASON
            if is_named and not isinstance(value, str | bytes) and abs(number) <= LARGEST:
                numbers[name] = number
    return numbers


def mean_metrics(sites: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float] | None:
    """Return the weighted mean of each metric over the sites that report it, as in NVFlare; None without metrics."""
    sums: dict[str, tuple[float, float]] = {}
    for weight, metrics in sites:
        for name, value in metrics.items():
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = total + weight * value, weights + weight
    return {name: total / weights for name, (total, weights) in sums.items() if weights} or None
