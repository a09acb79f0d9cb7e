"""The model alone of a folder that a server wrote: read beside its writer, without the clients' rows."""

import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore.layout import Layout
from fedcore.libraries import Library
from fedcore.memory import copied
from fedcore.server.folder_checks import believed, server_state
from fedcore.store import ClientStore
from fedcore.typing import F32


class SavedModel(NamedTuple):
    """A server's model as its last committed round left it.

    Attributes:
        layout: the places of its tensors in x.
        x: float32[n].
        counters: the tensors outside x, by name.
        round_number: how many rounds had been finished.
    """

    layout: Layout
    x: F32
    counters: dict[str, npt.NDArray[Any]]
    round_number: int

    def tensors(self, library: Library | None = None) -> Any:
        """The model by name, in its own dtypes: see ``Server.tensors``."""
        return self.layout.tensors(self.x, self.counters, library)


def read_model(path: str | os.PathLike[str]) -> SavedModel:
    """The model of a server's folder, also while a server writes to it; what its method is does not matter.

    Args:
        path: what ``Server.save`` wrote, or the folder of an mmap store.

    Raises:
        StoreError: there is no store, or one of a newer version.
        CorruptionError: a file was damaged.
        CheckpointError: it is a store without a server, or says what no server has said.

    Cost: reads the index and the vectors of x and the counters; no client's row.

    >>> from tempfile import TemporaryDirectory
    >>> from fedcore import Server
    >>> with TemporaryDirectory() as folder:
    ...     Server("FedAvg", {"w": np.float32([1, 2])}, 3, lr=0.1).save(f"{folder}/state")
    ...     read_model(f"{folder}/state").tensors()
    {'w': array([1., 2.], dtype=float32)}
    """
    with ClientStore.open(path, readonly=True) as store, believed(path):
        state = server_state(path, store.state)
        layout = Layout.from_state(state["settings"]["layout"])
        x = store.vector("x")
        if x is None or x.dtype != np.float32 or x.shape != (layout.n,):
            raise ValueError(f"x: expected float32[{layout.n}], got {'none' if x is None else f'{x.dtype}{x.shape}'}")
        counters = {}
        for piece in layout.outside:
            counter = store.vector(f"counter/{piece.name}")
            if counter is None or counter.size != int(np.prod(piece.shape)):
                raise ValueError(f"counter {piece.name}: expected {piece.shape}, got {counter!r:.100}")
            counters[piece.name] = copied(counter).reshape(piece.shape)
        return SavedModel(layout, copied(x), counters, int(state["numbers"]["round_number"]))
