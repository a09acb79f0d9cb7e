"""Servers on the CPU and on a device, which get the same updates and must not differ."""

import copy
import dataclasses

import numpy as np

from fedcore import Storage, Update
from fedcore.arrays import to_host
from tests.devices.tensors import TorchTensor
from tests.server.rounds import N, made, steps_of

SHAPES = {"w": (40, 50), "bias": (77,), "running_mean": (13,), "running_var": (10,)}
n, n_parameters = 2100, 2077  # more than a tile, and a tail


class Tensor(TorchTensor):
    """A tensor on the emulated device, with the methods of torch that a server calls."""

    __dlpack_c_exchange_api__ = TorchTensor.__dlpack_c_exchange_api__  # only the class itself counts

    nbytes = property(lambda self: int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize)

    def is_contiguous(self):
        return True

    def detach(self):
        return self

    def reshape(self, *shape):
        view = copy.copy(self)
        view.shape = (int(np.prod(self.shape)),) if shape == (-1,) else tuple(shape)
        return view

    def __deepcopy__(self, memo):
        return Tensor(self.numpy())

    def __getitem__(self, part):
        start, stop, _ = part.indices(len(self))
        view = copy.copy(self)
        view.offset, view.shape = self.offset + start * np.dtype(self.dtype).itemsize, (stop - start,)
        return view


def model(seed=7):
    """A model by name with float buffers; its variances are positive."""
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    return tensors | {"running_var": np.abs(tensors["running_var"]) + np.float32(0.5)}


def server(method, medium, codec, device, folder=None, *, cached_rows=None, **options):
    """A server of a method on rows of a medium and codec."""
    place = Storage(folder if medium == "mmap" else None, medium=medium, codec=codec, cached_rows=cached_rows)
    return made(method, model(), storage=place, device=device, diagnostics=True, **options)


def host(vector):
    """A vector, or None, in host memory."""
    return None if vector is None else to_host(vector)


def everything(server):
    """The whole state of a server, as bytes."""
    found = []
    for state in server._backend.states:
        now, rows = state.snapshot, state.store
        vectors = {name: host(v).tobytes() for name, v in state._vectors(now).items()}
        held = {client: host(rows.read(client)).tobytes() for client in state.registry}
        written = {client: rows.round_of(client) for client in state.registry}
        found.append((vectors, held, written, now.numbers()))
    return found


def fields_of(report):
    """The fields of a report, without the time, and without those that depend on the last broadcast."""
    fields = {one.name: getattr(report, one.name) for one in dataclasses.fields(report)}
    fields["groups"] = {name: fields_of(of_group) for name, of_group in (report.groups or {}).items()}
    left_out = ("seconds", "closed", "missing")
    return {name: v.tobytes() if isinstance(v, np.ndarray) else v for name, v in fields.items() if name not in left_out}


def replies(server, seed=None):
    """The updates of a cohort, a pure function of the server's state and round."""
    rng = np.random.default_rng(server.round_number if seed is None else seed)
    cohort = np.flatnonzero(rng.random(N) < 0.6).tolist()
    broadcast = server.broadcast(cohort).on_host()
    p, updates = server.layout.n_parameters, []
    for i in cohort:
        y = broadcast.x * np.float32(0.9) + np.float32(0.1) * rng.normal(size=server.layout.n).astype(np.float32)
        y[:p] -= np.float32(0.1) * broadcast.offset(i)
        y -= 0 if broadcast.x_prev is None else np.float32(0.1) * broadcast.x_prev
        y[p:] = np.abs(y[p:])
        control = rng.normal(size=p).astype(np.float32) if broadcast.second else None
        updates.append(Update(i, y, steps=steps_of(server, 1 + i % 3), examples=i + 1, control=control))
    return updates


def run_rounds(server, rounds):
    """Run rounds with ``replies``; return their reports."""
    return [fields_of(server.round(replies(server))) for _ in range(rounds)]


def same_round(cpu, gpu, updates, on_gpu=None):
    """Run a round on both servers, on the second with other forms of the updates if given, and compare."""
    assert fields_of(gpu.round(updates if on_gpu is None else on_gpu)) == fields_of(cpu.round(updates))
    assert everything(gpu) == everything(cpu)


def by_name(update):
    """The update with its model as one array for each name."""
    tensors, start = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        tensors[name] = update.value[start : start + size].reshape(shape)
        start += size
    return update._replace(value=tensors)


def on_device(update, whole=True):
    """The update with its vectors on the device: the model as one tensor, or as one for each name."""
    control = None if update.control is None else Tensor(update.control)
    if whole:
        return update._replace(value=Tensor(update.value), control=control)
    return update._replace(value={name: Tensor(v) for name, v in by_name(update).value.items()}, control=control)
