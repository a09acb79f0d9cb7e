"""Invariants of a server between any two calls, also after errors and interruptions."""

from fedcore import ClientStore
from fedcore.server.folder import folder_problems, total_problems


def contradictions(server):
    """Return a line for each contradiction between memory, rows and folder.

    T is the sum of all rows, or MimiC's of all corrections v[t_i] - r_i; no two clients share a slot, and no used slot
    is free; the folder's last commit has this x, this round, and these clients.
    """
    state = server._backend
    now, store, algorithm = state.snapshot, state.store, state.settings.algorithm
    found = []
    if now.total is not None and algorithm.keeps_rows:
        found += total_problems(store, now.total, now.history.directions if algorithm.keeps_history else None)
    rows = store._content.rows
    used = rows.slot[rows.slot > 0].tolist()
    free = rows.slots._free + [slot for _, slots in rows.slots._retired for slot in slots]
    if len(set(used + free)) < len(used + free):
        found.append(f"slots: expected each once, got {sorted(used)} in use and {sorted(free)} free")
    if store.medium == "mmap":
        with ClientStore.open(store.path, readonly=True) as folder:
            found += folder_problems(folder)
            if folder.registry != store.registry:
                found.append(f"clients: expected the folder's, {list(folder.registry)}, got {list(store.registry)}")
        kept = store.state["numbers"]["round_number"] if store.state else None
        if kept != now.round_number:
            found.append(f"round: expected the folder's, {kept}, got {now.round_number} in memory")
        x = store.vector("x")
        if x is None or x.tobytes() != now.x.tobytes():
            found.append("x: expected the folder's, got another in memory")
    return found
