"""fedcore in pfl-research: ``Method`` aggregates a cohort's updates, ``ClientStoreUserState`` stores users' states."""

import logging
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from pfl.aggregate.base import SumAggregator
from pfl.context import CentralContext, UserContext
from pfl.data.user_state import AbstractUserStateStorage
from pfl.exception import UserNotFoundError
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics
from pfl.postprocessor.base import Postprocessor
from pfl.stats import MappedVectorStatistics

from fedcore import kernels
from fedcore.adapters.session import add_reply, open_server, rejection_line, server_options, with_plain_steps
from fedcore.algorithms import Algorithm
from fedcore.arrays import dtype_name, read_leaf, to_host
from fedcore.errors import ArrayError, CheckpointError, DtypeError, RoundError
from fedcore.kernels import Codes, quantise
from fedcore.model import Layout
from fedcore.server import Report, Round, Server, Update
from fedcore.server.folder import checkpoint_errors
from fedcore.store import ClientStore, Durability
from fedcore.store.files.folder import remove
from fedcore.store.slots import Codec
from fedcore.validation import absolute, as_integer, rejection_reason

__all__ = ["ClientStoreUserState", "Method"]

LOGGER = logging.getLogger("fedcore.adapters.pfl")
NOTHING = MappedVectorStatistics({}, weight=1.0)


class Method(Postprocessor, SumAggregator):
    """FedAvg, MIFA, MimiC, FlexibleFedAvg or LocalDescent for pfl's FederatedAveraging, in one process.

    Pass it as postprocessor, which gets each update with its user's id, and as aggregator:
    ``SimulatedBackend(train, val, postprocessors=[method], aggregator=method)``. An unreadable or infinite update is
    rejected, and ``reports`` lists the user and the reason. The first tensors that two users have in common define the
    model; earlier updates wait in a buffer. pfl's central optimizer gets x' - x, so SGD with rate 1 takes the method's
    step.

    Args:
        algorithm: one of ``fedcore.algorithms`` whose clients take plain steps, or its name.
        users: the ids of the whole population. A cohort must not contain a user twice; pfl's sampler "minimize_reuse"
            draws without replacement.
        lr: the rate of the local steps, the same for all steps of a round.
        steps: K, the number of local steps of every user, or a function of pfl's UserContext.
        options: ``client_sizes`` (n_k by id), and further arguments of ``fedcore.Server``, such as ``storage`` and
            ``limits``, except ``policy``: pfl waits for all clients.

    Attributes:
        server: the ``fedcore.Server``; None until two users agree on the tensors, or a round ends. Its x starts at zero
            and is the sum of the steps.
        reports: the ``Report`` of each central iteration.
    """

    def __init__(
        self,
        algorithm: Algorithm | str,
        users: Iterable[str],
        *,
        lr: float,
        steps: int | Callable[[UserContext], int],
        **options: Any,
    ) -> None:
        self._algorithm, self._users = with_plain_steps(algorithm, lr), list(users)
        self._options = server_options({**options, "lr": lr}, "pfl")
        self._steps = steps
        self.server: Server | None = None
        self.reports: list[Report] = []
        self._round: Round | None = None
        self._early: list[Update] = []  # copies, until two users agree on the model's tensors
        self._unreadable: list[tuple[str, str]] = []

    def postprocess_one_user(self, *, stats: Any, user_context: UserContext) -> tuple[Any, Metrics]:
        """Add the user's update to the round, or reject it."""
        steps = self._steps(user_context) if callable(self._steps) else self._steps
        user = user_context.user_id
        try:  # pfl's strategies set the weight to 1 or to the number of datapoints
            keep = bool(stats.weight != 1)  # the quotient is new memory, but pfl may reuse its own tensors' memory
            examples = as_integer(stats.weight)
            update = Update(user, _mean(stats), steps=steps, examples=examples, kind="delta", keep=keep)
            shapes = _shapes(update)
            if self.server is None:
                update = deepcopy(update)._replace(keep=True)
        except Exception as error:
            self._unreadable.append((user, rejection_reason(error)))
            return NOTHING, Metrics()
        if self.server is not None:
            return stats if self._add(self.server, update) else NOTHING, Metrics()
        agree = any(shapes == _shapes(other) for other in self._early)
        self._early.append(update)
        if agree:
            self._start(shapes)
        return NOTHING, Metrics()

    def _start(self, shapes: dict[str, tuple[int, ...]]) -> None:
        x0 = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.server = open_server(x0, self._algorithm, self._users, **self._options)
        early, self._early = self._early, []
        for update in early:
            self._add(self.server, update)

    def _add(self, server: Server, update: Update) -> bool:
        if self._round is None:
            self._round = server.open_round()
        return add_reply(self._round, update.client, lambda: update)

    def accumulate(self, *, accumulated: Any, user_stats: Any) -> Any:
        """Return the first user's statistics with parameters, since the server holds the sum."""
        return accumulated if accumulated is not None and accumulated.num_parameters else user_stats

    def postprocess_server(
        self, *, stats: Any, central_context: CentralContext, aggregate_metrics: Metrics
    ) -> tuple[Any, Metrics]:
        """Finish the round, and return x' - x.

        Raises:
            RoundError: no update arrived, because the method is not a postprocessor of the backend.
        """
        rejected, self._unreadable = self._unreadable, []
        if len(self._early) == 1:
            self._start(_shapes(self._early[0]))
        rejected += [(str(update.client), "statistics: no two users have the same tensors") for update in self._early]
        self._early = []
        if self._round is None and not rejected:
            raise RoundError("postprocess_server: no update arrived; pass the method to the backend as a postprocessor")
        if self.server is None:  # the tensors of the model are not known yet
            self._record(Report(0, rejected=tuple(rejected)))
            return NOTHING, Metrics()
        opened, self._round = self.server.open_round() if self._round is None else self._round, None
        for user, reason in rejected:
            opened.reject(user, reason)
        before = to_host(self.server.x)
        self._record(opened.finish())
        step = self.server.layout.unflatten(kernels.combine([to_host(self.server.x), before], [1.0, -1.0]))
        return _statistics(step, 1.0), Metrics()

    def _record(self, report: Report) -> None:
        self.reports.append(report)
        if line := rejection_line(report):
            LOGGER.warning(line)


