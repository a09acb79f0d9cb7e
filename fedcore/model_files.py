"""Models in files that other programs read: safetensors, torch's, NumPy's; each is imported when it is needed."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.arguments import absolute
from fedcore.atomic_file import draft_of
from fedcore.errors import ArrayError, MissingDependencyError, StoreError, UnknownNameError
from fedcore.layout import named_tensors
from fedcore.libraries import Library, library_of

FORMS: dict[str, tuple[Library, ...]] = {
    ".safetensors": ("numpy", "torch"),
    ".pt": ("torch",),
    ".pth": ("torch",),
    ".npz": ("numpy",),
}
"""The endings of files, and the libraries whose tensors each takes."""


def form_of(path: str | os.PathLike[str]) -> str:
    """The form of a file, by its ending.

    Raises:
        UnknownNameError: it is none of ``FORMS``.
    """
    form = Path(path).suffix.lower()
    if form not in FORMS:
        raise UnknownNameError.of("ending of the file", form, FORMS)
    return form


def write_model(tensors: Any, path: str | os.PathLike[str]) -> None:
    """Write a model by name into a file, at once: another that was there stays until this one is whole and durable.

    Args:
        tensors: what ``Server.tensors()`` gives: NumPy's arrays or torch's tensors, which stay as they are; those of
            lists and trees are named "0" and "layers.0.w". Tied ones are written once for each name.
        path: its ending says the form: .safetensors (needs safetensors), .pt or .pth (torch's, a ``state_dict`` that
            ``torch.load(path, weights_only=True)`` reads), .npz (NumPy's).

    Raises:
        UnknownNameError: the ending is none of these.
        ArrayError: the form does not take tensors of that library.
        MissingDependencyError: it needs a package that is not installed.
        StoreError: the file cannot be written.

    Example, of a model every tenth round:

        server = fedcore.Server(..., on_report=lambda report: report.round % 10 or
            write_model(server.tensors(), f"models/round{report.round}.safetensors"))

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_model({"w": np.float32([1, 2])}, f"{folder}/model.npz")
    ...     dict(np.load(f"{folder}/model.npz"))
    {'w': array([1., 2.], dtype=float32)}
    """
    tensors = named_tensors(tensors)
    form, library, place = form_of(path), library_of(tensors.values()), absolute(path)
    if library not in FORMS[form]:
        raise ArrayError(f"tensors: expected {' or '.join(FORMS[form])}'s for {form}, got {library}'s")
    if form == ".safetensors" and find_spec("safetensors") is None:
        raise MissingDependencyError.of(place.name, "safetensors", extra="safetensors", instead="write .npz")
    try:
        with draft_of(place) as draft:
            _write(dict(tensors), form, library, str(draft))
    except OSError as error:
        raise StoreError(f"{place}: the model was not written: {error}") from error


def _write(tensors: dict[str, Any], form: str, library: Library, file: str) -> None:
    if form == ".npz":
        with open(file, "wb") as opened:
            np.savez(opened, allow_pickle=False, **tensors)
    elif form == ".safetensors" and library == "numpy":
        import_module("safetensors.numpy").save_file({name: _plain(leaf) for name, leaf in tensors.items()}, file)
    elif form == ".safetensors":
        separate = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}
        import_module("safetensors.torch").save_file(separate, file)
    else:
        import_module("torch").save({name: leaf.detach() for name, leaf in tensors.items()}, file)


def _plain(leaf: Any) -> Any:
    """An array in a row, as the form wants it."""
    return np.ascontiguousarray(leaf).reshape(leaf.shape)  # of a number too, which the first makes a vector of
