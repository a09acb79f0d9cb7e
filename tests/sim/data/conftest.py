"""A simulated publisher of data sets."""

import threading
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


@dataclass
class Publisher:
    """A server on the loopback interface."""

    folder: Path
    address: str
    requests: list[str]
    cache: Path


@pytest.fixture
def publisher(tmp_path, monkeypatch):
    """Serve a folder, record the requested paths, and use an empty cache for downloads."""
    requests: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_):
            requests.append(self.path)

        def log_message(self, *_):
            pass

    folder = tmp_path / "published"
    folder.mkdir()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.delenv("FEDCORE_DATA_DIR", raising=False)
    yield Publisher(folder, f"http://127.0.0.1:{httpd.server_port}/", requests, tmp_path / "cache" / "fedcore")
    httpd.shutdown()
    httpd.server_close()
    thread.join()
