"""Compare the micro-benchmarks of two commits: ``python -m bench.commits [BASE] [--head COMMIT]``.

Both packages are compiled with the same options in separate environments. Their processes take turns on one machine, so
that its speed drifts equally for both. A figure is the least time of a call in any turn, since other load only adds
time. A ratio is the base's time over the head's. If a ratio is below --allowed, the same number of turns follows. The
exit status is 1 if a ratio is still below --allowed. The Markdown table is printed and written to
build/commits/table.md.
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
    """Return the interpreter of an environment with a commit's package; compile the package once per machine."""
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
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # the folder of cmake and ninja
    subprocess.run([*pip, *told, folder / "tree"], check=True, env=os.environ | {"PATH": path})
    (wheel,) = (folder / "wheel").glob("*.whl")
    room(folder / "room", wheel)
    return python


def measured(python, turn):
    """Return the least seconds of each micro-benchmark that passes, by name."""
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
    """Measure both commits; the turn's number determines the order."""
    order = (0, 1) if turn % 2 == 0 else (1, 0)
    taken = {side: measured(pythons[side], f"{turn}-{side}") for side in order}
    return taken[0], taken[1]


def compared(turns):
    """Yield rows (name, base's seconds, head's seconds, ratio) from turns, each a pair of measurements."""
    for name in turns[0][1]:
        if all(name in figures for turn in turns for figures in turn):
            base, head = (min(turn[side][name] for turn in turns) for side in (0, 1))
            yield name, base, head, base / head


def slower(rows, allowed):
    """Whether a ratio is below the bound."""
    return any(ratio < allowed for *_, ratio in rows)


def table(rows, base, head, allowed):
    """Return the rows as Markdown, with the largest slow-down first."""
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
