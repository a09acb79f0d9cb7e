"""The view of a cluster's server: what can be read of it, gathered from the shards where it is asked for."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedcore.clients import ClientId, Registry
from fedcore.cluster.coordinator import Coordinator
from fedcore.cluster.manifest import Manifest
from fedcore.cluster.ranges import Range
from fedcore.cluster.shard import joined
from fedcore.errors import FedcoreError
from fedcore.libraries import Library
from fedcore.server.view import SettingsView
from fedcore.store.rows_view import Clients
from fedcore.typing import F32


class ClusterView(SettingsView):
    """The reading half of ``Server``."""

    _instead = "write it by save(path), and read it by Server.load(path)"

    _manifest: Manifest
    _home: Path | None
    _coordinator: Coordinator
    _read: Registry | None = None
    _read_at: int = 0  # the coordinator's ``openings`` then

    def _facts(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "round_number": self.round_number,
            "n": self.layout.n,
            "clients": len(self._registry),
            "shards": len(self.ranges),
            "lr": self._settings.lr,
            "server_lr": self._settings.server_lr,
            "optimizer": self._settings.optimizer,
            "store": "ram" if self._home is None else str(self._home),
        }

    def _in_files(self) -> bool:
        return True

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The elements of each shard."""
        return self._manifest.ranges

    @property
    def clients(self) -> Clients:
        """The registered clients."""
        return Clients(self._registry)

    @property
    def client_sizes(self) -> npt.NDArray[np.int64] | None:
        """n_k of the registered clients, int64[N], the smallest first; None where the server was told none."""
        sizes: npt.NDArray[np.int64] | None = self._first("client_sizes")
        return sizes

    @property
    def round_number(self) -> int:
        """The number of finished rounds, which is the number of the next."""
        return self._coordinator.known.round_number

    @property
    def transactions(self) -> int:
        """The number of its transactions, which every shard has: see ``fedcore.Server.transactions``."""
        return self._coordinator.known.transactions

    @property
    def x(self) -> F32:
        """The model, float32[n], read-only: gathered from the shards at every reading."""
        x: F32 = self._whole("vector", "x")
        return x

    @property
    def v(self) -> F32:
        """The direction of the last round that had one, float32[n_parameters]: see ``fedcore.Server.v``."""
        v: F32 = self._whole("vector", "v")
        return v

    def row(self, client: ClientId) -> F32:
        """A client's row, float32[n_parameters], as it is read; zeros where it was never written.

        Raises:
            UnknownClientError: it is not registered.
        """
        row: F32 = self._whole("row", self._registry.check(client))
        return row

    def correction(self, client: ClientId) -> npt.NDArray[np.float64]:
        """c_i, float64[n_parameters]: what MimiC adds to the client's next mean gradient; zero elsewhere."""
        client = self._registry.check(client)
        if not self.algorithm.keeps_history:
            return np.zeros(self.layout.n_parameters)
        whole: npt.NDArray[np.float64] = self._whole("correction", client)
        return whole

    def total(self) -> npt.NDArray[np.float64] | None:
        """T, float64[n_parameters]; None where the method keeps none."""
        if not self.algorithm.keeps_total:
            return None
        whole: npt.NDArray[np.float64] = self._whole("total")
        return whole

    def tensors(self, *, library: Library | None = None, sent: bool = False) -> Any:
        """The model by name, as it came: see ``fedcore.Server.tensors``."""
        x = self._whole("vector", "sent" if sent else "x")
        return self.layout.tensors(x, self._first("counters"), library)

    def load_into(self, model: Any) -> None:
        """Copy x into a model's parameters and float buffers, and the counters: see ``fedcore.Server.load_into``."""
        self.layout.load_into(model, self.x, self._first("counters"))

    def slices(self, what: Literal["sent", "x_prev", "x"] = "sent") -> list[Any]:
        """The model that clients start from, as each shard has it: for workers, without a way through here.

        Args:
            what: "sent", as clients are sent it; "x_prev", where the method's ``b`` is not 0; or "x".

        Returns:
            for each of ``ranges`` an array, float32, read-only; on Ray a reference to one.
        """
        return self._coordinator.fetch("vector", what)

    def verify(self) -> list[str]:
        """Read everything, and say what is not as it was written: see ``ClientStore.verify``."""
        found = self._coordinator.call("verify")
        return [f"shard {k}: {line}" for k, lines in enumerate(found) for line in lines]

    def _first(self, name: str, *arguments: Any) -> Any:
        return self._coordinator.call(name, *arguments)[0]

    def _whole(self, name: str, *arguments: Any) -> Any:
        return joined(self._coordinator.call(name, *arguments))

    @property
    def _registry(self) -> Registry:
        """The registered clients, as far as is known; else they are read."""
        if self._read is None:
            self._read_registry()
        assert self._read is not None
        return self._read

    def _read_registry(self) -> None:
        """Read from a shard which clients are registered; raises where a shard is lost."""
        read = Registry.restore(*self._first("registry"))
        self._read, self._read_at = read, self._coordinator.openings

    def _learn_clients(self, clients: Iterable[ClientId]) -> None:
        """Learn the numbers of clients that a change may have added or removed, in time that depends on them alone.

        The change has happened: if a shard is lost meanwhile, this is no error, and all clients are read when needed.
        """
        known, self._read = self._read, None
        if known is None or self._read_at != self._coordinator.openings:
            return
        with suppress(FedcoreError):
            listed = list(clients)
            numbers: list[int | None] = self._first("numbers", listed)
            freed = {known.number(client): None for client in listed if client in known}
            known.reassign(freed | {n: client for n, client in zip(numbers, listed, strict=True) if n is not None})
            self._read = known
