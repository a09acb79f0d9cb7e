"""The clients: their ids, and the registry that numbers them."""

from fedcore.clients.registry import ClientId, Registry

__all__ = ["ClientId", "Registry"]
