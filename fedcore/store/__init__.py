"""State that belongs to clients: their rows, and what the rows refer to."""

from fedcore.store.checksum import checksums
from fedcore.store.client_store import ClientStore
from fedcore.store.history import History
from fedcore.store.registry import ClientId, Registry
from fedcore.store.session import Durability

__all__ = ["ClientId", "ClientStore", "Durability", "History", "Registry", "checksums"]
