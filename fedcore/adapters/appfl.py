"""fedcore's averaging methods as an aggregator of APPFL, loaded by its ``aggregator_path``. Needs appfl >= 1.12."""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from appfl.algorithm.aggregator import BaseAggregator
from appfl.misc.utils import create_instance_from_file

from fedcore.adapters.session import (
    add_reply,
    chain_of,
    is_begun,
    newcomers,
    open_server,
    options_of,
    rejection_line,
    with_plain_steps,
)
from fedcore.arguments import integral
from fedcore.errors import RangeError
from fedcore.options import Compute, Limits, Storage
from fedcore.server import Report, Server, Update


class Aggregator(BaseAggregator):  # type: ignore[misc, unused-ignore]
    """FedAvg, MIFA, MimiC, FlexibleFedAvg or LocalDescent under APPFL's server agent and its ``SyncScheduler``.

    The file that ``aggregator_path`` names holds one line, ``from fedcore.adapters.appfl import Aggregator``. A reply
    that cannot be believed is left out, by client and reason in ``reports`` and in the agent's log, and the round goes
    on. As in APPFL, all clients weigh the same; with ``client_weights_mode="sample_size"`` a client weighs as many
    examples as ``set_sample_size`` gave, and one without is rejected where others have some. A client's reply is the
    model, whole, and may come with its number of local steps, ``steps`` among the metadata of ``global_update``.

    Args:
        aggregator_configs: the agent's ``aggregator_kwargs``. ``model_path``, ``model_name``, ``model_kwargs``: as in
            its ``model_configs``, whose model it gives only to APPFL's own aggregators. ``algorithm``: one of
            ``fedcore.algorithms`` of plain local steps. ``lr``: their rate. ``steps``: K of a reply that does not
            report it (1), and the most that one may report, unless ``limits`` have ``max_steps``. ``clients``: the ids
            of all clients, whether or not they ever answer. Default: each from its first accepted answer. ``storage``,
            ``limits``, ``compute``: as for ``fedcore.Server``, or their fields as a mapping; with the path of a folder
            a later run goes on after the last finished round. ``aggregation``: names, and rules as mappings such as
            ``{"name": "RejectLong", "ratio": 20}``. Any more are arguments of ``fedcore.Server``.
        logger: the agent's.

    Attributes:
        server: the ``fedcore.Server``, once a client has answered.
        reports: the ``Report`` of each round.

    Raises:
        RangeError: the method's clients take no plain steps, or ``lr`` differs between the steps of a round.
    """

    def __init__(self, aggregator_configs: Mapping[str, Any], logger: Any = None) -> None:
        options: dict[str, Any] = {str(option): value for option, value in aggregator_configs.items()}
        options.pop("num_clients", None)  # which the agent adds of itself
        source = [options.pop("model_path"), options.pop("model_name", None)]
        self.model = create_instance_from_file(*source, **options.pop("model_kwargs", {}))
        self.algorithm = with_plain_steps(options.pop("algorithm"), options.get("lr"))
        self.server: Server | None = None
        self.reports: list[Report] = []
        self._steps, self._clients = options.pop("steps", None), list(options.pop("clients", []))
        self._sizes = options.pop("client_sizes", None)
        self._weighs = options.pop("client_weights_mode", "equal") == "sample_size"
        limits, self._storage = options.get("limits"), Storage.of(options_of(Storage, options.get("storage")))
        options["limits"] = None if limits is None else options_of(Limits, limits)
        options["compute"] = options_of(Compute, options.get("compute") or {})
        options["aggregation"] = chain_of(options.get("aggregation"))
        self._options = options | {"steps": self._steps, "storage": self._storage}
        self._logger = logger
        self.client_sample_size: dict[Any, int] = {}  # which the base class fills

    def get_parameters(self, /, **told: Any) -> OrderedDict[str, torch.Tensor]:
        """The global model; before the first round the one that a run before this has left, if there is one."""
        if self.server is None and is_begun(self._storage):
            self._open()
        return self._tensors()

    def aggregate(
        self, local_models: Mapping[Any, Any], /, **told: Mapping[Any, Any]
    ) -> OrderedDict[str, torch.Tensor]:
        """Finish a round of everybody's models.

        Args:
            local_models: by client.
            told: what clients sent beside them, by its name, which the clients choose, and client.

        Raises:
            RangeError: all models come in chunks, of which none is a model that could be believed.
        """
        chunked = told.get("_chunk_idx", {})
        if local_models and chunked.keys() >= local_models.keys():
            raise RangeError("model_chunk_size: expected none, so that clients send whole models, got chunks")
        server = self._open()
        with server.open_round(newcomers=newcomers(server, local_models, self._sizes)) as round:
            for client, model in local_models.items():
                add_reply(round, client, partial(self._read, client, model, told))
        assert round.report is not None
        self.reports.append(round.report)
        line = rejection_line(round.report)
        if line and self._logger is not None:
            self._logger.warning(line)
        return self._tensors()

    def _read(self, client: Any, model: Any, told: Mapping[str, Mapping[Any, Any]]) -> Update:
        if client in told.get("_chunk_idx", {}):
            raise RangeError("model: expected a whole one, got a chunk")
        steps = told.get("steps", {}).get(client, self._steps or 1)
        examples = integral(self.client_sample_size.get(client)) if self._weighs else None
        return Update(client, model, steps, examples, keep=True)

    def _open(self) -> Server:
        if self.server is None:
            self.server = open_server(
                self.model, self.algorithm, self._clients, client_sizes=self._sizes, **self._options
            )
        return self.server

    def _tensors(self) -> OrderedDict[str, torch.Tensor]:
        if self.server is None:
            return OrderedDict((name, tensor.detach().clone()) for name, tensor in self.model.state_dict().items())
        return OrderedDict(self.server.tensors(library="torch"))
