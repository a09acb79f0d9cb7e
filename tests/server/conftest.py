"""A server's folder lies in memory: what a disk does to one is a matter of the store's tests."""

import pytest


@pytest.fixture
def tmp_path(folder_in_memory):
    """As pytest's own, on tmpfs."""
    return folder_in_memory
