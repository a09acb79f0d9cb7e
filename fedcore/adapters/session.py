"""Code shared by the adapters: a job's server, the methods that a framework supports, and log lines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedcore.algorithms import Algorithm, Direction, named
from fedcore.algorithms.local_rules import name_of
from fedcore.algorithms.rates import Rate
from fedcore.arrays import to_host
from fedcore.errors import CheckpointError, RangeError, RoundError, UnknownClientError, UnknownNameError
from fedcore.model import Layout, Model
from fedcore.options import MOST_CLIENT_LR, Compute, Limits, RoundPolicy, Storage
from fedcore.profiling import span
from fedcore.rules import REGISTRY, Chain, Rule, spelled
from fedcore.server import Report, Round, Server, Update, rejection_summary
from fedcore.server.folder import checkpoint_errors, server_state
from fedcore.server.opening import manifest_in
from fedcore.store import ClientStore
from fedcore.store.inspect import state_of
from fedcore.store.registry import ClientId, canonical
from fedcore.validation import as_integer, check_integer, describe_integers, is_integer, rejection_reason

# The options of a job, as objects or as mappings from a configuration.

PLAIN_DICT = "config_type"
"""The key that tells NVFlare not to read a mapping with the key "path" or "name" as a component."""


def server_options(options: Mapping[str, Any], framework: str | None = None) -> dict[str, Any]:
    """Return arguments of ``Server``, with mappings from a configuration converted to objects.

    ``limits``, ``storage``, ``compute`` and ``policy`` may be mappings, such as ``{"max_norm": 10.0}``. So may each
    rule of ``aggregation``: ``{"name": "RejectLong", "ratio": 30}``. ``framework`` names a framework that waits for all
    clients of a round itself.
    """
    if framework is not None and options.get("policy") is not None:
        raise RangeError(f"policy: {framework} waits for all clients of a round itself; leave policy out")
    values = dict(options)
    for name, kind in (("limits", Limits), ("storage", Storage), ("compute", Compute), ("policy", RoundPolicy)):
        if isinstance(values.get(name), Mapping):
            values[name] = _from_mapping(kind, values[name])
    rules = values.get("aggregation")
    if isinstance(rules, Mapping) or (isinstance(rules, Sequence) and not isinstance(rules, str)):
        rules = [rules] if isinstance(rules, Mapping) else rules
        values["aggregation"] = Chain.of([_rule(rule) for rule in rules])
    elif rules is not None:
        values["aggregation"] = Chain.of(rules)
    return values | {"storage": Storage.of(values.get("storage")), "compute": values.get("compute") or Compute()}


def _rule(rule: Any) -> Rule | str:
    if not isinstance(rule, Mapping):
        return rule  # type: ignore[no-any-return]
    return _from_mapping(  # type: ignore[no-any-return]
        REGISTRY.find(spelled(str(rule.get("name")))), {name: value for name, value in rule.items() if name != "name"}
    )


def _from_mapping(kind: type, options: Mapping[str, Any]) -> Any:
    options = {name: value for name, value in options.items() if name != PLAIN_DICT}
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in options if name not in known]:
        raise UnknownNameError.of(kind.__name__, unknown[0], known)
    return kind(**options)


PARTS = ("partial", "personal", "frozen")
"""The options of a job's model, which are arguments of ``Model``."""


def model_of_parts(tensors: Any, parts: Mapping[str, Any] | None) -> Model:
    """Return a job's model with the arguments of ``Model`` from the job's configuration."""
    options = {name: value for name, value in (parts or {}).items() if name != PLAIN_DICT}
    if unknown := [name for name in options if name not in PARTS]:
        raise UnknownNameError.of("parts", unknown[0], PARTS)
    return Model(tensors, **options)


# The server of a job: a new server, or the server that an earlier job saved.


def is_begun(storage: Storage) -> bool:
    """Whether the folder holds an earlier job's server, or other data that a new server would overwrite."""
    if storage.path is None or not (folder := Path(storage.path)).exists():
        return False
    if not folder.is_dir() or manifest_in(folder) is not None:
        return True
    if not any(folder.iterdir()):
        return False
    with ClientStore.open(folder, readonly=True) as store:  # empty if a job was killed before it created the server
        return store.state is not None or len(store) > 0


