"""Which implementation the kernels' faces call: the native one, or the NumPy reference if FEDCORE_ISA=reference."""

import os
from typing import Any

from fedcore import _core
from fedcore.kernels import reference

implementation: Any = reference if os.environ.get("FEDCORE_ISA") == "reference" else _core
