"""The core's native tests without a sanitizer: what ``make sanitize`` runs under ASan, UBSan and TSan."""

import os

from tests.native.build import native_tests, run, tool


def test_the_core_without_python():
    """At every level; arrays end at pages that nobody may read, and the code is what the package runs."""
    options = ["--parallel", len(os.sched_getaffinity(0)), "--output-on-failure", "--no-tests=error"]
    run(tool("ctest"), "--test-dir", native_tests(), *options)
