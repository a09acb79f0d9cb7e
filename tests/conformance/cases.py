"""The sets of replies: one list, of which each entry goes to every framework and to fedcore."""

import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

OF_BUFFERS = ("BatchNorm's statistics", "a counter in models", "a counter in differences", "a bool buffer")
OF_BUFFERS += ("packed uint8, the same for all clients", "packed uint8, different for one client")
"""The names of the sets with tensors beside the parameters."""


@dataclass(frozen=True)
class Reply:
    """A client's reply.

    Attributes:
        client: its name.
        tensors: its model, or its model less x0, by name.
        examples: n_k, its weight; None for a reply without a count.
        counts: whether the reply belongs in the right average.
        is_late: whether it answers an earlier round.
        breaks: whether its second tensor cannot be read.
    """

    client: str
    tensors: Mapping[str, Any]
    examples: float | None = None
    counts: bool = True
    is_late: bool = False
    breaks: bool = False

    @property
    def sent(self) -> Mapping[str, Any]:
        """The tensors as the server gets them."""
        return Breaking(self.tensors) if self.breaks else self.tensors


@dataclass(frozen=True)
class Case:
    """A first model and the replies to it.

    Attributes:
        name: its name in the table.
        x0: the first model, tensors by name.
        replies: in the order of their arrival.
        kind: the content of the replies, "model" or "difference".
        needs: the package that makes the tensors, beside torch.
        make: for tensors of another library, a function of a tensor.
    """

    name: str
    x0: Mapping[str, Any]
    replies: tuple[Reply, ...]
    kind: str = "model"
    needs: str | None = None
    make: Any = None

    def in_its_library(self) -> "Case":
        """The case with tensors of the library that it names."""
        if self.make is None:
            return self
        make = self.make()
        x0 = make(self.x0)
        return replace(self, x0=x0, replies=tuple(replace(one, tensors=make(one.tensors)) for one in self.replies))

    def models(self) -> list[Reply]:
        """The replies as models, for frameworks without differences; counters and flags are added too."""
        if self.kind == "model":
            return list(self.replies)
        return [
            replace(one, tensors={name: self.x0[name] + tensor for name, tensor in one.tensors.items()})
            for one in self.replies
        ]


