"""``fedcore doctor``: what is there for what, what is missing, and the way out."""

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

from fedcore import cuda, data
from fedcore.cli.pairs import show_json
from fedcore.cli.status import FAILED
from fedcore.errors import DISTRIBUTION, FedcoreError, UnknownNameError
from fedcore.kernels import reference, weighted_sum
from fedcore.native import core
from fedcore.runtime import isa, threads

NOT_FOR_USERS = {"dev"}
"""Extras for whoever works on fedcore itself."""
EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Finding:
    """One thing that something needs.

    Attributes:
        purpose: what needs it: "core", "gpu", "data", "build", or an extra.
        needs: what that is.
        found: what is there, or what is the matter.
        way_out: what to do; None where all is well.
    """

    purpose: str
    needs: str
    found: str
    way_out: str | None = None


def doctor(names: list[str], as_json: bool) -> None:
    """Say what is missing for what; ``names`` are the purposes to look at, none for all."""
    looks = looks_by_purpose()
    for name in names:
        if name not in looks:
            raise UnknownNameError.of("WHAT", name, looks)
    found = [finding for name in names or looks for finding in looks[name]()]
    if as_json:
        show_json([asdict(finding) for finding in found])
    else:
        _show(found)
    due = set(names) or {"core"}
    if any(finding.way_out is not None and finding.purpose in due for finding in found):
        sys.exit(FAILED)


def looks_by_purpose() -> dict[str, Callable[[], Iterator[Finding]]]:
    """The look at each purpose: the core first, then the extras as the package declares them."""
    looks: dict[str, Callable[[], Iterator[Finding]]] = {"core": _core}
    for extra, needed in extras().items():
        looks[extra] = partial(_packages, extra, needed)
    return looks | {"gpu": _gpu, "data": _data, "build": _build}


def extras() -> dict[str, dict[str, str]]:
    """The packages of each extra, those of extras that it is made of included, each with its bounds."""
    own: dict[str, list[str]] = {}
    for line in declared():
        requirement, _, marker = line.partition(";")
        if hit := EXTRA.search(marker):
            own.setdefault(hit[1], []).append(requirement.strip())

    def spread(extra: str) -> Iterator[tuple[str, str]]:
        for requirement in own[extra]:
            name = NAME.match(requirement)
            assert name is not None
            rest = requirement[name.end() :].strip()
            if name[0] == DISTRIBUTION:
                for inner in rest.strip("[] ").split(","):
                    yield from spread(inner.strip())
            else:
                yield name[0], rest

    return {extra: dict(spread(extra)) for extra in own if extra not in NOT_FOR_USERS}


def declared() -> list[str]:
    """The requirements of the package, its extras' too; none where it is not installed but found on a path."""
    try:
        return requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []


def _core() -> Iterator[Finding]:
    for line in declared():
        if ";" not in line and (name := NAME.match(line)):
            yield _package("core", name[0], line[name.end() :].strip(), name[0])
    used, best = isa(), core.best_isa()
    way_out = None if used == best else "unset FEDCORE_ISA: this machine has a faster level"
    if used == "reference":
        way_out = "unset FEDCORE_ISA: the NumPy twins are for tests, and many times slower"
    yield Finding("core", "instruction set", f"{used}, of {best}" if used != best else used, way_out)
    try:
        yield Finding("core", "threads", str(threads()))
    except (RuntimeError, FedcoreError) as error:
        yield Finding("core", "threads", str(error), "unset FEDCORE_THREADS, or set it to a number in 1..4096")
        return
    rows, weights = (
        np.random.default_rng(0).normal(size=(5, 10_007)).astype(np.float32),
        np.arange(1, 6) / np.float32(7),
    )
    due = np.empty(10_007, np.float32)
    reference.weighted_sum(list(rows), weights.astype(np.float32), due, float64=False)
    same = weighted_sum(list(rows), weights.astype(np.float32)).tobytes() == due.tobytes()
    yield Finding(
        "core",
        "kernels",
        "a sum has the bits of its definition" if same else "a sum has other bits than its definition",
        None if same else f"install {DISTRIBUTION} again, and report it with what `fedcore info` says",
    )


