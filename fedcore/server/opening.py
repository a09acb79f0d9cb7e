"""How servers are created and loaded: their first states, their folders, and the options that loading changes."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from fedcore.algorithms.rates import REGISTRY as NAMED_RATES
from fedcore.arrays import CPU, F32, FileMemory, device_named, empty, freeze, on_host, to_host
from fedcore.errors import CheckpointError, RangeError, ShapeError, StoreError
from fedcore.model import Layout, Model
from fedcore.options import RATES, Compute, Settings, Storage, as_policy, describe, is_same_rate
from fedcore.rules import Chain, Rule
from fedcore.server.aggregation import Counters, Reducer
from fedcore.server.folder import (
    JOURNAL,
    Journal,
    agree,
    checkpoint_errors,
    group_folders,
    open_part,
    opened_stores,
    require_groups,
    require_plausible,
    server_state,
)
from fedcore.server.groups import NO_SHARD, NOTHING, Context
from fedcore.server.requests import ChangeOptions
from fedcore.server.state import State
from fedcore.server.state import state_of as state_of_server
from fedcore.server.step import Population, Sizes, Snapshot, moved, vectors_of
from fedcore.server.update import require_finite
from fedcore.server.validation import LOGGER, never_negative
from fedcore.store import ClientStore
from fedcore.store.client_store import create
from fedcore.store.device_store import DeviceStore
from fedcore.store.files.folder import remove
from fedcore.store.files.inventory import GROUPS, INDEX
from fedcore.store.inspect import state_of
from fedcore.store.registry import ClientId
from fedcore.store.slots import RowFormat
from fedcore.validation import absolute

Aggregation: TypeAlias = str | Sequence[Rule | str] | Chain | None
Asked: TypeAlias = int | list[ClientId] | Sizes | None
"""The clients of a new server: their number, their ids, or n_k by id; None for those of the caller's rows."""
MANIFEST = "cluster.json"


def manifest_in(path: str | os.PathLike[str]) -> Path | None:
    """Return the manifest of a sharded server; ``path`` is the manifest or its folder. Return None if it does not
    exist.
    """
    place = absolute(path)
    file = place / MANIFEST if os.path.isdir(place) else place
    return file if file.name == MANIFEST and os.path.lexists(file) else None  # when it is read, a pipe is rejected


def is_begun(storage: Storage) -> bool:
    """Whether the storage's folder has a server, or other data that a new server would overwrite."""
    if storage.path is None or not os.path.exists(folder := Path(storage.path)):
        return False
    if not folder.is_dir() or manifest_in(folder) is not None:
        return True
    names = [name for name in os.listdir(folder) if not name.startswith(f".{MANIFEST}.")]  # a kill may leave drafts
    if not names or (INDEX not in names and f"{MANIFEST}.intent" in names):  # no manifest: its creation was killed
        return False
    with ClientStore.open(folder, readonly=True) as store:  # empty if a kill came before the server was created
        return store.state is not None or len(store) > 0


def ids_of(clients: Any) -> tuple[list[ClientId], Sizes | None]:
    """Return the unchecked ids of new clients, and n_k by id if given."""
    if isinstance(clients, str | bytes) or not isinstance(clients, Iterable):
        return [clients], None  # type: ignore[list-item]  # the registry checks ids
    return list(clients), dict(clients) if isinstance(clients, Mapping) else None


def new_state(model: Any, settings: Settings, clients: Asked, storage: Storage, given: ClientStore | None) -> State:
    """Return the state of a new server without shards. For arguments see ``Server``; ``given``: the caller's rows."""
    layout = settings.layout
    folder = None if storage.path is None else absolute(storage.path).parent
    settings = in_files(settings, storage.resident, folder)
    first = layout.flatten(model, empty(layout.n, device=settings.device)), layout.read_counters(model)
    return first_state(settings, first, clients, storage, given)


def require_one_part(path: Any, storage: Storage, compute: Compute) -> None:
    """Raise StoreError for options of shards."""
    shards = (compute.shards or 1) > 1
    for name, value in (("shards", shards), ("executor", compute.executor), ("folders", storage.folders)):
        if value:
            raise StoreError(
                f"{name}: {path} is not a sharded server, as {MANIFEST} is missing; split it with "
                "fedcore.cluster.reshard"
            )


