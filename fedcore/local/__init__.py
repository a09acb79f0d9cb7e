"""One client's work in torch: the models and the local steps."""

from fedcore.local.flat import FlatModel
from fedcore.local.local_step import LocalOptions
from fedcore.local.nets import build
from fedcore.local.seeded import seeded
from fedcore.local.sgd import Work, sgd

__all__ = [
    "FlatModel",
    "LocalOptions",
    "Work",
    "build",
    "seeded",
    "sgd",
]
