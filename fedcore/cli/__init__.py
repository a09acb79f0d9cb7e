"""The command line ``fedcore``."""

from fedcore.cli.app import main

__all__ = ["main"]
