"""Somebody's own package, which knows fedcore's public names alone; the tests put its folder on the path."""
