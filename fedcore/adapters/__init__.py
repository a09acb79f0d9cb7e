"""Adapters of fedcore to other frameworks: one module or package per framework, which imports only that framework."""
