"""The presets have the numbers of the papers, and each number marked "[paper]" is checked."""

import tomllib
from fnmatch import fnmatch
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import NamedTuple

import pytest

from fedcore.sim.experiment import config
from tests.sim.experiment import kit

FOLDER = resources.files("fedcore.sim.experiment") / "presets"
UNMARKED = ("about", "varies", "label")
"""Keys that are not part of the configuration."""
TYPED = tomllib.loads(Path(__file__).with_name("paper_numbers.toml").read_text())
"""The numbers, typed from the papers."""


class Number(NamedTuple):
    presets: str
    key: str
    value: object
    place: str


def patterns(text):
    return Template(text).substitute(TYPED["groups"])


NUMBERS = [Number(patterns(presets), *number) for rows in TYPED["papers"].values() for presets, *number in rows]
OURS = ("steps", "smallest", "largest")
"""Keys on marked lines of Ruan et al.'s presets that are not the paper's."""


def is_for(listed, preset):
    parts = listed.split()
    left_out = any(fnmatch(preset, part[1:]) for part in parts if part[0] == "!")
    return not left_out and any(fnmatch(preset, part) for part in parts if part[0] != "!")


def leaves(value, path=""):
    """Dotted keys and their values; methods by label."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        for one in value:
            yield from leaves(one, f"{path}.{one['label']}")
    else:
        yield path, value


@cache
def flat(preset):
    tables = kit.preset(preset).tables()
    found = dict(leaves(tables)) | {"seeds": len(tables["seeds"])}
    return found | {"rate.lr": found["rate.lr.value"]} if "rate.lr.value" in found else found


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number.presets.split()[0]}:{number.key}")
def test_preset_has_the_number_of_the_paper(number):
    held = [preset for preset in config.names() if is_for(number.presets, preset)]
    assert held, number
    for part in number.presets.split():
        assert any(fnmatch(preset, part.removeprefix("!")) for preset in config.names()), part
    for preset in held:
        assert flat(preset).get(number.key) == number.value, (preset, number)


def test_sizes_are_equal_as_in_the_paper():
    for preset in filter(lambda preset: is_for(patterns(TYPED["sizes"]["equal"]), preset), config.names()):
        table = "data" if "synthetic" in preset or "table5" in preset else "partition"
        assert flat(preset)[f"{table}.smallest"] == flat(preset)[f"{table}.largest"], preset


def test_numbers_are_unique():
    for preset in config.names():
        keys = [number.key for number in NUMBERS if is_for(number.presets, preset)]
        assert len(keys) == len(set(keys)), preset


def marked(file):
    """Variant (or None), key and value of each number on the marked lines of a file."""
    section, in_array, whole = "", False, False
    for line in (FOLDER / f"{file}.toml").read_text(encoding="utf-8").splitlines():
        code, _, comment = line.partition("#")
        code = code.strip()
        if code.startswith("["):
            section, whole = code.strip("[]"), "[paper]" in comment
            continue
        in_array = in_array or code in ("algorithms = [",)
        if code == "]":
            in_array = False
        if not code or not (whole or "[paper]" in comment) or code.endswith("= ["):
            continue
        tables = {"algorithms": tomllib.loads(f"x = [{code}]")["x"]} if in_array else tomllib.loads(code)
        for key, value in leaves(tables):
            path = key.split(".")
            if section == "variants":
                variant, path = (path[0], path[1:]) if path[0] != "0" else (".".join(path[:2]), path[2:])
            elif section.startswith("variants."):
                variant = section.partition(".")[2]
            else:
                variant, path = None, [*filter(None, [section]), *path]
            if path and path[-1] not in UNMARKED and (path[0] != "algorithms" or path[-1] != "name"):
                yield variant, ".".join(path), value


@pytest.mark.parametrize("file", [file for file, _ in config.files() if file != "quickstart"])
def test_every_marked_number_is_checked(file):
    for variant, key, value in marked(file):
        if key.rpartition(".")[2] in OURS and file.startswith("flexible/"):
            continue
        names = [file] if file in config.names() else [n for n in config.names() if n.startswith(f"{file}-")]
        names = [n for n in names if variant is None or f"-{variant}" in n.removeprefix(file)]
        having = [n for n in names if flat(n).get(key) == (len(value) if key == "seeds" else value)]
        assert having, (file, key, value)
        for name in having:
            assert any(is_for(number.presets, name) and number.key == key for number in NUMBERS), (name, key)


def test_files_have_marks():
    assert sum(len(list(marked(file))) for file, _ in config.files()) > 60
