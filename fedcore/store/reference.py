"""The specification of what this room has natively, in NumPy."""

from fedcore.kernels.checksum_reference import checksum

__all__ = ["checksum"]
