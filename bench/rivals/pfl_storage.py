"""pfl-research's storages of user state, used as its SCAFFOLD does: load a user's state, compute, save the new one."""

import numpy as np
import torch
from pfl.data.user_state import DiskUserStateStorage, InMemoryUserStateStorage
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module


def stored(folder, users, n):
    """A storage with a state of n elements for each user: on the disk in ``folder``, or (None) in a dict."""
    set_framework_module(pytorch_ops)
    storage = InMemoryUserStateStorage() if folder is None else DiskUserStateStorage(str(folder))
    rng = np.random.default_rng(0)
    for user in range(users):
        storage.save_state({"c": torch.from_numpy(rng.standard_normal(n, dtype=np.float32))}, str(user))
    return storage


def exchange(storage, users, sent, total):
    """total += new - old for each user, and the new state saved.

    The state is copied, as it must be: pfl hands over buffers that the next user overwrites, and its dict keeps them.
    """
    for user, new in zip(users, sent, strict=True):
        old = storage.load_state(str(user))["c"]
        total.add_(new).sub_(old)
        storage.save_state({"c": new.clone()}, str(user))
