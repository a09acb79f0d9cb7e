"""pfl: ``Method`` as the backend calls it; parameters only, steps by the server's own function."""

from pathlib import Path

import numpy as np
import torch
from pfl.context import UserContext
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.stats import MappedVectorStatistics

from fedcore import Server, Storage
from fedcore.adapters.pfl import Method
from fedcore.arrays import to_host
from tests.adapters.drivers import LR, MODEL, Driver, Raw, arranged, plain_task, sizes_by_id
from tests.adapters.malformed import ODD

set_framework_module(pytorch_ops)


class Pfl(Driver):
    kind = "delta"
    registers_all = True
    odd = ODD

    def run(self, algorithm, work, *, n=3, rounds=3, x0=MODEL, order=None, lr=LR, steps=None, **options):
        users, reported = self.ids(n), {}
        options = sizes_by_id(options, users)
        method = Method(algorithm, users, lr=lr, steps=lambda context: reported[context.user_id], **options)
        t, sent, path = 0, x0, method._options.storage.path
        if path is not None and Path(path).exists():  # pfl's own model would be resumed by its user
            earlier = Server.load(path, storage=Storage(medium="ram"))
            t, sent = earlier.round_number, earlier.tensors()
        while t < rounds:
            for i in arranged(range(n), order):
                if (answer := work(t, i, sent, plain_task(t, lr))) is not None:
                    reported[users[i]] = 5 if isinstance(answer, Raw) else answer.steps
                    context = UserContext(5, 0, users[i])
                    method.postprocess_one_user(stats=self.message(answer, sent), user_context=context)
            method.postprocess_server(stats=None, central_context=None, aggregate_metrics=None)
            if method.server is not None:
                t, sent = method.server.round_number, method.server.layout.unflatten(to_host(method.server.x).copy())
        return method.server, method.reports, method.server.layout.unflatten(to_host(method.server.x))

    def form(self, update, sent):
        deltas = {}
        for name, y in update.value.items():
            x = sent.get(name)
            delta = (y - x).astype(y.dtype) if x is not None and x.shape == y.shape else y.copy()
            if update.examples != 1:  # pfl passes weighted sums
                delta = delta * np.array(update.examples).astype(delta.dtype)
            deltas[name] = torch.from_numpy(delta)
        return {"_data": deltas, "_weight": update.examples}

    def built(self, form):
        if type(form) is not dict:
            return form
        made = MappedVectorStatistics({})
        made.__dict__.clear()
        made.__dict__.update({str(key): value for key, value in form.items()})
        return made
