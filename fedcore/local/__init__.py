"""One client's work in torch: the models, their minibatches, and the local steps."""

from fedcore.local.flat import FlatModel
from fedcore.local.minibatches import minibatches
from fedcore.local.nets import build
from fedcore.local.seeded import seeded
from fedcore.local.sgd import Options, Work, sgd

__all__ = ["RULES", "FlatModel", "Options", "Work", "build", "minibatches", "seeded", "sgd"]

RULES = ("sgd", "full gradient")
"""The local rules that algorithms name in ``local_rule``: steps along minibatches, or along the whole of the data."""
