"""``fedcore doctor``: the build, and the packages, devices and data that are missing."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

import numpy as np

from fedcore import arrays as cuda
from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser
from fedcore.errors import DISTRIBUTION, FedcoreError, UnknownNameError
from fedcore.kernels import weighted_sum
from fedcore.native import core
from fedcore.runtime import build_info, isa, threads
from fedcore.simulation import data

EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Finding:
    """One thing that something needs.

    Attributes:
        purpose: what needs it: "core", "gpu", "data", "build", or an extra.
        needs: the thing.
        found: its version, or what is wrong.
        fix: what to do; None if nothing is wrong.
    """

    purpose: str
    needs: str
    found: str
    fix: str | None = None


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("doctor", run)
    parser.add_argument("names", nargs="*", metavar="WHAT", help="core, gpu, data, build, or an extra such as sim")
    terminal.add_json(parser)


def run(options: Options) -> None:
    """Check the installation and list missing packages; for bug reports.

    Without a WHAT, the build and all that fedcore can use are shown. The exit status is
    1 if the core is damaged, or if something that was named is missing.

    Examples:
      fedcore doctor
      fedcore doctor sim flower
      fedcore doctor --json
    """
    names, checks = options.names, checks_by_purpose()
    for name in names:
        if name not in checks:
            raise UnknownNameError.of("WHAT", name, checks)
    found = [finding for name in names or checks for finding in checks[name]()]
    missing = cuda.reason()
    devices = [] if missing is not None else cuda.devices()
    if options.json:
        facts = {**_build_facts(), "cuda_missing": missing, "cuda_devices": [device._asdict() for device in devices]}
        terminal.print_json({"build": facts, "findings": [asdict(finding) for finding in found]})
    else:
        if not names:
            named = {
                f"cuda:{n}": f"{d.name}, {d.capability / 10:.1f}, {d.memory / 2**30:.1f} GiB"
                for n, d in enumerate(devices)
            }
            terminal.print_pairs((_build_facts() | (named or {"cuda": f"none: {missing}"})).items())
        _print_findings(found)
    required = set(names) or {"core"}
    if any(finding.fix is not None and finding.purpose in required for finding in found):
        sys.exit(terminal.FAILED)


def checks_by_purpose() -> dict[str, Callable[[], Iterator[Finding]]]:
    """Return the check of each purpose: the core first, then the extras as the package declares them."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {"core": _core}
    checks |= {extra: partial(_packages, extra, needed) for extra, needed in extras().items()}
    return checks | {"gpu": _gpu, "data": _data, "build": _build}


def extras() -> dict[str, dict[str, str]]:
    """Return the packages of each extra with their bounds, and those of extras that it contains."""
    own: dict[str, list[str]] = {}
    for line in declared():
        requirement, _, marker = line.partition(";")
        if hit := EXTRA.search(marker):
            own.setdefault(hit[1], []).append(requirement.strip())

    def spread(extra: str) -> Iterator[tuple[str, str]]:
        for requirement in own[extra]:
            name, bounds = _parts(requirement)
            if name == DISTRIBUTION:
                for inner in bounds.strip("[] ").split(","):
                    yield from spread(inner.strip())
            else:
                yield name, bounds

    return {extra: dict(spread(extra)) for extra in own if extra != "dev"}


def declared() -> list[str]:
    """Return the requirements of the package and its extras; none where it is on a path and not installed."""
    try:
        return requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []


def _parts(requirement: str) -> tuple[str, str]:
    """Return the name of a package, and the bounds of its version."""
    name = NAME.match(requirement)
    assert name is not None
    return name[0], requirement[name.end() :].strip()


def _build_facts() -> dict[str, object]:
    """Return the facts that a bug report needs: versions, instruction set and threads."""
    try:
        return dict(build_info())
    except (RuntimeError, FedcoreError) as error:  # of the number of threads
        return {"error": str(error)}


def _core() -> Iterator[Finding]:
    for line in declared():
        if ";" not in line:
            name, bounds = _parts(line)
            yield _package("core", name, bounds, name)
    used, best = isa(), core.best_isa()
    fix = None if used == best else "unset FEDCORE_ISA: this machine has a faster level"
    yield Finding("core", "instruction set", f"{used}, of {best}" if used != best else used, fix)
    try:
        yield Finding("core", "threads", str(threads()))
    except (RuntimeError, FedcoreError) as error:
        yield Finding("core", "threads", str(error), "unset FEDCORE_THREADS, or set it to a number in 1..4096")
        return
    rows = list(np.random.default_rng(0).normal(size=(5, 10_007)).astype(np.float32))
    weights, expected = (np.arange(1, 6) / np.float32(7)).astype(np.float32), np.zeros(10_007, np.float32)
    for row, weight in zip(rows, weights, strict=True):
        expected += weight * row
    same = weighted_sum(rows, weights).tobytes() == expected.tobytes()
    found = f"a sum has {'the' if same else 'other'} bits {'of' if same else 'than'} its definition"
    fix = f"install {DISTRIBUTION} again, and report it with the output of `fedcore doctor --json`"
    yield Finding("core", "kernels", found, None if same else fix)


