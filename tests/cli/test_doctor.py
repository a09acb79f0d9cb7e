"""``fedcore doctor`` reports missing packages, devices and data."""

import json
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import fedcore
from fedcore.arrays import core
from fedcore.cli import doctor
from tests.cli.command import assert_rejected, invoke, spawn
from tests.devices import fake_driver

PROJECT = Path(fedcore.errors.__file__).parent.parent / "pyproject.toml"


def findings(*names, status=0):
    done = invoke("doctor", *names, "--json")
    assert done.status == status, done.errors
    return {(one["purpose"], one["needs"]): one for one in json.loads(done.output)["findings"]}


def test_extras_have_all_their_packages():
    declared = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    checked = doctor.extras()
    assert checked.keys() <= declared.keys()
    assert {"sim", "ray", "flower", "nvflare", "pfl", "fedlab", "appfl"} <= checked.keys()
    assert "dev" not in checked
    assert checked["sim"].keys() == {"torch", *(doctor.NAME.match(one)[0] for one in declared["sim"][1:])}
    assert checked["torch"] == {"torch": ">=2.2"}


def test_core():
    checked = findings("core", status=int(fedcore.isa() != core.best_isa()))
    assert checked["core", "kernels"]["fix"] is None
    assert checked["core", "numpy >=1.26"]["found"] == np.__version__


def test_missing_package(monkeypatch):
    def version(package):
        if package == "scipy":
            raise metadata.PackageNotFoundError(package)
        return real(package)

    real = doctor.version
    monkeypatch.setattr(doctor, "version", version)
    checked = findings("sim", status=1)
    missing = {needs: one for (_, needs), one in checked.items() if one["fix"] is not None}
    (one,) = missing.values()
    assert (one["needs"], one["found"]) == ("scipy >=1.11", "not installed")
    assert one["fix"] == "pip install 'fedcore-fl[sim]'"
    result = invoke("doctor", "sim")
    assert "  - scipy >=1.11: not installed\n" in result.output
    assert "    -> pip install 'fedcore-fl[sim]'\n" in result.output
    assert result.status == 1


def test_version_out_of_bounds(monkeypatch):
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda package: "2.7.1" if package == "nvflare" else real(package))
    [checked] = [one for one in findings("nvflare", status=1).values() if one["fix"] is not None]
    assert (checked["found"], checked["fix"]) == ("2.7.1", "pip install 'nvflare<2.10,>=2.9'")


@pytest.mark.parametrize(
    ("torch", "torchvision", "fix"),
    [
        ("2.13.0+cpu", "0.28.0", "torchvision --index-url https://download.pytorch.org/whl/cpu"),
        ("2.13.0", "0.28.0+cpu", "--force-reinstall --no-deps torchvision"),
        ("2.13.0+cpu", "0.28.0+cpu", None),
        ("2.13.0", "0.28.0", None),
    ],
)
def test_torchvision_of_another_build(monkeypatch, torch, torchvision, fix):
    """Its version fits, but it cannot be imported with the other build of torch."""
    real, given = doctor.version, {"torch": torch, "torchvision": torchvision, "fedlab": "1.3.0"}
    monkeypatch.setattr(doctor, "version", lambda package: given.get(package) or real(package))
    one = findings("fedlab", status=int(fix is not None))["fedlab", "torchvision of the same build as torch"]
    assert one["found"] == f"{torchvision} with torch {torch}"
    assert (one["fix"] or "").endswith(fix or "")
    assert (one["fix"] is None) == (fix is None)


def test_only_named_packages_are_required(monkeypatch):
    def version(package):
        if package == "numpy":
            return real(package)
        raise metadata.PackageNotFoundError(package)

    real = doctor.version
    monkeypatch.setattr(doctor, "version", version)
    assert "fedcore-fl[flower]" in invoke("doctor").output
    assert invoke("doctor").status == int(fedcore.isa() != core.best_isa())
    assert invoke("doctor", "flower").status == 1


def test_kernel_with_wrong_bits(monkeypatch):
    monkeypatch.setattr(doctor, "weighted_sum", lambda rows, weights: np.float32(weights @ np.array(rows)))
    assert "wrong bits" in findings("core", status=1)["core", "kernels"]["found"]


def test_missing_data(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    one = findings("data", status=1)["data", "mnist"]
    assert one["found"].startswith("expected train-images-idx3-ubyte.gz, ")
    assert "unset FEDCORE_DATA_DIR" in one["fix"]
    monkeypatch.delenv("FEDCORE_DATA_DIR")
    monkeypatch.setattr(doctor.data, "find", None)  # the check downloads nothing
    assert findings("data")["data", "mnist"]["found"] == "downloaded on first use"


def test_missing_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    one = findings("build", status=1)["build", "a C++17 compiler"]
    assert one["found"] == "not found: c++, g++, clang++"


@pytest.mark.parametrize("variable", ["FEDCORE_ISA=baseline", "FEDCORE_THREADS=many"])
def test_problem_of_a_variable(variable):
    name, _, value = variable.partition("=")
    done = spawn("doctor", "core", **{name: value})
    assert done.returncode == 1
    assert f"-> unset {name}" in done.stdout


def test_devices(monkeypatch):
    done = spawn("doctor", **fake_driver.environment())
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("cuda:")]
    assert lines == [[f"cuda:{n}", "emulated GPU, 9.0, 8.0 GiB"] for n in range(fake_driver.DEVICES)]
    assert "device: emulated GPU" in done.stdout
    monkeypatch.setattr(doctor.cuda, "reason", lambda: None)
    monkeypatch.setattr(doctor.cuda, "devices", list)
    assert invoke("doctor", "gpu").status == 0


def test_missing_driver(monkeypatch):
    done = spawn("doctor", FEDCORE_CUDA_DRIVER="/nowhere/libcuda.so.1")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("cuda "))
    assert "none: " in line
    assert "/nowhere/libcuda.so.1" in line
    monkeypatch.setattr(doctor.cuda, "reason", lambda: "no driver")
    assert invoke("doctor", "gpu").status == 1


def test_unknown_purpose():
    assert_rejected(invoke("doctor", "flowr"), "did you mean 'flower'?")
