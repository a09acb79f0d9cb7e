"""Code shared by the adapters: a job's server, the methods that a framework supports, and log lines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from fedcore.algorithms import Algorithm, Direction, named
from fedcore.algorithms.local_rules import name_of
from fedcore.algorithms.rates import Rate
from fedcore.arrays import to_host
from fedcore.errors import RangeError, RoundError, TooFewUpdatesError, UnknownClientError, UnknownNameError
from fedcore.files import closed_on_error
from fedcore.model import Layout, Model
from fedcore.options import MOST_CLIENT_LR, Limits, RoundPolicy, ServerOptions, Settings, from_mapping
from fedcore.profiling import span
from fedcore.server import Report, Round, Server, Update, rejection_summary
from fedcore.server.compatibility import require_compatible
from fedcore.server.opening import is_begun
from fedcore.store.registry import ClientId, canonical
from fedcore.validation import as_integer, check_integer, describe_integers, is_integer, rejection_reason

SECURE = "fedcore.secure"
"""The name of a message of the secure protocol in a framework's message, and of a client's state."""
SUM = "masked sum"
"""The sender of a sum in ``Report.rejected``."""


def model_of_parts(tensors: Any, parts: Mapping[str, Any] | None) -> Model:
    """Return a job's model with the arguments of ``Model`` from the job's configuration."""
    model: Model = from_mapping(Model, {"tensors": None, **(parts or {})})
    return replace(model, tensors=tensors)


@dataclass(frozen=True)
class ClientWork:
    """Facts of a job's clients that are known before their first reply.

    Args:
        sizes: n_k by id, or in the order of ids 0, 1, ...
        steps: the local steps that clients do. For a new server a number is also ``max_steps``, unless ``limits`` set
            one. It may raise the ``max_steps`` of a resumed server.
        own_rates: whether clients may choose rates up to 100, since the server sends no rate.
    """

    sizes: Any = None
    steps: Any = None
    own_rates: bool = False


def open_server(
    model: Any,
    algorithm: Algorithm | str,
    clients: Iterable[ClientId],
    options: ServerOptions,
    work: ClientWork = ClientWork(),
    resume: str | PathLike[str] | None = None,
) -> Server:
    """Resume the server of an earlier job after its last finished round, or create a new server.

    Args:
        clients: the clients to register, also with a resumed server; empty if clients are registered with their first
            accepted reply (``newcomers``).
        resume: the folder of a server to load, in place of the one in ``storage``.
    """
    ids, is_new = list(clients), resume is None and not is_begun(options.storage)
    sizes = work.sizes if isinstance(work.sizes, Mapping | None) else dict(enumerate(work.sizes))
    if sizes is not None and (missing := [client for client in ids if client not in sizes]):
        raise RangeError(f"client_sizes: the number of examples of client {missing[0]!r} is missing; add it")
    given = options.limits
    if is_new or given is not None:
        options = replace(options, limits=_limits(given or Limits(), work))
    sized = ids if sizes is None else {client: sizes[client] for client in ids}
    if resume is None:
        server = Server.open(options.storage, model, algorithm, sized, **options.keywords())
    else:
        server = Server.load(resume, model=model, algorithm=algorithm, **options.keywords())
    with closed_on_error(server):
        if not is_new and given is None:
            most = max(server.limits.max_steps, work.steps) if is_integer(work.steps) else server.limits.max_steps
            needed = _limits(replace(server.limits, max_steps=most), replace(work, steps=None))
            if needed != server.limits:
                server.change(limits=needed)
        new = [client for client in ids if client not in server.clients]
        server.add_clients(new if sizes is None else {client: sizes[client] for client in new})
    return server


def _limits(limits: Limits, work: ClientWork) -> Limits:
    """Return limits whose defaults are replaced by the clients' steps and by the largest client rate."""
    if is_integer(work.steps) and limits.max_steps == Limits.max_steps:
        limits = replace(limits, max_steps=work.steps)
    if work.own_rates and limits.max_client_lr is None:
        limits = replace(limits, max_client_lr=MOST_CLIENT_LR)
    return limits


