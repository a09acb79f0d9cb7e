"""Secure aggregation: sums of the clients' updates whose terms the server cannot read. Needs cryptography."""

from fedcore.secure.client import SecureClient
from fedcore.secure.encoding import Encoding
from fedcore.secure.primitives import identity_of
from fedcore.secure.server import SecureServer

__all__ = ["Encoding", "SecureClient", "SecureServer", "identity_of"]
