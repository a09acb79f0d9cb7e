"""Ways to deliver a round's updates to a server: all have the same bits, and reject the same updates."""

import numpy as np
import torch

from tests.kit import one_by_one


def as_list(server, updates):
    return server.round(updates)


def kept(server, updates):
    return server.round(update._replace(keep=True) for update in updates)


def _reused(updates, is_kept=lambda i: False):
    """Each update in the buffers of the one before; some in memory of their own that is kept."""
    buffers = {}
    for i, update in enumerate(updates):
        vectors = {name: getattr(update, name) for name in ("value", "control") if getattr(update, name) is not None}
        if is_kept(i):
            yield update._replace(**{name: vector.copy() for name, vector in vectors.items()}, keep=True)
            continue
        for name, vector in vectors.items():
            buffers.setdefault(name, np.empty_like(vector))[:] = vector
        yield update._replace(**{name: buffers[name] for name in vectors})
        for buffer in buffers.values():
            buffer[:] = np.nan


def lent(server, updates):
    with server.open_round() as round:
        for i, update in enumerate(updates):
            buffer = round.buffer()
            buffer[:] = update.value
            round.add_batch([update._replace(value=buffer[:] if i % 2 else buffer)])  # a view does as well
    return round.report


def _one_by_one(change):
    return lambda server, updates: one_by_one(server, change(updates))


def _changed(**how):
    return lambda updates: (update._replace(**{k: f(update.value) for k, f in how.items()}) for update in updates)


def _at_an_odd_address(y):
    """Where no float32 may lie."""
    return memoryview(b"\x00" + y.tobytes())[1:]


DELIVERIES = {
    "list": as_list,
    "kept": kept,
    "generated in one buffer": lambda server, updates: server.round(_reused(updates)),
    "generated and some kept": lambda server, updates: server.round(_reused(updates, lambda i: i % 4 != 2)),
    "one by one in one buffer": _one_by_one(_reused),
    "one by one and kept": _one_by_one(_changed(keep=lambda y: True)),
    "bytes": _one_by_one(_changed(value=lambda y: y.tobytes())),
    "part of a message": _one_by_one(_changed(value=_at_an_odd_address)),
    "tensors": _one_by_one(_changed(value=lambda y: torch.from_numpy(y.copy()))),
    "list of tensors": lambda server, updates: as_list(server, [*_changed(value=torch.from_numpy)(updates)]),
    "buffers of the server": lent,
}


def outcome(report):
    """The fields of a report that must not depend on the delivery."""
    return report.accepted, sorted(report.rejected), report.norms.tolist(), report.gamma, report.diversity
