"""Which implementation the draws' faces call."""

from typing import Any

from fedcore import _core
from fedcore.runtime import ON_REFERENCE
from fedcore.sampling import reference

implementation: Any = reference if ON_REFERENCE else _core
