"""The statuses with which a command ends; 0 is well."""

FAILED = 1
"""A trial failed, a store is damaged: what it is was said."""
MISTAKE = 2
"""The caller's: one line says which."""
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
