"""Imports point down only, and optional packages stay where they are needed."""

import ast
import subprocess
import sys
from pathlib import Path

import fedcore

ROOT = Path(fedcore.model.__file__).parent

LAYERS = [
    {"_core", "errors", "native", "arrays"},
    {"arguments", "atomic_file", "interrupts", "pickling", "randomness", "registries", "representation", "runtime"},
    {"model", "simulation.executor"},
    {"kernels", "sampling", "profiling", "simulation.local_rules"},
    {"store"},
    {"algorithms", "averaging"},
    {"rules"},
    {"options"},
    {"server"},
    {"network", "cluster", "testing"},
    {"simulation"},
    {"experiment"},
    {"reports", "adapters", "callbacks"},
    {"cli"},
]
LAYER = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# Modules of a folder that have a layer of their own: instructions name local rules, and a cluster may be on Ray.
APART = {name for name in LAYER if "." in name}
# Within a layer a room knows no other, except:
ALLOWED = {
    ("native", "_core"),
    ("arrays", "native"),
    ("arrays", "errors"),
    ("registries", "arguments"),
    ("registries", "representation"),
    ("runtime", "arguments"),
}
# Where an optional package may be imported at all.
OPTIONAL = {
    "torch": {"simulation", "experiment", "adapters"},
    "sklearn": {"simulation"},
    "pooch": {"simulation"},
    "datasets": {"simulation"},
    "pydantic": {"experiment"},
    "pandas": {"experiment", "reports"},
    "ray": {"simulation.executor"},
    "safetensors": {"model"},
    "matplotlib": {"reports"},
    "mlflow": {"callbacks"},
    "networkx": {"network"},
    "prometheus_client": {"callbacks"},
    "tensorboard": {"callbacks"},
    "wandb": {"callbacks"},
    "rich": {"callbacks", "reports", "cli"},
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


def room_of(name):
    """The folder or module of the top level that a dotted name under fedcore is in."""
    parts = name.split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in APART else parts[0]


def room(file):
    return room_of(".".join(file.relative_to(ROOT).with_suffix("").parts))


def test_every_room_has_a_layer():
    assert {room(file) for file in FILES} - {"__init__", "__main__"} <= LAYER.keys()


def test_imports_point_down():
    for file in FILES:
        here = room(file)
        if here in ("__init__", "__main__"):  # the doors: they may see everything
            continue
        for name in imports(file):
            package, _, rest = name.partition(".")
            there = room_of(rest)
            if package != "fedcore" or not rest or there == here or there == "__version__":
                continue
            down = LAYER[there] < LAYER[here] or (here, there) in ALLOWED
            assert down, f"{file.relative_to(ROOT)} (layer {LAYER[here]}) imports {name} (layer {LAYER[there]})"


def test_no_files_import_each_other():
    """Nor in a longer circle, wherever in a file the import stands; the doors, which gather a room's names, aside."""
    files = {".".join(file.relative_to(ROOT.parent).with_suffix("").parts): file for file in FILES}
    below = {name: {there for there in imports(file) if there in files} for name, file in files.items()}
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                below[name] |= {there for alias in node.names if (there := f"{node.module}.{alias.name}") in files}
    done, circles = set(), []

    def follow(name, path):
        if name in path:
            circles.append([*path[path.index(name) :], name])
        elif name not in done:
            for there in sorted(below[name]):
                follow(there, [*path, name])
            done.add(name)

    for name in sorted(files):
        follow(name, [])
    assert circles == []


def test_one_file_names_the_native_module():
    named = {str(file.relative_to(ROOT)) for file in FILES if "fedcore._core" in set(imports(file))}
    assert named == {"native.py"}


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
        "cuda": {"cuda", "kernels"},
        "sampling": {"base", "sampling"},
        "clients": {"base", "clients"},
        "store": {"base", "kernels", "store"},
        "bindings": {"base", "kernels", "sampling", "clients", "store", "cuda", "bindings"},
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "sound: 0 rows" in done.stdout
