"""A SuperLink and SuperNodes as processes on loopback, with TLS and registered SuperNode keys."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BIN = Path(sys.executable).parent
LOOPBACK = ["unshare", "-n", "bash", "-c", 'ip link set lo up; exec "$@"', "_"]
if os.geteuid() or not which("unshare") or not which("ip"):
    LOOPBACK = []
"""The start of a command that runs in a network namespace with only loopback, which root can make."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, seconds, name):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{name}: waited {seconds} s")
        time.sleep(0.05)


class Deployment:
    """A context manager; ``home`` is an empty folder for keys, logs and Flower's own files."""

    def __init__(self, home):
        self.home, self.port, self.processes = Path(home), free_port(), []
        offline = ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION")
        self.env = {**os.environ, **dict.fromkeys(offline, "1"), "FLWR_TELEMETRY_ENABLED": "0"}
        self.env |= {"FLWR_HOME": str(self.home / "flwr"), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}
        self.env |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def __enter__(self):
        (self.home / "flwr").mkdir()
        self._make_certificates()
        root = self.home / "ca.crt"
        (self.home / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "lo"\n[superlink.lo]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{root}"\n'
        )
        keys = ["--ssl-ca-certfile", root, "--ssl-certfile", self.home / "s.crt", "--ssl-keyfile", self.home / "s.key"]
        place = ["--host", "127.0.0.1", "--port", self.port]
        self.start("superlink", [BIN / "flower-superlink", *keys, "--enable-supernode-auth", *place])
        wait_for(self._listens, 60, "SuperLink")
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            self._signal(process, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                self._signal(process, signal.SIGKILL)
                process.wait()

    def start(self, name, command):
        with (self.home / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                list(map(str, command)), env=self.env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def start_node(self, number):
        """Register a key for a SuperNode, and start it."""
        key = self.home / f"node{number}"
        self._run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key)
        self._run("flwr", "supernode", "register", f"{key}.pub")
        how = ["--superlink", f"127.0.0.1:{self.port}", "--port", free_port()]
        how += ["--root-certificates", self.home / "ca.crt"]
        how += ["--auth-supernode-private-key", key, "--node-config", f"partition-id={number}"]
        return self.start(f"node{number}", [sys.executable, "-m", "tests.adapters.wire.fastnode", *how])

    def start_run(self, name, app, **config):
        """Start ``flwr run``, whose run continues by itself after its submission."""
        options = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        return self.start(name, [BIN / "flwr", "run", app, "--run-config", options, "--stream"])

    def kill(self, process):
        """kill -9 of a process and its children."""
        self._signal(process, signal.SIGKILL)
        process.wait()

    def _signal(self, process, number):
        if process.poll() is None:
            os.killpg(process.pid, number)

    def _listens(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _run(self, *command):
        done = subprocess.run(list(map(str, command)), env=self.env, cwd=self.home, capture_output=True, timeout=60)
        assert done.returncode == 0, (command, done.stdout[-500:], done.stderr[-500:])

    def _make_certificates(self):
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        self._run(
            "openssl", "req", "-x509", *curve, "-days", 2, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca"
        )
        self._run("openssl", "req", *curve, "-keyout", "s.key", "-out", "s.csr", "-subj", "/CN=localhost")
        (self.home / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        sign = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", 2, "-extfile", "names"]
        self._run("openssl", "x509", "-req", "-in", "s.csr", *sign, "-out", "s.crt")
