"""fedcore's averaging methods as an APPFL aggregator, loaded through ``aggregator_path``. Needs appfl >= 1.12."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

from fedcore.adapters import importing
from fedcore.adapters.session import Job, add_reply, finish, newcomers, take_model
from fedcore.errors import RangeError, UnknownNameError
from fedcore.server import Server, Update
from fedcore.server.opening import is_begun
from fedcore.validation import as_integer

with importing("appfl", "appfl >= 1.12"):
    import torch
    from appfl.algorithm.aggregator import BaseAggregator
    from appfl.misc.utils import create_instance_from_file

STEPS = ("steps", "current_local_steps")
"""The metadata with K of a reply: fedcore's own, and what ``VanillaTrainer`` reports."""
WEIGHTS = ("equal", "sample_size")


class Aggregator(Job, BaseAggregator):  # type: ignore[misc, unused-ignore]
    """An aggregator for APPFL's server agent and ``SyncScheduler``: FedAvg, MIFA, MimiC, FlexibleFedAvg, LocalDescent.

    The file of ``aggregator_path`` holds one line, ``from fedcore.adapters.appfl import Aggregator``. A reply is the
    whole model. Its local steps are in the metadata of ``global_update``: ``steps``, or else ``current_local_steps``,
    which APPFL's ``VanillaTrainer`` reports. An invalid reply is rejected, and the round continues. ``reports`` and the
    agent's log name the client and the reason.

    All clients have the same weight, as in APPFL. With ``client_weights_mode="sample_size"`` the weight is the client's
    ``set_sample_size``. A client without a size is then rejected if other clients have sizes.

    A subclass may override ``aggregate`` and ``get_parameters``. The model that the override returns is the server's
    next x. A scheduler must not change it, since the aggregator does not see that.

    Args:
        aggregator_configs: the agent's ``aggregator_kwargs``:

            * ``model_path``, ``model_name``, ``model_kwargs``, ``seed``: as in the agent's ``model_configs``. Repeat
              them, since the agent passes its model only to APPFL's own aggregators. With the same ``seed`` (default:
              42, as in APPFL) the first models are equal.
            * ``algorithm``: the name of one of ``fedcore.algorithms`` whose clients take plain steps, or a mapping with
              its options, such as ``{"name": "MIFA", "wait": False}``.
            * ``optimizer``: the name of a server optimizer, or a mapping such as ``{"name": "Adam", "eta": 0.01}``.
            * ``lr``: the rate of the local steps, the same for all steps of a round.
            * ``steps``: K of a reply that does not report it (default: 1), and the maximum that a reply may report,
              unless ``limits`` set ``max_steps``.
            * ``clients``: the ids of all clients, including those that never reply. Default: each client is registered
              with its first accepted reply.
            * ``storage``, ``limits``, ``compute``: as for ``fedcore.Server``, or their fields as a mapping. With a
              folder, a later run resumes after the last finished round. The agent counts the rounds of each run from 0,
              so ``num_global_epochs`` is the number of further rounds.
            * ``aggregation``: rules as names or as mappings, such as ``{"name": "RejectLong", "ratio": 20}``.
            * ``abort_after``: the run ends with an error after this many rounds in a row that accepted no reply
              (default: 3; None: it continues).
            * ``num_global_epochs``: as in the agent's ``server_configs``, which it does not pass on. If no round of
              such a run accepted a reply, it also ends with the error.
            * further arguments of ``fedcore.Server``, except ``policy``: APPFL's scheduler closes the rounds.
        logger: the agent's logger.

    Attributes:
        server: the ``fedcore.Server``, from the first reply on.
        reports: the ``Report`` of each round.

    Raises:
        FedcoreError: an option is missing, unknown or invalid, or options do not combine.
    """

    def __init__(self, aggregator_configs: Mapping[str, Any], logger: Any = None) -> None:
        options: dict[str, Any] = {str(option): value for option, value in aggregator_configs.items()}
        if missing := [name for name in ("model_path", "algorithm") if name not in options]:
            raise RangeError(f"aggregator_kwargs: {missing[0]} is missing; see help(fedcore.adapters.appfl.Aggregator)")
        clients = options.pop("num_clients", None)  # the agent adds these entries
        for name, advice in (("gradient_based", "leave send_gradient out"), ("use_secure_agg", "use fedcore.secure")):
            if options.pop(name, False):
                raise RangeError(f"{name}: not supported; clients send whole models, so {advice}")
        source, seed = [options.pop("model_path"), options.pop("model_name", None)], options.pop("seed", 42)
        with torch.random.fork_rng():  # the agent draws its own model from this seed too
            torch.manual_seed(seed)
            self.model = create_instance_from_file(*source, **options.pop("model_kwargs", {}))
        self._epochs = options.pop("num_global_epochs", None)
        self._clients = list(options.pop("clients", []))
        if (mode := options.pop("client_weights_mode", "equal")) not in WEIGHTS:
            raise UnknownNameError.of("client_weights_mode", mode, WEIGHTS)
        self._weighs = mode == "sample_size"
        self._prepare("APPFL", options.pop("algorithm"), options)
        self._require_options(self.model, clients)
        self._logger = logger
        self.client_sample_size: dict[Any, int] = {}  # the base class fills this
        self._handed: Any = None  # a first model from a subclass

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("aggregate", "get_parameters"):
            setattr(cls, name, _noted(getattr(cls, name)))

    def get_parameters(self, /, **more: Any) -> OrderedDict[str, torch.Tensor]:
        """Return the global model: before the first round, the saved model of an earlier run, if any."""
        if self.server is None and is_begun(self._options.storage):
            self._open()
        if self.server is None:
            return OrderedDict((name, tensor.detach().clone()) for name, tensor in self.model.state_dict().items())
        tensors = self.server.tensors(library="torch")
        return OrderedDict((name, tensors[name]) for name in self.model.state_dict() if name in tensors)

    def aggregate(  # type: ignore[override, unused-ignore]
        self, local_models: Mapping[Any, Any] | None = None, /, *others: Any, **metadata: Any
    ) -> OrderedDict[str, torch.Tensor]:
        """Run a round on the models by client, and return the new model.

        ``metadata`` has further values that clients sent, by name and client. If all models are chunks, or if the
        scheduler is not synchronous, the method raises RangeError.
        """
        if others or not isinstance(local_models, Mapping):
            raise RangeError("scheduler: only SyncScheduler passes the models of a round together; use it")
        chunks = metadata.get("_chunk_idx", {})
        if local_models and chunks.keys() >= local_models.keys():
            raise RangeError("model_chunk_size: not supported; leave it out, so that clients send whole models")
        server = self._open()
        with server.open_round(newcomers=newcomers(server, local_models, self._work.sizes)) as round:
            for client, model in local_models.items():
                add_reply(round, client, partial(self._read, client, model, metadata))
            report = finish(server, round, getattr(self._logger, "error", str))
        self._record(report, getattr(self._logger, "warning", str), ended=len(self.reports) + 1 == self._epochs)
        return Aggregator.get_parameters(self)

    def _read(self, client: Any, model: Any, metadata: Mapping[str, Mapping[Any, Any]]) -> Update:
        if client in metadata.get("_chunk_idx", {}):
            raise RangeError(
                "model: the reply is only a chunk; leave model_chunk_size out, so that clients send whole models"
            )
        steps = next((metadata[one][client] for one in STEPS if client in metadata.get(one, {})), self._work.steps or 1)
        examples = as_integer(self.client_sample_size.get(client)) if self._weighs else None
        return Update(client, model, steps, examples, keep=True)

    def _open(self) -> Server:
        is_new, server = self.server is None, self._opened_server(self.model, self._clients)
        if is_new:
            getattr(self._logger, "info", str)(f"fedcore starts at round {server.round_number}")
        if is_new and self._handed is not None:
            take_model(server, self._handed)
        return server


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a subclass's method replace the server's x by the model that it returns, if it changed it."""

    @wraps(method)
    def noted(self: Aggregator, *args: Any, **more: Any) -> Any:
        model = method(self, *args, **more)
        if self.server is None:
            self._handed = model
        else:
            take_model(self.server, model)
        return model

    return noted
