"""fedcore in pfl-research: ``Method`` aggregates a cohort's updates, ``ClientStoreUserState`` stores users' states."""

import logging
import math
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from fedcore import kernels
from fedcore.adapters import importing
from fedcore.adapters.session import Job, add_reply, finish
from fedcore.algorithms import Algorithm
from fedcore.algorithms.rates import rate_at
from fedcore.arrays import as_array, dtype_name, read_leaf, to_host
from fedcore.errors import ArrayError, CheckpointError, DtypeError, RangeError, RoundError
from fedcore.files import closed_on_error
from fedcore.kernels import Codes, quantise
from fedcore.model import Layout
from fedcore.server import Report, Round, Server, Update
from fedcore.server.folder import checkpoint_errors
from fedcore.store import ClientStore, Durability
from fedcore.store.files.folder import remove
from fedcore.store.registry import canonical
from fedcore.store.slots import Codec
from fedcore.validation import absolute, as_integer, check_number, rejection_reason

with importing("pfl", "pfl >= 0.6"):
    from pfl.aggregate.base import SumAggregator
    from pfl.context import CentralContext, UserContext
    from pfl.data.user_state import AbstractUserStateStorage
    from pfl.exception import UserNotFoundError
    from pfl.internal.ops.selector import get_default_framework_module
    from pfl.metrics import Metrics
    from pfl.postprocessor.base import Postprocessor
    from pfl.stats import MappedVectorStatistics

__all__ = ["ClientStoreUserState", "Method"]

LOGGER = logging.getLogger("fedcore.adapters.pfl")
NOTHING = MappedVectorStatistics({}, weight=1.0)