def _packages(extra: str, needed: dict[str, str]) -> Iterator[Finding]:
    for package, bounds in needed.items():
        yield _package(extra, package, bounds, f"{DISTRIBUTION}[{extra}]")
    if extra == "fedlab":  # it imports torchvision
        yield from _torchvision(extra)


def _torchvision(purpose: str) -> Iterator[Finding]:
    """Check the kind of torchvision: the one for GPUs cannot be imported beside torch's +cpu."""
    with suppress(PackageNotFoundError):
        torch, beside = version("torch"), version("torchvision")
        kind = torch.partition("+")[2]
        fits = kind == beside.partition("+")[2]
        index = f" --index-url https://download.pytorch.org/whl/{kind}" if kind else ""
        fix = None if fits else f"pip install --force-reinstall --no-deps torchvision{index}"
        yield Finding(purpose, "torchvision of torch's kind", f"{beside} beside torch {torch}", fix)


def _package(purpose: str, package: str, bounds: str, install: str) -> Finding:
    needs = f"{package} {bounds}".strip()
    try:
        found = version(package)
    except PackageNotFoundError:
        return Finding(purpose, needs, "not installed", f"pip install '{install}'")
    if find_spec("packaging") is not None:
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(bounds).contains(found, prereleases=True):
            return Finding(purpose, needs, found, f"pip install '{package}{bounds}'")
    return Finding(purpose, needs, found)


def _gpu() -> Iterator[Finding]:
    built, missing = core.cuda_targets, cuda.reason()
    fix = "build where an nvcc of CUDA 12.8 or later is on PATH, or install a wheel, which has them"
    yield Finding("gpu", "kernels", built or f"none: {core.cuda_missing}", None if built else fix)
    found = f"none: {missing}" if missing is not None else ", ".join(device.name for device in cuda.devices())
    fix = "install NVIDIA's driver if there is a GPU; otherwise no driver is needed"
    yield Finding("gpu", "device", found, None if missing is None else fix)


def _data() -> Iterator[Finding]:
    folder = os.environ.get("FEDCORE_DATA_DIR")
    for name in data.REGISTRY.names():
        if data.REGISTRY.find(name).find is None:
            continue
        if not folder:
            downloads = find_spec("pooch") is not None
            found = "downloaded when it is first used" if downloads else "cannot be downloaded: pooch is not installed"
            fix = None if downloads else "set FEDCORE_DATA_DIR to a folder that has it, or install pooch"
            yield Finding("data", name, found, fix)
            continue
        try:
            data.find(name)
            yield Finding("data", name, f"in FEDCORE_DATA_DIR, {folder}")
        except FedcoreError as error:
            what, _, how = str(error).partition(": ")[2].partition("; ")
            yield Finding("data", name, what, how or "unset FEDCORE_DATA_DIR to have it downloaded")


def _build() -> Iterator[Finding]:
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    there = compiler is not None and shutil.which(compiler.split()[0]) is not None
    found = f"{compiler}" if there else f"not found: {compiler or ', '.join(COMPILERS)}"
    yield Finding("build", "a C++17 compiler", found, None if there else "install one, or set CXX; a wheel needs none")
    nvcc = shutil.which("nvcc")
    fix = None if nvcc else "put it on PATH; it is needed only for GPUs"
    yield Finding("build", "nvcc, for GPUs", nvcc or "not found", fix)


def _print_findings(found: list[Finding]) -> None:
    for purpose in dict.fromkeys(finding.purpose for finding in found):
        own = [finding for finding in found if finding.purpose == purpose]
        wrong = [finding for finding in own if finding.fix is not None]
        print(f"{purpose}: {f'{len(wrong)} of {len(own)} missing or wrong' if wrong else 'complete'}")
        for finding in own:
            print(f"  {'- ' if finding.fix else '  '}{finding.needs}: {finding.found}")
        for fix in dict.fromkeys(finding.fix for finding in wrong):
            print(f"    -> {fix}")
