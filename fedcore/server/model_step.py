"""The model's step at the end of a round: x', v, T' and the moments, out of the round's sums."""

import math
from typing import Any

import numpy as np

from fedcore import kernels
from fedcore.aggregation import Replies, Result, Squares, Whole
from fedcore.algorithms import Linear, Step
from fedcore.algorithms.algorithm import is_whole_sum
from fedcore.errors import AlgorithmError, DivergedError
from fedcore.kernels import ExactSum
from fedcore.memory import Recycled, copied, empty, freeze
from fedcore.server.buffers import Buffers
from fedcore.server.rounded_model import as_sent
from fedcore.server.settings import Settings
from fedcore.server.snapshot import Snapshot
from fedcore.server.update import first_not_finite
from fedcore.typing import F32, F64


class ModelStep:
    """The arithmetic of a round's end: vectors of the next snapshot from those of now, element by element.

    It knows nothing of clients or rows, so that it may as well be done where the vectors, or a slice of them, lie.

    Attributes:
        vectors: the memory of x.
        directions: the memory of v where rounds to come still refer to it.
        spare_v, spare_total, spare_exact: float32[n_parameters], float64[n_parameters] (None where the method keeps no
            total) and n_parameters exact elements (None where it keeps no exact one), which the next step writes: who
            believes it gives those of before back.

    Cost: 4 n to 16 n bytes, allocated once and used again every round.
    """

    def __init__(self, settings: Settings, buffers: Buffers, whole: Whole) -> None:
        n, p, device = settings.layout.n, settings.layout.n_parameters, settings.device
        self._settings, self._buffers, self._whole = settings, buffers, whole
        self.vectors, self._moments = Recycled(n, device=device), Recycled(p, most=2, device=device)
        self.directions = Recycled(p, device=device)
        self.spare_v: F32 = empty(p, device=device)
        self.spare_total: F64 | None = empty(p, np.float64, device=device) if settings.algorithm.keeps_total else None
        self.spare_exact = ExactSum.empty(p) if settings.is_exact and settings.algorithm.keeps_total else None
        self._buffer_v: F32 = empty(n - p, device=device)

    def take(
        self, now: Snapshot, result: Result, step: Step, gamma: float, heard: Replies
    ) -> tuple[dict[str, Any], float]:
        """Take the step; nothing of now changes.

        Args:
            gamma: 0 where x stays.
            heard: the cohort, for the message.

        Returns:
            The fields of the next snapshot that are new, and |v|^2.

        Raises:
            DivergedError: x would become infinite or NaN.
        """
        p, optimizer = self._settings.layout.n_parameters, self._settings.optimizer
        x = self.vectors.take()  # never in place: a client may still train on the x of this round
        room = self._whole.room(p, 2)
        squares = kernels.server_step(
            result.A,
            now.total,
            now.x[:p],
            v_of=step.v,
            total_of=step.T,
            gamma=gamma,
            momentum=now.momentum if step.v.g or step.T.g else None,
            control=result.B,
            v=self.spare_v,
            total_out=self.spare_total,
            x_out=x[:p],
            partials=room,
        )
        x_square = squares[1]
        if self.spare_exact is not None:
            self._follow(now, result, step.T, self.spare_exact)
        moments = now.moments
        if optimizer is not None and gamma:
            moments = tuple(self._moments.take() for _ in now.moments)
            x_square = optimizer.turn(
                self.spare_v, now.moments, now.x[:p], gamma=gamma, moments_out=moments, x_out=x[:p]
            )
        if p < len(x):
            x_square += self._average_buffers(now, x, result)
            self._buffers.clip(x)
        ahead = now.ahead
        if gamma:
            ahead = self._ahead(now, x, step.lookahead) if step.lookahead else None
        if ahead is not None:
            x_square += kernels.squared_norms([ahead])[0]
        v_square = float(self._whole.add(Squares(np.array(squares), room))[0][0])
        past = self._past_dtype(x if ahead is None else ahead) if gamma else None
        if not self._whole.agree(math.isfinite(x_square) and past is None):
            raise DivergedError(
                f"round {now.round_number}: the step gamma = {gamma:g} along v, |v| = {v_square**0.5:g}, would make "
                f"{past or 'x'} infinite or NaN; x stays, lower the rates{heard.longest()}"
            )
        freeze(x)
        made: dict[str, Any] = {"x": x if gamma else now.x, "ahead": ahead, "moments": moments}
        kept = {"momentum": self.spare_v, "total": self.spare_total, "exact_total": self.spare_exact}
        return made | kept, v_square

    def _past_dtype(self, x: F32) -> str | None:
        """The name of a tensor that clients could not be sent, for a number would become infinite in its dtype."""
        sent = as_sent(self._settings.layout, x)
        return None if sent is x or kernels.all_finite([sent])[0] else first_not_finite(sent, self._settings.layout)

    def _follow(self, now: Snapshot, result: Result, form: Linear, to: ExactSum) -> None:
        """T' as integers, and what it reads as.

        Raises:
            DivergedError: it would leave an exact sum's range.
            AlgorithmError: the method's coefficients are not whole.
        """
        if not is_whole_sum(form):
            raise AlgorithmError(
                f"{self._settings.algorithm}: expected a total with whole coefficients, got {form}: leave out "
                'accumulate="exact"'
            )
        assert result.exact is not None
        A, B = result.exact
        given = [(now.exact_total, form.T), (A, form.A), (B, form.B), (self.spare_v, form.v)]
        terms = [(term, int(c)) for term, c in given if term is not None and c]
        if kernels.combine_exact([term for term, _ in terms], [c for _, c in terms], to) is None:
            raise DivergedError(
                f"round {now.round_number}: T would leave the range of exact sums, 2^52; lower the rates"
            )
        kernels.read_exact(to, self.spare_total)

    def _ahead(self, now: Snapshot, x: F32, lookahead: float) -> F32:
        """x' + lookahead (x' - x) of the parameters, and the buffers of x'."""
        p, ahead = self._settings.layout.n_parameters, copied(x)
        kernels.combine([x[:p], now.x[:p]], [1 + lookahead, -lookahead], ahead[:p])
        freeze(ahead)
        return ahead

    def _average_buffers(self, now: Snapshot, x: F32, result: Result) -> float:
        """The cohort's mean of the float buffers into the tail of x; returns its squared norm."""
        p = self._settings.layout.n_parameters
        _, square = kernels.server_step(
            result.buffers,
            None,
            now.x[p:],
            v_of=Linear(A=1 / result.buffer_weight if result.buffer_weight > 0 else 0.0),
            gamma=1.0,
            v=self._buffer_v,
            total_out=None,
            x_out=x[p:],
        )
        return square
