"""Micro-benchmarks of one commit against another: ``python -m bench.commits [BASE] [--head COMMIT]``.

Both packages are compiled alike, in environments of their own, and take turns in processes of their own on one
machine: a drift of its speed meets both. A figure is the least time of a call in any turn, for whatever else the
machine does adds to it; a ratio is the base's over the head's. Where one is below --allowed, as many turns are taken
again. A table in Markdown goes to the output and into build/commits/table.md. The status is 1 if a call is slower than
--allowed then.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from release.rooms import room

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "commits"
MICRO = Path(__file__).with_name("micro.py")
BENCH = ["-m", "pytest", "micro.py", "-q", "-c", "pytest.ini", "-p", "no:cacheprovider", "--benchmark-warmup=on"]
QUICK = ["--benchmark-min-rounds=15", "--benchmark-max-time=0.5", "--benchmark-disable-gc"]


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def packaged(commit):
    """An interpreter with the package of a commit, compiled for this machine; made once for a commit."""
    folder = BUILD / commit
    python = folder / "room" / "bin" / "python"
    if python.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    (folder / "tree").mkdir()
    subprocess.run(["tar", "x", "-C", folder / "tree"], input=archive, check=True)
    options = ["cmake.define.FEDCORE_LEVELS=native", "cmake.define.FEDCORE_CUDA=OFF"]
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder / "wheel"]
    told = [part for option in options for part in ("-C", option)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # cmake and ninja lie there
    subprocess.run([*pip, *told, folder / "tree"], check=True, env=os.environ | {"PATH": path})
    (wheel,) = (folder / "wheel").glob("*.whl")
    room(folder / "room", wheel)
    return python


def measured(python, turn):
    """Name -> least seconds of each micro-benchmark that passes."""
    where = BUILD / "run"
    where.mkdir(parents=True, exist_ok=True)
    shutil.copy(MICRO, where / "micro.py")
    (where / "pytest.ini").write_text("[pytest]\npython_functions = bench_*\n")
    file = where / f"{turn}.json"
    file.unlink(missing_ok=True)
    done = subprocess.run(
        [python, *BENCH, *QUICK, f"--benchmark-json={file}"], cwd=where, capture_output=True, text=True
    )
    if not file.exists():
        raise SystemExit(f"{python}: expected figures of the micro-benchmarks, got\n{done.stdout}{done.stderr}")
    return {bench["name"]: bench["stats"]["min"] for bench in json.loads(file.read_text())["benchmarks"]}


def in_turn(pythons, turn):
    """What was measured of the two, of which now the one and now the other is first."""
    order = (0, 1) if turn % 2 == 0 else (1, 0)
    taken = {side: measured(pythons[side], f"{turn}-{side}") for side in order}
    return taken[0], taken[1]


def compared(turns):
    """Rows (name, base's seconds, head's seconds, ratio) of turns, which are pairs of what was measured."""
    for name in turns[0][1]:
        if all(name in figures for turn in turns for figures in turn):
            base, head = (min(turn[side][name] for turn in turns) for side in (0, 1))
            yield name, base, head, base / head


def slower(rows, allowed):
    """Whether a ratio is below what is allowed."""
    return any(ratio < allowed for *_, ratio in rows)


def table(rows, base, head, allowed):
    """The rows as Markdown, those first that became slowest."""
    lines = [f"Micro-benchmarks: `{head[:12]}` against `{base[:12]}`, on one machine in turn; above 1 is faster.", ""]
    lines += ["| call | base, us | head, us | ratio | |", "|---|---:|---:|---:|---|"]
    for name, before, after, ratio in sorted(rows, key=lambda row: row[-1]):
        word = "**slower**" if ratio < allowed else "faster" if ratio > 1 / allowed else ""
        lines.append(
            f"| {name.removeprefix('bench_')} | {before * 1e6:,.1f} | {after * 1e6:,.1f} | {ratio:.2f} | {word} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", default="HEAD~1", help="the commit to compare with (default: HEAD~1)")
    parser.add_argument("--head", default="HEAD", help="the commit that is compared (default: HEAD)")
    parser.add_argument("--turns", type=int, default=5, help="how often each is measured (default: 5)")
    parser.add_argument("--allowed", type=float, default=0.85, help="the least ratio that is no fault (default: 0.85)")
    asked = parser.parse_args(arguments)
    base, head = (git("rev-parse", f"{name}^{{commit}}") for name in (asked.base, asked.head))
    pythons = packaged(base), packaged(head)
    turns = []
    for _ in range(2):
        turns += [in_turn(pythons, len(turns) + more) for more in range(asked.turns)]
        rows = list(compared(turns))
        if not slower(rows, asked.allowed):
            break
    if not rows:
        raise SystemExit(f"{asked.base}: expected a micro-benchmark that both commits can run, got none")
    text = table(rows, base, head, asked.allowed)
    (BUILD / "table.md").write_text(text)
    print(text)
    return int(slower(rows, asked.allowed))


if __name__ == "__main__":
    sys.exit(main())
