"""The modules that ``--import`` names, which add to the registries before a configuration is read."""

from fedcore.registries import load_module


def load_all(imports: list[str]) -> None:
    """Import them.

    Raises:
        UnknownNameError: one cannot be imported.
    """
    for module in imports:
        load_module(module, f"--import: expected a module that can be imported, got {module!r}")


def flags(imports: list[str]) -> list[str]:
    """The words of a command line that import these."""
    return [word for module in imports for word in ("--import", module)]
