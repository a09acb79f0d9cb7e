"""fedcore in pfl-research: ``Method`` is a cohort's sum, ``ClientStoreUserState`` keeps users' states."""

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
from fedcore.adapters.session import add_reply, open_server, rejection_line, with_plain_steps
from fedcore.algorithms import Algorithm
from fedcore.arguments import absolute, integral, reason_of
from fedcore.arrays import dtype_name, own_class, to_host
from fedcore.errors import ArrayError, CheckpointError, DtypeError, RoundError
from fedcore.kernels import Codes, quantise
from fedcore.model import Layout
from fedcore.options import Storage
from fedcore.server import Report, Round, Server, Update
from fedcore.server.folder import believed
from fedcore.store import ClientStore, Durability
from fedcore.store.files.folder import remove
from fedcore.store.slots import Codec

__all__ = ["ClientStoreUserState", "Method"]

LOGGER = logging.getLogger("fedcore.adapters.pfl")
NOTHING = MappedVectorStatistics({}, weight=1.0)
UNLIKE = "statistics: expected the tensors of another user, got others from each"


class Method(Postprocessor, SumAggregator):
    """FedAvg, MIFA, MimiC, FlexibleFedAvg or LocalDescent under pfl's own FederatedAveraging, in one process.

    It is a postprocessor, which hears of each user by its id, and the aggregator, since its rounds do the summing:
    ``SimulatedBackend(train, val, postprocessors=[method], aggregator=method)``. Each user's update is folded in as it
    comes; one that cannot be read or is not finite is rejected by name, in ``reports``. The model's tensors are those
    that two users agree on first; until then updates wait. pfl's central optimiser gets x' - x: with SGD of rate 1 the
    step is the method's own.

    Args:
        algorithm: one of ``fedcore.algorithms`` whose clients take plain steps, or its name.
        users: the ids of the whole population.
        lr: the rate of the local steps.
        steps: K, the local steps of every user, or a function of pfl's UserContext.
        options: arguments of ``fedcore.Server``, such as ``storage`` and ``limits``, and ``client_sizes``, n_k by id.

    A user that is drawn twice for one cohort is an error; pfl's sampler "minimize_reuse" draws without replacement.

    Attributes:
        server: the ``fedcore.Server``, once two users agreed, or a round was finished. Its x starts at zero: it is the
            sum of the updates.
        reports: the ``Report`` of each central iteration.

    Raises:
        RangeError: the method's clients take no plain steps, or ``lr`` differs between the steps of a round.
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
        self._options = {**options, "lr": lr, "storage": Storage.of(options.get("storage"))}
        self._steps = steps
        self.server: Server | None = None
        self.reports: list[Report] = []
        self._round: Round | None = None
        self._early: list[Update] = []  # copies, until two users agree on the model's tensors
        self._unreadable: list[tuple[str, str]] = []

    def postprocess_one_user(self, *, stats: Any, user_context: UserContext) -> tuple[Any, Metrics]:
        """Fold the user's update in, or reject it by the user's id."""
        steps = self._steps(user_context) if callable(self._steps) else self._steps
        user = user_context.user_id
        try:  # pfl weighs a user by what its strategies made the statistics' weight: 1, or the number of datapoints
            own = bool(stats.weight != 1)  # a quotient is made here; pfl may use its own tensors' memory again
            update = Update(
                user, steps=steps, examples=integral(stats.weight), value=_mean(stats), kind="delta", keep=own
            )
            shapes = _shapes(update)
            if self.server is None:
                update = deepcopy(update)._replace(keep=True)
        except Exception as error:
            self._unreadable.append((user, reason_of(error)))
            return NOTHING, Metrics()
        if self.server is not None:
            return stats if self._add(self.server, update) else NOTHING, Metrics()
        agreed = any(shapes == _shapes(other) for other in self._early)
        self._early.append(update)
        if agreed:
            self._start(shapes)
        return NOTHING, Metrics()

    def _start(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Make the server, and add the updates that came before it."""
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
        """Keep the tensors' names alone: the sum is the round's."""
        return accumulated if accumulated is not None and accumulated.num_parameters else user_stats

    def postprocess_server(
        self, *, stats: Any, central_context: CentralContext, aggregate_metrics: Metrics
    ) -> tuple[Any, Metrics]:
        """Finish the round, and give pfl x' - x.

        Raises:
            RoundError: no user was heard: this is no postprocessor of the backend.
        """
        unreadable, self._unreadable = self._unreadable, []
        if len(self._early) == 1:
            self._start(_shapes(self._early[0]))
        unreadable += [(str(update.client), UNLIKE) for update in self._early]
        self._early = []
        if self._round is None and not unreadable:
            raise RoundError("postprocess_server: expected an open round; give the method as postprocessor too")
        if self.server is None:  # nobody said yet what the model's tensors are
            self._tell(Report(0, rejected=tuple(unreadable)))
            return NOTHING, Metrics()
        opened, self._round = self.server.open_round() if self._round is None else self._round, None
        for user, reason in unreadable:
            opened.reject(user, reason)
        before = to_host(self.server.x)
        self._tell(opened.finish())
        step = self.server.layout.unflatten(kernels.combine([to_host(self.server.x), before], [1.0, -1.0]))
        to_tensor = get_default_framework_module().to_tensor
        return MappedVectorStatistics({name: to_tensor(view) for name, view in step.items()}, weight=1.0), Metrics()

    def _tell(self, report: Report) -> None:
        self.reports.append(report)
        if line := rejection_line(report):
            LOGGER.warning(line)


