"""The presets' numbers against those of the papers, and the marks "[paper]" against what is held to be one."""

import tomllib
from fnmatch import fnmatch
from functools import cache
from importlib import resources

import pytest

from fedcore.experiment import load_preset, presets
from tests.experiment.paper_numbers import NUMBERS, SHIFTING_SIZES

FOLDER = resources.files("fedcore.experiment") / "presets"
UNMARKED = ("about", "varies", "label")
"""Keys that are no configuration."""
OURS = ("steps", "smallest", "largest")
"""Keys of Ruan et al.'s presets beside a mark, which says what of the line is the paper's: not E, nor sizes."""


def is_for(patterns, preset):
    parts = patterns.split()
    left_out = any(fnmatch(preset, part[1:]) for part in parts if part[0] == "!")
    return not left_out and any(fnmatch(preset, part) for part in parts if part[0] != "!")


def leaves(value, path=""):
    """Dotted keys and what is there; a method by its label."""
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
    tables = load_preset(preset).tables()
    found = dict(leaves(tables)) | {"seeds": len(tables["seeds"])}
    return found | {"rate.lr": found["rate.lr.value"]} if "rate.lr.value" in found else found


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number.presets.split()[0]}:{number.key}")
def test_a_number_of_a_paper_is_the_presets(number):
    held = [preset for preset in presets.names() if is_for(number.presets, preset)]
    assert held, number
    for part in number.presets.split():
        assert any(fnmatch(preset, part.removeprefix("!")) for preset in presets.names()), part
    for preset in held:
        assert flat(preset).get(number.key) == number.value, (preset, number)


def test_sizes_are_equal_where_the_paper_has_them_equal():
    for preset in filter(lambda preset: is_for(SHIFTING_SIZES, preset), presets.names()):
        table = "data" if "synthetic" in preset or "table5" in preset else "partition"
        assert flat(preset)[f"{table}.smallest"] == flat(preset)[f"{table}.largest"], preset


def test_no_number_is_held_to_two_values():
    for preset in presets.names():
        keys = [number.key for number in NUMBERS if is_for(number.presets, preset)]
        assert len(keys) == len(set(keys)), preset


def marked(file):
    """Of each line of a preset's file that is marked: the variant that it stands in, if any, and the keys on it."""
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


@pytest.mark.parametrize("file", [file for file, _ in presets.files() if file != "quickstart"])
def test_no_number_that_is_marked_as_a_papers_is_left_out(file):
    for variant, key, value in marked(file):
        if key.rpartition(".")[2] in OURS and file.startswith("flexible/"):
            continue
        names = [file] if file in presets.names() else [n for n in presets.names() if n.startswith(f"{file}-")]
        names = [n for n in names if variant is None or f"-{variant}" in n.removeprefix(file)]
        having = [n for n in names if flat(n).get(key) == (len(value) if key == "seeds" else value)]
        assert having, (file, key, value)
        for name in having:
            assert any(is_for(number.presets, name) and number.key == key for number in NUMBERS), (name, key)


def test_there_are_marks():
    """So that the test above has something to find."""
    assert sum(len(list(marked(file))) for file, _ in presets.files()) > 60
