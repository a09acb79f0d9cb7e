"""Drivers have no doctests, and some import a framework that may be missing."""

collect_ignore_glob = ["*.py"]
