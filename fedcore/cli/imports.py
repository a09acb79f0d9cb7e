"""The modules that ``--import`` names, which add to the registries before a configuration is read."""

from pathlib import Path

from fedcore.errors import UnknownNameError
from fedcore.registries import ADDED, load_module, look_in


def load_all(imports: list[str]) -> None:
    """Import them. Modules of the working folder are found, as ``python -m`` finds them.

    Raises:
        UnknownNameError: one cannot be imported.
    """
    look_in(Path())
    for module in imports:
        if module.endswith("/") and not Path(module).is_dir():
            raise UnknownNameError(f"--import: expected a folder before the /, got {module!r}: there is none")
        load_module(module, f"--import: expected a module that can be imported, got {module!r}")


def flags(imports: list[str]) -> list[str]:
    """The words of a command line that import these, and find modules where this process finds them."""
    folders = [f"{folder}/" for folder in ADDED if folder != str(Path().resolve())]
    return [
        word
        for module in (*(one for one in imports if not one.endswith("/")), *folders)
        for word in ("--import", module)
    ]
