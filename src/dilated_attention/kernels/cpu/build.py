"""Compile the CPU kernels into one library beside their sources: `python -m dilated_attention.kernels.cpu`.

hatch_build.py does the same when the package is installed. The library has a plain C interface, so one build serves
every version of Python and PyTorch. It contains code for every instruction set of its architecture; the best one that
the machine has is chosen at run time. Neither PyTorch nor its headers are needed. A cross-compiler builds for its
target: `CXX=aarch64-linux-gnu-g++ python -m dilated_attention.kernels.cpu`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "kernels.so"
COMMAND = f"{sys.executable} -m dilated_attention.kernels.cpu"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2.cpp": _AVX2,
        "avx512.cpp": _AVX512,
        "avx512_bf16.cpp": (*_AVX512, "-mavx512bf16"),
        "amx.cpp": (*_AVX512, "-mavx512bf16"),
        "estimates_avx2.cpp": _AVX2,
        "estimates_avx512.cpp": _AVX512,
    },
    "arm64": {
        "neon.cpp": (),
        "estimates_neon.cpp": (),
        "neon_bf16.cpp": ("-march=armv8.2-a+bf16",),
    },
}
"""For each architecture, the files that are compiled for one instruction set, with their compiler options."""

COMMON = ("choices.cpp", "transpose.cpp", "threads.cpp", "dispatch.cpp")
# GCC warns of its own intrinsics: uninitialised on purpose. Products and sums are contracted where the sources say so,
# not where a compiler likes to: so GCC's and Clang's libraries compute the same bits.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra",
    "-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-uninitialized",
)  # fmt: skip
_STATIC = ("-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-pthread", "-ldl")
_MACOS = "-mmacosx-version-min=11.0"
SERVED: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...], str]] = {
    ("linux", "x86_64"): ((), _STATIC, "linux_x86_64"),
    ("linux", "arm64"): ((), _STATIC, "linux_aarch64"),
    ("darwin", "arm64"): ((_MACOS,), ("-shared", _MACOS), "macosx_11_0_arm64"),
}
"""For each supported operating system and architecture: compiler options of all files, linker options, and the platform
name of a wheel.

A Linux machine's libstdc++ may be older than the compiler's, so the library contains it, and does not export it.
"""


class BuildError(RuntimeError):
    """Report that the kernels could not be compiled."""


def compiler() -> list[str]:
    """Return the command $CXX if it is set, else the first of c++, g++ and clang++ on the path; empty if not found."""
    named = shlex.split(os.environ.get("CXX", ""))
    commands = [["c++"], ["g++"], ["clang++"]]
    if named:
        commands = [named]
    return next((command for command in commands if shutil.which(command[0])), [])


def machine() -> str:
    """Return this machine's architecture by its name in SERVED, such as "arm64" for aarch64."""
    name = platform.machine().lower()
    return {"aarch64": "arm64", "amd64": "x86_64"}.get(name, name)


def target() -> tuple[str, str]:
    """Return the operating system and architecture that the compiler builds for; without a compiler, this machine's."""
    name = f"{machine()}-{platform.system()}"
    command = compiler()
    if command:
        reported = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True).stdout.strip()
        if reported:
            name = reported

    architecture, *rest = name.lower().replace("macos", "darwin").split("-")
    if architecture == "aarch64":
        architecture = "arm64"
    for system in ("linux", "darwin"):
        if any(word.startswith(system) for word in rest):
            return system, architecture
    return "-".join(rest), architecture


def refusal() -> str | None:
    """Return why the kernels cannot be compiled here, and what would help; None if they can."""
    if target() not in SERVED:
        system, architecture = target()
        return f"they serve Linux on x86-64 and arm64, and macOS on arm64, not {system} on {architecture}"
    if not compiler():
        named = ""
        if os.environ.get("CXX"):
            named = f" (CXX={os.environ['CXX']})"
        return f"no C++ compiler was found{named}; install g++ or clang++, or name one in CXX, and run {COMMAND}"
    return None


def digest() -> str:
    """Return a digest of the sources and of the compiler options. A library contains the digest of what it was built
    from."""
    sources = sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)))
    return hashlib.sha256(b"\0".join([path.read_bytes() for path in sources])).hexdigest()


def outdated() -> bool:
    """Return whether the library is missing or was built from other sources."""
    return not LIBRARY.exists() or digest().encode() not in LIBRARY.read_bytes()


def load() -> ctypes.CDLL | str:
    """Load the library that `build` compiled. If it is missing, unreadable or outdated, say so and what would help."""
    if not LIBRARY.exists():
        why = refusal()
        if why is None:
            why = f"run {COMMAND}"
        return f"the kernels are not compiled: {why}"

    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:  # of another system
        return f"the compiled kernels cannot be loaded ({error}); run {COMMAND}"
    if outdated():
        return f"the compiled kernels are of another version; run {COMMAND}"
    return library


@cache
def loaded() -> ctypes.CDLL | None:
    """Load the compiled library, once per process, and return it; return None where `load` says why there is none."""
    found = load()
    if isinstance(found, str):
        return None
    return found


def build() -> Path:
    """Compile the library. It replaces an older one in a single step, so that no process reads a half-written file.

    Raises:
        BuildError: there is no compiler, or it failed, with its message; or the folder cannot be written.
    """
    why = refusal()
    if why is not None:
        raise BuildError(f"the CPU kernels cannot be compiled: {why}")
    if not os.access(HERE, os.W_OK):
        raise BuildError(f"the CPU kernels cannot be compiled: {HERE} cannot be written; ask its owner")

    options, link, _ = SERVED[target()]
    sources = {**SOURCES[target()[1]], **dict.fromkeys(COMMON, ())}
    flags = (*FLAGS, *options, f'-DSOURCES_DIGEST="{digest()}"')
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        objects = {source: f"{folder}/{source}.o" for source in sources}

        def compile_one(source: str) -> None:
            run_compiler(*flags, *sources[source], "-c", str(HERE / source), "-o", objects[source])

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, sources))
        made = f"{folder}/{LIBRARY.name}"
        run_compiler(*objects.values(), *link, "-o", made)
        os.replace(made, LIBRARY)
    return LIBRARY


def run_compiler(*arguments: str) -> None:
    """Run the compiler. Raises BuildError with the compiler's message if it fails."""
    found = compiler()
    if not found:
        found = ["c++"]
    command = [*found, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
