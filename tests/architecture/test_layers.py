"""Imports point down only, and optional packages stay where they are needed."""

import ast
import subprocess
import sys
from pathlib import Path

import fedcore

ROOT = Path(fedcore.layout.__file__).parent

LAYERS = [
    {"aligned", "errors", "float_mode", "lists", "randomness", "runtime", "layout", "_core"},
    {"kernels", "sampling", "store"},
    {"algorithms", "participation", "topology", "state_dicts"},
    {"server", "network", "data", "local"},
    {"engines"},
    {"experiment"},
    {"reports", "adapters"},
    {"cli"},
]
LAYER = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# Within a layer a room knows no other, except:
ALLOWED = {
    ("runtime", "errors"),
    ("runtime", "_core"),
    ("float_mode", "_core"),
    ("layout", "errors"),
    ("lists", "errors"),
    ("store", "kernels"),
    ("network", "server"),
}
# Where an optional package may be imported at all.
OPTIONAL = {
    "torch": {"local", "engines", "experiment", "adapters"},
    "sklearn": {"data"},
    "pooch": {"data"},
    "datasets": {"data"},
    "pydantic": {"experiment"},
    "matplotlib": {"reports"},
    "networkx": {"topology"},
    "rich": {"reports", "cli"},
    "scipy": {"reports"},
    "appfl": {"adapters"},
    "flwr": {"adapters"},
    "fedlab": {"adapters"},
    "nvflare": {"adapters"},
    "pfl": {"adapters"},
}
FILES = sorted(ROOT.rglob("*.py"))


def imports(file):
    """Absolute names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module
            if node.module == "fedcore":
                yield from (f"fedcore.{alias.name}" for alias in node.names)


def room(file):
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_room_has_a_layer():
    assert {room(file) for file in FILES} - {"__init__", "__main__"} <= LAYER.keys()


def test_imports_point_down():
    for file in FILES:
        here = room(file)
        if here in ("__init__", "__main__"):  # the doors: they may see everything
            continue
        for name in imports(file):
            package, _, rest = name.partition(".")
            there = rest.partition(".")[0]
            if package != "fedcore" or not rest or there == here or there == "__version__":
                continue
            down = LAYER[there] < LAYER[here] or (here, there) in ALLOWED
            assert down, f"{file.relative_to(ROOT)} (layer {LAYER[here]}) imports {name} (layer {LAYER[there]})"


def test_optional_packages_stay_in_their_rooms():
    for file in FILES:
        for name in imports(file):
            rooms = OPTIONAL.get(name.partition(".")[0])
            assert rooms is None or room(file) in rooms, f"{file.relative_to(ROOT)} imports {name}"


def test_an_adapter_imports_its_own_framework_alone():
    frameworks = {"appfl", "fedlab", "flwr", "nvflare", "pfl"}
    for file in (ROOT / "adapters").rglob("*.py"):
        own = file.relative_to(ROOT / "adapters").parts[0].removesuffix(".py")
        for name in imports(file):
            there = name.partition(".")[0]
            assert there not in frameworks or there == own or own.startswith("flower"), f"{file} imports {name}"


def test_only_the_bindings_know_python_and_nobody_knows_the_bindings():
    csrc = ROOT.parent / "csrc"
    below = {
        "base": {"base"},
        "kernels": {"base", "kernels"},
        "sampling": {"base", "sampling"},
        "store": {"base", "kernels", "store"},
        "bindings": {"base", "kernels", "sampling", "store", "bindings"},
    }
    for file in [path for path in csrc.rglob("*") if path.suffix in {".h", ".cpp", ".inl"}]:
        here = file.relative_to(csrc).parts[0]
        for line in file.read_text().splitlines():
            if line.startswith("#include <"):
                assert here == "bindings" or "pybind11" not in line, file
            elif line.startswith("#include"):
                assert line.split('"')[1].split("/")[0] in below[here], f"{file.relative_to(csrc)}: {line}"


def test_fedcore_alone_needs_numpy_alone():
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in OPTIONAL)
    script = str(Path(__file__).with_name("core_alone.py"))
    code = f"import runpy, sys; {hidden}runpy.run_path({script!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "sound: 0 rows" in done.stdout


def test_files_are_short():
    for file in FILES:
        assert len(file.read_text().splitlines()) <= 400, f"{file} is past 400 lines"
