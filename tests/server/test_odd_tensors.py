"""Tensors that are no plain memory are refused like anything else that a client sent."""

import warnings

import numpy as np
import pytest
import torch

from fedcore import Server, Update

n = 5


def sparse_and_nested():
    yield torch.zeros(n).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that nested tensors are a prototype
        yield torch.nested.nested_tensor([torch.zeros(n)])
    yield torch.zeros(n, 1).to_sparse_csr()


@pytest.mark.parametrize("name", ["FedAvg", "MIFA", "MimiC"])
@pytest.mark.parametrize("form", range(3))
@pytest.mark.parametrize("way", ["add", "add_all", "round"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_and_a_nested_tensor_are_refused_by_name(name, form, way):
    server = Server(name, np.arange(n, dtype=np.float32), clients=2, lr=0.1)
    odd, good = list(sparse_and_nested())[form], server.x + np.float32(1)
    if way == "round":
        report = server.round([Update(0, odd, 1), Update(1, good, 1)])
    else:
        with server.open_round() as round:
            if way == "add":
                round.add(0, odd, steps=1)
                round.add(1, good, steps=1)
            else:
                round.add_all([Update(0, odd, 1), Update(1, good, 1)])
        report = round.report
    assert report.heard == (1,)
    [(client, why)] = report.refused
    assert client == 0
    assert why.startswith("model: expected float32[5]")


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_so_are_those_in_a_model_by_name():
    for odd in sparse_and_nested():
        server = Server("MIFA", {"a": np.zeros(n, np.float32)}, clients=2, lr=0.1)
        report = server.round([Update(0, {"a": odd}, 1), Update(1, {"a": np.ones(n, np.float32)}, 1)])
        assert report.heard == (1,)
        assert report.refused[0][1].startswith("a: expected ")