class Breaking(Mapping[str, Any]):
    """A model in files, of which the second is gone."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Any:
        if name == list(self._tensors)[1]:
            raise OSError(f"{name}: the file is gone")
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Module(torch.nn.Module):
    """A model of the set's tensors: finite floats are parameters, the others and running statistics buffers."""

    def __init__(self, x0: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in x0.items():
            if tensor.is_floating_point() and tensor.isfinite().all() and not name.startswith("running"):
                self.register_parameter(name, torch.nn.Parameter(tensor.clone()))
            else:
                self.register_buffer(name, tensor.clone())


SHAPES = {"w": (3, 4), "b": (4,)}
BN = {"running_mean": (4,), "running_var": (4,)}
CAUSAL = torch.triu(torch.full((3, 3), -math.inf), 1)


def model(seed: str, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, **more: Any):
    """A model of random numbers from 0 to 1, and more tensors."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    drawn = {name: torch.rand(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {**{name: tensor.to(dtype) for name, tensor in drawn.items()}, **more}


def case(name: str, examples: Any, *, alter: Any = None, kind: str = "model", first: Any = None, **how: Any) -> Case:
    """A case whose replies are random models.

    Args:
        examples: n_k of the clients "a", "b", ...
        alter: by client, a function of its reply.
        first: tensors that the first model has beside the random ones, in place of the clients'.
        how: for ``model``; a tuple of a tensor for each client stands for tensors that differ.
    """
    replies = []
    for i, count in enumerate(examples):
        client = chr(ord("a") + i) if len(examples) < 26 else f"client {i}"
        own = {key: value[i] if isinstance(value, tuple) and key != "shapes" else value for key, value in how.items()}
        reply = Reply(client, model(client, **own), count)
        replies.append(reply if alter is None else alter.get(client, lambda one: one)(reply))
    x0 = model("x0", **{key: value for key, value in how.items() if key in ("shapes", "dtype")}, **(first or {}))
    return Case(name, x0, tuple(replies), kind)


def with_tensors(**tensors: Any) -> Any:
    """A change of a reply: other tensors, after which it does not count."""
    return lambda one: replace(one, tensors={**one.tensors, **tensors}, counts=False)


def turned(one: Reply) -> Reply:
    """The reply with its tensors in another order and not contiguous."""
    return replace(one, tensors={name: strided(one.tensors[name]) for name in reversed(one.tensors)})


def without_b(one: Reply) -> dict[str, Any]:
    """The reply's tensors but "b"."""
    return {name: tensor for name, tensor in one.tensors.items() if name != "b"}


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Every second element of a longer tensor."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def doubled(of: Case) -> Case:
    """The case with a second copy of its first reply at the end."""
    return replace(of, replies=(*of.replies, replace(of.replies[0], counts=False)))


def to_jax() -> Any:
    """A function of a model that makes JAX arrays of its tensors."""
    import jax.numpy as jnp

    return lambda tensors: {name: jnp.asarray(tensor.numpy()) for name, tensor in tensors.items()}


def to_keras() -> Any:
    """A function of a model that makes it the weights of a Keras layer, by their names."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    def weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        layer = keras.layers.Dense(4)
        layer.build((None, 3))
        layer.set_weights([tensors["w"].numpy(), tensors["b"].numpy()])
        return {weight.name: weight.value for weight in layer.weights}

    return weights


def integers(*numbers: int, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, ...]:
    """A 0-d counter of each client."""
    return tuple(torch.tensor(number, dtype=dtype) for number in numbers)


PACKED = torch.tensor([3, 200, 17, 96], dtype=torch.uint8)
FLAGS = torch.tensor([True, False, True])

CASES = [
    case("equal sizes", [30, 30, 30]),
    case("unequal sizes, 2 to 1,000,000", [2, 50, 3_000, 1_000_000]),
    case("two sites, 20 and 1,000", [20, 1_000]),
    case("one client", [7]),
    case("a hundred clients", [1 + 37 * i % 101 for i in range(100)]),
    case("no numbers of examples", [None, None, None]),
    case("one number of examples is missing", [10, None, 5_000], alter={"b": lambda one: replace(one, counts=False)}),
    case("fractional weights", [0.5, 1.25, 2.75]),
    case("differences", [10, 20, 50], kind="difference"),
    case("float64", [10, 20, 50], dtype=torch.float64),
    case("bfloat16", [10, 20, 50], dtype=torch.bfloat16),
    case("float16", [10, 20, 50], dtype=torch.float16),
    case("BatchNorm's statistics", [10, 20, 50], shapes=SHAPES | BN),
    case("a counter in models", [10, 10], seen=integers(8, 7), first={"seen": torch.tensor(5)}),
    case("a counter in differences", [10, 10], kind="difference", seen=integers(3, 2), first={"seen": torch.tensor(5)}),
    case("a bool buffer", [10, 20], flags=FLAGS, first={"flags": FLAGS}),
    case("packed uint8, the same for all clients", [10, 20], packed=PACKED, first={"packed": PACKED}),
    case(
        "packed uint8, different for one client",
        [10, 20, 50],
        packed=PACKED,
        first={"packed": PACKED},
        alter={"b": with_tensors(packed=PACKED.flip(0))},
    ),
    case("a mask of -inf", [10, 20], mask=CAUSAL, first={"mask": CAUSAL}),
    case("0-d and empty tensors", [10, 20], shapes=SHAPES | {"scale": (), "empty": (0, 3)}),
    case("different order of names, strided", [10, 20, 50], alter={"b": turned}),
    case("a sparse tensor", [10, 20, 50], alter={"b": lambda one: with_tensors(w=one.tensors["w"].to_sparse())(one)}),
    case("a NaN in one reply", [10, 20, 50], alter={"b": with_tensors(b=torch.full((4,), math.nan))}),
    case("a missing tensor", [10, 20, 50], alter={"b": lambda one: replace(one, tensors=without_b(one), counts=False)}),
    case("one client without examples", [10, 0, 50], alter={"b": with_tensors()}),
    case("all clients without examples", [0, 0], alter={"a": with_tensors(), "b": with_tensors()}),
    doubled(case("a duplicate reply", [10, 20, 50])),
    case("a late reply", [10, 20, 50], alter={"b": lambda one: replace(one, counts=False, is_late=True)}),
    case(
        "a reply with an unreadable tensor",
        [10, 20, 50],
        alter={"b": lambda one: replace(one, counts=False, breaks=True)},
    ),
    replace(case("JAX arrays", [10, 20, 50]), needs="jax", make=to_jax),
    replace(case("Keras weights", [10, 20, 50]), needs="keras", make=to_keras),
]
