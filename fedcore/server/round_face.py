"""The face of an open round, whoever folds what comes into it."""

from abc import abstractmethod
from typing import Any, Self

from fedcore.arguments import due_whole, is_whole, real
from fedcore.clients import ClientId, Registry
from fedcore.errors import RangeError, RoundError
from fedcore.representation import Represented
from fedcore.server.report import RoundReport
from fedcore.server.settings import Settings
from fedcore.server.update import Update
from fedcore.server.weighing import require_weighing

SECOND = "update: expected one a round, got a second one: the first one counts"


class RoundFace(Represented):
    """An open round, as a context manager, and the checks of what its caller says."""

    report: RoundReport | None
    is_open: bool
    _settings: Settings
    _known: set[ClientId]
    _turn: Any  # these three as ``call_guard`` has them
    _inside: Any
    _is_ending: bool

    @abstractmethod
    def add_update(self, update: Update) -> bool:
        """Fold one client's update in: ``add`` for an Update."""

    @abstractmethod
    def finish(self) -> RoundReport:
        """Take the server's step and close the round."""

    @abstractmethod
    def _abort(self) -> None:
        """Close the round, whose turn it is."""

    @abstractmethod
    def _fold_held(self) -> None:
        """Fold what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self.is_open:
            self.finish()

    def add(
        self,
        client: ClientId,
        model: Any = None,
        *,
        steps: int,
        examples: float | None = None,
        lr: float | None = None,
        control: Any = None,
        count: int = 1,
        round: int | None = None,
        delta: Any = None,
        gradient: Any = None,
        keep: bool = False,
        weight: float | None = None,
    ) -> bool:
        """Fold one client's update in; the arguments are those of ``Update``, one of model, delta and gradient.

        What a client sent (the vector, steps, examples, lr, control, round) is rejected into the report if it is wrong,
        and the round goes on. A client that was rejected may try again. The second update of a client is rejected, and
        so is one of a client that an edge's partial sum has counted.

        Returns:
            Whether the update is accepted. One that the round holds, to fold it with others, can still be rejected when
            it is folded: ``report.refused`` has the last word.

        Raises:
            RoundError: the round is closed.
            UnknownClientError: no such client is registered.
            RangeError: more than one of model, delta and gradient is given; or ``count`` is not an integer >= 1, or
                not 1 where the method hears a client once a round; or ``weight`` is not a number >= 0, or the method
                does not weigh by examples.

        Cost: what ``kernels.accumulate`` or ``kernels.exchange`` costs for one row, or 1/fold of a pass over ``fold``
            rows where updates are held.
        """
        sent = model, steps, examples, lr, control, count, round, delta, gradient, keep, weight
        return self.add_update(Update(client, *sent))

    def abort(self) -> None:
        """Close the round and leave the server as it was before ``open_round``; a closed round stays as it is.

        The handler of a signal may call it too: in the middle of ``add`` the round is aborted when that is done.
        """
        with self._turn:
            if self._inside.locked():
                self._is_ending = True
            else:
                self._abort()

    def _require_open(self) -> None:
        if not self.is_open:
            raise RoundError("round: expected an open one, got one that is finished or aborted")

    def _is_second(self, client: ClientId) -> bool:
        """Tell whether the round has an update of the client."""
        if client in self._known:
            self._fold_held()  # if the first one is held and turns out to be no update, this one is not the second
        return client in self._known

    def _check(self, update: Update, registry: Registry) -> ClientId:
        """The client's id; raises for what is the caller's mistake, not the client's."""
        client = registry.check(update.client)
        update.check_one()
        if update.weight is not None:
            require_weighing(self._settings.algorithm, "weight")
            real("weight", update.weight, "[0, inf)")
        most = 1 if self._settings.algorithm.hears_once else 2**31
        if not is_whole(update.count, 1, most):
            due = due_whole(1, most) if most > 1 else "1, since the method hears a client once a round"
            raise RangeError(f"count: expected {due}, got {update.count!r}")
        return client
