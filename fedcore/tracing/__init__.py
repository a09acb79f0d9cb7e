"""Traces: where the time and the bytes of rounds go."""

from fedcore.tracing.profile import profile
from fedcore.tracing.recording import Recorded
from fedcore.tracing.spans import absorb, longest_timeline
from fedcore.tracing.totals import PhaseTime, RoundTime
from fedcore.tracing.trace import Trace, trace

__all__ = ["PhaseTime", "Recorded", "RoundTime", "Trace", "absorb", "longest_timeline", "profile", "trace"]
