"""A real file system on a disk that fails on request, and that can be copied as after a loss of power."""

import os
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.store.disks import SIZES

SOURCE = Path(__file__).with_name("failing_disk.c")
MAKING = {"ext4": ["-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0"], "xfs": [], "btrfs": []}
MOUNTING = {"xfs": ["-o", "nouuid"]}  # a copy of one that was mounted has the same id


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def built(folder):
    """The program that is the disk; the test is skipped where it cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount disks")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("this system has no /dev/fuse")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    program = folder / "failing_disk"
    output = subprocess.run([compiler, "-O1", SOURCE, "-o", program], capture_output=True, text=True)
    if "linux/fuse.h: No such file" in output.stderr:
        pytest.skip("the compiler has no linux/fuse.h")
    assert output.returncode == 0, output.stderr
    return program


class Disk:
    """A mounted disk.

    Attributes:
        folder: where its file system is mounted.
    """

    def __init__(self, control, folder):
        self._control, self.folder = control, folder

    def tell(self, command):
        fd = os.open(self._control, os.O_WRONLY)
        try:
            os.write(fd, f"{command}\n".encode())
        finally:
            os.close(fd)

    def dump(self, path):
        """The image that a loss of power leaves now."""
        self.tell(f"dump {path}")
        return path

    def record(self, log, base):
        """Record the present content of the disk, and all writes and flushes from now on."""
        run("sync", "--file-system", self.folder)
        self.tell(f"record {log} {base}")

    def writes(self, path):
        """The number of writes."""
        self.tell(f"count {path}")
        return int(path.read_text())


@contextmanager
def failing_disk(program, kind, place, image=None):
    """A disk with a file system of this kind, new or from an image; it is removed afterwards."""
    make = shutil.which(f"mkfs.{kind}")
    if make is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    fuse, folder = place / "fuse", place / "disk"
    fuse.mkdir(parents=True)
    folder.mkdir()
    with ExitStack() as ends:
        process = subprocess.Popen([program, fuse, str(SIZES[kind] >> 20), *([image] if image else [])])
        ends.callback(process.wait)
        ends.callback(process.kill)
        ends.callback(lambda: subprocess.run(["umount", "--lazy", fuse], capture_output=True))
        deadline = time.monotonic() + 20
        while not (fuse / "disk").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip("this system mounts no FUSE file system")
            time.sleep(0.01)
        output = subprocess.run(["losetup", "-f", "--show", fuse / "disk"], capture_output=True, text=True)
        if output.returncode:
            pytest.skip(f"this system has no loop device: {output.stderr.strip()}")
        device = output.stdout.strip()
        ends.callback(lambda: subprocess.run(["losetup", "-d", device], capture_output=True))
        if image is None:
            run(make, "-q", *MAKING[kind], device)
        output = subprocess.run(["mount", *MOUNTING.get(kind, []), device, folder], capture_output=True, text=True)
        if output.returncode:
            pytest.skip(f"this system mounts no {kind}: {output.stderr.strip()}")
        ends.callback(lambda: subprocess.run(["umount", "--lazy", folder], capture_output=True))
        yield Disk(fuse / "control", folder)
