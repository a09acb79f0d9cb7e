"""fedcore's methods as strategies of Flower's Message API, and code for the ClientApps. Needs flwr >= 1.41."""

from fedcore.adapters import importing

with importing("flower", "flwr >= 1.41"):
    from fedcore.adapters.flower.client import Task, examples_reply
    from fedcore.adapters.flower.grid import StreamingGrid
    from fedcore.adapters.flower.secure import SecureFedAvg, SecureFedNova, SecureStrategy, secure_mod
    from fedcore.adapters.flower.strategy import *  # noqa: F403
    from fedcore.adapters.flower.strategy import __all__ as strategies

__all__ = ["SecureFedAvg", "SecureFedNova", "SecureStrategy", "StreamingGrid", "Task", "examples_reply", "secure_mod"]
__all__ += strategies
