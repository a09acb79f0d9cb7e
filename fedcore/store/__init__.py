"""Stores of client rows and server vectors."""

from fedcore.store.client_store import ClientStore
from fedcore.store.commits import Durability
from fedcore.store.files.folder import Carried, carried, put, remove
from fedcore.store.slots import checksums

__all__ = ["Carried", "ClientStore", "Durability", "carried", "checksums", "put", "remove"]
