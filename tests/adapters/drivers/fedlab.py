"""FedLab: the handler in the place of ``StandalonePipeline``; parameters only, and no rates."""

import numpy as np
import torch

from fedcore.adapters.fedlab import ServerHandler
from tests.adapters.drivers import LR, MODEL, Driver, arranged, named_views, plain_task, sizes_by_id
from tests.adapters.malformed import OBJECTS, PLAIN

TENSORS = [
    lambda: torch.zeros(9),
    lambda: torch.zeros(10, dtype=torch.int32),
    lambda: torch.zeros(10, dtype=torch.complex64),
    lambda: torch.full((10,), torch.nan),
    lambda: torch.zeros(10).to_sparse(),
    lambda: torch.zeros(10, device="meta"),
    lambda: torch.zeros(1).expand(10),
    lambda: torch.tensor([0.5, 1.0, 1.0]),
]


class Net(torch.nn.Module):
    def __init__(self, x0):
        super().__init__()
        for name, x in x0.items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(x.copy())))


class FedLab(Driver):
    registers_all = True
    odd = (*PLAIN, *OBJECTS, *TENSORS)

    def ids(self, n):
        return list(range(n))

    def run(self, algorithm, work, *, n=3, rounds=3, x0=MODEL, order=None, lr=LR, **options):
        x0 = {name: x for name, x in x0.items() if name in ("w", "b")}
        handler = ServerHandler(Net(x0), rounds, 1.0, algorithm, lr=lr, **sizes_by_id(options, self.ids(n)))
        handler.num_clients = n
        while not handler.if_stop:
            sampled, t = sorted(handler.sample_clients()), handler.round
            sent = named_views(handler.downlink_package[0].numpy().copy(), x0)
            for i in arranged(sampled, order):
                if (answer := work(t, i, sent, plain_task(t, lr))) is not None:
                    handler.load(self.message(answer, sent))
            if handler.round == t:
                handler.global_update([])
        return handler.server, handler.reports, named_views(handler.model_parameters.numpy(), x0)

    def form(self, update, sent):
        y = [torch.from_numpy(np.array(update.value[name])).reshape(-1) for name in sent if name in update.value]
        y = torch.cat([tensor.to(y[0].dtype) for tensor in y])
        if update.client is None:  # claims decide whose it is
            return [y]
        return [y, torch.tensor([update.client, update.steps, update.examples])]

    def built(self, form):
        is_claimed = type(form) in (list, tuple) and len(form) > 1 and not isinstance(form[1], torch.Tensor)
        return [form] if is_claimed else form
