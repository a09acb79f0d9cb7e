"""Tables, plots and HTML reports of runs and sweeps, compared with the papers' results."""

from fedcore.sim.reports.report import Report, write_report
from fedcore.sim.reports.sweeps import Overview, is_sweep, tried, tuned, write_overview

__all__ = ["Overview", "Report", "is_sweep", "tried", "tuned", "write_overview", "write_report"]
