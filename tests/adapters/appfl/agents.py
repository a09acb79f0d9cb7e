"""The example's agent, whose file is its own ``aggregator_path``."""

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "appfl_mimic.py"


def load_example():
    spec = importlib.util.spec_from_file_location("appfl_mimic", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
