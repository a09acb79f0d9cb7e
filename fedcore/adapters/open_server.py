"""A server for a framework's job: a new one, or the one that an earlier job left on the disk."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedcore.algorithms import Algorithm, named
from fedcore.arguments import absolute, absolute_store
from fedcore.clients import ClientId
from fedcore.clients.registry import canonical
from fedcore.errors import CheckpointError, UnknownClientError, UnknownNameError
from fedcore.layout import Layout
from fedcore.server import Server
from fedcore.server.folder_checks import believed, server_state
from fedcore.server.limits import LIMITS
from fedcore.store import ClientStore
from fedcore.store.info import state_of


def check_limits(limits: Mapping[str, Any] | None) -> dict[str, Any]:
    """The limits of a job that says them by name.

    Raises:
        UnknownNameError: there is no such limit.
    """
    for name in limits or {}:
        if name not in LIMITS:
            raise UnknownNameError.of("limits", name, LIMITS)
    return dict(limits or {})


def load_server(
    path: str | Path, algorithm: Algorithm | str, x0: Any, *, steps: object = None, **options: Any
) -> Server:
    """The server that was saved there, or that lies on a store, if it is of that algorithm and of a model like ``x0``.

    Args:
        steps: as for ``open_server``.
        options: of ``Server``: rates and limits that are others than the saved ones change, which is logged; the
            optimizer has to be the saved one; what else is made with a server stays as it was.

    Raises:
        CheckpointError: it is not.
    """
    if saved_layout(path) != Layout.of(x0):
        raise CheckpointError(f"{path}: expected the store of a model like the job's, got other tensors or shapes")
    again = {name: options[name] for name in ("lr", "server_lr", "optimizer") if options.get(name) is not None}
    method = named(algorithm) if isinstance(algorithm, str) else algorithm
    own: dict[str, Any] = {name: options.get(name) for name in ("on_report", "weights")}
    server = Server.load(path, algorithm=method, **own, **again, **limits_of(options))
    if "optimizer" not in again and (saved := server._settings.optimizer) is not None:
        server.close()
        raise CheckpointError(f"{path}: expected a server without an optimizer, as the job says, got one of {saved}")
    allow_asked_steps(server, steps, options)
    return server


def saved_layout(path: str | Path) -> Layout:
    """The layout of the model of a server's folder, to be compared before a job changes anything there.

    Raises:
        StoreError, CheckpointError: there is no server.
    """
    with believed(path):
        return Layout.from_state(server_state(path, state_of(absolute(path)))["settings"]["layout"])


def limits_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The limits among the arguments of ``Server``."""
    return {name: value for name, value in options.items() if name in LIMITS}


def allow_asked_steps(server: Server, steps: object, options: Mapping[str, Any]) -> None:
    """Raise the ``max_steps`` of an old server whose clients are asked for more, unless the job limits them itself."""
    asked = asked_at_most(steps).get("max_steps", 0)
    if "max_steps" not in options and asked > server._settings.limits.steps:
        server.change(max_steps=asked)


def asked_at_most(steps: object) -> dict[str, int]:
    """``max_steps`` of a new server whose clients were asked for so many steps; nothing where nobody knows."""
    return {"max_steps": int(steps)} if isinstance(steps, int) and not isinstance(steps, bool) else {}


def open_server(
    algorithm: Algorithm | str,
    x0: Any,
    clients: Iterable[ClientId],
    *,
    store: str = "ram",
    steps: object = None,
    **options: Any,
) -> Server:
    """A server on that store: of an earlier job's last finished round if there is one, else new, with x = ``x0``.

    Args:
        algorithm, x0, clients, options: as for ``Server``. Clients that an old server does not know arrive; none, where
            they count from when they first answer (``newcomers``).
        store: "ram", or "mmap:PATH" for rounds that outlive the job.
        steps: the local steps that clients are asked for, if it is a number: the ``max_steps`` of a new server that is
            told none, and at least that of an old one.

    Raises:
        CheckpointError: the old server is of another algorithm or model.
        StoreError: the folder is something else, or another process has it.
    """
    ids = list(clients)
    store = absolute_store(store)
    path = Path(store.removeprefix("mmap:"))
    if not store.startswith("mmap:") or not path.is_dir() or not any(path.iterdir()):
        return Server(algorithm, x0, ids, store=store, **asked_at_most(steps) | options)
    with ClientStore.open(path, readonly=True) as found:
        never_began = found.state is None and len(found) == 0
    if never_began:  # the earlier job was killed between the store's making and the server's
        server = Server(algorithm, x0, store=ClientStore.open(path), **asked_at_most(steps) | options)
    else:
        server = load_server(path, algorithm, x0, steps=steps, **options)
    server.arrive([client for client in ids if client not in server.clients])
    return server


def newcomers(
    server: Server, clients: Iterable[ClientId], client_sizes: Mapping[Any, int] | None
) -> list[ClientId] | dict[ClientId, int]:
    """The clients that are asked and count from their first answer that does, as ``Server.open_round`` takes them.

    Args:
        clients: all who are asked, or who answer; what is no id is left out.
        client_sizes: n_k by id, of the clients that have sizes; None where none has.
    """
    new = [client for client in dict.fromkeys(clients) if _is_id(client) and client not in server.clients]
    return new if client_sizes is None else {client: client_sizes[client] for client in new if client in client_sizes}


def _is_id(client: object) -> bool:
    try:
        canonical(client)
    except UnknownClientError:
        return False
    return True
