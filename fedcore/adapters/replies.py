"""The adapters' way of adding a client's reply to a round: whatever reading it raises rejects that client alone."""

from collections.abc import Callable

from fedcore.arguments import reason_of
from fedcore.clients import ClientId
from fedcore.errors import DuplicateUpdateError, UnknownClientError
from fedcore.server import Round, Update


def add_reply(round: Round, client: ClientId, read: Callable[[], Update]) -> None:
    """Add a client's reply to a round; reject it in the round's report if it cannot be read or used.

    Args:
        client: its name, as the framework authenticated it.
        read: makes the update of what the client sent.

    Raises:
        UnknownClientError: the round expects no such client.
        DuplicateUpdateError: the round has an update of the client already.
        Exception: the round is over, or the server failed while it folded the update.
    """
    try:
        update = read()
    except Exception as error:
        round.refuse(client, reason_of(error))
        return
    try:
        round.add_update(update)
    except (UnknownClientError, DuplicateUpdateError):
        raise
    except Exception as error:
        if not round.is_open:
            raise
        round.refuse(client, reason_of(error))


def takes_reply(round: Round, client: ClientId, read: Callable[[], Update]) -> bool:
    """Add a reply as ``add_reply`` does; tell whether the round took it, which may still reject it when it folds it.

    Cost: copies the list of those rejected so far.
    """
    before = len(round.refused)
    add_reply(round, client, read)
    return all(rejected != client for rejected, _ in round.refused[before:])
