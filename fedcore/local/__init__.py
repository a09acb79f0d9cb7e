"""One client's work in torch: the models, their minibatches, and the rules of local training."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedcore.local.flat import FlatModel
from fedcore.local.minibatches import minibatches
from fedcore.local.nets import build
from fedcore.local.sgd import sgd

__all__ = ["RULES", "FlatModel", "Rule", "build", "minibatches", "sgd"]


class Rule(Protocol):
    """Turns x_t, which the model holds, into y in place, and returns the number of steps done."""

    def __call__(
        self,
        model: FlatModel,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        batches: Iterable[npt.NDArray[np.int64]],
        *,
        lr: float,
    ) -> int:
        """See ``sgd`` for the arguments."""
        ...


RULES: dict[str, Rule] = {"sgd": sgd}
"""The rules by the names that algorithms give in ``local_rule``."""
