"""Bounds of the papers' theorems, as functions of their constants."""
