"""The numbers that a client says of its work, held against what it was asked."""

import math
from operator import index

from fedcore.arguments import is_whole, real, shown, whole
from fedcore.errors import RangeError
from fedcore.rates import Rate, rate_at, rate_of_steps
from fedcore.server.limits import Limits
from fedcore.server.update import Update, reads_sent

EXACT = 1e-6
"""How far a rate may be from the one that was sent, relative to it: it may have travelled as a float32."""


@reads_sent
def check_claims(update: Update, limits: Limits, rounds: range) -> Update:
    """The update with plain numbers, once its steps, examples and round can be believed.

    Args:
        rounds: those whose replies count, the open one last.

    Raises:
        RangeError: one cannot.
    """
    steps = whole("steps", update.steps, 1, limits.steps)
    examples = None
    if update.examples is not None:
        examples = real("examples", update.examples, f"(0, {limits.examples}]")
    if update.round is not None and not is_whole(update.round, rounds[0], rounds[-1]):
        earlier = f", or one since {rounds[0]}" if len(rounds) > 1 else ""
        raise RangeError(f"round: expected {rounds[-1]}, the open one{earlier}, got {shown(update.round)}")
    round = None if update.round is None else index(update.round)
    return update._replace(steps=steps, examples=examples, round=round, count=index(update.count))


class SentRates:
    """The rates that clients were sent, which their replies are held against.

    Args:
        rate: the server's.
        limits: whether clients may have their own, and up to which.
    """

    def __init__(self, rate: Rate, limits: Limits) -> None:
        self._rate, self._limits = rate, limits
        self._sums: dict[int, list[float]] = {}  # by round, of the rates of its first 0, 1, 2, ... steps

    def sent(self, round: int) -> float:
        """eta of that round, of its first step."""
        return rate_at(self._rate, round)

    @reads_sent
    def read(self, update: Update, started: int) -> float:
        """eta_i of an update whose steps are checked: the rate that was sent in the round ``started``, or its own.

        Where the rate changes from step to step, a client says the mean of its steps' rates, or that it stayed at the
        first one's.

        Raises:
            RangeError: it says another one than it was sent, and may not.

        Cost: where rates change, as many calls of the rate as the longest claim of the round has steps, once a round.
        """
        sent, said = self.sent(started), update.lr
        if said is None:
            return sent
        most = self._limits.lr if self._limits.own_rates else max(self._limits.lr, 2 * sent)
        rate = real("lr", said, f"(0, {most!r}]")
        if self._limits.own_rates:
            return rate
        if _is_near(rate, sent):
            return sent
        if _is_near(rate, mean := self._mean(started, int(update.steps))):
            return mean
        due = {sent, mean}
        rates = " or ".join(f"{one:g}" for one in sorted(due))
        raise RangeError(
            f"lr: expected {rates}, as it was sent, got {shown(said)}: a server whose clients have rates of their own "
            "needs own_rates=True"
        )

    def _mean(self, round: int, steps: int) -> float:
        """The mean rate of a round's first steps."""
        of_step = rate_of_steps(self._rate, round)
        if of_step is None:
            return self.sent(round)
        sums = self._sums.setdefault(round, [0.0])
        try:
            while len(sums) <= steps:
                sums.append(sums[-1] + of_step(len(sums) - 1))
        except (LookupError, ArithmeticError, ValueError) as error:  # FedcoreErrors among them: a claim of too many
            raise RangeError(f"steps: expected as many as the rate has values for, got {steps}: {error}") from None
        return sums[steps] / steps


def _is_near(said: float, due: float) -> bool:
    return abs(said - due) <= EXACT * due


def check_distance(lr: float, steps: int, said: object) -> float:
    """eta_i K_i, of which the server takes the inverse.

    Raises:
        RangeError: it has none that is finite.
    """
    distance = lr * steps
    if not 0 < distance < math.inf or not 1 / distance < math.inf:
        raise RangeError(f"lr: expected a rate whose inverse is finite, got {shown(said)}")
    return distance
