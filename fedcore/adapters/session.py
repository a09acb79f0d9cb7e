"""What the adapters share: the server of a job, what a framework can carry to its clients, and their replies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Algorithm, Direction, named
from fedcore.algorithms.rates import Rate
from fedcore.arguments import due_whole, integral, is_whole, reason_of
from fedcore.errors import ArrayError, CheckpointError, RangeError, UnknownClientError, UnknownNameError
from fedcore.model import Layout
from fedcore.options import MOST_CLIENT_LR, Limits, Storage
from fedcore.profiling import span
from fedcore.rules import REGISTRY, Chain, Rule
from fedcore.server import Report, Round, Server, Update, refusal_summary
from fedcore.server.folder import believed, server_state
from fedcore.server.server import manifest_in
from fedcore.simulation.local_rules import name_of
from fedcore.store import ClientStore
from fedcore.store.inspect import state_of
from fedcore.store.registry import ClientId, canonical

T = TypeVar("T")

# The server of a job: a new one, or the one that an earlier job left in its folder.


def options_of(kind: type[T], given: Any) -> Any:
    """An option of ``Server`` that a configuration may also hold as a mapping, such as ``{"max_norm": 10.0}``.

    Raises:
        UnknownNameError: a key is no field of it.
    """
    if not isinstance(given, Mapping):
        return given
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise UnknownNameError.of(kind.__name__, name, known)
    return kind(**given)


def chain_of(given: Any) -> Chain:
    """The rules of a configuration: as ``Server`` takes them, or mappings like ``{"name": "RejectLong", "ratio": 30}``.

    Raises:
        UnknownNameError, RangeError: as for ``Server``; or an option of a rule is unknown.
    """
    if given is None or isinstance(given, str | Rule | Chain):
        return Chain.of(given)
    rules = []
    for rule in [given] if isinstance(given, Mapping) else given:
        if isinstance(rule, Mapping):
            options = {name: value for name, value in rule.items() if name != "name"}
            rule = options_of(REGISTRY.find(str(rule.get("name"))), options)
        rules.append(rule)
    return Chain.of(rules)


def is_begun(storage: Storage) -> bool:
    """Whether the folder has the server of an earlier job, or anything else that is in the way."""
    if storage.path is None:
        return False
    folder = Path(storage.path)
    return folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or _has_empty_store(folder)))


def _has_empty_store(folder: Path) -> bool:
    """Whether an earlier job was killed after it made the store, and before it made the server."""
    if manifest_in(folder) is not None:
        return False
    with ClientStore.open(folder, readonly=True) as found:
        return found.state is None and len(found) == 0


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
    **options: Any,
) -> Server:
    """A server in that folder: as an earlier job's last finished round left it, else a new one.

    Args:
        model, algorithm, clients, options: as for ``Server``. Clients that an old server does not know are added; give
            none where clients are registered with their first accepted reply (``newcomers``).
        client_sizes: n_k by id, or in the order of ids 0, 1, ..., for methods that weigh by p^k = n_k / n.
        storage: a ``Storage``, or the path of a folder for rounds that outlive the job.
        steps: the local steps that clients are asked for, if it is a number: ``max_steps`` where ``limits`` has no
            other, and at least that of an old server.
        limits: default: those of the old server, or ``Limits()``.
        own_rates: whether clients may step at any rate up to 100, since the server sends none.

    Raises:
        CheckpointError: the old server has another algorithm or model.
        StoreError: the folder is something else, or another process has it.
        RangeError: a client has no size, and others have some.
    """
    storage, ids = Storage.of(storage), list(clients)
    sizes: Any = client_sizes
    if not isinstance(sizes, Mapping | None):
        sizes = dict(enumerate(sizes))
    if sizes is not None and (missing := [client for client in ids if client not in sizes]):
        raise RangeError(f"client_sizes: there is no number of examples for {missing[0]!r}")

    def sized(some: list[ClientId]) -> Any:
        return some if sizes is None else {client: sizes[client] for client in some}

    if is_begun(storage):
        how = {"storage": storage, "steps": steps, "limits": limits, "own_rates": own_rates}
        server = load_server(storage.path, model, algorithm, **how, **options)
    else:
        options["limits"] = _limits(Limits() if limits is None else limits, steps, own_rates)
        if storage.path is None or not Path(storage.path).is_dir() or not any(Path(storage.path).iterdir()):
            return Server(model, algorithm, sized(ids), storage=storage, **options)
        rows = ClientStore.open(storage.path, durability=storage.durability)
        server = Server(model, algorithm, None if sizes is None else {}, storage=rows, **options)
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
    max_staleness: int = 0,
    **options: Any,
) -> Server:
    """The server of a folder, if it has that algorithm, and a model like ``model``.

    Args:
        storage, steps, limits, own_rates, options: as for ``open_server``. Other rates, limits and rules than the saved
            ones change them, with a warning; the optimizer must be the saved one. ``max_staleness`` stays as saved.
        any_form: whether tensors of another library, and a saved optimizer where none is given, are accepted.

    Raises:
        CheckpointError: it has not.
    """
    method = named(algorithm) if isinstance(algorithm, str) else algorithm
    if manifest_in(path) is None:
        _require_layout(path, _saved_layout(path), model, any_form)
    given = None if limits is None else _limits(limits, steps, own_rates)
    server = Server.load(path, algorithm=method, limits=given, storage=storage, **options)
    try:
        _require_layout(path, server.layout, model, any_form)
        saved = server._settings.optimizer
        if not any_form and options.get("optimizer") is None and saved is not None:
            raise CheckpointError(f"{path}: the saved server has the optimizer {saved}, and the job none; give it")
        if limits is None:
            most = max(server.limits.max_steps, steps) if _is_number(steps) else server.limits.max_steps
            needed = _limits(replace(server.limits, max_steps=most), None, own_rates)
            if needed != server.limits:
                server.change(limits=needed)
    except BaseException:
        server.close()
        raise
    return server


def _is_number(steps: Any) -> bool:
    return isinstance(steps, int) and not isinstance(steps, bool)


def _limits(limits: Limits, steps: Any, own_rates: bool) -> Limits:
    """The limits, with what the job asks of clients where they do not say it."""
    if _is_number(steps) and limits.max_steps == Limits.max_steps:
        limits = replace(limits, max_steps=steps)
    if own_rates and limits.max_client_lr is None:
        limits = replace(limits, max_client_lr=MOST_CLIENT_LR)
    return limits


def _saved_layout(path: Any) -> Layout:
    """The layout of a folder's model, which is compared before a job changes anything there."""
    with believed(path):
        return Layout.from_state(server_state(path, state_of(Path(path)))["settings"]["layout"])


