"""Tables and curves, made from record files alone."""

from fedcore.reports.report import Report, write_report

__all__ = ["Report", "write_report"]
