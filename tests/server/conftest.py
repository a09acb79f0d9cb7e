"""Folders of these tests are in memory; tests/store covers disks."""

import pytest


@pytest.fixture
def tmp_path(folder_in_memory):
    """pytest's folder, on tmpfs."""
    return folder_in_memory