def newcomers(
    server: Server, clients: Iterable[ClientId], sizes: Mapping[Any, int] | None
) -> list[ClientId] | dict[ClientId, int]:
    """Return the argument ``newcomers`` of ``Server.open_round``: clients to register with their first accepted reply.

    Invalid ids are skipped. If ``sizes`` (n_k by id) is not None, clients without a size are skipped too.
    """
    new = [client for client in dict.fromkeys(clients) if _is_id(client) and client not in server.clients]
    return new if sizes is None else {client: sizes[client] for client in new if client in sizes}


def _is_id(client: object) -> bool:
    try:
        canonical(client)
    except UnknownClientError:
        return False
    return True


# Checks of options, and that a framework's clients can run a method.


def require_known(what: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownNameError if one of the options of ``what`` is not known."""
    if unknown := [name for name in options if name not in known]:
        raise UnknownNameError.of(f"option of {what}", unknown[0], known)


def beyond_plain_steps(algorithm: Algorithm) -> str | None:
    """Return a clause that names the clients' work besides steps y -= lr grad(y) from the sent model, or None."""
    rule, direction = algorithm.local_rule, algorithm.direction
    is_proximal = direction.mu and direction == Direction(mu=direction.mu)
    return (
        (algorithm.rows_at_clients and "whose clients keep their own rows")
        or (algorithm.looks_ahead and "whose clients start ahead of the model")
        or (algorithm.own_starts and "whose clients start from different models")
        or (not rule.ordinary and f"whose clients follow the local rule {name_of(rule)!r}")
        or (algorithm.second_vector is not None and "whose clients send a second vector")
        or (algorithm.needs_loss and "whose clients report their losses")
        or (is_proximal and "whose clients add a proximal term (with FedAvg, clients can add the term themselves)")
        or (direction != Direction() and "whose clients add terms to their gradient")
        or None
    )


def with_plain_steps(algorithm: Algorithm | str | Mapping[str, Any], lr: float | Rate | None) -> Algorithm:
    """Return the algorithm; raise an error if its clients do more than steps y -= lr grad(y).

    In a mapping, it is the one with a ``name``, with the other entries as its options.
    """
    table = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    method = named(**{"name": "", **table}) if isinstance(table, Mapping) else table
    if more := beyond_plain_steps(method):
        raise RangeError(
            f"algorithm: {type(method).__name__} is a method {more}, which is not supported here; use a method of "
            "plain local steps"
        )
    require_rate_of_rounds(lr)
    return method


def take_model(server: Server, model: Any, returned: Mapping[str, Any] | None = None) -> bool:
    """Replace the server's x by a framework's model if the framework changed it; return whether it did.

    A model that is x in 16 bits is unchanged, and x keeps its float32 numbers. So does each unchanged number of a
    changed model. Call it before ``broadcast``.

    Args:
        model: the framework's model, as ``Server.replace_x`` takes it, but by name.
        returned: the tensors as the server last returned them, by name, if the adapter reads 16 bits as float32.

    Raises:
        RangeError: it was changed, and the method cannot continue from another model.
        ArrayError, ShapeError, DtypeError: the model does not fit the layout, or a number is NaN or infinite.

    Cost: reads the model and x once; if the model was changed, also that of ``Server.replace_x``.
    """
    if not (changed := changes(server, model, returned)):
        return False
    if (reason := server.algorithm.keeps_models) is not None:
        raise RangeError(
            f"model: differs from the model that the server returned ({', '.join(changed)[:100]}), from which "
            f"{type(server.algorithm).__name__} cannot continue: {reason}"
        )
    own = server.layout.unflatten(to_host(server.x)) | dict(server.counters)
    server.replace_x(own | changed)
    return True


def changes(server: Server, model: Any, returned: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the changed tensors of a framework's model, by name; see ``take_model``."""
    return server.layout.changes(model, to_host(server.x), server.counters, returned)


def require_rate_of_rounds(lr: float | Rate | None) -> None:
    """Raise an error if the rate differs between the steps of a round; a message carries one rate."""
    if hasattr(lr, "of_step"):
        raise RangeError(f"lr={lr!r}: must not change within a round; use lambda round: rate(round) to send its first")


def steps_of(reported: object, metrics: Mapping[str, Any], steps: int | str | None, server: Server) -> Any:
    """Return K of a reply, which the round checks.

    It is ``reported``, the number in fedcore's own field. Without that field it is ``steps``, which is a number or the
    name of a metric, or 1 if the method does not use K.
    """
    if reported is not None:
        return reported
    algorithm, missing = server.algorithm, "steps: the reply does not report its number of local steps"
    if more := beyond_plain_steps(algorithm):  # without fedcore's field, the client did not read the instructions
        raise RangeError(
            f"{missing}; {type(algorithm).__name__} is a method {more}, so clients must answer with Task.reply"
        )
    if isinstance(steps, str):
        if (value := metrics.get(steps)) is None:
            raise RangeError(f"{missing}, and has no metric {steps[:40]!r}")
        return as_integer(value)
    if steps is not None:
        return steps
    if server.averages_models and not algorithm.needs_shares:  # FlexibleFedAvg weights by the steps
        return 1
    other = f", or use {option}" if (option := algorithm.averaging_option) else ""
    raise RangeError(f"{missing}; answer with Task.reply, or set steps= to a number or a metric's name{other}")


def require_steps(steps: int | str | None, algorithm: Algorithm) -> None:
    """Raise an error if ``steps`` is neither a number nor a metric's name, or does not fit the method."""
    if steps is None:
        return
    if not (is_integer(steps, 1, 2**53) or (isinstance(steps, str) and steps)):
        raise RangeError(f"steps={steps!r}: must be {describe_integers(1, 2**53)}, or a metric's name")
    if more := beyond_plain_steps(algorithm):
        raise RangeError(f"steps={steps!r}: not for {type(algorithm).__name__}, a method {more}; leave it out")


# The clients' replies, and log lines on them.


def add_reply(round: Round, client: ClientId, read: Callable[[], Update]) -> bool:
    """Add a client's reply to a round, and return whether it was accepted; the report lists a rejected reply.

    A copy of a reply that counts already is not accepted again.
    """
    try:
        with span("decode"):
            update = read()
        return round.add_batch([update])[0].status in ("accepted", "held")
    except Exception as error:
        if not round.is_open:
            raise
        round.reject(client, rejection_reason(error))
        return False


def finish(server: Server, round: Round, log: Callable[[str], Any], errors: Any = TooFewUpdatesError) -> Report:
    """Finish a round. One with too few updates for a robust rule is aborted: the model stays, and none is accepted.

    Args:
        log: gets a line on an aborted round.
        errors: the errors that abort a round. With RoundError they include the policy's; then the updates count as
            accepted in the report. An error that closed the round itself is raised.
    """
    try:
        return round.finish()
    except errors as error:
        if not round.is_open:
            raise
        round.abort(keep=isinstance(error, RoundError))  # in a journal: the next round starts with those that count
        log(f"the model stays: {error}")
        lost = [] if isinstance(error, RoundError) else [(client, str(error)) for client in round.clients]
        return Report(server.round_number, () if lost else round.clients, (*round.rejected, *lost))


def may_close_early(round: Round) -> bool:
    """Whether the policy lets a round close although some asked clients have not answered."""
    return round.may_close() not in (None, "all clients")


NOTHING = (("all clients", "no reply arrived"),)
"""The rejections of a round in which no client replied."""


@dataclass
class RejectedRounds:
    """Ends a run after ``abort_after`` rounds in a row that accepted no update and rejected at least one.

    It also ends a shorter run none of whose rounds accepted one. A round without a rejection does not count, since its
    clients may only be offline. With None a run never ends.
    """

    abort_after: int | None
    _rounds: int = 0
    _rejected: Sequence[tuple[ClientId, str]] = ()
    _has_accepted: bool = False

    def __post_init__(self) -> None:
        if self.abort_after is not None:
            check_integer("abort_after", self.abort_after, 1)

    def note(
        self, accepted: Sequence[ClientId], rejected: Sequence[tuple[ClientId, str]], *, ended: bool = False
    ) -> None:
        """Count a round, and ``check`` the run."""
        self.count(accepted, rejected)
        self.check(ended=ended)

    def count(self, accepted: Sequence[ClientId], rejected: Sequence[tuple[ClientId, str]]) -> None:
        """Count a round, for a later ``check``."""
        self._rounds, self._rejected = 0 if accepted else self._rounds + bool(rejected), rejected
        self._has_accepted = self._has_accepted or bool(accepted)

    def check(self, *, ended: bool = False) -> None:
        """Raise a RoundError if ``abort_after`` allows no further round, or if the ended run accepted nothing."""
        most = self.abort_after
        if most is not None and (self._rounds >= most or (ended and self._rounds and not self._has_accepted)):
            raise RoundError(
                f"updates: none was accepted in the last {self._rounds} rounds: "
                f"{rejection_summary(self._rejected)}; correct the clients, or set abort_after=None to continue"
            )


class Job:
    """What an adapter keeps: its server, the reports, and when a run ends that accepts nothing.

    Attributes:
        server: the ``fedcore.Server``; None until the first model is known.
        reports: the ``Report`` of each round of this run.
    """

    server: Server | None
    reports: list[Report]

    def _prepare(self, framework: str, algorithm: Any, options: Mapping[str, Any]) -> None:
        """Check and keep the options of a job, whose clients take plain steps and whose framework closes rounds."""
        values = dict(options)
        self._rejected_rounds = RejectedRounds(values.pop("abort_after", 3))
        self._work = ClientWork(values.pop("client_sizes", None), values.pop("steps", None))
        self._options, self.server, self.reports = ServerOptions.from_mapping(values), None, []
        if self._options.policy is not None:
            raise RangeError(f"policy: {framework} waits for all clients of a round itself; leave policy out")
        self._algorithm = with_plain_steps(algorithm, self._options.lr)

    def _require_options(self, model: Any, replies: int | None) -> None:
        """Raise an error if the model's new server would refuse the options, or each round of so many replies."""
        given = replace(self._options, limits=self._options.limits or Limits(), policy=RoundPolicy())
        if is_begun(given.storage):  # the saved options replace those that are left out
            return
        if given.lr is None:
            raise RangeError("lr: missing; set it to the rate of the clients' local steps")
        settings = Settings.of(self._algorithm, Layout.of(model), given)
        require_compatible(settings, given.storage, given.compute)
        if replies is not None and settings.rules.robust is not None:
            settings.rules.require_enough(replies, "add clients, or lower f")

    def _opened_server(self, model: Any, clients: Iterable[ClientId]) -> Server:
        """Return the server; the first model makes it, or loads that of an earlier job."""
        if self.server is None:
            self.server = open_server(model, self._algorithm, clients, self._options, self._work)
        return self.server

    def _record(self, report: Report, warn: Callable[[str], Any], *, ended: bool = False) -> None:
        """Keep and log the report of a round, and raise a RoundError if the run must end."""
        self.reports.append(report)
        if line := rejection_line(report):
            warn(line)
        self._rejected_rounds.note(report.accepted, report.rejected or NOTHING, ended=ended)


LISTED = 5
"""The maximum number of clients that a log line names; the report lists all."""


def rejections(rejected: Sequence[tuple[ClientId, str]], accepted: int) -> str:
    """Return a line with the numbers of rejected and accepted replies, the rejected clients, and the reasons."""
    clients = _listed([client for client, _ in rejected])
    return f"rejected {len(rejected)} ({clients}), accepted {accepted}: {rejection_summary(rejected)}"


def silence(clients: Sequence[ClientId]) -> str:
    """Return a line on the sampled clients that did not reply.

    >>> silence([3, "b"])
    "2 clients did not reply (3, 'b')"
    """
    return f"{len(clients)} client{'s' * (len(clients) != 1)} did not reply ({_listed(clients)})"


def _listed(clients: Sequence[ClientId]) -> str:
    return ", ".join([repr(client) for client in clients[:LISTED]] + ["..."] * (len(clients) > LISTED))


def rejection_line(report: Report) -> str | None:
    """Return the rejections of a round in one line; None if every reply was accepted.

    >>> rejection_line(Report(3, accepted=("a",), rejected=(("b", "steps: got None"), ("c", "steps: got None"))))
    "round 3: rejected 2 ('b', 'c'), accepted 1: 2 x steps: got None"
    """
    return f"round {report.round}: {rejections(report.rejected, len(report.accepted))}" if report.rejected else None
