"""A server for a framework's job: a new one, or the one that an earlier job left on the disk."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcore.algorithms import Algorithm, named
from fedcore.clients import ClientId
from fedcore.clients.registry import canonical
from fedcore.errors import CheckpointError, UnknownClientError, UnknownNameError
from fedcore.layout import Layout
from fedcore.server import Server
from fedcore.server.limits import Limits
from fedcore.store import ClientStore

LIMITS = ("max_steps", "max_examples", "max_examples_ratio", "max_lr", "max_norm", "max_norm_ratio", "own_rates")
"""Arguments of ``Server`` that say what a client may claim and send."""


def check_limits(limits: Mapping[str, Any] | None) -> dict[str, Any]:
    """The limits of a job that says them by name.

    Raises:
        UnknownNameError: there is no such limit.
    """
    for name in limits or {}:
        if name not in LIMITS:
            raise UnknownNameError.of("limits", name, LIMITS)
    return dict(limits or {})


def require_same_limits(server: Server, path: str | Path, options: Mapping[str, Any]) -> None:
    """Refuse limits that a server on the disk does not have: it goes on with its own, and nobody would know.

    Raises:
        CheckpointError: one of ``options`` is another; the store is closed.
    """
    saved, usual = server.store.state["settings"]["limits"], asdict(Limits())  # a folder of before has not all
    for name in LIMITS:
        had = saved.get(name.removeprefix("max_"), usual[name.removeprefix("max_")])
        if name in options and options[name] != had:
            server.close()
            raise CheckpointError(
                f"{name}: expected {had!r}, with which the server in {path} was made, got {options[name]!r}:"
                " leave it out, or start a new server from its model"
            )


def load_server(path: str | Path, algorithm: Algorithm | str, x0: Any, **options: Any) -> Server:
    """The server that was saved there, or that lies on a store, if it is of that algorithm and of a model like ``x0``.

    Args:
        options: of ``Server``: rates, optimizer and on_report are said again, limits compared, and the others stay as
            they were.

    Raises:
        CheckpointError: it is not.
    """
    said_again = {name: options[name] for name in ("lr", "server_lr", "optimizer") if options.get(name) is not None}
    method = named(algorithm) if isinstance(algorithm, str) else algorithm
    server = Server.load(path, algorithm=method, on_report=options.get("on_report"), **said_again)
    if server.layout != Layout.of(x0):
        server.close()
        raise CheckpointError(f"{path}: expected the store of a model like the job's, got other tensors or shapes")
    require_same_limits(server, path, options)
    return server


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
            told none.

    Raises:
        CheckpointError: the old server is of another algorithm, rate or model.
        StoreError: the folder is something else, or another process has it.
    """
    ids = list(clients)
    path = Path(store.removeprefix("mmap:"))
    if not store.startswith("mmap:") or not path.is_dir() or not any(path.iterdir()):
        return Server(algorithm, x0, ids, store=store, **asked_at_most(steps) | options)
    with ClientStore.open(path, readonly=True) as found:
        never_began = found.state is None and len(found) == 0
    if never_began:  # the earlier job was killed between the store's making and the server's
        server = Server(algorithm, x0, store=ClientStore.open(path), **asked_at_most(steps) | options)
    else:
        server = load_server(path, algorithm, x0, **options)
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