def _packages(extra: str, needed: dict[str, str]) -> Iterator[Finding]:
    for package, bounds in needed.items():
        yield _package(extra, package, bounds, f"{DISTRIBUTION}[{extra}]")

    if extra == "fedlab":  # which imports torchvision
        yield from _torchvision(extra)


def _torchvision(purpose: str) -> Iterator[Finding]:
    """Look whether torchvision is of torch's kind: the one for GPUs cannot be imported beside torch's +cpu."""
    with suppress(PackageNotFoundError):
        torch, beside = version("torch"), version("torchvision")
        kind = torch.partition("+")[2]
        fits = kind == beside.partition("+")[2]
        index = f" --index-url https://download.pytorch.org/whl/{kind}" if kind else ""
        way_out = None if fits else f"pip install --force-reinstall --no-deps torchvision{index}"
        yield Finding(purpose, "torchvision of torch's kind", f"{beside} beside torch {torch}", way_out)


def _package(purpose: str, package: str, bounds: str, install: str) -> Finding:
    what = f"{package} {bounds}".strip()
    try:
        there = version(package)
    except PackageNotFoundError:
        return Finding(purpose, what, "not installed", f"pip install '{install}'")
    if find_spec("packaging") is not None:
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(bounds).contains(there, prereleases=True):
            return Finding(purpose, what, there, f"pip install '{package}{bounds}'")
    return Finding(purpose, what, there)


def _gpu() -> Iterator[Finding]:
    built = core.cuda_targets
    how = "build where an nvcc of CUDA 12.8 or later is on PATH, or install a wheel, which has them"
    yield Finding("gpu", "kernels", built or f"none: {core.cuda_missing}", None if built else how)
    reason = cuda.reason()
    if reason is None:
        yield Finding("gpu", "device", ", ".join(device.name for device in cuda.devices()))
    else:
        yield Finding(
            "gpu", "device", f"none: {reason}", "install NVIDIA's driver where there is a GPU; else none is needed"
        )


def _data() -> Iterator[Finding]:
    directory = os.environ.get("FEDCORE_DATA_DIR")
    for name in data.REGISTRY.names():
        if data.REGISTRY.find(name).find is None:
            continue
        if not directory:
            downloads = find_spec("pooch") is not None
            found = "downloaded when it is first used" if downloads else "not looked for: pooch is not installed"
            way_out = None if downloads else "set FEDCORE_DATA_DIR to a folder that has it, or install pooch"
            yield Finding("data", name, found, way_out)
            continue
        try:
            data.find(name)
            yield Finding("data", name, f"in FEDCORE_DATA_DIR, {directory}")
        except FedcoreError as error:
            what, _, how = str(error).partition(": ")[2].partition("; ")
            yield Finding("data", name, what, how or "unset FEDCORE_DATA_DIR to have it downloaded")


def _build() -> Iterator[Finding]:
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    there = compiler is not None and shutil.which(compiler.split()[0]) is not None
    found = f"{compiler}" if there else f"not found: {compiler or ', '.join(COMPILERS)}"
    yield Finding("build", "a C++17 compiler", found, None if there else "install one, or set CXX; a wheel needs none")
    nvcc = shutil.which("nvcc")
    yield Finding(
        "build", "nvcc, for GPUs", nvcc or "not found", None if nvcc else "needed for GPUs alone: put it on PATH"
    )


def _show(found: list[Finding]) -> None:
    for purpose in dict.fromkeys(finding.purpose for finding in found):
        own = [finding for finding in found if finding.purpose == purpose]
        missing = [finding for finding in own if finding.way_out is not None]
        print(f"{purpose}: {f'{len(missing)} of {len(own)} to see to' if missing else 'all there'}")
        for finding in own:
            print(f"  {'- ' if finding.way_out else '  '}{finding.needs}: {finding.found}")
        for way_out in dict.fromkeys(finding.way_out for finding in missing):
            print(f"    -> {way_out}")
