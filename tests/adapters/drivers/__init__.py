"""A driver per framework: fedcore's adapter in a federation of functions, for the tests of ``test_contract.py``.

``work(t, i, sent, task)`` is client i in round t: it gets the model by name and its instructions, and returns an
``Update`` with values by name, a ``Raw`` form of a message, or None for no answer. A driver sends the answer in the
framework's own messages.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedcore.algorithms import named
from fedcore.algorithms.local_rules import Sgd

QUIET = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # APPFL's logger leaves its file open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""The marks of tests that run the frameworks' code."""
LR = 0.1
MODEL = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
CLAIMS = frozenset({"steps", "examples", "rate", "buffers", "names"})


@dataclass(frozen=True)
class Place:
    """A driver without its framework, which may be missing.

    Attributes:
        package, module, kind: the framework's package, and the driver's module and class.
        carries: the parts of an update that the framework's messages carry.
        is_plain: whether clients get only the model, so that methods must have plain steps.
    """

    package: str
    module: str
    kind: str
    carries: frozenset[str] = CLAIMS
    is_plain: bool = True

    def driver(self):
        driver = getattr(import_module(f"tests.adapters.drivers.{self.module}"), self.kind)()
        driver.carries, driver.is_plain = self.carries, self.is_plain
        return driver


PLACES = {
    "fedlab": Place("fedlab", "fedlab", "FedLab", CLAIMS - {"rate", "buffers", "names"}),
    "pfl": Place("pfl", "pfl", "Pfl", CLAIMS - {"rate", "buffers"}),
    "nvflare": Place("nvflare", "nvflare", "Workflow", is_plain=False),
    "nvflare, aggregator": Place("nvflare", "nvflare", "OwnWorkflow"),
    "flower": Place("flwr", "flower", "Flower", is_plain=False),
    "appfl": Place("appfl", "appfl", "Appfl", CLAIMS - {"rate"}),
}


@dataclass
class Raw:
    """A form of a message, which may be malformed."""

    form: Any


class Driver(ABC):
    """A framework."""

    kind = "model"  # the kind of a client's value
    has_late_replies = False
    registers_all = False  # whether clients are registered at the start, and not with their first accepted reply

    def ids(self, n):
        return [f"client-{i}" for i in range(n)]

    @abstractmethod
    def run(self, algorithm, work, *, n=3, rounds=3, x0=MODEL, order=None, lr=LR, **options):
        """Run rounds up to ``rounds`` of the whole run; return the server, the reports, and the framework's model.

        Args:
            order: a random generator of the order in which answers arrive. Default: that of the clients.
            options: as in a configuration; ``client_sizes`` by index.
        """

    @abstractmethod
    def form(self, update, sent):
        """The message of an update as dictionaries and lists, of which ``malformed`` can change parts."""

    def message(self, answer, sent):
        """The framework's message of an answer."""
        return self.built(answer.form if isinstance(answer, Raw) else self.form(answer, sent))

    def built(self, form):
        return form


def arranged(items, order):
    items = list(items)
    return items if order is None else [items[k] for k in order.permutation(len(items))]


def method(algorithm):
    return named(algorithm) if isinstance(algorithm, str) else algorithm


def sizes_by_id(options, ids):
    """``options`` with ``client_sizes`` by id."""
    if options.get("client_sizes") is not None:
        options["client_sizes"] = dict(zip(ids, options["client_sizes"], strict=True))
    return options


def plain_task(t, lr=LR):
    """The instructions of clients of plain steps, which no message carries."""
    return SimpleNamespace(round=t, lr=lr, a=1.0, b=0.0, mu=0.0, second=False, local_rule=Sgd(), offset=None)


def named_views(vector, x0):
    """A flat vector of the parameters by the names of x0."""
    ends = np.cumsum([np.size(x) for x in x0.values()])
    return {name: v.reshape(np.shape(x0[name])) for name, v in zip(x0, np.split(vector, ends[:-1]), strict=True)}
