"""The fields that an FLModel carries beside its parameters, to a client and back; a client's script imports this."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedcore.arguments import LONGEST, integral, is_real, is_whole
from fedcore.assignment import VECTORS, Assignment
from fedcore.clients import ClientId
from fedcore.errors import ArrayError
from fedcore.layout import Layout
from fedcore.server import Broadcast, Server, Update
from fedcore.server.limits import Limits
from fedcore.server.settings import LARGEST
from fedcore.typing import F32

KEY = "fedcore"
"""Where in ``FLModel.meta`` it stands."""
MOST_METRICS = 1000
"""Metrics of one site that are kept until the round's end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Order(Assignment):
    """The order of a client's steps: an assignment, and the layout of the parameters that it came with.

    Attributes:
        layout: of the parameters; the two vectors are in its order.
    """

    layout: Layout

    def named(self, vector: F32 | None) -> dict[str, F32]:
        """``offset`` or ``x_prev`` by the parameters' names, as views; nothing for None."""
        pieces = [piece for piece in self.layout.slices if vector is not None and piece.stop <= len(vector)]
        return {piece.name: vector[piece.start : piece.stop].reshape(piece.shape) for piece in pieces}  # type: ignore[index]


def order(model: FLModel) -> Order:
    """The order in what ``flare.receive()`` returned.

    Raises:
        ArrayError: there are none; the model is not of a fedcore ``Controller``.
        ConfigError: a term is missing or unknown, as between two versions of fedcore.
    """
    sent = (model.meta or {}).get(KEY)
    if not isinstance(sent, Mapping):
        raise ArrayError(f"model: expected meta[{KEY!r}], as fedcore's Controller sends it, got none")
    vectors = {name: sent.get(name) for name in VECTORS}
    numbers = {name: value for name, value in sent.items() if name not in VECTORS}
    return Order.read(numbers, vectors, layout=Layout.of(model.params))


def reply(
    params: Any,
    *,
    steps: int,
    examples: float | None = None,
    lr: float | None = None,
    control: F32 | None = None,
    **more: Any,
) -> FLModel:
    """Make the message that a client sends back.

    Args:
        params: its model after the local steps, by name.
        steps: K_i, those steps.
        examples: n_i, its number of examples; None weighs it by its steps, as NVFlare does.
        lr: the rate of its steps, if it is not the one that it was told.
        control: float32[n_parameters], the mean of its raw gradients, where ``Order.second`` is set.
        more: ``metrics``, say, and FLModel's other arguments.
    """
    said = {"examples": examples, "lr": lr, "control": control}
    return FLModel(params=params, meta={FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps, KEY: said}, **more)


def model_of(server: Server, sent: Broadcast, client: ClientId | None) -> FLModel:
    """Make the message to a client; with None the one to all of them, where no term is a client's own.

    Cost: one copy of x, and an offset.
    """
    assignment = sent.of(sent.ids[0] if client is None else client)
    told = {**assignment.numbers(), **assignment.vectors()}
    return FLModel(params=server.tensors(sent=True), current_round=sent.round, meta={KEY: told})


def knows_the_order(model: FLModel) -> bool:
    """Tell whether a client answered by ``reply``; one that did not has not looked at the order either."""
    return isinstance(model.meta, Mapping) and isinstance(model.meta.get(KEY), Mapping)


def update_of(client: ClientId, model: FLModel, *, counts_steps: bool) -> Update:
    """A reply as a round takes it; what it says is checked there and not here.

    Its weight is the examples of fedcore's own reply, else ``NUM_STEPS_CURRENT_ROUND``, else 1, as NVFlare has it.

    Args:
        counts_steps: whether the method needs the steps; else a site may leave them out, or give a fraction.
    """
    meta = model.meta if isinstance(model.meta, Mapping) else {}
    said = meta.get(KEY)
    said = said if isinstance(said, Mapping) else {}
    steps = integral(_number(meta.get(FLMetaKey.NUM_STEPS_CURRENT_ROUND)))
    examples = said.get("examples")
    if examples is None:
        examples = 1 if steps is None else steps
    if not counts_steps and (steps is None or (is_real(steps) and not is_whole(steps, high=Limits.steps))):
        steps = 1  # it is a weight alone, as large as the site likes
    return Update(
        client,
        steps=steps,
        examples=integral(examples),
        lr=said.get("lr"),
        control=said.get("control"),
        **{"delta" if model.params_type == ParamsType.DIFF else "model": _read(model.params)},
    )


def _number(value: Any) -> Any:
    """A scalar of any library as Python's number; anything else unchanged."""
    is_scalar = hasattr(value, "item") and getattr(value, "shape", None) in ((), [])
    return value.item() if is_scalar else value


def _read(params: Any) -> Any:
    """The parameters; of NVFlare's references to tensors on a disk the tensors, one after another."""
    if not isinstance(params, Mapping):
        return params
    return {name: leaf.materialize() if hasattr(leaf, "materialize") else leaf for name, leaf in params.items()}


def metrics_of(given: Any) -> dict[str, float]:
    """A site's metrics, those that are numbers in float32's range; the first ``MOST_METRICS`` of them."""
    found: dict[str, float] = {}
    for name, value in islice(given.items(), MOST_METRICS) if isinstance(given, Mapping) else ():
        with suppress(Exception):  # of an object that a site made
            number = float(_number(value))
            is_named = type(name) is str and len(name) <= LONGEST
            if is_named and not isinstance(value, str | bytes) and abs(number) <= LARGEST:
                found[name] = number
    return found


def mean_metrics(found: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float] | None:
    """The mean of the sites' metrics as NVFlare makes it: of each over the sites that have it, by their weights.

    Args:
        found: the weight that each site's update had, and its metrics.
    """
    sums: dict[str, tuple[float, float]] = {}
    for weight, metrics in found:
        for name, value in metrics.items():
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = total + weight * value, weights + weight
    return {name: total / weights for name, (total, weights) in sums.items() if weights} or None
