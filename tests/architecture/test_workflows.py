"""The public CI's files: each command is one that this tree has, and nothing else is filled in than what is known."""

import re
import shlex
from pathlib import Path

import pytest

import fedcore

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the frameworks bring")
from release import workflows  # noqa: E402

ROOT = Path(fedcore.layout.__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
STEPS = [(file.name, step) for file in FILES for step in workflows.steps(file.read_text())]
TARGETS = set(re.findall(r"^([\w-]+(?:-%)?):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def is_target(name):
    return name in TARGETS or any(name.startswith(each[:-1]) for each in TARGETS if each.endswith("%"))


@pytest.mark.parametrize(("file", "step"), STEPS, ids=lambda value: getattr(value, "job", value))
def test_a_step_is_a_target_of_the_makefile_or_a_program_of_every_runner(file, step):
    first, *arguments = shlex.split(step.command)
    if first == "make":
        targets = [argument for argument in arguments if "=" not in argument]
        assert targets, f"{file}: {step.command}"
        assert all(map(is_target, targets)), f"{file}: {step.command}"
    else:
        assert first in ("cat", "sudo"), f"{file}: {step.command}"


def test_every_kind_of_check_is_run():
    commands = " ; ".join(step.command for _, step in STEPS)
    for due in (
        "lint",
        "test",
        "test-level",
        "sanitize-address",
        "sanitize-thread",
        "aarch64-check",
        "wheels",
        "bench-gate",
    ):
        assert re.search(rf"make {due}\b", commands), due
    pythons = {step.job.split()[1] for file, step in STEPS if file == "ci.yml" and step.job.startswith("tests ")}
    assert len(pythons) == 3


def test_the_cheap_jobs_are_jobs():
    assert set(workflows.CHEAP) <= {step.job for _, step in STEPS}


def test_an_expression_that_only_github_knows_is_refused():
    with pytest.raises(ValueError, match="secrets"):
        workflows.filled("make ${{ secrets.TOKEN }}", {})


def test_a_matrix_is_run_cell_by_cell():
    text = """
    jobs:
      a:
        strategy: {matrix: {x: [1, 2], y: [b]}}
        steps: [{run: "echo ${{ matrix.x }} ${{ matrix.y }}"}, {uses: someone/else@v1}]
    """
    assert [(step.job, step.command) for step in workflows.steps(text)] == [
        ("a 1 b", "echo 1 b"),
        ("a 2 b", "echo 2 b"),
    ]


def test_a_failing_command_ends_its_step(tmp_path):
    _, status = workflows.run(workflows.Step("a", "", "false | cat\ntrue", {}), tmp_path)
    assert status == 1
    _, status = workflows.run(workflows.Step("a", "", 'test "$X" = 1', {"X": "1"}), tmp_path)
    assert status == 0


def test_no_workflow_asks_for_more_than_it_needs():
    for file in FILES:
        content = yaml.safe_load(file.read_text())
        assert content["permissions"] == {"contents": "read"}, file.name
        assert all("timeout-minutes" in job for job in content["jobs"].values()), file.name
