"""Local rules: which minibatches a client steps along. One rule, one file, one row of ``REGISTRY``."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedcore.errors import ConfigError, UnknownNameError
from fedcore.local_rules.full_gradient import FullGradient
from fedcore.local_rules.minibatches import Indices, Table, minibatch_table, minibatches
from fedcore.local_rules.one_minibatch import OneMinibatch
from fedcore.local_rules.rule import LocalRule
from fedcore.local_rules.sgd import Sgd
from fedcore.registries import Registry

__all__ = [
    "REGISTRY",
    "FullGradient",
    "Indices",
    "LocalRule",
    "OneMinibatch",
    "Sgd",
    "Table",
    "minibatch_table",
    "minibatches",
    "name_of",
    "named",
    "read",
    "written",
]

REGISTRY: Registry[type[LocalRule]] = Registry(
    "local_rule",
    {"full gradient": FullGradient, "one minibatch": OneMinibatch, "sgd": Sgd},
    due="a LocalRule class",
    fits=lambda row: isinstance(row, type) and issubclass(row, LocalRule),
    group="fedcore.local_rules",
)
"""The local rules by name, for configurations."""


def named(name: str, *, imports: bool = True, **options: Any) -> LocalRule:
    """The rule of that name, made with ``options``.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or "module:Class" for a rule of one's own.
        imports: whether "module:Class" may import the module.

    Raises:
        UnknownNameError: there is no such rule, or it has no such option.
        RangeError, ...: an option is not what the rule takes.

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
    """The name by which ``named`` finds the rule's class.

    Raises:
        ConfigError: there is none, as for a class of a program's own (``__main__``) or of a function.

    >>> name_of(Sgd())
    'sgd'
    """
    name = REGISTRY.name_of(type(rule))
    if name is None:
        raise ConfigError(f"local_rule: expected a class that others can import, got {rule!r}: put it into a module")
    return name


def written(rule: LocalRule) -> dict[str, str]:
    """The rule as two fields of a message: ``local_rule``, its name, and ``rule_options``, its options as JSON.

    Raises:
        ConfigError: nobody else can import the rule; or an option is no number, string or list of them.

    >>> written(OneMinibatch())
    {'local_rule': 'one minibatch', 'rule_options': '{}'}
    """
    try:
        options = json.dumps({field.name: getattr(rule, field.name) for field in fields(rule)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"local_rule: expected options that JSON holds, got {rule!r}: {error}") from None
    return {"local_rule": name_of(rule), "rule_options": options}


def read(name: object, options: object) -> LocalRule:
    """The rule of the two fields that ``written`` made. Nothing is imported on a message's word.

    Raises:
        UnknownNameError: nobody here knows it, or one of its options; or its module has not been imported here, and no
            entry point names it.
        ConfigError: the options are none.
        RangeError, ...: an option is not what the rule takes.
    """
    try:
        told = json.loads(options) if isinstance(options, str) else None
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, Mapping):
        raise ConfigError(f"rule_options: expected the options of a local rule as a JSON object, got {options!r}")
    try:
        return named(str(name), imports=False, **told)
    except TypeError as error:  # a value of another type than the rule takes
        raise ConfigError(f"rule_options: expected those of {name}, got {options!r}: {error}") from None
