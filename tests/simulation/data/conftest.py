import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


@dataclass
class Publisher:
    """A loopback server in a publisher's place."""

    folder: Path
    address: str
    asked: list[str]
    cache: Path


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    """Serves a folder, notes the paths that are asked for, and gives downloads an empty cache."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            asked.append(self.path)

        def log_message(self, *_: object) -> None:
            pass

    folder = tmp_path / "published"
    folder.mkdir()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.delenv("FEDCORE_DATA_DIR", raising=False)
    yield Publisher(folder, f"http://127.0.0.1:{httpd.server_port}/", asked, tmp_path / "cache" / "fedcore")
    httpd.shutdown()
    httpd.server_close()
    thread.join()