def saved_state(
    path: str | os.PathLike[str] | ClientStore, given: Mapping[str, Any], storage: Storage, compute: Compute
) -> tuple[State, dict[str, Any]]:
    """Return the state of a server without shards at its last complete transaction, and the saved settings.

    For arguments and errors see ``Server.load``.
    """
    place = path if isinstance(path, ClientStore) else absolute(path)
    where = place.path or "store" if isinstance(place, ClientStore) else place
    of_main, parts = (storage, compute), list[Path | ClientStore]()
    if isinstance(place, Path) and (folders := group_folders(place)):
        with checkpoint_errors(place):
            saved = server_state(place, state_of(place))
        if (storage.medium or saved["medium"]) == "mmap":
            storage, parts = _of_parts(storage), [*folders]
        else:
            device = compute.device or device_of_state(saved)
            with opened_stores(place) as (main, *groups):
                media = [storage.medium or server_state(place, group.state)["medium"] for group in groups]
                parts = [one.in_memory(device if "cuda" in of else CPU) for one, of in zip(groups, media, strict=True)]
                place = main.in_memory()
            storage = replace(storage, medium=None, durability=None, keep_previous=None)
        of_main = replace(storage, codec=None), replace(compute, device=CPU)
    with ExitStack() as failed:
        rows, saved = _saved_rows(place, *of_main, failed)
        with checkpoint_errors(where):
            compute = replace(compute, device=compute.device or device_of_state(saved))
            settings = Settings.from_state(saved["settings"], given, compute)
        settings = in_files(settings, storage.resident, rows.path if rows.medium == "mmap" else None)
        plain = replace(storage, audit=None, audit_key=None)
        stores = [rows, *(_saved_rows(part, plain, compute, failed, open_part)[0] for part in parts)]

        def read(store: ClientStore) -> tuple[dict[str, Any], Settings]:
            saved = server_state(store.path or where, store.state)
            own = Settings.from_state(saved["settings"], given, compute)
            return saved, replace(own, device=settings.device)

        with checkpoint_errors(where):
            agree(stores)
            state, saved_settings = resumed_state(where, stores, read)
        state.sign_by(storage.audit_key)
        failed.pop_all()
    return state, saved_settings


First = tuple[Settings, Snapshot, ClientStore]
"""The settings, the first snapshot and the rows in memory of a new server, or of a group of its tensors."""


def first_state(
    settings: Settings,
    first: tuple[F32, Counters],
    clients: Asked,
    storage: Storage,
    given: ClientStore | None = None,
    context: Context = NO_SHARD,
) -> State:
    """Return the state of a new server with this x and these counters, or of a shard of one; see ``new_state``.

    If the storage has a folder, write it.
    """
    (x, counters), (kind, reducers) = first, context
    layout, firsts, shared = settings.layout, list[First](), reducers.get(None)
    sizes = clients if isinstance(clients, Mapping) else None
    require_finite(x, layout)
    freeze(x)

    def population(rows: ClientStore) -> Population:
        return Population.of(sizes, rows.registry, needed=settings.algorithm.needs_shares)

    if layout.groups:
        of_all = replace(storage, codec="f32", medium=None if storage.medium == "cuda" else storage.medium)
        rows = new_rows(None, of_all, clients, len(layout.groups))
        firsts.append((settings, Snapshot(NOTHING, NOTHING, NOTHING, None, (), {}, population(rows)), rows))
        storage = storage if storage.path is None else _of_parts(storage)
    parts = {None: x} if not layout.groups else {name: layout.cut(x, name) for name in layout.groups}
    for name, part in parts.items():
        freeze(part)
        own = layout if name is None else layout.of_groups[name]
        audit = settings.audit and name is None
        of_part = replace(settings, layout=own, audit=audit, started_nonnegative=never_negative(own, part))
        rows = new_rows(given, storage, clients, own.n_parameters, settings.device)
        outside = {piece.name: counters[piece.name] for piece in own.outside}
        firsts.append((of_part, Snapshot.first(of_part, part, outside, population(rows)), rows))
    with first_stores(firsts, storage, shared and shared.place) as stores:
        last = zip(parts, firsts[-len(parts) :], stores[-len(parts) :], strict=True)
        states = [State(own, first, store, reducers.get(name)) for name, (own, first, _), store in last]
        state = states[0]
        if layout.groups:
            groups = dict(zip(layout.groups, states, strict=True))
            state = kind(settings, firsts[0][1], stores[0], groups, shared)
        elif state.store is rows and rows.medium == "mmap":
            state.keep(state.snapshot, 0)  # so that a run that is killed in its first round can be resumed
            state.checkpoint()
        state.sign_by(storage.audit_key)
        return state


