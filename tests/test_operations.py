"""The commands of docs/operations.md, run in order in one folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedcore
from fedcore.server.folder import read_model
from tests.cli.command import invoke

PAGE = Path(fedcore.errors.__file__).parent.parent / "docs" / "operations.md"


def blocks():
    return re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def sections():
    """Each section's programs and commands, by its heading."""
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE):
        heading = part.partition("\n")[0]
        yield heading, re.findall(r"^```(\w+)\n(.*?)^```", part, re.DOTALL | re.MULTILINE)


def test_every_block_is_a_program_or_commands():
    for language, text in blocks():
        assert language == "sh" or re.match(r"# \w+\.py\n", text), text


def test_the_programs_and_commands_in_one_process(tmp_path, monkeypatch, capsys):
    """The short form: one round instead of many, no kill, and no pipes."""
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    monkeypatch.chdir(tmp_path)
    programs = {text.partition("\n")[0].removeprefix("# "): text for language, text in blocks() if language == "python"}
    done = []
    for language, text in blocks():
        for tool, words in re.findall(r"\b(python|fedcore) ([^|>;&\n]+)", text) if language == "sh" else ():
            arguments = [{"$client": "495"}.get(word, word) for word in shlex.split(words)]
            if tool == "python":
                with monkeypatch.context() as patched:
                    patched.setattr(sys, "argv", [arguments[0], *("1" for _ in arguments[1:])])
                    exec(compile(programs[arguments[0]], arguments[0], "exec"), {"__name__": "__main__"})
            else:
                result = invoke(*arguments)
                # Client 3 may not have sent an update yet.
                may_fail = arguments[0] == "doctor" or arguments == ["store", "remove-client", "state", "3"]
                assert result.status == 0 or may_fail, (words, result)
            done.append(f"{tool} {words.strip()}")
    assert {line.split()[1] for line in done if line.startswith("python")} == programs.keys()
    assert len(done) > 18
    printed = capsys.readouterr().out
    assert "round 0: accepted " in printed
    assert 'fedcore_round_clients_accepted{server="mine"} 1.0' in printed
    assert set(map(str, range(490, 500))) <= set(printed.splitlines())
    assert dict(np.load("model.npz"))["w"].shape == (100, 20)
    assert read_model("backup").round_number > 1


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The output of the commands of each section, run in one folder until one fails."""
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    folder = tmp_path_factory.mktemp("operations")
    shim = folder / "bin"
    shim.mkdir()
    for name, words in (("python", ""), ("fedcore", "-m fedcore ")):
        (shim / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (shim / name).chmod(0o755)
    root = str(PAGE.parent.parent)
    env = os.environ | {"PATH": f"{shim}:{os.environ['PATH']}", "PYTHONPATH": root}
    outputs = {"folder": folder}
    for heading, section in sections():
        output = ""
        for language, text in section:
            if language == "python":
                (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)
                continue
            command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{heading}: {text}\n{done.stdout}\n{done.stderr}"
            output += done.stdout
        outputs[heading] = output
    return outputs


@pytest.mark.endurance
def test_each_section_prints_its_results(printed):
    from safetensors.numpy import load_file

    assert "round 19: accepted " in printed["Set up"]
    model = dict(np.load(printed["folder"] / "model.npz"))
    assert model["w"].shape == load_file(printed["folder"] / "model.safetensors")["w"].shape == (100, 20)
    assert np.isfinite(model["w"]).all()
    assert model["w"].any()
    assert printed["Back up a running server"].startswith("sound: ")
    assert read_model(printed["folder"] / "backup").round_number >= 21
    first, *rounds = [line for line in printed["After a kill"].splitlines() if not line.startswith("  ")]
    assert first.startswith("sound: ")
    assert [re.match(r"round \d+: accepted \d+", line) is not None for line in rounds] == [True, True]
    rejections = printed["Dishonest clients"]
    for line in (r"^  0: .*finite", r"^  1: .*median", r"^  2: "):
        assert re.search(line, rejections, re.MULTILINE)
    assert "rolled back " in rejections
    assert "3 removed after round " in rejections
    lines = printed["Inactive clients"].splitlines()
    assert set(map(str, range(490, 500))) <= set(lines)
    assert sum("removed after round" in line for line in lines) == 2
    assert re.search(r"^clients +497$", printed["Inactive clients"], re.MULTILINE)
    assert '"sound": true' in printed["A damaged folder"]
