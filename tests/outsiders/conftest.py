"""The house is imported by the tests that put it on the path, and not while doctests are looked for."""

collect_ignore = ["house"]