def _of_parts(storage: Storage) -> Storage:
    """Return the storage of a folder with groups. Each store keeps its last transaction, to undo it after a crash."""
    return replace(storage, keep_previous=True, durability=storage.durability_of_parts)


@contextmanager
def first_stores(firsts: Sequence[First], storage: Storage, place: Any = None) -> Iterator[list[ClientStore]]:
    """Yield the stores of a new server: those in memory, or those in its folder; if the block fails, delete the folder.

    A kill leaves the folder complete or missing. It has the first store, and the others, of groups of tensors, in
    ``GROUPS``. ``place`` is that of a shard.
    """
    if storage.path is None:
        yield [rows for _, _, rows in firsts]
        return
    home, undoable = absolute(storage.path), bool(storage.keep_previous)
    (main, _, _), durability = firsts[0], storage.durability or "round"

    def create_at(path: Path, first: First, parts: Callable[[Path], object] = lambda _: None) -> None:
        settings, snapshot, rows = first
        state = state_of_server(settings, snapshot, "mmap", undoable, len(rows.registry), place)
        vectors = {name: to_host(vector) for name, vector in snapshot.vectors(settings.algorithm).items()}
        create(path, RowFormat(rows.codec, rows.n), rows.registry, vectors, state, parts)

    def parts(folder: Path) -> None:
        if storage.journal and place is None:
            Journal(folder / JOURNAL, main).close()
        for i, first in enumerate(firsts[1:]):
            create_at(folder / GROUPS / str(i), first)

    create_at(home, firsts[0], parts)
    with ExitStack() as stack:
        try:
            made = []
            for folder in (home, *(home / GROUPS / str(i) for i in range(len(firsts) - 1))):
                made.append(ClientStore.open(folder, durability=durability, keep_previous=undoable))
                stack.callback(made[-1].close)
            if isinstance(main.device, FileMemory):
                main.device.folder = str(home)
                for store in made:
                    store.read_into(main.device)
            devices = [main.device if isinstance(rows, DeviceStore) else CPU for _, _, rows in firsts]
            yield [on_device(store, device, storage.cached_rows) for store, device in zip(made, devices, strict=True)]
            stack.pop_all()
        except BaseException:
            stack.close()
            remove(home)
            raise


def resumed_state(
    where: object,
    stores: Sequence[ClientStore],
    read: Callable[[ClientStore], tuple[dict[str, Any], Settings]],
    context: Context = NO_SHARD,
) -> tuple[State, dict[str, Any]]:
    """Return the state of a saved server, or of a shard of one, and the saved settings.

    ``where`` names them in errors. ``stores`` are at one transaction; with groups of tensors, the main one comes first.
    ``read`` returns what a store has saved, and its settings. For errors see ``checkpoint_errors``.
    """
    rows, saved, settings, (kind, reducers) = stores[0], *read(stores[0]), context
    if not settings.layout.groups and len(stores) == 1:
        return _resumed_part(rows, saved, settings, reducers.get(None)), saved["settings"]
    groups = dict[str, State]()
    require_groups(where, saved, [store.state for store in stores[1:]])
    for name, store in zip(settings.layout.groups, stores[1:], strict=True):
        groups[name] = _resumed_part(store, *read(store), reducers.get(name))
    vectors: dict[str, Any] = {"x": NOTHING, **vectors_of(rows)}
    snapshot = Snapshot.of(vectors, saved["numbers"], 0, rows.registry)
    here = snapshot.round_number, snapshot.ledger
    if any((group.round_number, group.snapshot.ledger) != here for group in groups.values()):
        raise CheckpointError(f"{where}: the groups are at different rounds; load a backup")
    return kind(settings, snapshot, rows, groups, reducers.get(None)), saved["settings"]


def _resumed_part(rows: ClientStore, saved: Mapping[str, Any], settings: Settings, reducer: Reducer | None) -> State:
    """Return the state of a saved server in one part, or of a group of one."""
    if isinstance(settings.device, FileMemory):
        rows.read_into(settings.device)
    vectors = vectors_of(rows, on_host(settings.device))
    if "nonnegative" not in saved["settings"]:  # a folder of a version that did not check buffers
        kept = never_negative(settings.layout, vectors["x"])
        settings = replace(settings, started_nonnegative=kept)
    require_plausible(settings, saved, vectors, rows)
    vectors = moved(vectors, settings.device)
    snapshot = Snapshot.of(vectors, saved["numbers"], settings.layout.n_parameters, rows.registry, settings.device)
    return State(settings, snapshot, rows, reducer)


