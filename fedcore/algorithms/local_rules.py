"""Local rules: the minibatches along which a client steps."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import count, islice
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from fedcore.errors import AlgorithmError, ConfigError, RangeError, UnknownNameError
from fedcore.runtime import generator
from fedcore.validation import Registry, check_integer, failed, is_integer, short_repr
from fedcore.validation import name_of as name_of_class

Indices = npt.NDArray[np.int64]
"""Indices of examples: int64[m]."""


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

    Each minibatch is int64[b], 1 <= b <= batch, with indices of the client's examples. The last one of an epoch may be
    shorter than ``batch``. Exactly one of ``epochs`` (passes over the examples) and ``steps`` (minibatches) is given.

    Determinism: depends only on (seed, round, client) and the sizes. All algorithms of a comparison see the same
        minibatches, and fewer steps give a prefix of more steps.

    >>> [len(indices) for indices in minibatches(5, 2, steps=4, seed=0, round=0, client=0)]
    [2, 2, 1, 2]
    """
    if (epochs is None) == (steps is None):
        raise RangeError(f"epochs={epochs!r}, steps={steps!r}: set exactly one of them")
    _check(examples=examples, batch=batch, epochs=epochs, steps=steps)
    orders = islice(orders_of(examples, seed, round, client), epochs)
    pieces = (order[start : start + batch] for order in orders for start in range(0, examples, batch))
    return islice(pieces, steps)


@dataclass(frozen=True)
class Table:
    """A client's minibatches as rows of int64[steps, width], padded to one width. Steps ignore the padding.

    The first ``sizes[k]`` indices of row k are the minibatch.
    """

    indices: Indices
    sizes: Indices


