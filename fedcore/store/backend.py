"""Which implementation the store's faces call."""

from typing import Any

from fedcore import _core
from fedcore.runtime import ON_REFERENCE
from fedcore.store import reference

implementation: Any = reference if ON_REFERENCE else _core
