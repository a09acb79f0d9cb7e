"""fedcore inside other frameworks: one module, or package, for each, which alone imports it."""
