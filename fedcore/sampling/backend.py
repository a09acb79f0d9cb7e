"""Which implementation the draws' faces call: the native one, or the reference if FEDCORE_ISA=reference."""

import os
from typing import Any

from fedcore import _core
from fedcore.sampling import reference

implementation: Any = reference if os.environ.get("FEDCORE_ISA") == "reference" else _core
