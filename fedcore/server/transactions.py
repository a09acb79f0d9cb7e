"""The transactions of a server's folder: the number of the last, and going back to the one before it."""

from typing import NamedTuple

from fedcore.errors import CheckpointError
from fedcore.server.folder_checks import believed, server_state
from fedcore.server.snapshot import count_of
from fedcore.store import ClientStore
from fedcore.store.committed_rows import CommittedRows


class Transactions(NamedTuple):
    """Two of a server's transactions, by number: what it was made with is 0, and each round, arrival, departure,
    resizing, change of options and warm start is one more; one that is taken back does not count.

    Attributes:
        last: the last that the folder holds.
        before: the one that an undo goes back to; None where nothing is kept, or no server was there before.
    """

    last: int
    before: int | None


def transactions(rows: CommittedRows) -> Transactions:
    """The transactions that a store holds of a server.

    With durability="checkpoint" an undo goes back to the checkpoint before the last, and so may be more than one back.

    Args:
        rows: as ``ClientStore.open`` gives them; a server need not have been made of them.

    Raises:
        CheckpointError: it is a store without a server.
    """
    kept, path = rows.previous, rows.path or "store"
    with believed(path):
        last = count_of(server_state(path, rows.state, shard=None)["numbers"])
        # Before a new server's first commit there was an empty store.
        state = None if kept is None else kept.state
        before = None if state is None else count_of(server_state(path, state, shard=None)["numbers"])
    return Transactions(last, before)


def last_change(rows: CommittedRows) -> str | None:
    """The change that an undo of a server's folder takes back, in words; None where nothing of it is kept.

    Raises:
        CheckpointError: it is a store without a server.
    """
    kept, path, (last, before) = rows.previous, rows.path or "store", transactions(rows)
    if before is None or kept is None:
        return None
    with believed(path):
        first, end = (int(state["numbers"]["round_number"]) for state in (kept.state, rows.state))
        came = int(rows.state["clients"]) - int(kept.state["clients"])
        said = [] if end == first else [f"round {first}" if end == first + 1 else f"rounds {first} to {end - 1}"]
        if came:
            who = "1 client" if abs(came) == 1 else f"{abs(came):,} clients"
            said.append(f"the {'arrival' if came > 0 else 'departure'} of {who}")
        was, now = (state["numbers"].get("changed", {}) for state in (kept.state, rows.state))
        if options := [name for name, value in now.items() if name not in was or was[name] != value]:
            said.append(f"a change of {', '.join(options)}")
        had, have = (state["numbers"]["population"]["total"] for state in (kept.state, rows.state))
    if said:
        return " and ".join(said)
    of_clients = first or had != have
    if last == before + 1:
        return "a change of client_sizes" if of_clients else "a warm start"
    return "changes of the clients" if of_clients else "a warm start, or changes of the clients"


def go_back(rows: ClientStore, to: int) -> bool:
    """Have a store hold this transaction as the last, by an undo if it holds the one after it.

    Where several stores hold parts of one server, this makes them agree after a crash: each is opened, which takes its
    lock, then all are asked for their ``transactions``, and each goes back to the least of them. Twice is as once.

    Args:
        rows: opened with ``undoable=True``; ``Server.load`` takes them then.
        to: the number of the transaction.

    Returns:
        whether one was taken back.

    Raises:
        CheckpointError: it holds neither this transaction nor the one after it with what that replaced; or no server.
        StoreError, CorruptionError: as ``ClientStore.undo``.

    Cost: none, or that of an undo.
    """
    now = transactions(rows)
    if now.last == to:
        return False
    if now.before != to:
        kept = "nothing of before it" if now.before is None else f"what it replaced, of {now.before}"
        raise CheckpointError(
            f"{rows.path}: expected transaction {to}, or the one after it and what that replaced, got {now.last} and "
            f"{kept}"
        )
    return rows.undo()
