"""State that belongs to clients: one row each, and the vectors that go with the rows."""

from fedcore.store.client_store import ClientStore
from fedcore.store.commits import Durability
from fedcore.store.slots import checksums

__all__ = ["ClientStore", "Durability", "checksums"]
