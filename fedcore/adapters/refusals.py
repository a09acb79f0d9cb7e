"""What an adapter says in its framework's log of the replies that a round refused."""

from collections.abc import Sequence

from fedcore.server import RoundReport, refusal_summary
from fedcore.store import ClientId

NAMED = 5
"""Clients that are named in the line; all are in the report."""


def refusals(refused: Sequence[tuple[ClientId, str]], heard: int) -> str:
    """How many replies were refused beside those heard, whose, and why."""
    whose = [repr(client) for client, _ in refused[:NAMED]] + ["..."] * (len(refused) > NAMED)
    others = f"heard {heard}" if heard else "HEARD NOBODY"
    return f"refused {len(refused)} ({', '.join(whose)}) and {others}: {refusal_summary(refused)}"


def refusal_line(report: RoundReport) -> str | None:
    """How many replies a round refused, whose, and why, in one line however many they are; None if there were none.

    >>> refusal_line(RoundReport(3, heard=("a",), refused=(("b", "steps: got None"), ("c", "steps: got None"))))
    "round 3: refused 2 ('b', 'c') and heard 1: 2 x steps: got None"
    """
    if not report.refused:
        return None
    return f"round {report.round}: {refusals(report.refused, len(report.heard))}"
