"""Whom a method waits for that leaves x alone until each client was heard, told once every change."""

from itertools import islice
from logging import Logger

from fedcore.store import ClientStore

TOLD = 5
"""Clients that a line names."""


class Waiting:
    """What was told last of the clients that are waited for."""

    def __init__(self) -> None:
        self._last = (0, 0)
        self._warned = False

    def tell(self, awaited: int, store: ClientStore, logger: Logger) -> None:
        """Log who is waited for, if that has changed; and once as a warning, if a round that heard others left it so.

        Args:
            awaited: how many clients have no row, for which x waits; 0 where it does not.

        Cost: a look at the registry up to the fifth client without a row, where it has changed.
        """
        now = awaited, len(store.registry)
        changed, self._last = now != self._last, now
        if not awaited or (self._warned and not changed):
            return
        self._warned = not changed
        missing = list(islice((client for client in store.registry if store.round_of(client) is None), TOLD))
        others = f", and {awaited - len(missing)} others" if awaited > len(missing) else ""
        told = f"x stays, waiting for {awaited} of {now[1]} clients: {', '.join(map(repr, missing))}{others}"
        if changed:
            logger.info("%s", told)
        else:
            logger.warning("%s: wait=False starts without them, depart() lets one go", told)
