"""The lines in a framework's log about replies that a round refused, and about those that never came."""

from collections.abc import Sequence

from fedcore.clients import ClientId
from fedcore.server import RoundReport, refusal_summary

NAMED = 5
"""Clients that are named in the line; all are in the report."""


def refusals(refused: Sequence[tuple[ClientId, str]], heard: int) -> str:
    """Say how many replies were refused beside those heard, whose, and why."""
    others = f"heard {heard}" if heard else "HEARD NOBODY"
    return f"refused {len(refused)} ({_named([c for c, _ in refused])}) and {others}: {refusal_summary(refused)}"


def silence(clients: Sequence[ClientId]) -> str:
    """Say who was asked and did not answer.

    >>> silence([3, "b"])
    "no answer from 2 that were asked (3, 'b')"
    """
    return f"no answer from {len(clients)} that were asked ({_named(clients)})"


def _named(clients: Sequence[ClientId]) -> str:
    return ", ".join([repr(client) for client in clients[:NAMED]] + ["..."] * (len(clients) > NAMED))


def refusal_line(report: RoundReport) -> str | None:
    """Say how many replies a round refused, whose, and why, in one line however many they are; None if there were none.

    >>> refusal_line(RoundReport(3, heard=("a",), refused=(("b", "steps: got None"), ("c", "steps: got None"))))
    "round 3: refused 2 ('b', 'c') and heard 1: 2 x steps: got None"
    """
    if not report.refused:
        return None
    return f"round {report.round}: {refusals(report.refused, len(report.heard))}"
