"""Modules import only from lower layers of docs/design.md, and optional packages only in their folders."""

import ast
import re
from pathlib import Path

import pytest

import fedcore
from tests.kit import python

ROOT = Path(fedcore.errors.__file__).parent

TABLE = (ROOT.parent / "docs" / "design.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| `([\w/]+?)(?:\.py|/)` \|", TABLE, re.MULTILINE)
LAYER = {"_core": 0} | {name.replace("/", "."): int(layer) for layer, name in ROWS}
# Modules whose layer differs from their folder's: instructions name local rules, and a cluster may run on Ray.
APART = {name for name in LAYER if "." in name}
# The folders that may import each optional package.
OPTIONAL = {
    "dp_accounting": {"rules"},
    "torch": {"sim", "sim.experiment", "adapters", "model", "model.averaging", "server"},
    "sklearn": {"sim"},
    "pooch": {"sim"},
    "datasets": {"sim"},
    "pydantic": {"sim.experiment"},
    "pandas": {"sim.experiment", "sim.experiment.notebook", "sim.reports"},
    "ray": {"cluster.workers"},
    "safetensors": {"model"},
    "matplotlib": {"sim.experiment.notebook", "sim.reports"},
    "mlflow": {"callbacks"},
    "networkx": {"sim.network"},
    "prometheus_client": {"callbacks"},
    "cryptography": {"secure", "server"},
    "tensorboard": {"callbacks"},
    "wandb": {"callbacks"},
    "rich": {"callbacks", "sim.experiment.notebook", "sim.reports", "cli"},
    "scipy": {"sim.reports"},
    "appfl": {"adapters"},
    "flwr": {"adapters"},
    "fedlab": {"adapters"},
    "nvflare": {"adapters"},
    "pfl": {"adapters"},
}
FILES = sorted(ROOT.rglob("*.py"))


def imports(file):
    """Yield the absolute names of all modules that a file imports, also those that ``import_module`` gets as text."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            yield from (one.value for one in node.args[:1] if isinstance(one, ast.Constant))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module
            if node.module == "fedcore":
                yield from (f"fedcore.{alias.name}" for alias in node.names)


def room_of(name):
    """Return the folder or module with a layer that contains a dotted name under fedcore."""
    inside = [part for part in APART if f"{name}.".startswith(f"{part}.")]
    return max(inside, key=len, default=name.partition(".")[0])


def room(file):
    return room_of(".".join(file.relative_to(ROOT).with_suffix("").parts))


def test_every_folder_has_a_layer():
    assert {room(file) for file in FILES} - {"__init__", "__main__"} <= LAYER.keys()


def test_imports_point_down():
    for file in FILES:
        here = room(file)
        if here in ("__init__", "__main__"):  # these files may import every module
            continue
        for name in imports(file):
            package, _, rest = name.partition(".")
            there = room_of(rest)
            if package != "fedcore" or not rest or there == here or there == "__version__":
                continue
            if file.name == "__init__.py" and there.startswith(f"{here}."):
                continue  # a package lists the names of all its modules
            assert LAYER[there] < LAYER[here], (
                f"{file.relative_to(ROOT)} (layer {LAYER[here]}) imports {name} (layer {LAYER[there]})"
            )


def test_no_files_import_each_other():
    """Longer import cycles fail too, even with imports inside functions; ``__init__`` files are exempt."""
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
    assert named == {"arrays.py"}


def test_optional_packages_stay_in_their_folders():
    for file in FILES:
        for name in imports(file):
            rooms = OPTIONAL.get(name.partition(".")[0])
            assert rooms is None or room(file) in rooms, f"{file.relative_to(ROOT)} imports {name}"


API = ROOT.parent / "docs" / "api"
PUBLIC = {page for file in API.glob("*.md") for page in re.findall(r"^::: ([\w.]+)", file.read_text(), re.MULTILINE)}
"""The modules and names that have a page of the API."""


def is_public(module):
    """Whether a page documents the module, or it is a package, or a module with its own row in docs/design.md."""
    inside = module.removeprefix("fedcore.")
    return module in {"fedcore", *PUBLIC} or (ROOT / Path(*inside.split("."))).is_dir() or inside in LAYER


OWN = ("self", "cls", "super()")
OF_NAMED_TUPLES = ("_asdict", "_replace")


def privates(node, known=frozenset(OF_NAMED_TUPLES)):
    """Yield the private attributes that are read outside the class that has them."""
    if isinstance(node, ast.ClassDef):
        read = (one for one in ast.walk(node) if isinstance(one, ast.Attribute))
        known = {one.attr for one in read if ast.unparse(one.value) in OWN}.union(OF_NAMED_TUPLES)
    is_private = isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and node.attr not in known
    if is_private and ast.unparse(node.value) not in OWN:
        yield ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from privates(child, known)


@pytest.mark.parametrize("folder", ["sim", "cli"])
def test_simulator_and_commands_read_no_privates(folder):
    for file in (ROOT / folder).rglob("*.py"):
        assert list(privates(ast.parse(file.read_text()))) == [], file.relative_to(ROOT)


def test_simulator_imports_only_public_names():
    for file in (ROOT / "sim").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not f"{node.module}.".startswith("fedcore."):
                continue
            names = {alias.name for alias in node.names}
            assert not [name for name in names if re.match("_[^_]", name)], f"{file.relative_to(ROOT)}: {names}"
            if not f"{node.module}.".startswith("fedcore.sim."):
                assert is_public(node.module), f"{file.relative_to(ROOT)}: {node.module} is internal"


def test_an_adapter_imports_only_its_framework():
    frameworks = {"appfl", "fedlab", "flwr", "nvflare", "pfl"}
    for file in (ROOT / "adapters").rglob("*.py"):
        own = file.relative_to(ROOT / "adapters").parts[0].removesuffix(".py")
        for name in imports(file):
            there = name.partition(".")[0]
            assert there not in frameworks or there == own or own.startswith("flower"), f"{file} imports {name}"


def test_only_the_bindings_include_python_and_nothing_includes_them():
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


def test_fedcore_needs_only_numpy():
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in OPTIONAL)
    script = str(Path(__file__).with_name("core_alone.py"))
    code = f"import runpy, sys; {hidden}runpy.run_path({script!r}, run_name='__main__')"
    assert "sound: 0 rows" in python("-c", code).stdout


SLOW = {"fedcore.cluster", "fedcore.sim", "fedcore.model.merging", "importlib.metadata", "multiprocessing", "difflib"}


def test_importing_fedcore_leaves_out_what_many_programs_do_not_use():
    code = f"import sys; early = set(sys.modules); import fedcore; print({SLOW} & (sys.modules.keys() - early))"
    assert python("-c", code, FEDCORE_PROFILE="").stdout == "set()\n"


def test_what_is_imported_later_is_there():
    assert {"cluster", "merge", "Network", "participation", "topology"} <= {*dir(fedcore)}
    assert fedcore.topology.__name__ == "fedcore.sim.network.topology"
    assert [getattr(fedcore, name).__module__ for name in ("merge", "Network")] == [
        "fedcore.model.merging",
        "fedcore.sim.network.network",
    ]
    with pytest.raises(AttributeError, match="no attribute 'clusters'"):
        fedcore.clusters  # noqa: B018
