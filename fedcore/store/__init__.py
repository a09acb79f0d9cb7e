"""Stores of client rows and server vectors."""

from fedcore.store.client_store import ClientStore
from fedcore.store.commits import Durability
from fedcore.store.slots import checksums

__all__ = ["ClientStore", "Durability", "checksums"]
