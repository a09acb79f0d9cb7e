"""fedcore in NVFlare: ``Aggregator`` for its own workflows, ``Controller`` for every method.

A client's script uses ``Trainer``, or ``order`` and ``reply`` around a loop of its own.
"""

from fedcore.adapters.nvflare.aggregator import Aggregator
from fedcore.adapters.nvflare.controller import Controller
from fedcore.adapters.nvflare.training import Trainer
from fedcore.adapters.nvflare.wire import Order, order, reply

__all__ = ["Aggregator", "Controller", "Order", "Trainer", "order", "reply"]
