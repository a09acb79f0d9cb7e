"""What an FLModel carries beside its parameters, down to a client and back; a client's script imports this."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedcore.adapters.order import fields_of, read_fields
from fedcore.algorithms import Placement
from fedcore.errors import ArrayError, ConfigError
from fedcore.layout import Layout
from fedcore.server import Broadcast, Server, Update
from fedcore.store import ClientId

KEY = "fedcore"
"""Where in ``FLModel.meta`` it stands."""
VECTORS = ("offset", "x_prev")

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Terms:
    """What a client's steps are: y -= lr (a grad(y) + b grad(x_prev) + offset + mu (y - x)); see ``fedcore.Broadcast``.

    Attributes:
        round, lr, a, b, mu, second_vector, local_rule, placement, plain: as of a Broadcast.
        layout: of the parameters that came with it; the two vectors are in its order.
        offset: float32[n_parameters], or None for zero.
        x_prev: float32[n], where ``b`` is not 0; else None.
    """

    round: int
    lr: float
    a: float
    b: float
    mu: float
    second_vector: str | None
    local_rule: str
    placement: Placement
    plain: bool
    layout: Layout
    offset: F32 | None
    x_prev: F32 | None

    @property
    def second(self) -> bool:
        """Whether a second vector goes back, as ``control``."""
        return self.second_vector is not None

    def named(self, vector: F32 | None) -> dict[str, F32]:
        """``offset`` or ``x_prev`` by the parameters' names, as views; nothing for None."""
        pieces = [piece for piece in self.layout.slices if vector is not None and piece.stop <= len(vector)]
        return {piece.name: vector[piece.start : piece.stop].reshape(piece.shape) for piece in pieces}  # type: ignore[index]


def terms(model: FLModel) -> Terms:
    """The terms in what ``flare.receive()`` returned.

    Raises:
        ArrayError: there are none; the model is not of a fedcore ``Controller``.
        ConfigError: a term is missing or unknown, as between two versions of fedcore.
    """
    sent = (model.meta or {}).get(KEY)
    if not isinstance(sent, Mapping):
        raise ArrayError(f"model: expected meta[{KEY!r}], as fedcore's Controller sends it, got none")
    vectors = {name: sent[name] for name in VECTORS if name in sent}
    if len(vectors) != len(VECTORS):
        raise ConfigError(f"order: expected the vectors {VECTORS}, each of which may be None, got {[*vectors]}")
    fields = read_fields({name: value for name, value in sent.items() if name not in VECTORS})
    if fields["b"] and vectors["x_prev"] is None:
        raise ArrayError(f"x_prev: expected the model of the round before, since b is {fields['b']}, got None")
    return Terms(layout=Layout.of(model.params), **fields, **vectors)


def reply(
    params: Any, *, steps: int, examples: int = 1, lr: float | None = None, control: F32 | None = None, **more: Any
) -> FLModel:
    """What a client sends back.

    Args:
        params: its model after the local steps, by name.
        steps: K_i, those steps.
        examples: n_i, its number of examples.
        lr: the rate of its steps, if it is not the one that it was told.
        control: float32[n_parameters], the mean of its raw gradients, where ``Terms.second`` is set.
        more: ``metrics``, say, and FLModel's other arguments.
    """
    said = {"examples": examples, "lr": lr, "control": control}
    return FLModel(params=params, meta={FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps, KEY: said}, **more)


def model_of(server: Server, sent: Broadcast, client: ClientId | None) -> FLModel:
    """What goes down to a client; to None, what goes to all of them, where no term is a client's own.

    Cost: one copy of x, and an offset.
    """
    told = {
        **fields_of(sent),
        "offset": sent.offset(sent.ids[0] if client is None else client) if sent.has_offset else None,
        "x_prev": sent.x_prev,
    }
    return FLModel(params=server.tensors(), current_round=sent.round, meta={KEY: told})


def knows_the_order(model: FLModel) -> bool:
    """Whether a client answered by ``reply``; one that did not has not looked at the terms either."""
    return isinstance(model.meta, Mapping) and isinstance(model.meta.get(KEY), Mapping)


def update_of(client: ClientId, model: FLModel) -> Update:
    """A reply as a round takes it; what it says is checked there and not here."""
    meta = model.meta if isinstance(model.meta, Mapping) else {}
    said = meta.get(KEY)
    said = said if isinstance(said, Mapping) else {}
    return Update(
        client,
        model.params,
        steps=meta.get(FLMetaKey.NUM_STEPS_CURRENT_ROUND),  # type: ignore[arg-type]
        examples=said.get("examples", 1),
        lr=said.get("lr"),
        control=said.get("control"),
        kind="delta" if model.params_type == ParamsType.DIFF else "model",
    )
