"""The adapters' way of adding a client's reply to a round: whatever reading it raises rejects that client alone."""

from collections.abc import Callable

from fedcore.arguments import reason_of
from fedcore.clients import ClientId
from fedcore.server import Round, Update


def add_reply(round: Round, client: ClientId, read: Callable[[], Update]) -> bool:
    """Add a client's reply to a round; reject it in the round's report if it cannot be read or used.

    Args:
        client: its name, as the framework authenticated it.
        read: makes the update of what the client sent.

    Returns:
        Whether the update is accepted: see ``Round.add``.

    Raises:
        Exception: the round is over, or the server failed while it folded the update.
    """
    try:
        return round.add_update(read())
    except Exception as error:
        if not round.is_open:
            raise
        round.refuse(client, reason_of(error))
        return False
