"""The statements of docs/methods.md hold for every method."""

import re
from pathlib import Path

import numpy as np
import pytest

from fedcore import Server, Update, algorithms
from fedcore.algorithms import REGISTRY, optimizers
from fedcore.errors import RangeError, UnknownNameError
from tests.server.rounds import METHODS, N, go_on, made, n

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


def named_in(sentence):
    """The methods in the page's sentence with this beginning."""
    found = re.search(rf"^- {re.escape(sentence)}(.*?)(?:\.\s|,\s+which)", PAGE, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`(\w+)`", found[1])) & REGISTRY.keys()


NOT_LATE = named_in("Late updates (`RoundPolicy(max_staleness=)`) count for every method except")
NO_SERVER_RATE = named_in("`server_lr` works with every method except")
ON_CLIENTS = named_in('With `placement="client"`,')


def test_the_page_is_read():
    assert NOT_LATE
    assert ON_CLIENTS
    assert NOT_LATE != REGISTRY.keys() != ON_CLIENTS


@pytest.mark.parametrize("method", [method for method in METHODS if method != "FedAWE"])  # it refuses max_staleness
def test_late_updates_count_for_the_methods_on_the_page(method):
    server = made(method, max_staleness=1)
    go_on(server, 1)
    server.round([])
    control = np.ones(n, np.float32) if server.algorithm.second_vector else None
    report = server.round([Update(0, server.x + np.float32(1), 1, round=1, control=control)])
    taken = type(server.algorithm).__name__ not in NOT_LATE
    assert report.accepted == ((0,) if taken else ())
    assert taken or report.rejected[0][1].startswith("round")


@pytest.mark.parametrize("name", REGISTRY)
def test_rows_are_on_the_clients_for_the_methods_on_the_page(name):
    if name not in ON_CLIENTS:
        with pytest.raises(UnknownNameError, match=rf"option of {name}\b.*'placement'"):
            algorithms.named(name, placement="client")
        return
    server = Server(np.zeros(n, np.float32), algorithms.named(name, placement="client"), clients=N, lr=0.1)
    go_on(server, 2)
    assert server.broadcast([0]).keeps_row
    assert len(server.store) == 0
    with pytest.raises(RangeError, match=r"^client\b"):
        server.remove_client(0)


@pytest.mark.parametrize("method", METHODS)
def test_any_method_takes_an_optimizer_and_changing_clients(method):
    server = made(method, optimizer=optimizers.Adam())
    go_on(server, 2)
    server.add_clients({"new": 3})
    if server.algorithm.placement == "server":
        server.remove_client(0)
    control = np.ones(n, np.float32) if server.algorithm.second_vector else None
    report = server.round([Update("new", server.x + np.float32(1), 1, control=control)])
    assert report.accepted == ("new",)


@pytest.mark.parametrize("method", [method for method in METHODS if method in REGISTRY])
def test_server_rates_work_with_the_methods_on_the_page(method):
    algorithm = made(method).algorithm
    assert algorithm.takes_server_rate == (type(algorithm).__name__ not in NO_SERVER_RATE)