class Method(Job, Postprocessor, SumAggregator):
    """FedAvg, MIFA, MimiC, or another method of plain local steps for pfl's FederatedAveraging, in one process.

    Pass it as postprocessor, which gets each update with its user's id, and as aggregator:
    ``SimulatedBackend(train, val, postprocessors=[method], aggregator=method)``. An unreadable or infinite update is
    rejected, and ``reports`` lists the user and the reason. The first tensors that two users have in common define the
    model; earlier updates wait in memory.

    Postprocessors that change statistics stand before the method in the list; a change after it is an error. pfl's
    central optimizer gets x' - x, so SGD with rate 1 takes the method's step. The statistics that the method returns
    are x' - x times the weights of the accepted users. With ``FedAvg()`` this is pfl's sum, to which a central privacy
    mechanism may add its noise; other methods, rules, optimizers and server rates are then an error. A callback may
    change the central model: the method's rows are differences from the model that users got.

    Args:
        algorithm: one of ``fedcore.algorithms`` whose clients take plain steps, or its name.
        users: the ids of the whole population. A user counts once in a cohort; pfl's sampler "minimize_reuse" draws
            without replacement.
        lr: the rate of the local steps, the same for all steps of a round.
        steps: K, the number of local steps of every user, or a function of pfl's UserContext.
        options: ``client_sizes`` (n_k by id, which limit the statistics' weights), and further arguments of
            ``fedcore.Server`` (or a ``ServerOptions`` as ``options``), such as ``storage`` and ``limits``, except
            ``policy``: pfl waits for all clients.
            ``abort_after``: the run ends with an error after this many iterations in a row that accepted no update
            (default: 3; None: it continues), or if no iteration of a shorter run accepted one.

    Attributes:
        server: the ``fedcore.Server``; None until two users agree on the tensors, or a round ends. Its x starts at zero
            and is the sum of the steps.
        reports: the ``Report`` of each central iteration.

    Raises:
        RangeError: the method needs more than plain steps; or in the run: users have no ids, a postprocessor after the
            method changed statistics, or the local rate or a privacy mechanism does not fit the method.
        UnknownClientError: an entry of ``users`` is not an id.
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
        self._prepare("pfl", algorithm, {**options, "lr": lr})
        self._users, self._steps_of = [canonical(user) for user in users], steps
        self._due: int | None = None  # pfl's next iteration, if the method has seen one
        self._round: Round | None = None
        self._early: list[Update] = []  # copies, until two users agree on the model's tensors
        self._unreadable: list[tuple[str, str]] = []
        self._given = self._kept = _marked(NOTHING)  # what the backend's other postprocessors must not change

    def postprocess_one_user(self, *, stats: Any, user_context: UserContext) -> tuple[Any, Metrics]:
        """Add the user's update to the round, or reject it."""
        passed = stats if self._taken(stats, user_context) else NOTHING
        self._given = _marked(passed)
        return passed, Metrics()

    def _taken(self, stats: Any, user_context: UserContext) -> bool:
        steps = self._steps_of(user_context) if callable(self._steps_of) else self._steps_of
        if (user := user_context.user_id) is None:
            raise RangeError("users: user_id is None, as in pfl's ArtificialFederatedDataset; use a FederatedDataset")
        try:  # pfl's strategies set the weight to 1 or to the number of datapoints
            weight = float(stats.weight)
            keep = weight != 1  # the quotient is new memory, but pfl may reuse its own tensors' memory
            check_number("examples", weight, "(0, inf)")  # so that a NaN never reaches pfl's own sums
            tensors = _mean(stats, weight)
            update = Update(user, tensors, steps=steps, examples=as_integer(weight), kind="delta", keep=keep)
            shapes = _shapes(update)
            if self.server is None:
                update = deepcopy(update)._replace(keep=True)
        except Exception as error:
            self._unreadable.append((user, rejection_reason(error)))
            return False
        if self.server is not None:
            return self._add(self.server, update)
        agree = any(shapes == _shapes(other) for other in self._early)
        self._early.append(update)
        if agree:
            self._start(shapes)
        return True

    def _start(self, shapes: dict[str, tuple[int, ...]]) -> None:
        x0 = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        server, early, self._early = self._opened_server(x0, self._users), self._early, []
        for update in early:
            self._add(server, update)

    def _add(self, server: Server, update: Update) -> bool:
        if self._round is None:
            self._round = server.open_round()
        return add_reply(self._round, update.client, lambda: update)

    def accumulate(self, *, accumulated: Any, user_stats: Any) -> Any:
        """Return the first user's statistics with parameters, since the server holds the sum."""
        _require_same(self._given, user_stats, is_copy=accumulated is None)
        kept = accumulated if accumulated is not None and accumulated.num_parameters else user_stats
        self._kept = _marked(kept)
        return kept

    def worker_reduce(self, **_: Any) -> Any:
        """Raise RangeError, since each process would have its own server."""
        raise RangeError("worker_reduce: fedcore's Method runs in one process; start pfl without more workers")

    def postprocess_server(
        self, *, stats: Any, central_context: CentralContext, aggregate_metrics: Metrics
    ) -> tuple[Any, Metrics]:
        """Finish the round, and return x' - x.

        Raises:
            RoundError: no update arrived, because the method is not a postprocessor of the backend.
        """
        if stats is not None:
            _require_same(self._kept, stats)
        self._given = self._kept = _marked(NOTHING)
        rejected, self._unreadable = self._unreadable, []
        if len(self._early) == 1:
            self._start(_shapes(self._early[0]))
        self._check(central_context, aggregate_metrics)
        rejected += [(str(update.client), "statistics: no two users have the same tensors") for update in self._early]
        self._early = []
        if self._round is None and not rejected:
            raise RoundError("postprocess_server: no update arrived; pass the method to the backend as a postprocessor")
        last = getattr(getattr(central_context, "algorithm_params", None), "central_num_iterations", 0)
        ended = central_context is not None and central_context.current_central_iteration + 1 == last
        if self.server is None:  # the tensors of the model are not known yet
            self._record(Report(0, rejected=tuple(rejected)), LOGGER.warning, ended=ended)
            return MappedVectorStatistics({}, weight=1.0), Metrics()
        opened, self._round = self.server.open_round() if self._round is None else self._round, None
        for user, reason in rejected:
            opened.reject(user, reason)
        before = to_host(self.server.x)
        report = finish(self.server, opened, LOGGER.error)
        self._record(report, LOGGER.warning, ended=ended)
        weight = float(report.weights.sum()) or 1.0
        step = kernels.combine([to_host(self.server.x), before], [weight, -weight])
        return _statistics(self.server.layout.unflatten(step), weight), Metrics()

    def _check(self, context: CentralContext | None, metrics: Metrics | None) -> None:
        """Raise an error if the settings of pfl's iteration do not fit the method."""
        iteration, due = getattr(context, "current_central_iteration", 0), self._due
        self._due, server, name = iteration + 1, self.server, type(self._algorithm).__name__
        if server is None:
            return
        is_mean = server.averages_models and server.settings.takes_plain_mean
        is_noisy = any(getattr(metric, "is_local_privacy", None) is False for metric, _ in metrics or ())
        if is_noisy and not (is_mean and self._algorithm.weighs_claims):
            why = "returns another sum than that of the users' statistics with these options"
            if self._algorithm.keeps_rows:
                why = "keeps a row of each user, which counts in every later iteration"
            raise RangeError(
                f"algorithm: {name} {why}; pfl's central privacy mechanisms account for the sum over the users of one "
                "iteration, so use FedAvg() without aggregation, optimizer and server_lr"
            )
        if is_mean or context is None:
            return
        if iteration != server.round_number if due is None else iteration < due:
            LOGGER.warning(
                "pfl continues with iteration %d, and the method's server with round %d, so that what it keeps between "
                "rounds is of other iterations; resume with the storage= of that run, or begin a run with a new Method",
                iteration,
                server.round_number,
            )
        lr = getattr(getattr(context, "model_train_params", None), "local_learning_rate", None)
        if lr is None or server.averages_models:
            return
        if not math.isclose(lr, own := rate_at(server.settings.lr, server.round_number), rel_tol=1e-6):
            raise RangeError(
                f"lr: users train with local_learning_rate={lr}, and {name} has lr={own} in round "
                f"{server.round_number}; pass the same rate, or the same schedule as a function of the round"
            )


