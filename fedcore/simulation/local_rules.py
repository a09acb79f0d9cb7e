"""Local rules: the minibatches along which a client steps."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import count, islice
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.errors import ConfigError, RangeError, UnknownNameError
from fedcore.randomness import generator
from fedcore.registries import Registry

Indices = npt.NDArray[np.int64]
"""The numbers of examples: int64[m]."""


def minibatches(
    examples: int,
    batch: int,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int,
    round: int,
    client: int,
) -> Iterator[Indices]:
    """Return the minibatches of one client in one round: each epoch is a new permutation, cut into pieces.

    The last minibatch of an epoch may be shorter than ``batch``.

    Args:
        examples: the number of the client's examples, which are 0 .. examples-1.
        batch: the size of a minibatch.
        epochs, steps: the number of passes over the examples, or of minibatches. Exactly one of the two.
        seed: the run's seed.
        round: counted from 0.
        client: its index.

    Returns:
        An iterator of int64 arrays of 1 .. batch indices.

    Raises:
        RangeError: a number is below 1, or not exactly one of ``epochs`` and ``steps`` is given.

    Determinism: only (seed, round, client) and the sizes. So all algorithms of a comparison see the same minibatches,
    and fewer steps give a prefix of more steps.

    >>> [len(indices) for indices in minibatches(5, 2, steps=4, seed=0, round=0, client=0)]
    [2, 2, 1, 2]
    """
    if (epochs is None) == (steps is None):
        raise RangeError(f"epochs, steps: expected exactly one of them, got {epochs!r} and {steps!r}")
    _check(examples=examples, batch=batch, epochs=epochs, steps=steps)
    orders = islice(_orders(examples, seed, round, client), epochs)
    pieces = (order[start : start + batch] for order in orders for start in range(0, examples, batch))
    return islice(pieces, steps)


@dataclass(frozen=True)
class Table:
    """A client's minibatches as the rows of a table, padded to one width with examples that do not count.

    Attributes:
        indices: int64[steps, width]; the first ``sizes[k]`` of row k are the minibatch.
        sizes: int64[steps], >= 1.
    """

    indices: Indices
    sizes: Indices


def minibatch_table(examples: int, batch: int, *, steps: int, width: int, seed: int, round: int, client: int) -> Table:
    """Return the first ``steps`` minibatches as a table of this width; for the other arguments see ``minibatches``.

    Raises:
        RangeError: a number is below 1, or ``width`` is below the size of the largest minibatch.
    """
    _check(examples=examples, batch=batch, steps=steps)
    batch = min(batch, examples)
    whole("width", width, batch)
    an_epoch = -(-examples // batch)
    passes = -(-steps // an_epoch)
    filled = np.empty((passes, an_epoch * batch), np.int64)
    for row, order in zip(filled, _orders(examples, seed, round, client), strict=False):
        row[:examples] = order
        row[examples:] = order[0]
    rows = filled.reshape(-1, batch)[:steps]
    if width > batch:
        rows = np.concatenate([rows, np.repeat(rows[:, :1], width - batch, axis=1)], axis=1)
    sizes = np.full(passes * an_epoch, batch)
    sizes[an_epoch - 1 :: an_epoch] = examples - (an_epoch - 1) * batch
    return Table(rows, sizes[:steps])


def _orders(examples: int, seed: int, round: int, client: int) -> Iterator[Indices]:
    """A permutation of the examples for each epoch, endlessly."""
    random = generator(seed, "local: minibatches", round=round, client=client)
    return (random.permutation(examples) for _ in count())


def _check(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None:
            whole(name, value, 1)


@dataclass(frozen=True)
class LocalRule:
    """A local rule: the minibatches along which a client steps, one step for each.

    Your own rule is a frozen dataclass over this class, at the top of a module that clients can import: its fields are
    its options, numbers or strings, and messages carry them by name. Without further methods it is ``Sgd``.
    """

    most_steps: ClassVar[int | None] = None
    """The most local steps in a round. Default: no limit."""
    ordinary: ClassVar[bool] = False
    """Whether an ordinary training loop follows the rule: a step along each minibatch."""

    def batch(self, batch: int) -> int:
        """Return the size of a minibatch, given the client's; more than its examples means all of them."""
        return batch

    def along(self, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
        """Yield the minibatches along which to step.

        Args:
            batches: int64[b] each, of the size of ``batch``.
            examples: the number of the client's examples.

        Raises:
            RangeError: a minibatch is not of that size.
        """
        return iter(batches)

    def in_table(self, table: Table, examples: int) -> Table:
        """Do the same to minibatches in a table; the new width depends only on the table's shape."""
        came = (row[:size] for row, size in zip(table.indices, table.sizes, strict=True))
        batches = list(self.along(came, examples))
        sizes = np.array([len(batch) for batch in batches], np.int64)
        width = -(-int(sizes.max(initial=1)) // table.indices.shape[1]) * table.indices.shape[1]
        indices = np.stack([np.pad(batch, (0, width - len(batch)), mode="edge") for batch in batches])
        return Table(indices, sizes)

    def full_steps(self, examples: int, batch: int, *, epochs: int | None = None, steps: int | None = None) -> int:
        """Return the steps of a client's complete work, of which a participation pattern may take a share.

        Args:
            examples: the number of the client's examples.
            batch: the size of its minibatches.
            epochs, steps: passes over its examples, or steps. One of the two.
        """
        return (epochs or 0) * -(-examples // self.batch(batch)) if steps is None else steps


@dataclass(frozen=True)
class FullGradient(LocalRule):
    """Steps along the gradient over all examples of the client."""

    def batch(self, batch: int) -> int:
        """More than any client has examples."""
        return sys.maxsize

    def along(self, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
        """Yield the minibatches unchanged, each of all examples."""
        for batch in batches:
            if len(batch) != examples:
                due = f"minibatches of all {examples} examples, since the local rule is the full gradient"
                raise RangeError(f"batches: expected {due}, got one of {len(batch)}")
            yield batch

    def in_table(self, table: Table, examples: int) -> Table:
        """Return the table unchanged."""
        return table


@dataclass(frozen=True)
class OneMinibatch(LocalRule):
    """One step along all examples of the minibatches.

    >>> [batch.tolist() for batch in OneMinibatch().along([np.array([0, 1]), np.array([2])], examples=3)]
    [[0, 1, 2]]
    """

    most_steps: ClassVar[int | None] = 1

    def along(self, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
        """Yield all minibatches as one."""
        yield np.concatenate(list(batches))

    def in_table(self, table: Table, examples: int) -> Table:
        """Return a table of one row, as wide as all rows of the given one."""
        counted = np.arange(table.indices.shape[1]) < table.sizes[:, None]
        row = np.concatenate([table.indices[counted], table.indices[~counted]])
        return Table(row[None], table.sizes.sum(keepdims=True))


@dataclass(frozen=True)
class Sgd(LocalRule):
    """One step along each minibatch, as in an ordinary training loop."""

    ordinary: ClassVar[bool] = True

    def in_table(self, table: Table, examples: int) -> Table:
        """Return the table unchanged."""
        return table


REGISTRY: Registry[type[LocalRule]] = Registry(
    "local_rule",
    {"full gradient": FullGradient, "one minibatch": OneMinibatch, "sgd": Sgd},
    due="a LocalRule class",
    fits=lambda row: isinstance(row, type) and issubclass(row, LocalRule),
    group="fedcore.local_rules",
)
"""The local rules by name, for configurations."""


def named(name: str, *, imports: bool = True, **options: Any) -> LocalRule:
    """Make the rule of that name.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or "module:Class" for your own rule.
        imports: whether "module:Class" may import the module.

    Raises:
        UnknownNameError: there is no such rule, or it has no such option.
        RangeError, ...: an option is outside its range.

    >>> named("one minibatch")
    OneMinibatch()
    """
    rule = REGISTRY.find(name, imports=imports)
    known = [field.name for field in fields(rule)]
    for option in options:
        if option not in known:
            raise UnknownNameError.of(f"option of local_rule {name!r}", option, known)
    return rule(**options)


def name_of(rule: LocalRule) -> str:
    """Return the name by which ``named`` finds the rule's class.

    Raises:
        ConfigError: other processes cannot import the class, because it is defined in ``__main__`` or in a function.

    >>> name_of(Sgd())
    'sgd'
    """
    name = REGISTRY.name_of(type(rule))
    if name is None:
        raise ConfigError(f"local_rule: expected a class that others can import, got {rule!r}: put it into a module")
    return name


def written(rule: LocalRule) -> dict[str, str]:
    """Return the rule as two fields of a message: ``local_rule``, its name, and ``rule_options``, its options as JSON.

    Raises:
        ConfigError: other processes cannot import the rule; or an option is not a number, a string or a list of them.

    >>> written(OneMinibatch())
    {'local_rule': 'one minibatch', 'rule_options': '{}'}
    """
    try:
        options = json.dumps({field.name: getattr(rule, field.name) for field in fields(rule)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"local_rule: expected options that JSON holds, got {rule!r}: {error}") from None
    return {"local_rule": name_of(rule), "rule_options": options}


def read(name: object, options: object) -> LocalRule:
    """Make the rule of the two fields of ``written``. A message cannot cause an import.

    Raises:
        UnknownNameError: the rule or one of its options is unknown; or its module is not imported, and no entry point
            names it.
        ConfigError: the options are not a JSON object, or of a wrong type.
        RangeError, ...: an option is outside its range.
    """
    try:
        values = json.loads(options) if isinstance(options, str) else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, Mapping):
        raise ConfigError(f"rule_options: expected the options of a local rule as a JSON object, got {options!r}")
    try:
        return named(str(name), imports=False, **values)
    except TypeError as error:  # a value of another type than the rule takes
        raise ConfigError(f"rule_options: expected those of {name}, got {options!r}: {error}") from None