def _require_layout(path: Any, saved: Layout, model: Any, any_form: bool) -> None:
    due = Layout.of(model)
    same = (saved.slices, saved.outside) == (due.slices, due.outside) if any_form else saved == due
    if not same:
        raise CheckpointError(f"{path}: the saved server has a model of other tensors or shapes than the job's")


def newcomers(
    server: Server, clients: Iterable[ClientId], sizes: Mapping[Any, int] | None
) -> list[ClientId] | dict[ClientId, int]:
    """The clients that are registered with their first accepted reply, as ``Server.open_round`` takes them.

    Args:
        clients: all that are asked, or that answer; what is no id is left out.
        sizes: n_k by id. Default: clients have no sizes.
    """
    new = [client for client in dict.fromkeys(clients) if _is_id(client) and client not in server.clients]
    return new if sizes is None else {client: sizes[client] for client in new if client in sizes}


def _is_id(client: object) -> bool:
    try:
        canonical(client)
    except UnknownClientError:
        return False
    return True


# The instructions that a framework can carry to clients.


def beyond_plain_steps(algorithm: Algorithm) -> str | None:
    """The work of a method's clients beside steps y -= lr grad(y) from the model that they get; None for nothing."""
    if algorithm.rows_at_clients:
        return "whose clients keep their own rows"
    if algorithm.looks_ahead:
        return "whose clients start ahead of the model"
    if not algorithm.local_rule.ordinary:
        return f"whose clients follow the local rule {name_of(algorithm.local_rule)!r}"
    if algorithm.second_vector is not None:
        return "whose clients send a second vector"
    if algorithm.direction == Direction(mu=algorithm.direction.mu) != Direction():
        return "whose clients add a proximal term; FedAvg has the same server, if clients add the term themselves"
    return None if algorithm.direction == Direction() else "whose clients step along more than their gradient"


def with_plain_steps(algorithm: Algorithm | str, lr: float | Rate | None) -> Algorithm:
    """The algorithm, if its clients need only the model: their steps are y -= lr grad(y).

    Raises:
        RangeError: its clients do more, and no message would say so; or ``lr`` differs between a round's steps.
    """
    method = named(algorithm) if isinstance(algorithm, str) else algorithm
    if more := beyond_plain_steps(method):
        raise RangeError(f"algorithm: expected one of plain local steps, got {type(method).__name__}, {more}")
    require_rate_of_rounds(lr)
    return method


