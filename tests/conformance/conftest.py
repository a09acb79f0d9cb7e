from importlib.util import find_spec

from tests.conformance.rows import FRAMEWORKS
from tests.conformance.table import declared

# Doctests are looked for in every file; these could not be imported here.
collect_ignore = [f"{name}.py" for name in FRAMEWORKS if not find_spec(declared(name)["package"])]
collect_ignore += ["app", "nvflare_parts.py"]  # of processes, which have their framework
