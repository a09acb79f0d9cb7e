"""What a user's subclass of fedcore's handler does to its server, and what is refused."""

import numpy as np
import pytest

pytest.importorskip("fedlab")

import torch

from fedcore import Server, errors
from tests.adapters.extensions.fedlab import (
    LR,
    ChangedModel,
    Filtered,
    FilteredBuffer,
    GlobalUpdate,
    Load,
    OwnLoad,
    Plain,
    ReadsBuffer,
    Sampling,
    handler,
    run,
)

OVERRIDES = [ChangedModel, Filtered, FilteredBuffer, GlobalUpdate, Load, OwnLoad, ReadsBuffer, Sampling]


class Noted:
    """Notes whom each upload is from, which the handler is not told, and what it was trained from."""

    def train(self, model_parameters, train_loader):
        self.noted = [*getattr(self, "noted", []), (int(train_loader[0][1][0]), model_parameters.clone())]
        return super().train(model_parameters, train_loader)


@pytest.mark.parametrize("body", OVERRIDES, ids=lambda body: body.__name__)
def test_rows_are_those_of_the_clients_that_trained_and_of_the_model_that_they_got(body):
    """Each upload has its client's number; for a method with rows, whatever the override does."""

    class Claims(Server.__class__ if False else object):
        pass

    made = handler("ours", body, "MIFA")
    run("ours", made=made)
    assert [len(report.rejected) for report in made.reports] == [0] * 4
