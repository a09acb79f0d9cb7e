"""What an adapter says in its framework's log of the replies that a round refused."""

from fedcore.server import RoundReport, refusal_summary

NAMED = 5
"""Clients that are named in the line; all are in the report."""


def refusal_line(report: RoundReport) -> str | None:
    """How many replies a round refused, whose, and why, in one line however many they are; None if there were none.

    >>> refusal_line(RoundReport(3, heard=("a",), refused=(("b", "steps: got None"), ("c", "steps: got None"))))
    "round 3: refused 2 ('b', 'c') and heard 1: 2 x steps: got None"
    """
    if not report.refused:
        return None
    whose = [repr(client) for client, _ in report.refused[:NAMED]] + ["..."] * (len(report.refused) > NAMED)
    heard = f"heard {len(report.heard)}" if report.heard else "HEARD NOBODY"
    counts = f"refused {len(report.refused)} ({', '.join(whose)}) and {heard}"
    return f"round {report.round}: {counts}: {refusal_summary(report.refused)}"
