"""Rounds of every kind, to be traced."""

import inspect

import numpy as np

from fedcore import Network, Server, Update
from fedcore.tracing.functions import FUNCTIONS
from fedcore.tracing.recording import spans_of

N = 1000


def a_server(method="MIFA", clients=4, **options):
    return Server(method, np.zeros(N, np.float32), clients=clients, lr=0.1, **options)


def updates(server, count=3):
    return [Update(client, server.x + 1 + client, steps=1) for client in range(count)]


def a_network(nodes=3):
    W = np.full((nodes, nodes), 1 / nodes)
    return Network([np.zeros(N, np.float32)] * nodes, W, lr=0.1)


def calls(trace):
    """Calls by phase."""
    return {one.phase: one.calls for one in trace.phases if one.calls}


def spans(trace):
    """The spans of a trace's timeline."""
    return [span for part in trace._recording.parts() for span in spans_of(part)]


def as_they_are():
    """The functions of all phases whose modules are imported, as they are found now."""
    return {
        function.place: vars(owner)[function.name] for function in FUNCTIONS if (owner := function.owner()) is not None
    }


def is_plain(function):
    """Whether it is a function that nobody has wrapped for a trace."""
    return inspect.isroutine(function) and "tracing" not in function.__code__.co_filename
