"""Tests import the package ``mine`` when its folder is on the path; doctests must not."""

collect_ignore = ["house"]