def _marked(stats: Any) -> tuple[Any, ...]:
    """Return the weight and the tensors of statistics, with the number of changes in place that torch counts."""
    return stats.weight, [(name, x, getattr(x, "_version", None)) for name, x in stats.items()]


def _require_same(marked: tuple[Any, ...], stats: Any, *, is_copy: bool = False) -> None:
    """Raise RangeError if statistics that went through pfl's other postprocessors were changed."""
    weight, tensors = marked
    number: Callable[[float], Any] = np.float32 if is_copy else float  # the weight of pfl's copy is a float32
    same = number(float(stats.weight)) == number(float(weight)) and [*stats.keys()] == [name for name, _, _ in tensors]
    if same and is_copy:
        same = all(np.array_equal(_array(x), _array(stats[name]), equal_nan=True) for name, x, _ in tensors)
    elif same:
        same = all(stats[name] is x and getattr(x, "_version", None) == version for name, x, version in tensors)
    if not same:
        raise RangeError(
            "postprocessors: one after fedcore's Method changed the statistics, which the server has added already; "
            "put Method last in the list, and pass the same object as aggregator too"
        )


def _array(x: Any) -> np.ndarray[Any, Any]:
    """Return a tensor of any dtype and device as an array, of float32 for bfloat16, which NumPy lacks."""
    return as_array("statistics", to_host(read_leaf("statistics", x)))


def _mean(stats: Any, weight: float) -> dict[str, Any]:
    delta = {str(name): read_leaf(str(name), tensor) for name, tensor in stats.items()}
    if not delta:
        raise ArrayError("statistics: has no tensors")
    return delta if weight == 1 else {name: tensor / weight for name, tensor in delta.items()}


def _shapes(update: Update) -> dict[str, tuple[int, ...]]:
    return {name: tuple(int(size) for size in tensor.shape) for name, tensor in update.value.items()}


def _statistics(views: dict[str, Any], weight: float) -> MappedVectorStatistics:
    to_tensor = get_default_framework_module().to_tensor
    return MappedVectorStatistics({name: to_tensor(view) for name, view in views.items()}, weight=weight)


# Users' states as rows of a ``ClientStore``.


BLOCK = 64
"""The number of elements that share a scale under "int8". The weight is in a separate block with its own scale."""


FINITE = "[-{0}, {0}]".format(float(np.finfo(np.float32).max))
"""The numbers that a float32 holds."""
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
        with closed_on_error(self):
            for folder in sorted(self._path.iterdir()) if self._path is not None and self._path.is_dir() else []:
                is_states = _KEY.fullmatch(folder.name) and not _UNFINISHED.search(folder.name)
                if is_states and folder.is_dir() and not folder.is_symlink():
                    self._tables[folder.name] = self._reopened(folder)

    def save_state(self, state: Any, user_id: str, key: str | None = None) -> None:
        """Store a copy of the state, whose tensors must be float32 and like those of the key's first state.

        The weight is rounded to float32. A codec rounds the tensors and the weight; "f16" makes numbers above 65,504
        infinite.

        Raises:
            DtypeError: a tensor is not float32.
            RangeError: the weight is not finite, or exceeds float32.
            ArrayError, ShapeError: the tensors are not those of the first state.
        """
        tensors = {str(name): read_leaf(str(name), tensor) for name, tensor in state.items()}
        for name, tensor in tensors.items():
            if (dtype := dtype_name(tensor)) != "float32":
                raise DtypeError(f"{name}: dtype {dtype}; must be float32")
        store, layout = self._table(key, tensors)
        if user_id not in store.registry:
            store.add(user_id)
        try:
            row = store.stage(user_id)
            whole = np.empty(store.n, np.float32) if isinstance(row, Codes) else row
            layout.flatten(tensors, out=whole[: layout.n])
            whole[layout.n :], whole[-1] = 0, check_number("weight", float(getattr(state, "weight", 1.0)), FINITE)
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
        with closed_on_error(store):
            if not isinstance(store.state, dict) or store.state.get("what") != STATES:
                raise CheckpointError(f"{folder}: this store has no states of pfl's users; move it to another folder")
            if store.codec != self._codec:
                raise CheckpointError(f"codec={self._codec!r}: {folder} has codec {store.codec!r}; pass this codec")
            with checkpoint_errors(folder):
                return store, Layout.from_state(store.state["layout"])


def _folder(key: str | None) -> str:
    return "key" if key is None else f"key-{quote(key, safe='')}"