def open_server(
    model: Any,
    algorithm: Algorithm | str,
    clients: Iterable[ClientId],
    *,
    client_sizes: Mapping[ClientId, int] | Sequence[int] | None = None,
    storage: Any = None,
    steps: Any = None,
    limits: Limits | None = None,
    own_rates: bool = False,
    policy: RoundPolicy | None = None,
    **options: Any,
) -> Server:
    """Resume the server of an earlier job after its last finished round, or create a new server.

    Args:
        clients: the clients to register, also with a resumed server; empty if clients are registered with their first
            accepted reply (``newcomers``).
        client_sizes: n_k by id, or in the order of ids 0, 1, ...
        steps: the local steps that clients do. For a new server a number is also ``max_steps``, unless ``limits`` set
            one. It may raise the ``max_steps`` of a resumed server.
        limits: the limits of an update. Default: those of the resumed server, or ``Limits()``.
        own_rates: whether clients may choose rates up to 100, since the server sends no rate.
        policy: when a round may close. Default: as for the resumed server, or ``RoundPolicy()``.
    """
    storage, ids = Storage.of(storage), list(clients)
    sizes: Any = client_sizes if isinstance(client_sizes, Mapping | None) else dict(enumerate(client_sizes))
    if sizes is not None and (missing := [client for client in ids if client not in sizes]):
        raise RangeError(f"client_sizes: the number of examples of client {missing[0]!r} is missing; add it")

    def sized(some: list[ClientId]) -> Any:
        return some if sizes is None else {client: sizes[client] for client in some}

    if is_begun(storage):
        how = {"storage": storage, "steps": steps, "limits": limits, "own_rates": own_rates, "policy": policy}
        server = load_server(storage.path, model, algorithm, **how, **options)
    else:
        options["policy"] = policy or RoundPolicy()
        options["limits"] = _limits(Limits() if limits is None else limits, steps, own_rates)
        return Server(model, algorithm, sized(ids), storage=storage, **options)
    server.add_clients(sized([client for client in ids if client not in server.clients]))
    return server


def load_server(
    path: Any,
    model: Any,
    algorithm: Algorithm | str,
    *,
    storage: Storage | None = None,
    steps: Any = None,
    limits: Limits | None = None,
    own_rates: bool = False,
    any_form: bool = False,
    **options: Any,
) -> Server:
    """Load the server of a folder; raise an error if its algorithm, optimizer or model differ from the arguments.

    Different rates, limits, rules and policies replace the saved values, with a warning. With ``any_form`` the tensors
    of ``model`` may be of a different library, and the optimizer defaults to the saved value.
    """
    if manifest_in(path) is None:
        with checkpoint_errors(path):  # before the job changes anything in the folder
            saved = Layout.from_state(server_state(path, state_of(Path(path)))["settings"]["layout"])
        _require_layout(path, saved, model, any_form)
    method = named(algorithm) if isinstance(algorithm, str) else algorithm
    own = None if limits is None else _limits(limits, steps, own_rates)
    server = Server.load(path, algorithm=method, limits=own, storage=storage, **options)
    try:
        _require_layout(path, server.layout, model, any_form)
        optimizer = server._settings.optimizer
        if not any_form and options.get("optimizer") is None and optimizer is not None:
            raise CheckpointError(
                f"{path}: the saved server has the optimizer {optimizer}; pass the same optimizer to the job"
            )
        if limits is None:
            most = max(server.limits.max_steps, steps) if is_integer(steps) else server.limits.max_steps
            needed = _limits(replace(server.limits, max_steps=most), None, own_rates)
            if needed != server.limits:
                server.change(limits=needed)
    except BaseException:
        server.close()
        raise
    return server


def _limits(limits: Limits, steps: Any, own_rates: bool) -> Limits:
    """Return limits whose defaults are replaced by the job's ``steps`` and by the largest client rate."""
    if is_integer(steps) and limits.max_steps == Limits.max_steps:
        limits = replace(limits, max_steps=steps)
    if own_rates and limits.max_client_lr is None:
        limits = replace(limits, max_client_lr=MOST_CLIENT_LR)
    return limits


def _require_layout(path: Any, saved: Layout, model: Any, any_form: bool) -> None:
    own = Layout.of(model)
    if saved != own and not (any_form and (saved.slices, saved.outside) == (own.slices, own.outside)):
        raise CheckpointError(f"{path}: the saved model has tensors or shapes that differ from the job's model")


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


# Checks that a framework's clients can run a method.


def beyond_plain_steps(algorithm: Algorithm) -> str | None:
    """Return a clause that names the clients' work besides steps y -= lr grad(y) from the sent model, or None."""
    if algorithm.rows_at_clients:
        return "whose clients keep their own rows"
    if algorithm.looks_ahead:
        return "whose clients start ahead of the model"
    if algorithm.own_starts:
        return "whose clients start from different models"
    if not algorithm.local_rule.ordinary:
        return f"whose clients follow the local rule {name_of(algorithm.local_rule)!r}"
    if algorithm.second_vector is not None:
        return "whose clients send a second vector"
    if algorithm.needs_loss:
        return "whose clients report their losses"
    if algorithm.direction == Direction(mu=algorithm.direction.mu) != Direction():
        return "whose clients add a proximal term (with FedAvg, clients can add the term themselves)"
    return None if algorithm.direction == Direction() else "whose clients add terms to their gradient"


