"""The tutorials: notebooks of docs/tutorials/*.py, executed, as pages of the site: hooks of mkdocs.

A page has the notebook's words, code, outputs and pictures, and the notebook to be downloaded. What was executed lies
in build/tutorials, and is executed again when its source is newer; `make docs` begins anew.
"""

from pathlib import Path

import jupytext
from jupyter_client.manager import KernelManager
from mkdocs.structure.files import File
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "docs" / "tutorials"
MADE = ROOT / "build" / "tutorials"
SECONDS = 600  # of a cell, on a busy machine


def execute(source):
    """Execute a tutorial; an error in a cell is an error here."""
    notebook = jupytext.read(source)
    kernel = KernelManager(kernel_name="python3", transport="ipc")  # no ports
    try:
        NotebookClient(notebook, km=kernel, timeout=SECONDS).execute(cwd=str(ROOT))
    finally:
        kernel.shutdown_kernel(now=True)
    name, folder = source.stem, MADE / source.stem
    folder.mkdir(parents=True, exist_ok=True)
    resources = {"unique_key": name, "output_files_dir": "."}
    text, resources = MarkdownExporter().from_notebook_node(notebook, resources=resources)
    for file, content in resources["outputs"].items():
        (folder / file).write_bytes(content)
    jupytext.write(notebook, folder / f"{name}.ipynb", fmt="ipynb")
    links = f"[Notebook]({name}.ipynb){{ download }} · [program]({name}.py){{ download }}"
    title, words = text.lstrip().split("\n", 1)
    words = words.replace("![png](./", "![What the code above draws](")
    (folder / f"{name}.md").write_text(f"{title}\n\n{links}\n{words}")


def on_files(files, config):
    """Add the pages, their pictures and the notebooks."""
    for source in sorted(SOURCES.glob("*.py")):
        page = MADE / source.stem / f"{source.stem}.md"
        if not page.exists() or page.stat().st_mtime < source.stat().st_mtime:
            execute(source)
        for made in sorted(page.parent.iterdir()):
            files.append(File.generated(config, f"tutorials/{made.name}", abs_src_path=str(made)))
    return files
