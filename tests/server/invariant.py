"""What is true of a server between any two calls, whatever failed or interrupted those before."""

import numpy as np

from fedcore import ClientStore

_SLACK = 1e-6  # of what T sums, for the rounding of float64 over any number of rounds


def contradictions(server):
    """Where memory, rows and folder say different things: a line for each; empty if they agree.

    T is the sum of all rows, or MimiC's of all corrections v[t_i] - r_i; no two clients share a slot, and no slot that
    is in use is free; the folder's last commit has this x, this round, and these clients.
    """
    state = server._state
    now, store, algorithm = state.now, state.store, state.settings.algorithm
    found = []
    if now.total is not None and algorithm.keeps_rows:
        due, size = np.zeros_like(now.total), np.zeros_like(now.total)
        for client in store.registry:
            if store.round_of(client) is not None:
                part = state.correction(client) if algorithm.keeps_history else store.read(client).astype(np.float64)
                due += part
                size += np.abs(part)
        off = np.abs(now.total - due)
        if not (off <= _SLACK * (size + np.abs(now.total))).all():
            worst = int(np.argmax(off))
            found.append(
                f"T: expected the sum of all rows, {due[worst]:g} in element {worst}, got {now.total[worst]:g}"
            )
    rows = store._content.rows
    used = rows.slot[rows.slot > 0].tolist()
    free = rows.slots._free + [slot for _, slots in rows.slots._retired for slot in slots]
    if len(set(used + free)) < len(used + free):
        found.append(f"slots: expected each once, got {sorted(used)} in use and {sorted(free)} free")
    if store.medium == "mmap":
        with ClientStore.open(store.path, readonly=True) as folder:
            if folder.registry != store.registry:
                found.append(f"clients: expected the folder's, {list(folder.registry)}, got {list(store.registry)}")
        kept = store.state["numbers"]["round_number"] if store.state else None
        if kept != now.round_number:
            found.append(f"round: expected the folder's, {kept}, got {now.round_number} in memory")
        x = store.vector("x")
        if x is None or x.tobytes() != now.x.tobytes():
            found.append("x: expected the folder's, got another in memory")
    return found
