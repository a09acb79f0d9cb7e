"""Devices that do a part of their local steps, as a trace of their load or bandwidth says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.errors import RangeError, UnknownNameError
from fedcore.participation.active import Active
from fedcore.participation.pattern import Participation
from fedcore.participation.traces import Law, Recorded, read_traces
from fedcore.randomness import generator
from fedcore.sampling import with_replacement


class Trace(Participation):
    """Each device follows a trace, and each round does the share of its E steps that the trace says.

    A device whose share is 0 does not take part in that round.

    Args:
        clients: N.
        traces: what ``read_traces`` takes (a file's path, or ``"flexible"``), or the traces themselves.
        first: |T|: only the first so many traces are used; None is all of them.
        assign: "random" gives each device one of the traces with equal probability, once; "order" gives device i
            trace i mod |T|.
        draw: "sample" draws each round's share from the trace, independently; "replay" takes row t of a recorded
            trace in round t, and begins again after its last row. With "order" and as many traces as clients, a file
            is replayed as it was measured, client by client.
        among, seed, first_round: see ``Participation``. Shares that ``among`` gives are multiplied.

    Attributes:
        traces: those in use.
        assigned: int64[N], the trace of each device, read-only.

    Raises:
        RangeError, UnknownNameError, MissingDataError: an argument is not what is said above.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021: eight traces,
    devices assigned at random to the first |T|. Their standard deviations are the paper's, their means stand-ins.

    >>> pattern = Trace(4, first=5)
    >>> pattern.assigned
    array([4, 4, 0, 3])
    >>> pattern.active(3).steps(10)
    array([ 6,  5, 10,  5])
    """

    def __init__(
        self,
        clients: int,
        traces: str | Path | Sequence[Law] = "flexible",
        *,
        first: int | None = None,
        assign: Literal["random", "order"] = "random",
        draw: Literal["sample", "replay"] = "sample",
        among: Participation | None = None,
        seed: int = 0,
        first_round: Literal["all"] | None = None,
    ) -> None:
        super().__init__(clients, among=among, seed=seed, first_round=first_round)
        known = read_traces(traces) if isinstance(traces, str | Path) else traces
        if not isinstance(known, Sequence) or not known or not all(isinstance(trace, Law) for trace in known):
            raise RangeError(f"traces: expected at least one trace, and nothing else, got {traces!r}")
        self.traces = tuple(known)[: len(known) if first is None else whole("first", first, 1, len(known))]
        if assign not in ("random", "order"):
            raise UnknownNameError.of("assign", assign, ["random", "order"])
        if draw not in ("sample", "replay"):
            raise UnknownNameError.of("draw", draw, ["sample", "replay"])
        generated = [trace.name for trace in self.traces if not isinstance(trace, Recorded)]
        if draw == "replay" and generated:
            raise RangeError(f"draw: expected 'sample', since trace {generated[0]!r} is not recorded, got 'replay'")
        self.draw = draw
        self.assigned = np.arange(self.clients) % len(self.traces)
        if assign == "random":
            purpose = self._purpose("traces")
            self.assigned = with_replacement(
                np.ones(len(self.traces)), self.clients, seed=self.seed, round=0, purpose=purpose
            )
        self.assigned.flags.writeable = False

    def shares(self, round: int) -> npt.NDArray[np.float64]:
        """The share of E that each device would do in a round, float64[N] in [0, 1]."""
        random = generator(self.seed, self._purpose("shares"), round=round)
        shares = np.empty(self.clients)
        for number, trace in enumerate(self.traces):
            its = self.assigned == number
            if self.draw == "replay" and isinstance(trace, Recorded):
                shares[its] = trace.shares[round % len(trace.shares)]
            else:
                shares[its] = trace.draw(random, int(its.sum()))
        return shares

    def _choose(self, round: int, candidates: Active) -> Active:
        return candidates.working(self.shares(round)[candidates.clients])
