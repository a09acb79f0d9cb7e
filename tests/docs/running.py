"""Run the blocks of a page in order, in one process and one folder, as a reader would.

Commands of ``fedcore`` and programs run in this process. Experiments are shortened to two rounds of one seed, and only
the quickstart and the page's own files run; other presets are loaded with the options of the command.
"""

import contextlib
import io
import re
import runpy
import shlex
import sys
import tomllib

from fedcore import algorithms
from fedcore.cli import app
from fedcore.sim import data, participation
from fedcore.sim.experiment import load_preset
from tests.cli.command import invoke
from tests.docs.pages import ROOT, blocks

SHORT = (("--rounds", "2"), ("--seeds", "1"), ("--workers", "0"))


@contextlib.contextmanager
def restored_registries(*files):
    """Remove the entries and modules that a page or a tutorial adds to registries and to ``sys.modules``."""
    registries = (algorithms.REGISTRY, data.REGISTRY, participation.REGISTRY)
    before = [set(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, names in zip(registries, before, strict=True):
            for added in registry.keys() - names:
                dict.pop(registry, added)
        for file in files:
            sys.modules.pop(file.removesuffix(".py").replace("/", "."), None)


class Page:
    """A page to run.

    Attributes:
        used: the files of the page that a command or another block has used.
    """

    def __init__(self, path, monkeypatch):
        self.path, self.monkeypatch, self.names = path, monkeypatch, {"__name__": "page"}
        self.files = {block.file: block.text for block in blocks(path) if block.file and not block.reason}
        self.used = set()

    def run(self):
        """Run every block."""
        for name, text in self.files.items():
            with open(name, "w") as file:
                file.write(text)
        printed = ""
        for block in blocks(self.path):
            if block.reason is not None or block.included:
                continue
            if block.language == "text" and block.follows:
                assert printed.strip() == block.text.strip(), f"actual output:\n{printed}"
            elif block.language == "python" and not block.file:
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(compile(block.text, f"{self.path.name}: {block.text[:60]!r}", "exec"), self.names)
                printed = output.getvalue()
                self._uses(block.text)
            elif block.language == "toml" and not block.file:
                tomllib.loads(block.text)
            elif block.language == "sh":
                printed = "".join(self.command(line) for line in lines(block.text))
        unused = self.files.keys() - self.used
        assert not unused, f"files that no command or block uses: {sorted(unused)}"

    def _uses(self, text):
        for name in self.files.keys() - self.used:
            module = name.removesuffix(".py").replace("/", ".")
            if name in text or re.search(rf"\b(import|from) {module}\b|\b{module}:\w", text):
                self.used.add(name)
                self._uses(self.files[name])

    def command(self, line):
        """Run or check one command and return its output."""
        self._uses(line)
        tool, *words = shlex.split(line, comments=True)
        if tool == "pip":
            return self._pip(words)
        if tool == "make":
            rules = (ROOT / "Makefile").read_text()
            missing = [word for word in words if "=" not in word and not re.search(rf"^{word}:", rules, re.MULTILINE)]
            assert not missing, f"{line}: the Makefile has no {missing}"
            return ""
        if tool == "python" and words[0] != "-m":
            with contextlib.redirect_stdout(io.StringIO()) as output, self.monkeypatch.context() as patched:
                patched.setattr(sys, "argv", words)
                runpy.run_path(words[0], run_name="__main__")
            return output.getvalue()
        assert tool == "fedcore", f"{line}: unknown command; mark the block as not run, with a reason"
        return self._fedcore(line, words)

    def _pip(self, words):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert words[0] == "install"
        for word in words[1:]:
            name, _, extras = word.rstrip("]").partition("[")
            assert name in (".", project["name"]) or not extras or name in ("flwr",), word
            if name in (".", project["name"]) and extras:
                missing = set(extras.split(",")) - project["optional-dependencies"].keys()
                assert not missing, f"{word}: pyproject.toml has no extra {missing}"
        return ""

    def _fedcore(self, line, words):
        words = [each for word in words for each in expanded(word)]
        asked = vars(app.parser().parse_args(words))
        if words[0] == "run" and not asked["resume"] and not asked["best"]:
            presets = asked["presets"]
            if asked["backend"] != "local" or not set(presets) <= {"quickstart", *self.files}:
                for name in presets:
                    load_preset(name, asked["changes"], scale=asked["scale"])
                return ""
            words += [word for pair in SHORT if pair[0] not in words for word in pair]
        elif words[0] == "run":  # goes on with one more round or seed
            more = {"--rounds": "3", "--seeds": "2"}
            words = [more.get(before, word) for before, word in zip(["", *words], words, strict=False)] + [*SHORT[-1]]
        done = invoke(*words)
        # The doctor exits with status 1 if a requested package is missing.
        assert done.status in ((0, 1) if words[0] == "doctor" else (0,)), f"{line}\n{done.output}\n{done.errors}"
        return done.output


def lines(text):
    """Return the commands of a block without comments."""
    joined = text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def expanded(word):
    """Expand {a,b} in a word as a shell does."""
    found = re.fullmatch(r"([^{}='\"]*)\{([^{}'\"]*,[^{}'\"]*)\}([^{}='\"]*)", word)
    return [found[1] + each + found[3] for each in found[2].split(",")] if found else [word]