def in_files(settings: Settings, resident: int | None, folder: Path | None) -> Settings:
    """Return the settings of a server whose vectors are in files of this folder, if ``resident`` is given."""
    if resident is None or folder is None or settings.device != CPU:
        return settings
    folder.mkdir(parents=True, exist_ok=True)
    return replace(settings, device=FileMemory(folder, resident))


def warn_if_frozen(model: Any, layout: Layout) -> None:
    """Log a warning if a module has frozen parameters in its layout, which the server would average like the others."""
    module, names = model.tensors if isinstance(model, Model) else model, set(layout.names)
    parameters = dict(module.named_parameters()) if hasattr(module, "named_parameters") else {}
    frozen = [name for name, one in parameters.items() if name in names and not getattr(one, "requires_grad", True)]
    if frozen:
        LOGGER.warning(
            "model: %d of %d parameters are frozen (requires_grad=False), such as %s, and each client must send them "
            "too; to leave them out, pass Model(model, frozen=patterns), or only the trained tensors, such as "
            "get_peft_model_state_dict(model)",
            *(len(frozen), len(parameters), frozen[0]),
        )


def change_on_loading(
    backend: Any,
    where: object,
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
    checked: Callable[[Mapping[str, Any]], Settings],
    layout: Layout | None,
) -> None:
    """Change the options of ``Server.load`` that differ from the saved options, and log a warning.

    ``given`` has the arguments, or None. ``checked`` returns the changed settings, or raises if they do not combine.
    """
    settings: Settings = backend.settings
    if layout is not None:
        if layout != settings.layout:
            raise CheckpointError(f"{where}: the saved model has tensors or shapes that differ from those of model")
        if settings.optimizer is not None and given["optimizer"] is None:
            raise CheckpointError(f"{where}: the server was saved with {settings.optimizer}; pass the same optimizer")
    aggregation, limits, policy = (given[name] for name in ("aggregation", "limits", "policy"))
    chain = settings.rules if aggregation is None else Chain.of(aggregation)
    if saved.get("own_weights") is True and chain.weights is None:
        raise CheckpointError("aggregation: the server was saved with weights; pass them again: [..., Mean(weights)]")
    if chain.weights is not None:
        backend.settings = settings = checked({"aggregation": settings.rules.with_weights(chain.weights)})
    next_rates = saved.get("next_rates", {})
    round = next_rates.get("round", 0)
    options: dict[str, Any] = {
        name: given[name]
        for name in RATES
        if given[name] is not None and not is_same_rate(name, saved[name], given[name], next_rates.get(name), round)
    }
    if chain != settings.rules:
        options["aggregation"] = chain
    if limits is not None and limits != settings.limits:
        options["limits"] = limits
    if policy is not None and as_policy(policy) != settings.policy:
        options["policy"] = policy
    changed = checked(options)
    if options:
        backend.apply(ChangeOptions(options))
        listed = ", ".join(f"{name}={value!r}" for name, value in changed.shown(options).items())
        LOGGER.warning("%s: loading changed these options of the saved server: %s", where or "server", listed)


def require_saved(name: str, saved: Any, given: Any) -> None:
    """Raise RangeError if an argument of ``Server.load`` differs from the saved option, which cannot change."""
    if given not in (None, saved):
        raise RangeError(f"{name}={given!r}: the server was saved with {name}={saved!r}; leave it out")


def require_audit(saved: Mapping[str, Any], storage: Storage) -> None:
    """Raise RangeError if the audit of an option differs from that of saved settings."""
    audit = bool(saved.get("audit"))
    if storage.audit_key is not None and not audit:
        raise RangeError("audit_key: the server was saved without an audit, which cannot change; leave it out")
    require_saved("audit", audit, storage.audit)


def require_named_rates(changed: Settings, options: Iterable[str]) -> None:
    """Raise RangeError if a rate is the caller's own code, which shards cannot load after a crash."""
    for name in set(RATES).intersection(options):
        rate = getattr(changed, name)
        described = describe(name, rate)
        if described is not None and described["name"] not in NAMED_RATES.own:
            raise RangeError(f"{name}={rate!r}: a sharded server needs a number or a rate of fedcore.algorithms.rates")


