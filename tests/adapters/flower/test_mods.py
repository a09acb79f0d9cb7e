"""Flower's mods and privacy wrappers: the table of docs/flower.md."""

from unittest.mock import patch

import pytest
from flwr.client.mod import secagg_mod, secaggplus_mod
from flwr.clientapp import ClientApp, mod

from tests.adapters.flower import federation
from tests.adapters.flower.local_grid import LocalGrid


def accepted(method, mods, **options):
    """The accepted clients of each of two rounds, and the reason of the first failure."""
    dataset, parts = federation.make_data(3)
    with patch.object(federation, "ClientApp", lambda: ClientApp(mods=mods)):
        apps = [federation.make_app(client, dataset, parts) for client in range(3)]
    strategy = federation.make_strategy(method, **options)
    grid = LocalGrid({17 + client: (app, {}) for client, app in enumerate(apps)})
    strategy.start(grid, federation.initial_arrays(), 2, timeout=5)
    failures = [failure.reason for failure in strategy.failures] or [""]
    return [len(report.accepted) for report in strategy.reports], failures[0]


def test_local_noise_works_with_plain_steps():
    noise = mod.LocalDpMod(clipping_norm=1.0, sensitivity=1e-3, epsilon=10.0, delta=1e-5)
    for method in ("FedProx", "MIFA", "MimiC"):
        assert accepted(method, [noise]) == ([3, 3], ""), method


@pytest.mark.parametrize("method", ["SCAFFOLD", "FedAvgM"])
def test_local_noise_takes_no_message_with_a_second_vector(method):
    found, reason = accepted(method, [mod.LocalDpMod(1.0, 1e-3, 10.0, 1e-5)])
    assert found == [0, 0]
    assert "exactly one ArrayRecord" in reason


def test_the_size_mod_cannot_count_instructions():
    found, reason = accepted("MIFA", [mod.message_size_mod])
    assert found == [0, 0]
    assert "Config values" in reason


@pytest.mark.parametrize("masking", [secagg_mod, secaggplus_mod])
@pytest.mark.parametrize("method", ["FedAvg", "MIFA"])
def test_masks_need_the_older_api_so_no_masked_update_becomes_a_row(method, masking):
    found, reason = accepted(method, [masking])
    assert found == [0, 0]
    assert "secaggplus_configs" in reason
