"""pfl-research's storages of user state, used as in its SCAFFOLD: load a user's state, compute, save the new state."""

import numpy as np
import torch
from pfl.data.user_state import DiskUserStateStorage, InMemoryUserStateStorage
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module


def stored(folder, users, n):
    """Return a storage with a state of n elements per user: on disk in ``folder``, or for None in a dict."""
    set_framework_module(pytorch_ops)
    storage = InMemoryUserStateStorage() if folder is None else DiskUserStateStorage(str(folder))
    rng = np.random.default_rng(0)
    for user in range(users):
        storage.save_state({"c": torch.from_numpy(rng.standard_normal(n, dtype=np.float32))}, str(user))
    return storage


def exchange(storage, users, sent, total):
    """Compute total += new - old for each user, and save the new state.

    The state must be copied, since pfl reuses its buffers for the next user and its dict keeps references to them.
    """
    for user, new in zip(users, sent, strict=True):
        old = storage.load_state(str(user))["c"]
        total.add_(new).sub_(old)
        storage.save_state({"c": new.clone()}, str(user))
