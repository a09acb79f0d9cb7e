"""The log of clients that a method waits for, which leaves x alone until each was heard: a line for every change."""

from logging import INFO, WARNING, Logger

from fedcore.store import ClientStore

TOLD = 5
"""Clients that a line names."""


class AwaitedClients:
    """The clients that are waited for, as they were told last."""

    def __init__(self) -> None:
        self._last = (0, 0)
        self._warned = False

    def tell(self, awaited: int, store: ClientStore, logger: Logger) -> None:
        """Log who is waited for, if that has changed; and once in all as a warning, if a round left it as it was.

        Args:
            awaited: how many clients have no row, for which x waits; 0 where it does not.

        Cost: where a line is logged, a pass over the clients' slots.
        """
        now = awaited, len(store.registry)
        changed, self._last = now != self._last, now
        warns = not changed and not self._warned
        if not awaited or not (changed or warns) or not logger.isEnabledFor(WARNING if warns else INFO):
            return
        self._warned |= warns
        missing = store.without_row(TOLD)
        others = f", and {awaited - len(missing)} others" if awaited > len(missing) else ""
        told = f"x stays, waiting for {awaited} of {now[1]} clients: {', '.join(map(repr, missing))}{others}"
        if changed:
            logger.info("%s", told)
        else:
            logger.warning("%s: wait=False starts without them, depart() lets one go", told)
