"""The clients: their ids, and the registry that numbers them."""

from fedcore.clients import reference
from fedcore.clients.registry import ClientId, Registry
from fedcore.native import add_twins

add_twins(reference)

__all__ = ["ClientId", "Registry"]