def require_own_model(own: Sequence[npt.NDArray[Any]], given: Sequence[npt.NDArray[Any]]) -> None:
    """Reject a model that a framework hands back to be sent, and that is not the server's.

    Raises:
        ArrayError: the server would not send it and not step from it, so that its noise would be lost.
    """
    if len(own) != len(given) or not all(map(np.array_equal, own, given)):
        raise ArrayError(
            "model: a wrapper changed the model that the last round returned, such as one of differential privacy that "
            "adds noise. Clients are sent the server's own model, without that change; let clients add the noise"
        )


def require_rate_of_rounds(lr: float | Rate | None) -> None:
    """Reject a rate that differs between the steps of a round: a message carries one.

    Raises:
        RangeError: it does.
    """
    if hasattr(lr, "of_step"):
        raise RangeError(
            f"lr={lr!r}: clients are sent one rate for all steps of a round; lambda round: rate(round) gives that of "
            "each round's first step"
        )


def steps_of(reported: object, metrics: Mapping[str, Any], steps: int | str | None, server: Server) -> Any:
    """K of a reply: as it reports it in fedcore's own fields, else as ``steps``, else 1 where K does not matter.

    Args:
        reported: its number of steps; None if it has none.
        metrics: its metrics.
        steps: K of all replies that do not report it, or the name of the metric that holds it.

    Returns:
        The number as it came; the round checks it.

    Raises:
        RangeError: there is none.
    """
    if reported is not None:
        return reported
    due = "steps: expected the number of local steps, got a reply that does not say it"
    algorithm = server.algorithm
    if more := beyond_plain_steps(algorithm):  # a client that does not know fedcore's fields did not follow them
        raise RangeError(f"{due}: {type(algorithm).__name__} is a method {more}, and they answer by Task.reply")
    if isinstance(steps, str):
        value = metrics.get(steps)
        if value is None:
            raise RangeError(f"{due}: no metric {steps[:40]!r}")
        return integral(value)
    if steps is not None:
        return steps
    if server.averages_models and not algorithm.needs_shares:  # FlexibleFedAvg weighs by the steps
        return 1
    other = f", or take {option}" if (option := algorithm.averaging_option) else ""
    raise RangeError(f"{due}: answer by Task.reply, or tell the strategy steps= (a number, or a metric's name){other}")


def require_steps(steps: int | str | None, algorithm: Algorithm) -> None:
    """Reject a ``steps=`` that is no number and no name, or that does not fit the method.

    Raises:
        RangeError: it is neither; or clients that do not know fedcore's fields would not follow the method.
    """
    if steps is None:
        return
    if not (is_whole(steps, 1, 2**53) or (isinstance(steps, str) and steps)):
        raise RangeError(f"steps={steps!r}: must be {due_whole(1, 2**53)}, or a metric's name")
    if more := beyond_plain_steps(algorithm):
        raise RangeError(f"steps={steps!r}: leave it out; {type(algorithm).__name__} is a method {more}")


# The clients' replies, and the lines about them in a framework's log.


def add_reply(round: Round, client: ClientId, read: Callable[[], Update]) -> bool:
    """Add a client's reply to a round; reject it in the round's report if it cannot be read or used.

    Args:
        client: its name, as the framework authenticated it.
        read: makes the update of what the client sent.

    Returns:
        Whether the update is accepted: see ``Round.add``.

    Raises:
        Exception: the round is closed, or the server failed while it folded the update.
    """
    try:
        with span("decode"):
            update = read()
        return round.add_batch([update])[0]
    except Exception as error:
        if not round.is_open:
            raise
        round.reject(client, reason_of(error))
        return False


NAMED = 5
"""Clients that a line names; the report has all."""


def rejections(rejected: Sequence[tuple[ClientId, str]], accepted: int) -> str:
    """How many replies were rejected beside those accepted, of which clients, and why."""
    others = f"heard {accepted}" if accepted else "HEARD NOBODY"
    return f"refused {len(rejected)} ({_named([c for c, _ in rejected])}) and {others}: {refusal_summary(rejected)}"


def silence(clients: Sequence[ClientId]) -> str:
    """The clients that were asked and did not answer.

    >>> silence([3, "b"])
    "no answer from 2 that were asked (3, 'b')"
    """
    return f"no answer from {len(clients)} that were asked ({_named(clients)})"


def _named(clients: Sequence[ClientId]) -> str:
    return ", ".join([repr(client) for client in clients[:NAMED]] + ["..."] * (len(clients) > NAMED))


def rejection_line(report: Report) -> str | None:
    """The rejections of a round in one line, however many there are; None if there were none.

    >>> rejection_line(Report(3, accepted=("a",), rejected=(("b", "steps: got None"), ("c", "steps: got None"))))
    "round 3: refused 2 ('b', 'c') and heard 1: 2 x steps: got None"
    """
    if not report.rejected:
        return None
    return f"round {report.round}: {rejections(report.rejected, len(report.accepted))}"
