"""What ``fedcore doctor`` says is missing is what was taken away."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import fedcore
from fedcore.cli import doctor
from fedcore.native import core
from tests.cli.command import invoke
from tests.devices import fake_driver

PROJECT = Path(fedcore.model.__file__).parent.parent / "pyproject.toml"


def found(*names, status=0):
    done = invoke("doctor", *names, "--json")
    assert done.status == status, done.errors
    return {(one["purpose"], one["needs"]): one for one in json.loads(done.output)["findings"]}


def test_every_extra_is_looked_after_with_all_that_it_needs():
    declared = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    looked = doctor.extras()
    assert looked.keys() <= declared.keys()
    assert {"sim", "ray", "flower", "nvflare", "pfl", "fedlab", "appfl"} <= looked.keys()
    assert "dev" not in looked
    assert looked["sim"].keys() == {"torch", *(doctor.NAME.match(one)[0] for one in declared["sim"][1:])}
    assert looked["torch"] == {"torch": ">=2.2"}


def test_the_core_is_well():
    looked = found("core", status=int(fedcore.isa() != core.best_isa()))
    assert looked["core", "kernels"]["fix"] is None
    assert looked["core", "numpy >=1.26"]["found"] == np.__version__


def test_a_package_that_is_not_there(monkeypatch):
    def version(package):
        if package == "scipy":
            raise metadata.PackageNotFoundError(package)
        return real(package)

    real = doctor.version
    monkeypatch.setattr(doctor, "version", version)
    looked = found("sim", status=1)
    missing = {needs: one for (_, needs), one in looked.items() if one["fix"] is not None}
    (one,) = missing.values()
    assert (one["needs"], one["found"]) == ("scipy >=1.11", "not installed")
    assert one["fix"] == "pip install 'fedcore-fl[sim]'"
    said = invoke("doctor", "sim")
    assert "  - scipy >=1.11: not installed\n" in said.output
    assert "    -> pip install 'fedcore-fl[sim]'\n" in said.output
    assert said.status == 1


def test_a_version_that_does_not_fit(monkeypatch):
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda package: "2.7.1" if package == "nvflare" else real(package))
    (looked,) = found("nvflare", status=1).values()
    assert (looked["found"], looked["fix"]) == ("2.7.1", "pip install 'nvflare<2.10,>=2.9'")


@pytest.mark.parametrize(
    ("torch", "torchvision", "fix"),
    [
        ("2.13.0+cpu", "0.28.0", "torchvision --index-url https://download.pytorch.org/whl/cpu"),
        ("2.13.0", "0.28.0+cpu", "--force-reinstall --no-deps torchvision"),
        ("2.13.0+cpu", "0.28.0+cpu", None),
        ("2.13.0", "0.28.0", None),
    ],
)
def test_torchvision_of_another_kind_than_torch(monkeypatch, torch, torchvision, fix):
    """It is installed, in a version that fits, and cannot be imported: torch lacks the operators of the other kind."""
    real, given = doctor.version, {"torch": torch, "torchvision": torchvision, "fedlab": "1.3.0"}
    monkeypatch.setattr(doctor, "version", lambda package: given.get(package) or real(package))
    one = found("fedlab", status=int(fix is not None))["fedlab", "torchvision of torch's kind"]
    assert one["found"] == f"{torchvision} beside torch {torch}"
    assert (one["fix"] or "").endswith(fix or "")
    assert (one["fix"] is None) == (fix is None)


def test_what_was_not_named_may_be_missing(monkeypatch):
    def version(package):
        if package == "numpy":
            return real(package)
        raise metadata.PackageNotFoundError(package)

    real = doctor.version
    monkeypatch.setattr(doctor, "version", version)
    assert "fedcore-fl[flower]" in invoke("doctor").output
    assert invoke("doctor").status == int(fedcore.isa() != core.best_isa())
    assert invoke("doctor", "flower").status == 1


def test_a_kernel_with_other_bits(monkeypatch):
    monkeypatch.setattr(doctor, "weighted_sum", lambda rows, weights: np.float32(weights @ np.array(rows)))
    assert "other bits" in found("core", status=1)["core", "kernels"]["found"]


def test_data_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    one = found("data", status=1)["data", "mnist"]
    assert one["found"].startswith("expected train-images-idx3-ubyte.gz, ")
    assert "unset FEDCORE_DATA_DIR to have it downloaded" in one["fix"]
    monkeypatch.delenv("FEDCORE_DATA_DIR")
    monkeypatch.setattr(doctor.data, "find", None)  # nothing is downloaded by looking
    assert found("data")["data", "mnist"]["found"] == "downloaded when it is first used"


def test_a_machine_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    one = found("build", status=1)["build", "a C++17 compiler"]
    assert one["found"] == "not found: c++, g++, clang++"


def test_a_level_that_is_forced():
    done = run("core", FEDCORE_ISA="baseline")
    assert done.returncode == 1
    assert "  - instruction set: baseline" in done.stdout
    assert "-> unset FEDCORE_ISA" in done.stdout


def test_a_number_of_threads_that_is_none():
    done = run("core", FEDCORE_THREADS="many")
    assert done.returncode == 1
    assert "-> unset FEDCORE_THREADS" in done.stdout


def test_a_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "fedcore", "doctor", "gpu"],
        env=fake_driver.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device: emulated GPU" in done.stdout
    done = run("gpu", FEDCORE_CUDA_DRIVER="/nowhere/libcuda.so.1")
    assert done.returncode == 1
    assert "/nowhere/libcuda.so.1" in done.stdout


def run(*names, **environment):
    command = [sys.executable, "-m", "fedcore", "doctor", *names]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_a_name_that_is_none():
    done = invoke("doctor", "flowr")
    assert done.status == 2
    assert "did you mean 'flower'?" in done.errors