def minibatch_table(orders: Iterator[Indices], examples: int, batch: int, *, steps: int, width: int) -> Table:
    """Return the first ``steps`` of the minibatches with these ``orders`` as a table of this width."""
    _check(examples=examples, batch=batch, steps=steps)
    batch = min(batch, examples)
    check_integer("width", width, batch)
    per_epoch = -(-examples // batch)
    epochs = -(-steps // per_epoch)
    padded = np.empty((epochs, per_epoch * batch), np.int64)
    for row, order in zip(padded, orders, strict=False):
        row[:examples] = order
        row[examples:] = order[0]
    rows = padded.reshape(-1, batch)[:steps]
    if width > batch:
        rows = np.concatenate([rows, np.repeat(rows[:, :1], width - batch, axis=1)], axis=1)
    sizes = np.full(epochs * per_epoch, batch)
    sizes[per_epoch - 1 :: per_epoch] = examples - (per_epoch - 1) * batch
    return Table(rows, sizes[:steps])


def orders_of(examples: int, seed: int, round: int, client: int) -> Iterator[Indices]:
    """Return an endless sequence of permutations of the examples, one for each epoch."""
    random = generator(seed, "local: minibatches", round=round, client=client)
    return (random.permutation(examples) for _ in count())


def _check(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None:
            check_integer(name, value, 1)


@dataclass(frozen=True)
class LocalRule:
    """A local rule: the minibatches along which a client steps, one step for each.

    A custom rule is a frozen dataclass with this base class, defined at the top level of a module that clients can
    import. Its fields are its options, numbers or strings, which messages contain with their names. Without further
    methods it is ``Sgd``.
    """

    most_steps: ClassVar[int | None] = None
    """The maximum number of local steps in a round. Default: no limit."""
    ordinary: ClassVar[bool] = False
    """Whether an ordinary training loop, with a step along each minibatch, implements the rule."""

    def batch(self, batch: int) -> int:
        """Return the size of a minibatch, given the client's. A size above the number of examples means all of them."""
        return batch

    def along(self, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
        """Yield the minibatches along which the client steps, from its own: int64[b] each, of the size ``batch``.

        Yield at most as many as the client has: a server may reject an update with more steps than a client's work.
        """
        return iter(batches)

    def in_table(self, table: Table, examples: int) -> Table:
        """Do the same as ``along`` for a table of minibatches; the new width depends only on the table's shape."""
        unpadded = (row[:size] for row, size in zip(table.indices, table.sizes, strict=True))
        batches = list(along(self, unpadded, examples))
        sizes = np.array([len(batch) for batch in batches], np.int64)
        width = -(-int(sizes.max(initial=1)) // table.indices.shape[1]) * table.indices.shape[1]
        indices = np.stack([np.pad(batch, (0, width - len(batch)), mode="edge") for batch in batches])
        return Table(indices, sizes)

    def full_steps(self, examples: int, batch: int, *, epochs: int | None = None, steps: int | None = None) -> int:
        """Return E, the number of steps of a client that completes its work; participation patterns return shares of E.

        Exactly one of ``epochs`` (passes over the examples) and ``steps`` is given.
        """
        return (epochs or 0) * -(-examples // batch_of(self, batch)) if steps is None else steps


@dataclass(frozen=True)
class FullGradient(LocalRule):
    """Steps along the gradient over all examples of the client."""

    def batch(self, batch: int) -> int:
        """Return a number above any number of examples."""
        return sys.maxsize

    def along(self, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
        """Yield the minibatches unchanged; require that each has all examples."""
        for batch in batches:
            if len(batch) != examples:
                raise RangeError(
                    f"batches: a minibatch has {len(batch)} of {examples} examples; the full gradient needs all"
                )
            yield batch

    def in_table(self, table: Table, examples: int) -> Table:
        """Return the table unchanged."""
        return table


@dataclass(frozen=True)
class OneMinibatch(LocalRule):
    """One step along the examples of all minibatches together.

    >>> [batch.tolist() for batch in OneMinibatch().along([np.array([0, 1]), np.array([2])], examples=3)]
    [[0, 1, 2]]
    """

    most_steps: ClassVar[int | None] = 1

    def along(self, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
        """Yield all minibatches as one."""
        yield np.concatenate(list(batches))

    def in_table(self, table: Table, examples: int) -> Table:
        """Return a table with one row, which has all elements of the given table."""
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


# Calls of a rule. A fault of a user's rule raises an AlgorithmError that names the rule.

_OWN = (FullGradient, OneMinibatch, Sgd)


def _wrong(rule: LocalRule, method: str, must: str, found: object) -> NoReturn:
    raise AlgorithmError(f"{name_of_class(rule)}: {method} must return {must}, got {short_repr(found)}")


def _number_of(rule: LocalRule, method: str, *arguments: Any, **options: Any) -> int:
    try:
        number = getattr(rule, method)(*arguments, **options)
    except Exception as error:
        failed(rule, method, error)
    if type(rule) not in _OWN and not is_integer(number, 1):
        _wrong(rule, method, "an integer >= 1", number)
    return int(number)


def batch_of(rule: LocalRule, batch: int) -> int:
    """Return ``rule.batch``, checked."""
    return _number_of(rule, "batch", batch)


def full_steps_of(rule: LocalRule, examples: int, batch: int, *, epochs: int | None, steps: int | None) -> int:
    """Return ``rule.full_steps``, checked."""
    return _number_of(rule, "full_steps", examples, batch, epochs=epochs, steps=steps)


def along(rule: LocalRule, batches: Iterable[Indices], examples: int) -> Iterator[Indices]:
    """Yield the minibatches of ``rule.along``, checked."""
    try:
        for batch in rule.along(batches, examples):
            if type(rule) not in _OWN:
                batch = np.asarray(batch)
                if batch.ndim != 1 or not _are_examples(batch, examples):
                    _wrong(rule, "along", f"minibatches int64[b] of numbers in 0..{examples - 1}, b >= 1", batch)
            yield batch
    except Exception as error:
        failed(rule, "along", error)


def in_table(rule: LocalRule, table: Table, examples: int) -> Table:
    """Return ``rule.in_table``, checked."""
    try:
        found = rule.in_table(table, examples)
    except Exception as error:
        failed(rule, "in_table", error)
    if type(rule) not in _OWN:
        is_table = isinstance(found, Table) and _are_examples(found.indices, examples)
        is_table = is_table and found.indices.ndim == 2 and np.shape(found.sizes) == found.indices.shape[:1]
        if not is_table or not _are_examples(found.sizes - 1, found.indices.shape[1]):
            _wrong(rule, "in_table", f"a Table with numbers in 0..{examples - 1}, and sizes from 1 to its width", found)
    return found


def _are_examples(indices: Any, examples: int) -> bool:
    """Whether indices are integers of examples, and not empty."""
    is_array = isinstance(indices, np.ndarray) and indices.dtype.kind in "iu" and indices.size > 0
    return is_array and bool(indices.min() >= 0 and indices.max() < examples)


REGISTRY: Registry[type[LocalRule]] = Registry(
    "local_rule",
    {"full gradient": FullGradient, "one minibatch": OneMinibatch, "sgd": Sgd},
    expected="a LocalRule class",
    fits=lambda row: isinstance(row, type) and issubclass(row, LocalRule),
    group="fedcore.local_rules",
)
"""The local rules, keyed by their names in configurations."""


def named(name: str, *, imports: bool = True, **options: Any) -> LocalRule:
    """Make the local rule with a given name.

    ``name`` is a key of ``REGISTRY``, the name of an entry point, or ``module:Class`` of a custom rule. ``imports`` is
    whether the latter may import the module.

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
    """Return the name by which ``named`` finds the rule's class, which other processes must be able to import.

    >>> name_of(Sgd())
    'sgd'
    """
    name = REGISTRY.name_of(type(rule))
    if name is None:
        raise ConfigError(
            f"local_rule: other processes cannot import the class of {rule!r}; put the class into a module"
        )
    return name


def written(rule: LocalRule) -> dict[str, str]:
    """Return two fields of a message: ``local_rule``, the rule's name, and ``rule_options``, its options as JSON.

    >>> written(OneMinibatch())
    {'local_rule': 'one minibatch', 'rule_options': '{}'}
    """
    try:
        options = json.dumps({field.name: getattr(rule, field.name) for field in fields(rule)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"local_rule: JSON cannot represent the options of {rule!r}: {error}") from None
    return {"local_rule": name_of(rule), "rule_options": options}


def read(name: object, options: object) -> LocalRule:
    """Make the rule from the two fields of ``written``. A message cannot cause an import.

    Raises:
        UnknownNameError: the rule or an option is unknown, or the rule is in a module that is not imported.
        ConfigError: the options are not a JSON object, or have a wrong type.
    """
    try:
        values = json.loads(options) if isinstance(options, str) else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, Mapping):
        raise ConfigError(f"rule_options={options!r}: must be a JSON object")
    try:
        return named(str(name), imports=False, **values)
    except TypeError as error:  # An option has a wrong type.
        raise ConfigError(f"rule_options={options!r}: invalid for local_rule {name!r}: {error}") from None
