"""A running server's figures for Prometheus, by its standard client library."""

from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

from fedcore.callbacks.figures import of_report
from fedcore.errors import MissingDependencyError
from fedcore.server import RoundReport

TOTALS = {
    "heard": ("clients_heard", "Updates that counted, of all rounds."),
    "refused": ("clients_refused", "Updates that were refused, of all rounds."),
    "steps": ("local_steps", "Local steps of the clients that were heard."),
    "bytes": ("received_bytes", "Bytes that clients sent."),
    "seconds": ("server_seconds", "Seconds spent in the server, the clients' own not counted."),
}
"""Figures that are summed over rounds: counters, to whose names the client library adds ``_total``."""
LATEST = {
    "heard": ("round_clients_heard", "Updates that counted in the last round."),
    "refused": ("round_clients_refused", "Updates that were refused in the last round."),
    "awaited": ("clients_awaited", "Clients that were never heard and for which x waits."),
    "gamma": ("gamma", "The server's step of the last round; 0 where the model stayed."),
    "norm": ("update_norm", "Mean length of the clients' mean gradients in the last round."),
    "largest_norm": ("update_norm_largest", "The largest of these lengths."),
    "diversity": ("gradient_diversity", "The weighted gradient diversity of the last round."),
    "staleness": ("staleness_rounds", "Mean rounds since the rows of the clients heard were written."),
    "correction_norm": ("correction_norm", "The length of what the method adds to the cohort's mean."),
}
"""Figures of the last round: gauges, NaN where a round has none."""

_MADE: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class Prometheus:
    """Metrics of a server's rounds, as an ``on_report``; the client library makes the text and serves it.

    No metric has a client's id as a label: who lies could make as many as it likes.

    Args:
        server: the value of the label ``server``, which tells several servers of one process apart.
        registry: of ``prometheus_client``; None for its global one.

    Raises:
        MissingDependencyError: prometheus_client is not installed.

    Example:

        prometheus_client.start_http_server(9100, addr="127.0.0.1")
        server = fedcore.Server(..., on_report=Prometheus())
    """

    def __init__(self, server: str = "server", *, registry: Any = None) -> None:
        if find_spec("prometheus_client") is None:
            raise MissingDependencyError.of("Prometheus", "prometheus_client", extra="prometheus")
        import prometheus_client as client

        registry = client.REGISTRY if registry is None else registry

        known = _MADE.setdefault(registry, {})

        def made(kind: Any, name: str, about: str) -> Any:
            """The metric of that name, which another server of the process may have made."""
            if name not in known:
                known[name] = kind(f"fedcore_{name}", about, ["server"], registry=registry)
            return known[name].labels(server)

        self._totals = {figure: made(client.Counter, *told) for figure, told in TOTALS.items()}
        self._latest = {figure: made(client.Gauge, *told) for figure, told in LATEST.items()}
        self._rounds = made(client.Counter, "rounds", "Rounds that counted since the process began.")
        self._round = made(client.Gauge, "last_round", "The number of the last round that counted, from 0.")
        self._ended = made(client.Gauge, "last_round_timestamp_seconds", "When the last round counted, in Unix time.")

    def __call__(self, report: RoundReport) -> None:
        """Take in a round."""
        figures = of_report(report)
        for name, counter in self._totals.items():
            counter.inc(figures.get(name, 0.0))
        for name, gauge in self._latest.items():
            gauge.set(figures.get(name, float("nan")))
        self._rounds.inc()
        self._round.set(report.round)
        self._ended.set_to_current_time()
