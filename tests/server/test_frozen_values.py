"""The values that a server hands out, or goes on from, are never changed in place."""

from dataclasses import is_dataclass
from importlib import import_module
from pkgutil import iter_modules

import fedcore.server

CHANGES = {"Verdict"}  # which is made reply by reply


def test_every_dataclass_is_frozen_but_a_verdict():
    modules = [import_module(f"fedcore.server.{module.name}") for module in iter_modules(fedcore.server.__path__)]
    made = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    found = {each for each in made if is_dataclass(each) and each.__module__.startswith("fedcore.server.")}
    assert {each.__name__ for each in found if not each.__dataclass_params__.frozen} == CHANGES
    assert len(found) > len(CHANGES) + 8