def _mean(stats: Any) -> dict[str, Any]:
    """A user's mean difference by name."""
    delta = {str(name): own_class(str(name), tensor) for name, tensor in stats.items()}
    if not delta:
        raise ArrayError("statistics: expected tensors by name, got none")
    return delta if stats.weight == 1 else {name: tensor / stats.weight for name, tensor in delta.items()}


def _shapes(update: Update) -> dict[str, tuple[int, ...]]:
    return {name: tuple(int(size) for size in tensor.shape) for name, tensor in update.value.items()}


# Users' states as rows of a ``ClientStore``.


BLOCK = 64
"""The weight lies in a block of elements of its own, so that under "int8" it does not set the scale of others."""


STATES = "states of pfl's users"
_KEY = re.compile(r"key(-[\w.~%-]*)?", re.ASCII)  # what _folder makes
_UNFINISHED = re.compile(r"\.(draft|previous)-[0-9a-f]{12}$")  # a store that was being made


class ClientStoreUserState(AbstractUserStateStorage):
    """A user's state, tensors of float32 by name and a weight, as one row; the states of each key in a store.

    ``save_state`` copies. ``load_state`` returns a copy, as MappedVectorStatistics of the framework's tensors.

    Args:
        path: a folder, for states that may be larger than memory and outlive the process; None keeps them in memory.
        codec, durability: as of ``ClientStore``. With "checkpoint" a crash goes back to the last ``checkpoint``, so
            call that with each checkpoint of the run; with "round" every saved state is safe, and waits for the disk.
    """

    def __init__(
        self, path: str | Path | None = None, *, codec: Codec = "f32", durability: Durability = "checkpoint"
    ) -> None:
        self._path = None if path is None else absolute(path)
        self._codec, self._durability = codec, durability
        self._tables: dict[str, tuple[ClientStore, Layout]] = {}
        try:
            for folder in sorted(self._path.iterdir()) if self._path is not None and self._path.is_dir() else []:
                if (
                    _KEY.fullmatch(folder.name)
                    and not _UNFINISHED.search(folder.name)
                    and folder.is_dir()
                    and not folder.is_symlink()
                ):
                    self._tables[folder.name] = self._reopened(folder)
        except BaseException:
            self.close()
            raise

    def save_state(self, state: Any, user_id: str, key: str | None = None) -> None:
        """Keep a copy of the state.

        Raises:
            DtypeError, ShapeError, ArrayError: it is not of float32 tensors, or not of those that the first state of
                this key had.
        """
        tensors = dict(state.items())
        store, layout = self._table(key, tensors)
        if user_id not in store.registry:
            store.add(user_id)
        try:
            row = store.stage(user_id)
            whole = np.empty(store.n, np.float32) if isinstance(row, Codes) else row
            for piece in layout.slices:  # the state comes back as it was saved
                if piece.name in tensors and (dtype := dtype_name(tensors[piece.name])) != piece.dtype:
                    raise DtypeError(f"{piece.name}: expected {piece.dtype}, as the first state has, got {dtype}")
            layout.flatten(tensors, out=whole[: layout.n])
            whole[layout.n :], whole[-1] = 0, getattr(state, "weight", 1.0)
            if isinstance(row, Codes):
                quantise(whole, row.codec, out=row)
            store.commit((store.round or 0) + 1)
        finally:
            store.discard()

    def load_state(self, user_id: str, key: str | None = None) -> Any:
        """A copy of the user's state, as MappedVectorStatistics.

        Raises:
            UserNotFoundError: it was never saved.
        """
        store, layout = self._tables.get(_folder(key), (None, None))
        if store is None or layout is None or user_id not in store.registry or store.row(user_id) is None:
            raise UserNotFoundError(user_id)
        row = store.read(user_id)
        to_tensor = get_default_framework_module().to_tensor
        tensors = {name: to_tensor(view) for name, view in layout.unflatten(row[: layout.n]).items()}
        return MappedVectorStatistics(tensors, weight=float(row[-1]))

    def clear_states(self) -> None:
        """Remove all states, from the disk too, where nothing else is touched."""
        self.close()
        if self._path is not None:
            for folder in self._tables:
                remove(self._path / folder)
        self._tables.clear()

    def checkpoint(self) -> None:
        """Make all saved states safe on the disk, where durability is "checkpoint"."""
        for store, _ in self._tables.values():
            store.checkpoint()

    def close(self) -> None:
        """Make all saved states safe, and close the files."""
        for store, _ in self._tables.values():
            store.close()

    def _table(self, key: str | None, tensors: dict[str, Any]) -> tuple[ClientStore, Layout]:
        """The store of a key, made for tensors like these if it is new."""
        folder = _folder(key)
        if folder not in self._tables:
            layout = Layout.of(tensors, buffers=())
            for piece in (*layout.outside, *layout.narrow):
                raise DtypeError(f"{piece.name}: expected float32, got {piece.dtype}")
            n = -(-layout.n // BLOCK) * BLOCK + 1
            if self._path is None:
                store = ClientStore([], n, codec=self._codec)
            else:
                path, durability = self._path / folder, self._durability
                store = ClientStore([], n, medium="mmap", codec=self._codec, path=path, durability=durability)
            store.commit(0, state={"what": STATES, "layout": layout.to_state()})
            self._tables[folder] = store, layout
        return self._tables[folder]

    def _reopened(self, folder: Path) -> tuple[ClientStore, Layout]:
        store = ClientStore.open(folder, durability=self._durability)
        try:
            if not isinstance(store.state, dict) or store.state.get("what") != STATES:
                raise CheckpointError(f"{folder}: expected the states of pfl's users, got another store")
            if store.codec != self._codec:
                raise CheckpointError(f"codec: expected {store.codec!r}, as {folder} has, got {self._codec!r}")
            with believed(folder):
                return store, Layout.from_state(store.state["layout"])
        except BaseException:
            store.close()
            raise


def _folder(key: str | None) -> str:
    return "key" if key is None else f"key-{quote(key, safe='')}"
