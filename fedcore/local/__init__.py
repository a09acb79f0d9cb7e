"""One client's work in torch: the models, their minibatches, and the local steps."""

from fedcore.local.descent import Options
from fedcore.local.flat import FlatModel
from fedcore.local.minibatches import RULES, Table, by_rule, minibatch_table, minibatches
from fedcore.local.nets import build
from fedcore.local.seeded import seeded
from fedcore.local.sgd import Work, sgd

__all__ = [
    "RULES",
    "FlatModel",
    "Options",
    "Table",
    "Work",
    "build",
    "by_rule",
    "minibatch_table",
    "minibatches",
    "seeded",
    "sgd",
]
