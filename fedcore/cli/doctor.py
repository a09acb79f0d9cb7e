"""``fedcore doctor``: checks of the installation, the packages, the devices and the data."""

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
from fedcore.arrays import core
from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser
from fedcore.errors import DISTRIBUTION, FedcoreError, UnknownNameError
from fedcore.kernels import weighted_sum
from fedcore.runtime import build_info, isa, threads
from fedcore.sim import data

EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Finding:
    """The result of checking one requirement.

    Attributes:
        purpose: "core", "gpu", "data", "build", or the name of an extra.
        needs: the requirement.
        found: the installed version, or the problem.
        fix: how to fix the problem; None without a problem.
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
    """Check the installation and list missing packages.

    Without a WHAT, all checks run. The exit status is 1 if the core is damaged or if a
    named WHAT is incomplete. Attach the output of --json to bug reports.

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
    """Return the checks by purpose: the core, the extras in the package's order, then gpu, data and build."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {"core": _core}
    checks |= {extra: partial(_packages, extra, needed) for extra, needed in extras().items()}
    return checks | {"gpu": _gpu, "data": _data, "build": _build}


def extras() -> dict[str, dict[str, str]]:
    """Return the packages of each extra with their version bounds, including the packages of nested extras."""
    own: dict[str, list[str]] = {}
    for line in declared_requirements():
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


def declared_requirements() -> list[str]:
    """Return the requirements of the package and its extras; empty if the package is not installed."""
    try:
        return requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []


def _parts(requirement: str) -> tuple[str, str]:
    name = NAME.match(requirement)
    assert name is not None
    return name[0], requirement[name.end() :].strip()


def _build_facts() -> dict[str, object]:
    try:
        return dict(build_info())
    except (RuntimeError, FedcoreError) as error:  # an invalid number of threads
        return {"error": str(error)}


def _core() -> Iterator[Finding]:
    for line in declared_requirements():
        if ";" not in line:
            name, bounds = _parts(line)
            yield _package("core", name, bounds, name)
    used, best = isa(), core.best_isa()
    fix = None if used == best else "unset FEDCORE_ISA; this machine supports a faster instruction set"
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
    found = "a test sum has the expected bits" if same else "a test sum has wrong bits"
    fix = f"reinstall {DISTRIBUTION}, and report the problem with the output of `fedcore doctor --json`"
    yield Finding("core", "kernels", found, None if same else fix)


def _packages(extra: str, needed: dict[str, str]) -> Iterator[Finding]:
    for package, bounds in needed.items():
        yield _package(extra, package, bounds, f"{DISTRIBUTION}[{extra}]")
    if extra == "fedlab":  # fedlab imports torchvision
        yield from _torchvision(extra)


def _torchvision(purpose: str) -> Iterator[Finding]:
    """Check that torch and torchvision have the same build; a GPU build of torchvision needs a GPU build of torch."""
    with suppress(PackageNotFoundError):
        torch, vision = version("torch"), version("torchvision")
        kind = torch.partition("+")[2]
        fits = kind == vision.partition("+")[2]
        index = f" --index-url https://download.pytorch.org/whl/{kind}" if kind else ""
        fix = None if fits else f"pip install --force-reinstall --no-deps torchvision{index}"
        yield Finding(purpose, "torchvision of the same build as torch", f"{vision} with torch {torch}", fix)


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
    fix = "install a wheel, or build with nvcc of CUDA 12.8 or later on PATH"
    yield Finding("gpu", "kernels", built or f"none: {core.cuda_missing}", None if built else fix)
    found = f"none: {missing}" if missing is not None else ", ".join(device.name for device in cuda.devices())
    fix = "install NVIDIA's driver if this machine has a GPU"
    yield Finding("gpu", "device", found, None if missing is None else fix)


def _data() -> Iterator[Finding]:
    folder = os.environ.get("FEDCORE_DATA_DIR")
    for name in data.REGISTRY.names():
        if data.REGISTRY.find(name).find is None:
            continue
        if not folder:
            downloads = find_spec("pooch") is not None
            found = "downloaded on first use" if downloads else "cannot be downloaded: pooch is not installed"
            fix = None if downloads else "set FEDCORE_DATA_DIR to a folder with the data, or install pooch"
            yield Finding("data", name, found, fix)
            continue
        try:
            data.find(name)
            yield Finding("data", name, f"in FEDCORE_DATA_DIR, {folder}")
        except FedcoreError as error:
            problem, _, fix = str(error).partition(": ")[2].partition("; ")
            yield Finding("data", name, problem, fix or "unset FEDCORE_DATA_DIR to download the data")


def _build() -> Iterator[Finding]:
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    exists = compiler is not None and shutil.which(compiler.split()[0]) is not None
    found = f"{compiler}" if exists else f"not found: {compiler or ', '.join(COMPILERS)}"
    yield Finding("build", "a C++17 compiler", found, None if exists else "install a compiler, set CXX, or use a wheel")
    nvcc = shutil.which("nvcc")
    fix = None if nvcc else "add it to PATH to build for GPUs"
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
