"""The beginnings of a server, or of a shard of one: its settings and its state, new or out of a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedcore import devices, kernels
from fedcore.aggregation import Counters, Whole
from fedcore.aggregation.sum import Precision
from fedcore.algorithms import Algorithm, named
from fedcore.errors import ArrayError, CheckpointError, RangeError, ShapeError, UnknownNameError
from fedcore.layout import Layout
from fedcore.memory import to_host
from fedcore.optimizers import Optimizer
from fedcore.rates import Rate
from fedcore.server.buffers import SIGNED, never_negative
from fedcore.server.folder_checks import require_plausible
from fedcore.server.limits import Limits
from fedcore.server.population import Population, Sizes
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot, moved, vectors_of
from fedcore.server.state import State
from fedcore.server.update import first_not_finite
from fedcore.server.weighing import Weights, require_weighing
from fedcore.store import ClientStore
from fedcore.typing import F32


def first_settings(
    algorithm: Algorithm | str,
    layout: Layout,
    *,
    lr: float | Rate,
    server_lr: float | Rate | None,
    optimizer: Optimizer | None,
    late_rounds: int,
    history_rounds: int,
    fold: int | None,
    accumulate: Precision,
    diagnostics: bool,
    limits: Limits,
    device: str,
) -> Settings:
    """The settings of a new server; arguments and errors are those of ``Server``."""
    algorithm = named(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(algorithm, Algorithm):
        raise UnknownNameError(f"algorithm: expected an Algorithm or the name of one, got {algorithm!r}")
    if layout.n_parameters < 1:
        raise ShapeError(f"x0: expected at least one parameter, got {layout.n_parameters}")
    return Settings.of(
        algorithm,
        layout,
        lr=lr,
        server_lr=server_lr,
        optimizer=optimizer,
        late_rounds=late_rounds,
        history_rounds=history_rounds,
        fold=fold,
        accumulate=accumulate,
        diagnostics=diagnostics,
        limits=limits,
        device=device,
    )


def with_buffers_of(settings: Settings, x: F32, signed: Sequence[str]) -> Settings:
    """The settings, with the buffers that are not to become negative; x is float32[n], the first model."""
    return replace(settings, nonnegative=never_negative(settings.layout, to_host(x), signed))


def weights_by_client(weights: Weights | Sequence[float] | None) -> Weights | None:
    """Weights by client; those in a list or an array are of the clients 0, 1, ..."""
    listed = not isinstance(weights, Mapping) and hasattr(weights, "__len__")
    return dict(enumerate(weights)) if listed else weights  # type: ignore[arg-type, return-value]


def with_weights(settings: Settings, weights: Weights | None) -> Settings:
    """The settings of a server with those ``weights``.

    Raises:
        RangeError: the method does not weigh by examples.
        CheckpointError: the server had weights when it was saved, and they are not given again.
    """
    if weights is None and settings.own_weights:
        raise CheckpointError("weights: expected those of the saved server again, got None: pass weights=")
    if weights is not None:
        require_weighing(settings.algorithm, "weights")
    return replace(settings, own_weights=weights is not None)


def first_state(
    settings: Settings,
    x: F32,
    counters: Counters,
    client_sizes: Sizes | None,
    rows: ClientStore,
    whole: Whole | None = None,
) -> State:
    """The state of a new server over its empty rows, and in their folder, if they have one.

    Args:
        x: float32[n] on the server's device; read-only from now on.
        whole: None for a server that has no shards.

    Raises:
        RangeError, UnknownClientError, StoreError: as ``Server``.
    """
    algorithm, registry = settings.algorithm, rows.registry
    population = Population.of(client_sizes, registry, needed=algorithm.needs_shares)
    snapshot = Snapshot.first(
        x,
        counters,
        settings.layout.n_parameters,
        algorithm,
        settings.optimizer,
        population,
        settings.device,
        exact=settings.is_exact,
    )
    state = State(settings, snapshot, rows, whole)
    if rows.medium == "mmap":
        state.keep(snapshot, 0)  # so that a run that is killed in its first round can be resumed too
    return state


def resumed_state(
    rows: ClientStore,
    said: Mapping[str, Any],
    given: Mapping[str, Any],
    device: str = devices.CPU,
    whole: Whole | None = None,
) -> State:
    """The state of a server as its folder has it.

    Args:
        said: the folder's own state, which is a server's.
        given: what the caller says again; see ``said_again``.

    Raises:
        ValueError, LookupError, TypeError: the folder says what no server has said; see ``believed``.
        CheckpointError: as ``Settings.from_state``.
    """
    settings, vectors = Settings.from_state(said["settings"], given, device), vectors_of(rows)
    if "nonnegative" not in said["settings"]:  # a folder of before buffers were looked at
        settings = with_buffers_of(settings, vectors["x"], SIGNED)
    require_plausible(settings, said, vectors, rows)
    vectors = moved(vectors, device)
    snapshot = Snapshot.of(vectors, said["numbers"], settings.layout.n_parameters, rows.registry, device)
    return State(settings, snapshot, rows, whole)


def require_clients(rows: ClientStore, clients: object) -> None:
    """Refuse a count of no clients.

    Raises:
        RangeError: it is.
    """
    if len(rows.registry) == 0 and isinstance(clients, int):
        raise RangeError("clients: expected at least one, got none")


def require_finite(x: F32, layout: Layout) -> None:
    """Refuse a first model, or a slice of one, in which there is a number that is none.

    Raises:
        ArrayError: there is; it names the tensor.
    """
    if not kernels.all_finite([x])[0]:
        name = first_not_finite(x, layout)
        raise ArrayError(f"x0, {name}: expected finite numbers, got a NaN or an infinity: a mask of -inf is a buffer")
