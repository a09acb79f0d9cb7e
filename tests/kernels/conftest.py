"""With FEDCORE_TESTS_ON=cuda, the tests of this folder copy their arrays to a device (`make test-device`)."""

import os

# Tests without a meaning on a device, or with a faster equivalent; the emulation is slow.
LEFT_OUT = {
    "unusual arrays in host memory": ["test_changing_lists.py", "test_hostile_arrays.py", "test_torch_export.py"],
    "separate processes": ["test_determinism.py"],
    "thousands of clients or calls": [
        "test_more_terms_than_a_word_holds",
        "test_stochastic_rounding_is_unbiased",
        "test_the_sum_follows_the_rows_for_ten_thousand_exchanges",
    ],
    "larger than the host's caches": ["test_rows_too_many_for_the_caches_have_the_bits_of_the_oracle"],
    "a million elements": [
        "test_flush_to_zero_of_the_caller_does_not_change_bits",
        "test_stochastic_rows_are_unbiased",
        "test_random_bits_of_rows_seeds_and_neighbours_are_uncorrelated",
    ],
}
MOST = 20_000  # elements: more than a piece of 16,384, of which sums of squares are made

if os.environ.get("FEDCORE_TESTS_ON") == "cuda":
    from tests.devices import fake_driver

    if not fake_driver.REAL:
        fake_driver.fake_driver()

    from tests.devices.mirrored import mirror_all

    COUNTS = mirror_all()

    def is_left_out(item):
        names = {name for some in LEFT_OUT.values() for name in some}
        if item.path.parent.name != "kernels":
            return False
        large = hasattr(item, "callspec") and item.callspec.params.get("n", 0) > MOST
        return large or item.path.name in names or item.originalname in names

    def pytest_collection_modifyitems(config, items):
        """Deselect tests without a meaning on a device."""
        config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
        items[:] = [item for item in items if not is_left_out(item)]

    def pytest_unconfigure():
        """Check that the kernels ran on the device."""
        assert COUNTS.device >= COUNTS.host, f"{COUNTS.host} calls of kernels came to the host, {COUNTS.device} did not"