def with_plain_steps(algorithm: Algorithm | str, lr: float | Rate | None) -> Algorithm:
    """Return the algorithm; raise an error if its clients do more than steps y -= lr grad(y)."""
    method = named(algorithm) if isinstance(algorithm, str) else algorithm
    if more := beyond_plain_steps(method):
        raise RangeError(
            f"algorithm: {type(method).__name__} is a method {more}, which is not supported here; use a method of "
            "plain local steps"
        )
    require_rate_of_rounds(lr)
    return method


def is_changed(server: Server, model: Any, returned: Mapping[str, Any] | None = None) -> bool:
    """Whether a framework's model is no longer the one that the server returned; see ``take_model``."""
    return bool(_changes(server, model, returned))


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
    if not (changes := _changes(server, model, returned)):
        return False
    if (reason := server.algorithm.keeps_models) is not None:
        raise RangeError(
            f"model: differs from the model that the server returned ({', '.join(changes)[:100]}), from which "
            f"{type(server.algorithm).__name__} cannot continue: {reason}"
        )
    own = server.layout.unflatten(to_host(server.x)) | dict(server.counters)
    server.replace_x(own | changes)
    return True


def _changes(server: Server, model: Any, returned: Mapping[str, Any] | None) -> dict[str, Any]:
    return server.layout.changes(model, to_host(server.x), server.counters, returned)


def require_rate_of_rounds(lr: float | Rate | None) -> None:
    """Raise an error if the rate differs between the steps of a round; a message carries one rate."""
    if hasattr(lr, "of_step"):
        raise RangeError(
            f"lr={lr!r}: must not change within a round; use lambda round: rate(round), the rate of each round's first "
            "step"
        )


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
    raise RangeError(
        f"{missing}; answer with Task.reply, or set the strategy's steps= to a number or a metric's name{other}"
    )


def require_steps(steps: int | str | None, algorithm: Algorithm) -> None:
    """Raise an error if ``steps`` is neither a number nor a metric's name, or does not fit the method."""
    if steps is None:
        return
    if not (is_integer(steps, 1, 2**53) or (isinstance(steps, str) and steps)):
        raise RangeError(f"steps={steps!r}: must be {describe_integers(1, 2**53)}, or a metric's name")
    if more := beyond_plain_steps(algorithm):
        raise RangeError(
            f"steps={steps!r}: not allowed, since {type(algorithm).__name__} is a method {more}; leave it out"
        )


# The clients' replies, and log lines on them.


def add_reply(round: Round, client: ClientId, read: Callable[[], Update]) -> bool:
    """Add a client's reply to a round, and return whether it was accepted; the report lists a rejected reply."""
    try:
        with span("decode"):
            update = read()
        return round.add_batch([update])[0]
    except Exception as error:
        if not round.is_open:
            raise
        round.reject(client, rejection_reason(error))
        return False


def may_close_early(round: Round) -> bool:
    """Whether the policy lets a round close although some asked clients have not answered."""
    return round.may_close() not in (None, "all clients")


@dataclass
class RejectedRounds:
    """Ends a run after ``abort_after`` rounds in a row that accepted no update and rejected at least one.

    A round without a rejection does not count, since its clients may only be offline. Default: never end the run.
    """

    abort_after: int | None
    _rounds: int = 0
    _rejected: Sequence[tuple[ClientId, str]] = ()

    def __post_init__(self) -> None:
        if self.abort_after is not None:
            check_integer("abort_after", self.abort_after, 1)

    def note(self, accepted: Sequence[ClientId], rejected: Sequence[tuple[ClientId, str]]) -> None:
        """Count a round; raise a RoundError if it is the last one that ``abort_after`` allows."""
        self.count(accepted, rejected)
        self.check()

    def count(self, accepted: Sequence[ClientId], rejected: Sequence[tuple[ClientId, str]]) -> None:
        """Count a round, for a later ``check``."""
        self._rounds, self._rejected = 0 if accepted else self._rounds + bool(rejected), rejected

    def check(self, rounds: int | None = None) -> None:
        """Raise a RoundError if ``abort_after`` allows no further round, or if the run ends and none of its ``rounds``
        accepted an update.
        """
        if self.abort_after is not None and self._rounds >= min(self.abort_after, rounds or self.abort_after):
            raise RoundError(
                f"updates: none was accepted in the last {self._rounds} rounds: "
                f"{rejection_summary(self._rejected)}; correct the clients, or set abort_after=None to continue"
            )


NOTHING = (("all clients", "no reply arrived"),)
"""The rejections of a round in which no client replied, if such a round counts for ``abort_after``."""

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
    if not report.rejected:
        return None
    return f"round {report.round}: {rejections(report.rejected, len(report.accepted))}"