def _mean(stats: Any) -> dict[str, Any]:
    delta = {str(name): read_leaf(str(name), tensor) for name, tensor in stats.items()}
    if not delta:
        raise ArrayError("statistics: has no tensors")
    return delta if stats.weight == 1 else {name: tensor / stats.weight for name, tensor in delta.items()}


def _shapes(update: Update) -> dict[str, tuple[int, ...]]:
    return {name: tuple(int(size) for size in tensor.shape) for name, tensor in update.value.items()}


def _statistics(views: dict[str, Any], weight: float) -> MappedVectorStatistics:
    to_tensor = get_default_framework_module().to_tensor
    return MappedVectorStatistics({name: to_tensor(view) for name, view in views.items()}, weight=weight)


# Users' states as rows of a ``ClientStore``.


BLOCK = 64
"""The number of elements that share a scale under "int8". The weight is in a separate block with its own scale."""


STATES = "states of pfl's users"
_KEY = re.compile(r"key(-[\w.~%-]*)?", re.ASCII)  # the names that _folder makes
_UNFINISHED = re.compile(r"\.(draft|previous)-[0-9a-f]{12}$")  # a store whose creation was interrupted


class ClientStoreUserState(AbstractUserStateStorage):
    """Storage of pfl's user states: one client store per key, and one row per user with float32 tensors and a weight.

    Args:
        path: the folder of the states, which may be larger than memory. Default: states are in memory.
        codec, durability: as for ``ClientStore``. With "checkpoint" a loss of power goes back to the last
            ``checkpoint``, so call it at each checkpoint of the run. With "round" every ``save_state`` waits for the
            disk.
    """

    def __init__(
        self, path: str | Path | None = None, *, codec: Codec = "f32", durability: Durability = "checkpoint"
    ) -> None:
        self._path = None if path is None else absolute(path)
        self._codec, self._durability = codec, durability
        self._tables: dict[str, tuple[ClientStore, Layout]] = {}
        try:
            for folder in sorted(self._path.iterdir()) if self._path is not None and self._path.is_dir() else []:
                is_states = _KEY.fullmatch(folder.name) and not _UNFINISHED.search(folder.name)
                if is_states and folder.is_dir() and not folder.is_symlink():
                    self._tables[folder.name] = self._reopened(folder)
        except BaseException:
            self.close()
            raise

    def save_state(self, state: Any, user_id: str, key: str | None = None) -> None:
        """Store a copy of the state, whose tensors must be float32 and like those of the key's first state."""
        tensors = dict(state.items())
        store, layout = self._table(key, tensors)
        if user_id not in store.registry:
            store.add(user_id)
        try:
            row = store.stage(user_id)
            whole = np.empty(store.n, np.float32) if isinstance(row, Codes) else row
            for piece in layout.slices:  # a state keeps its dtypes
                if piece.name in tensors and (dtype := dtype_name(tensors[piece.name])) != piece.dtype:
                    raise DtypeError(f"{piece.name}: dtype {dtype}; must be {piece.dtype}, as in the first state")
            layout.flatten(tensors, out=whole[: layout.n])
            whole[layout.n :], whole[-1] = 0, getattr(state, "weight", 1.0)
            if isinstance(row, Codes):
                quantise(whole, row.codec, out=row)
            store.commit((store.round or 0) + 1)
        finally:
            store.discard()

    def load_state(self, user_id: str, key: str | None = None) -> Any:
        """Return a copy of the user's state, as MappedVectorStatistics of the framework's tensors.

        Raises:
            UserNotFoundError: the user has no saved state.
        """
        store, layout = self._tables.get(_folder(key), (None, None))
        if store is None or layout is None or user_id not in store.registry or store.row(user_id) is None:
            raise UserNotFoundError(user_id)
        row = store.read(user_id)
        return _statistics(layout.unflatten(row[: layout.n]), float(row[-1]))

    def clear_states(self) -> None:
        """Remove all states from memory and disk. Other files in the folder stay."""
        self.close()
        if self._path is not None:
            for folder in self._tables:
                remove(self._path / folder)
        self._tables.clear()

    def checkpoint(self) -> None:
        """Make all saved states durable, if ``durability`` is "checkpoint"."""
        for store, _ in self._tables.values():
            store.checkpoint()

    def close(self) -> None:
        """Make all saved states durable, and close the files."""
        for store, _ in self._tables.values():
            store.close()

    def _table(self, key: str | None, tensors: dict[str, Any]) -> tuple[ClientStore, Layout]:
        """Return the store of a key; create it for tensors like these if the key is new."""
        folder = _folder(key)
        if folder not in self._tables:
            layout = Layout.of(tensors, buffers=())
            for piece in (*layout.outside, *layout.narrow):
                raise DtypeError(f"{piece.name}: dtype {piece.dtype}; must be float32")
            n = -(-layout.n // BLOCK) * BLOCK + 1
            place: dict[str, Any] = {}
            if self._path is not None:
                place = {"medium": "mmap", "path": self._path / folder, "durability": self._durability}
            store = ClientStore([], n, codec=self._codec, **place)
            store.commit(0, state={"what": STATES, "layout": layout.to_state()})
            self._tables[folder] = store, layout
        return self._tables[folder]

    def _reopened(self, folder: Path) -> tuple[ClientStore, Layout]:
        store = ClientStore.open(folder, durability=self._durability)
        try:
            if not isinstance(store.state, dict) or store.state.get("what") != STATES:
                raise CheckpointError(f"{folder}: this store has no states of pfl's users; move it to another folder")
            if store.codec != self._codec:
                raise CheckpointError(f"codec={self._codec!r}: {folder} has codec {store.codec!r}; pass this codec")
            with checkpoint_errors(folder):
                return store, Layout.from_state(store.state["layout"])
        except BaseException:
            store.close()
            raise


def _folder(key: str | None) -> str:
    return "key" if key is None else f"key-{quote(key, safe='')}"
