"""Changes of a server's rates and limits, between rounds and on loading."""

from collections.abc import Iterable, Mapping
from typing import Any

from fedcore import rates
from fedcore.algorithms.descriptions import describe, is_same_rate
from fedcore.errors import RangeError
from fedcore.server.limits import LIMITS
from fedcore.server.round import LOGGER
from fedcore.server.settings import RATES, Settings
from fedcore.server.state import State


def change(state: State, options: Mapping[str, Any]) -> None:
    """Change rates and limits in one transaction: see ``Server.change``."""
    changed, now = state.settings.changed(options), state.snapshot
    after = now._replace(changed={**now.changed, **changed.shown(options)})
    if "lr" in options:
        after = after._replace(past={})  # clients that started from these models trained at the old rate
    state.change(changed, after)


def change_on_loading(
    state: State, saved: Mapping[str, Any], given: Mapping[str, Any], limits: Mapping[str, Any]
) -> None:
    """Change the rates and limits that ``Server.load`` is given and that differ from the folder's, with a warning.

    Args:
        saved: the settings as the folder has them.
        given, limits: arguments of ``Server.load``.

    Raises:
        UnknownNameError, RangeError: as ``Server.change``.
    """
    if options := changes_of(state.settings, saved, given, limits):
        change(state, options)
        warn_of_changes(state.store.path, state.settings.shown(options))


def warn_of_changes(path: object, changed: Mapping[str, Any]) -> None:
    """Log a warning that names the options that ``Server.load`` changed, in case it was a mistake."""
    listed = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    LOGGER.warning("%s: the loaded server changed these options of the saved one: %s", path or "server", listed)


def require_own_rates(changed: Settings, options: Iterable[str]) -> None:
    """Refuse to change a rate to the caller's own code, which shards cannot load after a crash.

    Raises:
        RangeError: it is.
    """
    for name in set(RATES).intersection(options):
        rate = getattr(changed, name)
        said = describe(name, rate)
        if said is not None and said["name"] not in rates.REGISTRY.own:
            raise RangeError(f"{name}: expected a number or one of fedcore.rates, got {rate!r}")


def changes_of(
    settings: Settings, saved: Mapping[str, Any], given: Mapping[str, Any], limits: Mapping[str, Any]
) -> dict[str, Any]:
    """The given rates and limits that differ from a folder's.

    Args:
        settings, saved: what ``Settings.from_state`` made, and of what.
        given: the arguments of ``Server.load``; a rate of None is the saved one.

    Raises:
        UnknownNameError, RangeError: a limit is not what ``Server.change`` takes.
    """
    next_rates = saved.get("next_rates", {})
    round = next_rates.get("round", 0)
    had, wanted = settings.shown(LIMITS), settings.changed(limits).shown(limits)
    return {
        name: given[name]
        for name in RATES
        if given[name] is not None and not is_same_rate(name, saved[name], given[name], next_rates.get(name), round)
    } | {name: value for name, value in wanted.items() if value != had[name]}
