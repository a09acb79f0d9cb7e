"""fedcore inside other frameworks: one framework, one module, and each needs its framework installed."""
