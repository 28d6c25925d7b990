"""Compiles the CPU kernels into one library beside their sources: `python -m dilated_attention.kernels.cpu`.

hatch_build.py does the same when the package is installed. The library has a plain C interface, so that one build
serves every version of Python and PyTorch, and code for every instruction set, of which the machine's is chosen at run
time. Neither PyTorch nor its headers are needed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "kernels.so"
COMMAND = f"{sys.executable} -m dilated_attention.kernels.cpu"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
SOURCES = {
    "avx2.cpp": _AVX2,
    "avx512.cpp": _AVX512,
    "avx512_bf16.cpp": (*_AVX512, "-mavx512bf16"),
    "amx.cpp": (*_AVX512, "-mavx512bf16"),
    "estimates_avx2.cpp": _AVX2,
    "estimates_avx512.cpp": _AVX512,
    "estimates_avx512_bf16.cpp": (*_AVX512, "-mavx512bf16"),
    "transpose.cpp": (),
    "threads.cpp": (),
    "dispatch.cpp": (),
}
# GCC warns of its own intrinsics: uninitialised on purpose.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
# A machine's own libstdc++ may be older than the compiler's.
LINK = ("-shared", "-static-libstdc++", "-static-libgcc", "-pthread", "-ldl")


class BuildError(RuntimeError):
    """The kernels could not be compiled."""


def compiler() -> str | None:
    """$CXX, or the first of c++, g++ and clang++ on the path."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def refusal() -> str | None:
    """Why the kernels cannot be compiled here, and what would help; None if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"they are written for Linux on x86-64, not {platform.system()} on {platform.machine()}"
    if compiler() is None:
        return f"no C++ compiler was found; install g++ or clang++, or name one in CXX, and run {COMMAND}"
    return None


def digest() -> str:
    """Of the sources and of how they are compiled. A library holds that of its own."""
    sources = sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)))
    return hashlib.sha256(b"\0".join([path.read_bytes() for path in sources])).hexdigest()


def outdated() -> bool:
    """Whether the library is missing or of other sources."""
    return not LIBRARY.exists() or digest().encode() not in LIBRARY.read_bytes()


def build() -> Path:
    """Compile the library. It takes the place of an older one at once, so that no process meets half of it.

    Raises:
        BuildError: there is no compiler, or it failed, with its message; or the folder cannot be written.
    """
    if why := refusal():
        raise BuildError(f"the CPU kernels cannot be compiled: {why}")
    if not os.access(HERE, os.W_OK):
        raise BuildError(f"the CPU kernels cannot be compiled: {HERE} cannot be written; ask its owner")
    flags = (*FLAGS, f'-DSOURCES_DIGEST="{digest()}"')
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        objects = {source: f"{folder}/{source}.o" for source in SOURCES}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda x: run_compiler(*flags, *SOURCES[x], "-c", str(HERE / x), "-o", objects[x]), SOURCES))
        made = f"{folder}/{LIBRARY.name}"
        run_compiler(*objects.values(), *LINK, "-o", made)
        os.replace(made, LIBRARY)
    return LIBRARY


def run_compiler(*arguments: str) -> None:
    """Raises BuildError with the compiler's message."""
    command = [compiler() or "c++", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
