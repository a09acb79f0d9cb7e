"""Which implementation the kernels' faces call."""

from typing import Any

from fedcore import _core
from fedcore.kernels import reference
from fedcore.runtime import ON_REFERENCE

implementation: Any = reference if ON_REFERENCE else _core
