"""The view of a server that can be read at any time; nothing here changes it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Algorithm
from fedcore.clients import ClientId
from fedcore.layout import Layout
from fedcore.libraries import Library
from fedcore.memory import copied, view_of, zeros
from fedcore.pickling import Unpicklable
from fedcore.representation import Represented
from fedcore.server.round_lock import RoundLock
from fedcore.server.settings import Settings
from fedcore.server.state import State
from fedcore.store.rows_view import Clients, ReadRows
from fedcore.typing import F32


class SettingsView(Represented, Unpicklable):
    """The view of what a server was made with."""

    _settings: Settings

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm."""
        return self._settings.algorithm

    @property
    def layout(self) -> Layout:
        """The places of the model's tensors in x."""
        return self._settings.layout

    @property
    def averages_models(self) -> bool:
        """Tell whether the step is the plain average of the clients' models."""
        return self._settings.averages_models


class ServerView(SettingsView):
    """The reading half of ``Server``."""

    _instead = "write it by save(path), and read it by Server.load(path); clients are sent broadcast.of(client)"

    _state: State
    _round_lock: RoundLock

    @property
    def device(self) -> str:
        """The device where the model and the sums lie: "cpu", or "cuda:0", say."""
        return self._settings.device

    @property
    def clients(self) -> Clients:
        """The registered clients: ``client in``, ``len``, and their ids in the order of their numbers."""
        return self.store.registry

    @property
    def store(self) -> ReadRows:
        """The clients' rows, to be read: rounds, arrivals and departures change them, and nothing else."""
        if self._round_lock.opened is None:
            self._state.newcomers.forget()  # of a round that was dropped
        return ReadRows(self._state.store)

    @property
    def client_sizes(self) -> npt.NDArray[np.int64] | None:
        """n_k of the registered clients, int64[N], the smallest first; None where the server was told none."""
        self._state.store.require_files()
        return self._state.snapshot.population.listed()

    @property
    def x(self) -> F32:
        """The model, float32[n]: a read-only view, never changed later (a round makes a new one).

        On a device it is a ``DeviceArray``, of which torch and CuPy make tensors by DLPack without a copy.
        """
        self._state.store.require_files()
        x: F32 = view_of(self._state.snapshot.x)
        return x

    @property
    def v(self) -> F32:
        """The direction of the last round that had one, float32[n_parameters]: a copy. What g is in the papers.

        Zero before the first, and after ``load`` until the next where the method has no use for it.
        """
        self._state.store.require_files()
        return copied(self._state.snapshot.momentum)

    @property
    def round_number(self) -> int:
        """The number of finished rounds, which is the number of the next."""
        return self._state.snapshot.round_number

    @property
    def transactions(self) -> int:
        """The number of its transactions: rounds finished, arrivals, departures, resizings, changes of options, and a
        warm start.

        Servers that hold parts of one model compare it; see ``fedcore.server.transactions``.
        """
        return self._state.snapshot.transactions

    def _facts(self) -> dict[str, Any]:
        settings, store = self._settings, self._state.store
        return {
            "algorithm": self.algorithm,
            "round_number": self.round_number,
            "n": self.layout.n,
            "clients": len(store.registry),
            "rows": len(store),
            "lr": settings.lr,
            "server_lr": settings.server_lr,
            "optimizer": settings.optimizer,
            "store": store.medium if store.path is None else f"mmap:{store.path}",
            "device": None if self.device == "cpu" else self.device,
        }

    def _in_files(self) -> bool:
        return self._state.store.medium == "mmap"

    def tensors(self, *, library: Library | None = None, copy: bool = True, sent: bool = False) -> Any:
        """The model by name, as it came: in its library and its dtypes, counters in their own integer types.

        Args:
            library: "numpy" or "torch"; None for that of ``x0``. NumPy's have float32 for bfloat16, unless ml_dtypes is
                imported.
            copy: False gives NumPy's parameters and buffers in float32 as read-only views of ``x``, or of a copy of it
                in host memory where the server is on a device.
            sent: the model that clients start from, which is ahead of ``x`` in methods that look ahead.

        Raises:
            UnknownNameError, MissingDependencyError: there is no such library, or it is not installed.
        """
        self._state.store.require_files()
        now = self._state.snapshot
        return self.layout.tensors(view_of(now.sent if sent else now.x), now.counters, library, copy=copy)

    def load_into(self, model: Any) -> None:
        """Copy x into a model's parameters and float buffers, and the counters into its own, in place.

        Args:
            model: an ``nn.Module``, on any device, or a mapping or sequence of tensors, with the names and shapes of
                ``x0``. Its floats may be of other dtypes.

        Raises:
            ArrayError, ShapeError, DtypeError: it is not such a model, and is as it was; or a tensor is read-only.
        """
        self.layout.load_into(model, self.x, self._state.snapshot.counters)

    def correction(self, client: ClientId) -> npt.NDArray[np.float64]:
        """c_i, float64[n_parameters]: what MimiC adds to the client's next mean gradient; zero elsewhere."""
        if not self.algorithm.keeps_history:
            return zeros(self.layout.n_parameters, np.float64, device=self.device)
        return self._state.correction(client)
