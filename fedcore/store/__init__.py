"""State that belongs to clients: one row each, and the vectors that go with the rows."""

from fedcore.store.checksum import checksums
from fedcore.store.client_store import ClientStore
from fedcore.store.session import Durability

__all__ = ["ClientStore", "Durability", "checksums"]
