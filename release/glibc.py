"""An old C library to link against: what is linked with it runs on every Linux of since.

The compiler is this machine's, so that a wheel has the code that the tests and the benches have run. Only the linker is
given other libraries: those of ziglang, which hold each name of glibc with the version it had then, and the C++
library as archive.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

GLIBC = "2.28"
LIBRARIES = {"c": "libc.so.6", "m": "libm.so.6", "dl": "libdl.so.2", "pthread": "libpthread.so.0", "rt": "librt.so.1"}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}

# The headers of glibc 2.32 and later ask it whether the process has one thread, to count references without a lock.
# An older one does not say: no.
SINGLE_THREADED = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'


def libraries(machine: str, compiler: str, folder: Path) -> Path:
    """A folder of libraries to link against, made once.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        compiler: a C++ compiler for it.
        folder: where to make them.
    """
    made = folder / "lib"
    if (made / "libc.so").exists():
        return made
    shutil.rmtree(folder, ignore_errors=True)
    made.mkdir(parents=True)
    nothing = folder / "nothing.c"
    nothing.write_text("int nothing;\n")
    cache = folder / "cache"
    env = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}", "-O2", "-fno-sanitize=all"]
    subprocess.run([*zig, "-shared", "-o", folder / "nothing.so", nothing], env=env, check=True)
    (stubs,) = {found.parent for found in cache.glob("o/*/libc.so.6")}
    for name, file in LIBRARIES.items():
        shutil.copy(stubs / file, made / file)
        if name != "c":
            (made / f"lib{name}.so").symlink_to(file)
    shutil.copy(stubs / "libld.so.2", made / LOADERS[machine])
    (static,) = cache.glob("o/*/libc_nonshared.a")
    shutil.copy(static, made)
    single = folder / "single_threaded.c"
    single.write_text(SINGLE_THREADED)
    subprocess.run([compiler, "-x", "c", "-O2", "-fPIC", "-c", single, "-o", made / "single_threaded.o"], check=True)
    # As glibc's own libc.so is: a few functions are no part of the shared library. Since 2.34 the threads are, and a
    # compiler that finds them there does not ask for their library.
    needed = " ".join([LOADERS[machine], *(file for name, file in LIBRARIES.items() if name != "c")])
    files = f"libc.so.6 libc_nonshared.a single_threaded.o AS_NEEDED ( {needed} )"
    (made / "libc.so").write_text(f"GROUP ( {files} )\n")
    shutil.rmtree(cache)
    return made


def without_version(module: Path) -> list[str]:
    """Names that a module wants of others and the linker found nowhere; Python's own come from the interpreter."""
    listed = subprocess.run(["objdump", "-T", module], capture_output=True, text=True, check=True).stdout
    undefined = (line.split() for line in listed.splitlines() if "*UND*" in line and " w " not in line)
    return [
        name for *_, name in (line for line in undefined if "(" not in " ".join(line)) if not re.match("_?Py", name)
    ]
