"""Refused updates in short, whatever the words of their reasons."""

import re


def rejected_arguments(report):
    """Pairs of a refused client and the argument that its reason begins with."""
    return [(client, re.match(r"[\w.]+", reason)[0]) for client, reason in report.rejected]
