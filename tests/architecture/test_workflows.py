"""The commands of the public CI exist, its actions are fixed, and only one job may publish."""

import re
import shlex
from pathlib import Path

import pytest

import fedcore

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the frameworks bring")
from release import workflows  # noqa: E402

ROOT = Path(fedcore.errors.__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_every_make_command_has_a_target():
    targets = re.findall(r"^([\w-]+%?):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    target = re.compile("|".join(each.replace("%", ".+") for each in targets))
    asked = [shlex.split(step.command) for file in FILES for step in workflows.steps(file.read_text())]
    asked = {word for first, *words in asked if first == "make" for word in words if "=" not in word}
    assert len(asked) > 10
    assert [word for word in sorted(asked) if not target.fullmatch(word)] == []


def test_workflows_have_read_permission_only():
    for file in FILES:
        content = yaml.safe_load(file.read_text())
        assert content["permissions"] == {"contents": "read"}, file.name
        assert all("timeout-minutes" in job or "uses" in job for job in content["jobs"].values()), file.name


def test_each_action_is_a_commit():
    used = [line for file in FILES for line in file.read_text().splitlines() if re.match(r"[\s-]*uses: [^.]", line)]
    assert len(used) > 10
    assert [line for line in used if not re.search(r"@[0-9a-f]{40}  # v\d", line)] == []


def test_only_a_tag_publishes_and_only_after_every_other_job():
    jobs = {file.name: yaml.safe_load(file.read_text())["jobs"] for file in FILES}
    trusted = [(file, name) for file in jobs for name, job in jobs[file].items() if "id-token" in str(job)]
    assert trusted == [("wheels.yml", "publish")]
    publish = jobs["wheels.yml"]["publish"]
    assert {*publish["needs"], "publish"} == {*jobs["wheels.yml"]}
    assert publish["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    assert publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
