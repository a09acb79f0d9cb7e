"""The public CI's commands without GitHub: ``python -m release.workflows [--list] [all | JOB...]``.

Every ``run`` of .github/workflows is run in this clone, in the shell and the order of its job, once for every cell of
its matrix. Without a JOB only the cheap ones are: those in CHEAP.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".github" / "workflows"
CHEAP = ("quickstart", "gate")
# What GitHub would fill in.
FILLED_IN = {
    "github.event.pull_request.base.sha || github.event.before": "HEAD~1",
    "github.ref_name": "v" + tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
    "github.repository": "owner/fedcore",
    "github.run_number": "1",
    "github.server_url": "https://example.org",
}
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


@dataclass(frozen=True)
class Step:
    """One command of a job.

    Attributes:
        job: the job's name, with the cell of its matrix.
        name: the step's name.
        command: what the shell is given.
        env: what stands in its surroundings.
    """

    job: str
    name: str
    command: str
    env: dict[str, str]


def filled(text, cell):
    """A text with its expressions replaced; one that is not known is refused."""

    def value(found):
        known = {f"matrix.{name}": str(each) for name, each in cell.items()} | FILLED_IN
        if found[1] not in known:
            raise ValueError(f"${{{{ {found[1]} }}}}: expected one of {', '.join(known)}, for a run without GitHub")
        return known[found[1]]

    return EXPRESSION.sub(value, str(text))


def steps(text):
    """The commands of a workflow file, job by job."""
    for job, content in yaml.safe_load(text)["jobs"].items():
        matrix = content.get("strategy", {}).get("matrix", {})
        for values in itertools.product(*matrix.values()):
            cell = dict(zip(matrix, values, strict=True))
            name = " ".join([job, *map(str, values)])
            for step in content.get("steps", ()):  # none in a job that calls another file
                if "run" in step:
                    env = {key: filled(value, cell) for key, value in step.get("env", {}).items()}
                    yield Step(name, step.get("name", ""), filled(step["run"], cell), env)


def run(step, folder):
    """Seconds and status of a step, whose output goes where this process's goes."""
    # GitHub's users become root by sudo; root does not need it.
    own = folder / "sudo"
    if not shutil.which("sudo") and os.geteuid() == 0:
        own.write_text('#!/bin/sh\nexec "$@"\n')
        own.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "CI": "true"} | step.env
    env["GITHUB_STEP_SUMMARY"] = str(folder / "summary.md")
    env = {name: value for name, value in env.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    start = time.monotonic()
    done = subprocess.run(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step.command], cwd=ROOT, env=env)
    return time.monotonic() - start, done.returncode


def main(arguments=None):
    """Run the commands that were asked for, and print a table of them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="jobs by name, or all")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    asked = parser.parse_args(arguments)
    found = [(file.name, step) for file in sorted(FOLDER.glob("*.yml")) for step in steps(file.read_text())]
    wanted = asked.jobs or CHEAP
    known = {step.job.split()[0] for _, step in found}
    if unknown := set(wanted) - known - {"all"}:
        parser.error(f"expected jobs of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for file, step in found:
            chosen = "all" in wanted or step.job.split()[0] in wanted
            # This command would start itself.
            own = "make workflows" in step.command
            if chosen and not own and not asked.list:
                print(f"\n=== {file} {step.job}: {step.command}", flush=True)
                seconds, status = run(step, Path(folder))
                output = f"{seconds:.0f} s" + f", status {status}" * bool(status)
                failed += bool(status)
            else:
                output = "runs this" if own else "not run"
            rows.append(f"| {file} | {step.job} | `{step.command.strip()}` | {output} |")
    print("\n| file | job | command | |\n|---|---|---|---|", *rows, sep="\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
