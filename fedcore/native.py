"""The import of the native module, ``fedcore._core``, whose names ``fedcore/_core.pyi`` lists."""

from contextlib import suppress
from importlib import import_module


def _require_main_interpreter() -> None:
    """Raise ImportError in a sub-interpreter, where loading the native module would block forever."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # from Python 3.13 on, and before; absent in other Pythons
        with suppress(ModuleNotFoundError):
            interpreters = import_module(name)
            if interpreters.get_current() != interpreters.get_main():
                raise ImportError(
                    "fedcore: expected Python's main interpreter, got a sub-interpreter, where its native code "
                    "cannot run: under mod_wsgi set WSGIApplicationGroup %{GLOBAL}"
                )
            return


_require_main_interpreter()
try:
    import fedcore._core as core
except ImportError as error:
    raise ImportError(
        f"fedcore: cannot load its native module ({error}): install the package, in a clone by `pip install -e .`"
    ) from error

__all__ = ["core"]
