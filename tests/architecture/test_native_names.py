"""Each name of the native module has a twin in NumPy, a line in the stub, a face, a test and a benchmark."""

import ast
import re
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedcore
from fedcore import native, reference
from fedcore.clients import reference as clients
from fedcore.kernels import checksum_reference as checksums
from fedcore.kernels import exact_reference as exact
from fedcore.kernels import reference as kernels
from fedcore.sampling import reference as sampling

ROOT = Path(fedcore.layout.__file__).parent.parent
TWINS = (reference, clients, kernels, exact, checksums, sampling)

EXCEPT = {
    "twin": {"siphash": "a part of ClientIndex, whose twin hashes with Python's dict; held to published vectors"},
    "face": {"siphash": "a part of ClientIndex", "random_words": "a part of every draw"},
    "benchmark": {
        "in_ieee_mode": "no work",
        "siphash": "timed within the registry",
        "random_words": "timed within every draw",
        "read_plain_updates": "timed within small rounds (bench/rounds/bench_small.py)",
        "column_sum": "timed within small rounds",
        "joined_bytes": "timed within Flower's messages (bench/adapters/bench_flower.py)",
    },
}


def source(folder):
    return "\n".join(path.read_text() for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__))


def stubbed(text):
    """The functions' parameters by name; None for what is no function."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            of = node.args
            named = [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
            found[node.name] = None if of.vararg else named
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = None
    return found


def faced():
    """By native name the functions and classes of the package in which it is called."""
    found = {}
    for file in sorted((ROOT / "fedcore").rglob("*.py")):
        stack = []

        def walk(node, stack=stack):
            named = isinstance(node, ast.FunctionDef | ast.ClassDef)
            stack += [node.name] if named else []
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "core":
                found.setdefault(node.attr, set()).update(stack)
            for child in ast.iter_child_nodes(node):
                walk(child)
            del stack[len(stack) - named :]

        walk(ast.parse(file.read_text()))
    return found


def omissions(names, *, stub, faces, tests, bench):
    """What is missing of each name, less what is excepted."""

    def mentions(text, name):
        return any(re.search(rf"\b{word}\b", text) for word in {name, *(f for f in faces.get(name, ()) if f[0] != "_")})

    has = {
        "twin": lambda name: any(hasattr(twin, name) for twin in TWINS),
        "stub": lambda name: name in stub,
        "face": lambda name: name in faces,
        "test": lambda name: mentions(tests, name),
        "benchmark": lambda name: mentions(bench, name),
    }
    return [
        (name, what)
        for name in names
        for what, found in has.items()
        if not found(name) and name not in EXCEPT.get(what, {})
    ]


@pytest.fixture(scope="module")
def house():
    faces, stub = faced(), stubbed((ROOT / "fedcore" / "_core.pyi").read_text())
    return SimpleNamespace(stub=stub, faces=faces, tests=source("tests"), bench=source("bench"))


NAMES = [name for name in dir(native.core) if not name.startswith("_")]
native_only = pytest.mark.skipif(native.ON_REFERENCE, reason="the native module is not loaded")


@native_only
def test_each_native_name_has_a_twin_a_stub_a_face_a_test_and_a_benchmark(house):
    assert omissions(NAMES, **vars(house)) == []
    assert set(house.stub) == set(NAMES)
    assert set(house.faces) <= set(NAMES)


@native_only
def test_an_exception_is_of_a_name_that_lacks_it(house):
    for what, names in EXCEPT.items():
        for name in [*names]:
            kept = EXCEPT[what].pop(name)
            missing = omissions([name], **vars(house))
            EXCEPT[what][name] = kept
            assert missing == [(name, what)]


@native_only
def test_what_is_left_out_is_found(house):
    def without(**changed):
        return omissions(["imagined", "exchange"], **(vars(house) | changed))

    everything = [("imagined", what) for what in ("twin", "stub", "face", "test", "benchmark")]
    assert without() == everything
    assert without(stub={}) == [*everything, ("exchange", "stub")]
    assert without(tests="", bench="exchanges") == [*everything, ("exchange", "test"), ("exchange", "benchmark")]
    assert ("exchange", "face") in without(faces={})


@native_only
def test_stub_twin_and_native_function_have_the_same_parameters(house):
    for name, named in house.stub.items():
        if named is None:
            continue
        lines = (getattr(native.core, name).__doc__ or "").splitlines()
        if lines and lines[0].startswith(f"{name}("):
            inner = lines[0][len(name) + 1 : lines[0].rindex(") ->")]
            assert re.findall(r"(?:^|, )(\w+)(?=: )", inner) == named, name
        for twin in TWINS:
            if hasattr(twin, name):
                assert [*signature(getattr(twin, name)).parameters] == named, (twin.__name__, name)