def new_rows(given: ClientStore | None, storage: Storage, clients: Asked, n: int, device: str = CPU) -> ClientStore:
    """Return rows of n elements on the server's device: the caller's, or new ones in memory.

    ``first_stores`` writes the folder of a ``storage`` with a path.
    """
    if given is not None:
        if not isinstance(clients, Mapping | None):
            raise RangeError(
                "clients: the ClientStore has clients already; leave clients= out, or map their ids to n_k"
            )
        if len(given) > 0:
            raise RangeError(
                f"storage: the ClientStore has {len(given)} rows; a new server needs an empty store; use Server.load"
            )
        if given.n != n:
            raise ShapeError(
                f"storage: the ClientStore has rows of {given.n} elements, but the model has {n} parameters"
            )
        return on_device(given, device, storage.cached_rows)
    medium = storage.medium or ("ram" if storage.path is None else "mmap")
    options: dict[str, Any] = {}
    if medium != "mmap" or storage.path is None:  # otherwise the rows will be in a folder
        options = {"medium": device if medium == "cuda" else medium, "path": storage.path}
        options |= {"durability": storage.durability or "round", "keep_previous": bool(storage.keep_previous)}
    made = ClientStore(clients, n, codec=storage.codec or "f32", **options)  # type: ignore[arg-type]  # it checks the name
    if len(made.registry) == 0 and isinstance(clients, int):
        raise RangeError("clients=0: must be at least 1; to add clients later, pass clients=[]")
    return on_device(made, device, storage.cached_rows)


def on_device(store: ClientStore, device: str, cached_rows: int | None) -> ClientStore:
    """Return the store, wrapped to copy rows to the device and back if its rows are elsewhere."""
    if store.device != device and (store.device != CPU or type(store) is not ClientStore):
        raise RangeError(
            f"storage: the rows of the {type(store).__name__} are on {store.device}, but the server is on {device}; "
            f"pass Compute(device={store.device!r})"
        )
    return store if store.device == device else DeviceStore(store, device, cached_rows)


def _saved_rows(
    path: Path | ClientStore, storage: Storage, compute: Compute, failed: ExitStack, opens: Any = ClientStore.open
) -> tuple[ClientStore, dict[str, Any]]:
    """Return the rows and the state of a server, both from one commit.

    ``opens`` opens a path. ``failed`` gets the call that closes the rows, unless the caller opened them.
    """
    device = compute.device
    if isinstance(path, ClientStore):
        rows, where = path, path.path or "store"
        _require_options(rows, storage)
    else:
        where = path
        rows, device = _opened(path, storage, device, opens)
        failed.callback(rows.close)
    with checkpoint_errors(where):
        state = server_state(where, rows.state)
        device = device_of_state(state) if device is None else device
    require_saved("codec", rows.codec, storage.codec)
    require_audit(state["settings"], storage)
    return on_device(rows, device, storage.cached_rows), state


def _require_options(rows: ClientStore, storage: Storage) -> None:
    """Raise RangeError if the caller's store is read-only, or an option contradicts it."""
    if rows.readonly:
        raise RangeError("path: the ClientStore is read-only; open it for writing")
    for name, actual, option in (
        ("medium", rows.medium, storage.medium),
        ("durability", rows.durability, storage.durability),
        ("keep_previous", rows.keep_previous, storage.keep_previous),
    ):
        if option not in (None, actual):
            raise RangeError(f"{name}={option!r}: the ClientStore was opened with {actual!r}")


def _opened(path: Path, storage: Storage, device: str | None, opens: Any) -> tuple[ClientStore, str]:
    """Return the store of a folder, and the device."""
    with checkpoint_errors(path):
        saved = server_state(path, state_of(path))
        device = device_of_state(saved) if device is None else device
        medium = storage.medium or ("ram" if saved["medium"] == "cuda" and device == CPU else saved["medium"])
        on = {"cuda": "ram" if device == CPU else device}.get(medium, medium)
        kept = saved.get("undoable") is True if storage.keep_previous is None else storage.keep_previous
        durability = storage.durability or "round"
        return opens(path, medium=on, durability=durability, keep_previous=kept and on == "mmap"), device


def device_of_state(state: dict[str, Any]) -> str:
    """Return the device in a saved state. The oldest folders were written on CPUs and have no entry."""
    return device_named(state.get("device", CPU))
