"""fedcore in NVFlare: ``Aggregator`` for NVFlare's workflows, and ``Controller`` for every method.

A client's script uses ``Trainer``, or ``order`` and ``reply`` around a custom training loop.
"""

from fedcore.adapters import importing

with importing("nvflare", "nvflare >= 2.9"):
    from fedcore.adapters.nvflare.client import Order, Trainer, order, reply
    from fedcore.adapters.nvflare.secure import SecureController, SecureSite
    from fedcore.adapters.nvflare.server import Aggregator, Controller

__all__ = ["Aggregator", "Controller", "Order", "SecureController", "SecureSite", "Trainer", "order", "reply"]
